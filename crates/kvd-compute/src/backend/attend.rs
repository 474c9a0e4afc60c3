//! Attention over raw rows and pages.

use crate::{AttendPlan, AttendTask, BackendError, Stop};

/// Output of attention.
#[derive(Clone, Debug, Default)]
pub struct Attended {
    /// `[sum of n_q, q_heads, head_dim_v]` in the plan's dtype.
    pub out: Vec<u8>,
    /// `[sum of n_q, q_heads]`.
    pub lse: Vec<f32>,
    /// Bytes of pages and raw rows that lay in the plan's parts.
    pub stored_bytes_read: u64,
    /// Passes over blocks that were not made because several queries share one.
    pub saved_passes: u64,
}

/// How a device was given its attention kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    /// Kernels one by one.
    pub kernels: u64,
    /// Graphs of several.
    pub graphs: u64,
    /// Graphs that were built for it; the others were reused.
    pub graphs_built: u64,
    /// Nodes of graphs whose parameters were changed.
    pub nodes_updated: u64,
    /// Why there are no graphs any more.
    pub graphs_off: Option<String>,
}

/// Answers attention straight from raw rows and pages.
pub trait AttendBackend {
    /// Answers a plan.
    ///
    /// # Errors
    /// When the model is unknown, a query is not finite, or a page is corrupt.
    fn attend(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError>;

    /// Goes on with [`AttendBackend::attend`] until it is answered or, `None`, until `stop` says
    /// that its slice is over; any other call may come before the next slice. What the plan names
    /// stays as it is meanwhile. A backend looks at `stop` every few milliseconds of its own work.
    ///
    /// # Errors
    /// As [`AttendBackend::attend`], or [`BackendError::Stopped`].
    fn attend_slice(
        &mut self,
        task: &mut AttendTask,
        stop: &Stop,
    ) -> Result<Option<Attended>, BackendError> {
        task.attend_by_pieces(stop, |plan| self.attend(plan))
    }

    /// Whether queries of a plan that name the same pages are answered by one pass over those
    /// ([`find_shared_runs`](crate::find_shared_runs)). Where not, a plan is answered query by
    /// query, and it is no use to join plans.
    fn shares_pages(&self) -> bool {
        false
    }

    /// Whether whoever asks for a plan answers it sooner than another thread wakes: it takes the
    /// caller some 200 us at most. Such a plan may be asked for on any thread, while no other call
    /// runs. `false` of all plans where calls are to come from one thread.
    fn is_small_plan(&self, _: &AttendPlan) -> bool {
        false
    }

    /// How the device was given its attention kernels so far.
    fn launches(&self) -> Launches {
        Launches::default()
    }
}
