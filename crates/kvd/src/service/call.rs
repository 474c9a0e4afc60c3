//! The caller of a request, and its deadline.

use super::ServiceError;
use super::budget::ByteBudget;
use crate::access::{AccessPrincipal, ConnectionPeer, PrincipalCall};
use kvd_core::{ErrorCode, Namespace};
use opentelemetry::trace::SpanContext;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

/// Whose jobs and bytes count together: a connection.
#[derive(Clone, Debug)]
pub struct CallOwner(Arc<OwnerState>);

#[derive(Debug)]
struct OwnerState {
    connection: u64,
    bytes: ByteBudget,
    peer: Arc<ConnectionPeer>,
}

impl CallOwner {
    /// Calls of this process, whose requests and answers may take so many bytes at once.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        Self::of_peer(bytes_max, Arc::new(ConnectionPeer::in_process()))
    }

    /// A new connection, whose requests and answers may take so many bytes at once.
    pub(crate) fn of_peer(bytes_max: u64, peer: Arc<ConnectionPeer>) -> Self {
        static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
        let connection = CONNECTIONS.fetch_add(1, Ordering::Relaxed);
        let bytes = ByteBudget::new("limits.connection_bytes_max", bytes_max);
        Self(Arc::new(OwnerState { connection, bytes, peer }))
    }

    /// Calls that come from this process, over no connection: together one owner.
    #[must_use]
    pub fn in_process() -> Self {
        static LOCAL: LazyLock<CallOwner> = LazyLock::new(|| CallOwner::new(u64::MAX));
        LOCAL.clone()
    }

    /// The connection's number.
    pub(crate) fn connection_number(&self) -> u64 {
        self.0.connection
    }

    /// The other end.
    pub(crate) fn call_peer(&self) -> &ConnectionPeer {
        &self.0.peer
    }

    /// The connection's share of bytes.
    pub(crate) fn byte_budget(&self) -> &ByteBudget {
        &self.0.bytes
    }
}

/// The part of a request that is the same for every rpc.
#[derive(Clone, Debug)]
pub struct CallContext {
    /// The tenant.
    pub namespace: Namespace,
    /// When the caller stops waiting.
    pub deadline: Option<Instant>,
    /// Whether it waits where the device's queue is full, as messages of a stream do, instead of
    /// being told `QUEUE_FULL`.
    pub waits_for_queue: bool,
    /// The connection that the call came over.
    pub owner: CallOwner,
    /// Whether the bytes of its message count against the budgets already.
    pub is_message_admitted: bool,
    /// Whose call it is; none where no principals are configured.
    pub(crate) principal: Option<Arc<AccessPrincipal>>,
    /// Its place among the calls of that principal, of a call through a region.
    pub(crate) _permit: Option<Arc<PrincipalCall>>,
    /// The caller's own span, of which the call's is a child.
    pub(crate) trace_parent: Option<SpanContext>,
}

impl CallContext {
    /// A caller without a deadline, in this process.
    #[must_use]
    pub fn new(namespace: Namespace) -> Self {
        let owner = CallOwner::in_process();
        Self {
            namespace,
            deadline: None,
            waits_for_queue: false,
            owner,
            is_message_admitted: false,
            principal: None,
            _permit: None,
            trace_parent: None,
        }
    }

    /// Whether the caller may know of a namespace.
    pub(super) fn may_use(&self, namespace: &Namespace) -> bool {
        let allows = |of: &Arc<AccessPrincipal>| of.namespaces.allow_namespace(namespace);
        self.principal.as_ref().is_none_or(allows)
    }

    /// Bytes of a payload of so many that are yet to be taken from the budgets.
    pub(super) fn bytes_to_admit(&self, bytes: u64) -> u64 {
        if self.is_message_admitted { 0 } else { bytes }
    }

    /// The message to a caller whose deadline has passed.
    pub(crate) const DEADLINE_PASSED: &str = "the deadline passed before the answer was ready";

    /// # Errors
    /// `DEADLINE_EXCEEDED` when the deadline has passed.
    pub fn check_deadline(&self) -> Result<(), ServiceError> {
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(Self::too_late());
        }
        Ok(())
    }

    /// The answer where a deadline passed before the work began.
    pub(crate) fn too_late() -> ServiceError {
        let message = "the deadline passed before the work began";
        ServiceError::new(ErrorCode::DeadlineExceeded, message)
    }
}
