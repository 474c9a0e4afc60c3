//! The host side of the kernels in `kernels/`: an attention plan becomes block tables and launches
//! ([`Tables`]), and merged partial results become a reply.
//!
//! Nothing here opens a device: the structs are what a device is given, and the CPU lane
//! (`crates/kvd-emu`) gives the same to the same kernels. Not yet measured on a GPU.
#![deny(unsafe_code)]

mod abi;
mod error;
mod finish;
mod side;
mod tables;

pub use abi::{AttendParameters, MergeParameters, PageEntry, SideShape, Unit};
pub use error::PlanError;
pub use finish::Merged;
pub use side::Kernel;
pub use tables::{Launch, Options, Tables};
