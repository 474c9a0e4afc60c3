//! File descriptors: as many as the system allows, and enough for every limit of the configuration.

use crate::config::{Config, ConfigError};
use rustix::process::{Resource, getrlimit, setrlimit};

/// Descriptors beside those of connections: standard streams, listeners, the runtime's and a
/// driver's own, and files that are read for a moment.
const OTHERS: u64 = 128;

/// Descriptors of a region: its connection, its memory file, and one of device memory on its way.
const PER_REGION: u64 = 3;

/// Connections where `server.connections_max` leaves the number to the daemon: as many as the
/// descriptors allow, and no more than this.
const CONNECTIONS: u64 = 1024;

/// Fewer connections than this are no service.
const CONNECTIONS_MIN: u64 = 16;

/// Raises the soft limit of this process to the hard one. The usual soft limit of 1,024 is for
/// programs that use `select`, which kvd does not.
pub(crate) fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let before = limit.current;
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, ?before, "the limit of open files stays as it is");
    }
}

/// How many gRPC connections the process may take.
///
/// # Errors
/// When the limit of open files is too low for the limits of the configuration.
pub(crate) fn allowed_connections(config: &Config) -> Result<usize, ConfigError> {
    connections_within(getrlimit(Resource::Nofile).current, config)
}

/// [`allowed_connections`] of a process that may open `limit` files; any number without one.
fn connections_within(limit: Option<u64>, config: &Config) -> Result<usize, ConfigError> {
    let limit = limit.unwrap_or(u64::MAX);
    let regions = config.listen_region.as_ref().map_or(0, |_| config.regions_max as u64);
    let admin = config.admin_listen.map_or(0, |_| config.admin_connections_max as u64);
    let aside = regions.saturating_mul(PER_REGION).saturating_add(admin).saturating_add(OTHERS);
    let left = limit.saturating_sub(aside);
    let (wanted, given) = match config.connections_max {
        Some(asked) => (asked as u64, asked as u64),
        None => (CONNECTIONS_MIN, left.min(CONNECTIONS)),
    };
    if wanted <= left {
        return Ok(usize::try_from(given).unwrap_or(usize::MAX));
    }
    let reason = format!(
        "{wanted} connections do not fit: the process may open {limit} files, of which {aside} are \
         set aside ({regions} regions of limits.regions_max with {PER_REGION} each, {admin} of \
         admin.connections_max, {OTHERS} for all else). Raise the hard limit of open files \
         (ulimit -Hn, LimitNOFILE=, --ulimit nofile=) to {needed}, or lower these settings",
        needed = wanted.saturating_add(aside),
    );
    Err(ConfigError { key: "server.connections_max".to_owned(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigOverrides;

    fn config(flags: &[(&str, &str)]) -> Config {
        let flags = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Config::load(&ConfigOverrides { flags: flags.collect(), ..ConfigOverrides::default() })
            .unwrap()
    }

    #[test]
    fn the_defaults_fit_the_usual_limit_and_take_no_more_than_they_need() {
        let defaults = config(&[]);
        assert_eq!(connections_within(Some(1024), &defaults).unwrap(), 1024 - 64 - 128);
        assert_eq!(connections_within(Some(1 << 20), &defaults).unwrap(), 1024);
        assert_eq!(connections_within(None, &defaults).unwrap(), 1024);
        let regions = config(&[("server.listen_region", "/run/kvd/regions.sock")]);
        assert_eq!(connections_within(Some(1024), &regions).unwrap(), 1024 - 64 - 128 - 3 * 64);
        let no_admin = config(&[("admin.listen", "")]);
        assert_eq!(connections_within(Some(1024), &no_admin).unwrap(), 1024 - 128);
    }

    #[test]
    fn limits_that_do_not_fit_are_refused_with_the_numbers() {
        let asked = config(&[("server.connections_max", "1024")]);
        assert_eq!(connections_within(Some(1024 + 64 + 128), &asked).unwrap(), 1024);
        let error = connections_within(Some(1024 + 64 + 127), &asked).unwrap_err();
        assert_eq!(error.key, "server.connections_max");
        for part in ["1024 connections", "1215 files", "192 are set aside", "to 1216"] {
            assert!(error.reason.contains(part), "{part}: {}", error.reason);
        }
        let few = connections_within(Some(64), &config(&[])).unwrap_err();
        assert!(few.reason.contains("admin.connections_max"), "{}", few.reason);
        let none = config(&[("limits.regions_max", "1000000"), ("server.listen_region", "/r")]);
        assert!(connections_within(Some(1 << 16), &none).is_err());
    }
}
