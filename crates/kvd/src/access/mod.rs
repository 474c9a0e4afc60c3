//! Who may come in: the one place that lets a call pass or refuses it, by who its peer is, what the
//! rpc needs and which namespace it names. It reads no payload and keeps no token.

mod audit;
mod granted;
mod limits;
mod peer;
mod principals;
mod rights;
mod token;

pub(crate) use audit::AuditLog;
use audit::RefusedCall;
pub(crate) use granted::GrantedCall;
pub(crate) use limits::PrincipalCall;
pub(crate) use peer::ConnectionPeer;
pub(crate) use peer::{CertificateNames, PeerDoor};
pub(crate) use principals::AccessPrincipal;
pub(crate) use principals::PrincipalTable;
pub(crate) use rights::{RpcRights, find_rights};
pub(crate) use token::NewToken;

use crate::metrics::{Metric, Metrics};
use crate::service::ServiceError;
use kvd_core::{ErrorCode, Namespace};
use metrics::Counter;
use parking_lot::RwLock;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;

/// A call that asks to be let in.
pub(crate) struct AccessRequest<'a> {
    pub(crate) peer: &'a ConnectionPeer,
    /// The value of `authorization`, where the call has one.
    pub(crate) authorization: Option<&'a [u8]>,
    /// Name of the rpc.
    pub(crate) rpc: &'a str,
    pub(crate) namespace: &'a Namespace,
}

/// Principals, and the log of what they were refused.
pub(crate) struct AccessControl {
    /// None: no principals are configured, and whoever reaches a door may use the daemon.
    file: Option<PathBuf>,
    table: RwLock<Arc<PrincipalTable>>,
    /// Told of every other table.
    replaced: watch::Sender<()>,
    audit: AuditLog,
    refused: RefusalCounts,
}

/// Refused calls, by reason.
struct RefusalCounts {
    unauthenticated: Counter,
    role: Counter,
    namespace: Counter,
    limit: Counter,
}

impl RefusalCounts {
    fn new(metrics: &Metrics) -> Self {
        let counter = |reason| {
            let counter = metrics.counter(Metric::AccessRefusalsTotal, &[("reason", reason)]);
            counter.increment(0);
            counter
        };
        Self {
            unauthenticated: counter("unauthenticated"),
            role: counter("role"),
            namespace: counter("namespace"),
            limit: counter("limit"),
        }
    }

    fn count_refusal(&self, code: ErrorCode) {
        match code {
            ErrorCode::Unauthenticated => self.unauthenticated.increment(1),
            ErrorCode::PermissionDenied => self.role.increment(1),
            ErrorCode::QuotaExceeded => self.limit.increment(1),
            _ => self.namespace.increment(1),
        }
    }
}

impl AccessControl {
    /// One over the principals of a file, or open to all without.
    pub(crate) fn new(
        file: Option<PathBuf>,
        table: PrincipalTable,
        audit: AuditLog,
        metrics: &Metrics,
    ) -> Self {
        let (table, refused) = (RwLock::new(Arc::new(table)), RefusalCounts::new(metrics));
        Self { file, table, replaced: watch::Sender::new(()), audit, refused }
    }

    /// The file of principals.
    pub(crate) fn principals_file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Takes another table; calls under way go on, and streams whose principal may do so.
    pub(crate) fn replace_table(&self, table: PrincipalTable) {
        let mut current = self.table.write();
        *current = Arc::new(table.carry_over(&current));
        drop(current);
        self.replaced.send_replace(());
    }

    /// The log of refusals and of what operators do.
    pub(crate) fn audit_log(&self) -> &AuditLog {
        &self.audit
    }

    /// Lets a call pass; who it is of, where principals are configured.
    ///
    /// # Errors
    /// `UNAUTHENTICATED`, `PERMISSION_DENIED` or `NAMESPACE_DENIED`, with what to do.
    pub(crate) fn check_call(
        &self,
        request: &AccessRequest<'_>,
    ) -> Result<Option<Arc<AccessPrincipal>>, ServiceError> {
        let rights = find_rights(request.rpc);
        let principal = match self.check_rights(request, rights) {
            Ok(principal) => principal,
            Err(denied) => return Err(self.note_refusal(request, denied)),
        };
        if rights.is_administrative {
            self.audit.log_call(request, principal.as_ref().map(|principal| &principal.name[..]));
        }
        Ok(principal)
    }

    /// Counts a call that was let in until what this returns is dropped.
    ///
    /// # Errors
    /// `QUOTA_EXCEEDED` where its principal has as many as it may.
    pub(crate) fn begin_call(
        &self,
        request: &AccessRequest<'_>,
        principal: &Arc<AccessPrincipal>,
    ) -> Result<PrincipalCall, ServiceError> {
        principal.begin_call().map_err(|error| {
            self.note_refusal(request, DeniedCall { error, principal: Some(principal.clone()) })
        })
    }

    /// Counts and logs a refusal.
    fn note_refusal(&self, request: &AccessRequest<'_>, denied: DeniedCall) -> ServiceError {
        let DeniedCall { error, principal } = denied;
        self.refused.count_refusal(error.code());
        let principal = principal.as_ref().map(|principal| &principal.name[..]);
        self.audit.log_refusal(&RefusedCall { request, principal, code: error.code() });
        error
    }

    fn check_rights(
        &self,
        request: &AccessRequest<'_>,
        rights: &RpcRights,
    ) -> Result<Option<Arc<AccessPrincipal>>, DeniedCall> {
        if self.file.is_none() {
            return Ok(None);
        }
        let table = self.table.read().clone();
        let found = table.find_principal(request.peer, request.authorization);
        Self::check_principal(request, rights, found).map(Some)
    }

    /// Whether the principal that was found may do that.
    fn check_principal(
        request: &AccessRequest<'_>,
        rights: &RpcRights,
        found: Result<Arc<AccessPrincipal>, ServiceError>,
    ) -> Result<Arc<AccessPrincipal>, DeniedCall> {
        let principal = found.map_err(|error| DeniedCall { error, principal: None })?;
        let denied = |error| DeniedCall { error, principal: Some(principal.clone()) };
        principal.check_role(request.rpc, rights.roles).map_err(denied)?;
        if rights.is_of_namespace {
            principal.check_namespace(request.namespace).map_err(denied)?;
        }
        Ok(principal)
    }
}

/// A call that is not let in, and who it is of, as far as that is known.
struct DeniedCall {
    error: ServiceError,
    principal: Option<Arc<AccessPrincipal>>,
}
