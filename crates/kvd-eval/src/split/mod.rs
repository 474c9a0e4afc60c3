//! Shares a codec's bits among layers, heads and sides by what errors cost there, measured on text
//! that no fit has seen (`docs/adr/0047-bits-by-sensitivity.md`).

mod fit;
mod model_judge;
mod packed_attention;
mod report;
mod rows_judge;

pub use report::{BitSplit, JudgedCodec, SplitReport, SplitVerdict};

pub(crate) use fit::{CodecFits, DumpFits, ModelWindows, WindowFits, fit_dump, fit_windows};

use kvd_codec::{Calibration, CodecSpec};
use kvd_core::{Geometry, Side};
use kvd_fit::{GroupCost, HeadGroup};
use model_judge::ModelJudge;
use rows_judge::RowsJudge;

/// Groups of heads whose cost is measured, at most.
const GROUPS_MAX: usize = 64;
/// Fewest groups, whatever a model takes to run.
const GROUPS_MIN: usize = 8;
/// Multiplications by weights that the probes of one codec may take: minutes on two cores.
const PROBE_WORK_MAX: u64 = 20 << 40;

/// The groups of heads whose cost is measured.
struct ProbeGroups(Vec<HeadGroup>);

impl ProbeGroups {
    /// Every head by itself where there are few; else the heads of a layer, or of some layers.
    fn new(geometry: &Geometry, most: usize) -> Self {
        let (layers, heads) = (geometry.layers, geometry.kv_heads);
        let most = u32::try_from(most / 2).unwrap_or(u32::MAX).max(1);
        let alone = layers.saturating_mul(heads) <= most;
        let heads_together = if alone { 1 } else { heads };
        let layers_together = if alone { 1 } else { layers.div_ceil(most) };
        let mut groups = Vec::new();
        for first in (0..layers).step_by(layers_together as usize) {
            for side in Side::BOTH {
                for head in (0..heads).step_by(heads_together as usize) {
                    let layers = first..(first + layers_together).min(layers);
                    groups.push(HeadGroup { side, layers, heads: head..head + heads_together });
                }
            }
        }
        Self(groups)
    }

    /// As many as a model of so many parameters can be run for, on texts of so many tokens.
    fn affordable_groups(geometry: &Geometry, parameters: u64, tokens: usize) -> Self {
        let run = parameters.saturating_mul(tokens as u64).max(1);
        let most = usize::try_from(PROBE_WORK_MAX / run).unwrap_or(GROUPS_MAX);
        Self::new(geometry, most.clamp(GROUPS_MIN, GROUPS_MAX))
    }
}

/// How many codecs costs are measured under, and how many are judged.
#[derive(Clone, Copy)]
struct CodecCounts {
    probed: usize,
    judged: usize,
}

/// Says what errors cost, on two texts that no fit has seen: one for groups of heads, one for
/// whole codecs.
enum SplitJudge<'a> {
    /// By what a model predicts.
    Model(Box<ModelJudge<'a>>),
    /// By attention over rows, where there is no model.
    Rows(RowsJudge<'a>),
}

impl SplitJudge<'_> {
    /// Steps of measuring costs under some codecs and judging others or the same, in tokens.
    fn step_count(&self, codecs: CodecCounts) -> usize {
        match self {
            Self::Model(judge) => judge.step_count(codecs),
            Self::Rows(judge) => judge.step_count(codecs),
        }
    }

    /// The cost of each group's errors under a calibration.
    async fn measure_costs(
        &mut self,
        spec: &CodecSpec,
        calibration: &Calibration,
    ) -> anyhow::Result<Vec<GroupCost>> {
        match self {
            Self::Model(judge) => judge.measure_costs(spec, calibration).await,
            Self::Rows(judge) => judge.measure_costs(spec, calibration).await,
        }
    }

    /// A whole codec on the other text.
    async fn judge_codec(
        &mut self,
        spec: &CodecSpec,
        calibration: &Calibration,
    ) -> anyhow::Result<JudgedCodec> {
        match self {
            Self::Model(judge) => judge.judge_codec(spec, calibration).await,
            Self::Rows(judge) => judge.judge_codec(spec, calibration).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{DType, RopePairing};

    fn groups(layers: u32, kv_heads: u32, most: usize) -> Vec<HeadGroup> {
        let geometry = Geometry {
            layers,
            kv_heads,
            head_dim_k: 64,
            head_dim_v: 64,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        ProbeGroups::new(&geometry, most).0
    }

    #[test]
    fn groups_cover_every_head_once_and_are_no_more_than_asked_for() {
        for (layers, heads, most) in [(1, 1, 8), (3, 2, 64), (30, 3, 64), (80, 8, 64), (7, 5, 8)] {
            let groups = groups(layers, heads, most);
            assert!(groups.len() <= most.max(2), "{layers} {heads}: {}", groups.len());
            for layer in (0..layers).map(kvd_core::LayerIndex) {
                for (side, head) in Side::BOTH
                    .into_iter()
                    .flat_map(|s| (0..heads as usize).map(move |head| (s, head)))
                {
                    let of = groups.iter().filter(|group| group.has_head(layer, side, head));
                    assert_eq!(of.count(), 1, "{layer} {side} {head}");
                }
            }
        }
        assert_eq!(groups(3, 2, 64).len(), 12);
        assert_eq!(groups(30, 3, 64).len(), 60);
    }
}
