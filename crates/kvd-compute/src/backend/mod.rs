//! The contract between a device worker and its device, in three traits: pages (rows in, pages
//! made and kept), attention over them, and regions that a worker shares with the device.
//!
//! One worker thread owns a backend and calls it; a backend may use more threads inside a call.
//! The worker promises that extents it passes are reserved (to write) or pinned (to read) for the
//! length of the call; those of an attend in slices ([`AttendBackend::attend_slice`]) until it is
//! answered or given up.

mod append;
mod attend;
mod pages;
mod regions;

pub use append::{
    AppendOutcome, AppendPlan, AppendRows, AppendSteps, BlockAnswer, PlannedBlock, PlannedCopy,
    PlannedWrite, ReserveSlot,
};
pub use attend::{AttendBackend, Attended, Launches};
pub use pages::{
    DeviceInfo, EncodeSource, EncodedPages, HeldPages, IncomingRows, LoadedRows, ModelBytes,
    PageBackend, RawTarget,
};
pub use regions::RegionBackend;

/// A device that holds pages, answers attention over them and opens memory of workers.
pub trait Backend: PageBackend + AttendBackend + RegionBackend {}

impl<T: PageBackend + AttendBackend + RegionBackend> Backend for T {}
