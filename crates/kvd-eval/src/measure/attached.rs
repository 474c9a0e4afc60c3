//! The quality of a sequence that begins with a prefix from the cache.
//!
//! A sequence keeps its newest tokens in full precision; a prefix from the cache is packed to its
//! last token, so that the first queries after it see codes where a sequence that stored the same
//! tokens itself sees rows.

use kvd_engine::{QualitySums, TextQuality, WindowPredictions};
use serde::Serialize;

/// A prefix from the cache, and where scoring begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedPrefix {
    /// Tokens of the prefix that are scored after, whole pages and whole steps.
    pub tokens: usize,
    /// How many of its last tokens, whole pages, are not attached but computed anew: they are rows
    /// then.
    pub recomputed: usize,
}

impl AttachedPrefix {
    /// Tokens that come from the cache.
    pub(crate) fn attached_tokens(&self) -> usize {
        self.tokens - self.recomputed
    }
}

/// Positions after the prefix that are scored by themselves: about a window of the presets. Later
/// queries see the same rows either way.
const NEXT_TOKENS: usize = 128;

/// One stretch of text, read twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct QualityPair {
    /// By the sequence that stored the prefix.
    pub stored: TextQuality,
    /// By a sequence that attached it.
    pub attached: TextQuality,
}

impl QualityPair {
    /// Growth of the KL by attaching, in percent; none where there was no KL.
    #[must_use]
    pub fn kl_change_percent(&self) -> Option<f64> {
        let (stored, attached) = (self.stored.kl_nats, self.attached.kl_nats);
        (stored > 0.0).then(|| 100.0 * (attached / stored - 1.0))
    }
}

/// Quality after a prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AttachedQuality {
    /// Tokens of the prefix.
    pub prefix_tokens: usize,
    /// Its last tokens that were computed anew and not attached.
    pub recomputed_tokens: usize,
    /// Positions scored by themselves.
    pub next_tokens: usize,
    /// Quality of those.
    pub next: QualityPair,
    /// Quality of all positions after the prefix.
    pub all: QualityPair,
}

/// Sums of [`AttachedQuality`] over passages.
pub(super) struct AttachedSums {
    prefix: AttachedPrefix,
    next_tokens: usize,
    next: PairSums,
    all: PairSums,
}

#[derive(Default)]
struct PairSums {
    stored: QualitySums,
    attached: QualitySums,
}

impl PairSums {
    fn mean_quality(self) -> QualityPair {
        QualityPair { stored: self.stored.mean_quality(), attached: self.attached.mean_quality() }
    }
}

impl AttachedSums {
    pub(super) fn new(prefix: AttachedPrefix) -> Self {
        let (next, all) = (PairSums::default(), PairSums::default());
        Self { prefix, next_tokens: NEXT_TOKENS, next, all }
    }

    /// Adds a passage: without kvd, by the sequence that stored it, and from the prefix on by one
    /// that attached it.
    pub(super) fn add_passage(
        &mut self,
        without: &WindowPredictions,
        stored: &WindowPredictions,
        attached: &WindowPredictions,
    ) {
        let all = self.prefix.tokens..attached.end_position();
        self.next_tokens = self.next_tokens.min(all.len());
        let next = all.start..all.start + self.next_tokens;
        for (sums, positions) in [(&mut self.next, next), (&mut self.all, all)] {
            sums.stored.add_positions(stored, without, positions.clone());
            sums.attached.add_positions(attached, without, positions);
        }
    }

    pub(super) fn mean_quality(self) -> AttachedQuality {
        AttachedQuality {
            prefix_tokens: self.prefix.tokens,
            recomputed_tokens: self.prefix.recomputed,
            next_tokens: self.next_tokens,
            next: self.next.mean_quality(),
            all: self.all.mean_quality(),
        }
    }
}
