//! A sequence as the daemon stores it: pages by the reference encoder, windows as raw rows.

use kvd_codec::{BlockRows, Calibration, CodecSpec, ModelCodec, Page, PageHeader, resolve_spec};
use kvd_compute::{PlanPart, Source};
use kvd_core::{DType, Extent, Geometry, LayerIndex, RopePairing, Side};
use kvd_fit::{Samples, fit_calibration};
use std::cell::RefCell;
use std::collections::HashMap;

const LAYER: LayerIndex = LayerIndex(0);
/// Slots are cut in granules of this size.
const GRANULE: usize = 64;

/// How a sequence is cut.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Tokens of each page.
    pub(crate) pages: Vec<usize>,
    /// Tokens of the raw window behind them.
    pub(crate) window: usize,
}

/// A stored sequence of one layer.
pub(crate) struct Stored {
    pub(crate) codec: ModelCodec,
    pub(crate) arena: Vec<u8>,
    pub(crate) headers: HashMap<u64, PageHeader>,
    pub(crate) parts: Vec<PlanPart>,
    pub(crate) tokens: u32,
}

/// One layer, two KV heads, blocks of at most 96 tokens.
pub(crate) fn geometry(dim_k: u32, dim_v: u32, dtype: DType) -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: 2,
        head_dim_k: dim_k,
        head_dim_v: dim_v,
        block_tokens: 96,
        dtype,
        rope_pairing: RopePairing::Half,
    }
}

/// A deterministic, roughly normal value that f16 and bf16 can hold.
pub(crate) fn noise(index: usize) -> f32 {
    let mut z = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut sum = 0.0;
    for _ in 0..4 {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        sum += (z >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    }
    f32::from_bits((sum * 1.7).to_bits() & 0xFFFF_0000)
}

impl Stored {
    /// Stores `value(side, head, token, channel)`.
    pub(crate) fn new(
        geometry: &Geometry,
        codec: &str,
        layout: &Layout,
        value: impl Fn(Side, usize, usize, usize) -> f32,
    ) -> Self {
        Self::calibrated(geometry, codec, layout, value, Calibration::clone)
    }

    /// A block whose codec has the calibration that `change` makes.
    pub(crate) fn calibrated(
        geometry: &Geometry,
        codec: &str,
        layout: &Layout,
        value: impl Fn(Side, usize, usize, usize) -> f32,
        change: fn(&Calibration) -> Calibration,
    ) -> Self {
        let spec = resolve_spec(codec).unwrap();
        let calibration = calibration(geometry, &spec).as_ref().map(change);
        let codec = ModelCodec::new(geometry.clone(), spec, calibration.as_ref()).unwrap();
        // Something lies in front, so that offsets count.
        let arena = vec![0xA5; 3 * GRANULE];
        let mut stored =
            Self { codec, arena, headers: HashMap::new(), parts: Vec::new(), tokens: 0 };
        for &tokens in &layout.pages {
            stored.push_pages(tokens, &value);
        }
        if layout.window > 0 {
            stored.push_rows(layout.window, &value);
        }
        stored
    }

    /// `[kv_heads, tokens, dim]` of the next tokens.
    fn rows(
        &self,
        side: Side,
        tokens: usize,
        value: &impl Fn(Side, usize, usize, usize) -> f32,
    ) -> Vec<f32> {
        let geometry = self.codec.geometry();
        let (dim, first) = (geometry.head_dim(side), self.tokens as usize);
        let count = geometry.kv_heads as usize * tokens * dim;
        let at = |i: usize| value(side, i / dim / tokens, first + i / dim % tokens, i % dim);
        (0..count).map(at).collect()
    }

    fn push(&mut self, tokens: usize, source: Source) {
        let rows = tokens as u32;
        self.parts.push(PlanPart { first_token: self.tokens, rows, source });
        self.tokens += rows;
        self.arena.resize(self.arena.len().next_multiple_of(GRANULE), 0xA5);
    }

    /// Builds Huffman tables from `tokens` tokens of other rows, which are not stored.
    pub(crate) fn train(
        &mut self,
        tokens: usize,
        value: impl Fn(Side, usize, usize, usize) -> f32,
    ) {
        let [k, v] = Side::BOTH.map(|side| self.rows(side, tokens, &value));
        self.codec.train_tables(LAYER, &[BlockRows { tokens, k: &k, v: &v }]).unwrap();
    }

    /// Stores one page more of each side and head.
    pub(crate) fn push_pages(
        &mut self,
        tokens: usize,
        value: &impl Fn(Side, usize, usize, usize) -> f32,
    ) {
        let [k, v] = Side::BOTH.map(|side| self.rows(side, tokens, value));
        let block = BlockRows { tokens, k: &k, v: &v };
        let offset = self.arena.len();
        if self.codec.needs_tables(LAYER) {
            self.codec.train_tables(LAYER, &[block]).unwrap();
        }
        let checked = self.codec.encode_block_checked(LAYER, &block, &mut self.arena);
        let (encoded, _) = checked.unwrap();
        let mut start = offset;
        for end in &encoded.page_ends {
            let end = offset + *end as usize;
            let page = Page::parse_page(&self.arena[start..end]).unwrap();
            self.headers.insert(start as u64, *page.header());
            start = end;
        }
        let len = (self.arena.len() - offset) as u64;
        let extent = Extent { offset: offset as u64, len };
        self.push(tokens, Source::Pages { extent, ends: encoded.page_ends.into(), first_row: 0 });
    }

    /// A window with room for three rows more, which hold NaN, and whose first row is not the
    /// sequence's.
    fn push_rows(&mut self, tokens: usize, value: &impl Fn(Side, usize, usize, usize) -> f32) {
        let geometry = self.codec.geometry().clone();
        let (first_row, capacity_rows) = (1, tokens as u32 + 3);
        let layout = geometry.raw_layout(capacity_rows);
        let offset = self.arena.len();
        self.arena.resize(offset + layout.size_bytes() as usize, 0xFF);
        for side in Side::BOTH {
            let rows = self.rows(side, tokens, value);
            let dim = geometry.head_dim(side);
            for (head, rows) in rows.chunks_exact(tokens * dim).enumerate() {
                let start = offset + layout.row_offset(side, head as u64, first_row) as usize;
                let len = tokens * layout.row_bytes(side) as usize;
                geometry.dtype.narrow_values(rows, &mut self.arena[start..start + len]);
            }
        }
        let extent = Extent { offset: offset as u64, len: layout.size_bytes() };
        let first_row = first_row as u32;
        self.push(tokens, Source::Raw { extent, capacity_rows, first_row });
    }
}

thread_local! {
    /// Calibrations made so far: a fit takes longer than everything else that a test does.
    static FITTED: RefCell<HashMap<(Geometry, String), Calibration>> = RefCell::default();
}

/// Rows to fit to: large codebooks want a sub-vector for every entry.
fn samples_of(spec: &CodecSpec) -> usize {
    let text = spec.to_string();
    if text.contains("b=12") || text.contains("scope=group") { 512 } else { 160 }
}

/// A calibration from rows like those of the tests, where the codec needs one.
pub(crate) fn calibration(geometry: &Geometry, spec: &CodecSpec) -> Option<Calibration> {
    if !spec.needs_calibration() {
        return None;
    }
    let fitted = || {
        let mut samples = Samples::new(geometry);
        for head in 0..geometry.kv_heads as usize {
            let queries = 80 * geometry.head_dim_k as usize;
            let queries: Vec<f32> = (0..queries).map(|i| noise(5_000_011 + i)).collect();
            samples.push_queries(LAYER, head, &queries).unwrap();
            for side in Side::BOTH {
                let dim = geometry.head_dim(side);
                let seed = 1_000_003 * (1 + side.index() + 2 * head);
                let rows: Vec<f32> = (0..samples_of(spec) * dim).map(|i| noise(seed + i)).collect();
                samples.push(LAYER, side, head, &rows).unwrap();
            }
        }
        fit_calibration(geometry, spec, &samples, 7, &mut |_| {}).unwrap()
    };
    FITTED.with_borrow_mut(|known| {
        let key = (geometry.clone(), spec.to_string());
        Some(known.entry(key).or_insert_with(fitted).clone())
    })
}
