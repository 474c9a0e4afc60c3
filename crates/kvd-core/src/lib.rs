//! The vocabulary every room of kvd shares: ids, geometry, dtypes, extents, error codes.
//!
//! No async, no I/O, no threads: what stands here can be used from a kernel test as well as
//! from the transport.
#![forbid(unsafe_code)]

mod boot;
mod dtype;
mod error;
mod extent;
mod geometry;
mod id;
mod progress;
mod stored_bytes;

pub use boot::{BootId, IdCounter, IdSpace, IdsExhausted};
pub use dtype::{DType, DTypeError};
pub use error::{Coded, ErrorCode};
pub use extent::Extent;
pub use geometry::{Geometry, GeometryError, RawLayout, RopePairing, Side};
pub use id::{LayerIndex, LeaseId, ModelId, Namespace, NamespaceError, SequenceId, SessionId};
pub use progress::ProgressLines;
pub use stored_bytes::{PackedBytes, PageBytes, StoredBytes};
