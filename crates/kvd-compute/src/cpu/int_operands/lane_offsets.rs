//! Offsets that weights are rounded with, so that those which are alike lose nothing together
//! (`docs/adr/0066-weights-of-rotated-values-have-two-terms.md`).

use crate::cpu::span_scores::TILE;

/// Values of a row that are rounded with offsets of their own; then these come again.
pub(super) const LANES: usize = 64;
/// Offsets of a row, lane by lane.
pub(super) type LaneOffsets = [f32; LANES];
/// Sets of offsets, one after the other.
pub(super) const OFFSET_SETS: usize = 16;
/// Offsets that are added to the values of a row before they are rounded. Weights that are alike
/// then round up in as many lanes as their fraction says, and keep their sum. Those of a tile, of
/// every second, fourth, eighth or sixteenth lane, have offsets from all of the range, and so has a
/// lane in all of the sets. An offset is less than a half, so that 0 stays 0 and the largest stays
/// the largest.
pub(in crate::cpu) static LANE_OFFSETS: [LaneOffsets; OFFSET_SETS] = {
    let mut sets = [[0.0; LANES]; OFFSET_SETS];
    let mut at = 0;
    while at < OFFSET_SETS * LANES {
        let (set, lane) = (at / LANES, at % LANES);
        let step = (4 * (5 * lane % TILE) + 21 * (lane / TILE) + 25 * set) % LANES;
        sets[set][lane] = (step as f32 + 0.5) / LANES as f32 - 0.5;
        at += 1;
    }
    sets
};
/// The offsets of rows that are rounded to the nearest.
pub(super) static NO_OFFSETS: LaneOffsets = [0.0; LANES];
