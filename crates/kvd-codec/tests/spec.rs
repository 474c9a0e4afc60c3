//! Spec texts: every codec's text reads back as that codec, and no text makes the parser panic.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use kvd_codec::{
    CodebookScope, CodecSpec, Entropy, FloatFormat, GroupAxis, Override, Quantizer, SideSpec,
    Transform, UniformMode, UniformStep, VqSpec, resolve,
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
    let uniform = (step, axis, group, mode).prop_map(|(step, axis, group, mode)| {
        let group = group.filter(|_| axis != GroupAxis::Block);
        Quantizer::Uniform { step, axis, group, mode }
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
    let grid = (0.25f32..=10.0).prop_map(|rate| Quantizer::Grid { rate });
    let polar = (1u8..=8, 1u8..=8, proptest::option::of(1u16..))
        .prop_map(|(angle, radius, group)| Quantizer::Polar { angle, radius, group });
    let lloyd = (1u8..=8).prop_map(|bits| Quantizer::Lloyd { bits });
    prop_oneof![float, uniform, vq, grid, polar, lloyd]
}

fn side() -> impl Strategy<Value = SideSpec> {
    use Transform::{Hadamard, Mean, Norm, Pca, QueryPca, Rotate, Smooth};
    let transforms = prop::sample::select(vec![
        vec![],
        vec![Smooth],
        vec![Hadamard],
        vec![Smooth, Hadamard],
        vec![Hadamard, Smooth],
        vec![Mean, Pca],
        vec![Mean, QueryPca],
        vec![Smooth, Mean, Hadamard],
        vec![Norm, Rotate { seed: 0 }],
        vec![Rotate { seed: u64::MAX }],
    ]);
    (transforms, quantizer(), any::<bool>()).prop_map(|(transforms, quantizer, huffman)| {
        let small = quantizer.alphabet().is_some_and(|n| n <= 256);
        let grid = matches!(quantizer, Quantizer::Grid { .. });
        let entropy = if grid || huffman && small { Entropy::Huffman } else { Entropy::None };
        SideSpec { transforms, quantizer, entropy }
    })
}

fn exception() -> impl Strategy<Value = Override> {
    let range = || (0u32..99, 0u32..99).prop_map(|(first, more)| first..=first + more);
    let places = prop_oneof![
        range().prop_map(|layers| (Some(layers), None)),
        range().prop_map(|heads| (None, Some(heads))),
        (range(), range()).prop_map(|(layers, heads)| (Some(layers), Some(heads))),
    ];
    (prop::sample::select(Side::BOTH.to_vec()), places, side())
        .prop_map(|(side, (layers, heads), spec)| Override { side, layers, heads, spec })
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
        let _ = resolve(&text);
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
