//! Which lines of the log are written.

use super::ConfigError;
use tracing_subscriber::EnvFilter;

const KEY: &str = "log.filter";

/// Crates that write a line for every frame; of them `debug` and `trace` mean warnings, unless
/// they are named.
const NOISY: [&str; 6] = ["h2", "hyper", "hyper_util", "tonic", "tower", "mio"];

/// The directives of a setting as the subscriber reads them.
///
/// # Errors
/// When one is neither a level nor a target with its level: the subscriber would take a mistyped
/// level for a target, and write nothing at all.
pub(super) fn log_filter(text: &str) -> Result<String, ConfigError> {
    let mut directives: Vec<&str> = text.split(',').map(str::trim).collect();
    directives.retain(|directive| !directive.is_empty());
    if directives.is_empty() {
        return Err(ConfigError::new(KEY, "is empty: give a level, such as info, or off"));
    }
    let is_wrong = |text: &&&str| match text.rsplit_once('=') {
        Some((_, level)) => level.trim().is_empty(),
        None => !is_level(text),
    };
    if let Some(wrong) = directives.iter().find(is_wrong) {
        let target = wrong.trim_end_matches('=');
        let reason = format!(
            "{wrong:?} is no level (off, error, warn, info, debug or trace); a target has its \
             level behind it, as in {target}=debug"
        );
        return Err(ConfigError::new(KEY, reason));
    }
    let mut filter = directives.join(",");
    let checked = EnvFilter::try_new(&filter);
    checked.map_err(|error| ConfigError::new(KEY, format!("{text:?}: {error}")))?;
    let everything = |level: &&str| ["debug", "trace", "4", "5"].contains(&&*level.to_lowercase());
    if directives.iter().any(everything) {
        for name in NOISY {
            let names = |text: &&str| text.split(['=', ':', '[']).next() == Some(name);
            if !directives.iter().any(names) {
                filter.push_str(&format!(",{name}=warn"));
            }
        }
    }
    Ok(filter)
}

fn is_level(text: &str) -> bool {
    text.parse::<tracing::metadata::LevelFilter>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_targets_with_levels_are_kept() {
        for text in ["info", "OFF", "warn,kvd=debug", "kvd::service=trace", "h2=debug,error"] {
            assert_eq!(log_filter(text).unwrap(), text);
        }
        assert_eq!(log_filter(" info , kvd=debug,").unwrap(), "info,kvd=debug");
    }

    #[test]
    fn debug_is_without_the_frames_of_the_transport_unless_they_are_asked_for() {
        let filter = log_filter("debug").unwrap();
        assert!(filter.starts_with("debug,") && filter.contains("h2=warn"), "{filter}");
        let filter = log_filter("trace,h2=trace").unwrap();
        assert!(!filter.contains("h2=warn") && filter.contains("hyper=warn"), "{filter}");
        assert!(!log_filter("info,kvd=debug").unwrap().contains("h2"));
    }

    #[test]
    fn a_level_that_is_none_is_refused() {
        for (text, part) in [
            ("verbose", "\"verbose\" is no level"),
            ("info,wran", "\"wran\" is no level"),
            ("kvd", "kvd=debug"),
            ("6", "is no level"),
            ("kvd=verbose", "kvd=verbose"),
            ("kvd=", "kvd="),
            ("", "is empty"),
            (" , ", "is empty"),
        ] {
            let error = log_filter(text).expect_err(text).to_string();
            assert!(error.contains("log.filter") && error.contains(part), "{error}");
        }
    }
}
