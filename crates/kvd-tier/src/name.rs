//! Names of records and the places where they lie. Pure data.

use std::fmt;

/// The first 128 bits of the digest of what a block's pages depend on: model, weights, codec,
/// calibration, shard, namespace. Made by the caller.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct ScopeId(pub [u8; 16]);

impl fmt::Display for ScopeId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for ScopeId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "ScopeId({self})")
    }
}

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RecordKind {
    /// A block of the cache, all its layers.
    Block = 1,
    /// A description of a scope, for people: JSON.
    Scope = 2,
    /// A calibration, found by its digest.
    Calibration = 3,
    /// The end of all older records of its scope and digest.
    Tombstone = 4,
}

/// How the index knows a block. The hashes are the caller's, made with
/// [`DiskTier::hash_seed`](crate::DiskTier::hash_seed), so that they mean the same after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct BlockName {
    /// Scope of the key.
    pub scope: ScopeId,
    /// Hash of scope and key.
    pub digest: u128,
    /// Hash of all keys up to this one.
    pub lineage: u128,
    /// Lineage of the block before it; no matter at position 0.
    pub parent_lineage: u128,
    /// Pages before this one in its prefix.
    pub position: u32,
}

/// Name of a block with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordMeta {
    /// How the index knows the block.
    pub name: BlockName,
    /// The engine's key, at most [`KEY_BYTES_MAX`](crate::record::KEY_BYTES_MAX) bytes.
    pub key: Box<[u8]>,
}

/// Where a record lies. It stays true until the record's segment is reclaimed, and is never true
/// of another record: numbers of segments and serials are used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskLocation {
    pub(crate) segment: u64,
    pub(crate) serial: u64,
    // In blocks of 4 KiB.
    pub(crate) offset: u32,
    pub(crate) blocks: u32,
    pub(crate) head_blocks: u32,
}

impl DiskLocation {
    /// Bytes that the record takes on disk.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        u64::from(self.blocks) * crate::aligned::BLOCK_BYTES as u64
    }

    /// Number of the record in the order of writing, over the life of the store.
    #[must_use]
    pub fn record_serial(&self) -> u64 {
        self.serial
    }

    /// As words, for an index that knows nothing of records.
    #[must_use]
    pub fn to_words(self) -> [u64; 4] {
        let blocks = u64::from(self.blocks) | u64::from(self.head_blocks) << 32;
        [self.segment, self.serial, self.offset.into(), blocks]
    }

    /// From [`DiskLocation::to_words`]. Words that are no location give a read that fails.
    #[must_use]
    pub fn from_words(words: [u64; 4]) -> Self {
        let [segment, serial, offset, blocks] = words;
        let (offset, head_blocks) = (offset as u32, (blocks >> 32) as u32);
        Self { segment, serial, offset, blocks: blocks as u32, head_blocks }
    }

    /// Number of the segment, as in its file's name.
    #[must_use]
    pub fn segment_number(&self) -> u64 {
        self.segment
    }
}

/// A record that is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveRecord {
    /// Name of its block.
    pub name: BlockName,
    /// Where it lies.
    pub location: DiskLocation,
}

/// Fate of a record whose segment is reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepChoice {
    /// Nobody's: the index has no entry for it, or its entry is at another location. It goes, and
    /// nobody is told.
    Stale,
    /// It goes, and its subtree with it.
    Drop,
    /// Touched since it was written: copied to the front while there is room for copies.
    Copy,
    /// Pinned, leased or an ancestor of such: copied before all others.
    Pinned,
}
