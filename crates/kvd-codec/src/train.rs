//! Huffman tables of a layer from how often its codes stand in some blocks: counted here, or by
//! whoever has the blocks.

use crate::encode::{self, EncodeScratch};
use crate::huffman::HuffmanTable;
use crate::{BlockRows, CodecError, ModelCodec, SideSpec};
use kvd_core::{LayerIndex, Side};

/// How often each code stands in the blocks that a Huffman table is built from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeCounts {
    /// Keys or values.
    pub side: Side,
    /// Which of the side's codecs: [`ModelCodec::counted_codes`].
    pub variant: usize,
    /// By code.
    pub counts: Vec<u64>,
}

impl ModelCodec {
    /// Builds Huffman tables of a layer from blocks, whatever these are like, and writes with them
    /// from now on. Called again, it adds a version: older pages still decode. A store leaves the
    /// choice to [`ModelCodec::watch_tables`].
    ///
    /// # Errors
    /// When a block does not fit the geometry or holds values that cannot be stored, or the
    /// versions are used up.
    pub fn train_tables(
        &mut self,
        layer: LayerIndex,
        blocks: &[BlockRows<'_>],
    ) -> Result<(), CodecError> {
        let counts = self.count_blocks(layer, blocks)?;
        self.train_tables_from(layer, &counts)
    }

    /// How often each code stands in blocks of a layer, of every side and variant whose tables are
    /// built from blocks and that heads of the layer have. A page that its quantizer has no codes
    /// for counts nothing.
    ///
    /// # Errors
    /// When a block does not fit the geometry or holds values that cannot be stored.
    pub fn count_blocks(
        &self,
        layer: LayerIndex,
        blocks: &[BlockRows<'_>],
    ) -> Result<Vec<CodeCounts>, CodecError> {
        for block in blocks {
            self.check_shape(layer, block)?;
            self.check_values(block)?;
        }
        let mut counted = Vec::new();
        for side in Side::BOTH {
            let specs = self.spec().side_specs(side).into_iter().enumerate();
            for (variant, spec) in specs.filter(|(_, spec)| spec.has_trained_tables()) {
                let of_variant = (variant, spec);
                let mut scratch = EncodeScratch::default();
                let counts = self.count_codes(layer, side, of_variant, blocks, &mut scratch);
                let counts = counts.map(|counts| CodeCounts { side, variant, counts });
                counted.extend(counts);
            }
        }
        Ok(counted)
    }

    /// The second half of [`ModelCodec::train_tables`], for those who count the codes elsewhere,
    /// as [`ModelCodec::count_blocks`] would: each side and variant of the layer once.
    ///
    /// # Errors
    /// When counts are of a side and variant that no head of the layer has, are not as many as it
    /// has codes, or the versions are used up. What came before has its table nonetheless.
    pub fn train_tables_from(
        &mut self,
        layer: LayerIndex,
        counts: &[CodeCounts],
    ) -> Result<(), CodecError> {
        for counts in counts {
            let index = self.counted_tables(layer, counts)?;
            let stored = self.stored_blocks(layer);
            let history = &mut self.tables[index];
            if history.versions.len() > usize::from(u16::MAX) {
                return Err(CodecError::TableVersions { layer: layer.0 });
            }
            history.push(HuffmanTable::new(&counts.counts), stored);
        }
        Ok(())
    }

    /// Index of the tables that counts belong to.
    pub(crate) fn counted_tables(
        &self,
        layer: LayerIndex,
        CodeCounts { side, variant, counts }: &CodeCounts,
    ) -> Result<usize, CodecError> {
        let heads = 0..self.geometry().kv_heads as usize;
        let mut known = heads.filter(|head| {
            self.counted_codes(layer, *side, *head) == Some((*variant, counts.len()))
        });
        let head = known.next().ok_or_else(|| {
            CodecError::Shape(format!("{} counts of {side} variant {variant}", counts.len()))
        })?;
        Ok(self.table_index(layer, *side, self.head_codec(layer, *side, head)))
    }

    /// The variant whose counts the codes of a head belong to, and how many codes it has; none
    /// where its tables are not built from blocks.
    ///
    /// # Panics
    /// When layer or head lie outside the model's geometry.
    #[must_use]
    pub fn counted_codes(
        &self,
        layer: LayerIndex,
        side: Side,
        head: usize,
    ) -> Option<(usize, usize)> {
        let variant = self.head_codec(layer, side, head).variant;
        let spec = self.spec().side_specs(side).into_iter().nth(variant)?;
        let alphabet = spec.quantizer.code_count().filter(|_| spec.has_trained_tables())?;
        Some((variant, alphabet as usize))
    }

    /// How often each code stands in the heads of one variant; none for a variant without heads in
    /// the layer.
    pub(crate) fn count_codes(
        &self,
        layer: LayerIndex,
        side: Side,
        (variant, spec): (usize, &SideSpec),
        blocks: &[BlockRows<'_>],
        scratch: &mut EncodeScratch,
    ) -> Option<Vec<u64>> {
        let alphabet = spec.quantizer.code_count().expect("validated: Huffman needs codes");
        let mut counts = vec![0u64; alphabet as usize];
        let heads = 0..self.geometry().kv_heads as usize;
        let heads = heads.filter(|head| self.head_codec(layer, side, *head).variant == variant);
        heads.clone().next()?;
        for head in heads {
            let head_side = self.head_codec(layer, side, head);
            for block in blocks {
                let rows = block.head_rows(side, head, head_side.dim());
                encode::count_codes(head_side, rows, scratch, &mut counts);
            }
        }
        Some(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve_spec;
    use kvd_core::{DType, Geometry, RopePairing};

    const LAYER: LayerIndex = LayerIndex(0);

    fn codec() -> ModelCodec {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 2,
            head_dim_k: 32,
            head_dim_v: 32,
            block_tokens: 16,
            dtype: DType::F32,
            rope_pairing: RopePairing::Half,
        };
        ModelCodec::new(geometry, resolve_spec("kvcomp").unwrap(), None).unwrap()
    }

    #[test]
    fn tables_of_counts_are_those_of_the_blocks_that_were_counted() {
        let rows: Vec<f32> = (0..2 * 16 * 32).map(|i| ((i * 37 % 101) as f32).powi(2)).collect();
        let block = BlockRows { tokens: 16, k: &rows, v: &rows };
        let (mut of_blocks, mut of_counts) = (codec(), codec());
        of_blocks.train_tables(LAYER, &[block, block]).unwrap();
        let counts = of_counts.count_blocks(LAYER, &[block, block]).unwrap();
        assert_eq!(counts.len(), 2);
        assert!(counts.iter().all(|of| of.counts.iter().sum::<u64>() == 2 * 2 * 16 * 32));
        assert!(of_counts.needs_tables(LAYER));
        of_counts.train_tables_from(LAYER, &counts).unwrap();
        let mut pages = [Vec::new(), Vec::new()];
        of_blocks.encode_block(LAYER, &block, &mut pages[0]).unwrap();
        of_counts.encode_block(LAYER, &block, &mut pages[1]).unwrap();
        assert_eq!(pages[0], pages[1]);
    }

    #[test]
    fn counts_that_are_of_no_side_of_the_layer_build_no_table() {
        let mut codec = codec();
        let (variant, codes) = codec.counted_codes(LAYER, Side::Key, 0).unwrap();
        for (variant, codes) in [(variant + 1, codes), (variant, codes + 1)] {
            let counts = CodeCounts { side: Side::Key, variant, counts: vec![1; codes] };
            codec.train_tables_from(LAYER, &[counts]).unwrap_err();
        }
        assert_eq!(codec.table_versions(), 0);
    }
}
