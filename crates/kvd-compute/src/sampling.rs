//! Which blocks are decoded again to measure the codec's error.

use crate::{BackendError, EncodedPages};
use kvd_core::LayerIndex;
use std::collections::BTreeMap;

/// One block of a layer in this many is measured. Measuring takes 3 to 8 times what encoding takes
/// (`kvd bench store --errors none,rows,queries`).
pub(crate) const SAMPLE_INTERVAL: u64 = 256;
/// After a page over its bound every block of its layer is measured, until this many in a row keep
/// it.
const ALARM_BLOCKS: u64 = 16;

/// Whether the block that a layer encodes after `index` others is measured: more of the first ones,
/// so that errors of a short conversation show, and then one in [`SAMPLE_INTERVAL`].
fn is_sampled(index: u64) -> bool {
    index.is_multiple_of(SAMPLE_INTERVAL) || index < SAMPLE_INTERVAL && index.is_power_of_two()
}

/// Which blocks of a model are measured: samples of every layer, and, from the moment that a page
/// was over its declared bound, every block of that layer until [`ALARM_BLOCKS`] in a row keep it:
/// data that is about at its bound is over it in some of them.
#[derive(Debug, Default)]
pub struct Sampling(BTreeMap<LayerIndex, LayerSampling>);

/// [`Sampling`] of one layer.
#[derive(Debug, Default)]
struct LayerSampling {
    encoded_blocks: u64,
    /// Blocks that must still keep the bound before not all are measured.
    alarmed: u64,
}

impl Sampling {
    /// Which of the next `count` blocks of a layer are measured.
    pub fn due(&mut self, layer: LayerIndex, count: usize) -> Vec<bool> {
        let of_layer = self.0.entry(layer).or_default();
        let (first, alarmed) = (of_layer.encoded_blocks, of_layer.alarmed > 0);
        of_layer.encoded_blocks += count as u64;
        let due = |i: usize| alarmed || is_sampled(first + i as u64);
        (0..count).map(due).collect()
    }

    /// Whether blocks that were not measured must be, after what was found of those that were.
    #[must_use]
    pub fn is_alarming(encoded: &[Result<EncodedPages, BackendError>]) -> bool {
        encoded.iter().flatten().any(|pages| pages.over_bound() != [0, 0])
    }

    /// Takes note of what was found of a layer's blocks.
    pub fn note_blocks(
        &mut self,
        layer: LayerIndex,
        encoded: &[Result<EncodedPages, BackendError>],
    ) {
        let of_layer = self.0.entry(layer).or_default();
        for pages in encoded.iter().flatten().filter(|pages| pages.sampled.is_some()) {
            let is_over = pages.over_bound() != [0, 0];
            of_layer.alarmed =
                if is_over { ALARM_BLOCKS } else { of_layer.alarmed.saturating_sub(1) };
        }
    }
}
