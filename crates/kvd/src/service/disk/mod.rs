//! The disk tier of the cache: what is published goes there and is found again after a restart.
//!
//! Owns [`DiskCache`]: the tier, the scopes on it, what waits to be written and what is being read.
//! The only module that knows store, device and tier. The index's locks are taken without any of
//! its own.

mod catalog;
mod export;
mod image;
mod import;
mod levels;
mod scope;

pub(crate) use export::{ExportJob, ExportSource};
pub(crate) use import::ImportJob;
pub(crate) use levels::refresh_tier;
pub(crate) use scope::{scope_of, scope_word};

use crate::config::DiskCacheConfig;
use catalog::{DiskCatalog, name_of};
use export::ExportLine;
use kvd_core::{ModelId, Namespace};
use kvd_store::{BlockDigests, DiskBlock, PrefixIndex};
use kvd_tier::{DiskError, DiskTier, ScopeId, TierLevels};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
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

    fn is_spent(&self) -> bool {
        self.bytes >= TRANSFER_BYTES || self.began.elapsed() >= TRANSFER_TIME
    }
}

/// A block that is being brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LoadKey {
    shard: usize,
    lineage: u128,
}

/// The disk tier, opened.
pub(crate) struct DiskCache {
    tier: DiskTier,
    config: DiskCacheConfig,
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
    promotions: Semaphore,
    /// Records that could not be marked as dropped.
    undropped: AtomicU64,
}

impl DiskCache {
    /// Opens or makes the folder and finds what is in it. Waits for the disk.
    ///
    /// # Errors
    /// [`DiskError`].
    pub(crate) fn open_folder(config: &DiskCacheConfig) -> Result<Self, DiskError> {
        let catalog = Arc::<DiskCatalog>::default();
        let listener: Arc<DiskCatalog> = Arc::clone(&catalog);
        let (tier, found) = DiskTier::open_folder(config.tier_settings(), listener)?;
        catalog.add_recovered(&found);
        let levels = tier.read_levels();
        tracing::info!(
            folder = %config.path.display(),
            blocks = levels.recovered_live,
            bytes = levels.used_bytes,
            segments = levels.segments,
            direct = tier.is_direct(),
            milliseconds = levels.recover_us / 1000,
            "the disk tier is open"
        );
        Ok(Self {
            tier,
            config: config.clone(),
            catalog,
            exports: Mutex::default(),
            queued_bytes: AtomicU64::new(0),
            written: Notify::new(),
            last_failure: Mutex::new("DISK_ERROR"),
            loading: Mutex::default(),
            promotions: Semaphore::new(config.promotions_max),
            undropped: AtomicU64::new(0),
        })
    }

    /// Gets ready for so many devices.
    pub(super) fn set_devices(&self, count: usize) {
        self.exports.lock().resize_with(count, ExportLine::default);
    }

    /// Seed of the hashes of keys: the folder's, so that they mean the same after a restart.
    pub(super) fn hash_seed(&self) -> u64 {
        self.tier.hash_seed()
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

    /// Takes back the scope of a model that is no more, with the blocks that are on disk.
    pub(super) fn return_scope(&self, scope: ScopeId, blocks: Vec<DiskBlock>) {
        self.catalog.return_scope(scope, blocks);
    }

    /// Marks records as dropped: they do not come back after a restart.
    pub(super) fn remove_records(&self, scope: ScopeId, blocks: &[BlockDigests]) {
        for digests in blocks {
            let refused =
                self.tier.remove_record(&name_of(scope, digests), Box::new(|_| ())).is_err();
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
        let json = serde_json::json!({
            "namespace": namespace.as_str(),
            "model": text.model,
            "codec": text.codec,
            "weights": String::from_utf8_lossy(text.weights),
        });
        // It is for people: `kvd cache ls` shows the scope by its digits where there is none.
        let json = json.to_string();
        if let Err(refused) = self.tier.write_scope(scope, json.as_bytes(), Box::new(|_| ())) {
            tracing::debug!(%scope, %refused, "a scope is not described");
        }
    }

    /// Told whenever a block was written or given up.
    pub(super) fn written_blocks(&self) -> &Notify {
        &self.written
    }

    /// Why blocks of a prefix are not on disk that nothing writes.
    pub(super) fn failure_reason(&self) -> &'static str {
        if !self.config.writes || self.tier.read_levels().state == kvd_tier::TierState::Off {
            return "OFF";
        }
        if self.queued_bytes.load(Relaxed) * 2 > self.config.queue_bytes {
            return "QUEUE_FULL";
        }
        *self.last_failure.lock()
    }

    /// Counters and levels of the tier.
    pub(crate) fn read_levels(&self) -> TierLevels {
        self.tier.read_levels()
    }

    /// Bytes in the pool of blocks that wait to be durable.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Relaxed)
    }

    /// Ends the tier: what waits is written within `grace`. Waits for the disk.
    pub(crate) fn close_folder(&self, grace: Duration) {
        self.tier.close_tier(grace);
    }
}

/// A description of a scope.
pub(super) struct ScopeText<'a> {
    pub(super) model: &'a str,
    pub(super) codec: &'a str,
    pub(super) weights: &'a [u8],
}
