//! Structs of `kvd.h`, and how their pointers are read.

use crate::failure::FailedCall;
use bytes::Bytes;
use kvd_client::{AttendQuery, DType, Geometry, ModelSpec, RingRows, RopePairing, SequenceId};
use std::ffi::{CStr, c_char, c_void};

/// Stands for a number that is not given.
pub(crate) const ABSENT: u32 = u32::MAX;

/// `kvd_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "kvd.h says what each is")]
pub struct ConnectArgs {
    pub struct_bytes: u32,
    pub ring_entries: u32,
    pub region_path: *const c_char,
    pub name_space: *const c_char,
    pub session: *const c_char,
    pub memory_bytes: u64,
    pub timeout_us: u64,
    pub queries_max: u32,
    pub spin_us: u32,
}

/// `kvd_model`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "kvd.h says what each is")]
pub struct ModelArgs {
    pub struct_bytes: u32,
    pub layers: u32,
    pub kv_heads: u32,
    pub head_dim_k: u32,
    pub head_dim_v: u32,
    pub block_tokens: u32,
    pub dtype: u32,
    pub rope: u32,
    pub name: *const c_char,
    pub codec: *const c_char,
    pub calibration: *const c_void,
    pub calibration_bytes: u64,
}

/// `kvd_store_rows`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "kvd.h says what each is")]
pub struct StoreArgs {
    pub struct_bytes: u32,
    pub layer: u32,
    pub sequence: u64,
    pub start: u32,
    pub tokens: u32,
    pub k: u64,
    pub k_bytes: u64,
    pub v: u64,
    pub v_bytes: u64,
}

/// `kvd_rows`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "kvd.h says what each is")]
pub struct RowsArgs {
    pub offset: u64,
    pub token_stride: u64,
    pub head_stride: u64,
}

/// `kvd_query`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "kvd.h says what each is")]
pub struct QueryArgs {
    pub sequence: u64,
    pub n_q: u32,
    pub kv_length: u32,
    pub position: u32,
    pub start: u32,
    pub end: u32,
    pub sliding_window: u32,
}

/// `kvd_attend_batch`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "kvd.h says what each is")]
pub struct AttendArgs {
    pub struct_bytes: u32,
    pub layer: u32,
    pub model: u64,
    pub q_heads: u32,
    pub dtype: u32,
    pub scale: f32,
    pub soft_cap: f32,
    pub queries: *const QueryArgs,
    pub query_count: u64,
    pub q: RowsArgs,
    pub out: RowsArgs,
    pub lse: u64,
}

/// A struct of `kvd.h` that begins with its size.
pub(crate) trait SizedArgs: Copy {
    /// Its name there.
    const NAME: &'static str;
}

impl SizedArgs for ConnectArgs {
    const NAME: &'static str = "kvd_options";
}

impl SizedArgs for ModelArgs {
    const NAME: &'static str = "kvd_model";
}

impl SizedArgs for StoreArgs {
    const NAME: &'static str = "kvd_store_rows";
}

impl SizedArgs for AttendArgs {
    const NAME: &'static str = "kvd_attend_batch";
}

/// Tests a pointer, as far as that can be done.
fn check_pointer<T>(pointer: *const T, name: &str) -> Result<(), FailedCall> {
    if pointer.is_null() {
        return Err(FailedCall::invalid_argument(format!("{name} is NULL")));
    }
    if !pointer.is_aligned() {
        let align = align_of::<T>();
        return Err(FailedCall::invalid_argument(format!(
            "{name} is not aligned to {align} bytes"
        )));
    }
    Ok(())
}

/// Reads a struct that begins with its size.
///
/// # Safety
/// The pointer is null, or of as many bytes as the first four of them say.
pub(crate) unsafe fn read_sized<T: SizedArgs>(pointer: *const T) -> Result<T, FailedCall> {
    check_pointer(pointer, T::NAME)?;
    // SAFETY: every such struct begins with these four bytes.
    let said = unsafe { pointer.cast::<u32>().read() } as usize;
    let size = size_of::<T>();
    if said < size {
        return Err(FailedCall::invalid_argument(format!(
            "{}.struct_bytes is {said}; it is {size} in the header of this library",
            T::NAME
        )));
    }
    // SAFETY: there are as many bytes, and all values of them are right for numbers and pointers.
    Ok(unsafe { pointer.read() })
}

/// Reads a list.
///
/// # Safety
/// The pointer is null, or of so many.
pub(crate) unsafe fn read_list<'a, T>(
    pointer: *const T,
    count: usize,
    name: &str,
) -> Result<&'a [T], FailedCall> {
    if count == 0 {
        return Ok(&[]);
    }
    check_pointer(pointer, name)?;
    // SAFETY: as the caller promises; it is read before the call returns.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Reads a text; none of NULL.
///
/// # Safety
/// The pointer is null, or of a text that ends with 0.
pub(crate) unsafe fn read_text(
    pointer: *const c_char,
    name: &str,
) -> Result<Option<String>, FailedCall> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    let text =
        text.to_str().map_err(|_| FailedCall::invalid_argument(format!("{name} is not UTF-8")))?;
    Ok(Some(text.to_owned()))
}

/// Writes an answer to a place that may be null where that is allowed.
///
/// # Safety
/// The pointer is null, or of a place for one.
pub(crate) unsafe fn write_answer<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as the caller promises.
        unsafe { to.write_unaligned(value) }
    }
}

/// Tests a place for an answer that is asked for.
pub(crate) fn check_place<T>(to: *mut T, name: &str) -> Result<(), FailedCall> {
    check_pointer(to, name)
}

/// `enum kvd_dtype`.
pub(crate) fn dtype_of(number: u32) -> Result<DType, FailedCall> {
    match number {
        1 => Ok(DType::F32),
        2 => Ok(DType::F16),
        3 => Ok(DType::BF16),
        _ => {
            Err(FailedCall::invalid_argument(format!("dtype is {number}: 1 is f32, 2 f16, 3 bf16")))
        }
    }
}

/// A number that may be absent.
pub(crate) fn given_number(number: u32) -> Option<u32> {
    Some(number).filter(|number| *number != ABSENT)
}

impl ModelArgs {
    /// The model that it describes.
    ///
    /// # Safety
    /// As [`read_text`] and [`read_list`] of its pointers.
    pub(crate) unsafe fn to_spec(self) -> Result<ModelSpec, FailedCall> {
        let rope_pairing = match self.rope {
            1 => RopePairing::Half,
            2 => RopePairing::Interleaved,
            other => {
                let message = format!("rope is {other}: 1 is half, 2 interleaved");
                return Err(FailedCall::invalid_argument(message));
            }
        };
        let geometry = Geometry {
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dim_k: self.head_dim_k,
            head_dim_v: self.head_dim_v,
            block_tokens: self.block_tokens,
            dtype: dtype_of(self.dtype)?,
            rope_pairing,
        };
        let bytes = usize::try_from(self.calibration_bytes).map_err(|_| {
            FailedCall::invalid_argument("calibration_bytes is no size of this machine")
        })?;
        // SAFETY: as the caller promises.
        let (name, codec, calibration) = unsafe {
            (
                read_text(self.name, "kvd_model.name")?,
                read_text(self.codec, "kvd_model.codec")?,
                read_list(self.calibration.cast::<u8>(), bytes, "kvd_model.calibration")?,
            )
        };
        Ok(ModelSpec {
            name: name.ok_or_else(|| FailedCall::invalid_argument("kvd_model.name is NULL"))?,
            geometry,
            codec: codec.unwrap_or_else(|| ModelSpec::CODEC_DEFAULT.to_owned()),
            calibration: Bytes::copy_from_slice(calibration),
        })
    }
}

impl QueryArgs {
    pub(crate) fn to_query(self) -> AttendQuery {
        AttendQuery {
            sequence: SequenceId(self.sequence),
            n_q: self.n_q,
            kv_length: given_number(self.kv_length),
            position: given_number(self.position),
            start: given_number(self.start),
            end: given_number(self.end),
            sliding_window: given_number(self.sliding_window),
        }
    }
}

impl RowsArgs {
    /// Rows that count from `base` on.
    pub(crate) fn place_rows(self, base: u64) -> Result<RingRows, FailedCall> {
        let Self { offset, token_stride, head_stride } = self;
        Ok(RingRows { offset: add_base(base, offset)?, token_stride, head_stride })
    }
}

/// An offset in the region, of one in the memory that callers see.
pub(crate) fn add_base(base: u64, offset: u64) -> Result<u64, FailedCall> {
    let sum = base.checked_add(offset);
    sum.ok_or_else(|| FailedCall::invalid_argument(format!("offset {offset} is beyond 64 bits")))
}
