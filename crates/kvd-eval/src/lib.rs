//! Bits and quality of codecs, measured on a real model whose every attention goes through a kvd
//! daemon.
//!
//! [`measure`] takes one codec through a daemon; [`eval::run`] does so for a list of codecs,
//! texts and windows, [`search::run`] finds a policy for a budget of bits, and [`demo::run`]
//! shows a few codecs with text to read. Everything but
//! the attention is the same code in every run (`kvd-engine`).
//!
//! The crate talks to a daemon only through `kvd-client`; whoever calls it starts one.
#![forbid(unsafe_code)]

pub mod calibrate;
pub mod demo;
pub mod eval;
mod fits;
mod input_file;
pub mod measure;
mod model_report;
mod progress;
mod samples;
pub mod search;
pub mod split;
mod table;
mod text;

pub use input_file::is_pipe;
pub use kvd_engine::ModelError;
pub use model_report::ModelReport;

/// Options that cannot be met, with the option and what there is instead: other options would do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// The part of a model's name in the daemon that says which engine model it is.
fn model_name(name: &str) -> String {
    plain_name(name).chars().take(32).collect()
}

/// The text in the daemon's alphabet of names: what is not in it (the `+` of `polar-4+4`) becomes
/// a dash.
fn plain_name(text: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    text.chars().map(|c| if allowed(c) { c } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_preset_gives_a_name_of_its_own_that_the_daemon_takes() {
        let names: HashSet<String> =
            kvd_codec::presets().iter().map(|preset| plain_name(preset.name)).collect();
        assert_eq!(names.len(), kvd_codec::presets().len());
        for name in names {
            let full = format!("{}.{name}", model_name(&"m/".repeat(40)));
            assert!(kvd_core::Namespace::new(&full).is_ok(), "{full}");
        }
    }
}
