//! From a request's metadata to a [`CallContext`].

use super::admission::CallerPrincipal;
use super::bytes::ByteMeter;
use super::connection;
use super::layer::RequestNotes;
use crate::service::{CallContext, ServiceError};
use crate::telemetry::read_parent;
use tonic::{Request, Status};

/// Namespace, deadline and connection of a request.
pub(super) fn read_call<T>(request: &Request<T>) -> Result<CallContext, ServiceError> {
    let namespace = kvd_proto::namespace_of(request.metadata())?;
    let extensions = request.extensions();
    let notes = extensions.get::<RequestNotes>();
    let deadline = notes.and_then(|notes| notes.deadline).map(|deadline| deadline.0);
    let is_message_admitted = notes.is_some();
    let principal = extensions.get::<CallerPrincipal>().map(|caller| caller.0.clone());
    let trace_parent = read_parent(request.metadata());
    let in_process = CallContext::new(namespace);
    let call = CallContext { deadline, is_message_admitted, principal, trace_parent, ..in_process };
    Ok(match connection::owner_of(extensions) {
        Some(owner) => CallContext { owner: owner.clone(), ..call },
        None => call,
    })
}

/// Meter of a request's bytes.
pub(super) fn find_meter<T>(request: &Request<T>) -> ByteMeter {
    let notes = request.extensions().get::<RequestNotes>();
    notes.map(|notes| notes.meter.clone()).unwrap_or_default()
}

/// The wire's form of an error.
pub(super) fn wire_status(error: &ServiceError) -> Status {
    match error.stale_id() {
        None => kvd_proto::to_status(error.code(), &error.to_string(), error.retry_hint()),
        Some(stale) => kvd_proto::stale_status(error.code(), &error.to_string(), stale.clone()),
    }
}
