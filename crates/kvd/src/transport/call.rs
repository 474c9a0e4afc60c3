//! From a request's metadata to a [`Call`].

use crate::service::{Call, ServiceError};
use std::time::{Duration, Instant};
use tonic::Status;
use tonic::metadata::MetadataMap;

/// Namespace and deadline of a request.
pub(super) fn call(metadata: &MetadataMap) -> Result<Call, ServiceError> {
    let namespace = kvd_proto::namespace_of(metadata)?;
    // A malformed timeout is ignored, as the gRPC specification lets a server do.
    let timeout = metadata.get("grpc-timeout").and_then(|value| parse(value.to_str().ok()?));
    Ok(Call {
        namespace,
        deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
    })
}

/// `TimeoutValue TimeoutUnit` of the gRPC over HTTP/2 specification.
fn parse(text: &str) -> Option<Duration> {
    let (value, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value: u64 = value.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(value.saturating_mul(60))),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

/// The wire's form of an error.
pub(super) fn status(error: &ServiceError) -> Status {
    match error.stale_id() {
        None => kvd_proto::status(error.code(), &error.to_string(), None),
        Some(stale) => kvd_proto::stale_status(error.code(), &error.to_string(), stale.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_every_unit() {
        assert_eq!(parse("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(parse("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse("0n"), Some(Duration::ZERO));
        for bad in ["", "5", "m", "-1S", "1d", "1.5S", "ü"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
