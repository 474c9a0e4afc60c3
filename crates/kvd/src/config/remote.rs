//! Settings of the store that daemons share.

use super::ConfigError;
use super::cache::read_choice;
use super::raw::RemoteTierSettings;
use crate::bounded_file::read_bytes;
use kvd_remote::{MacKey, RemoteSettings, RemoteUrl};
use std::path::PathBuf;
use std::time::Duration;

/// Settings of the remote tier. Secrets are in files, which are read when it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteCacheConfig {
    /// Whether blocks are looked for in it.
    pub reads: bool,
    /// Whether what is published is written to it.
    pub writes: bool,
    /// Tokens of a prefix that is worth it.
    pub min_prefix_tokens: u32,
    /// Bytes of blocks that wait to be written.
    pub queue_bytes: u64,
    raw: RemoteTierSettings,
}

impl RemoteCacheConfig {
    pub(super) fn validate_raw(raw: &RemoteTierSettings) -> Result<Option<Self>, ConfigError> {
        let config = Self {
            reads: read_choice("cache.remote.read", &raw.read, "on")?,
            writes: read_choice("cache.remote.write", &raw.write, "publish")?,
            min_prefix_tokens: raw.min_prefix_tokens,
            queue_bytes: raw.queue_bytes.as_u64(),
            raw: raw.clone(),
        };
        let text = if raw.url.is_empty() { "file:///" } else { &raw.url };
        let url = RemoteUrl::parse_url(text).and_then(|url| {
            if !raw.url.is_empty() {
                url.check_client()?;
            }
            Ok(url)
        });
        let url = url.map_err(|error| ConfigError::new("cache.remote.url", error.to_string()))?;
        let checked = config.store_settings(url).check_limits();
        checked.map_err(|error| ConfigError::new("cache.remote", error.to_string()))?;
        Ok((!raw.url.is_empty()).then_some(config))
    }

    fn store_settings(&self, url: RemoteUrl) -> RemoteSettings {
        let raw = &self.raw;
        RemoteSettings {
            endpoint: raw.endpoint.clone(),
            region: raw.region.clone(),
            prefix: raw.prefix.clone(),
            connections: raw.connections,
            reads_max: raw.reads_max,
            finds_max: raw.finds_max,
            queue_bytes: self.queue_bytes,
            object_bytes_max: raw.object_bytes_max.as_u64(),
            timeout: Duration::from_millis(raw.timeout_ms.into()),
            find_timeout: Duration::from_millis(raw.find_ms_max.into()),
            miss_time: Duration::from_millis(raw.miss_ms.into()),
            misses_max: raw.misses_max,
            ttl: Duration::from_secs(raw.ttl_s.into()),
            ..RemoteSettings::new(url)
        }
    }

    /// The address, which has no secret.
    #[must_use]
    pub fn store_url(&self) -> &str {
        &self.raw.url
    }

    /// How long a look-up may take.
    #[must_use]
    pub fn find_time_max(&self) -> Duration {
        Duration::from_millis(self.raw.find_ms_max.into())
    }

    /// These settings as the tier takes them, with the secrets of their files.
    ///
    /// # Errors
    /// A file that cannot be read, or holds no secret.
    pub fn read_settings(&self) -> Result<RemoteSettings, ConfigError> {
        let read = |key, path: &str| -> Result<Option<Vec<u8>>, ConfigError> {
            if path.is_empty() {
                return Ok(None);
            }
            let path = PathBuf::from(path);
            let said = |error| ConfigError::new(key, format!("{}: {error}", path.display()));
            read_bytes(&path).map(Some).map_err(said)
        };
        let url = RemoteUrl::parse_url(&self.raw.url)
            .map_err(|error| ConfigError::new("cache.remote.url", error.to_string()))?;
        let password = read("cache.remote.password_file", &self.raw.password_file)?;
        let password = password.map(|bytes| {
            String::from_utf8(bytes).map(|text| text.trim_end().to_owned()).map_err(|_| {
                ConfigError::new("cache.remote.password_file", "it is no UTF-8 text".to_owned())
            })
        });
        let secret = read("cache.remote.mac_key_file", &self.raw.mac_key_file)?;
        let mac = secret.map(|secret| {
            MacKey::from_secret(&secret)
                .map_err(|error| ConfigError::new("cache.remote.mac_key_file", error.to_string()))
        });
        let (password, mac) = (password.transpose()?, mac.transpose()?);
        Ok(RemoteSettings { password, mac, ..self.store_settings(url) })
    }
}
