//! Limits of a principal: calls and bytes that it has in the daemon at once, over all its
//! connections. They count from when a call is let in until its answer is sent.

use crate::config::SizeSetting;
use crate::service::{ByteBudget, ServiceError};
use kvd_core::ErrorCode;
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// When a call that was refused may find room.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// Limits as a file has them; absent: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PrincipalLimits {
    calls_max: Option<u64>,
    inflight_bytes_max: Option<SizeSetting>,
}

impl PrincipalLimits {
    pub(super) fn check_values(&self) -> Result<(), String> {
        if self.calls_max == Some(0) {
            return Err("limits.calls_max is 0: no call would be let in".to_owned());
        }
        Ok(())
    }
}

/// Work that a principal has in the daemon.
#[derive(Debug)]
pub(super) struct PrincipalLoad {
    limits: PrincipalLimits,
    /// Shared with later tables: calls under way count on.
    calls: Arc<AtomicU64>,
    bytes: Option<ByteBudget>,
}

impl PrincipalLoad {
    pub(super) fn new(limits: PrincipalLimits) -> Self {
        let budget = |max: SizeSetting| {
            ByteBudget::new("limits.inflight_bytes_max of its principal", max.as_u64())
        };
        let bytes = limits.inflight_bytes_max.map(budget);
        Self { limits, calls: Arc::default(), bytes }
    }

    /// This load's limits over what the principal has by an earlier table. Bytes count anew where
    /// their limit is another.
    pub(super) fn carry_over(&self, earlier: &Self) -> Self {
        let same = self.limits.inflight_bytes_max == earlier.limits.inflight_bytes_max;
        let bytes = if same { &earlier.bytes } else { &self.bytes };
        Self { limits: self.limits, calls: earlier.calls.clone(), bytes: bytes.clone() }
    }

    /// Bytes that its calls may have, where that is limited.
    pub(super) fn byte_budget(&self) -> Option<&ByteBudget> {
        self.bytes.as_ref()
    }

    /// Counts a call until what this returns is dropped.
    ///
    /// # Errors
    /// `QUOTA_EXCEEDED`, with what it has and may have.
    pub(super) fn begin_call(&self, name: &str) -> Result<PrincipalCall, ServiceError> {
        let max = self.limits.calls_max.unwrap_or(u64::MAX);
        let add = |calls: u64| (calls < max).then(|| calls + 1);
        let counted = self.calls.fetch_update(Relaxed, Relaxed, add);
        counted.map(|_| PrincipalCall(self.calls.clone())).map_err(|calls| {
            let message = format!(
                "principal {name} has {calls} calls under way of the {max} that its \
                 limits.calls_max allows; wait for answers, or ask for more in the file of \
                 access.principals"
            );
            ServiceError::new(ErrorCode::QuotaExceeded, message).retry_after(RETRY_AFTER)
        })
    }
}

/// A call of a principal that is under way.
#[derive(Debug)]
#[must_use = "dropping it ends the call"]
pub(crate) struct PrincipalCall(Arc<AtomicU64>);

impl Drop for PrincipalCall {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> PrincipalLoad {
        PrincipalLoad::new(toml::from_str(text).unwrap())
    }

    #[test]
    fn calls_are_refused_with_numbers_and_come_back_also_over_a_new_table() {
        let first = load("calls_max = 2");
        let held = [first.begin_call("a").unwrap(), first.begin_call("a").unwrap()];
        let error = first.begin_call("a").unwrap_err();
        assert_eq!(error.code(), ErrorCode::QuotaExceeded);
        assert!(
            error.to_string().contains("principal a has 2 calls under way of the 2"),
            "{error}"
        );
        assert!(error.retry_hint().is_some());
        let second = load("calls_max = 3\ninflight_bytes_max = \"1 MiB\"").carry_over(&first);
        let more = second.begin_call("a").unwrap();
        assert!(second.begin_call("a").is_err(), "calls of the earlier table count");
        drop((held, more));
        assert_eq!(second.calls.load(Relaxed), 0);
        let third = load("inflight_bytes_max = \"1 MiB\"").carry_over(&second);
        assert!(third.byte_budget().unwrap().is_shared(), "the same bytes");
        assert!(third.begin_call("a").is_ok() && load("").byte_budget().is_none());
        assert!(toml::from_str::<PrincipalLimits>("calls = 2").is_err());
    }
}
