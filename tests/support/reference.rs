//! Attention as the textbook writes it: two passes, no tiles, one query head after another.
//!
//! Written from the words of `kvd.proto` alone. It runs in f64, where it is the truth, and in f32,
//! where its error says what that precision costs anybody.

use crate::engine::Question;
use crate::kv::{Rows, Shape};
use kvd_client::AttendQuery;

/// A floating-point format in which to compute.
pub trait Real:
    Copy
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
{
    /// The sum of nothing.
    const ZERO: Self;
    /// From what is stored.
    fn of(value: f32) -> Self;
    /// For the comparison.
    fn wide(self) -> f64;
    /// `e^self`.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
}

macro_rules! real {
    ($type:ident) => {
        impl Real for $type {
            const ZERO: Self = 0.0;

            fn of(value: f32) -> Self {
                $type::from(value)
            }

            fn wide(self) -> f64 {
                f64::from(self)
            }

            fn exp(self) -> Self {
                $type::exp(self)
            }

            fn ln(self) -> Self {
                $type::ln(self)
            }

            fn tanh(self) -> Self {
                $type::tanh(self)
            }

            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
        }
    };
}

real!(f32);
real!(f64);

/// What a question's answer should be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reference {
    /// `[sum of n_q, q_heads, head_dim_v]`.
    pub out: Vec<f64>,
    /// `[sum of n_q, q_heads]`; `-inf` where nothing is visible.
    pub lse: Vec<f64>,
}

/// Answers `question` over `rows`: for each of its queries, the rows of its sequence.
///
/// # Panics
/// When there are not as many `rows` as queries.
#[must_use]
pub fn attend<T: Real>(shape: &Shape, question: &Question, rows: &[&Rows]) -> Reference {
    assert_eq!(question.queries.len(), rows.len(), "one set of rows for each query");
    let q: Vec<T> = question.q.iter().map(|value| T::of(*value)).collect();
    let mut reference = Reference::default();
    let mut token = 0;
    for (query, rows) in question.queries.iter().zip(rows) {
        let k: Vec<T> = rows.k.iter().map(|value| T::of(*value)).collect();
        let v: Vec<T> = rows.v.iter().map(|value| T::of(*value)).collect();
        for i in 0..query.n_q {
            let seen = visible(query, rows.tokens, i);
            for head in 0..shape.q_heads() {
                let dim = shape.head_dim_k as usize;
                let at = (token * shape.q_heads() as usize + head as usize) * dim;
                let one = Head { shape, question, head: (head / shape.group) as usize };
                let (out, lse) = one.attend(&q[at..at + dim], &k, &v, &seen);
                reference.out.extend(out.into_iter().map(T::wide));
                reference.lse.push(lse);
            }
            token += 1;
        }
    }
    reference
}

/// The tokens that query token `i` sees, of `stored` ones.
fn visible(query: &AttendQuery, stored: u32, i: u32) -> Vec<usize> {
    let length = query.kv_length.unwrap_or(stored);
    let position = query.position.unwrap_or_else(|| length - query.n_q) + i;
    let sees = |token: &u32| {
        *token < length
            && *token <= position
            && query.start.is_none_or(|start| *token >= start)
            && query.end.is_none_or(|end| *token < end)
            && query.sliding_window.is_none_or(|window| token + window > position)
    };
    (0..stored).filter(sees).map(|token| token as usize).collect()
}

/// One query head.
struct Head<'a> {
    shape: &'a Shape,
    question: &'a Question,
    /// Its KV head.
    head: usize,
}

impl Head<'_> {
    fn attend<T: Real>(&self, q: &[T], k: &[T], v: &[T], seen: &[usize]) -> (Vec<T>, f64) {
        let dim = self.shape.head_dim_v as usize;
        let mut out = vec![T::ZERO; dim];
        let scores: Vec<T> = seen.iter().map(|token| self.score(q, k, *token)).collect();
        let Some(max) = scores.iter().copied().reduce(|a, b| if a < b { b } else { a }) else {
            return (out, f64::NEG_INFINITY);
        };
        let mut sum = T::ZERO;
        for (token, score) in seen.iter().zip(scores) {
            let weight = (score - max).exp();
            sum = sum + weight;
            let at = token * self.shape.v_width() + self.head * dim;
            for (out, value) in out.iter_mut().zip(&v[at..at + dim]) {
                *out = *out + weight * *value;
            }
        }
        for out in &mut out {
            *out = *out / sum;
        }
        (out, (max + sum.ln()).wide())
    }

    fn score<T: Real>(&self, q: &[T], k: &[T], token: usize) -> T {
        let dim = self.shape.head_dim_k as usize;
        let at = token * self.shape.k_width() + self.head * dim;
        let mut dot = T::ZERO;
        for (q, k) in q.iter().zip(&k[at..at + dim]) {
            dot = dot + *q * *k;
        }
        let scaled = match self.question.scale {
            Some(scale) => dot * T::of(scale),
            None => dot / T::of(dim as f32).sqrt(),
        };
        match self.question.soft_cap {
            Some(cap) => T::of(cap) * (scaled / T::of(cap)).tanh(),
            None => scaled,
        }
    }
}
