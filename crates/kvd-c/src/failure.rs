//! Codes and messages of calls that failed.

use kvd_client::{ClientError, ErrorCode};
use std::any::Any;

/// A call that succeeded.
pub(crate) const OK: i32 = 0;
const INTERNAL: i32 = 29;
const DISCONNECTED: i32 = 100;
const RESTARTED: i32 = 101;

/// `kvd_error`.
#[repr(C)]
pub struct CallFailure {
    /// The code.
    pub code: i32,
    /// Milliseconds until the same call may succeed; 0: it will not.
    pub retry_after_ms: u32,
    /// Text that ends with 0.
    pub message: [u8; 504],
}

/// Why a call failed, on its way out.
#[derive(Debug)]
pub(crate) struct FailedCall {
    pub(crate) code: i32,
    retry_after_ms: u32,
    message: String,
}

/// The number of a code in `kvd.h`.
#[must_use]
pub fn code_number(code: ErrorCode) -> i32 {
    match code {
        ErrorCode::InvalidArgument => 1,
        ErrorCode::ShapeMismatch => 2,
        ErrorCode::NonFinite => 3,
        ErrorCode::InvalidCodec => 4,
        ErrorCode::InvalidCalibration => 5,
        ErrorCode::UnknownModel => 6,
        ErrorCode::UnknownSequence => 7,
        ErrorCode::UnknownSession => 8,
        ErrorCode::UnknownLease => 9,
        ErrorCode::NamespaceDenied => 10,
        ErrorCode::Unauthenticated => 11,
        ErrorCode::PermissionDenied => 12,
        ErrorCode::RangeGap => 13,
        ErrorCode::RangeOverlap => 14,
        ErrorCode::RangeConflict => 15,
        ErrorCode::RangeNotStored => 16,
        ErrorCode::SequenceBusy => 17,
        ErrorCode::ModelInUse => 18,
        ErrorCode::PoolFull => 19,
        ErrorCode::QueueFull => 20,
        ErrorCode::LimitExceeded => 21,
        ErrorCode::QuotaExceeded => 22,
        ErrorCode::MessageTooLarge => 23,
        ErrorCode::DeadlineExceeded => 24,
        ErrorCode::Cancelled => 25,
        ErrorCode::ShuttingDown => 26,
        ErrorCode::CorruptPage => 27,
        ErrorCode::DeviceFailed => 28,
        _ => INTERNAL,
    }
}

impl FailedCall {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code: code_number(code), retry_after_ms: 0, message: message.into() }
    }

    pub(crate) fn invalid_argument(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message)
    }

    /// A defect that was caught.
    pub(crate) fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        Self::new(ErrorCode::Internal, format!("a defect in this library: {text}"))
    }

    pub(crate) fn to_record(&self) -> CallFailure {
        let mut message = [0; 504];
        let mut length = self.message.len().min(message.len() - 1);
        while !self.message.is_char_boundary(length) {
            length -= 1;
        }
        message[..length].copy_from_slice(&self.message.as_bytes()[..length]);
        CallFailure { code: self.code, retry_after_ms: self.retry_after_ms, message }
    }
}

impl From<ClientError> for FailedCall {
    fn from(error: ClientError) -> Self {
        let code = match (&error.restarted, error.code) {
            (Some(_), _) => RESTARTED,
            (None, Some(code)) => code_number(code),
            (None, None) => DISCONNECTED,
        };
        let wait = error.retry_after.map_or(0, |wait| wait.as_millis().max(1));
        Self {
            code,
            retry_after_ms: u32::try_from(wait).unwrap_or(u32::MAX),
            message: error.message,
        }
    }
}

impl From<kvd_shm::RegionError> for FailedCall {
    fn from(error: kvd_shm::RegionError) -> Self {
        Self::new(kvd_core::Coded::code(&error), error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const HEADER: &str = include_str!("../kvd.h");

    #[test]
    fn every_code_has_a_number_of_its_own_and_its_line_in_the_header() {
        let numbers: BTreeSet<i32> = ErrorCode::ALL.into_iter().map(code_number).collect();
        assert_eq!(numbers.len(), ErrorCode::ALL.len());
        for code in ErrorCode::ALL {
            let line = format!("    KVD_{} = {},\n", code.name(), code_number(code));
            let last = line.replace(",\n", "\n");
            assert!(HEADER.contains(&line) || HEADER.contains(&last), "{line}");
        }
        for (name, number) in [("OK", OK), ("DISCONNECTED", DISCONNECTED), ("RESTARTED", RESTARTED)]
        {
            assert!(HEADER.contains(&format!("KVD_{name} = {number}")), "{name}");
        }
        let version = format!("#define KVD_ABI_VERSION {}\n", crate::ABI_VERSION);
        assert!(HEADER.contains(&version));
    }

    #[test]
    fn a_long_message_is_cut_between_letters() {
        let record = FailedCall::invalid_argument("\u{e9}".repeat(400)).to_record();
        let end = record.message.iter().position(|byte| *byte == 0).unwrap();
        let text = std::str::from_utf8(&record.message[..end]).unwrap();
        assert_eq!((text.chars().count(), record.code), (251, 1));
    }
}
