//! What an engine says of a sequence's future: lists show it.

use kvd_core::SequenceId;

/// What comes next for a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SequencePhase {
    /// Nothing is known, or a turn is under way.
    #[default]
    Unknown,
    /// A turn has ended; the next one may come after a while.
    EndOfTurn,
    /// No more tokens will come.
    Done,
}

/// What an engine last said of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceHint {
    /// What comes next.
    pub phase: SequencePhase,
    /// The sequence that it works for or was forked from. That may be closed by now.
    pub parent: Option<SequenceId>,
}
