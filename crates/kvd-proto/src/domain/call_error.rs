//! The refusal of one message of a stream, or of one query of a batch, inside an answer.

use crate::{StaleId, v1};
use kvd_core::ErrorCode;
use std::time::Duration;
use tonic::Status;

/// Why one message or one query was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    /// The code to branch on; one that this build does not know is [`ErrorCode::Internal`].
    pub code: ErrorCode,
    /// For people.
    pub message: String,
    /// When to try again; `None` where that does not help.
    pub retry_after: Option<Duration>,
    /// The id of another boot that was named, if that is why.
    pub stale: Option<StaleId>,
}

impl CallError {
    /// A refusal with the default retry hint, where its code is retryable.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let retry_after = code.is_retryable().then_some(crate::RETRY_AFTER_DEFAULT);
        Self { code, message: message.into(), retry_after, stale: None }
    }
}

/// The refusal that a status of kvd says; any other is [`ErrorCode::Internal`].
impl From<&Status> for CallError {
    fn from(status: &Status) -> Self {
        Self {
            code: crate::error_code(status).unwrap_or(ErrorCode::Internal),
            message: status.message().to_owned(),
            retry_after: crate::retry_after(status),
            stale: crate::stale_id(status),
        }
    }
}

impl From<CallError> for v1::CallError {
    fn from(error: CallError) -> Self {
        let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let (id_boot, boot_id) =
            error.stale.map(|stale| (stale.id_boot, stale.boot_id)).unwrap_or_default();
        Self {
            code: error.code.name().to_owned(),
            message: error.message,
            retry_after_ms: error.retry_after.map(millis),
            id_boot,
            boot_id,
        }
    }
}

impl From<v1::CallError> for CallError {
    fn from(error: v1::CallError) -> Self {
        let retry_after = error.retry_after_ms.map(|ms| Duration::from_millis(ms.into()));
        let is_stale = !error.id_boot.is_empty() && !error.boot_id.is_empty();
        let stale = is_stale.then_some(StaleId { id_boot: error.id_boot, boot_id: error.boot_id });
        match ErrorCode::from_name(&error.code) {
            Some(code) => Self { code, message: error.message, retry_after, stale },
            None => Self {
                code: ErrorCode::Internal,
                message: format!("{}: {}", error.code, error.message),
                retry_after,
                stale,
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
            let hint = code.is_retryable().then_some(Duration::from_millis(70));
            let error = CallError::from(&crate::to_status(code, "because", hint));
            let message = "because".to_owned();
            let expected = CallError { code, message, retry_after: hint, stale: None };
            assert_eq!(error, expected);
            assert_eq!(CallError::from(v1::CallError::from(error)), expected);
        }
    }

    #[test]
    fn an_id_of_another_boot_round_trips_through_a_status_and_the_wire() {
        let stale = StaleId { id_boot: "01".repeat(4), boot_id: "02".repeat(16) };
        let code = ErrorCode::UnknownSequence;
        let error = CallError::from(&crate::stale_status(code, "gone", stale.clone()));
        assert_eq!(error.stale, Some(stale));
        assert_eq!(CallError::from(v1::CallError::from(error.clone())), error);
    }

    #[test]
    fn a_code_of_a_later_version_is_kept_in_the_message() {
        let later = v1::CallError { code: "NEW".to_owned(), ..Default::default() };
        let error = CallError::from(later);
        assert_eq!((error.code, error.message.as_str()), (ErrorCode::Internal, "NEW: "));
    }
}
