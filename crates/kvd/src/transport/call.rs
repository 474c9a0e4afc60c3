//! From a request's metadata to a [`Call`].

use super::bytes::Meter;
use super::connection;
use super::deadline::Deadline;
use crate::service::{Call, ServiceError};
use tonic::{Request, Status};

/// Namespace, deadline and connection of a request.
pub(super) fn call<T>(request: &Request<T>) -> Result<Call, ServiceError> {
    let namespace = kvd_proto::namespace_of(request.metadata())?;
    let extensions = request.extensions();
    let deadline = extensions.get::<Deadline>().map(|deadline| deadline.0);
    let is_message_admitted = extensions.get::<Meter>().is_some();
    let call = Call { deadline, is_message_admitted, ..Call::new(namespace) };
    Ok(match connection::owner(extensions) {
        Some(owner) => Call { owner: owner.clone(), ..call },
        None => call,
    })
}

/// Meter of a request's bytes.
pub(super) fn meter<T>(request: &Request<T>) -> Meter {
    request.extensions().get::<Meter>().cloned().unwrap_or_default()
}

/// The wire's form of an error.
pub(super) fn status(error: &ServiceError) -> Status {
    match error.stale_id() {
        None => kvd_proto::to_status(error.code(), &error.to_string(), error.retry_hint()),
        Some(stale) => kvd_proto::stale_status(error.code(), &error.to_string(), stale.clone()),
    }
}
