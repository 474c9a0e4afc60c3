//! Lane instructions that a stored value takes: counted in the kernels' SASS for sm_90, four query
//! rows, full tiles (docs/perf/gpu-plan.md says how). Not measured.

use kvd_codec::{CodebookScope, Entropy, FloatFormat, Quantizer, SideSpec, UniformMode, VqSpec};
use kvd_core::Side;

/// What was counted of a codec's kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Counted {
    /// Lane instructions per stored value.
    pub per_value: f64,
    /// Whether that is all of them. Of most kernels for any shape, and of other numbers of query
    /// rows than four, only what the one with a preset's shape as constants takes was counted, what
    /// its look-ups take more, and what scales of values do; of kernels on CUDA cores, but for
    /// codebooks of floats, nothing but their products.
    pub is_all: bool,
}

/// Query rows of the kernels that were counted.
const ROWS: u32 = 4;

/// A kernel as it is launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launched {
    /// Whether products of both sides are on tensor cores.
    pub(super) on_tensor_cores: bool,
    /// Whether it has the codec's shape as constants.
    pub(super) is_fixed: bool,
    /// Query rows: 1, 4 or 8.
    pub(super) rows: u32,
}

/// Of both sides; none where no kernel like the pair's was counted. `whole`: whether all entries of
/// a side's codebooks stand in shared memory.
pub(super) fn counted(
    specs: [&SideSpec; 2],
    kernel: Launched,
    whole: [bool; 2],
) -> Option<Counted> {
    let is_counted = kernel.rows == ROWS;
    if !kernel.on_tensor_cores {
        let of_floats = of_floats(specs).filter(|_| is_counted);
        // Else a multiply-add for each query row.
        let products = Counted { per_value: f64::from(kernel.rows), is_all: false };
        return Some(of_floats.unwrap_or(products));
    }
    if specs.iter().any(|spec| spec.entropy == Entropy::Huffman) {
        let of_tile = decoded(specs)?;
        let codes = Side::BOTH.map(|side| huffman(specs[side.index()], side));
        let per_value = of_tile + (codes[0]? + codes[1]?) / 2.0;
        return Some(Counted { per_value, is_all: is_counted });
    }
    let per_value = of_kernel(specs)?;
    if kernel.is_fixed {
        return Some(Counted { per_value, is_all: true });
    }
    match (&specs[0].quantizer, &specs[1].quantizer) {
        (Quantizer::Float(_), _) => Some(Counted { per_value, is_all: is_counted }),
        (keys @ Quantizer::Uniform { mode: UniformMode::Asym, .. }, Quantizer::Uniform { .. }) => {
            let is_plain = [2, 4].map(|bits| Some(1 << bits)).contains(&keys.alphabet());
            Some(Counted { per_value: any_uniform(kernel.rows), is_all: is_plain })
        }
        (_, Quantizer::Uniform { mode: UniformMode::Asym, .. }) => {
            Some(Counted { per_value: per_value + SCALED_VALUES, is_all: false })
        }
        _ => {
            let more = looked_up(specs, whole).unwrap_or(0.0);
            Some(Counted { per_value: per_value + more, is_all: false })
        }
    }
}

/// Of the kernel for any shape of uniform levels of two or four bits, keys with a scale by channel
/// and values with one by token.
fn any_uniform(rows: u32) -> f64 {
    match rows {
        1 => 6.6,
        ROWS => 10.0,
        _ => 14.9,
    }
}

/// What values with scales take more for any shape, weights cut and sums, than where the shape is
/// constant: of `kivi-4` 405 and 149 instructions of two tiles, not 191 and 72.
const SCALED_VALUES: f64 = (405.0 + 149.0 - 191.0 - 72.0) / 128.0;

/// Of a kernel whole, by `cargo xtask count` (gpu-plan.md, "Attention, counted").
fn of_kernel(specs: [&SideSpec; 2]) -> Option<f64> {
    use Quantizer as Q;
    Some(match (&specs[0].quantizer, &specs[1].quantizer) {
        (Q::Float(FloatFormat::F32), _) | (_, Q::Float(FloatFormat::F32)) => return None,
        (Q::Float(FloatFormat::E4M3), _) => 7.5,
        (Q::Float(FloatFormat::BF16), _) => 7.8,
        (Q::Float(_), _) => 6.7,
        (Q::Uniform { mode: UniformMode::Hybrid, .. }, _) => 7.5,
        // Where keys have a scale per channel, queries are cut for every tile.
        (Q::Uniform { .. }, Q::Uniform { .. }) => 6.1,
        (Q::Polar { .. }, Q::Uniform { .. }) => 6.9,
        (Q::Lloyd { .. }, Q::Uniform { .. }) => 6.9,
        (Q::Vq(vq), Q::Vq(_)) => match (vq.dim, vq.bits) {
            (2, 8) => 6.0,
            _ => 4.5,
        },
        // Of groups of 1 to 4 bits, mostly 2.
        (Q::BitAlloc { .. }, Q::BitAlloc { .. }) => 7.0,
        _ => return None,
    })
}

/// Of codebooks of floats of both sides, one set for a head, `vqfloat_vqfloat` whole.
fn of_floats(specs: [&SideSpec; 2]) -> Option<Counted> {
    let of_side = |spec: &SideSpec| match &spec.quantizer {
        Quantizer::Vq(vq) if vq.scope != CodebookScope::Group => match (vq.dim, vq.stages) {
            (4, 1) => Some((36.5, vq.bits == 12)),
            (8, 1) => Some((26.1, vq.bits == 12)),
            (4, 2) => Some((66.7, vq.bits == 8)),
            _ => None,
        },
        _ => None,
    };
    let [keys, values] = [of_side(specs[0])?, of_side(specs[1])?];
    Some(Counted { per_value: (keys.0 + values.0) / 2.0, is_all: keys.1 && values.1 })
}

/// What a pair's codebooks take more than those of `vecinfer-2`, half for each side: entries that
/// are not in shared memory, codes of two planes.
fn looked_up(specs: [&SideSpec; 2], whole: [bool; 2]) -> Option<f64> {
    let of = |side: Side| match &specs[side.index()].quantizer {
        Quantizer::Vq(vq) => Some(of_look_up(vq, side, whole[side.index()])),
        _ => None,
    };
    let of_vecinfer = 2.1 + 3.2;
    Some(((of(Side::Key)? + of(Side::Value)? - of_vecinfer) / 2.0).max(0.0))
}

/// Of a code of one channel.
fn of_look_up(vq: &VqSpec, side: Side, whole: bool) -> f64 {
    let of_all_or_some = match (side, vq.dim, vq.bits) {
        (Side::Key, 2, 8) => [3.6; 2],
        (Side::Key, _, 12) => [2.9, 4.9],
        (Side::Key, ..) => [2.1; 2],
        (Side::Value, 2, 8) => [5.5, 9.7],
        (Side::Value, _, 12) => [7.5, 9.6],
        (Side::Value, ..) => [3.2, 5.3],
    };
    of_all_or_some[usize::from(!whole)]
}

/// Of tiles of Huffman codes, two together, decoding apart: what was counted, with the second
/// tile's scores as the first's.
fn decoded(specs: [&SideSpec; 2]) -> Option<f64> {
    match (&specs[0].quantizer, &specs[1].quantizer) {
        (Quantizer::Grid { .. }, Quantizer::Grid { .. }) => Some(8.4),
        (Quantizer::Uniform { .. }, Quantizer::Uniform { .. }) => Some(13.7),
        _ => None,
    }
}

/// To decode a code: a step of four takes so many look-ups and top-ups, as presets' tables have
/// them on rows of noise.
fn huffman(spec: &SideSpec, side: Side) -> Option<f64> {
    // Codes of a look-up and of a top-up, and the part of them whose low bits follow the symbol.
    let steps = match (&spec.quantizer, side) {
        // Of kvd-4 to kvd-1.5, whichever is nearest.
        (Quantizer::Grid { rate }, Side::Key) => match rate {
            rate if *rate > 3.7 => (1.39, 1.39, 0.62),
            rate if *rate > 2.8 => (1.00, 1.00, 1.00),
            rate if *rate > 2.1 => (1.05, 1.82, 0.15),
            _ => (1.48, 2.96, 0.0),
        },
        (Quantizer::Grid { rate }, Side::Value) if *rate > 2.9 => (1.0, 2.0, 0.0),
        (Quantizer::Grid { .. }, Side::Value) => (2.0, 4.0, 0.0),
        // Up to five levels, or more.
        (Quantizer::Uniform { .. }, _) => match spec.quantizer.alphabet()? {
            0..=5 => (2.0, 4.0, 0.0),
            6..=32 => (1.0, 2.0, 0.0),
            _ => return None,
        },
        _ => return None,
    };
    Some(of_step(steps) / 4.0)
}

/// What fits the counted steps of four codes within two instructions, or four of the longest.
fn of_step((per_entry, per_word, with_low_bits): (f64, f64, f64)) -> f64 {
    4.0 + 4.0 * (4.4 / per_entry + 12.5 / per_word + 3.0 * with_low_bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_codec::resolve;

    const FIXED: Launched = Launched { on_tensor_cores: true, is_fixed: true, rows: ROWS };
    const ANY: Launched = Launched { is_fixed: false, ..FIXED };

    fn of(codec: &str, kernel: Launched) -> Option<Counted> {
        let codec = resolve(codec).unwrap();
        counted(Side::BOTH.map(|side| codec.side(side)), kernel, [true; 2])
    }

    #[test]
    fn every_preset_on_tensor_cores_is_counted() {
        for preset in kvd_codec::presets().iter().filter(|p| p.name != "vq-residual-4") {
            let counted = of(preset.name, FIXED).unwrap();
            assert!(counted.per_value > 4.0 && counted.is_all, "{}: {counted:?}", preset.name);
            let any = of(preset.name, ANY).unwrap();
            assert!(any.per_value >= counted.per_value, "{}: {any:?}", preset.name);
        }
        assert!(!of("polar-4+2", ANY).unwrap().is_all);
        assert_eq!(of("k=vq(d=2,b=4); v=uniform(b=4,axis=token)", ANY), None);
    }

    #[test]
    fn kernels_on_cuda_cores_take_their_products_at_least() {
        let of_rows = |codec, rows| {
            let Counted { per_value, is_all } =
                of(codec, Launched { on_tensor_cores: false, rows, ..ANY }).unwrap();
            (per_value, is_all)
        };
        assert_eq!(of_rows("raw", 4), (4.0, false));
        assert_eq!(of_rows("k=vq(d=4,b=8,stages=2,scope=group); v=vq(d=4,b=12)", 8), (8.0, false));
        let floats = ["vecinfer-3", "vecinfer-1.5", "vecinfer-1.25", "vq-residual-4"];
        let counted = [(36.5, true), (26.1, true), (26.1, false), (66.7, true)];
        assert_eq!(floats.map(|codec| of_rows(codec, 4)), counted);
        assert_eq!(of_rows("vecinfer-3", 1), (1.0, false));
    }

    #[test]
    fn kernels_for_any_shape_and_other_rows_take_what_they_were_counted_to() {
        let of_rows = |codec, rows| of(codec, Launched { rows, ..ANY }).unwrap();
        for preset in ["kivi-4", "kivi-2"] {
            let all = [1, 4, 8].map(|rows| of_rows(preset, rows));
            assert_eq!(all.map(|counted| counted.per_value), [6.6, 10.0, 14.9], "{preset}");
            assert!(all.iter().all(|counted| counted.is_all), "{preset}");
        }
        let fixed = of("kivi-4", FIXED).unwrap();
        assert!(fixed.per_value < 0.7 * of_rows("kivi-4", 4).per_value, "{fixed:?}");
        // Of these what rows do was not counted.
        for preset in ["raw", "kvd-2", "vecinfer-2"] {
            assert!(!of_rows(preset, 8).is_all, "{preset}");
        }
        assert!(of_rows("raw", 4).is_all && of_rows("kvd-2", 4).is_all);
    }

    #[test]
    fn steps_of_huffman_codes_are_those_that_were_counted() {
        // Codes per entry and per top-up, whether low bits follow, instructions of a step of four
        // keys and of one of values: docs/perf/gpu-plan.md.
        for (per_entry, per_word, low, counted) in [
            (4.0, 4.0, 0.0, [22.5, 21.8]),
            (2.0, 4.0, 0.0, [25.2, 24.8]),
            (2.0, 2.0, 0.0, [38.2, 37.8]),
            (1.0, 4.0, 0.0, [34.2, 33.8]),
            (1.0, 2.0, 0.0, [46.2, 45.8]),
            (1.0, 4.0, 1.0, [46.2, 45.8]),
            (1.0, 2.0, 1.0, [58.2, 57.8]),
            (1.0, 1.0, 1.0, [85.8, 87.5]),
        ] {
            let step = of_step((per_entry, per_word, low));
            let off = counted.map(|counted| (step - counted).abs());
            let most = if per_word < 2.0 { 4.0 } else { 1.7 };
            assert!(off.iter().all(|off| *off < most), "{step} and not {counted:?}");
        }
        let of = |codec: &str| {
            let codec = resolve(codec).unwrap();
            Side::BOTH.map(|side| huffman(codec.side(side), side).unwrap())
        };
        assert!(of("kvcomp").iter().all(|code| (code - 46.0 / 4.0).abs() < 0.2));
        assert!((of("kvcomp-channel")[0] - 25.0 / 4.0).abs() < 0.2);
        // Keys one by one, of values two to an entry and four to a top-up.
        assert!((of("kvd-3")[1] - 25.0 / 4.0).abs() < 0.2 && of("kvd-3")[0] > 20.0);
    }

    #[test]
    fn what_is_not_whole_takes_more() {
        let codec = resolve("vecinfer-1.5").unwrap();
        let sides = Side::BOTH.map(|side| codec.side(side));
        let of = |whole| counted(sides, ANY, whole).unwrap();
        let more = of([false; 2]).per_value - of([true; 2]).per_value;
        // Two instructions of a key's channel, 2.1 of a value's.
        assert!((more - 2.05).abs() < 1e-9, "{more}");
    }
}
