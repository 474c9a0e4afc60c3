//! Memory that a worker shares with the daemon: a sealed memory file that both map, its descriptor
//! handed over a Unix socket, and words in it on which either side can sleep. Linux only; elsewhere
//! every function answers `Unsupported`.
//!
//! The contract, which `docs/contract.md` states for clients:
//! - A region never shrinks: [`RegionMemory::map`] refuses a file without `F_SEAL_SHRINK`, so no
//!   access inside it can fault, whatever the peer does.
//! - The peer may write at any time. Bytes are copied out before they are looked at, by atomic
//!   loads; no reference to them exists.
//! - Offsets come from the peer and are tested on every access.
//! - A region lives while either side maps it. A process that dies gives up its mapping and its
//!   descriptor with it; the other side's stay valid.

mod completion;
#[cfg_attr(not(target_os = "linux"), path = "unsupported.rs")]
mod linux;
mod memory;
pub mod ring;

pub use completion::{CallOutcome, CallRefusal, CompletionRecord};
pub use linux::{DESCRIPTORS_MAX, receive_files, send_files};
pub use memory::{RegionError, RegionMemory};
