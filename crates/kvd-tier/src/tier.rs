//! The disk tier of a daemon: opens a folder, takes records, reads them, closes.
//!
//! Methods are called from any thread. None waits for the disk but reads, opening and closing.

use crate::draft::{LayerShape, RecordDraft, RecordShape};
use crate::error::{DiskError, ReadError, RefusedWrite};
use crate::files::{RealFolder, StoredFolder};
use crate::identity::{HasSegments, StoreIdentity, io_error, open_error};
use crate::levels::{LevelCells, TierLevels};
use crate::listener::{OnDurable, ReclaimListener};
use crate::lock::FolderLock;
use crate::name::{BlockName, DiskLocation, RecordKind, RecordMeta, ScopeId};
use crate::part::{RecordHead, RecordPart};
use crate::queue::{WriteQueue, run_writer};
use crate::read_pool::{OnRead, ReadPool, ReadRequest};
use crate::recover::{
    DescriptionKey, FolderRecovery, RecoverMode, RecoveredRecords, list_segments, recover_store,
};
use crate::settings::DiskSettings;
use crate::shared::TierShared;
use crate::writer::SegmentWriter;
use parking_lot::Mutex;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Time that a tier which is only dropped has for what waits.
const DROP_GRACE: Duration = Duration::from_secs(5);

/// A folder of records, open for writing.
pub struct DiskTier {
    shared: Arc<TierShared>,
    queue: Arc<WriteQueue>,
    reads: ReadPool,
    writer: Mutex<Option<JoinHandle<()>>>,
    is_direct: bool,
    // Given up last.
    _lock: FolderLock,
}

impl DiskTier {
    /// Opens or makes a folder and recovers what is in it.
    ///
    /// # Errors
    ///
    /// [`DiskError`]: settings, another process, a newer format, the system.
    pub fn open_folder(
        settings: DiskSettings,
        listener: Arc<dyn ReclaimListener>,
    ) -> Result<(Self, RecoveredRecords), DiskError> {
        settings.check_limits()?;
        let path = settings.folder.clone();
        let folder = RealFolder::open_or_make(&path).map_err(open_error(&path))?;
        let lock = FolderLock::take_lock(&path)?;
        let folder = folder.choose_direct(settings.direct);
        let is_direct = folder.is_direct();
        let begin = Instant::now();
        let opened = open_store(Arc::new(folder), &path, settings, listener)?;
        let OpenedStore { shared, writer, found } = opened;
        LevelCells::set_to(&shared.cells.recover_us, begin.elapsed().as_micros() as u64);
        let queue = Arc::new(WriteQueue::new(Arc::clone(&shared)));
        let reads = ReadPool::spawn_threads(Arc::clone(&shared))
            .map_err(io_error(&path, "cannot start readers"))?;
        let for_writer = Arc::clone(&queue);
        let writer = Builder::new()
            .name("kvd-disk".to_owned())
            .spawn(move || run_writer(writer, &for_writer))
            .map_err(io_error(&path, "cannot start the writer"))?;
        let writer = Mutex::new(Some(writer));
        Ok((Self { shared, queue, reads, writer, is_direct, _lock: lock }, found))
    }

    /// Seed for hashes of keys and lineages; the same for the life of the folder.
    #[must_use]
    pub fn hash_seed(&self) -> u64 {
        self.shared.identity.hash_seed
    }

    /// The folder's name.
    #[must_use]
    pub fn store_uuid(&self) -> [u8; 16] {
        self.shared.identity.uuid
    }

    /// Whether reads and writes bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Hashes a record in this thread and queues it. Parents are queued before their children.
    ///
    /// # Errors
    ///
    /// [`RefusedWrite`]: nothing was queued, and `on_durable` is not called.
    pub fn write_record(
        &self,
        draft: RecordDraft,
        on_durable: OnDurable,
    ) -> Result<(), RefusedWrite> {
        self.queue.push_record(draft.seal_record(), on_durable)
    }

    /// Queues a tombstone: what is on disk of this block does not come back after a restart.
    ///
    /// # Errors
    ///
    /// As [`Self::write_record`].
    pub fn remove_record(
        &self,
        name: &BlockName,
        on_durable: OnDurable,
    ) -> Result<(), RefusedWrite> {
        let meta = RecordMeta { name: *name, key: Box::default() };
        self.push_plain(RecordKind::Tombstone, meta, None, on_durable)
    }

    /// Queues the description of a scope, JSON for people. The newest stays while blocks go.
    ///
    /// # Errors
    ///
    /// As [`Self::write_record`].
    pub fn write_scope(
        &self,
        scope: ScopeId,
        json: &[u8],
        on_durable: OnDurable,
    ) -> Result<(), RefusedWrite> {
        let name = BlockName { scope, ..BlockName::default() };
        let meta = RecordMeta { name, key: Box::default() };
        self.push_plain(RecordKind::Scope, meta, Some(json), on_durable)
    }

    /// Queues a calibration under its digest.
    ///
    /// # Errors
    ///
    /// As [`Self::write_record`].
    pub fn write_calibration(
        &self,
        digest: [u8; 32],
        bytes: &[u8],
        on_durable: OnDurable,
    ) -> Result<(), RefusedWrite> {
        let meta = RecordMeta { name: calibration_name(&digest), key: digest.into() };
        self.push_plain(RecordKind::Calibration, meta, Some(bytes), on_durable)
    }

    /// A record without forms and tables.
    fn push_plain(
        &self,
        kind: RecordKind,
        meta: RecordMeta,
        bytes: Option<&[u8]>,
        on_durable: OnDurable,
    ) -> Result<(), RefusedWrite> {
        if kind != RecordKind::Tombstone {
            let key = DescriptionKey { kind, scope: meta.name.scope, digest: meta.name.digest };
            let descriptions = self.shared.descriptions.lock();
            let limit = self.shared.settings.descriptions_max;
            if descriptions.len() >= limit && !descriptions.contains_key(&key) {
                return Err(RefusedWrite::TooManyDescriptions { limit });
            }
        }
        let draft = draft_plain(kind, meta, bytes)?;
        self.queue.push_record(draft.seal_record(), on_durable)
    }

    /// Reads a whole record, in one read, and verifies it.
    ///
    /// # Errors
    ///
    /// [`ReadError`]: a miss, with its reason.
    pub fn read_record(&self, location: &DiskLocation) -> Result<RecordPart, ReadError> {
        self.shared.read_record(location)
    }

    /// Reads names, forms and tables of a record.
    ///
    /// # Errors
    ///
    /// As [`Self::read_record`].
    pub fn read_head(&self, location: &DiskLocation) -> Result<Arc<RecordHead>, ReadError> {
        self.shared.read_head(location).map(|part| part.head)
    }

    /// Reads some layers of a record whose head was read before.
    ///
    /// # Errors
    ///
    /// As [`Self::read_record`].
    pub fn read_layers(
        &self,
        location: &DiskLocation,
        head: &Arc<RecordHead>,
        layers: Range<u32>,
    ) -> Result<RecordPart, ReadError> {
        self.shared.read_layers(location, head, layers)
    }

    /// Reads on one of the tier's own threads.
    ///
    /// # Errors
    ///
    /// [`ReadError::QueueFull`]; `on_read` is not called then.
    pub fn submit_read(
        &self,
        location: DiskLocation,
        request: ReadRequest,
        on_read: OnRead,
    ) -> Result<(), ReadError> {
        self.reads.push_read(location, request, on_read)
    }

    /// The description of a scope, if there is one.
    ///
    /// # Errors
    ///
    /// As [`Self::read_record`].
    pub fn read_scope(&self, scope: ScopeId) -> Result<Option<Vec<u8>>, ReadError> {
        self.read_plain(DescriptionKey { kind: RecordKind::Scope, scope, digest: 0 })
    }

    /// The calibration with this digest, if there is one.
    ///
    /// # Errors
    ///
    /// As [`Self::read_record`].
    pub fn read_calibration(&self, digest: &[u8; 32]) -> Result<Option<Vec<u8>>, ReadError> {
        let name = calibration_name(digest);
        let kind = RecordKind::Calibration;
        self.read_plain(DescriptionKey { kind, scope: name.scope, digest: name.digest })
    }

    fn read_plain(&self, key: DescriptionKey) -> Result<Option<Vec<u8>>, ReadError> {
        let Some(location) = self.shared.descriptions.lock().get(&key).copied() else {
            return Ok(None);
        };
        let part = self.shared.read_record(&location)?;
        Ok(Some(part.layer_bytes(0).unwrap_or_default().to_vec()))
    }

    /// Counters and levels of now.
    #[must_use]
    pub fn read_levels(&self) -> TierLevels {
        let (queued_bytes, lag) = self.queue.read_backlog();
        LevelCells::set_to(&self.shared.cells.queued_bytes, queued_bytes);
        LevelCells::set_to(&self.shared.cells.durable_lag_us, lag.as_micros() as u64);
        self.shared.cells.read_levels(self.shared.tier_state())
    }

    /// Takes no more records, writes what waits within `grace`, fails the rest, seals the segment.
    pub fn close_tier(&self, grace: Duration) {
        self.queue.close_queue(grace);
        let writer = self.writer.lock().take();
        // A callback may hold the last reference: its own thread ends after it.
        if let Some(writer) = writer
            && writer.thread().id() != std::thread::current().id()
        {
            // A callback of the caller's panicked: its message is on stderr already.
            drop(writer.join());
        }
        self.reads.close_pool();
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.close_tier(DROP_GRACE);
    }
}

/// A store that was recovered, before any thread of it runs.
pub(crate) struct OpenedStore {
    pub(crate) shared: Arc<TierShared>,
    pub(crate) writer: SegmentWriter,
    pub(crate) found: RecoveredRecords,
}

/// Opens a store in a folder of any kind.
pub(crate) fn open_store(
    folder: Arc<dyn StoredFolder>,
    path: &Path,
    settings: DiskSettings,
    listener: Arc<dyn ReclaimListener>,
) -> Result<OpenedStore, DiskError> {
    let numbers = list_segments(&*folder).map_err(io_error(path, "cannot list the segments"))?;
    let has_segments = if numbers.is_empty() { HasSegments::No } else { HasSegments::Yes };
    let identity = StoreIdentity::read_or_make(&*folder, path, has_segments)?;
    let mut recovered = recover_store(FolderRecovery {
        folder: &*folder,
        path,
        identity: &identity,
        threads: settings.recover_threads,
        mode: RecoverMode::Own,
    })?;
    let found = std::mem::take(&mut recovered.found);
    recovered.found.counts = found.counts;
    let shared = Arc::new(TierShared::new(folder, identity, settings, &mut recovered));
    let writer = SegmentWriter::new(Arc::clone(&shared), listener, &recovered);
    Ok(OpenedStore { shared, writer, found })
}

/// Builds a record without forms and tables.
pub(crate) fn draft_plain(
    kind: RecordKind,
    meta: RecordMeta,
    bytes: Option<&[u8]>,
) -> Result<RecordDraft, RefusedWrite> {
    let layers =
        bytes.iter().map(|bytes| LayerShape { form: Vec::new(), bytes: bytes.len() }).collect();
    let shape = RecordShape { meta, tables: Vec::new(), layers };
    let too_large = |_| RefusedWrite::TooLarge {
        bytes: bytes.map_or(0, <[u8]>::len) as u64,
        limit_bytes: crate::record::RECORD_BYTES_MAX,
    };
    let mut draft = RecordDraft::with_kind(kind, &shape).map_err(too_large)?;
    if let (Some(layer), Some(bytes)) = (draft.layer_mut(0), bytes) {
        layer.copy_from_slice(bytes);
    }
    Ok(draft)
}

/// Calibrations are of no scope: several share one.
fn calibration_name(digest: &[u8; 32]) -> BlockName {
    let mut half = [0; 16];
    half.copy_from_slice(&digest[..16]);
    let digest_half = u128::from_le_bytes(half);
    half.copy_from_slice(&digest[16..]);
    BlockName { scope: ScopeId(half), digest: digest_half, ..BlockName::default() }
}
