//! Lets requests of gRPC pass or refuses them, before their messages are read: every rpc comes by
//! here, those of regions too.

use super::connection;
use super::measure::refuse_call;
use crate::access::{AccessPrincipal, AccessRequest, GrantedCall, PrincipalCall, find_rights};
use crate::metrics::RPCS;
use crate::service::{CallOwner, Service, ServiceError};
use http::header::AUTHORIZATION;
use kvd_proto::{RpcKind, rpc_kind};
use std::sync::Arc;
use tonic::Status;

/// Whose request it is: an extension of it.
#[derive(Clone)]
pub(super) struct CallerPrincipal(pub(super) Arc<AccessPrincipal>);

/// Probes ask this without saying who they are.
const HEALTH: &str = "/grpc.health.v1.Health/";
/// The service that has rights of each rpc.
const KVD: &str = "/kvd.v1.Kvd/";
/// Any other service.
const REFLECTION: &str = "Reflection";

/// The rest of a request that was let in.
#[derive(Default)]
pub(super) struct AdmittedRequest {
    /// Granted to a stream, which ends when it is taken back.
    pub(super) granted: Option<GrantedCall>,
    /// Its place among the calls of its principal.
    pub(super) call: Option<PrincipalCall>,
}

/// Lets a request pass, and notes whose it is. What it shows for that is gone after.
pub(super) fn admit_request<B>(
    service: &Service,
    request: &mut http::Request<B>,
) -> Result<AdmittedRequest, Status> {
    let path = request.uri().path();
    if path.starts_with(HEALTH) {
        return Ok(AdmittedRequest::default());
    }
    let rpc = path.strip_prefix(KVD).unwrap_or(REFLECTION);
    let checked = check_request(service, request, rpc);
    let AdmittedCall { principal, kept } = checked.map_err(|error| {
        let name = find_rights(rpc).rpc_name();
        match RPCS.contains(&name) {
            true => refuse_call(service.metrics(), name, &error),
            false => super::call::wire_status(&error),
        }
    })?;
    request.headers_mut().remove(AUTHORIZATION);
    if let Some(principal) = principal {
        request.extensions_mut().insert(CallerPrincipal(principal));
    }
    Ok(kept)
}

/// A request that was let in.
struct AdmittedCall {
    principal: Option<Arc<AccessPrincipal>>,
    kept: AdmittedRequest,
}

fn check_request<B>(
    service: &Service,
    request: &http::Request<B>,
    rpc: &str,
) -> Result<AdmittedCall, ServiceError> {
    let namespace = kvd_proto::namespace_of_headers(request.headers())?;
    let owner = connection::owner_of(request.extensions()).cloned();
    let owner = owner.unwrap_or_else(CallOwner::in_process);
    let authorization = request.headers().get(AUTHORIZATION).map(http::HeaderValue::as_bytes);
    let (peer, namespace) = (owner.call_peer(), &namespace);
    let asked = AccessRequest { peer, authorization, rpc, namespace };
    let principal = service.access_control().check_call(&asked)?;
    let is_watched = principal.is_some() && rpc_kind(rpc) != Some(RpcKind::Unary);
    let granted = is_watched.then(|| GrantedCall::of_request(&asked, owner.clone()));
    let begin = |of| service.access_control().begin_call(&asked, of);
    let call = principal.as_ref().map(begin).transpose()?;
    Ok(AdmittedCall { principal, kept: AdmittedRequest { granted, call } })
}
