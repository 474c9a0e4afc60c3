//! From a request's metadata to a [`Call`].

use super::deadline::Deadline;
use crate::service::{Call, ServiceError};
use tonic::{Request, Status};

/// Namespace and deadline of a request.
pub(super) fn call<T>(request: &Request<T>) -> Result<Call, ServiceError> {
    let namespace = kvd_proto::namespace_of(request.metadata())?;
    let deadline = request.extensions().get::<Deadline>().map(|deadline| deadline.0);
    Ok(Call { namespace, deadline, waits_for_queue: false })
}

/// The wire's form of an error.
pub(super) fn status(error: &ServiceError) -> Status {
    match error.stale_id() {
        None => kvd_proto::to_status(error.code(), &error.to_string(), None),
        Some(stale) => kvd_proto::stale_status(error.code(), &error.to_string(), stale.clone()),
    }
}
