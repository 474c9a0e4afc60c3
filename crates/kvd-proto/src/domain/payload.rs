//! Tensors, dtypes and shapes on the wire.

use crate::{RequestError, v1};
use bytes::Bytes;
use kvd_core::DType;

/// A payload that carries its bytes.
#[must_use]
pub fn inline_payload(bytes: Bytes) -> v1::Payload {
    v1::Payload { source: Some(v1::payload::Source::Inline(bytes)) }
}

/// The bytes of a required payload.
pub(super) fn payload_bytes(
    payload: Option<v1::Payload>,
    field: &'static str,
) -> Result<Bytes, RequestError> {
    match payload.and_then(|payload| payload.source) {
        Some(v1::payload::Source::Inline(bytes)) => Ok(bytes),
        Some(v1::payload::Source::Region(_)) => {
            let reason = "is in a region, which is used through its own connection";
            Err(RequestError::invalid_field(field, reason))
        }
        None => Err(RequestError::Missing { field }),
    }
}

/// Checks that a payload has exactly `values` values of `dtype`.
pub(super) fn check_length(
    field: &'static str,
    shape: &'static str,
    given: u64,
    dtype: DType,
    values: u64,
) -> Result<(), RequestError> {
    let expected = values.saturating_mul(dtype.size_bytes() as u64);
    if given == expected {
        return Ok(());
    }
    Err(RequestError::PayloadLength { field, shape, given, expected })
}

/// The dtype of an optional field: unspecified is `None`.
pub(super) fn optional_dtype(raw: i32, field: &'static str) -> Result<Option<DType>, RequestError> {
    match v1::DType::try_from(raw) {
        Ok(v1::DType::DtypeUnspecified) => Ok(None),
        Ok(v1::DType::DtypeF32) => Ok(Some(DType::F32)),
        Ok(v1::DType::DtypeF16) => Ok(Some(DType::F16)),
        Ok(v1::DType::DtypeBf16) => Ok(Some(DType::BF16)),
        Err(_) => Err(RequestError::invalid_field(field, format!("dtype {raw} is not known"))),
    }
}

/// The dtype of a required field.
pub(super) fn dtype_required(raw: i32, field: &'static str) -> Result<DType, RequestError> {
    optional_dtype(raw, field)?.ok_or(RequestError::Missing { field })
}

pub(super) fn dtype_to_wire(dtype: DType) -> i32 {
    let wire = match dtype {
        DType::F32 => v1::DType::DtypeF32,
        DType::F16 => v1::DType::DtypeF16,
        DType::BF16 => v1::DType::DtypeBf16,
    };
    wire.into()
}
