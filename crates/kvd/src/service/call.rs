//! Who asks, and until when the answer is of use.

use super::ServiceError;
use kvd_core::{ErrorCode, Namespace};
use std::time::Instant;

/// The part of a request that is the same for every rpc.
#[derive(Clone, Debug)]
pub struct Call {
    /// The tenant.
    pub namespace: Namespace,
    /// When the caller stops waiting.
    pub deadline: Option<Instant>,
    /// Whether it waits where the device's queue is full, as messages of a stream do, instead of
    /// being told `QUEUE_FULL`.
    pub waits_for_queue: bool,
}

impl Call {
    /// What a caller is told whose deadline has passed.
    pub(crate) const DEADLINE_PASSED: &str = "the deadline passed before the answer was ready";

    /// # Errors
    /// `DEADLINE_EXCEEDED` when the deadline has passed.
    pub fn check_deadline(&self) -> Result<(), ServiceError> {
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            let message = "the deadline passed before the work began";
            return Err(ServiceError::new(ErrorCode::DeadlineExceeded, message));
        }
        Ok(())
    }
}
