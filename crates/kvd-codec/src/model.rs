//! A codec bound to a model: one [`HeadCodec`] per layer, side and KV head.

use crate::drift::{CountingPlan, TableHistory};
use crate::encode::{self, EncodeScratch, EncodedPage, EntropyCoder, PagePlan};
use crate::error_bound::FallbackChain;
use crate::huffman::streams::StreamTable;
use crate::quantizer::bind::HeadPlace;
use crate::quantizer::float::{all_within, largest_finite, largest_within};
use crate::quantizer::vq::codebook_bytes;
use crate::row_block::LayerSide;
use crate::{Calibration, CodecError, CodecSpec, HeadCodec, LayerQueries};
use kvd_core::{Geometry, LayerIndex, PageBytes, Side};
use std::collections::BTreeMap;

/// A codec, a geometry and what calibration gave it: encodes blocks, and serves readers.
#[derive(Clone, Debug)]
pub struct ModelCodec {
    geometry: Geometry,
    spec: CodecSpec,
    heads: Vec<HeadCodec>,
    /// Per layer, side and variant.
    pub(crate) tables: Vec<TableHistory>,
    /// Per layer; empty where no tables are built from blocks.
    pub(crate) counting: Vec<CountingPlan>,
    /// Variants that `tables` has room for, per side.
    variants: usize,
    pub(crate) ladder: FallbackChain,
    /// By which pages of a layer are measured.
    pub(crate) queries: BTreeMap<LayerIndex, LayerQueries>,
    calibration_bytes: u64,
}

/// K and V of one layer for consecutive tokens, all KV heads.
#[derive(Clone, Copy, Debug)]
pub struct BlockRows<'a> {
    /// Tokens in the block: 1 to `block_tokens`.
    pub tokens: usize,
    /// `[kv_heads, tokens, head_dim_k]`.
    pub k: &'a [f32],
    /// `[kv_heads, tokens, head_dim_v]`.
    pub v: &'a [f32],
}

impl<'a> BlockRows<'a> {
    /// `[tokens, head_dim]` of one head.
    pub(crate) fn head_rows(&self, side: Side, head: usize, dim: usize) -> &'a [f32] {
        let rows = match side {
            Side::Key => self.k,
            Side::Value => self.v,
        };
        &rows[head * self.tokens * dim..][..self.tokens * dim]
    }
}

/// Page ends and byte counts of the pages that [`ModelCodec::encode_block`] appended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedBlock {
    /// End of each page, in bytes from the block's start: K heads, then V heads.
    pub page_ends: Vec<u32>,
    /// Bytes by part, over all pages.
    pub parts: PageBytes,
    /// Bytes of the key pages.
    pub key_bytes: u64,
    /// Bytes of the value pages.
    pub value_bytes: u64,
    /// Pages that the codec could not represent and that hold raw floats.
    pub fallback_pages: u32,
}

impl ModelCodec {
    /// Binds `spec` to `geometry`.
    ///
    /// # Errors
    /// When the geometry is out of range, the codec does not fit it, or the calibration that the
    /// codec needs is absent or was fitted for something else.
    pub fn new(
        geometry: Geometry,
        spec: CodecSpec,
        calibration: Option<&Calibration>,
    ) -> Result<Self, CodecError> {
        geometry.validate_fields()?;
        for side in Side::BOTH {
            let mut variants = spec.side_specs(side).into_iter();
            let checked = variants.try_for_each(|variant| variant.check_geometry(&geometry, side));
            checked.map_err(|reason| CodecError::InvalidCodec { side, reason })?;
        }
        for exception in &spec.overrides {
            let side = exception.side;
            let checked = exception.check_ranges(&geometry);
            checked.map_err(|reason| CodecError::InvalidCodec { side, reason })?;
        }
        let mut heads = Vec::new();
        for layer in 0..geometry.layers {
            for side in Side::BOTH {
                let place = LayerSide { layer: LayerIndex(layer), side };
                heads.extend(HeadCodec::bind_heads(&geometry, &spec, calibration, place)?);
            }
        }
        let per_head: u64 = heads.iter().map(HeadCodec::calibration_bytes).sum();
        let shared = shared_bytes(&heads, geometry.kv_heads as usize);
        let calibration_bytes = per_head + codebook_bytes(&heads) + shared;
        let variants = Side::BOTH.map(|side| spec.side_specs(side).len()).into_iter().max();
        let variants = variants.expect("there are two sides");
        let mut tables = Vec::new();
        for _ in 0..geometry.layers {
            for side in Side::BOTH {
                let mut histories: Vec<_> =
                    spec.side_specs(side).into_iter().map(TableHistory::new).collect();
                histories.resize(variants, TableHistory::default());
                tables.extend(histories);
            }
        }
        let trained = heads.iter().any(|head| head.trained_tables);
        let layers = if trained { geometry.layers as usize } else { 0 };
        let counting = vec![CountingPlan::default(); layers];
        let ladder = FallbackChain::new(&geometry)?;
        Ok(Self {
            geometry,
            spec,
            heads,
            tables,
            counting,
            variants,
            ladder,
            queries: BTreeMap::new(),
            calibration_bytes,
        })
    }

    /// The model's geometry.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The codec.
    #[must_use]
    pub fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    /// One head's side.
    ///
    /// # Panics
    /// When layer or head lie outside the geometry.
    #[must_use]
    pub fn head_codec(&self, layer: LayerIndex, side: Side, head: usize) -> &HeadCodec {
        let kv_heads = self.geometry.kv_heads as usize;
        assert!(head < kv_heads, "head {head} of {kv_heads}");
        &self.heads[(layer.0 as usize * 2 + side.index()) * kv_heads + head]
    }

    /// Bytes that this codec keeps of its calibration.
    #[must_use]
    pub fn calibration_bytes(&self) -> u64 {
        self.calibration_bytes
    }

    /// Bytes of all Huffman tables that were built from blocks: one code length per symbol. Priors
    /// follow from the codec.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        let built = self.tables.iter().flat_map(|history| history.versions.iter().skip(1));
        built.map(StreamTable::size_bytes).sum()
    }

    /// Whether a side of that layer uses Huffman and has no table but its prior yet. False outside
    /// the geometry.
    #[must_use]
    pub fn needs_tables(&self, layer: LayerIndex) -> bool {
        let per_layer = 2 * self.geometry.kv_heads as usize;
        let heads = self.heads.chunks(per_layer).nth(layer.0 as usize).unwrap_or_default();
        heads.iter().enumerate().any(|(index, head)| {
            let side = Side::BOTH[index / self.geometry.kv_heads as usize];
            head.trained_tables
                && self.tables[self.table_index(layer, side, head)].built_versions() == 0
        })
    }

    /// Every Huffman table of a head whose tables are built from blocks: version `n` of page
    /// headers is at index `n`, the prior at 0. Empty for other heads.
    ///
    /// # Panics
    /// When layer or head lie outside the model's geometry.
    #[must_use]
    pub fn trained_tables(&self, layer: LayerIndex, side: Side, head: usize) -> &[StreamTable] {
        &self.tables[self.table_index(layer, side, self.head_codec(layer, side, head))].versions
    }

    /// The version of the table that pages of a head are written with; 0, the prior, where no table
    /// was built from blocks.
    ///
    /// # Panics
    /// When layer or head lie outside the model's geometry.
    #[must_use]
    pub fn current_table(&self, layer: LayerIndex, side: Side, head: usize) -> usize {
        self.tables[self.table_index(layer, side, self.head_codec(layer, side, head))].current
    }

    /// The Huffman table of that version, as a page header of that head names it.
    pub(crate) fn huffman_table(
        &self,
        place: LayerSide,
        head: &HeadCodec,
        version: u16,
    ) -> Option<&StreamTable> {
        let LayerSide { layer, side } = place;
        self.tables.get(self.table_index(layer, side, head))?.versions.get(usize::from(version))
    }

    pub(crate) fn table_index(&self, layer: LayerIndex, side: Side, head: &HeadCodec) -> usize {
        (layer.0 as usize * 2 + side.index()) * self.variants + head.variant
    }

    /// Encodes one block of one layer: `2 * kv_heads` pages appended to `out`, K heads first.
    ///
    /// # Errors
    /// When the block does not fit the geometry, holds NaN, infinity or a value outside the
    /// geometry's dtype. `out` is then as it was.
    pub fn encode_block(
        &self,
        layer: LayerIndex,
        block: &BlockRows<'_>,
        out: &mut Vec<u8>,
    ) -> Result<EncodedBlock, CodecError> {
        self.encode_pages(layer, block, out, &mut |plan, scratch, out| {
            encode::append_page(plan, scratch, out)
        })
    }

    /// Encodes a block, each page by `encode_page`.
    pub(crate) fn encode_pages(
        &self,
        layer: LayerIndex,
        block: &BlockRows<'_>,
        out: &mut Vec<u8>,
        encode_page: &mut dyn FnMut(&PagePlan<'_>, &mut EncodeScratch, &mut Vec<u8>) -> EncodedPage,
    ) -> Result<EncodedBlock, CodecError> {
        self.check_shape(layer, block)?;
        let start = out.len();
        let mut encoded = EncodedBlock::default();
        let mut scratch = EncodeScratch::default();
        for side in Side::BOTH {
            let side_start = out.len();
            for head in 0..self.geometry.kv_heads as usize {
                let head_side = self.head_codec(layer, side, head);
                let rows = block.head_rows(side, head, head_side.dim());
                let absmax = match self.check_head_rows(side, head, rows, block.tokens) {
                    Ok(absmax) => absmax,
                    Err(error) => {
                        out.truncate(start);
                        return Err(error);
                    }
                };
                let plan = PagePlan {
                    side: head_side,
                    place: HeadPlace { layer, side, head },
                    dtype: self.geometry.dtype,
                    rows,
                    absmax,
                    stage: self.entropy_coder(layer, side, head_side),
                };
                let page_start = out.len();
                let page = encode_page(&plan, &mut scratch, out);
                if head == 0 {
                    // Pages of a side are of a size, or nearly.
                    let page_bytes = out.len() - page_start;
                    out.reserve(page_bytes * self.geometry.kv_heads as usize * 9 / 8);
                }
                encoded.parts += page.parts;
                encoded.fallback_pages += u32::from(page.fallback);
                let end = u32::try_from(out.len() - start).expect("a block is below 4 GiB");
                encoded.page_ends.push(end);
            }
            let bytes = (out.len() - side_start) as u64;
            match side {
                Side::Key => encoded.key_bytes = bytes,
                Side::Value => encoded.value_bytes = bytes,
            }
        }
        Ok(encoded)
    }

    /// The entropy coding of a head, with the table that is written with; fixed width where it has
    /// none.
    fn entropy_coder(&self, layer: LayerIndex, side: Side, head: &HeadCodec) -> EntropyCoder<'_> {
        let history = &self.tables[self.table_index(layer, side, head)];
        match history.versions.get(history.current) {
            Some(table) if head.trained_tables => EntropyCoder::Huffman {
                table,
                version: history.current as u16,
                prior: &history.versions[0],
            },
            _ => EntropyCoder::Fixed,
        }
    }

    /// The table that pages of a head are written with.
    pub(crate) fn written_table(
        &self,
        layer: LayerIndex,
        side: Side,
        head: &HeadCodec,
    ) -> Option<&StreamTable> {
        let history = &self.tables[self.table_index(layer, side, head)];
        history.versions.get(history.current)
    }

    /// Whether a block has the shape of the model's.
    pub(crate) fn check_shape(
        &self,
        layer: LayerIndex,
        block: &BlockRows<'_>,
    ) -> Result<(), CodecError> {
        let g = &self.geometry;
        if layer.0 >= g.layers {
            return Err(CodecError::Shape(format!("layer {layer} of {}", g.layers)));
        }
        if block.tokens == 0 || block.tokens > g.block_tokens as usize {
            let text = format!("{} tokens in blocks of {}", block.tokens, g.block_tokens);
            return Err(CodecError::Shape(text));
        }
        for side in Side::BOTH {
            let rows = if side == Side::Key { block.k } else { block.v };
            let want = g.kv_heads as usize * block.tokens * g.head_dim(side);
            if rows.len() != want {
                let text = format!("{side} has {} values, expected {want}", rows.len());
                return Err(CodecError::Shape(text));
            }
        }
        Ok(())
    }

    /// Whether the values of a shaped block can be stored.
    pub(crate) fn check_values(&self, block: &BlockRows<'_>) -> Result<(), CodecError> {
        for side in Side::BOTH {
            for head in 0..self.geometry.kv_heads as usize {
                let rows = block.head_rows(side, head, self.geometry.head_dim(side));
                self.check_head_rows(side, head, rows, block.tokens)?;
            }
        }
        Ok(())
    }

    /// Whether the values of a head's rows can be stored.
    fn check_head_rows(
        &self,
        side: Side,
        head: usize,
        rows: &[f32],
        tokens: usize,
    ) -> Result<f32, CodecError> {
        let limit = largest_finite(self.geometry.dtype);
        if let Some(absmax) = largest_within(rows, limit) {
            return Ok(absmax);
        }
        let at = rows.iter().position(|x| !all_within(&[*x], limit)).unwrap_or(0);
        Err(self.bad_value(side, tokens, head * rows.len() + at, rows[at]))
    }

    /// Names the place of a value that cannot be stored.
    fn bad_value(&self, side: Side, tokens: usize, at: usize, value: f32) -> CodecError {
        let dim = self.geometry.head_dim(side);
        let (head, token, channel) = (at / dim / tokens, at / dim % tokens, at % dim);
        if value.is_finite() {
            let dtype = self.geometry.dtype;
            return CodecError::OutOfRange { side, head, token, channel, dtype };
        }
        CodecError::NonFinite { side, head, token, channel }
    }
}

/// Bytes of what heads share: per layer and side, once for each variant, the tables of a grid or
/// the levels of a bit allocation.
fn shared_bytes(heads: &[HeadCodec], kv_heads: usize) -> u64 {
    let of_side = |side: &[HeadCodec]| -> u64 {
        let variants: BTreeMap<usize, u64> =
            side.iter().map(|head| (head.variant, head.shared_bytes())).collect();
        variants.values().sum()
    };
    heads.chunks(kv_heads).map(of_side).sum()
}
