//! The one error of this crate.

use kvd_core::{Coded, ErrorCode};
use kvd_proto::RequestError;
use kvd_proto::domain::CallError;
use prost::Message;
use std::time::Duration;
use tonic::{Code, Status};

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", self.code_label())]
#[non_exhaustive]
pub struct ClientError {
    /// kvd's own code. `None` when the failure did not come from kvd: the connection broke, or
    /// something between answered.
    pub code: Option<ErrorCode>,
    /// The gRPC code, for failures without a kvd code.
    pub grpc: Code,
    /// For people.
    pub message: String,
    /// How long the daemon asks to wait before the next attempt.
    pub retry_after: Option<Duration>,
    /// That the daemon is another than the one which gave the ids of the call. Nothing is left of
    /// what that one held: register models, open sequences and store again.
    pub restarted: Option<DaemonRestart>,
}

/// Two boots of a daemon: ids of the old one mean nothing in the new.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DaemonRestart {
    /// Boot id of the daemon that gave the ids; its first eight digits, which ids carry, where
    /// this client never saw it whole.
    pub old: String,
    /// Boot id of the daemon that serves now.
    pub new: String,
}

impl ClientError {
    /// A daemon that is not the one which this client knew. Calls without old ids succeed.
    pub(crate) fn other_boot(old: &str, new: &str) -> Self {
        let message = format!(
            "the daemon was restarted (boot {old} before, {new} now), and nothing is left of what \
             it held: register models, open sequences and store again"
        );
        let restarted = Some(DaemonRestart { old: old.to_owned(), new: new.to_owned() });
        Self { restarted, ..Self::lost_connection(message) }
    }

    /// Whether the same call may succeed later, unchanged: the daemon said so, or it could not be
    /// reached.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self.code {
            Some(ErrorCode::QuotaExceeded) => self.retry_after.is_some(),
            Some(code) => code.is_retryable(),
            None => self.grpc == Code::Unavailable,
        }
    }

    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let grpc = kvd_proto::grpc_code(code);
        Self { code: Some(code), grpc, message: message.into(), retry_after: None, restarted: None }
    }

    /// Refuses a message that the encoder would refuse: it can only break the connection's stream
    /// off, which reaches the caller as a protocol error without a reason.
    pub(crate) fn check_size(message: &impl Message, max: usize) -> Result<(), Self> {
        let bytes = message.encoded_len();
        if bytes <= max {
            return Ok(());
        }
        let text = format!("the message has {bytes} bytes; this client sends at most {max}");
        Err(Self::new(ErrorCode::MessageTooLarge, text))
    }

    pub(crate) fn deadline_exceeded(timeout: Duration) -> Self {
        Self::new(ErrorCode::DeadlineExceeded, format!("no answer within {timeout:?}"))
    }

    /// A reply that breaks the protocol. Not the caller's fault, whatever `error` would mean in a
    /// request.
    pub(crate) fn invalid_reply(error: &RequestError) -> Self {
        Self::new(ErrorCode::Internal, format!("malformed reply ({}): {error}", error.code()))
    }

    pub(crate) fn from_transport(error: &tonic::transport::Error) -> Self {
        Self::lost_connection(with_causes(error.to_string(), std::error::Error::source(error)))
    }

    /// A connection that broke.
    pub(crate) fn lost_connection(message: String) -> Self {
        let grpc = Code::Unavailable;
        Self { code: None, grpc, message, retry_after: None, restarted: None }
    }

    fn code_label(&self) -> String {
        match self.code {
            Some(code) => code.name().to_owned(),
            None => format!("{:?}", self.grpc),
        }
    }
}

/// The refusal of one message of a stream, or of one query of a batch.
impl From<CallError> for ClientError {
    fn from(error: CallError) -> Self {
        let CallError { code, message, retry_after, stale } = error;
        let restarted = stale.map(|stale| DaemonRestart { old: stale.id_boot, new: stale.boot_id });
        Self { retry_after, restarted, ..Self::new(code, message) }
    }
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        // A status with a cause was made here and not received: the connection broke under a call,
        // or before it was sent.
        let cause = std::error::Error::source(&status);
        let broke = match status.code() {
            Code::Unknown => true,
            Code::Cancelled => status.message() == "operation was canceled",
            _ => false,
        };
        if broke && cause.is_some() {
            return Self::lost_connection(with_causes(status.message().to_owned(), cause));
        }
        Self {
            code: kvd_proto::error_code(&status).or_else(|| runtime_code(&status)),
            grpc: status.code(),
            retry_after: kvd_proto::retry_after(&status),
            restarted: kvd_proto::stale_id(&status)
                .map(|stale| DaemonRestart { old: stale.id_boot, new: stale.boot_id }),
            message: status.message().to_owned(),
        }
    }
}

/// A message with those of its causes. The transport's own text is only "transport error".
fn with_causes(
    mut message: String,
    mut cause: Option<&(dyn std::error::Error + 'static)>,
) -> String {
    while let Some(next) = cause {
        let text = next.to_string();
        if !message.ends_with(&text) {
            message = format!("{message}: {text}");
        }
        cause = next.source();
    }
    message
}

/// The code of what the gRPC runtime raises before kvd sees a call, or after it answered. tonic
/// attaches no details to these, and marks the size limit only by its text.
fn runtime_code(status: &Status) -> Option<ErrorCode> {
    let timed_out = || status.message() == tonic::TimeoutExpired(()).to_string();
    let too_large = || {
        let limits = ["message length too large", "exceeded while decompressing message"];
        limits.iter().any(|limit| status.message().contains(limit))
    };
    match status.code() {
        Code::DeadlineExceeded => Some(ErrorCode::DeadlineExceeded),
        Code::Cancelled if timed_out() => Some(ErrorCode::DeadlineExceeded),
        Code::Cancelled => Some(ErrorCode::Cancelled),
        Code::OutOfRange | Code::ResourceExhausted if too_large() => {
            Some(ErrorCode::MessageTooLarge)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_kvd_keeps_code_hint_and_message() {
        let hint = Duration::from_millis(70);
        let error: ClientError =
            kvd_proto::to_status(ErrorCode::PoolFull, "3 MiB short", Some(hint)).into();
        assert_eq!(error.code, Some(ErrorCode::PoolFull));
        assert_eq!(error.retry_after, Some(hint));
        assert!(error.is_retryable());
        assert_eq!(error.to_string(), "POOL_FULL: 3 MiB short");
    }

    #[test]
    fn a_stale_id_is_a_restart_and_no_reason_to_try_again() {
        let stale = kvd_proto::StaleId { id_boot: "01".repeat(4), boot_id: "02".repeat(16) };
        let code = ErrorCode::UnknownModel;
        let error = ClientError::from(kvd_proto::stale_status(code, "gone", stale));
        assert_eq!(error.code, Some(code));
        let restarted = error.restarted.as_ref().unwrap();
        assert_eq!((&restarted.old, &restarted.new), (&"01".repeat(4), &"02".repeat(16)));
        assert!(!error.is_retryable());
        let plain = ClientError::from(kvd_proto::to_status(code, "never registered", None));
        assert_eq!(plain.restarted, None);
    }

    #[test]
    fn only_unavailable_is_retryable_without_a_kvd_code() {
        assert!(ClientError::from(Status::unavailable("connection reset")).is_retryable());
        let error = ClientError::from(Status::unknown("?"));
        assert!(!error.is_retryable());
        assert_eq!(error.to_string(), "Unknown: ?");
    }

    #[test]
    fn a_connection_that_breaks_under_a_call_is_a_reason_to_try_again() {
        let broken = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "reset by peer");
        let error = ClientError::from(Status::from_error(Box::new(broken)));
        assert_eq!(error.to_string(), "Unavailable: reset by peer");
        assert!(error.is_retryable(), "{error:?}");
    }

    #[test]
    fn runtime_deadline_has_the_code_of_a_deadline() {
        let expired = tonic::TimeoutExpired(()).to_string();
        let error = ClientError::from(Status::cancelled(expired));
        assert_eq!(error.code, Some(ErrorCode::DeadlineExceeded));
        let bomb =
            "Error decompressing: size limit, of 9 bytes, exceeded while decompressing message";
        let error = ClientError::from(Status::resource_exhausted(bomb));
        assert_eq!(error.code, Some(ErrorCode::MessageTooLarge));
        let error = ClientError::from(Status::cancelled("caller left"));
        assert_eq!(error.code, Some(ErrorCode::Cancelled));
    }
}
