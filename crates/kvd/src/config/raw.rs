//! The configuration as written: file, environment and flags laid over the defaults.

use super::environment::{self, read_environment, variable_name};
use super::{DEFAULT_TOML, SizeSetting};
use crate::bounded_file::read_text;
use figment::Figment;
use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Value};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A setting that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("configuration: {key}: {reason}")]
pub struct ConfigError {
    /// `section.key`, or the file.
    pub key: String,
    /// Says what is wrong and what would be right.
    pub reason: String,
}

impl ConfigError {
    pub(crate) fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), reason: reason.into() }
    }
}

/// Settings that lie over the defaults.
#[derive(Clone, Debug, Default)]
pub struct ConfigOverrides {
    /// A TOML file.
    pub file: Option<PathBuf>,
    /// Read `KVD_<SECTION>__<KEY>` from the environment.
    pub environment: bool,
    /// `section.key` and a TOML value (or a bare text), from flags.
    pub flags: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct RawConfig {
    pub server: ServerSettings,
    pub admin: AdminSettings,
    pub access: AccessSettings,
    pub device: DeviceSettings,
    pub limits: LimitSettings,
    pub cache: CacheSettings,
    pub namespaces: NamespaceSettings,
    pub defaults: DefaultSettings,
    pub log: LogSettings,
    pub traces: TraceSettings,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct ServerSettings {
    pub listen_tcp: String,
    pub listen_unix: String,
    pub listen_region: String,
    pub ring_spin_us: u64,
    pub tls_certificate: String,
    pub tls_key: String,
    pub tls_client_ca: String,
    pub tls_client_required: bool,
    pub insecure: bool,
    pub message_bytes_max: SizeSetting,
    pub stream_window_bytes: SizeSetting,
    pub connection_window_bytes: SizeSetting,
    pub keepalive_interval_ms: u64,
    pub keepalive_timeout_ms: u64,
    pub streams_per_connection_max: u32,
    pub connections_max: CountSetting,
    pub message_timeout_ms: u64,
    pub grace_period_ms: u64,
}

/// A number, or a word that leaves it to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum CountSetting {
    /// As written.
    Number(usize),
    /// `auto`, or a mistake.
    Word(String),
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct AdminSettings {
    pub listen: String,
    pub tls_certificate: String,
    pub tls_key: String,
    pub tls_client_ca: String,
    pub metrics: String,
    pub connections_max: usize,
    pub head_timeout_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct AccessSettings {
    pub principals: String,
    pub check_files_ms: u64,
    pub audit_lines_max: u32,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct DeviceSettings {
    pub device: String,
    pub pool_bytes: SizeSetting,
    pub pool_slots_max: u64,
    pub table_bytes: SizeSetting,
    pub prefault: bool,
    pub threads: usize,
    pub pin_threads: bool,
    pub precision: String,
    pub kernel_cache: String,
    pub graphs_max: usize,
    pub kernel_timeout_ms: u64,
    pub queue_jobs_max: usize,
    pub merged_attends_max: usize,
    pub merge_wait_us: usize,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct LimitSettings {
    pub models_max: usize,
    pub sequences_max: usize,
    pub sessions_max: usize,
    pub session_ttl_ms_max: u32,
    pub tokens_per_sequence_max: u32,
    pub sequence_layers_max: u64,
    pub sequence_views_max: u64,
    pub calibration_bytes_max: SizeSetting,
    pub calibration_rows_bytes_max: SizeSetting,
    pub query_sample_bytes_max: SizeSetting,
    pub inflight_bytes_max: SizeSetting,
    pub connection_bytes_max: SizeSetting,
    pub namespace_bytes_max: SizeSetting,
    pub regions_max: usize,
    pub region_bytes_max: SizeSetting,
    pub ring_entries_max: u32,
    pub attend_parts_max: u64,
    pub attend_work_max: u64,
    pub step_rows_max: u64,
    pub page_tokens_min: u32,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct CacheSettings {
    pub policy: String,
    pub small_percent: u8,
    pub pool_percent: u8,
    pub blocks_max: u64,
    pub keys_per_call_max: u64,
    pub lease_ms_max: u32,
    pub leases_max: usize,
    pub pinned_bytes_max: SizeSetting,
    pub disk: DiskTierSettings,
    pub remote: RemoteTierSettings,
    pub events: EventSettings,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct EventSettings {
    pub ring: usize,
    pub watchers_max: usize,
    pub keep_ms: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct RemoteTierSettings {
    pub url: String,
    pub endpoint: String,
    pub region: String,
    pub prefix: String,
    pub password_file: String,
    pub mac_key_file: String,
    pub read: String,
    pub write: String,
    pub min_prefix_tokens: u32,
    pub connections: usize,
    pub reads_max: usize,
    pub finds_max: usize,
    pub queue_bytes: SizeSetting,
    pub object_bytes_max: SizeSetting,
    pub timeout_ms: u32,
    pub find_ms_max: u32,
    pub miss_ms: u32,
    pub misses_max: usize,
    pub ttl_s: u32,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct DiskTierSettings {
    pub path: String,
    pub bytes: SizeSetting,
    pub segment_bytes: SizeSetting,
    pub write: String,
    pub sync_bytes: SizeSetting,
    pub sync_ms: u64,
    pub queue_bytes: SizeSetting,
    pub write_bytes_per_second: SizeSetting,
    pub reinsert_percent: u8,
    pub reserve_free_bytes: SizeSetting,
    pub read_threads: usize,
    pub direct: String,
    pub promote_ms_max: u32,
    pub promotions_max: usize,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct NamespaceSettings {
    pub allowed: Vec<String>,
    pub weights: Vec<String>,
    pub quotas: Vec<String>,
    pub quota_file: String,
    pub quotas_max: usize,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct DefaultSettings {
    pub block_tokens: u32,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct LogSettings {
    pub format: String,
    pub filter: String,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "deploy/kvd.toml documents every key")]
pub struct TraceSettings {
    pub endpoint: String,
    pub sample_ratio: f64,
}

impl RawConfig {
    /// As a file that `--config` reads, every key in it; keys that differ from the default say so.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let text = |raw: &Self| toml::to_string(raw).expect("texts, numbers and lists of texts");
        let (own, defaults) = (text(self), text(&Self::default_config()));
        let pairs = own.lines().zip(defaults.lines());
        if own.lines().count() != defaults.lines().count() {
            return own;
        }
        let mut file = String::new();
        for (line, default) in pairs {
            file.push_str(line);
            if let (true, Some((_, value))) = (line != default, default.split_once(" = ")) {
                file.push_str(&format!("  # default: {value}"));
            }
            file.push('\n');
        }
        file
    }

    fn default_config() -> Self {
        Figment::from(Toml::string(DEFAULT_TOML)).extract().expect("a test reads the defaults")
    }

    /// Defaults < file < environment < flags.
    ///
    /// # Errors
    /// Names the key that is unknown or of the wrong type, or the file that cannot be read.
    pub fn load(overrides: &ConfigOverrides) -> Result<Self, ConfigError> {
        let mut figment = Figment::from(Toml::string(DEFAULT_TOML));
        let known: Dict = figment.extract().expect("a test reads the defaults");
        if let Some(path) = &overrides.file {
            let failed = |reason| ConfigError::new(path.display().to_string(), reason);
            let text = read_text(path).map_err(|error| failed(error.to_string()))?;
            let file = Figment::from(Toml::string(&text));
            let given: Dict = file.extract().map_err(|error| failed(error.kind.to_string()))?;
            let mut keys = given.iter().flat_map(|(section, value)| list_keys(section, value));
            if let Some(key) = keys.find(|key| !is_known(&known, key)) {
                let place = format!("in {}", path.display());
                return Err(unknown_setting(&known, key.clone(), &key, &place));
            }
            figment = figment.merge(file);
        }
        if overrides.environment {
            environment::check_names(&known)?;
            let environment = read_environment();
            if let Some((key, _)) =
                environment.iter().find(|(key, _)| !is_known(&known, key.as_str()))
            {
                let shown = variable_name(key.as_str());
                return Err(unknown_setting(&known, shown, key.as_str(), "in the environment"));
            }
            figment = figment.merge(environment);
        }
        for (key, value) in &overrides.flags {
            if !is_known(&known, key) {
                return Err(unknown_setting(&known, key.clone(), key, "on the command line"));
            }
            let value: Value = value.parse().expect("any text is a figment value");
            figment = figment.merge(Serialized::default(key, value));
        }
        figment.extract().map_err(|error| {
            // The first of a chain; later ones are found once it is mended.
            let key = error.path.join(".");
            let is_of =
                |source: &str| error.metadata.as_ref().is_some_and(|of| of.name.contains(source));
            let reason = plain_reason(&key, &error.kind.to_string());
            let key = if is_of("environment") { variable_name(&key) } else { key };
            match overrides.file.as_ref().filter(|_| is_of("TOML")) {
                Some(path) => ConfigError::new(key, format!("{reason}, in {}", path.display())),
                None => ConfigError::new(key, reason),
            }
        })
    }
}

/// An error of the wrong type, for people who do not know Rust's.
fn plain_reason(key: &str, reason: &str) -> String {
    let list = match key {
        "namespaces.weights" => "a list such as [\"interactive=4\"]",
        "namespaces.quotas" => "a list such as [\"team-a: pool_bytes=2 GiB\"]",
        _ => "a list such as [\"default\"]",
    };
    let words = [
        ("usize", "a whole number from 0 on"),
        ("u64", "a whole number from 0 on"),
        ("u32", "a whole number from 0 to 4294967295"),
        ("u8", "a whole number from 0 to 255"),
        ("a boolean", "true or false"),
        ("a sequence", list),
    ];
    let known = |(rust, plain): &(&str, &str)| {
        reason.strip_suffix(rust).map(|start| format!("{start}{plain}"))
    };
    words.iter().find_map(known).unwrap_or_else(|| reason.to_owned())
}

/// The `section.key` of everything in a section and those inside it; the section itself when it is
/// none.
pub(super) fn list_keys(section: &str, value: &Value) -> Vec<String> {
    let inside = |dict: &Dict| {
        let keys = dict.iter().map(|(key, value)| (format!("{section}.{key}"), value.clone()));
        keys.flat_map(|(key, value)| list_keys(&key, &value)).collect()
    };
    value.as_dict().map_or_else(|| vec![section.to_owned()], inside)
}

/// Whether the defaults have that `section.key`: they have every key.
fn is_known(defaults: &Dict, key: &str) -> bool {
    let Some((section, key)) = key.split_once('.') else { return false };
    let Some(keys) = defaults.get(section).and_then(Value::as_dict) else { return false };
    match keys.get(key) {
        Some(value) => value.as_dict().is_none(),
        None => is_known(keys, key),
    }
}

/// The error of a key that is none; `shown` is how it was given.
fn unknown_setting(known: &Dict, shown: String, key: &str, place: &str) -> ConfigError {
    let meant = find_similar_key(known, key);
    let meant = meant.map_or_else(String::new, |key| format!("; is {key} meant?"));
    let reason = format!("no such setting, {place}{meant}; kvd config --print-default lists them");
    ConfigError::new(shown, reason)
}

/// The setting that a name with underscores alone is most like, by its whole key or its last part;
/// none where several are as like.
pub(super) fn nearest_key(known: &Dict, name: &str) -> Option<String> {
    let keys = known.iter().flat_map(|(section, value)| list_keys(section, value));
    let likeness = |key: &str| {
        let last = key.rsplit('.').next().unwrap_or(key);
        let whole = strsim::jaro_winkler(&key.replace('.', "_"), name);
        whole.max(strsim::jaro_winkler(last, name))
    };
    let mut alike: Vec<_> = keys.map(|key| (likeness(&key), key)).collect();
    alike.sort_by(|a, b| b.0.total_cmp(&a.0));
    let next_like = alike.get(1).map_or(0.0, |next| next.0);
    let (like, key) = alike.into_iter().next()?;
    (like >= ALIKE && like > next_like).then_some(key)
}

/// How like a name must be to one that is known.
const ALIKE: f64 = 0.9;

/// The setting whose name is most like `key`, if it is like it.
fn find_similar_key(known: &Dict, key: &str) -> Option<String> {
    let keys = known.iter().flat_map(|(section, value)| list_keys(section, value));
    let alike = keys.map(|known| (strsim::jaro_winkler(&known, key), known));
    let (like, known) = alike.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (like >= ALIKE).then_some(known)
}
