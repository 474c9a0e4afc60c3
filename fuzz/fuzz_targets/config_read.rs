//! Bytes as a configuration file and flags over it: refused with a key's name, or settings that
//! the daemon prints and reads again; never a panic.
#![no_main]

use kvd::config::{Config, ConfigOverrides, RawConfig};
use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;

/// The file of this process.
static FILE: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("kvd-fuzz-{}.toml", std::process::id())));

fn load_text(text: &[u8], flags: Vec<(String, String)>) -> Option<RawConfig> {
    std::fs::write(&*FILE, text).expect("a temporary folder");
    let overrides = ConfigOverrides { file: Some(FILE.clone()), environment: false, flags };
    if let Err(error) = Config::load(&overrides) {
        assert!(!error.key.is_empty(), "{error}");
        return None;
    }
    RawConfig::load(&overrides).ok()
}

fuzz_target!(|data: &[u8]| {
    // A zero byte ends the file; lines of key=value behind it are flags.
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (text, flags) = data.split_at(end);
    let flags = String::from_utf8_lossy(flags.get(1..).unwrap_or_default()).into_owned();
    let flags = flags.lines().filter_map(|line| line.split_once('='));
    let flags = flags.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    if let Some(raw) = load_text(text, flags) {
        assert_eq!(load_text(raw.to_toml().as_bytes(), Vec::new()).as_ref(), Some(&raw));
    }
});
