//! The tier: look-ups, reads and writes of objects with deadlines, behind a breaker.

use crate::breaker::{RequestEnd, StoreBreaker};
use crate::levels::{CountedEnd, LevelCells, RemoteLevels, RemoteOp};
use crate::name::{ObjectPaths, has_name_of};
use crate::settings::{RemoteSettings, RemoteUrl, SettingsError};
use crate::store::{RemoteStore, StoreFailure, StoreFuture};
use crate::uploads::{OnUploaded, QueuedUpload, RefusedUpload, UploadQueue};
use bytes::Bytes;
use kvd_tier::{ObjectName, RecordDraft, RecordPart};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::time::{timeout, timeout_at};

/// Between two lines of the log about a store that fails.
const LOG_PAUSE: Duration = Duration::from_secs(60);
/// Between two looks whether all is written, at the end.
const CLOSE_PAUSE: Duration = Duration::from_millis(5);

/// Why a block did not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// It is not there, or not any more.
    Missing,
    /// It is damaged, of another block, or has no right keyed hash.
    Corrupt,
    /// No answer in time.
    TimedOut,
    /// The store failed, or the breaker is open.
    Unavailable,
}

/// Told how long each request took.
pub type OnRequest = Arc<dyn Fn(RemoteOp, Duration) + Send + Sync>;

/// A store that daemons share, as one of them uses it. Clones share it.
#[derive(Clone)]
pub struct RemoteTier {
    shared: Arc<TierShared>,
}

struct TierShared {
    store: Box<dyn RemoteStore>,
    settings: RemoteSettings,
    paths: ObjectPaths,
    breaker: StoreBreaker,
    queue: UploadQueue,
    reads: Semaphore,
    finds: Semaphore,
    /// Blocks that were not there, by digest, and when that was.
    misses: Mutex<HashMap<u128, Instant>>,
    cells: LevelCells,
    on_request: Option<OnRequest>,
    last_line: Mutex<Option<Instant>>,
}

/// A store as settings have it. Nothing is asked of it yet.
fn open_store(settings: &RemoteSettings) -> Result<Box<dyn RemoteStore>, SettingsError> {
    match &settings.url {
        #[cfg(feature = "redis")]
        RemoteUrl::Redis(url) => {
            Ok(Box::new(crate::redis_client::RedisStore::new_store(url, settings)?))
        }
        #[cfg(not(feature = "redis"))]
        RemoteUrl::Redis(_) => Err(SettingsError::NotBuilt("redis://", "remote-redis")),
        #[cfg(feature = "s3")]
        RemoteUrl::S3 { bucket } => {
            Ok(Box::new(crate::object_store_client::ObjectStore::of_bucket(bucket, settings)?))
        }
        #[cfg(not(feature = "s3"))]
        RemoteUrl::S3 { .. } => Err(SettingsError::NotBuilt("s3://", "remote-s3")),
        #[cfg(feature = "objects")]
        RemoteUrl::Folder(path) => {
            Ok(Box::new(crate::object_store_client::ObjectStore::of_folder(path)?))
        }
        #[cfg(not(feature = "objects"))]
        RemoteUrl::Folder(_) => Err(SettingsError::NotBuilt("file://", "remote-objects")),
    }
}

impl RemoteTier {
    /// A tier over the store that settings name. Does not wait for it: it may be down.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn open_store(settings: RemoteSettings) -> Result<Self, SettingsError> {
        settings.check_limits()?;
        let store = open_store(&settings)?;
        Ok(Self::over_store(store, settings))
    }

    /// A tier over any store.
    #[must_use]
    pub fn over_store(store: Box<dyn RemoteStore>, mut settings: RemoteSettings) -> Self {
        let on_request = settings.on_request.take();
        let shared = TierShared {
            store,
            paths: ObjectPaths::new(&settings.prefix, settings.mac.as_ref()),
            breaker: StoreBreaker::default(),
            queue: UploadQueue::new(settings.queue_bytes, settings.connections),
            reads: Semaphore::new(settings.reads_max),
            finds: Semaphore::new(settings.finds_max),
            misses: Mutex::default(),
            cells: LevelCells::default(),
            on_request,
            last_line: Mutex::default(),
            settings,
        };
        Self { shared: Arc::new(shared) }
    }

    /// How many blocks of a prefix are there, from the first of these on, as far as the store says
    /// in time. Does not ask where the breaker is open, where too many look-ups are under way, or
    /// where the first was not there a moment ago.
    pub async fn find_blocks(&self, names: &[ObjectName], end: Instant) -> usize {
        let shared = &*self.shared;
        let Some(first) = names.first() else { return 0 };
        if shared.was_missing(first.digest) {
            return 0;
        }
        let Ok(_turn) = shared.finds.try_acquire() else {
            shared.cells.count_request(RemoteOp::Find, CountedEnd::Skipped);
            return 0;
        };
        let paths: Vec<_> = names.iter().map(|name| shared.paths.object_path(name)).collect();
        let op = RemoteOp::Find;
        let found = shared.ask_store(op, Some(end), |store| store.count_present(&paths)).await;
        let Ok(found) = found else { return 0 };
        if let Some(missing) = names.get(found) {
            shared.note_missing(missing.digest);
        }
        shared.cells.found.fetch_add(found as u64, Relaxed);
        found.min(names.len())
    }

    /// Whether it is worth asking for a block: not while nothing is asked, nor if it was not there
    /// a moment ago.
    #[must_use]
    pub fn may_have(&self, name: &ObjectName) -> bool {
        !self.shared.is_open() && !self.shared.was_missing(name.digest)
    }

    /// Counts a block that was read and is not of use, and does not find it for a while.
    pub fn refuse_block(&self, name: &ObjectName) {
        self.shared.cells.corrupt.fetch_add(1, Relaxed);
        self.shared.note_missing(name.digest);
    }

    /// Reads a block's object and verifies it.
    ///
    /// # Errors
    /// [`ReadFailure`]: whatever it is, there is no data.
    pub async fn read_block(
        &self,
        name: &ObjectName,
        end: Instant,
    ) -> Result<RecordPart, ReadFailure> {
        let shared = &*self.shared;
        let turn = timeout_at(end.into(), shared.reads.acquire()).await;
        let _turn = turn.map_err(|_| ReadFailure::TimedOut)?;
        let path = shared.paths.object_path(name);
        let bytes_max = shared.settings.object_bytes_max;
        let read = shared
            .ask_store(RemoteOp::Read, Some(end), |store| store.read_object(&path, bytes_max));
        let read = read.await;
        let bytes = read.map_err(|end| match end {
            CountedEnd::TimedOut => ReadFailure::TimedOut,
            _ => ReadFailure::Unavailable,
        })?;
        let Some(bytes) = bytes else {
            shared.note_missing(name.digest);
            return Err(ReadFailure::Missing);
        };
        shared.cells.read_bytes.fetch_add(bytes.len() as u64, Relaxed);
        let (name, mac) = (*name, shared.settings.mac.clone());
        // Hashes of a megabyte: not on a thread that answers requests.
        let verify = move || {
            let record = match &mac {
                Some(mac) => mac.verify_object(&bytes)?,
                None => &bytes,
            };
            let part = RecordPart::from_object(record, &name).ok()?;
            has_name_of(&name, &part.record_meta().key).then_some(part)
        };
        let part =
            tokio::task::spawn_blocking(verify).await.map_err(|_| ReadFailure::Unavailable)?;
        part.ok_or_else(|| {
            self.refuse_block(&name);
            ReadFailure::Corrupt
        })
    }

    /// Makes the object of a block's record.
    #[must_use]
    pub fn make_object(&self, draft: &RecordDraft, name: &ObjectName, key: &[u8]) -> Bytes {
        let record = draft.to_object(name, key);
        let mut object = record.to_vec();
        if let Some(mac) = &self.shared.settings.mac {
            object.extend(mac.hash_record(&record));
        }
        object.into()
    }

    /// Has an object written, soon. Call on a tokio runtime.
    ///
    /// # Errors
    /// [`RefusedUpload`]; nobody is told of it then.
    pub fn queue_object(
        &self,
        name: ObjectName,
        bytes: Bytes,
        on_uploaded: OnUploaded,
    ) -> Result<(), RefusedUpload> {
        let shared = &self.shared;
        if shared.is_open() {
            shared.cells.drops_failed.fetch_add(1, Relaxed);
            return Err(RefusedUpload::Open);
        }
        match shared.queue.push_upload(QueuedUpload { name, bytes, on_uploaded }) {
            Ok(true) => drop(tokio::spawn(self.clone().work_off())),
            Ok(false) => {}
            Err(refused) => {
                shared.cells.drops_queue.fetch_add(1, Relaxed);
                return Err(refused);
            }
        }
        Ok(())
    }

    async fn work_off(self) {
        while let Some(upload) = self.shared.queue.take_upload() {
            let QueuedUpload { name, bytes, on_uploaded } = upload;
            let len = bytes.len() as u64;
            let path = self.shared.paths.object_path(&name);
            let write = |store| RemoteStore::write_object(store, &path, bytes);
            let written = self.shared.ask_store(RemoteOp::Write, None, write).await.is_ok();
            let cells = &self.shared.cells;
            let (cell, count) =
                if written { (&cells.written_bytes, len) } else { (&cells.drops_failed, 1) };
            cell.fetch_add(count, Relaxed);
            if written {
                self.shared.misses.lock().remove(&name.digest);
            }
            on_uploaded(written);
            self.shared.queue.end_upload(len);
        }
    }

    /// Removes objects, one after another; how many the store said were removed.
    pub async fn remove_blocks(&self, names: &[ObjectName]) -> usize {
        let mut removed = 0;
        for name in names {
            let path = self.shared.paths.object_path(name);
            let remove = |store| RemoteStore::remove_object(store, &path);
            if self.shared.ask_store(RemoteOp::Remove, None, remove).await.is_err() {
                break;
            }
            self.shared.note_missing(name.digest);
            removed += 1;
        }
        removed
    }

    /// Counters and levels.
    #[must_use]
    pub fn read_levels(&self) -> RemoteLevels {
        let state = self.shared.breaker.read_state();
        self.shared.cells.read_levels(state, self.shared.queue.queued_bytes())
    }

    /// Takes no more objects, and waits so long until what waits is written.
    pub async fn close_tier(&self, grace: Duration) {
        self.shared.queue.close_queue();
        let wait = async {
            while self.shared.queue.queued_bytes() > 0 && !self.shared.is_open() {
                tokio::time::sleep(CLOSE_PAUSE).await;
            }
        };
        // What is not written by then is read from whoever has it.
        let _in_time = timeout(grace, wait).await;
    }
}

impl TierShared {
    /// Whether nothing is asked for now.
    fn is_open(&self) -> bool {
        match self.breaker.admit_request(Instant::now()) {
            // Not a probe: that is a request's.
            Some(pass) => {
                drop(pass);
                false
            }
            None => true,
        }
    }

    /// Makes a request, with its deadline, its count and its part in the breaker. Where the caller
    /// leaves before the deadline of settings, the store is not to blame.
    async fn ask_store<'a, T>(
        &'a self,
        op: RemoteOp,
        caller_end: Option<Instant>,
        ask: impl FnOnce(&'a dyn RemoteStore) -> StoreFuture<'a, T>,
    ) -> Result<T, CountedEnd> {
        let Some(pass) = self.breaker.admit_request(Instant::now()) else {
            self.cells.count_request(op, CountedEnd::Skipped);
            return Err(CountedEnd::Skipped);
        };
        let began = Instant::now();
        let own_time = match op {
            RemoteOp::Find => self.settings.find_timeout,
            RemoteOp::Read | RemoteOp::Write | RemoteOp::Remove => self.settings.timeout,
        };
        let own_end = began + own_time;
        let end = caller_end.map_or(own_end, |end| end.min(own_end));
        let answer = timeout_at(end.into(), ask(&*self.store)).await;
        let (counted, request_end) = match &answer {
            Ok(Ok(_)) => (CountedEnd::Answered, RequestEnd::Answered),
            // It answers, and can be read.
            Ok(Err(StoreFailure::Full(_))) => (CountedEnd::Full, RequestEnd::Answered),
            Ok(Err(StoreFailure::Denied(_))) => (CountedEnd::Denied, RequestEnd::Failed),
            Ok(Err(StoreFailure::Failed(_))) => (CountedEnd::Failed, RequestEnd::Failed),
            Err(_) => (CountedEnd::TimedOut, RequestEnd::TimedOut),
        };
        // A caller that had nearly as long may blame it.
        if request_end != RequestEnd::TimedOut || began.elapsed() >= own_time.mul_f64(0.9) {
            pass.end_request(request_end);
        }
        self.cells.count_request(op, counted);
        self.on_request.iter().for_each(|on_request| on_request(op, began.elapsed()));
        match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(failure)) => self.log_failure(op, &failure.to_string()),
            Err(_) => self.log_failure(op, "no answer in time"),
        }
        Err(counted)
    }

    /// Says once a minute that the store fails.
    fn log_failure(&self, op: RemoteOp, failure: &str) {
        let mut last = self.last_line.lock();
        if last.is_none_or(|last| last.elapsed() >= LOG_PAUSE) {
            *last = Some(Instant::now());
            drop(last);
            tracing::warn!(op = op.op_label(), failure, "the remote tier of the cache fails");
        }
    }

    fn was_missing(&self, digest: u128) -> bool {
        let misses = self.misses.lock();
        misses.get(&digest).is_some_and(|since| since.elapsed() < self.settings.miss_time)
    }

    fn note_missing(&self, digest: u128) {
        let mut misses = self.misses.lock();
        if misses.len() >= self.settings.misses_max {
            misses.retain(|_, since| since.elapsed() < self.settings.miss_time);
            if misses.len() >= self.settings.misses_max {
                // They are a saving of requests and no more.
                misses.clear();
            }
        }
        misses.insert(digest, Instant::now());
    }
}
