//! How fast a codec is, as the daemon's own histograms tell it.

use super::{CleanWindow, KvdAttention, MetricsSource};
use anyhow::Result;
use serde::Serialize;

/// Rounds; the fastest counts, because other load only slows one down.
pub(super) const ROUNDS: usize = 3;

/// One-token queries per layer of a round.
const QUERIES: usize = 8;

/// Device time on one passage, with all threads of the device. Each figure is the best of three
/// rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DeviceSpeed {
    /// K and V values encoded per second.
    pub encode_values_per_second: f64,
    /// Encoding speed, in 1e9 bytes of f16 per second.
    pub encode_gb_per_second: f64,
    /// 1e9 bytes of f16 decoded per second by `LoadBlocks`, windows included.
    pub load_gb_per_second: f64,
    /// Attention of one token's queries over the passage, one layer, in microseconds.
    pub attend_us: f64,
    /// Tokens of the passage.
    pub tokens: usize,
}

impl DeviceSpeed {
    /// The better figure of each kind.
    pub(super) fn best_figures(self, other: Self) -> Self {
        Self {
            encode_values_per_second: self
                .encode_values_per_second
                .max(other.encode_values_per_second),
            encode_gb_per_second: self.encode_gb_per_second.max(other.encode_gb_per_second),
            load_gb_per_second: self.load_gb_per_second.max(other.load_gb_per_second),
            attend_us: self.attend_us.min(other.attend_us),
            tokens: self.tokens,
        }
    }
}

/// Stores the whole passage layer by layer, reads it back and attends over it, once.
pub(super) async fn measure_round(
    metrics: &MetricsSource,
    model: &str,
    clean: &CleanWindow,
    kvd: &mut KvdAttention,
) -> Result<DeviceSpeed> {
    let before = metrics.device_totals(model);
    let (layers, tokens) = (clean.layer_count(), clean.token_count());
    let mut loaded = 0;
    for layer in 0..layers {
        clean.store_rows(kvd, layer, 0..tokens).await?;
        let (k, v) = kvd.load_rows(layer, tokens).await?;
        loaded += k.len() + v.len();
    }
    for query in tokens - QUERIES.min(tokens)..tokens {
        for layer in 0..layers {
            clean.query_rows(kvd, layer, query..query + 1).await?;
        }
    }
    let spent = metrics.device_totals(model).since_before(&before);
    let rate = |amount: f64, seconds: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
    let encoded = rate(spent.encoded_bytes, spent.encode_seconds);
    Ok(DeviceSpeed {
        encode_values_per_second: encoded / 2.0,
        encode_gb_per_second: encoded / 1e9,
        load_gb_per_second: rate(2.0 * loaded as f64, spent.load_seconds) / 1e9,
        attend_us: 1e6 * rate(spent.attend_seconds, spent.attends),
        tokens,
    })
}
