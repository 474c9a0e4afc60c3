//! What codecs save and what they cost, on a real model whose every attention goes through a kvd
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
pub mod measure;
mod model_report;
mod progress;
mod samples;
pub mod search;
mod table;
mod text;

pub use model_report::ModelReport;

/// The part of a model's name in the daemon that says which engine model it is.
fn model_name(name: &str) -> String {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    name.chars().map(|c| if allowed(c) { c } else { '-' }).take(32).collect()
}
