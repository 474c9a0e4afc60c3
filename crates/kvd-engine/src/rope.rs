//! Rotary position embedding, channels `i` and `i + dim/2` together.
//!
//! Angles are rounded as `transformers` rounds them: frequencies and their products with positions
//! are f32, in every precision of the model. A model is trained with these angles.

use crate::config::{RopeScaling, RopeSpec};
use std::f64::consts::TAU;

/// Frequencies of one kind of layer.
pub(crate) struct RopeTable {
    /// Radians per position, one per pair of channels.
    frequencies: Vec<f32>,
    /// Scale of the rotated pairs.
    attention_factor: f64,
}

impl RopeTable {
    /// For heads of `dim` channels.
    pub(crate) fn new(spec: &RopeSpec, dim: usize) -> Self {
        let plain = |i: usize| {
            let exponent = (2 * i) as f32 / dim as f32;
            f64::from(((spec.theta as f32).powf(exponent)).recip())
        };
        let scaled = |i: usize| match &spec.scaling {
            RopeScaling::None | RopeScaling::Dynamic => plain(i),
            RopeScaling::Linear { factor } => plain(i) / factor,
            RopeScaling::Llama3(scaling) => scaling.scale_frequency(plain(i)),
            RopeScaling::Yarn(scaling) => scaling.scale_frequency(plain(i), i, dim, spec.theta),
            RopeScaling::LongRope(scaling) => plain(i) / scaling.short_factor[i],
        };
        let attention_factor = match &spec.scaling {
            RopeScaling::Yarn(scaling) => scaling.attention_factor,
            RopeScaling::LongRope(scaling) => scaling.attention_factor,
            _ => 1.0,
        };
        let frequencies = (0..dim / 2).map(|i| scaled(i) as f32).collect();
        Self { frequencies, attention_factor }
    }

    /// Rotates `[tokens, heads, dim]` in place, the first token at `position`.
    pub(crate) fn rotate_heads(&self, values: &mut [f32], heads: usize, position: usize) {
        let half = self.frequencies.len();
        for (token, row) in values.chunks_mut(heads * 2 * half).enumerate() {
            let at = (position + token) as f32;
            for (i, frequency) in self.frequencies.iter().enumerate() {
                let (sin, cos) = f64::from(at * frequency).sin_cos();
                let scaled = |x: f64| (x * self.attention_factor) as f32;
                let (sin, cos) = (scaled(sin), scaled(cos));
                for head in row.chunks_mut(2 * half) {
                    let (a, b) = (head[i], head[i + half]);
                    head[i] = a * cos - b * sin;
                    head[i + half] = b * cos + a * sin;
                }
            }
        }
    }
}

impl crate::config::Llama3Scaling {
    /// Slow frequencies are divided, fast ones stay, and those between are blended.
    fn scale_frequency(&self, plain: f64) -> f64 {
        let turns = self.original_positions * plain / TAU;
        if turns < self.low_freq_factor {
            return plain / self.factor;
        }
        if turns > self.high_freq_factor {
            return plain;
        }
        let range = self.high_freq_factor - self.low_freq_factor;
        let kept = (turns - self.low_freq_factor) / range;
        (1.0 - kept) * plain / self.factor + kept * plain
    }
}

impl crate::config::YarnScaling {
    /// As [`crate::config::Llama3Scaling`], blended over channels.
    fn scale_frequency(&self, plain: f64, channel: usize, dim: usize, theta: f64) -> f64 {
        let channel_of = |turns: f64| {
            let positions = self.original_positions / (turns * TAU);
            dim as f64 * positions.ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (channel_of(self.beta_fast), channel_of(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            // No range is no blend: a step from one channel to the next.
            high += 0.001;
        }
        let slow = ((channel as f64 - low) / (high - low)).clamp(0.0, 1.0);
        plain / self.factor * slow + plain * (1.0 - slow)
    }
}
