//! Lane instructions of pairs that are compiled late: no kernel of theirs is counted whole, but
//! each side is a part of one that is (docs/perf/gpu-plan.md, "Pairs compiled late").

use super::counts::{InstructionCounts, InstructionMix, ROWS};
use kvd_codec::{FloatFormat, Quantizer, SideSpec, UniformMode};
use kvd_core::Side;

/// Values of a thread in the two tiles that parts are counted for.
const VALUES: f64 = 128.0;
/// Barriers, places of tiles and the loop, of two tiles.
const REST: f64 = 112.0;
/// Extra instructions of tiles one at a time: of `kivi-4` 461 each, 386 where two go together.
const ALONE: f64 = 461.0 / 386.0;
/// Instructions of unpacking codes of several widths first: of a value, all parts.
const SPREAD: f64 = 15.0;

/// Counts of both sides' parts and of the rest; none for a side or a number of query rows that was
/// counted in no kernel.
pub(super) fn count_parts(
    specs: [&SideSpec; 2],
    rows: u32,
    of_side: InstructionMix,
) -> Option<InstructionCounts> {
    if rows != ROWS {
        return None;
    }
    let [keys, values] =
        Side::BOTH.map(|side| side_instructions(&specs[side.index()].quantizer, side));
    let together = specs.iter().all(|spec| goes_together(&spec.quantizer));
    let all = (keys? + values? + REST) / VALUES * if together { 1.0 } else { ALONE };
    Some(of_side.times(all / of_side.per_value()).into_counts(false))
}

/// Whether two tiles of it are worked on at once.
fn goes_together(quantizer: &Quantizer) -> bool {
    !matches!(quantizer, Quantizer::Float(_) | Quantizer::BitAlloc { .. })
}

/// Instructions of two tiles of 32 tokens and 128 channels: for keys staging, queries cut and
/// scores, for values staging, weights cut and sums. For uniform levels they are those of the
/// kernel for any shape.
fn side_instructions(quantizer: &Quantizer, side: Side) -> Option<f64> {
    use Quantizer as Q;
    let [keys, values] = match quantizer {
        Q::Float(FloatFormat::F32) | Q::Uniform { mode: UniformMode::Sym, .. } => return None,
        Q::Float(FloatFormat::E4M3) => [351.0, 483.0],
        Q::Float(_) => [367.0, 359.0],
        Q::Uniform { mode: UniformMode::Asym, .. } => [570.0, 611.0],
        Q::Uniform { mode: UniformMode::Hybrid, .. } => [375.0, 474.0],
        Q::Vq(vq) if vq.dim == 2 && vq.bits == 8 => [293.0, 366.0],
        Q::Vq(vq) if vq.bits <= 8 => [218.0, 256.0],
        Q::Polar { .. } if side == Side::Key => [426.0, 0.0],
        Q::Lloyd { .. } if side == Side::Key => [517.0, 0.0],
        Q::BitAlloc { .. } => [(SPREAD * VALUES - REST) / 2.0 / ALONE; 2],
        _ => return None,
    };
    Some(if side == Side::Key { keys } else { values })
}
