//! How a stream tells that a message was refused: in its metadata, as it holds for every message.

use crate::RequestError;
use tonic::metadata::MetadataMap;

/// Metadata key of a stream's [`StreamErrors`].
pub const STREAM_ERRORS_KEY: &str = "kvd-stream-errors";
/// Its value for [`StreamErrors::PerMessage`].
pub const STREAM_ERRORS_PER_MESSAGE: &str = "per-message";

/// Behaviour of a stream after it refused one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamErrors {
    /// The stream ends with the refusal as its status.
    EndStream,
    /// The answer to that message carries the refusal; the stream goes on.
    PerMessage,
}

/// The behaviour that `metadata` asks for; [`StreamErrors::EndStream`] when it asks for nothing.
///
/// # Errors
/// When the value is another than [`STREAM_ERRORS_PER_MESSAGE`].
pub fn stream_errors_of(metadata: &MetadataMap) -> Result<StreamErrors, RequestError> {
    let mut values = metadata.get_all(STREAM_ERRORS_KEY).iter().peekable();
    if values.peek().is_none() {
        return Ok(StreamErrors::EndStream);
    }
    if values.all(|value| value == STREAM_ERRORS_PER_MESSAGE) {
        return Ok(StreamErrors::PerMessage);
    }
    let reason = format!("must be {STREAM_ERRORS_PER_MESSAGE:?}, or left out");
    Err(RequestError::invalid_field(STREAM_ERRORS_KEY, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(values: &[&'static str]) -> Result<StreamErrors, RequestError> {
        let mut metadata = MetadataMap::new();
        for value in values {
            metadata.append(STREAM_ERRORS_KEY, value.parse().unwrap());
        }
        stream_errors_of(&metadata)
    }

    #[test]
    fn errors_per_message_are_asked_for_by_name() {
        assert_eq!(asked(&[]), Ok(StreamErrors::EndStream));
        assert_eq!(asked(&["per-message"]), Ok(StreamErrors::PerMessage));
        for bad in [&["yes"][..], &[""], &["per-message", "end"]] {
            let error = asked(bad).unwrap_err().to_string();
            assert!(error.starts_with("kvd-stream-errors: must be"), "{error}");
        }
    }
}
