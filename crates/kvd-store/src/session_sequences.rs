//! The open sequences of one session.
//!
//! Owns [`SessionSequences`]. Lock story: one mutex, held for a step on a set of ids; no other lock
//! is taken under it. A sequence is on the store's map before it is in this set, so that whoever
//! ends the session and then closes what it had finds all of them there.

use crate::error::StoreError;
use kvd_core::{SequenceId, SessionId};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;

/// The open sequences of a session, until it ends.
#[derive(Debug)]
pub struct SessionSequences {
    id: SessionId,
    /// `None` once the session has ended.
    open: Mutex<Option<HashSet<SequenceId>>>,
}

impl SessionSequences {
    /// A session without sequences.
    #[must_use]
    pub fn new(id: SessionId) -> Arc<Self> {
        Arc::new(Self { id, open: Mutex::new(Some(HashSet::new())) })
    }

    /// The session.
    #[must_use]
    pub fn session_id(&self) -> SessionId {
        self.id
    }

    /// Open sequences; none once the session has ended.
    #[must_use]
    pub fn count_open(&self) -> u64 {
        self.open.lock().as_ref().map_or(0, |open| open.len() as u64)
    }

    /// Ends the session: nothing is opened in it from now on. Returns the sequences that are yet
    /// to be closed, to whoever comes first.
    #[must_use]
    pub fn end_session(&self) -> Vec<SequenceId> {
        self.open.lock().take().into_iter().flatten().collect()
    }

    /// Takes a sequence in.
    pub(crate) fn add_sequence(&self, sequence: SequenceId) -> Result<(), StoreError> {
        match self.open.lock().as_mut() {
            None => Err(StoreError::SessionEnded { id: self.id }),
            Some(open) => {
                open.insert(sequence);
                Ok(())
            }
        }
    }

    /// Forgets a sequence that was closed.
    pub(crate) fn remove_sequence(&self, sequence: SequenceId) {
        if let Some(open) = self.open.lock().as_mut() {
            open.remove(&sequence);
        }
    }
}
