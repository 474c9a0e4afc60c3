//! The contract between a device worker and its device.
//!
//! One worker thread owns a backend and calls it; a backend may use more threads inside a call.
//! The worker promises that extents it passes are reserved (to write) or pinned (to read) for the
//! length of the call; those of an attend in slices ([`Backend::attend_slice`]) until it is
//! answered or given up.

use crate::region::no_region_error;
use crate::{
    AttendPlan, AttendTask, BackendError, DeviceRegion, LoadPlan, OpenedRegion, RegionHandle,
    RegionPlaces, RegionRows, Source, StagedRows, StagedWrite, Stop,
};
use bytes::Bytes;
use kvd_codec::{CheckedBlock, ModelCodec, PageBytes};
use kvd_core::{Extent, LayerIndex, ModelId};
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
    /// The pages, `[K heads.., V heads..]`; empty where the device holds them.
    pub bytes: Vec<u8>,
    /// Which pages the device holds; none where they are in `bytes`.
    pub held: Option<HeldPages>,
    /// End of each page, in bytes from the first.
    pub page_ends: Arc<[u32]>,
    /// The bytes of the pages by kind.
    pub parts: PageBytes,
    /// The bytes of the pages by side.
    pub side_bytes: [u64; 2],
    /// K and V values encoded.
    pub values: u64,
    /// Pages that could not be quantized and stayed raw.
    pub fallback_pages: u32,
    /// Measured errors; none where this block was not sampled.
    pub sampled: Option<CheckedBlock>,
}

/// Pages that lie on the device, beside its page memory, until they are placed or it is asked for
/// anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldPages {
    /// Which call of [`Backend::encode`] made them.
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

/// Output of attention.
#[derive(Clone, Debug, Default)]
pub struct Attended {
    /// `[sum of n_q, q_heads, head_dim_v]` in the plan's dtype.
    pub out: Vec<u8>,
    /// `[sum of n_q, q_heads]`.
    pub lse: Vec<f32>,
    /// Bytes of pages and raw rows that lay in the plan's parts.
    pub stored_bytes_read: u64,
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

/// How a device was given its attention kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    /// Kernels one by one.
    pub kernels: u64,
    /// Graphs of several.
    pub graphs: u64,
    /// Graphs that were built for it; the others were reused.
    pub graphs_built: u64,
    /// Nodes of graphs whose parameters were changed.
    pub nodes_updated: u64,
    /// Why there are no graphs any more.
    pub graphs_off: Option<String>,
}

/// A device that holds pages and answers attention over them.
pub trait Backend: Send {
    /// Describes this device.
    fn info(&self) -> DeviceInfo;

    /// Whether the device serves a codec, and has room for what it keeps of it; asked right before
    /// it is registered.
    ///
    /// # Errors
    /// What it cannot do, or has no room for.
    fn supports(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        let _ = codec;
        Ok(())
    }

    /// Why the device must not be called any more; `None` while it works. The worker asks after
    /// every job, and closes for good.
    fn failure(&self) -> Option<&str> {
        None
    }

    /// How it was given its attention kernels so far.
    fn launches(&self) -> Launches {
        Launches::default()
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

    /// Tests that every value is finite, before anything is written.
    ///
    /// # Errors
    /// The first NaN or infinity, or an unknown model.
    fn check(&self, model: ModelId, rows: &IncomingRows) -> Result<(), BackendError>;

    /// Writes `count` tokens of `rows`, from `source_row` on, into a raw slot.
    ///
    /// # Errors
    /// When the model is unknown.
    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError>;

    /// Copies `count` rows into a raw slot; pages are decoded.
    ///
    /// # Errors
    /// When the model is unknown or a page is corrupt.
    fn copy(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        from: &Source,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError>;

    /// Encodes blocks of one layer; entropy tables are built from them when the layer has none.
    /// A block that cannot be encoded, even raw, has an error of its own: the others stand.
    ///
    /// # Errors
    /// When the model is unknown or its entropy tables are used up.
    fn encode(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError>;

    /// Measures the errors of a layer's pages by these queries from now on, as
    /// [`ModelCodec::set_queries`] does; a device that measures none ignores them.
    ///
    /// # Errors
    /// When the model is unknown or the queries do not fit it.
    fn set_queries(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        heads: &[Vec<f32>],
    ) -> Result<(), BackendError> {
        let _ = (model, layer, heads);
        Ok(())
    }

    /// Moves encoded pages into their slot, after the call that encoded them and before any other.
    fn place(&mut self, pages: &EncodedPages, to: Extent);

    /// Answers attention straight from raw rows and pages.
    ///
    /// # Errors
    /// When the model is unknown, a query is not finite, or a page is corrupt.
    fn attend(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError>;

    /// Goes on with [`Backend::attend`] until it is answered or, `None`, until `stop` says that
    /// its slice is over; any other call may come before the next slice. What the plan names stays
    /// as it is meanwhile. A backend looks at `stop` every few milliseconds of its own work.
    ///
    /// # Errors
    /// As [`Backend::attend`], or [`BackendError::Stopped`].
    fn attend_slice(
        &mut self,
        task: &mut AttendTask,
        stop: &Stop,
    ) -> Result<Option<Attended>, BackendError> {
        task.attend_by_pieces(stop, |plan| self.attend(plan))
    }

    /// Decodes rows back.
    ///
    /// # Errors
    /// When the model is unknown or a page is corrupt.
    fn load(&mut self, plan: &LoadPlan) -> Result<LoadedRows, BackendError>;

    /// Opens device memory that a worker shares.
    ///
    /// # Errors
    /// Why this device cannot.
    fn open_region(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<OpenedRegion, BackendError> {
        let _ = (handle, bytes);
        Err(no_region_error())
    }

    /// [`Backend::attend`] with queries and answer in a region; the plan's own queries are ignored.
    /// Gives the bytes of pages and raw rows that lay in the plan's parts. `launched` is called
    /// once all of it is the device's and the region's event is recorded behind it, and before it
    /// is known to be done; never where the region has no event. What is refused later has written
    /// something to the answer's places.
    ///
    /// # Errors
    /// As [`Backend::attend`]; when the region is not open or a place not inside it or not aligned.
    fn attend_in_place(
        &mut self,
        plan: &AttendPlan,
        places: &RegionPlaces,
        launched: &mut dyn FnMut(),
    ) -> Result<u64, BackendError> {
        let _ = (plan, places, launched);
        Err(no_region_error())
    }

    /// Copies K and V of a region within the device, and says of the copy what the host would of
    /// rows that it was sent; `None` where the device has no room for so many at once.
    ///
    /// # Errors
    /// When the model is unknown, the region is not open or a place not inside it or not aligned.
    fn stage(
        &mut self,
        model: ModelId,
        rows: &RegionRows,
    ) -> Result<Option<StagedRows>, BackendError> {
        let _ = (model, rows);
        Err(no_region_error())
    }

    /// [`Backend::write`] of rows that are staged, to any number of slots, none of which meets
    /// another.
    ///
    /// # Errors
    /// When they are no longer staged.
    fn write_staged(
        &mut self,
        staged: &StagedRows,
        writes: &[StagedWrite],
    ) -> Result<(), BackendError> {
        let _ = (staged, writes);
        Err(no_region_error())
    }

    /// Gives it back; one that is not open is none.
    fn close_region(&mut self, region: DeviceRegion) {
        let _ = region;
    }

    /// Copies out of it.
    ///
    /// # Errors
    /// When it is not open, the range is not inside it, or the device has failed.
    fn read_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        let _ = (region, offset, bytes);
        Err(no_region_error())
    }

    /// Copies into it; what was written is there when this returns.
    ///
    /// # Errors
    /// As [`Backend::read_region`].
    fn write_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let _ = (region, offset, bytes);
        Err(no_region_error())
    }
}
