//! Settings of the cache.

use super::raw::{CacheSettings, DiskTierSettings, EventSettings};
use super::{ConfigError, RemoteCacheConfig, at_least};
use kvd_store::EvictionChoice;
use kvd_tier::{DirectChoice, DiskSettings};
use std::path::PathBuf;
use std::time::Duration;

/// Limits and choices of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// The order in which blocks go.
    pub policy: EvictionChoice,
    /// Percent of the pool that cached blocks may take.
    pub pool_percent: u64,
    /// Cached pages of tokens, of each device.
    pub blocks_max: usize,
    /// Keys of one call, all chains together.
    pub keys_per_call_max: u64,
    /// Longest lease.
    pub lease_max: Duration,
    /// Leases and pins, of each device.
    pub leases_max: usize,
    /// Bytes of pinned blocks, of each device.
    pub pinned_bytes_max: u64,
    /// The disk tier, if there is one.
    pub disk: Option<DiskCacheConfig>,
    /// The store that daemons share, if there is one.
    pub remote: Option<RemoteCacheConfig>,
    /// Limits of what comes back from either.
    pub promotion: PromotionLimits,
    /// Limits of watches.
    pub events: EventConfig,
}

/// Limits of watches of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventConfig {
    /// Events that are kept, of all watched namespaces; 0: there are no watches.
    pub ring: usize,
    /// Watches at a time.
    pub watchers_max: usize,
    /// How long they are kept of a namespace that nobody watches any more.
    pub keep_time: Duration,
}

impl EventConfig {
    fn from_raw(raw: &EventSettings) -> Self {
        let EventSettings { ring, watchers_max, keep_ms } = *raw;
        Self { ring, watchers_max, keep_time: Duration::from_millis(keep_ms.into()) }
    }
}

/// Limits of blocks that come back to the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromotionLimits {
    /// How long a call waits for blocks.
    pub time_max: Duration,
    /// Calls that wait for blocks at a time.
    pub calls_max: usize,
}

/// Settings of the disk tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCacheConfig {
    /// Folder of the tier.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Whether what is published is written.
    pub writes: bool,
    /// Bytes of a batch.
    pub sync_bytes: u64,
    /// Time of a batch.
    pub sync_ms: u64,
    /// Bytes of blocks that wait to be written.
    pub queue_bytes: u64,
    /// Limit of the writes; 0 for none.
    pub write_bytes_per_second: u64,
    /// Percent of a segment that is kept when its room is needed.
    pub reinsert_percent: u8,
    /// Bytes of the file system that stay free.
    pub reserve_free_bytes: u64,
    /// Threads that read.
    pub read_threads: usize,
    /// Whether files bypass the page cache where they can.
    pub is_direct: bool,
}

/// One of the two words that a setting has.
pub(super) fn read_choice(key: &'static str, value: &str, yes: &str) -> Result<bool, ConfigError> {
    match value {
        _ if value == yes => Ok(true),
        "off" => Ok(false),
        other => Err(ConfigError::new(key, format!("{other:?} is not {yes} or off"))),
    }
}

impl DiskCacheConfig {
    fn validate_raw(raw: &DiskTierSettings) -> Result<Option<Self>, ConfigError> {
        let config = Self {
            path: PathBuf::from(&raw.path),
            bytes: raw.bytes.as_u64(),
            segment_bytes: raw.segment_bytes.as_u64(),
            writes: read_choice("cache.disk.write", &raw.write, "publish")?,
            sync_bytes: raw.sync_bytes.as_u64(),
            sync_ms: raw.sync_ms,
            queue_bytes: raw.queue_bytes.as_u64(),
            write_bytes_per_second: raw.write_bytes_per_second.as_u64(),
            reinsert_percent: raw.reinsert_percent,
            reserve_free_bytes: raw.reserve_free_bytes.as_u64(),
            read_threads: raw.read_threads,
            is_direct: read_choice("cache.disk.direct", &raw.direct, "auto")?,
        };
        let checked = config.tier_settings().check_limits();
        checked.map_err(|error| {
            let reason = error.to_string();
            let reason = reason.strip_prefix("cache.disk: ").unwrap_or(&reason);
            ConfigError::new("cache.disk", reason)
        })?;
        Ok((!raw.path.is_empty()).then_some(config))
    }

    /// These settings as the tier takes them.
    #[must_use]
    pub fn tier_settings(&self) -> DiskSettings {
        let direct = if self.is_direct { DirectChoice::Auto } else { DirectChoice::Off };
        DiskSettings {
            segment_bytes: self.segment_bytes,
            sync_bytes: self.sync_bytes,
            sync_ms: self.sync_ms,
            queue_bytes_max: self.queue_bytes,
            direct,
            write_bytes_per_second: self.write_bytes_per_second,
            reinsert_percent: self.reinsert_percent,
            reserve_free_bytes: self.reserve_free_bytes,
            read_threads: self.read_threads,
            ..DiskSettings::new(self.path.clone(), self.bytes)
        }
    }
}

impl CacheConfig {
    pub(super) fn validate_raw(raw: &CacheSettings) -> Result<Self, ConfigError> {
        let percent = |key, value: u8, most: u8| {
            let reason = || format!("{value} is above the maximum {most}");
            if value > most { Err(ConfigError::new(key, reason())) } else { Ok(value) }
        };
        let small_percent = at_least("cache.small_percent", raw.small_percent, 1)?;
        let small_percent = percent("cache.small_percent", small_percent, 99)?;
        let policy = match &raw.policy[..] {
            "s3-fifo" => EvictionChoice::S3Fifo { small_percent },
            "lru" => EvictionChoice::Lru,
            other => {
                let reason = format!("{other:?} is not s3-fifo or lru");
                return Err(ConfigError::new("cache.policy", reason));
            }
        };
        Ok(Self {
            policy,
            pool_percent: percent("cache.pool_percent", raw.pool_percent, 100)?.into(),
            blocks_max: entry_number("cache.blocks_max", raw.blocks_max)?,
            keys_per_call_max: at_least("cache.keys_per_call_max", raw.keys_per_call_max, 1)?,
            lease_max: Duration::from_millis(raw.lease_ms_max.into()),
            leases_max: raw.leases_max,
            pinned_bytes_max: raw.pinned_bytes_max.as_u64(),
            disk: DiskCacheConfig::validate_raw(&raw.disk)?,
            remote: RemoteCacheConfig::validate_raw(&raw.remote)?,
            promotion: PromotionLimits {
                time_max: Duration::from_millis(raw.disk.promote_ms_max.into()),
                calls_max: at_least("cache.disk.promotions_max", raw.disk.promotions_max, 1)?,
            },
            events: EventConfig::from_raw(&raw.events),
        })
    }

    /// Bytes of a pool that cached blocks may take.
    #[must_use]
    pub fn limit_bytes(&self, pool_bytes: u64) -> u64 {
        pool_bytes / 100 * self.pool_percent + pool_bytes % 100 * self.pool_percent / 100
    }
}

/// Entries are numbered by 32 bits.
fn entry_number(key: &'static str, value: u64) -> Result<usize, ConfigError> {
    match u32::try_from(value) {
        Ok(value) => Ok(value as usize),
        Err(_) => Err(ConfigError::new(key, format!("{value} is above the maximum {}", u32::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ConfigOverrides};

    fn load(key: &str, value: &str) -> Result<CacheConfig, String> {
        let flags = vec![(key.to_owned(), value.to_owned())];
        let overrides = ConfigOverrides { file: None, environment: false, flags };
        Config::load(&overrides).map(|config| config.cache).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_and_refusals() {
        let cache = load("log.format", "text").unwrap();
        assert_eq!(cache.policy, EvictionChoice::S3Fifo { small_percent: 50 });
        assert_eq!((cache.limit_bytes(1 << 30), cache.limit_bytes(199)), (805_306_368, 149));
        assert_eq!(load("cache.policy", "lru").unwrap().policy, EvictionChoice::Lru);
        let refused = |key, value| load(key, value).unwrap_err();
        assert!(refused("cache.policy", "arc").contains("is not s3-fifo or lru"));
        assert!(refused("cache.small_percent", "0").contains("cache.small_percent: 0 is below"));
        assert!(refused("cache.small_percent", "100").contains("above the maximum 99"));
        assert!(refused("cache.pool_percent", "101").contains("above the maximum 100"));
        assert!(refused("cache.blocks_max", "4294967296").contains("cache.blocks_max"));
        assert!(refused("cache.keys_per_call_max", "0").contains("below the minimum 1"));
        assert_eq!(cache.disk, None);
        let disk = load("cache.disk.path", "/somewhere").unwrap().disk.unwrap();
        assert_eq!((disk.bytes, disk.writes, disk.segment_bytes), (16 << 30, true, 256 << 20));
        assert!(refused("cache.disk.write", "always").contains("is not publish or off"));
        assert!(refused("cache.disk.bytes", "1 MiB").contains("at least 3 times"));
        assert!(refused("cache.disk.no", "1").contains("no such setting"));
        assert_eq!(cache.remote, None);
        let remote = load("cache.remote.url", "file:///somewhere").unwrap().remote.unwrap();
        assert_eq!((remote.reads, remote.writes, remote.min_prefix_tokens), (true, true, 512));
        assert!(refused("cache.remote.url", "http://a").contains("is not redis://"));
        #[cfg(not(feature = "remote-s3"))]
        assert!(refused("cache.remote.url", "s3://bucket").contains("cargo feature remote-s3"));
        let secret = refused("cache.remote.url", "redis://:secret@host");
        assert!(secret.contains("put it in a file") && !secret.contains("secret@"), "{secret}");
        assert!(refused("cache.remote.read", "maybe").contains("is not on or off"));
        assert!(refused("cache.remote.write", "always").contains("is not publish or off"));
        let zero = refused("cache.remote.connections", "0");
        assert!(zero.contains("cache.remote: connections must not be 0"), "{zero}");
    }
}
