//! The tiers of the cache below the pool: what is published goes to disk, where it is found again
//! after a restart, and to a store that daemons share.
//!
//! Owns [`CacheTiers`]: the tiers, the scopes on disk, what waits to be written and what is being
//! read. The only module that knows store, device and tiers. The index's locks are taken without
//! any of its own.

mod arrive;
mod catalog;
mod export;
mod image;
mod import;
mod levels;
mod remote;
mod scope;

pub(crate) use arrive::{FillJob, OpenedLayers};
pub(crate) use export::{ExportJob, ExportSource, PublishedKeys};
pub(crate) use import::ImportJob;
pub(crate) use levels::refresh_tier;
pub(crate) use scope::{scope_of, scope_word};

use crate::config::{CacheConfig, ConfigError};
use crate::metrics::Metrics;
use catalog::{DiskCatalog, name_of};
use export::ExportLine;
use kvd_compute::Stop;
use kvd_core::{ModelId, Namespace};
use kvd_store::{BlockDigests, DiskBlock, PrefixIndex};
use kvd_tier::{DiskError, DiskLocation, DiskTier, ScopeId, TierLevels};
use parking_lot::Mutex;
use remote::RemoteCache;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, Semaphore, watch};

/// Time and bytes that a job of a tier takes before others have their turn.
const TRANSFER_TIME: Duration = Duration::from_millis(2);
const TRANSFER_BYTES: usize = 4 << 20;

/// Time and bytes that a job has used of its slice of the device.
struct SliceUse {
    began: Instant,
    bytes: usize,
}

impl SliceUse {
    fn begin_slice() -> Self {
        Self { began: Instant::now(), bytes: 0 }
    }

    /// Whether others have their turn: soon where any wait that go first.
    fn is_spent(&self, stop: &Stop) -> bool {
        self.bytes >= TRANSFER_BYTES
            || self.began.elapsed() >= TRANSFER_TIME
            || stop.slice_is_over()
    }
}

/// A block that is being brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LoadKey {
    shard: usize,
    lineage: u128,
}

/// Why a tier could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TierError {
    /// The folder of the disk tier.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The store that daemons share.
    #[error(transparent)]
    Remote(#[from] ConfigError),
}

/// The tiers, opened: a disk, a store that daemons share, or both.
pub(crate) struct CacheTiers {
    disk: Option<DiskTier>,
    remote: Option<RemoteCache>,
    config: CacheConfig,
    catalog: Arc<DiskCatalog>,
    /// By device.
    exports: Mutex<Vec<ExportLine>>,
    /// Bytes in the pool of blocks that wait to be written or to be durable.
    queued_bytes: AtomicU64,
    /// Told whenever a block was written or given up.
    written: Notify,
    /// Why the last block that was not written was not.
    last_failure: Mutex<&'static str>,
    loading: Mutex<HashMap<LoadKey, watch::Receiver<()>>>,
    promotions: Arc<Semaphore>,
    /// Records that could not be marked as dropped.
    undropped: AtomicU64,
    /// Set once the disk closes: nothing more is read for what can wait.
    is_closing: AtomicBool,
}

/// Opens or makes the folder and finds what is in it.
fn open_folder(
    config: &CacheConfig,
    catalog: &Arc<DiskCatalog>,
) -> Result<Option<DiskTier>, DiskError> {
    let Some(disk) = &config.disk else { return Ok(None) };
    let listener: Arc<DiskCatalog> = Arc::clone(catalog);
    let (tier, found) = DiskTier::open_folder(disk.tier_settings(), listener)?;
    catalog.add_recovered(&found);
    let levels = tier.read_levels();
    tracing::info!(
        folder = %disk.path.display(),
        blocks = levels.recovered_live,
        bytes = levels.used_bytes,
        segments = levels.segments,
        direct = tier.is_direct(),
        milliseconds = levels.recover_us / 1000,
        "the disk tier is open"
    );
    Ok(Some(tier))
}

impl CacheTiers {
    /// Opens the tiers that settings name; none where they name none. Waits for the disk, not for
    /// the store that daemons share.
    ///
    /// # Errors
    /// [`TierError`].
    pub(crate) fn open_tiers(
        config: &CacheConfig,
        metrics: &Arc<Metrics>,
    ) -> Result<Option<Self>, TierError> {
        let catalog = Arc::<DiskCatalog>::default();
        let open_remote = |remote| RemoteCache::open_store(remote, metrics);
        let remote = config.remote.as_ref().map(open_remote).transpose()?;
        let disk = open_folder(config, &catalog)?;
        if disk.is_none() && remote.is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            disk,
            remote,
            config: config.clone(),
            catalog,
            exports: Mutex::default(),
            queued_bytes: AtomicU64::new(0),
            written: Notify::new(),
            last_failure: Mutex::new("DISK_ERROR"),
            loading: Mutex::default(),
            promotions: Arc::new(Semaphore::new(config.promotion.calls_max)),
            undropped: AtomicU64::new(0),
            is_closing: AtomicBool::new(false),
        }))
    }

    /// Gets ready for so many devices.
    pub(super) fn set_devices(&self, count: usize) {
        self.exports.lock().resize_with(count, ExportLine::default);
    }

    /// Seed of the hashes of keys where there is a disk: the folder's, so that they mean the same
    /// after a restart.
    pub(super) fn hash_seed(&self) -> Option<u64> {
        self.disk.as_ref().map(DiskTier::hash_seed)
    }

    /// Whether there is a disk: what is durable is there.
    pub(super) fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Gives a scope to a model's index, which hashes the model's keys within it from now on; its
    /// blocks, which are to be restored. None where another registration of the content has it.
    pub(super) fn claim_scope(
        &self,
        scope: ScopeId,
        index: &Arc<PrefixIndex>,
        model: ModelId,
    ) -> Option<Vec<DiskBlock>> {
        let blocks = self.catalog.claim_scope(scope, index)?;
        index.set_scope(model, scope_word(scope));
        Some(blocks)
    }

    /// Reads the keys of restored blocks from their records, so that watchers are told of them.
    /// Blocks the thread; one that cannot be read is found and not told of.
    pub(super) fn learn_keys(&self, index: &PrefixIndex, blocks: &[DiskBlock]) {
        let Some(disk) = self.disk.as_ref().filter(|_| self.config.events.ring > 0) else { return };
        for block in blocks {
            if self.is_closing.load(Relaxed) {
                return;
            }
            let head = disk.read_head(&DiskLocation::from_words(block.place.0));
            // The record may lie elsewhere by now, or be gone.
            let Ok(head) = head else { continue };
            let key = head.record_meta().key;
            if !key.is_empty() {
                index.learn_block_key(&block.digests, &key);
            }
        }
    }

    /// Takes back the scope of a model that is no more, with the blocks that are on disk.
    pub(super) fn return_scope(&self, scope: ScopeId, blocks: Vec<DiskBlock>) {
        self.catalog.return_scope(scope, blocks);
    }

    /// Marks records as dropped: they do not come back after a restart.
    pub(super) fn remove_records(&self, scope: ScopeId, blocks: &[BlockDigests]) {
        let Some(disk) = &self.disk else { return };
        for digests in blocks {
            let refused = disk.remove_record(&name_of(scope, digests), Box::new(|_| ())).is_err();
            self.undropped.fetch_add(u64::from(refused), Relaxed);
        }
    }

    /// Writes down what a scope is, for people.
    pub(super) fn describe_scope(
        &self,
        scope: ScopeId,
        namespace: &Namespace,
        text: &ScopeText<'_>,
    ) {
        let Some(disk) = &self.disk else { return };
        let json = serde_json::json!({
            "namespace": namespace.as_str(),
            "model": text.model,
            "codec": text.codec,
            "weights": String::from_utf8_lossy(text.weights),
        });
        // It is for people: `kvd cache ls` shows the scope by its digits where there is none.
        let json = json.to_string();
        if let Err(refused) = disk.write_scope(scope, json.as_bytes(), Box::new(|_| ())) {
            tracing::debug!(%scope, %refused, "a scope is not described");
        }
    }

    /// Told whenever a block was written or given up.
    pub(super) fn written_blocks(&self) -> &Notify {
        &self.written
    }

    /// Why blocks of a prefix are not on disk that nothing writes.
    pub(super) fn failure_reason(&self) -> &'static str {
        let Some(disk) = &self.disk else { return "NO_DISK" };
        if !self.writes_to_disk() || disk.read_levels().state == kvd_tier::TierState::Off {
            return "OFF";
        }
        if self.queued_bytes.load(Relaxed) * 2 > self.queue_limit() {
            return "QUEUE_FULL";
        }
        *self.last_failure.lock()
    }

    fn writes_to_disk(&self) -> bool {
        self.config.disk.as_ref().is_some_and(|disk| disk.writes)
    }

    /// Bytes of blocks that may wait to be written.
    fn queue_limit(&self) -> u64 {
        let of_disk = self.config.disk.as_ref().filter(|disk| disk.writes);
        let of_remote = self.config.remote.as_ref().map_or(0, |remote| remote.queue_bytes);
        of_disk.map_or(of_remote, |disk| disk.queue_bytes)
    }

    /// Counters and levels of the disk.
    pub(crate) fn read_levels(&self) -> TierLevels {
        self.disk.as_ref().map(DiskTier::read_levels).unwrap_or_default()
    }

    /// Bytes in the pool of blocks that wait to be durable.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Relaxed)
    }

    /// Ends the disk: what waits is written within `grace`. Waits for it.
    pub(crate) fn close_folder(&self, grace: Duration) {
        self.is_closing.store(true, Relaxed);
        self.disk.iter().for_each(|disk| disk.close_tier(grace));
    }

    /// Ends the store that daemons share: what waits is written within `grace`.
    pub(crate) async fn close_remote(&self, grace: Duration) {
        if let Some(remote) = &self.remote {
            remote.tier.close_tier(grace).await;
        }
    }
}

/// A description of a scope.
pub(super) struct ScopeText<'a> {
    pub(super) model: &'a str,
    pub(super) codec: &'a str,
    pub(super) weights: &'a [u8],
}
