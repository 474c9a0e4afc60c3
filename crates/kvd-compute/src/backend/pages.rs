//! Rows in and pages out: what a device keeps of models and their blocks.

use super::{AppendOutcome, AppendSteps, AppendTask, ReserveSlot};
use crate::{BackendError, LoadPlan, Stop};
use bytes::Bytes;
use kvd_codec::{CheckedBlock, ModelCodec};
use kvd_core::{Extent, ModelId, PackedBytes, Side};
use std::ops::Range;
use std::sync::Arc;

/// Description of a device, for logs and `GetServerInfo`.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// For example `cpu (avx512, 2 threads, fast)`.
    pub description: String,
    /// Page memory in bytes.
    pub arena_bytes: u64,
    /// UUID of a GPU, by which workers name the memory that they share with it.
    pub uuid: Option<String>,
}

/// K and V as they arrived: `[tokens, kv_heads, head_dim]` in the model's dtype. Lengths have
/// been checked against the geometry.
#[derive(Clone, Debug)]
pub struct IncomingRows {
    /// Tokens in both payloads.
    pub tokens: u32,
    /// Keys.
    pub k: Bytes,
    /// Values.
    pub v: Bytes,
}

impl IncomingRows {
    /// Some tokens of one side, and nothing of the other.
    pub(super) fn rows_of_side(&self, side: Side, tokens: Range<u32>) -> Self {
        let of_side = |wanted, bytes: &Bytes| {
            let token_bytes = bytes.len() / self.tokens.max(1) as usize;
            let [first, end] = [tokens.start, tokens.end].map(|at| at as usize * token_bytes);
            if side == wanted { bytes.slice(first..end) } else { Bytes::new() }
        };
        let [k, v] = [of_side(Side::Key, &self.k), of_side(Side::Value, &self.v)];
        Self { tokens: tokens.end - tokens.start, k, v }
    }
}

/// Rows of a raw slot.
#[derive(Clone, Copy, Debug)]
pub struct RawTarget {
    /// The slot.
    pub extent: Extent,
    /// Rows the slot was laid out for.
    pub capacity_rows: u32,
    /// First row to write.
    pub first_row: u32,
}

/// Rows of a raw slot that are to become pages.
#[derive(Clone, Copy, Debug)]
pub struct EncodeSource {
    /// The slot.
    pub extent: Extent,
    /// Rows the slot was laid out for.
    pub capacity_rows: u32,
    /// First row to encode.
    pub first_row: u32,
    /// Rows to encode.
    pub rows: u32,
}

/// One encoded block of one layer, waiting for a slot of exactly its size.
#[derive(Clone, Debug)]
pub struct EncodedPages {
    /// The pages, `[K heads.., V heads..]`; empty where the device holds them, or once they are in
    /// their slot.
    pub bytes: Vec<u8>,
    /// Which pages the device holds; none where they are in `bytes`.
    pub held: Option<HeldPages>,
    /// End of each page, in bytes from the first.
    pub page_ends: Arc<[u32]>,
    /// The bytes of the pages, and the values encoded.
    pub packed: PackedBytes,
    /// Pages that could not be quantized and stayed raw.
    pub fallback_pages: u32,
    /// Measured errors; none where this block was not sampled.
    pub sampled: Option<CheckedBlock>,
}

/// Pages that lie on the device, beside its page memory, until they are placed or it is asked for
/// anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldPages {
    /// Which call of [`AppendSteps::encode`] made them.
    pub call: u64,
    /// Number of the block in that call.
    pub block: u32,
}

impl EncodedPages {
    /// Pages over the bound that the codec declares, by side, kept with a safer one; known of
    /// sampled blocks only.
    #[must_use]
    pub fn over_bound(&self) -> [u32; 2] {
        self.sampled.map_or([0; 2], |checked| checked.over_bound)
    }

    /// Bytes of all pages: what a slot for them takes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.page_ends.last().copied().map_or(0, u64::from)
    }
}

/// Rows decoded back, `[tokens, kv_heads, head_dim]`.
#[derive(Clone, Debug)]
pub struct LoadedRows {
    /// Keys.
    pub k: Vec<u8>,
    /// Values.
    pub v: Vec<u8>,
}

/// Memory a model takes once, not per token.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelBytes {
    /// Smoothing factors, codebooks, matrices.
    pub calibration: u64,
    /// Huffman tables.
    pub tables: u64,
    /// Versions of those that are built from blocks.
    pub table_versions: u64,
}

/// Keeps rows and pages of models, and makes pages of rows.
pub trait PageBackend: AppendSteps + Send {
    /// Describes this device.
    fn info(&self) -> DeviceInfo;

    /// Whether the device serves a codec, and has room for what it keeps of it; asked right before
    /// it is registered.
    ///
    /// # Errors
    /// The part of the codec that the device does not serve or has no memory for.
    fn supports(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        let _ = codec;
        Ok(())
    }

    /// Why the device must not be called any more; `None` while it works. The worker asks after
    /// every job, and closes for good.
    fn failure(&self) -> Option<&str> {
        None
    }

    /// Makes a model's codec known; an id that is known already is replaced.
    fn register(&mut self, model: ModelId, codec: ModelCodec);

    /// Forgets a model. Its pages must be gone.
    fn unregister(&mut self, model: ModelId);

    /// Memory that a model takes once.
    ///
    /// # Errors
    /// When the model is unknown.
    fn model_bytes(&self, model: ModelId) -> Result<ModelBytes, BackendError>;

    /// Goes on bringing the rows of an append to their slots, and packing the blocks that leave the
    /// window into slots that `reserve` gives, until all is done or, `None`, the slice is over. A
    /// block that finds no room stays raw: giving up the append would not free anything. Until then
    /// no other append to that layer may begin.
    ///
    /// # Errors
    /// When a row is not finite, the model is unknown, a page is corrupt or the device has failed;
    /// nothing of it may be published then.
    fn append_slice(
        &mut self,
        task: &mut AppendTask,
        reserve: &mut ReserveSlot<'_>,
        stop: &Stop,
    ) -> Result<Option<AppendOutcome>, BackendError> {
        task.go_on(self, reserve, stop)
    }

    /// Decodes rows back.
    ///
    /// # Errors
    /// When the model is unknown or a page is corrupt.
    fn load(&mut self, plan: &LoadPlan) -> Result<LoadedRows, BackendError>;
}
