//! The one table from kvd's error codes to gRPC, and the way back.
//!
//! A gRPC code alone says too little to branch on (ten of kvd's codes are caller mistakes), so
//! the exact code rides along as `google.rpc.ErrorInfo`, and a hint when to try again as
//! `google.rpc.RetryInfo`.

use kvd_core::ErrorCode;
use std::collections::HashMap;
use std::time::Duration;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// `ErrorInfo.domain` of every error that kvd itself raises.
pub const ERROR_DOMAIN: &str = "kvd";

/// The retry hint of a retryable error when the daemon knows no better one.
pub const RETRY_AFTER_DEFAULT: Duration = Duration::from_millis(50);

/// The gRPC code that stands beside `code`.
#[must_use]
pub const fn grpc_code(code: ErrorCode) -> Code {
    match code {
        ErrorCode::InvalidArgument
        | ErrorCode::ShapeMismatch
        | ErrorCode::NonFinite
        | ErrorCode::InvalidCodec
        | ErrorCode::InvalidCalibration => Code::InvalidArgument,
        ErrorCode::UnknownModel
        | ErrorCode::UnknownSequence
        | ErrorCode::UnknownSession
        | ErrorCode::UnknownLease => Code::NotFound,
        ErrorCode::NamespaceDenied | ErrorCode::PermissionDenied => Code::PermissionDenied,
        ErrorCode::Unauthenticated => Code::Unauthenticated,
        ErrorCode::RangeGap | ErrorCode::RangeNotStored => Code::OutOfRange,
        ErrorCode::RangeOverlap | ErrorCode::RangeConflict => Code::AlreadyExists,
        ErrorCode::SequenceBusy => Code::Aborted,
        ErrorCode::ModelInUse => Code::FailedPrecondition,
        ErrorCode::PoolFull
        | ErrorCode::QueueFull
        | ErrorCode::LimitExceeded
        | ErrorCode::QuotaExceeded
        | ErrorCode::MessageTooLarge => Code::ResourceExhausted,
        ErrorCode::DeadlineExceeded => Code::DeadlineExceeded,
        ErrorCode::Cancelled => Code::Cancelled,
        ErrorCode::ShuttingDown => Code::Unavailable,
        ErrorCode::CorruptPage => Code::DataLoss,
        // `ErrorCode` may grow; the test below fails until a new code has its row above.
        ErrorCode::DeviceFailed | ErrorCode::Internal | _ => Code::Internal,
    }
}

/// The status that answers a request which ended with `code`.
///
/// `retry_after` is used for a code that is [retryable](ErrorCode::is_retryable), where `None`
/// means [`RETRY_AFTER_DEFAULT`], and for [`ErrorCode::QuotaExceeded`], where it means that waiting
/// does not help.
#[must_use]
pub fn to_status(code: ErrorCode, message: &str, retry_after: Option<Duration>) -> Status {
    let mut details = ErrorDetails::with_error_info(code.name(), ERROR_DOMAIN, HashMap::new());
    let default = code.is_retryable().then_some(RETRY_AFTER_DEFAULT);
    let given = retry_after.filter(|_| default.is_some() || code == ErrorCode::QuotaExceeded);
    if let Some(hint) = given.or(default) {
        details.set_retry_info(Some(hint));
    }
    Status::with_error_details(grpc_code(code), bounded_text(message), details)
}

/// Longest message of a status. It travels twice in the trailers, plainly and in the details, which
/// are larger by a third; clients take no trailers of more than 8 KiB.
const MESSAGE_BYTES_MAX: usize = 2048;

/// A message that quotes what a client sent may be as long as that: it is cut in the middle, so
/// that it is not lost with its code.
fn bounded_text(message: &str) -> std::borrow::Cow<'_, str> {
    const MARK: &str = " [...] ";
    if message.len() <= MESSAGE_BYTES_MAX {
        return message.into();
    }
    let part = (MESSAGE_BYTES_MAX - MARK.len()) / 2;
    let head = &message[..message.floor_char_boundary(part)];
    let tail = &message[message.ceil_char_boundary(message.len() - part)..];
    format!("{head}{MARK}{tail}").into()
}

/// An id of another boot of the daemon, as an error tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaleId {
    /// The first eight digits of the boot id that it was given under: what ids carry of it.
    pub id_boot: String,
    /// The boot id of the daemon that answers.
    pub boot_id: String,
}

/// Keys of `ErrorInfo.metadata`.
const ID_BOOT: &str = "id_boot";
const BOOT_ID: &str = "boot_id";

/// [`to_status()`] of a call with an id of another boot.
#[must_use]
pub fn stale_status(code: ErrorCode, message: &str, stale: StaleId) -> Status {
    let metadata =
        HashMap::from([(ID_BOOT.to_owned(), stale.id_boot), (BOOT_ID.to_owned(), stale.boot_id)]);
    let details = ErrorDetails::with_error_info(code.name(), ERROR_DOMAIN, metadata);
    Status::with_error_details(grpc_code(code), message, details)
}

/// The stale id that [`stale_status`] attached.
#[must_use]
pub fn stale_id(status: &Status) -> Option<StaleId> {
    let mut info = status.get_details_error_info()?;
    let mut take = |key| info.metadata.remove(key);
    let (id_boot, boot_id) = (take(ID_BOOT)?, take(BOOT_ID)?);
    (info.domain == ERROR_DOMAIN).then_some(StaleId { id_boot, boot_id })
}

/// The code that [`to_status()`] attached. `None` when the status was not made by kvd, as with
/// transport errors and what proxies answer, or when its details were lost on the way.
#[must_use]
pub fn error_code(status: &Status) -> Option<ErrorCode> {
    let info = status.get_details_error_info()?;
    if info.domain == ERROR_DOMAIN { ErrorCode::from_name(&info.reason) } else { None }
}

/// How long the sender of `status` asks to wait before the next attempt.
#[must_use]
pub fn retry_after(status: &Status) -> Option<Duration> {
    status.get_details_retry_info()?.retry_delay
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips_with_its_hint() {
        let hint = Duration::from_millis(1234);
        for code in ErrorCode::ALL {
            let status = to_status(code, "because", Some(hint));
            assert_eq!(status.message(), "because");
            assert_eq!(error_code(&status), Some(code));
            let says_when = code.is_retryable() || code == ErrorCode::QuotaExceeded;
            assert_eq!(retry_after(&status), says_when.then_some(hint), "{code}");
            let status = to_status(code, "because", None);
            assert_eq!(retry_after(&status).is_some(), code.is_retryable(), "{code}");
        }
    }

    #[test]
    fn a_long_message_keeps_its_code_its_beginning_and_its_end() {
        let long = format!("codec \"{}\" is no preset", "\u{e9}".repeat(50_000));
        let status = to_status(ErrorCode::InvalidCodec, &long, None);
        assert!(status.message().len() <= MESSAGE_BYTES_MAX, "{}", status.message().len());
        assert!(status.message().starts_with("codec \"") && status.message().ends_with("preset"));
        assert_eq!(error_code(&status), Some(ErrorCode::InvalidCodec));
        assert_eq!(to_status(ErrorCode::InvalidCodec, "short", None).message(), "short");
    }

    #[test]
    fn a_stale_id_tells_both_boots() {
        let stale = StaleId { id_boot: "01020304".to_owned(), boot_id: "ab".repeat(16) };
        let status = stale_status(ErrorCode::UnknownSequence, "gone", stale.clone());
        assert_eq!(error_code(&status), Some(ErrorCode::UnknownSequence));
        assert_eq!((status.code(), status.message()), (Code::NotFound, "gone"));
        assert_eq!(stale_id(&status), Some(stale));
        assert_eq!(stale_id(&to_status(ErrorCode::UnknownSequence, "", None)), None);
    }

    #[test]
    fn every_code_has_its_row() {
        for code in ErrorCode::ALL {
            let grpc = grpc_code(code);
            assert!(!matches!(grpc, Code::Ok | Code::Unknown | Code::Unimplemented), "{code}");
            let internal = matches!(code, ErrorCode::DeviceFailed | ErrorCode::Internal);
            assert_eq!(grpc == Code::Internal, internal, "{code} needs a row in grpc_code");
        }
    }

    #[test]
    fn retryable_error_always_carries_a_hint() {
        let status = to_status(ErrorCode::QueueFull, "", None);
        assert_eq!(retry_after(&status), Some(RETRY_AFTER_DEFAULT));
    }

    #[test]
    fn foreign_status_has_no_kvd_code() {
        assert_eq!(error_code(&Status::unavailable("connection refused")), None);
        let details = ErrorDetails::with_error_info("INTERNAL", "proxy.example", HashMap::new());
        let status = Status::with_error_details(Code::Internal, "", details);
        assert_eq!(error_code(&status), None);
    }
}
