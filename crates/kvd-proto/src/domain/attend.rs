//! Attention over stored tokens.

use super::call_error::CallError;
use super::payload::{self, inline_payload};
use super::store::check_layer;
use crate::{RequestError, v1};
use bytes::{BufMut, Bytes, BytesMut};
use kvd_core::{DType, Geometry, LayerIndex, ModelId, SequenceId};

/// A batch of queries over one layer of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct AttendBatch {
    /// The model every sequence of the batch belongs to.
    pub model: ModelId,
    /// The layer.
    pub layer: LayerIndex,
    /// Query heads: a multiple of the model's KV heads, which [`AttendBatch::check_shape`] checks.
    pub q_heads: u32,
    /// Dtype of `q` and of the reply's `out`.
    pub dtype: DType,
    /// Finite and above 0; `None` is `1/sqrt(head_dim_k)`.
    pub scale: Option<f32>,
    /// Finite and above 0: scores `s` become `c * tanh(s / c)`.
    pub soft_cap: Option<f32>,
    /// 1 to [`AttendBatch::QUERIES_MAX`] queries.
    pub queries: Vec<AttendQuery>,
    /// `[sum of n_q, q_heads, head_dim_k]`, queries in order.
    pub q: Bytes,
    /// Bad queries are named in [`Attended::query_errors`] and the others answered; else one bad
    /// query refuses the batch.
    pub per_query_errors: bool,
}

/// Consecutive query tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendQuery {
    /// The sequence to read.
    pub sequence: SequenceId,
    /// Query tokens, at least 1.
    pub n_q: u32,
    /// Tokens of the sequence it may see; `None` is all that are stored on the layer.
    pub kv_length: Option<u32>,
    /// Position of the first query token; `None` is `kv_length - n_q`.
    pub position: Option<u32>,
    /// First token to read; `None` is 0.
    pub start: Option<u32>,
    /// One past the last token to read; `None` is `kv_length`. Not after `start`: nothing is read.
    pub end: Option<u32>,
    /// A query token at `p` sees only tokens after `p - sliding_window`; at least 1.
    pub sliding_window: Option<u32>,
}

impl AttendQuery {
    /// A query of `n_q` tokens that are the last ones stored and see all before them.
    #[must_use]
    pub fn new(sequence: SequenceId, n_q: u32) -> Self {
        let (kv_length, position, start, end, sliding_window) = (None, None, None, None, None);
        Self { sequence, n_q, kv_length, position, start, end, sliding_window }
    }

    /// This query after all stored tokens: it sees all that it reads.
    #[must_use]
    pub fn with_all_visible(self) -> Self {
        Self { position: Some(u32::MAX - self.n_q), ..self }
    }

    /// Checks what can be judged without the sequence.
    ///
    /// # Errors
    /// Without a query token, with positions past 2^32 - 1, or with a default position before the
    /// sequence.
    pub fn check_query(&self) -> Result<(), RequestError> {
        if self.n_q == 0 {
            return Err(RequestError::invalid_field("n_q", "must be at least 1"));
        }
        match self.position {
            Some(position) if position.checked_add(self.n_q).is_none() => {
                Err(RequestError::invalid_field("position", "position + n_q is past 2^32 - 1"))
            }
            // The default position would be before the sequence.
            None if self.kv_length.is_some_and(|length| length < self.n_q) => {
                Err(RequestError::invalid_field("kv_length", "is less than n_q; give a position"))
            }
            _ => Ok(()),
        }
    }
}

impl AttendBatch {
    /// Most queries of one batch.
    pub const QUERIES_MAX: usize = 4096;
    /// Largest sum of `n_q` over one batch.
    pub const ROWS_MAX: u32 = 1 << 20;
    /// Most query heads.
    pub const Q_HEADS_MAX: u32 = 1 << 14;

    /// Rows of `q` and of the reply: the sum of `n_q`.
    #[must_use]
    pub fn query_rows(&self) -> u32 {
        self.queries.iter().fold(0, |rows, query| rows.saturating_add(query.n_q))
    }

    /// Checks what can be judged without the model, as of one that came in a message.
    ///
    /// # Errors
    /// Without heads or queries, with more of them than a batch has, with a factor that is not
    /// finite and above 0; with a query that is wrong by itself, unless those fail alone.
    pub fn check_batch(&self) -> Result<(), RequestError> {
        check_counts(self.q_heads, self.queries.len())?;
        check_rows(&self.queries)?;
        if !self.per_query_errors {
            check_each(&self.queries)?;
        }
        check_factor("scale", self.scale)?;
        check_factor("soft_cap", self.soft_cap)?;
        Ok(())
    }

    /// Checks layer, heads and the length of `q` against the model's geometry.
    ///
    /// # Errors
    /// When the layer is out of range, the query heads are no multiple of the KV heads, or `q`
    /// does not fill its shape.
    pub fn check_shape(&self, geometry: &Geometry) -> Result<(), RequestError> {
        self.check_shape_of(geometry, self.q.len() as u64)
    }

    /// Checks the shape of queries that lie elsewhere, `q_bytes` long.
    ///
    /// # Errors
    /// As [`AttendBatch::check_shape`].
    pub fn check_shape_of(&self, geometry: &Geometry, q_bytes: u64) -> Result<(), RequestError> {
        check_layer(self.layer, geometry)?;
        let kv_heads = geometry.kv_heads;
        if !self.q_heads.is_multiple_of(kv_heads) {
            let reason = format!("{} is not a multiple of the {kv_heads} KV heads", self.q_heads);
            return Err(RequestError::ShapeMismatch { field: "q_heads", reason });
        }
        let rows = u64::from(self.query_rows()) * u64::from(self.q_heads);
        let shape = "[sum of n_q, q_heads, head_dim_k]";
        payload::check_length(
            "q",
            shape,
            q_bytes,
            self.dtype,
            rows * u64::from(geometry.head_dim_k),
        )
    }
}

impl TryFrom<v1::AttendRequest> for AttendBatch {
    type Error = RequestError;

    fn try_from(request: v1::AttendRequest) -> Result<Self, RequestError> {
        check_counts(request.q_heads, request.queries.len())?;
        let mut queries: Vec<_> = request.queries.iter().map(query_from_wire).collect();
        check_rows(&queries)?;
        if request.all_visible {
            for (index, query) in queries.iter_mut().enumerate() {
                *query = see_all(index, *query)?;
            }
        }
        if !request.per_query_errors {
            check_each(&queries)?;
        }
        Ok(Self {
            model: ModelId(request.model_id),
            layer: LayerIndex(request.layer),
            q_heads: request.q_heads,
            dtype: payload::dtype_required(request.dtype, "dtype")?,
            scale: check_factor("scale", request.scale)?,
            soft_cap: check_factor(
                "soft_cap",
                Some(request.soft_cap).filter(|soft_cap| *soft_cap != 0.0),
            )?,
            queries,
            q: payload::payload_bytes(request.q, "q")?,
            per_query_errors: request.per_query_errors,
        })
    }
}

fn check_counts(q_heads: u32, queries: usize) -> Result<(), RequestError> {
    if q_heads == 0 {
        return Err(RequestError::Missing { field: "q_heads" });
    }
    at_most("q_heads", q_heads.into(), AttendBatch::Q_HEADS_MAX.into())?;
    if queries == 0 {
        return Err(RequestError::Missing { field: "queries" });
    }
    at_most("queries", queries as u64, AttendBatch::QUERIES_MAX as u64)
}

fn check_rows(queries: &[AttendQuery]) -> Result<(), RequestError> {
    let rows = queries.iter().map(|query| u64::from(query.n_q)).sum();
    at_most("sum of n_q", rows, AttendBatch::ROWS_MAX.into())
}

/// Checks queries of which none may fail alone.
fn check_each(queries: &[AttendQuery]) -> Result<(), RequestError> {
    for (index, query) in queries.iter().enumerate() {
        let in_query = |error| RequestError::Query { index, error: Box::new(error) };
        query.check_query().map_err(in_query)?;
    }
    Ok(())
}

/// The factor, if it is one.
fn check_factor(field: &'static str, factor: Option<f32>) -> Result<Option<f32>, RequestError> {
    match factor {
        Some(value) if !(value.is_finite() && value > 0.0) => {
            Err(RequestError::invalid_field(field, format!("{value} is not finite and above 0")))
        }
        factor => Ok(factor),
    }
}

fn at_most(field: &'static str, given: u64, max: u64) -> Result<(), RequestError> {
    if given <= max { Ok(()) } else { Err(RequestError::OverLimit { field, given, max }) }
}

/// A query that sees all that it reads.
fn see_all(index: usize, query: AttendQuery) -> Result<AttendQuery, RequestError> {
    let in_query = |field, reason: &str| {
        let error = Box::new(RequestError::invalid_field(field, reason));
        RequestError::Query { index, error }
    };
    if query.position.is_some() {
        return Err(in_query("position", "is given with all_visible; leave one of them out"));
    }
    if query.sliding_window.is_some() {
        return Err(in_query("sliding_window", "hides tokens that all_visible shows"));
    }
    Ok(query.with_all_visible())
}

fn query_from_wire(query: &v1::Query) -> AttendQuery {
    AttendQuery {
        sequence: SequenceId(query.sequence_id),
        n_q: query.n_q,
        kv_length: query.kv_length,
        position: query.position,
        start: query.start,
        end: query.end,
        sliding_window: Some(query.sliding_window).filter(|window| *window != 0),
    }
}

impl From<AttendBatch> for v1::AttendRequest {
    fn from(batch: AttendBatch) -> Self {
        Self {
            model_id: batch.model.0,
            layer: batch.layer.0,
            q_heads: batch.q_heads,
            dtype: payload::dtype_to_wire(batch.dtype),
            scale: batch.scale,
            soft_cap: batch.soft_cap.unwrap_or(0.0),
            queries: batch.queries.iter().map(query_to_wire).collect(),
            q: Some(inline_payload(batch.q)),
            per_query_errors: batch.per_query_errors,
            ..Self::default()
        }
    }
}

fn query_to_wire(query: &AttendQuery) -> v1::Query {
    v1::Query {
        sequence_id: query.sequence.0,
        n_q: query.n_q,
        kv_length: query.kv_length,
        position: query.position,
        start: query.start,
        end: query.end,
        sliding_window: query.sliding_window.unwrap_or(0),
    }
}

/// The answer to an [`AttendBatch`].
#[derive(Clone, Debug, PartialEq)]
pub struct Attended {
    /// `[sum of n_q, q_heads, head_dim_v]` in the request's dtype; 0 where nothing is visible.
    pub out: Bytes,
    /// `[sum of n_q, q_heads]`, natural log; `-inf` where nothing is visible.
    pub lse: Vec<f32>,
    /// Queries that were not answered, in order: their `out` is 0 and their `lse` `-inf`. Empty
    /// unless [`AttendBatch::per_query_errors`] is set.
    pub query_errors: Vec<QueryError>,
}

/// A query of a batch that was not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryError {
    /// Position in [`AttendBatch::queries`].
    pub query: u32,
    /// Why not.
    pub error: CallError,
}

impl TryFrom<v1::AttendResponse> for Attended {
    type Error = RequestError;

    fn try_from(response: v1::AttendResponse) -> Result<Self, RequestError> {
        let out = payload::payload_bytes(response.out, "out")?;
        let lse = payload::payload_bytes(response.lse, "lse")?;
        let (values, rest) = lse.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(RequestError::invalid_field("lse", "is not a whole number of f32"));
        }
        let query_error = |error: v1::QueryError| QueryError {
            query: error.query,
            error: error.error.unwrap_or_default().into(),
        };
        Ok(Self {
            out,
            lse: values.iter().map(|value| f32::from_le_bytes(*value)).collect(),
            query_errors: response.query_errors.into_iter().map(query_error).collect(),
        })
    }
}

impl From<Attended> for v1::AttendResponse {
    fn from(attended: Attended) -> Self {
        let mut lse = BytesMut::with_capacity(attended.lse.len() * 4);
        for value in attended.lse {
            lse.put_f32_le(value);
        }
        let query_error = |error: QueryError| v1::QueryError {
            query: error.query,
            error: Some(error.error.into()),
        };
        Self {
            out: Some(inline_payload(attended.out)),
            lse: Some(inline_payload(lse.freeze())),
            query_errors: attended.query_errors.into_iter().map(query_error).collect(),
            error: None,
        }
    }
}

#[cfg(test)]
#[path = "attend_tests.rs"]
mod tests;
