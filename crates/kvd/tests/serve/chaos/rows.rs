//! Rows that every worker can compute: they follow from the content's number and the position.

use fastrand::Rng;
use kvd_client::{DType, Geometry, RopePairing};

pub(super) const LAYERS: u32 = 2;
pub(super) const KV_HEADS: usize = 2;
pub(super) const Q_HEADS: usize = 4;
pub(super) const CHANNELS: usize = 64;
pub(super) const PAGE_TOKENS: u32 = 64;

pub(super) fn geometry() -> Geometry {
    Geometry {
        layers: LAYERS,
        kv_heads: KV_HEADS as u32,
        head_dim_k: CHANNELS as u32,
        head_dim_v: CHANNELS as u32,
        block_tokens: PAGE_TOKENS,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    }
}

/// K or V of a range of tokens of a text, `[tokens, heads, channels]`, as f16 has them.
#[derive(Clone, Copy)]
pub(super) struct RowSource {
    /// Which text.
    pub(super) content: u64,
    pub(super) layer: u32,
    pub(super) is_value: bool,
}

impl RowSource {
    /// The rows as numbers.
    pub(super) fn row_values(self, start: u32, tokens: u32) -> Vec<f32> {
        (start..start + tokens).flat_map(|token| self.token_values(token)).collect()
    }

    /// The rows as they are sent.
    pub(super) fn row_bytes(self, start: u32, tokens: u32) -> Vec<u8> {
        let values = self.row_values(start, tokens);
        let mut bytes = vec![0; values.len() * DType::F16.size_bytes()];
        DType::F16.narrow_values(&values, &mut bytes);
        bytes
    }

    fn token_values(self, token: u32) -> Vec<f32> {
        let side = u64::from(self.layer) * 2 + u64::from(self.is_value);
        let seed = (self.content << 40) ^ (side << 32) ^ u64::from(token);
        let mut random = Rng::with_seed(seed);
        // Multiples of 1/512 below 4 are numbers of f16.
        let value = |_| {
            let bell: f32 = (0..4).map(|_| 2.0 * random.f32() - 1.0).sum();
            (bell * 512.0).round() / 512.0
        };
        (0..KV_HEADS * CHANNELS).map(value).collect()
    }
}

/// Root of the mean squared difference over that of the mean square.
pub(super) fn relative_error(found: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let square = |value: f64| value * value;
    let differences = found.iter().zip(wanted).map(|(a, b)| square(f64::from(a - b)));
    let norm: f64 = wanted.iter().map(|value| square(f64::from(*value))).sum();
    (differences.sum::<f64>() / norm.max(1e-30)).sqrt()
}

/// Attention of one query token over rows, in f64: `[heads, channels]` and a log-sum-exp a head.
pub(super) fn attend_exactly(q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let tokens = k.len() / (KV_HEADS * CHANNELS);
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for head in 0..Q_HEADS {
        let q = &q[head * CHANNELS..][..CHANNELS];
        let row = |rows: &[f32], token: usize, channel: usize| {
            let kv_head = head / (Q_HEADS / KV_HEADS);
            f64::from(rows[(token * KV_HEADS + kv_head) * CHANNELS + channel])
        };
        let score = |token| {
            let products = q.iter().enumerate().map(|(c, q)| f64::from(*q) * row(k, token, c));
            products.sum::<f64>() / (CHANNELS as f64).sqrt()
        };
        let scores: Vec<f64> = (0..tokens).map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for channel in 0..CHANNELS {
            let terms = weights.iter().enumerate().map(|(t, weight)| weight * row(v, t, channel));
            out.push((terms.sum::<f64>() / sum) as f32);
        }
        lse.push((largest + sum.ln()) as f32);
    }
    (out, lse)
}
