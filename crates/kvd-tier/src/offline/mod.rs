//! Commands on a folder that no daemon has: list, verify, repair, shrink, move.
//!
//! One thread, the caller's. Reading alone needs no lock; a daemon may write meanwhile, and what it
//! reclaims counts as unreadable then.

mod change;
mod transfer;

pub use change::{GarbageRule, collect_garbage, repair_folder};
pub use transfer::{KeyHasher, KeyHashes, TransferReport, import_records};

use crate::error::{DiskError, ReadError};
use crate::files::RealFolder;
use crate::files::StoredFolder;
use crate::identity::{StoreIdentity, io_error, open_error};
use crate::lock::FolderLock;
use crate::name::{BlockName, DiskLocation, RecordKind, ScopeId};
use crate::recover::{DescriptionKey, FolderRecovery, RecoverMode, RecoveredStore, recover_store};
use crate::recover::{RecoveredRecords, RecoveryCounts, list_segments};
use crate::settings::DiskSettings;
use crate::shared::TierShared;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Whether a folder may be in use by a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfflineAccess {
    /// It may not: the lock is taken.
    Exclusive,
    /// It may: nothing is locked.
    ReadOnly,
}

/// A folder that is looked at. Nothing in it is changed.
pub struct OfflineStore {
    shared: TierShared,
    found: RecoveredRecords,
    descriptions: HashMap<DescriptionKey, DiskLocation>,
    _lock: Option<FolderLock>,
}

/// A scope of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeListing {
    /// The scope.
    pub scope: ScopeId,
    /// JSON that its daemon wrote about it. Empty if that is missing or damaged.
    pub description: Vec<u8>,
    /// Live blocks.
    pub blocks: u64,
    /// Bytes of their records.
    pub bytes: u64,
    /// Longest chain of blocks.
    pub depth_max: u32,
    /// Serial of the oldest and of the newest live record.
    pub oldest_serial: u64,
    /// See `oldest_serial`.
    pub newest_serial: u64,
}

/// Content of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreListing {
    /// UUID of the store.
    pub uuid: [u8; 16],
    /// Segments, and bytes of their files.
    pub segments: u64,
    /// Bytes of all segments.
    pub used_bytes: u64,
    /// Scopes with live blocks or a description, by id.
    pub scopes: Vec<ScopeListing>,
    /// Live blocks, and what recovery would drop.
    pub counts: RecoveryCounts,
}

/// A record that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DamagedRecord {
    /// The block, or the scope of a description.
    pub name: BlockName,
    /// Kind of the record.
    pub kind: RecordKind,
    /// Where it lies, and what is wrong.
    pub error: ReadError,
}

/// Result of reading everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Sound records.
    pub sound: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The others.
    pub damaged: Vec<DamagedRecord>,
    /// Records that recovery dropped or could not read.
    pub counts: RecoveryCounts,
}

impl OfflineStore {
    /// Opens a folder that has a store.
    ///
    /// # Errors
    ///
    /// [`DiskError::NoStore`] where there is none; the rest as for a daemon.
    pub fn open_folder(path: &Path, access: OfflineAccess) -> Result<Self, DiskError> {
        let folder = RealFolder::open_existing(path).map_err(open_error(path))?;
        let identity = read_identity(&folder, path)?;
        let lock = match access {
            OfflineAccess::Exclusive => Some(FolderLock::take_lock(path)?),
            OfflineAccess::ReadOnly => None,
        };
        // The capacity does not matter to who reads.
        let settings = DiskSettings::new(path.to_owned(), u64::MAX);
        let mut recovered: RecoveredStore = recover_store(FolderRecovery {
            folder: &folder,
            path,
            identity: &identity,
            threads: settings.recover_threads,
            mode: RecoverMode::Look,
        })?;
        let found = std::mem::take(&mut recovered.found);
        let descriptions = recovered.descriptions.clone();
        let shared = TierShared::new(Arc::new(folder), identity, settings, &mut recovered);
        Ok(Self { shared, found, descriptions, _lock: lock })
    }

    /// Scopes, blocks and bytes.
    #[must_use]
    pub fn list_scopes(&self) -> StoreListing {
        let mut scopes: BTreeMap<ScopeId, ScopeListing> = BTreeMap::new();
        for key in self.descriptions.keys().filter(|key| key.kind == RecordKind::Scope) {
            scopes.entry(key.scope).or_insert_with(|| empty_listing(key.scope));
        }
        for record in &self.found.records {
            let scope = record.name.scope;
            let listing = scopes.entry(scope).or_insert_with(|| empty_listing(scope));
            let serial = record.location.serial;
            listing.oldest_serial =
                if listing.blocks == 0 { serial } else { listing.oldest_serial.min(serial) };
            listing.newest_serial = listing.newest_serial.max(serial);
            listing.blocks += 1;
            listing.bytes += record.location.disk_bytes();
            listing.depth_max = listing.depth_max.max(record.name.position + 1);
        }
        for listing in scopes.values_mut() {
            let key = DescriptionKey { kind: RecordKind::Scope, scope: listing.scope, digest: 0 };
            if let Some(location) = self.descriptions.get(&key)
                && let Ok(part) = self.shared.read_record(location)
            {
                listing.description = part.layer_bytes(0).unwrap_or_default().to_vec();
            }
        }
        StoreListing {
            uuid: self.shared.identity.uuid,
            segments: self.shared.table.segment_count() as u64,
            used_bytes: self.shared.table.used_bytes(),
            scopes: scopes.into_values().collect(),
            counts: self.found.counts,
        }
    }

    /// Reads every live record and every description, and verifies them.
    #[must_use]
    pub fn verify_records(&self) -> VerifyReport {
        let mut report = VerifyReport { counts: self.found.counts, ..Default::default() };
        let blocks = self.found.records.iter();
        let blocks = blocks.map(|record| (RecordKind::Block, record.name, record.location));
        let others = self.descriptions.iter().map(|(key, location)| {
            let name = BlockName { scope: key.scope, digest: key.digest, ..Default::default() };
            (key.kind, name, *location)
        });
        for (kind, name, location) in blocks.chain(others) {
            match self.shared.read_record(&location) {
                Ok(_) => {
                    report.sound += 1;
                    report.bytes += location.disk_bytes();
                }
                Err(error) => report.damaged.push(DamagedRecord { name, kind, error }),
            }
        }
        report
    }
}

fn empty_listing(scope: ScopeId) -> ScopeListing {
    ScopeListing {
        scope,
        description: Vec::new(),
        blocks: 0,
        bytes: 0,
        depth_max: 0,
        oldest_serial: 0,
        newest_serial: 0,
    }
}

/// The identity of a folder that must have one.
fn read_identity(folder: &dyn StoredFolder, path: &Path) -> Result<StoreIdentity, DiskError> {
    if let Some(found) = StoreIdentity::read_from(folder, path)? {
        return Ok(found);
    }
    let numbers = list_segments(folder).map_err(io_error(path, "cannot list the segments"))?;
    let folder = path.to_owned();
    Err(match numbers.is_empty() {
        true => DiskError::NoStore { folder },
        false => DiskError::BadStore { folder, what: "there is no store.json".to_owned() },
    })
}
