//! When trained Huffman tables no longer fit what is encoded: the re-build policy
//! (`docs/adr/0003-entropy-tables-belong-to-the-model.md`).

use crate::encode::Scratch;
use crate::huffman::HuffmanTable;
use crate::lanes::LaneTable;
use crate::{BlockRows, ModelCodec, SideSpec};
use kvd_core::{LayerIndex, Side};

/// One block of a layer in so many has its codes counted.
const INTERVAL: u64 = 8;
/// Counted blocks after which the table is compared with one made for them.
const BLOCKS: u32 = 8;
/// How much longer the codes of those blocks may be than under a table made for them.
const EXCESS: f64 = 1.03;

/// What was counted of a layer, side and variant since its table was last compared.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drift {
    blocks: u32,
    counts: Vec<u64>,
}

impl Drift {
    /// Adds a block's codes; after [`BLOCKS`] of them starts anew, and gives the table that is to
    /// replace `current` where that one costs too much.
    fn add(&mut self, counts: &[u64], current: &HuffmanTable) -> Option<HuffmanTable> {
        self.counts.resize(counts.len(), 0);
        for (sum, count) in self.counts.iter_mut().zip(counts) {
            *sum += count;
        }
        self.blocks += 1;
        if self.blocks < BLOCKS {
            return None;
        }
        let counts = std::mem::take(self).counts;
        let fresh = HuffmanTable::new(&counts);
        let bits = |table: &HuffmanTable| -> u64 {
            counts.iter().zip(table.lengths()).map(|(n, length)| n * u64::from(*length)).sum()
        };
        (bits(current) as f64 > EXCESS * bits(&fresh) as f64).then_some(fresh)
    }
}

impl ModelCodec {
    /// Versions of a Huffman table that is built from blocks, at most: the first, and those that
    /// [`ModelCodec::watch_tables`] puts in its place.
    pub const TABLE_VERSIONS_MAX: usize = 16;

    /// Looks at a block that is about to be encoded, and builds new versions of its layer's
    /// Huffman tables where those of recent blocks no longer fit: one block in 8 is counted, and
    /// after 8 of these a table whose codes are over 3 % longer than those of one made for them
    /// is replaced, at most 15 times. Pages of earlier versions still decode. A block that cannot
    /// be encoded is passed over.
    pub fn watch_tables(&mut self, layer: LayerIndex, block: &BlockRows<'_>) {
        if self.check_shape(layer, block).is_ok() && self.wants_block(layer) {
            self.count_block(layer, block);
        }
    }

    /// The first half of [`ModelCodec::watch_tables`], for those who read rows only where they
    /// must: counts a block of the layer, and says whether [`ModelCodec::count_block`] wants it.
    pub fn wants_block(&mut self, layer: LayerIndex) -> bool {
        let Some(seen) = self.watched.get_mut(layer.0 as usize) else { return false };
        *seen += 1;
        seen.is_multiple_of(INTERVAL)
    }

    /// The second half.
    pub fn count_block(&mut self, layer: LayerIndex, block: &BlockRows<'_>) {
        if self.check_shape(layer, block).is_err() || self.check_values(block).is_err() {
            return;
        }
        for side in Side::BOTH {
            let specs: Vec<SideSpec> = self.spec().variants(side).into_iter().cloned().collect();
            for (variant, spec) in specs.iter().enumerate().filter(|(_, s)| s.has_trained_tables())
            {
                let mut scratch = Scratch::default();
                let counted =
                    self.count_codes(layer, side, (variant, spec), &[*block], &mut scratch);
                let Some((index, counts)) = counted else { continue };
                let versions = self.tables[index].len();
                let Some(current) = self.tables[index].last() else { continue };
                let fresh = self.drifts[index].add(&counts, &current.huffman);
                if let Some(fresh) = fresh.filter(|_| versions < Self::TABLE_VERSIONS_MAX) {
                    let grouping = current.grouping;
                    self.tables[index].push(LaneTable::new(fresh, grouping));
                }
            }
        }
    }

    /// Versions of all trained Huffman tables together.
    #[must_use]
    pub fn table_versions(&self) -> u64 {
        self.tables.iter().map(|versions| versions.len() as u64).sum()
    }
}
