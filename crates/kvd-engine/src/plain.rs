//! Softmax attention as the textbook writes it, in f32 (the run without kvd) and in f64 (what
//! results are judged against).

use crate::config::HeadCounts;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use std::ops::{Add, Div, Mul, Sub};

/// Precision of the sums.
pub trait Accumulator:
    Copy
    + Default
    + Send
    + Sync
    + PartialOrd
    + From<f32>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// e to the power of `self`.
    #[must_use]
    fn exp(self) -> Self;
    /// The square root.
    #[must_use]
    fn sqrt(self) -> Self;
}

impl Accumulator for f32 {
    fn exp(self) -> Self {
        self.exp()
    }
    fn sqrt(self) -> Self {
        self.sqrt()
    }
}

impl Accumulator for f64 {
    fn exp(self) -> Self {
        self.exp()
    }
    fn sqrt(self) -> Self {
        self.sqrt()
    }
}

/// Causal attention of queries `[n, query heads, dim]`, the first at `position`, over keys and
/// values `[tokens, KV heads, dim]` that reach at least to the last query. With a `window` a query
/// sees that many tokens, its own counted.
/// Returns `[n, query heads, dim]`.
///
/// # Panics
/// When the slices do not have those shapes.
#[must_use]
pub fn attend_plain<A: Accumulator>(
    heads: HeadCounts,
    position: usize,
    window: Option<usize>,
    q: &[f32],
    k: &[f32],
    v: &[f32],
) -> Vec<A> {
    let (dim, stride) = (heads.dim, heads.kv_width());
    let mut out = vec![A::default(); q.len()];
    let one = |scores: &mut Vec<A>, (index, (q, out)): (usize, (&[f32], &mut [A]))| {
        let (token, head) = (index / heads.query, index % heads.query);
        let seen = position + token + 1;
        let start = window.map_or(0, |window| seen.saturating_sub(window));
        let first = start * stride + head / heads.query_group() * dim;
        let end = seen * stride;
        let (k, v) = (&k[first..end], &v[first..end]);
        Arch::new().dispatch(QueryRow { q, k, v, stride, scores, out });
    };
    let rows = q.par_chunks(dim).zip(out.par_chunks_mut(dim)).enumerate();
    rows.for_each_init(Vec::new, one);
    out
}

/// One query over rows that lie `stride` values apart, the first at the start of `k` and `v`;
/// its loops are compiled for the widest registers at hand.
struct QueryRow<'a, A> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    stride: usize,
    scores: &'a mut Vec<A>,
    out: &'a mut [A],
}

impl<A: Accumulator> WithSimd for QueryRow<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { q, k, v, stride, scores, out } = self;
        let dim = q.len();
        let scale = A::from(1.0) / A::from(dim as f32).sqrt();
        scores.clear();
        for row in k.chunks(stride) {
            scores.push(dot_product::<A>(q, &row[..dim]) * scale);
        }
        let Some(&first) = scores.first() else { return };
        let max = scores.iter().fold(first, |max, &score| if score > max { score } else { max });
        let mut sum = A::default();
        for (&score, row) in scores.iter().zip(v.chunks(stride)) {
            let weight = (score - max).exp();
            sum = sum + weight;
            for (o, &value) in out.iter_mut().zip(&row[..dim]) {
                *o = *o + weight * A::from(value);
            }
        }
        for o in out {
            *o = *o / sum;
        }
    }
}

/// The product of two rows, in sixteen partial sums so that the compiler can use vector registers.
#[inline(always)]
fn dot_product<A: Accumulator>(a: &[f32], b: &[f32]) -> A {
    let mut lanes = [A::default(); 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = *lane + A::from(a) * A::from(b);
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(&a, &b)| A::from(a) * A::from(b));
    lanes.into_iter().chain(rest).fold(A::default(), Add::add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two query heads share one KV head; weights of two tokens follow from their scores.
    #[test]
    fn weights_are_the_softmax_of_scaled_products() {
        let heads = HeadCounts { query: 2, kv: 1, dim: 4 };
        let k = [1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0];
        let v = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        let q = [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0];
        let out: Vec<f64> = attend_plain(heads, 1, None, &q, &k, &v);
        // Scores 2 / sqrt(4) = 1 and 0; then 0 and 0.
        let first = 1f64.exp() / (1f64.exp() + 1.0);
        let expected = [first, 1.0 - first, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0];
        for (o, e) in out.iter().zip(expected) {
            assert!((o - e).abs() < 1e-15, "{out:?}");
        }
    }

    #[test]
    fn a_query_sees_nothing_after_its_own_token() {
        let heads = HeadCounts { query: 1, kv: 1, dim: 3 };
        let k = [0.5, 0.1, 0.2, 9.0, 9.0, 9.0];
        let v = [1.0, 2.0, 3.0, 70.0, 80.0, 90.0];
        let out: Vec<f32> = attend_plain(heads, 0, None, &[1.0, 1.0, 1.0], &k, &v);
        assert_eq!(out, [1.0, 2.0, 3.0]);
    }
}
