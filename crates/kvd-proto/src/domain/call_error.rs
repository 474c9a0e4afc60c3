//! The refusal of one message of a stream, or of one query of a batch, inside an answer.

use crate::v1;
use kvd_core::ErrorCode;
use std::time::Duration;
use tonic::Status;

/// Why one message or one query was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    /// What to branch on; one that this build does not know is [`ErrorCode::Internal`].
    pub code: ErrorCode,
    /// For people.
    pub message: String,
    /// When to try again; `None` where that does not help.
    pub retry_after: Option<Duration>,
}

impl CallError {
    /// A refusal with the default retry hint, where its code is retryable.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let retry_after = code.retryable().then_some(crate::RETRY_AFTER_DEFAULT);
        Self { code, message: message.into(), retry_after }
    }
}

/// The refusal that a status of kvd says; any other is [`ErrorCode::Internal`].
impl From<&Status> for CallError {
    fn from(status: &Status) -> Self {
        Self {
            code: crate::error_code(status).unwrap_or(ErrorCode::Internal),
            message: status.message().to_owned(),
            retry_after: crate::retry_after(status),
        }
    }
}

impl From<CallError> for v1::CallError {
    fn from(error: CallError) -> Self {
        let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        Self {
            code: error.code.name().to_owned(),
            message: error.message,
            retry_after_ms: error.retry_after.map(millis),
        }
    }
}

impl From<v1::CallError> for CallError {
    fn from(error: v1::CallError) -> Self {
        let retry_after = error.retry_after_ms.map(|ms| Duration::from_millis(ms.into()));
        match ErrorCode::from_name(&error.code) {
            Some(code) => Self { code, message: error.message, retry_after },
            None => Self {
                code: ErrorCode::Internal,
                message: format!("{}: {}", error.code, error.message),
                retry_after,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_round_trips_through_a_status_and_the_wire() {
        for code in ErrorCode::ALL {
            let hint = code.retryable().then_some(Duration::from_millis(70));
            let error = CallError::from(&crate::status(code, "because", hint));
            let expected = CallError { code, message: "because".to_owned(), retry_after: hint };
            assert_eq!(error, expected);
            assert_eq!(CallError::from(v1::CallError::from(error)), expected);
        }
    }

    #[test]
    fn a_code_of_a_later_version_is_kept_in_the_message() {
        let later = v1::CallError { code: "NEW".to_owned(), ..Default::default() };
        let error = CallError::from(later);
        assert_eq!((error.code, error.message.as_str()), (ErrorCode::Internal, "NEW: "));
    }
}
