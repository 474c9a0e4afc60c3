//! Sequences: open, fork, truncate, close, describe.

use super::{CallContext, Service, ServiceError};
use kvd_core::{ErrorCode, ModelId, SequenceId};
use kvd_proto::domain::SequenceFork;
use kvd_store::{ForkedSequence, SequenceHint, SequenceUsage};
use std::time::Instant;

impl Service {
    /// A new, empty sequence.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL` or `LIMIT_EXCEEDED`.
    pub fn open_sequence(
        &self,
        call: &CallContext,
        model: ModelId,
    ) -> Result<SequenceId, ServiceError> {
        self.open_sequence_in(call, model, None)
    }

    /// A new sequence that shares the parent's first tokens, and its session.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_NOT_STORED` or `LIMIT_EXCEEDED`; `UNKNOWN_MODEL` when the model
    /// went meanwhile.
    pub fn fork_sequence(
        &self,
        call: &CallContext,
        id: SequenceId,
        length: Option<u32>,
    ) -> Result<ForkedSequence, ServiceError> {
        self.fork_sequence_in(call, SequenceFork { sequence: id, length, session: None })
    }

    /// [`Service::fork_sequence`] into a session, if one is named.
    ///
    /// # Errors
    /// Those, and `UNKNOWN_SESSION`.
    pub fn fork_sequence_in(
        &self,
        call: &CallContext,
        fork: SequenceFork,
    ) -> Result<ForkedSequence, ServiceError> {
        self.admit_call(call)?;
        let SequenceFork { sequence: id, length, session } = fork;
        let store = &self.shard_of(id)?.store;
        let forked = match session {
            None => store.fork_sequence(&call.namespace, id, length)?,
            Some(session) => {
                let session =
                    self.sessions.find_session(&call.namespace, session, Instant::now())?;
                store.fork_into_session(&call.namespace, id, length, &session)?
            }
        };
        let model = store.model_of(&call.namespace, forked.id)?;
        // The parent may have been closed and its model unregistered meanwhile: then there was
        // nothing to fork, and the child would be a sequence of no model.
        if let Err(gone) = self.models.find_model(&call.namespace, model.id) {
            store.close_sequence(&call.namespace, forked.id)?;
            store.forget_model(model.id);
            return Err(gone);
        }
        Ok(forked)
    }

    /// Forgets the tokens from `length` on.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_NOT_STORED` or `SEQUENCE_BUSY`.
    pub fn truncate_sequence(
        &self,
        call: &CallContext,
        id: SequenceId,
        length: u32,
    ) -> Result<(), ServiceError> {
        self.admit_call(call)?;
        Ok(self.shard_of(id)?.store.truncate_sequence(&call.namespace, id, length)?)
    }

    /// Replaces what an engine says of a sequence.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE` of it or of the parent, `INVALID_ARGUMENT` of its own parent.
    pub fn hint_sequence(
        &self,
        call: &CallContext,
        id: SequenceId,
        hint: SequenceHint,
    ) -> Result<(), ServiceError> {
        self.admit_call(call)?;
        if let Some(parent) = hint.parent {
            if parent == id {
                let reason = format!("parent_sequence_id: {id} cannot work for itself");
                return Err(ServiceError::new(ErrorCode::InvalidArgument, reason));
            }
            self.shard_of(parent)?.store.model_of(&call.namespace, parent)?;
        }
        Ok(self.shard_of(id)?.store.hint_sequence(&call.namespace, id, hint)?)
    }

    /// Gives a sequence up; blocks that others share stay.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`.
    pub fn close_sequence(&self, call: &CallContext, id: SequenceId) -> Result<(), ServiceError> {
        // Also while draining: giving back is never refused.
        self.check_namespace(&call.namespace)?;
        Ok(self.shard_of(id)?.store.close_sequence(&call.namespace, id)?)
    }

    /// Describes what a sequence holds.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`.
    pub fn describe_sequence(
        &self,
        call: &CallContext,
        id: SequenceId,
    ) -> Result<SequenceUsage, ServiceError> {
        self.admit_call(call)?;
        Ok(self.shard_of(id)?.store.describe_sequence(&call.namespace, id)?)
    }
}
