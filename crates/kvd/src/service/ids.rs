//! The ids of this start of the daemon, and what is said of those of another.

use super::{CallContext, DeviceShard, RegisteredModel, Service, ServiceError};
use kvd_core::{BootId, ErrorCode, IdSpace, LeaseId, ModelId, SequenceId, SessionId};
use kvd_proto::StaleId;
use kvd_proto::domain::AttendBatch;
use kvd_store::StoreError;
use std::sync::Arc;
use tracing::level_filters::LevelFilter;

/// Upper half of ids that no boot gives: -1 stands for none in many programs.
const NO_BOOT: u32 = u32::MAX;

/// The ids of a new start.
///
/// # Errors
/// When the system gives no random numbers.
pub(crate) fn draw_ids() -> Result<Arc<IdSpace>, getrandom::Error> {
    let bytes = || {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map(|()| bytes)
    };
    let boot = loop {
        // Two draws in 2^32 are none.
        if let Some(boot) = BootId::new(bytes()?).filter(|boot| boot.id_bits() != NO_BOOT) {
            break boot;
        }
    };
    Ok(Arc::new(IdSpace::new(boot, bytes()?)))
}

/// A model that nobody registered in this boot; of another boot it says so.
pub(super) fn unknown_model(
    ids: &IdSpace,
    namespace: &kvd_core::Namespace,
    id: ModelId,
) -> ServiceError {
    stale_error(ids, ErrorCode::UnknownModel, "model", id.0).unwrap_or_else(|| {
        let message = format!("model {id} is not registered in namespace {namespace}");
        ServiceError::new(ErrorCode::UnknownModel, message)
    })
}

/// A session that nobody began in this boot, or that has ended; of another boot it says so.
pub(super) fn unknown_session(
    ids: &IdSpace,
    namespace: &kvd_core::Namespace,
    id: SessionId,
) -> ServiceError {
    stale_error(ids, ErrorCode::UnknownSession, "session", id.0).unwrap_or_else(|| {
        let message = format!(
            "session {id} is unknown in namespace {namespace}; it has ended or was never held"
        );
        ServiceError::new(ErrorCode::UnknownSession, message)
    })
}

/// A lease that nobody took in this boot, or that has ended; of another boot it says so.
pub(super) fn unknown_lease(
    ids: &IdSpace,
    namespace: &kvd_core::Namespace,
    id: LeaseId,
) -> ServiceError {
    stale_error(ids, ErrorCode::UnknownLease, "lease", id.0).unwrap_or_else(|| {
        let message =
            format!("lease {id} is unknown in namespace {namespace}; match the keys again");
        ServiceError::new(ErrorCode::UnknownLease, message)
    })
}

/// The error of an id that another boot gave.
fn stale_error(ids: &IdSpace, code: ErrorCode, kind: &str, id: u64) -> Option<ServiceError> {
    let id_boot = ids.other_boot(id).filter(|boot| *boot != NO_BOOT)?;
    let id_boot = format!("{id_boot:08x}");
    let boot_id = ids.boot().to_string();
    // Short enough for a completion record of a region, behind its code and its query.
    let message = format!(
        "{kind} {id}: the daemon was restarted and kept nothing of boot {id_boot} (now {boot_id}). \
         Register the model, open a sequence and store again"
    );
    Some(ServiceError::of_stale_id(code, message, StaleId { id_boot, boot_id }))
}

/// Says in the span of a call what it is about: lines inside and traces show it.
pub(super) fn record_id(field: &'static str, id: u64) {
    // Spans of ordinary calls are below this level: nobody reads them.
    if LevelFilter::current() >= LevelFilter::DEBUG {
        tracing::Span::current().record(field, id);
    }
}

impl Service {
    /// The device and store of a sequence, if it is anywhere.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE` of what cannot be a sequence of this boot.
    pub(super) fn shard_of(&self, id: SequenceId) -> Result<&DeviceShard, ServiceError> {
        record_id("sequence", id.0);
        let device = self.ids.device_of(id, self.shards.len() as u64);
        device.and_then(|device| self.shards.get(device as usize)).ok_or_else(|| {
            self.stale_sequence(id).unwrap_or_else(|| StoreError::UnknownSequence { id }.into())
        })
    }

    /// The model of a batch.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`. Where the sequences of an unknown model are of another boot too, it is
    /// `UNKNOWN_SEQUENCE` as in every other call of theirs.
    pub(crate) fn batch_model(
        &self,
        call: &CallContext,
        batch: &AttendBatch,
    ) -> Result<Arc<RegisteredModel>, ServiceError> {
        self.models.find_model(&call.namespace, batch.model).map_err(|error| {
            let mut queries = (0..).zip(&batch.queries);
            let stale = queries.find_map(|(index, query)| {
                Some(self.stale_sequence(query.sequence)?.in_query(index))
            });
            stale.filter(|_| error.stale_id().is_some()).unwrap_or(error)
        })
    }

    pub(super) fn stale_sequence(&self, id: SequenceId) -> Option<ServiceError> {
        stale_error(&self.ids, ErrorCode::UnknownSequence, "sequence", id.0)
    }
}
