//! The one error that leaves the service: a code to branch on and a sentence to read.

use kvd_core::{Coded, ErrorCode, LayerIndex};
use kvd_proto::StaleId;
use std::fmt;
use std::time::Duration;

/// Why a request was not served.
#[derive(Clone, Debug)]
pub struct ServiceError {
    code: ErrorCode,
    message: String,
    stale: Option<Box<StaleId>>,
    retry_after: Option<Duration>,
}

impl ServiceError {
    /// An error of the service itself.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), stale: None, retry_after: None }
    }

    /// An error about an id of another boot.
    pub(super) fn of_stale_id(code: ErrorCode, message: String, stale: StaleId) -> Self {
        Self { stale: Some(Box::new(stale)), ..Self::new(code, message) }
    }

    /// This error, with a time after which it may be no more.
    #[must_use]
    pub(crate) fn retry_after(self, time: Duration) -> Self {
        Self { retry_after: Some(time), ..self }
    }

    /// When to ask again, where the service knows better than the default.
    #[must_use]
    pub fn retry_hint(&self) -> Option<Duration> {
        self.retry_after
    }

    /// This error, saying which query of a batch it is about.
    #[must_use]
    pub(super) fn in_query(self, index: u32) -> Self {
        Self { message: format!("queries[{index}]: {}", self.message), ..self }
    }

    /// This error, saying which part of a step it is about.
    #[must_use]
    pub(super) fn in_part(self, index: usize) -> Self {
        Self { message: format!("parts[{index}]: {}", self.message), ..self }
    }

    /// This error, saying which layer it is about.
    #[must_use]
    pub(super) fn in_layer(self, layer: LayerIndex) -> Self {
        Self { message: format!("layer {layer}: {}", self.message), ..self }
    }

    /// The code to branch on.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.code
    }

    /// The id of another boot that the request named, if that is why it failed.
    #[must_use]
    pub fn stale_id(&self) -> Option<&StaleId> {
        self.stale.as_deref()
    }
}

/// Every room's error knows its code, so nothing is lost on the way out.
impl<E: Coded> From<E> for ServiceError {
    fn from(error: E) -> Self {
        Self { retry_after: error.retry_hint(), ..Self::new(error.code(), error.to_string()) }
    }
}

impl fmt::Display for ServiceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
