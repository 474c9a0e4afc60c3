//! The stop of an attend as its pieces of work look at it, on the threads that run them.

use crate::{BackendError, Stop, StopReason};

/// A stop for pieces that run to their end, or that are given up for work that goes first.
#[derive(Clone, Copy)]
pub(crate) struct PieceStop<'a> {
    stop: &'a Stop,
    gives_way: bool,
}

impl<'a> PieceStop<'a> {
    pub(super) fn new(stop: &'a Stop) -> Self {
        Self { stop, gives_way: false }
    }

    /// The stop of pieces that are given up.
    pub(super) fn giving_way(self) -> Self {
        Self { gives_way: true, ..self }
    }

    /// Lets a piece go on, unless the work is to end or the piece is to be given up.
    pub(super) fn check(self) -> Result<(), BackendError> {
        #[cfg(test)]
        looks::note_look();
        if self.gives_way && self.stop.is_outrun() {
            return Err(BackendError::Stopped(StopReason::Outrun));
        }
        self.stop.check()
    }

    /// As [`Stop::slice_is_over`].
    pub(super) fn slice_is_over(self) -> bool {
        self.stop.slice_is_over()
    }
}

/// Tests look on while pieces are at work.
#[cfg(test)]
pub(super) mod looks {
    use std::cell::RefCell;
    use std::sync::Arc;

    /// Told of each look.
    pub(in crate::cpu) type LookHook = Arc<dyn Fn() + Send + Sync>;

    thread_local! {
        static HOOK: RefCell<Option<LookHook>> = const { RefCell::new(None) };
    }

    /// Has the hook called whenever a piece looks at its stop on this thread.
    pub(in crate::cpu) fn set_hook(hook: LookHook) {
        HOOK.set(Some(hook));
    }

    pub(super) fn note_look() {
        HOOK.with_borrow(|hook| hook.iter().for_each(|hook| hook()));
    }
}
