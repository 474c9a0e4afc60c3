//! Hints of engines about the future of their sequences: lists show them.

use kvd_core::SequenceId;

/// The next thing that will happen to a sequence.
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

/// An engine's last word on the future of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceHint {
    /// The next thing that will happen to it.
    pub phase: SequencePhase,
    /// The sequence that it works for or was forked from. That may be closed by now.
    pub parent: Option<SequenceId>,
}
