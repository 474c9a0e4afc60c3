//! Pools, slots, blocks and sequences: who holds which bytes, never the bytes themselves.
//!
//! The store hands out [`kvd_core::Extent`]s of one device's arena; a backend turns them into
//! bytes. One lane thread per device executes the jobs one after another and is the only one
//! that touches bytes, so an extent that a guard's drop gave back can be reused at once.
//!
//! An append is a ticket: [`Store::begin_append`] decides and reserves, the lane executes
//! [`AppendTicket::copies`], [`AppendTicket::writes`] and [`AppendTicket::packs`], and
//! [`AppendTicket::commit`] publishes. A ticket that is dropped leaves no trace. Who does not know
//! the content yet holds an [`AppendClaim`] before. A read is a
//! [`Pinned`]: it names the parts of a range and keeps their bytes alive.
//!
//! Locks: the sequence map's shards, one mutex per sequence, one mutex in the pool. The order is
//! sequence, then pool; a shard's lock is never held together with a sequence's. The drop of a
//! guard ([`Reserved`], [`Slot`], [`AppendClaim`], [`AppendTicket`], [`Pinned`]) takes the pool's
//! lock at most.
#![forbid(unsafe_code)]

mod allocator;
mod append;
mod cell;
mod error;
mod layer;
mod ledger;
mod pool;
mod sequence;
mod shape;
mod store;
#[cfg(test)]
mod tests;

pub use append::{Append, AppendClaim, AppendTicket, PackTask, RowCopy, RowWrite};
pub use cell::{Pages, Part, PartKind, RawSlot};
pub use error::StoreError;
pub use ledger::{ModelUsage, PackedBytes, StoredBytes};
pub use pool::{Pool, PoolFull, PoolUsage, Reserved, Slot};
pub use sequence::{Pinned, PinnedPart, SequenceUsage};
pub use shape::{Limits, ModelShape};
pub use store::Store;
