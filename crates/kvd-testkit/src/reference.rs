//! Attention as the textbook writes it: two passes, no tiles, one query head after another.
//!
//! Written from the words of `kvd.proto` alone. It runs in f64, where it is the truth, and in f32
//! and with f16 factors, where its error says what that precision costs anybody.

use crate::rows::{LayerRows, ModelShape, round_values};
use half::f16;
use kvd_client::{AttendQuery, DType, LayerIndex};

/// A batch of queries.
#[derive(Clone, Debug)]
pub struct QueryBatch {
    /// The layer.
    pub layer: LayerIndex,
    /// Dtype of the queries and the answer.
    pub dtype: DType,
    /// Factor on scores.
    pub scale: Option<f32>,
    /// Soft cap of scores.
    pub soft_cap: Option<f32>,
    /// Who sees what.
    pub queries: Vec<AttendQuery>,
    /// `[sum of n_q, q_heads, head_dim_k]`, exactly representable in `dtype`.
    pub q: Vec<f32>,
}

impl QueryBatch {
    /// The question in another precision.
    #[must_use]
    pub fn in_dtype(&self, dtype: DType) -> Self {
        Self { dtype, q: round_values(dtype, &self.q), ..self.clone() }
    }
}

/// The answer to a [`QueryBatch`].
#[derive(Clone, Debug, PartialEq)]
pub struct BatchAnswer {
    /// `[sum of n_q, q_heads, head_dim_v]`.
    pub out: Vec<f32>,
    /// `[sum of n_q, q_heads]`.
    pub lse: Vec<f32>,
}

/// A floating-point format in which to compute.
trait RealNumber:
    Copy
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
{
    /// The sum of nothing.
    const ZERO: Self;
    /// From the stored rows.
    fn from_f32(value: f32) -> Self;
    /// As queries and softmax weights are multiplied.
    fn round_factor(self) -> Self {
        self
    }
    /// For the comparison.
    fn to_f64(self) -> f64;
    /// `e^self`.
    fn to_exp(self) -> Self;
    /// Natural logarithm.
    fn to_ln(self) -> Self;
    /// Hyperbolic tangent.
    fn to_tanh(self) -> Self;
    /// Square root.
    fn to_sqrt(self) -> Self;
}

macro_rules! real {
    ($type:ident) => {
        impl RealNumber for $type {
            const ZERO: Self = 0.0;

            fn from_f32(value: f32) -> Self {
                $type::from(value)
            }

            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            fn to_exp(self) -> Self {
                $type::exp(self)
            }

            fn to_ln(self) -> Self {
                $type::ln(self)
            }

            fn to_tanh(self) -> Self {
                $type::tanh(self)
            }

            fn to_sqrt(self) -> Self {
                $type::sqrt(self)
            }
        }
    };
}

real!(f32);
real!(f64);

/// Sums of f32 whose factors, queries and softmax weights, are f16: the arithmetic of attention
/// kernels on tensor cores.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
struct HalfFactors(f32);

macro_rules! half_operators {
    ($($operator:ident, $method:ident);*) => {
        $(impl std::ops::$operator for HalfFactors {
            type Output = Self;

            fn $method(self, other: Self) -> Self {
                Self(std::ops::$operator::$method(self.0, other.0))
            }
        })*
    };
}

half_operators!(Add, add; Sub, sub; Mul, mul; Div, div);

impl RealNumber for HalfFactors {
    const ZERO: Self = Self(0.0);

    fn from_f32(value: f32) -> Self {
        Self(value)
    }

    fn round_factor(self) -> Self {
        Self(f16::from_f32(self.0).to_f32())
    }

    fn to_f64(self) -> f64 {
        f64::from(self.0)
    }

    fn to_exp(self) -> Self {
        Self(self.0.exp())
    }

    fn to_ln(self) -> Self {
        Self(self.0.ln())
    }

    fn to_tanh(self) -> Self {
        Self(self.0.tanh())
    }

    fn to_sqrt(self) -> Self {
        Self(self.0.sqrt())
    }
}

/// The answer of a reference.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReferenceAnswer {
    /// `[sum of n_q, q_heads, head_dim_v]`.
    pub out: Vec<f64>,
    /// `[sum of n_q, q_heads]`; `-inf` where nothing is visible.
    pub lse: Vec<f64>,
    /// The largest product of a weight, as part of their sum, and a value.
    pub largest_value: f64,
    /// The largest product of a query's and a key's channel in a score.
    pub largest_term: f64,
}

/// The arithmetic of a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceArithmetic {
    /// f64 throughout: the truth.
    Double,
    /// f32 throughout.
    Single,
    /// f32 sums, but f16 queries and softmax weights.
    HalfFactors,
}

/// Answers `question` over `rows`: for each of its queries, the rows of its sequence.
///
/// # Panics
/// When there are not as many `rows` as queries.
#[must_use]
pub fn attend_reference(
    arithmetic: ReferenceArithmetic,
    shape: &ModelShape,
    question: &QueryBatch,
    rows: &[&LayerRows],
) -> ReferenceAnswer {
    match arithmetic {
        ReferenceArithmetic::Double => attend_in::<f64>(shape, question, rows),
        ReferenceArithmetic::Single => attend_in::<f32>(shape, question, rows),
        ReferenceArithmetic::HalfFactors => attend_in::<HalfFactors>(shape, question, rows),
    }
}

fn attend_in<T: RealNumber>(
    shape: &ModelShape,
    question: &QueryBatch,
    rows: &[&LayerRows],
) -> ReferenceAnswer {
    assert_eq!(question.queries.len(), rows.len(), "one set of rows for each query");
    let q: Vec<T> = question.q.iter().map(|value| T::from_f32(*value)).collect();
    let mut reference = ReferenceAnswer::default();
    let mut token = 0;
    for (query, rows) in question.queries.iter().zip(rows) {
        let k: Vec<T> = rows.k.iter().map(|value| T::from_f32(*value)).collect();
        let v: Vec<T> = rows.v.iter().map(|value| T::from_f32(*value)).collect();
        for i in 0..query.n_q {
            let seen = visible_tokens(query, rows.tokens, i);
            for head in 0..shape.q_heads() {
                let dim = shape.head_dim_k as usize;
                let at = (token * shape.q_heads() as usize + head as usize) * dim;
                let one = QueryHead { shape, question, head: (head / shape.group) as usize };
                let q: Vec<T> = q[at..at + dim].iter().map(|q| q.round_factor()).collect();
                one.attend_head(&q, &k, &v, &seen, &mut reference);
            }
            token += 1;
        }
    }
    reference
}

/// The tokens that query token `i` sees, of `stored` ones.
fn visible_tokens(query: &AttendQuery, stored: u32, i: u32) -> Vec<usize> {
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
struct QueryHead<'a> {
    shape: &'a ModelShape,
    question: &'a QueryBatch,
    /// Its KV head.
    head: usize,
}

impl QueryHead<'_> {
    fn attend_head<T: RealNumber>(
        &self,
        q: &[T],
        k: &[T],
        v: &[T],
        seen: &[usize],
        reference: &mut ReferenceAnswer,
    ) {
        let dim = self.shape.head_dim_v as usize;
        let mut out = vec![T::ZERO; dim];
        let scores: Vec<T> = seen.iter().map(|token| self.score_token(q, k, *token)).collect();
        let Some(max) = scores.iter().copied().reduce(|a, b| if a < b { b } else { a }) else {
            reference.out.extend(out.into_iter().map(T::to_f64));
            reference.lse.push(f64::NEG_INFINITY);
            return;
        };
        let mut sum = T::ZERO;
        let mut largest_value = 0f64;
        for (token, score) in seen.iter().zip(scores) {
            let weight = (score - max).to_exp();
            sum = sum + weight;
            let at = token * self.shape.v_width() + self.head * dim;
            for (out, value) in out.iter_mut().zip(&v[at..at + dim]) {
                *out = *out + weight.round_factor() * *value;
                largest_value = largest_value.max((weight * *value).to_f64().abs());
            }
            let term = self.largest_term(q, k, *token);
            reference.largest_term = reference.largest_term.max(term);
        }
        reference.largest_value = reference.largest_value.max(largest_value / sum.to_f64());
        reference.out.extend(out.into_iter().map(|out| (out / sum).to_f64()));
        reference.lse.push((max + sum.to_ln()).to_f64());
    }

    fn largest_term<T: RealNumber>(&self, q: &[T], k: &[T], token: usize) -> f64 {
        let dim = self.shape.head_dim_k as usize;
        let at = token * self.shape.k_width() + self.head * dim;
        let terms = q.iter().zip(&k[at..at + dim]).map(|(q, k)| (*q * *k).to_f64().abs());
        let scale = self.question.scale.map_or(1.0 / (dim as f64).sqrt(), f64::from);
        terms.fold(0.0, f64::max) * scale.abs()
    }

    fn score_token<T: RealNumber>(&self, q: &[T], k: &[T], token: usize) -> T {
        let dim = self.shape.head_dim_k as usize;
        let at = token * self.shape.k_width() + self.head * dim;
        let mut dot = T::ZERO;
        for (q, k) in q.iter().zip(&k[at..at + dim]) {
            dot = dot + *q * *k;
        }
        let scaled = match self.question.scale {
            Some(scale) => dot * T::from_f32(scale),
            None => dot / T::from_f32(dim as f32).to_sqrt(),
        };
        match self.question.soft_cap {
            Some(cap) => T::from_f32(cap) * (scaled / T::from_f32(cap)).to_tanh(),
            None => scaled,
        }
    }
}
