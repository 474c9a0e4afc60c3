//! The device side of KV blocks: take rows, encode them to pages, answer attention from the pages.
//! [`Backend`] is the contract; [`CpuBackend`] the one that every machine has.
//!
//! Unsafe code is confined to `cpu/simd.rs` (run-time selected instruction sets) and to files of
//! `cpu/` that are named by an instruction set, or `simd_*` (register loads and stores).
#![deny(unsafe_code)]

pub mod affinity;
mod backend;
mod cpu;
mod error;
mod plan;
mod region;
mod sampling;
mod sharing;
mod state;
mod stop;
mod task;

pub use backend::{
    AppendOutcome, AppendPlan, AppendRows, AppendSteps, AppendTask, AttendBackend, Attended,
    Backend, BlockAnswer, DeviceInfo, EncodeSource, EncodeTask, EncodedBlocks, EncodedPages,
    HeldPages, ImportOutcome, IncomingRows, Launches, LayerImage, LayerSlots, LoadedRows,
    ModelBytes, PageBackend, PageSlots, PlannedBlock, PlannedCopy, PlannedWrite, RawTarget,
    RegionBackend, ReserveSlot, TransferBackend, export_layer, import_layer,
};
pub use cpu::{
    ArenaError, CodeDecoder, CpuBackend, CpuOptions, EncodeAs, InstructionSet, KernelChoice,
    MultiplyKind, OpenError, Precision, Simd, content_hash, content_hash_of, first_non_finite,
    list_kernels, multiply_adds,
};
pub use error::BackendError;
pub use plan::{AttendPlan, LoadPlan, PlanPart, PlanQuery, Source};
pub use region::{DeviceRegion, OpenedRegion, RegionHandle, RegionPlaces, RegionRows, StagedRows};
pub use sampling::Sampling;
pub use sharing::{RunReader, SharedRun, find_shared_runs, shares_most};
use state::PartialState;
pub use stop::{Slice, Stop, StopReason, WantedPause};
pub use task::AttendTask;
