//! Bytes of requests and their answers that are in the daemon at once.

use super::ServiceError;
use kvd_core::ErrorCode;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of one permit: a semaphore counts in 32 bits what one request takes.
const UNIT_BYTES: u64 = 1024;

/// A share of the budget; dropping it gives it back.
pub(super) type InFlight = OwnedSemaphorePermit;

/// What all requests that wait for the device, or are on it, may hold together.
pub(super) struct ByteBudget {
    permits: Arc<Semaphore>,
    /// Permits in all.
    units: usize,
    max_bytes: u64,
}

impl ByteBudget {
    pub(super) fn new(max_bytes: u64) -> Self {
        let permits = usize::try_from(max_bytes / UNIT_BYTES).unwrap_or(usize::MAX);
        let units = permits.min(Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(units)), units, max_bytes }
    }

    /// What is taken now, in whole units.
    pub(super) fn taken_bytes(&self) -> u64 {
        (self.units - self.permits.available_permits()) as u64 * UNIT_BYTES
    }

    /// Takes a share, or refuses: what waits here would hold its bytes all the same.
    pub(super) fn take(&self, bytes: u64) -> Result<InFlight, ServiceError> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX);
        self.permits.clone().try_acquire_many_owned(units).map_err(|_| {
            let message = format!(
                "{bytes} bytes more would be over limits.inflight_bytes_max = {}; retry later",
                self.max_bytes
            );
            ServiceError::new(ErrorCode::QueueFull, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_refused_when_used_up_and_come_back() {
        let budget = ByteBudget::new(10 << 10);
        let first = budget.take(1).unwrap();
        assert_eq!(budget.taken_bytes(), 1 << 10);
        let second = budget.take(9 << 10).unwrap();
        let error = budget.take(1).unwrap_err();
        assert_eq!(error.code(), ErrorCode::QueueFull);
        assert!(error.to_string().contains("limits.inflight_bytes_max = 10240"), "{error}");
        drop(first);
        drop(budget.take(1024).unwrap());
        drop(second);
        assert_eq!(budget.taken_bytes(), 0);
        drop(budget.take(10 << 10).unwrap());
        assert!(budget.take(u64::MAX).is_err());
    }
}
