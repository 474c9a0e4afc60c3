//! Which blocks are decoded again to measure the codec's error.

use crate::{BackendError, EncodedPages};
use kvd_core::LayerIndex;
use std::collections::BTreeSet;

/// One block in this many is measured.
const INTERVAL: u64 = 16;

/// Which blocks of a model are measured: one in sixteen, and, from the moment that a page was over
/// its declared bound, every block of that layer until one keeps it.
#[derive(Debug, Default)]
pub struct Sampling {
    encoded_blocks: u64,
    alarmed: BTreeSet<LayerIndex>,
}

impl Sampling {
    /// Which of the next `count` blocks, all of one layer, are measured.
    pub fn due(&mut self, layer: LayerIndex, count: usize) -> Vec<bool> {
        let (first, alarmed) = (self.encoded_blocks, self.alarmed.contains(&layer));
        self.encoded_blocks += count as u64;
        let due = |i: usize| alarmed || (first + i as u64).is_multiple_of(INTERVAL);
        (0..count).map(due).collect()
    }

    /// Whether blocks that were not measured must be, after what was found of those that were.
    #[must_use]
    pub fn is_alarming(encoded: &[Result<EncodedPages, BackendError>]) -> bool {
        encoded.iter().flatten().any(|pages| pages.over_bound != [0, 0])
    }

    /// Takes note of what was found of a layer's blocks.
    pub fn saw(&mut self, layer: LayerIndex, encoded: &[Result<EncodedPages, BackendError>]) {
        let mut measured = encoded.iter().flatten().filter(|pages| pages.sampled.is_some());
        match measured.next_back().map(|last| last.over_bound) {
            Some([0, 0]) => self.alarmed.remove(&layer),
            Some(_) => self.alarmed.insert(layer),
            None => false,
        };
    }
}
