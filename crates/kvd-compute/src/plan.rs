//! The attention plan: what to read for each query, decided before any byte is touched.
//!
//! A plan holds extents, not memory; whoever made it keeps those extents pinned until the
//! backend has answered.

use bytes::Bytes;
use kvd_core::{DType, Extent, LayerIndex, ModelId};
use std::ops::Range;
use std::sync::Arc;

/// Where the rows of one part lie.
#[derive(Clone, Debug)]
pub enum Source {
    /// Rows in the stored precision, in the geometry's raw layout.
    Raw {
        /// The slot.
        extent: Extent,
        /// Rows the slot was laid out for.
        capacity_rows: u32,
        /// First row to read.
        first_row: u32,
    },
    /// Encoded pages of all heads and both sides, `[K heads.., V heads..]`.
    Pages {
        /// The slot.
        extent: Extent,
        /// End of each page, from the slot's start.
        ends: Arc<[u32]>,
        /// First row to read, counted in the page.
        first_row: u32,
    },
}

/// Consecutive tokens that lie in one source.
#[derive(Clone, Debug)]
pub struct PlanPart {
    /// Position of the first token.
    pub first_token: u32,
    /// Tokens.
    pub rows: u32,
    /// Where they lie.
    pub source: Source,
}

impl PlanPart {
    /// Position after the last token.
    #[must_use]
    pub fn end_token(&self) -> u32 {
        self.first_token + self.rows
    }

    /// Bytes the part's rows take, given the raw bytes of one token; pages count whole.
    #[must_use]
    pub fn stored_bytes(&self, raw_token_bytes: u64) -> u64 {
        match &self.source {
            Source::Raw { .. } => u64::from(self.rows) * raw_token_bytes,
            Source::Pages { ends, .. } => ends.last().map_or(0, |end| u64::from(*end)),
        }
    }
}

/// One query of a batch: its own sequence, its own visible range.
#[derive(Clone, Debug)]
pub struct PlanQuery {
    /// Query tokens.
    pub n_q: u32,
    /// Position of the first query token; token `i` sees positions up to `position + i`.
    pub position: u32,
    /// A query token at `p` sees only tokens after `p - sliding_window`.
    pub sliding_window: Option<u32>,
    /// Parts that may be read, ordered and disjoint; already cut to the request's range and length.
    /// Queries that read the same range share one list.
    pub parts: Arc<[PlanPart]>,
}

impl PlanQuery {
    /// Tokens that query token `i` sees: the causal rule and the sliding window.
    #[must_use]
    pub fn visible(&self, i: u32) -> Range<u32> {
        let position = self.position.saturating_add(i);
        let end = position.saturating_add(1);
        let start = self.sliding_window.map_or(0, |w| end.saturating_sub(w));
        start..end
    }

    /// Tokens in all parts.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.parts.iter().map(|part| u64::from(part.rows)).sum()
    }
}

/// A batch of queries over one layer of one model.
#[derive(Clone, Debug)]
pub struct AttendPlan {
    /// The model.
    pub model: ModelId,
    /// The layer.
    pub layer: LayerIndex,
    /// Query heads; a multiple of the model's KV heads.
    pub q_heads: u32,
    /// Format of `q` and of the output.
    pub dtype: DType,
    /// Factor on every score; `1/sqrt(head_dim_k)` when absent.
    pub scale: Option<f32>,
    /// Scores `s` become `c·tanh(s/c)`.
    pub soft_cap: Option<f32>,
    /// The queries, in the order of `q`.
    pub queries: Vec<PlanQuery>,
    /// `[sum of n_q, q_heads, head_dim_k]`.
    pub q: Bytes,
}

impl AttendPlan {
    /// Factor on every score, of keys of `dim` channels.
    #[must_use]
    pub fn score_scale(&self, dim: usize) -> f32 {
        self.scale.unwrap_or_else(|| 1.0 / (dim as f32).sqrt())
    }

    /// Whether its queries may be asked in one plan with those of `other`.
    #[must_use]
    pub fn asks_alike(&self, other: &Self) -> bool {
        let bits = |factor: Option<f32>| factor.map(f32::to_bits);
        let of = |plan: &Self| {
            let factors = [bits(plan.scale), bits(plan.soft_cap)];
            (plan.model, plan.layer, plan.q_heads, plan.dtype, factors)
        };
        of(self) == of(other)
    }

    /// One plan of the queries of several that [ask alike](Self::asks_alike), in that order; none
    /// of none.
    #[must_use]
    pub fn join_plans(plans: &[&Self]) -> Option<Self> {
        let first = plans.first()?;
        let queries = plans.iter().flat_map(|plan| plan.queries.iter().cloned()).collect();
        let q: Vec<u8> = plans.iter().flat_map(|plan| &plan.q[..]).copied().collect();
        Some(Self { queries, q: q.into(), ..(*first).clone() })
    }

    /// Query tokens of all queries.
    #[must_use]
    pub fn query_tokens(&self) -> usize {
        self.queries.iter().map(|query| query.n_q as usize).sum()
    }

    /// Query rows: tokens times query heads.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.query_tokens() as u64 * u64::from(self.q_heads)
    }

    /// Scores to compute, at most: query rows times the tokens that they may read.
    #[must_use]
    pub fn scores(&self) -> u64 {
        let of = |query: &PlanQuery| query.tokens().saturating_mul(u64::from(query.n_q));
        let scores = self.queries.iter().map(of).fold(0, u64::saturating_add);
        scores.saturating_mul(u64::from(self.q_heads))
    }
}

/// Rows to decode back.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// The model.
    pub model: ModelId,
    /// The layer.
    pub layer: LayerIndex,
    /// Format of the rows.
    pub dtype: DType,
    /// Parts to read, ordered and disjoint.
    pub parts: Vec<PlanPart>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_follows_the_causal_rule_and_the_sliding_window() {
        let mut query = PlanQuery { n_q: 3, position: 10, sliding_window: None, parts: [].into() };
        assert_eq!(query.visible(0), 0..11);
        assert_eq!(query.visible(2), 0..13);
        query.sliding_window = Some(4);
        assert_eq!(query.visible(0), 7..11);
        query.position = 1;
        assert_eq!(query.visible(0), 0..2);
        query.position = u32::MAX;
        assert_eq!(query.visible(5), u32::MAX - 4..u32::MAX);
    }
}
