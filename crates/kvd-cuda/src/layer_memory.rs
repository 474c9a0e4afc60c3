//! How much device memory the tables of a layer take at most, known before any of its Huffman
//! tables is built. Pure: a backend takes as much when a model is registered, so that no layer
//! finds too little later.

use crate::{LayerShapes, QueryTransforms, StoreShapes, huffman_tables};
use kvd_codec::ModelCodec;
use kvd_core::{LayerIndex, Side};

/// Bytes that a layer's parts take at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerMemory {
    /// Bytes of [`LayerShapes::tables`].
    pub tables: usize,
    /// Bytes of [`StoreShapes::steps`]; 0 where the host encodes.
    pub steps: usize,
    /// Bytes of [`QueryTransforms::steps`].
    pub turns: usize,
}

impl LayerMemory {
    /// The memory of a layer, whose Huffman tables are replaced at most as often as a codec does.
    #[must_use]
    pub fn new(codec: &ModelCodec, layer: LayerIndex, shapes: &LayerShapes) -> Self {
        let versions = ModelCodec::TABLE_VERSIONS_MAX;
        let of_version: usize = trained_tables(codec, layer).iter().map(|of| of.read_bytes()).sum();
        Self {
            tables: shapes.tables.len() + versions * of_version,
            steps: StoreShapes::steps_bytes_max(codec, layer, shapes),
            turns: QueryTransforms::new(codec, layer).steps.len(),
        }
    }
}

/// A side and variant whose Huffman tables are built from blocks: the heads that share them.
pub(crate) struct TrainedTables {
    side: Side,
    variant: usize,
    codes: usize,
    runs: usize,
}

impl TrainedTables {
    /// Bytes that attention reads of one version, whole pieces.
    fn read_bytes(&self) -> usize {
        huffman_tables::trained_bytes(self.codes, self.runs)
    }

    /// Codes of a table.
    pub(crate) fn code_count(&self) -> usize {
        self.codes
    }
}

/// Those of a layer.
pub(crate) fn trained_tables(codec: &ModelCodec, layer: LayerIndex) -> Vec<TrainedTables> {
    let mut all: Vec<TrainedTables> = Vec::new();
    for head in 0..codec.geometry().kv_heads as usize {
        for side in Side::BOTH {
            let Some((variant, codes)) = codec.counted_codes(layer, side, head) else { continue };
            let runs = codec.head_codec(layer, side, head).stream_runs().map_or(0, <[_]>::len);
            if !all.iter().any(|of| (of.side, of.variant) == (side, variant)) {
                all.push(TrainedTables { side, variant, codes, runs });
            }
        }
    }
    all
}
