//! Settings of the cache.

use super::raw::CacheSettings;
use super::{ConfigError, at_least};
use kvd_store::EvictionChoice;
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
    }
}
