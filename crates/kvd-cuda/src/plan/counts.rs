//! Lane instructions that a stored value takes: counted in the kernels' SASS for sm_90, four query
//! rows, full tiles (docs/perf/gpu-plan.md says how). Not measured.

use kvd_codec::{CodebookScope, Entropy, FloatFormat, Quantizer, SideSpec, UniformMode, VqSpec};
use kvd_core::Side;

/// Values of a tile, keys and values of 128 channels, for each thread.
const VALUES_OF_THREAD: f64 = 64.0;

/// What was counted of a codec's kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Counted {
    /// Lane instructions per stored value.
    pub per_value: f64,
    /// Whether that is all of them: look-ups of some codebooks were not counted.
    pub is_all: bool,
}

/// Of both sides; none where the pair's kernel was not counted. `whole`: whether all entries of a
/// side's codebooks stand in shared memory.
pub(super) fn counted(
    specs: [&SideSpec; 2],
    on_tensor_cores: bool,
    whole: [bool; 2],
) -> Option<Counted> {
    let of_tile = of_tile(specs, on_tensor_cores)?;
    let of_side = |side: Side| {
        let spec = specs[side.index()];
        match spec.quantizer {
            Quantizer::Float(format) => Some(of_float(format, side, on_tensor_cores)),
            _ => of_code(spec, side, whole[side.index()]),
        }
    };
    let products = Side::BOTH.map(of_side);
    let known: f64 = products.iter().flatten().sum();
    let per_value = known / 2.0 + of_tile / VALUES_OF_THREAD;
    Some(Counted { per_value, is_all: products.iter().all(Option::is_some) })
}

/// Of a thread and tile at most, beside what each code takes: staging, cutting queries or weights,
/// softmax.
fn of_tile(specs: [&SideSpec; 2], on_tensor_cores: bool) -> Option<f64> {
    let huffman = specs.iter().any(|spec| spec.entropy == Entropy::Huffman);
    use Quantizer as Q;
    Some(match (&specs[0].quantizer, &specs[1].quantizer) {
        // On CUDA cores; counted of rows in f16, when they were there.
        (Q::Float(keys), Q::Float(values))
            if keys == values && *keys != FloatFormat::E4M3 && !on_tensor_cores =>
        {
            747.0
        }
        _ if !on_tensor_cores => return None,
        (Q::Float(FloatFormat::E4M3), _) => 474.0,
        (Q::Float(FloatFormat::BF16), _) => 416.0,
        (Q::Float(_), _) => 422.0,
        (Q::Grid { .. }, Q::Grid { .. }) => 640.0,
        (Q::Uniform { mode: UniformMode::Hybrid, .. }, _) => 1120.0,
        (Q::Uniform { .. }, Q::Uniform { .. }) if huffman => 1400.0,
        // Where keys have a scale per channel, queries are cut for every tile.
        (Q::Uniform { .. }, Q::Uniform { .. }) => 1760.0,
        (Q::Polar { .. }, Q::Uniform { .. }) => 1670.0,
        (Q::Lloyd { .. }, Q::Uniform { .. }) => 1210.0,
        (Q::Vq(_), Q::Vq(_)) => 800.0,
        (Q::BitAlloc { .. }, Q::BitAlloc { .. }) => 570.0,
        _ => return None,
    })
}

/// Of a value of one channel: to make it a half, its products.
fn of_float(format: FloatFormat, side: Side, on_tensor_cores: bool) -> f64 {
    let [keys, values] = match format {
        _ if !on_tensor_cores => [27.0, 17.0],
        FloatFormat::E4M3 => [1.8, 2.6],
        FloatFormat::BF16 => [2.7, 2.6],
        _ => [1.5, 1.6],
    };
    if side == Side::Key { keys } else { values }
}

/// Of a code of one channel: to decode it, to make it a byte, its products.
fn of_code(spec: &SideSpec, side: Side, whole: bool) -> Option<f64> {
    let of = |keys: f64, values: f64| if side == Side::Key { keys } else { values };
    let decoded = match spec.entropy {
        Entropy::Huffman => huffman(spec, side)? + of(1.1, 1.4),
        Entropy::None => 0.0,
    };
    if decoded > 0.0 {
        return Some(decoded);
    }
    Some(match &spec.quantizer {
        Quantizer::Uniform { mode: UniformMode::Hybrid, .. } => of(12.9, 3.2),
        // Codes of one plane. Others are put together bit by bit, which was not counted.
        Quantizer::Uniform { .. } => match spec.quantizer.alphabet()? {
            2 | 4 => of(1.0, 1.4),
            16 => of(1.3, 1.4),
            256 => of(1.1, 1.4),
            _ => return None,
        },
        Quantizer::Polar { .. } if spec.quantizer.alphabet() == Some(256) => 4.4,
        Quantizer::Lloyd { bits: 4 } => 5.0,
        Quantizer::Polar { .. } | Quantizer::Lloyd { .. } => return None,
        // Spread to bytes first, of one to four bits.
        Quantizer::BitAlloc { .. } => of(7.3, 5.5),
        Quantizer::Vq(vq) => return looked_up(vq, side, whole),
        Quantizer::Float(_) | Quantizer::Grid { .. } => return None,
    })
}

/// Of codebooks; those of one sub-vector each have other loops for keys, which were not counted.
fn looked_up(vq: &VqSpec, side: Side, whole: bool) -> Option<f64> {
    let of_all_or_some = match (side, vq.dim, vq.bits) {
        (Side::Key, ..) if vq.scope == CodebookScope::Group => return None,
        (Side::Key, 2, 4) => [2.5; 2],
        (Side::Key, 2, 8) if whole => [3.6; 2],
        (Side::Key, 4, 8) if whole => [2.1; 2],
        (Side::Key, 4, 12) => [2.8, 4.8],
        (Side::Key, 8, 12) => [2.9, 4.9],
        (Side::Value, 2, 4) => [2.4; 2],
        (Side::Value, 2, 8) => [5.5, 9.7],
        (Side::Value, 4 | 8, 8) => [3.2, 5.3],
        (Side::Value, 4 | 8, 12) => [7.5, 9.6],
        _ => return None,
    };
    Some(of_all_or_some[usize::from(!whole)])
}

/// To decode a code: a step of four takes so many look-ups and top-ups, as presets' tables have
/// them on rows of noise.
fn huffman(spec: &SideSpec, side: Side) -> Option<f64> {
    let per_entry_and_word = match (&spec.quantizer, side) {
        // Of kvd-4 to kvd-1.5, whichever is nearest.
        (Quantizer::Grid { rate }, Side::Key) => match rate {
            rate if *rate > 3.7 => (1.39, 1.39),
            rate if *rate > 2.8 => (1.00, 1.03),
            rate if *rate > 2.1 => (1.05, 2.11),
            _ => (1.54, 3.08),
        },
        (Quantizer::Grid { rate }, Side::Value) => match rate {
            rate if *rate > 2.9 => (1.14, 2.28),
            rate if *rate > 2.0 => (2.00, 4.00),
            rate if *rate > 1.5 => (2.21, 4.00),
            _ => (2.51, 4.00),
        },
        // Up to five levels, or more.
        (Quantizer::Uniform { .. }, _) => match spec.quantizer.alphabet()? {
            0..=5 => (2.0, 4.0),
            6..=32 => (1.0, 2.0),
            _ => return None,
        },
        _ => return None,
    };
    let (per_entry, per_word) = per_entry_and_word;
    // What fits the counted steps within one instruction, or four of values.
    let step = if side == Side::Key { 11.0 } else { 15.0 };
    Some((step + 6.2 * 4.0 / per_entry + 18.0 * 4.0 / per_word) / 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_codec::resolve;

    fn of(codec: &str) -> Option<Counted> {
        let codec = resolve(codec).unwrap();
        counted(Side::BOTH.map(|side| codec.side(side)), true, [true; 2])
    }

    #[test]
    fn every_preset_on_tensor_cores_is_counted() {
        for preset in kvd_codec::presets().iter().filter(|p| p.name != "vq-residual-4") {
            let counted = of(preset.name).unwrap();
            assert!(counted.per_value > 5.0, "{}: {counted:?}", preset.name);
            let not_all = ["cq-4", "cq-2", "polar-4+2", "turbo-3"].contains(&preset.name);
            assert_eq!(counted.is_all, !not_all, "{}", preset.name);
        }
        assert_eq!(of("k=vq(d=2,b=4); v=uniform(b=4,axis=token)"), None);
    }

    #[test]
    fn steps_of_huffman_codes_are_those_that_were_counted() {
        // Codes per entry and per top-up, instructions of a step of four: docs/perf/gpu-plan.md.
        let spec = |text: &str| resolve(text).unwrap();
        let per_code = |text: &str, side| huffman(spec(text).side(side), side).unwrap();
        let kvcomp = per_code("kvcomp", Side::Key);
        assert!((kvcomp - 71.0 / 4.0).abs() < 0.3, "{kvcomp}");
        let values = per_code("kvcomp", Side::Value);
        assert!((values - 77.0 / 4.0).abs() < 0.5, "{values}");
        // kvd-3: keys one by one, of values two to an entry and four to a top-up.
        let kvd = [Side::Key, Side::Value].map(|side| per_code("kvd-3", side));
        assert!((kvd[0] - 107.0 / 4.0).abs() < 0.5, "{kvd:?}");
        assert!((kvd[1] - 44.5 / 4.0).abs() < 0.5, "{kvd:?}");
        let short = per_code("kvcomp-channel", Side::Key);
        assert!((short - 41.0 / 4.0).abs() < 0.3, "{short}");
    }

    #[test]
    fn what_is_not_whole_takes_more() {
        let codec = resolve("vecinfer-1.5").unwrap();
        let of = |whole| counted(Side::BOTH.map(|side| codec.side(side)), true, whole).unwrap();
        let more = of([false; 2]).per_value - of([true; 2]).per_value;
        // Two instructions of a key's channel, 2.1 of a value's.
        assert!((more - 2.05).abs() < 1e-9, "{more}");
    }
}
