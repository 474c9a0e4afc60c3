//! Steps on the wire: the memory that a caller's rows are in, and answers.

use super::convert::call_error;
use super::measure::count_failed_part;
use crate::metrics::Metrics;
use crate::service::{LoadedStep, RefusedPart};
use kvd_proto::domain::{PartError, StoredPart};
use kvd_proto::{domain, v1};
use kvd_shm::RegionMemory;
use std::sync::Arc;

/// The memory file of the region that a request came through, if it did.
pub(super) fn region_of(extensions: &http::Extensions) -> Option<Arc<RegionMemory>> {
    extensions.get::<Arc<RegionMemory>>().cloned()
}

/// The answer to `StoreStep`.
pub(super) fn stored_response(parts: Vec<StoredPart>) -> v1::StoreStepResponse {
    v1::StoreStepResponse { parts: parts.into_iter().map(v1::StoredPart::from).collect() }
}

/// The answer to `LoadStep`, whose failed parts are counted: the call that has them is answered.
pub(super) fn loaded_response(metrics: &Metrics, loaded: LoadedStep) -> v1::LoadStepResponse {
    let part_error = |RefusedPart { index, error }| {
        count_failed_part(metrics, "LoadStep", &error);
        PartError { part: index, error: call_error(&error) }
    };
    let errors = loaded.errors.into_iter().map(part_error).collect();
    domain::LoadedStep { errors, memory: loaded.memory.into() }.into()
}
