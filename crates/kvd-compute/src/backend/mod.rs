//! The contract between a device worker and its device, in four traits: pages (rows in, pages made
//! and kept), attention over them, regions that a worker shares with the device, and blocks that
//! leave it and come back.
//!
//! One thread at a time calls a backend: its worker's, or whoever asks for a plan that is small
//! ([`AttendBackend::is_small_plan`]). A backend may use more threads inside a call.
//! The worker promises that extents it passes are reserved (to write) or pinned (to read) for the
//! length of the call; those of an attend or append in slices ([`AttendBackend::attend_slice`],
//! [`PageBackend::append_slice`]) until it is answered or given up.

mod append;
mod append_task;
mod attend;
mod pages;
mod regions;
mod transfer;

pub use append::{
    AppendOutcome, AppendPlan, AppendRows, AppendSteps, BlockAnswer, EncodeTask, EncodedBlocks,
    PlannedBlock, PlannedCopy, PlannedWrite, ReserveSlot,
};
pub use append_task::AppendTask;
pub use attend::{AttendBackend, Attended, Launches};
pub use pages::{
    DeviceInfo, EncodeSource, EncodedPages, HeldPages, IncomingRows, LoadedRows, ModelBytes,
    PageBackend, RawTarget,
};
pub use regions::RegionBackend;
pub use transfer::{
    ImportOutcome, LayerImage, LayerSlots, PageSlots, TransferBackend, export_layer, import_layer,
};

/// A device that holds pages, answers attention over them, opens memory of workers, and whose
/// blocks may leave it.
pub trait Backend: PageBackend + AttendBackend + RegionBackend + TransferBackend {}

impl<T: PageBackend + AttendBackend + RegionBackend + TransferBackend> Backend for T {}
