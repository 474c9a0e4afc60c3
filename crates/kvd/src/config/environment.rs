//! Settings of the environment, `KVD_<SECTION>__<KEY>`: which variables are settings, and which are
//! mistakes that nothing would read.

use super::raw::{list_keys, nearest_key};
use super::{ConfigError, DEFAULT_TOML};
use figment::Figment;
use figment::providers::{Env, Format, Toml};
use figment::value::Dict;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

const PREFIX: &str = "KVD_";

/// Settings whose empty text says something.
const MAY_BE_EMPTY: [&str; 14] = [
    "cache.disk.path",
    "server.listen_tcp",
    "server.listen_unix",
    "server.listen_region",
    "server.tls_certificate",
    "server.tls_key",
    "server.tls_client_ca",
    "admin.listen",
    "admin.tls_certificate",
    "admin.tls_key",
    "admin.tls_client_ca",
    "access.principals",
    "namespaces.quota_file",
    "device.kernel_cache",
];

/// The variables that are settings. Others may begin with `KVD_` too: `KVD_CONFIG` names the file,
/// and Kubernetes describes a service `kvd` in `KVD_PORT`, `KVD_SERVICE_HOST` and more.
///
/// An empty value is what a Compose file leaves of a variable that nobody set: it is a value where
/// an empty text means something, and no setting elsewhere.
pub(super) fn read_environment() -> Env {
    let is_setting = |key: &str| {
        let is_empty = || {
            let given = |name: &str| name.eq_ignore_ascii_case(&format!("{PREFIX}{key}"));
            std::env::vars_os().any(|(name, value)| {
                name.to_str().is_some_and(given) && value.to_string_lossy().trim().is_empty()
            })
        };
        let key = key.to_lowercase().replace("__", ".");
        key.contains('.') && (MAY_BE_EMPTY.contains(&key.as_str()) || !is_empty())
    };
    Env::prefixed(PREFIX).filter(move |key| is_setting(key.as_str())).split("__")
}

/// Refuses `KVD_SERVER_LISTEN_TCP`: without two underscores nothing would read it.
fn refuse_single_underscores(defaults: &Dict) -> Result<(), ConfigError> {
    let keys = defaults.iter().flat_map(|(section, value)| list_keys(section, value));
    for key in keys {
        let single = format!("{PREFIX}{}", key.replace('.', "_")).to_uppercase();
        let given = |name: &OsStr| name.to_str().is_some_and(|n| n.eq_ignore_ascii_case(&single));
        if std::env::vars_os().any(|(name, _)| given(&name)) {
            let reason = format!("is read by nothing; write {}", variable_name(&key));
            return Err(ConfigError::new(format!("environment {single}"), reason));
        }
    }
    Ok(())
}

/// Refuses variables that nothing would read, or only by half: of one underscore, of a section or a
/// key that is empty, and names and values that are no text.
pub(super) fn check_names(defaults: &Dict) -> Result<(), ConfigError> {
    refuse_single_underscores(defaults)?;
    for (name, value) in std::env::vars_os() {
        if let Some(reason) = find_mistake(&name, &value) {
            let name = format!("environment {}", name.to_string_lossy());
            return Err(ConfigError::new(name, reason));
        }
    }
    Ok(())
}

/// Why nothing would read a variable as it is meant; none of a setting, and of what is not kvd's.
fn find_mistake(name: &OsStr, value: &OsStr) -> Option<&'static str> {
    let bytes = name.as_bytes();
    let start = bytes.get(..PREFIX.len())?;
    // The last underscore of the prefix may be the first of two.
    let rest = &bytes[PREFIX.len() - 1..];
    let is_setting =
        start.eq_ignore_ascii_case(PREFIX.as_bytes()) && rest.windows(2).any(|pair| pair == b"__");
    if !is_setting {
        return None;
    }
    let Some(text) = name.to_str() else { return Some("a name that is no UTF-8 text") };
    let is_broken = |part: &str| part.is_empty() || part.starts_with('_') || part.ends_with('_');
    if text[PREFIX.len()..].split("__").any(is_broken) {
        return Some(
            "a section or key without a name, or an underscore too many; settings are \
             KVD_<SECTION>__<KEY>",
        );
    }
    value.to_str().is_none().then_some("the value is no UTF-8 text")
}

/// Variables that commands, clients and the build of kvd read.
const READ_ELSEWHERE: [&str; 8] = [
    "KVD_CONFIG",
    "KVD_CLIENT_CA",
    "KVD_CLIENT_CERT",
    "KVD_CLIENT_KEY",
    "KVD_CLIENT_TOKEN_FILE",
    "KVD_BINARY",
    "KVD_COMMIT",
    "KVD_VLLM_ATTENTION",
];

/// Flags of `kvd serve` that stand for a setting.
const SHORT_FORMS: [(&str, &str); 4] = [
    ("listen", "server.listen_tcp"),
    ("unix", "server.listen_unix"),
    ("admin", "admin.listen"),
    ("pool", "device.pool_bytes"),
];

/// A sentence about each variable that looks like a setting and that nothing reads. They are no
/// errors: others may have variables that begin with `KVD_`.
#[must_use]
pub(crate) fn describe_unread_variables() -> Vec<String> {
    let defaults: Dict =
        Figment::from(Toml::string(DEFAULT_TOML)).extract().expect("a test reads the defaults");
    let mut names: Vec<_> =
        std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    names.sort();
    names.iter().filter_map(|name| describe_unread(&defaults, name)).collect()
}

fn describe_unread(defaults: &Dict, name: &str) -> Option<String> {
    let rest = name.strip_prefix(PREFIX).filter(|rest| !rest.is_empty())?;
    if name.contains("__") || READ_ELSEWHERE.contains(&name) || is_of_kubernetes(name) {
        return None;
    }
    let rest = rest.to_lowercase();
    let short = SHORT_FORMS.iter().find(|(form, _)| *form == rest).map(|(_, key)| *key);
    let meant = short.map(str::to_owned).or_else(|| nearest_key(defaults, &rest));
    let meant = meant.map_or_else(String::new, |key| format!("; is {} meant?", bare_name(&key)));
    Some(format!("{name} is read by nothing{meant}"))
}

/// Whether Kubernetes describes a service so, whose name begins with `kvd`.
fn is_of_kubernetes(name: &str) -> bool {
    ["_SERVICE_HOST", "_PORT"].iter().any(|end| name.ends_with(end))
        || ["_SERVICE_PORT_", "_PORT_"].iter().any(|part| name.contains(part))
}

fn bare_name(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "__").to_uppercase())
}

/// The variable of a key, as an operator looks for it.
pub(super) fn variable_name(key: &str) -> String {
    format!("environment {}", bare_name(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistake(name: impl AsRef<[u8]>, value: &[u8]) -> Option<&'static str> {
        find_mistake(OsStr::from_bytes(name.as_ref()), OsStr::from_bytes(value))
    }

    #[test]
    fn names_without_a_section_or_key_are_mistakes_whatever_they_say() {
        for name in [
            "KVD_DEVICE__",
            "KVD__X",
            "KVD__DEVICE__THREADS",
            "KVD_A____B",
            "KVD____",
            "KVD__",
            "KVD_DEVICE___THREADS",
            "KVD_DEVICE__THREADS_",
            "KVD_DEVICE__THREADS__",
            "KVD_CACHE____DISK__PATH",
            "kvd_device__",
            "Kvd__x",
        ] {
            for value in [&b"1"[..], b""] {
                let reason = mistake(name, value).unwrap_or_else(|| panic!("{name} is taken"));
                assert!(reason.contains("KVD_<SECTION>__<KEY>"), "{name}: {reason}");
            }
        }
    }

    #[test]
    fn variables_that_nothing_reads_are_told_with_the_setting_that_may_be_meant() {
        let defaults: Dict = Figment::from(Toml::string(DEFAULT_TOML)).extract().unwrap();
        for (name, meant) in [
            ("KVD_POOL", "KVD_DEVICE__POOL_BYTES"),
            ("KVD_LISTEN", "KVD_SERVER__LISTEN_TCP"),
            ("KVD_POOL_BYTES", "KVD_DEVICE__POOL_BYTES"),
            ("KVD_SERVER_LISTEN_TPC", "KVD_SERVER__LISTEN_TCP"),
        ] {
            let said = describe_unread(&defaults, name).unwrap();
            assert_eq!(said, format!("{name} is read by nothing; is {meant} meant?"));
        }
        for name in ["KVD_FOO", "KVD_ENDPOINT"] {
            assert_eq!(
                describe_unread(&defaults, name),
                Some(format!("{name} is read by nothing"))
            );
        }
        for name in [
            "KVD_CONFIG",
            "KVD_CLIENT_TOKEN_FILE",
            "KVD_DEVICE__THREADS",
            "KVD_PORT",
            "KVD_PORT_7070_TCP_ADDR",
            "KVD_SERVICE_HOST",
            "KVD_SERVICE_PORT_GRPC",
            "KVD_OTHER_SERVICE_PORT",
            "KVD_",
            "KVD",
            "PATH",
        ] {
            assert_eq!(describe_unread(&defaults, name), None, "{name}");
        }
    }

    #[test]
    fn what_is_no_text_is_a_mistake_of_settings_alone() {
        assert!(mistake("KVD_DEVICE__THREADS", b"\xff1").is_some_and(|r| r.contains("value")));
        assert!(mistake(b"KVD_DEVICE__\xff", b"1").is_some_and(|r| r.contains("name")));
        for name in [
            "KVD_DEVICE__THREADS",
            "KVD_CACHE__DISK__PATH",
            "KVD_CONFIG",
            "KVD_",
            "KVD",
            "",
            "KVD_PORT_7070_TCP_ADDR",
            "KVDX__Y",
            "PATH",
            "__",
            "K",
            "KVD_SERVICE_",
        ] {
            assert_eq!(mistake(name, b"1"), None, "{name}");
        }
        assert_eq!(mistake(b"KVD_\xff", b"\xff"), None);
        assert_eq!(mistake("OTHER__X", b"\xff"), None);
        assert_eq!(mistake("KVD_CONFIG", b"/tmp/\xff"), None);
    }
}
