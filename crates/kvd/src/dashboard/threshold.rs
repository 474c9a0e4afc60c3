//! From which values on panels change their colour.

use serde_json::{Value, json};

/// A colour, and the value from which on it holds.
#[derive(Clone, Copy)]
pub(super) struct Threshold {
    /// `None` for all values below the next one.
    from: Option<f64>,
    color: &'static str,
}

impl Threshold {
    /// As Grafana wants it.
    pub(super) fn to_json(self) -> Value {
        json!({ "color": self.color, "value": self.from })
    }
}

const fn base_color(color: &'static str) -> Threshold {
    Threshold { from: None, color }
}

const fn from(value: f64, color: &'static str) -> Threshold {
    Threshold { from: Some(value), color }
}

/// Nothing moves, or something does.
pub(super) const MOVES: &[Threshold] = &[base_color("text"), from(1.0, "green")];
/// Compression costs more than it saves, or saves.
pub(super) const SAVES: &[Threshold] = &[base_color("red"), from(0.0, "green")];
/// Held bytes are more than logical ones, hardly fewer, or fewer.
pub(super) const RATIO: &[Threshold] =
    &[base_color("red"), from(1.0, "yellow"), from(1.5, "green")];
/// The second is where `KvdPoolNearlyFull` begins.
pub(super) const POOL: &[Threshold] = &[base_color("green"), from(0.8, "yellow"), from(0.9, "red")];
pub(super) const REFUSALS: &[Threshold] =
    &[base_color("green"), from(0.001, "yellow"), from(1.0, "red")];
/// The second is where `KvdCodecError` begins.
pub(super) const ERRORS: &[Threshold] =
    &[base_color("green"), from(0.5, "yellow"), from(0.75, "red")];
pub(super) const READY: &[Threshold] = &[base_color("red"), from(1.0, "green")];
