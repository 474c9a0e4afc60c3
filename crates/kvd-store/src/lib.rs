//! Pools, slots, blocks and sequences: who holds which bytes, never the bytes themselves.
//!
//! The store hands out [`kvd_core::Extent`]s of one device's arena; a backend turns them into
//! bytes. One device worker per device executes the jobs one after another and is the only one
//! that touches bytes, so an extent that a guard's drop gave back can be reused at once.
//!
//! An append is a ticket: [`SequenceStore::begin_append`] decides and reserves, the device worker
//! executes [`AppendTicket::row_copies`], [`AppendTicket::row_writes`] and
//! [`AppendTicket::pack_tasks`], and [`AppendTicket::commit`] publishes. A ticket that is dropped
//! leaves no trace. Who does not know the content yet, or is to wait before anything is reserved,
//! holds an [`AppendClaim`] before. A read is a [`PinnedRange`]: it names the rows of a range and
//! keeps their bytes alive.
//!
//! A layer's blocks are seen through chunks of 64 views that forks and readers share, so that a
//! fork or a read copies a pointer for 64 blocks. Totals are kept where they change.
//!
//! Published blocks stay when their sequence is closed, and are found by key ([`PrefixIndex`])
//! until the pool needs their memory.
//!
//! Locks: the sequence map's shards, one mutex per layer of a sequence, one for the set of each
//! session's sequences, the mutex of what waits to be freed, one mutex in the pool. A layer's
//! mutex is held to copy pointers, never to reserve or to free; no other of these is taken under
//! it. Only who truncates, forks or describes takes several layers' (`sequence`). The drop of a
//! guard ([`ReservedSlot`], [`PoolSlot`], [`AppendClaim`], [`AppendTicket`], [`PinnedRange`]) takes
//! the last two at most, one after the other. A long sequence is freed by the pool's thread, in
//! batches; who finds the pool full helps it.
#![forbid(unsafe_code)]

mod allocator;
mod append;
mod append_plan;
mod arrival;
mod cache;
mod error;
mod free_ranges;
mod hint;
mod layer;
mod layer_block;
mod ledger;
mod pinned;
mod pool;
mod publish;
mod quota;
mod reclaim;
mod sequence;
mod session_sequences;
mod shape;
mod store;
#[cfg(test)]
mod tests;
mod use_times;
mod view_list;

pub use allocator::SlotRegion;
pub use append::{AppendClaim, AppendTicket, BegunAppend, PackBatch, PackTask, RowCopy, RowWrite};
pub use arrival::LayerArrival;
pub use cache::{
    BlockDigests, BlockEvent, BlockKey, BlockTier, BlockToRead, BlockToWrite, CacheLimits,
    CacheSimulator, CacheUsage, ChainResidency, DiskBlock, DiskPlace, DroppedBlocks, EventSink,
    EvictionChoice, HeldChain, KEY_BYTES_MAX, KeyChain, KeyError, KeyHashes, LeaseRequest,
    ListCursor, PackedKeys, PinRequest, PinnedPrefixes, PlacedBlock, PrefixIndex, PublishStop,
    PublishedBlocks, ReadPlan, RecordPlace, RecordUse, RemoteBlocks, RemotePlace, StoredLayer,
    WriteTarget,
};
pub use error::StoreError;
pub use hint::{SequenceHint, SequencePhase};
pub use kvd_core::{PackedBytes, StoredBytes};
pub use layer_block::{PackedPages, RawSlot, RowExtent, RowExtentRef, RowForm, RowFormRef};
pub use ledger::ModelUsage;
pub use pinned::{ChosenRange, PinMemory, PinnedRange, PinnedRows};
pub use pool::{ArenaPool, PoolFull, PoolSlot, PoolUsage, ReserveError, ReservedSlot, SlotsUsedUp};
pub use publish::PublishTicket;
pub use quota::{
    DeviceQuotas, NamespaceAccount, QuotaExceeded, QuotaKind, QuotaLimits, QuotaShare, QuotaTable,
};
pub use sequence::SequenceUsage;
pub use session_sequences::SessionSequences;
pub use shape::{ModelShape, StoreLimits};
pub use store::{
    ArrivingPrefix, AttachedSequence, FilledPrefix, ForkedSequence, PoolPart, SequenceQuery,
    SequenceStore, SequenceSummary,
};
