//! Bytes of requests and their answers that are in the daemon at once: a share of each connection,
//! one of each namespace, and all of them together.

use super::ServiceError;
use kvd_core::ErrorCode;
use kvd_store::{NamespaceAccount, QuotaKind, QuotaShare};
use std::sync::Arc;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Bytes of one permit: a semaphore counts in 32 bits what one request takes.
const UNIT_BYTES: u64 = 1024;

/// A share of the budgets; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct InFlight {
    _principal: Option<OwnedSemaphorePermit>,
    _namespace: Option<NamespaceBytes>,
    _connection: OwnedSemaphorePermit,
    _share: Option<OwnedSemaphorePermit>,
    _all: OwnedSemaphorePermit,
}

/// Bytes that requests may hold together, from the length of their message until the last byte of
/// their answer is sent.
#[derive(Clone, Debug)]
pub(crate) struct ByteBudget {
    permits: Arc<Semaphore>,
    /// Permits in all.
    units: usize,
    max_bytes: u64,
    /// The setting that says how much it is.
    key: &'static str,
}

impl ByteBudget {
    pub(crate) fn new(key: &'static str, max_bytes: u64) -> Self {
        let permits = usize::try_from(max_bytes / UNIT_BYTES).unwrap_or(usize::MAX);
        let units = permits.min(Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(units)), units, max_bytes, key }
    }

    /// Whether somebody else has it, or something of it.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.permits) > 1
    }

    /// Bytes that are taken now, in whole units.
    pub(crate) fn taken_bytes(&self) -> u64 {
        (self.units - self.permits.available_permits()) as u64 * UNIT_BYTES
    }

    fn units_of(bytes: u64) -> u32 {
        u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
    }

    fn take_permits(&self, bytes: u64) -> Result<OwnedSemaphorePermit, ServiceError> {
        let permits = self.permits.clone().try_acquire_many_owned(Self::units_of(bytes));
        permits.map_err(|_| self.full_error(bytes))
    }

    async fn wait_permits(&self, bytes: u64) -> Result<OwnedSemaphorePermit, ServiceError> {
        let units = Self::units_of(bytes);
        if units as usize > self.units {
            return Err(self.full_error(bytes));
        }
        self.permits.clone().acquire_many_owned(units).await.map_err(|_| self.full_error(bytes))
    }

    fn full_error(&self, bytes: u64) -> ServiceError {
        let (key, max, taken) = (self.key, self.max_bytes, self.taken_bytes());
        let message = format!(
            "{bytes} bytes more would be over {key} = {max}, of which {taken} are taken; retry later"
        );
        ServiceError::new(ErrorCode::QueueFull, message)
    }
}

/// Bytes that calls of a namespace which has a quota may hold together.
#[derive(Clone, Debug)]
pub(crate) struct NamespaceBudget {
    pub(crate) account: Arc<NamespaceAccount>,
    /// Told when bytes of any namespace come back.
    pub(crate) freed: Arc<Notify>,
}

/// A share of a [`NamespaceBudget`].
#[derive(Debug)]
struct NamespaceBytes {
    share: Option<QuotaShare>,
    freed: Arc<Notify>,
}

impl Drop for NamespaceBytes {
    fn drop(&mut self) {
        drop(self.share.take());
        self.freed.notify_waiters();
    }
}

impl NamespaceBudget {
    fn try_share(&self, bytes: u64) -> Option<NamespaceBytes> {
        let bytes = bytes.div_ceil(UNIT_BYTES).saturating_mul(UNIT_BYTES);
        let share = QuotaShare::try_new(&self.account, QuotaKind::InflightBytes, bytes)?;
        Some(NamespaceBytes { share: Some(share), freed: self.freed.clone() })
    }

    fn take_bytes(&self, bytes: u64) -> Result<NamespaceBytes, ServiceError> {
        let refuse = || self.account.refuse_amount(QuotaKind::InflightBytes, bytes);
        self.try_share(bytes).ok_or_else(|| refuse().into())
    }

    async fn wait_bytes(&self, bytes: u64) -> Result<NamespaceBytes, ServiceError> {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // What comes back from here on is not missed.
            freed.as_mut().enable();
            if let Some(share) = self.try_share(bytes) {
                return Ok(share);
            }
            let allowed = self.account.limit_of(QuotaKind::InflightBytes).unwrap_or(u64::MAX);
            if bytes > allowed {
                return self.take_bytes(bytes);
            }
            freed.await;
        }
    }
}

/// The budgets that a request of a connection takes from.
#[derive(Clone, Debug)]
pub(crate) struct ByteBudgets {
    /// By its limits.
    pub(crate) principal: Option<ByteBudget>,
    /// By its quota.
    pub(crate) namespace: Option<NamespaceBudget>,
    pub(crate) connection: ByteBudget,
    /// The namespace's share of all; none where it may take all.
    pub(crate) share: Option<ByteBudget>,
    pub(crate) all: ByteBudget,
}

impl ByteBudgets {
    /// Takes a share, or refuses: what waits here would hold its bytes all the same.
    ///
    /// # Errors
    /// `QUEUE_FULL`, by the budget of the connection, the namespace or all, or `QUOTA_EXCEEDED`.
    pub(crate) fn take_share(&self, bytes: u64) -> Result<InFlight, ServiceError> {
        let own = self.principal.as_ref().map(|of| of.take_permits(bytes)).transpose()?;
        let namespace = self.namespace.as_ref().map(|of| of.take_bytes(bytes)).transpose()?;
        let connection = self.connection.take_permits(bytes)?;
        let share = self.share.as_ref().map(|of| of.take_permits(bytes)).transpose()?;
        let all = self.all.take_permits(bytes)?;
        Ok(InFlight {
            _principal: own,
            _namespace: namespace,
            _connection: connection,
            _share: share,
            _all: all,
        })
    }

    /// Waits for a share, in the order of those who wait: for what holds nothing yet.
    ///
    /// # Errors
    /// `QUEUE_FULL` or `QUOTA_EXCEEDED` when a budget is smaller as a whole.
    pub(crate) async fn wait_share(&self, bytes: u64) -> Result<InFlight, ServiceError> {
        let own = match &self.principal {
            Some(of) => Some(of.wait_permits(bytes).await?),
            None => None,
        };
        let namespace = match &self.namespace {
            Some(of) => Some(of.wait_bytes(bytes).await?),
            None => None,
        };
        let connection = self.connection.wait_permits(bytes).await?;
        let share = match &self.share {
            Some(of) => Some(of.wait_permits(bytes).await?),
            None => None,
        };
        let all = self.all.wait_permits(bytes).await?;
        Ok(InFlight {
            _principal: own,
            _namespace: namespace,
            _connection: connection,
            _share: share,
            _all: all,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budgets(connection: u64, all: u64) -> ByteBudgets {
        let connection = ByteBudget::new("limits.connection_bytes_max", connection);
        let all = ByteBudget::new("limits.inflight_bytes_max", all);
        ByteBudgets { principal: None, namespace: None, connection, share: None, all }
    }

    #[test]
    fn shares_are_refused_when_used_up_and_come_back() {
        let budgets = budgets(20 << 10, 10 << 10);
        let first = budgets.take_share(1).unwrap();
        assert_eq!(budgets.all.taken_bytes(), 1 << 10);
        let second = budgets.take_share(9 << 10).unwrap();
        let error = budgets.take_share(1).unwrap_err();
        assert_eq!(error.code(), ErrorCode::QueueFull);
        assert!(error.to_string().contains("limits.inflight_bytes_max = 10240"), "{error}");
        drop(first);
        drop(budgets.take_share(1024).unwrap());
        drop(second);
        assert_eq!([&budgets.all, &budgets.connection].map(ByteBudget::taken_bytes), [0, 0]);
        drop(budgets.take_share(10 << 10).unwrap());
        assert!(budgets.take_share(u64::MAX).is_err());
    }

    #[test]
    fn one_connection_leaves_the_others_theirs() {
        let greedy = budgets(4 << 10, 10 << 10);
        let all = greedy.all.clone();
        let other = ByteBudgets { all, ..budgets(4 << 10, 0) };
        let _held = greedy.take_share(4 << 10).unwrap();
        let error = greedy.take_share(1).unwrap_err();
        assert!(error.to_string().contains("limits.connection_bytes_max = 4096"), "{error}");
        other.take_share(4 << 10).unwrap();
    }

    #[tokio::test]
    async fn who_waits_has_a_share_when_one_comes_back_unless_it_never_can() {
        let budgets = budgets(4 << 10, 10 << 10);
        let held = budgets.take_share(4 << 10).unwrap();
        let waiting = tokio::spawn({
            let budgets = budgets.clone();
            async move { budgets.wait_share(2 << 10).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(held);
        let share = waiting.await.unwrap().unwrap();
        assert_eq!(budgets.all.taken_bytes(), 2 << 10);
        drop(share);
        assert_eq!(budgets.wait_share(5 << 10).await.unwrap_err().code(), ErrorCode::QueueFull);
    }

    #[tokio::test]
    async fn a_namespace_at_its_quota_is_refused_or_waits_and_others_are_not() {
        let (table, freed) = (kvd_store::QuotaTable::new(1), Arc::new(Notify::new()));
        let of = |name: &str| {
            let name = kvd_core::Namespace::new(name).unwrap();
            let mut limits = kvd_store::QuotaLimits::default();
            limits.set_limit(QuotaKind::InflightBytes, Some(4 << 10));
            table.set_limits(&name, &limits);
            let account = table.open_account(&name);
            let namespace = Some(NamespaceBudget { account, freed: freed.clone() });
            ByteBudgets { namespace, ..budgets(64 << 10, 64 << 10) }
        };
        let (flooder, victim) = (of("flooder"), of("victim"));
        let held = flooder.take_share(4 << 10).unwrap();
        let error = flooder.take_share(1).unwrap_err();
        assert_eq!(error.code(), ErrorCode::QuotaExceeded);
        assert!(error.to_string().contains("has 4096 of the 4096"), "{error}");
        assert!(error.retry_hint().is_some());
        drop(victim.take_share(4 << 10).unwrap());
        let waiting = tokio::spawn({
            let flooder = flooder.clone();
            async move { flooder.wait_share(1 << 10).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(held);
        waiting.await.unwrap().unwrap();
        // More than all of it never comes: waiting is not offered.
        let error = flooder.wait_share(5 << 10).await.unwrap_err();
        assert_eq!((error.code(), error.retry_hint()), (ErrorCode::QuotaExceeded, None));
    }
}
