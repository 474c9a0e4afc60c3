//! The record of an attend, and the entries of its list of queries.
//!
//! | bytes | field of the record |
//! |---|---|
//! | 0, 4 | version, number |
//! | 8 | the worker's tag, u64 |
//! | 16, 20 | kind: 1, an attend; flags: 1 per-query errors, 2 scale, 4 soft cap |
//! | 24, 32 | deadline in microseconds or 0, u64; model, u64 |
//! | 40, 44, 48, 52 | layer, query heads, dtype (1 f32, 2 f16, 3 bf16), queries |
//! | 56, 60 | scale and soft cap, f32 |
//! | 64 | offset of the list of queries, u64 |
//! | 72, 80, 88 | queries' values: offset, bytes from token to token and from head to head, u64 |
//! | 96, 104, 112 | the same of outputs |
//! | 120, 128 | offsets of log-sum-exps and of errors of single queries, u64 |
//! | 136 | zeros |
//!
//! | bytes | field of a query, 48 bytes |
//! |---|---|
//! | 0, 8 | sequence, u64; query tokens |
//! | 12 | flags: which of the next five are given, from bit 0 |
//! | 16, 20, 24, 28, 32 | `kv_length`, `position`, `start`, `end`, `sliding_window` |
//! | 36 | zeros |

use super::RING_RECORD_BYTES;
use super::fields::{FieldReader, FieldWriter, RecordError, begin_record, check_head};
use kvd_core::DType;

const KIND_ATTEND: u32 = 1;
const PER_QUERY_ERRORS: u32 = 1;
const HAS_SCALE: u32 = 2;
const HAS_SOFT_CAP: u32 = 4;
const REST: usize = 136;

/// Where rows of head after head and token after token are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingRows {
    /// Offset of the first row.
    pub offset: u64,
    /// Bytes from one token's rows to the next; 0: dense.
    pub token_stride: u64,
    /// Bytes from one head's row to the next; 0: dense.
    pub head_stride: u64,
}

/// An attend as a record has it. None of it is tested against a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingAttend {
    /// Comes back with the end.
    pub tag: u64,
    /// Microseconds until nobody waits any more; 0: no deadline.
    pub timeout_us: u64,
    /// Id of the model.
    pub model: u64,
    /// Layer.
    pub layer: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Type of queries and outputs.
    pub dtype: DType,
    /// Factor of scores.
    pub scale: Option<f32>,
    /// Cap of scores.
    pub soft_cap: Option<f32>,
    /// Whether bad queries fail alone.
    pub per_query_errors: bool,
    /// Queries of the list.
    pub queries: u32,
    /// Offset of the list of [`RingQuery`].
    pub queries_at: u64,
    /// `[sum of n_q, q_heads, head_dim_k]`.
    pub q: RingRows,
    /// `[sum of n_q, q_heads, head_dim_v]`.
    pub out: RingRows,
    /// Offset of `[sum of n_q, q_heads]`, f32.
    pub lse_at: u64,
    /// Offset of 128 bytes for each query, where they fail alone.
    pub query_errors_at: u64,
}

fn dtype_number(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 1,
        DType::F16 => 2,
        DType::BF16 => 3,
    }
}

fn dtype_of(number: u32) -> Result<DType, RecordError> {
    match number {
        1 => Ok(DType::F32),
        2 => Ok(DType::F16),
        3 => Ok(DType::BF16),
        _ => Err(field_error("dtype", number, "1 is f32, 2 f16, 3 bf16")),
    }
}

fn field_error(field: &'static str, value: u32, reason: &'static str) -> RecordError {
    RecordError::Field { field, value: value.into(), reason }
}

impl RingAttend {
    /// The tag of any record, for its end.
    #[must_use]
    pub fn tag_of(record: &[u8; RING_RECORD_BYTES]) -> u64 {
        FieldReader(record).read_u64(8)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// When it has another version or number, or a field has a value that it never has.
    pub fn read_record(record: &[u8; RING_RECORD_BYTES], number: u32) -> Result<Self, RecordError> {
        let fields = FieldReader(record);
        check_head(&fields, number)?;
        let (kind, flags) = (fields.read_u32(16), fields.read_u32(20));
        if kind != KIND_ATTEND {
            return Err(field_error("kind", kind, "1 is an attend"));
        }
        if flags & !(PER_QUERY_ERRORS | HAS_SCALE | HAS_SOFT_CAP) != 0 {
            return Err(field_error("flags", flags, "only bits 0, 1 and 2 mean something"));
        }
        fields.check_rest(REST)?;
        let number_if = |flag, at| {
            let bits = fields.read_u32(at);
            (flags & flag != 0).then(|| f32::from_bits(bits))
        };
        let rows = |at| RingRows {
            offset: fields.read_u64(at),
            token_stride: fields.read_u64(at + 8),
            head_stride: fields.read_u64(at + 16),
        };
        Ok(Self {
            tag: fields.read_u64(8),
            timeout_us: fields.read_u64(24),
            model: fields.read_u64(32),
            layer: fields.read_u32(40),
            q_heads: fields.read_u32(44),
            dtype: dtype_of(fields.read_u32(48))?,
            scale: number_if(HAS_SCALE, 56),
            soft_cap: number_if(HAS_SOFT_CAP, 60),
            per_query_errors: flags & PER_QUERY_ERRORS != 0,
            queries: fields.read_u32(52),
            queries_at: fields.read_u64(64),
            q: rows(72),
            out: rows(96),
            lse_at: fields.read_u64(120),
            query_errors_at: fields.read_u64(128),
        })
    }

    /// Its record.
    #[must_use]
    pub fn write_record(&self, number: u32) -> [u8; RING_RECORD_BYTES] {
        let mut record = begin_record(number);
        record.put_u64(8, self.tag);
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let flags = flag(self.per_query_errors, PER_QUERY_ERRORS)
            | flag(self.scale.is_some(), HAS_SCALE)
            | flag(self.soft_cap.is_some(), HAS_SOFT_CAP);
        for (at, value) in [(16, KIND_ATTEND), (20, flags), (40, self.layer), (44, self.q_heads)] {
            record.put_u32(at, value);
        }
        record.put_u64(24, self.timeout_us);
        record.put_u64(32, self.model);
        record.put_u32(48, dtype_number(self.dtype));
        record.put_u32(52, self.queries);
        record.put_u32(56, self.scale.unwrap_or(0.0).to_bits());
        record.put_u32(60, self.soft_cap.unwrap_or(0.0).to_bits());
        record.put_u64(64, self.queries_at);
        for (at, rows) in [(72, self.q), (96, self.out)] {
            record.put_u64(at, rows.offset);
            record.put_u64(at + 8, rows.token_stride);
            record.put_u64(at + 16, rows.head_stride);
        }
        record.put_u64(120, self.lse_at);
        record.put_u64(128, self.query_errors_at);
        record.0
    }
}

/// A query of a ring's attend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingQuery {
    /// Id of the sequence.
    pub sequence: u64,
    /// Query tokens.
    pub n_q: u32,
    /// Tokens that it may see.
    pub kv_length: Option<u32>,
    /// Position of the first token.
    pub position: Option<u32>,
    /// First token to read.
    pub start: Option<u32>,
    /// One past the last token to read.
    pub end: Option<u32>,
    /// Tokens that a query token sees at most.
    pub sliding_window: Option<u32>,
}

impl RingQuery {
    /// Bytes of one.
    pub const BYTES: usize = 48;

    /// Reads an entry of a list.
    ///
    /// # Errors
    /// When a field has a value that it never has.
    pub fn read_entry(entry: &[u8; Self::BYTES]) -> Result<Self, RecordError> {
        let fields = FieldReader(entry);
        let flags = fields.read_u32(12);
        if flags >= 1 << 5 {
            return Err(field_error("flags of a query", flags, "bits 0 to 4 mean something"));
        }
        fields.check_rest(36)?;
        let given = |bit: u32| {
            let value = fields.read_u32(16 + 4 * bit as usize);
            (flags & 1 << bit != 0).then_some(value)
        };
        Ok(Self {
            sequence: fields.read_u64(0),
            n_q: fields.read_u32(8),
            kv_length: given(0),
            position: given(1),
            start: given(2),
            end: given(3),
            sliding_window: given(4),
        })
    }

    /// Its entry.
    #[must_use]
    pub fn write_entry(&self) -> [u8; Self::BYTES] {
        let mut entry = FieldWriter::new_zeros();
        entry.put_u64(0, self.sequence);
        entry.put_u32(8, self.n_q);
        let given = [self.kv_length, self.position, self.start, self.end, self.sliding_window];
        let mut flags = 0;
        for (bit, value) in given.into_iter().enumerate() {
            let Some(value) = value else { continue };
            flags |= 1 << bit;
            entry.put_u32(16 + 4 * bit, value);
        }
        entry.put_u32(12, flags);
        entry.0
    }
}
