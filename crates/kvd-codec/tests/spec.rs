//! Spec texts: every codec's text reads back as that codec, and no text makes the parser panic.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use kvd_codec::{
    CodebookScope, CodecSpec, EntropyCoding, FloatFormat, GridSpec, GroupAxis, LloydSpec,
    PolarSpec, Quantizer, SideSpec, SpecOverride, Transform, UniformMode, UniformSpec, UniformStep,
    VqSpec, resolve_spec,
};
use kvd_core::Side;
use proptest::prelude::*;

fn quantizer() -> impl Strategy<Value = Quantizer> {
    use FloatFormat::{BF16, E4M3, F16, F32, Native};
    let float = prop::sample::select(vec![Native, F32, F16, BF16, E4M3]).prop_map(Quantizer::Float);
    let step = prop_oneof![
        (1u8..=8).prop_map(UniformStep::Bits),
        (0.004f32..=1.0).prop_map(UniformStep::Relative),
    ];
    let axis = prop::sample::select(vec![GroupAxis::Channel, GroupAxis::Token, GroupAxis::Block]);
    let group = proptest::option::of(1u16..);
    let mode = prop::sample::select(vec![UniformMode::Asym, UniformMode::Sym, UniformMode::Hybrid]);
    let clip = proptest::option::of(0.001f32..0.999);
    let uniform = (step, axis, group, mode, clip).prop_map(|(step, axis, group, mode, clip)| {
        let group = group.filter(|_| axis != GroupAxis::Block);
        let takes_clip = axis == GroupAxis::Token && mode == UniformMode::Asym;
        let clip = clip.filter(|_| takes_clip);
        Quantizer::Uniform(UniformSpec { step, axis, group, mode, clip })
    });
    use CodebookScope::{Group, Head, Layer, Model};
    let scope = prop::sample::select(vec![Model, Layer, Head, Group]);
    let vq = (2u8..=16, 1u8..=16, 1u8..=3, scope).prop_map(|(dim, bits, stages, scope)| VqSpec {
        dim,
        bits,
        stages,
        scope,
    });
    let vq = prop_oneof![vq, (1u8..=16).prop_map(|bits| VqSpec::new(1, bits))];
    let vq = vq.prop_map(Quantizer::Vq);
    let grid = (0.25f32..=10.0).prop_map(|rate| Quantizer::Grid(GridSpec { rate }));
    let polar = (1u8..=8, 1u8..=8, proptest::option::of(1u16..))
        .prop_map(|(angle, radius, group)| Quantizer::Polar(PolarSpec { angle, radius, group }));
    let lloyd = (1u8..=8).prop_map(|bits| Quantizer::Lloyd(LloydSpec { bits }));
    prop_oneof![float, uniform, vq, grid, polar, lloyd]
}

fn side() -> impl Strategy<Value = SideSpec> {
    use Transform::{Hadamard, Mean, Norm, Pca, QueryAxes, QueryPca, Rotate, ScoredAxes, Smooth};
    let transforms = prop::sample::select(vec![
        vec![],
        vec![Smooth],
        vec![Hadamard],
        vec![Smooth, Hadamard],
        vec![Hadamard, Smooth],
        vec![Mean, Pca],
        vec![Mean, QueryPca],
        vec![QueryAxes, Hadamard],
        vec![ScoredAxes, Hadamard],
        vec![Smooth, Mean, Hadamard],
        vec![Norm, Rotate { seed: 0 }],
        vec![Rotate { seed: u64::MAX }],
    ]);
    (transforms, quantizer(), any::<bool>()).prop_map(|(transforms, quantizer, huffman)| {
        let small = quantizer.code_count().is_some_and(|n| n <= 256);
        let grid = matches!(quantizer, Quantizer::Grid { .. });
        let entropy =
            if grid || huffman && small { EntropyCoding::Huffman } else { EntropyCoding::None };
        SideSpec { transforms, quantizer, entropy }
    })
}

fn exception() -> impl Strategy<Value = SpecOverride> {
    let range = || (0u32..99, 0u32..99).prop_map(|(first, more)| first..=first + more);
    let places = prop_oneof![
        range().prop_map(|layers| (Some(layers), None)),
        range().prop_map(|heads| (None, Some(heads))),
        (range(), range()).prop_map(|(layers, heads)| (Some(layers), Some(heads))),
    ];
    (prop::sample::select(Side::BOTH.to_vec()), places, side())
        .prop_map(|(side, (layers, heads), spec)| SpecOverride { side, layers, heads, spec })
}

proptest! {
    #[test]
    fn specs_round_trip(
        (key, value) in (side(), side()),
        (sink, recent) in (0u32..99, any::<u32>()),
        overrides in proptest::collection::vec(exception(), 0..3),
    ) {
        let bounds = [None, Some(0.25)];
        let spec = CodecSpec { key, value, sink, recent, overrides, bounds };
        prop_assert_eq!(spec.key.validate(), Ok(()));
        let text = spec.to_string();
        prop_assert_eq!(text.parse::<CodecSpec>(), Ok(spec), "{}", text);
    }

    #[test]
    fn no_text_panics(text in ".{0,40}") {
        let _ = resolve_spec(&text);
    }

    #[test]
    fn cut_and_bent_specs_point_inside_the_text(
        at in any::<prop::sample::Index>(),
        change in any::<char>(),
        cut in any::<bool>(),
    ) {
        let text = "k=smooth+hadamard/vq(d=4,b=8)/huffman; \
                    v=uniform(rel=0.1,g=8,axis=token); recent=9";
        let at = at.index(text.len());
        let rest = if cut { "" } else { &text[at + 1..] };
        let bent = format!("{}{change}{rest}", &text[..at]);
        if let Err(error) = bent.parse::<CodecSpec>() {
            prop_assert!(error.position <= bent.chars().count(), "{error}");
        }
    }
}

#[test]
fn errors_point_at_the_character() {
    for (text, position, part) in [
        ("", 0, "expected k, v"),
        ("k=raw", 5, "v= is missing"),
        ("k=row; v=raw", 2, "not a known quantizer"),
        ("k=raw; v=raw; recent=many", 21, "is not a number"),
        ("k=raw; v=raw x", 13, "expected ';'"),
        ("k=raw; k=raw; v=raw", 7, "twice"),
        ("k=smooth; v=raw", 8, "expected '/'"),
        ("k=smooth+smooth/raw; v=raw", 2, "appears twice"),
        ("k=vq(d=4); v=raw", 2, "needs d= and b="),
        ("k=vq(d=4,b=17); v=raw", 2, "b 1 to 16"),
        ("k=vq(d=4,b=8,stages=4); v=raw", 2, "stages must be 1 to 3"),
        ("k=vq(d=1,b=8,stages=2); v=raw", 2, "at least 2"),
        ("k=vq(d=4,b=8,scope=block); v=raw", 19, "scope is model"),
        ("k=vq(d=4,q=1); v=raw", 9, "no argument"),
        ("k=uniform(b=4,rel=0.1,axis=token); v=raw", 14, "exclude"),
        ("k=uniform(rel=0,axis=token); v=raw", 2, "1/255"),
        ("k=uniform(b=4,axis=row); v=raw", 19, "axis is"),
        ("k=uniform(b=4,axis=token,mode=mixed); v=raw", 30, "asym, sym or hybrid"),
        ("k=polar(a=4); v=raw", 2, "needs a= and r="),
        ("k=polar(a=4,r=9); v=raw", 2, "must be 1 to 8"),
        ("k=polar(a=0,r=4); v=raw", 2, "must be 1 to 8"),
        ("k=polar(a=4,r=4,g=0); v=raw", 2, "at least 1"),
        ("k=polar(a=4,r=4,h=1); v=raw", 16, "no argument"),
        ("k=polar(a=7,r=6)/huffman; v=raw", 2, "at most 4096"),
        ("k=lloyd(b=9); v=raw", 2, "must be 1 to 8"),
        ("k=lloyd(c=4); v=raw", 8, "no argument"),
        ("k=rotate(seed=x)/raw; v=raw", 14, "is not a number; expected a seed"),
        ("k=rotate(angle=1)/raw; v=raw", 9, "no argument"),
        ("k=rotate/raw; v=rotate+rotate(seed=1)/raw", 16, "appears twice"),
        ("k=raw/huffman; v=raw", 2, "floats have none"),
        ("k=uniform(rel=0,axis=token)/huffman; v=raw", 2, "1/255"),
        ("k=grid(b=2)/huffman; v=raw", 7, "no argument"),
        ("k=grid(rate=x)/huffman; v=raw", 12, "is not a number"),
        ("k=grid(rate=0.2)/huffman; v=raw", 2, "0.25 to 10"),
        ("k=grid(rate=2); v=raw", 2, "needs /huffman"),
        ("k=bitalloc(rate=2); v=raw", 11, "no argument"),
        ("k=bitalloc(b=9); v=raw", 2, "0.25 to 8"),
        ("k=bitalloc(b=2)/huffman; v=raw", 2, "no /huffman"),
        ("k=mean+mean/raw; v=raw", 2, "appears twice"),
        ("k=pca+qpca/raw; v=raw", 2, "exclude each other"),
        ("k=rä; v=raw", 2, "not a known quantizer"),
        ("k=smoth+hadamard/raw; v=raw", 2, "not a known transform; expected smooth"),
        ("ä", 0, "expected k, v"),
        ("k=raw; v=fp8(", 12, "expected ';'"),
    ] {
        let error = text.parse::<CodecSpec>().unwrap_err();
        assert!(error.message.contains(part), "{text:?}: {error}");
        assert_eq!(error.position, position, "{text:?}: {error}");
    }
}

#[test]
fn spaces_and_argument_order_do_not_matter() {
    let spec: CodecSpec =
        " recent = 7 ;v = bf16 ; k = hadamard / uniform ( axis=token , b=3 ) / huffman; "
            .parse()
            .unwrap();
    let canonical = "k=hadamard/uniform(b=3,axis=token)/huffman; v=bf16; recent=7";
    assert_eq!(spec.to_string(), canonical);
    assert_eq!(canonical.parse(), Ok(spec));
    let plus = "k=hadamard/uniform(b=3,axis=token)+huffman; v=bf16; recent=7";
    assert_eq!(plus.parse::<CodecSpec>().unwrap().to_string(), canonical);
    let spec: CodecSpec = "k=rotate ( seed=0 )+norm/polar(r=2,a=4,g=64); \
        v=uniform(mode=asym,b=3,axis=token)"
        .parse()
        .unwrap();
    let canonical = "k=rotate+norm/polar(a=4,r=2,g=64); v=uniform(b=3,axis=token)";
    assert_eq!(spec.to_string(), canonical);
}

#[test]
fn a_preset_may_be_given_other_windows_and_bounds() {
    let spec = resolve_spec("kvd-2; k.bound=0.3; recent=64").unwrap();
    let plain = resolve_spec("kvd-2").unwrap();
    assert_eq!((spec.sink, spec.recent, spec.bounds), (plain.sink, 64, [Some(0.3), None]));
    assert_eq!((&spec.key, &spec.value), (&plain.key, &plain.value));
    assert_eq!(spec.to_string().parse(), Ok(spec));
    assert_eq!(resolve_spec("kvd-2;"), Ok(plain));
    let spec = resolve_spec("kivi-4; v=fp8; k[layer=0]=raw # the first layer").unwrap();
    assert_eq!(spec.to_string().split("; ").nth(1), Some("v=fp8"));
    assert_eq!(spec.overrides.len(), 1);
    for (text, position, part) in [
        ("kvd-2; recent=1; recent=2", 17, "twice"),
        ("kvd-2; window=1", 7, "is not k, v"),
        ("kvd-7; recent=1", 0, "not a preset"),
    ] {
        let error = resolve_spec(text).unwrap_err();
        assert!(error.message.contains(part) && error.position == position, "{text}: {error}");
    }
}
