//! How the tier asks the index what to keep, and tells it what went.

use crate::error::WriteError;
use crate::name::{BlockName, DiskLocation, KeepChoice, LiveRecord};

/// Called once, on the writer's thread: the record is durable and here is its place, or why not.
pub type OnDurable = Box<dyn FnOnce(Result<DiskLocation, WriteError>) + Send>;

/// The index, as the tier sees it. Called on the writer's thread with no lock of the tier held;
/// whatever a call waits for, all writes wait for.
pub trait ReclaimListener: Send + Sync {
    /// Says for each record of a segment that is reclaimed, in order, where it goes. A record is
    /// the index's own only if its location is: others are [`KeepChoice::Stale`].
    fn choose_kept(&self, records: &[LiveRecord]) -> Vec<KeepChoice>;

    /// A record was copied: the copy is durable, the first one will go.
    fn record_moved(&self, name: &BlockName, from: &DiskLocation, to: &DiskLocation);

    /// These records go: their entries, and all behind them, are no longer on disk. Called before
    /// the file is removed.
    fn records_gone(&self, records: &[LiveRecord]);
}

/// Keeps nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeepNothing;

impl ReclaimListener for KeepNothing {
    fn choose_kept(&self, records: &[LiveRecord]) -> Vec<KeepChoice> {
        vec![KeepChoice::Drop; records.len()]
    }

    fn record_moved(&self, _: &BlockName, _: &DiskLocation, _: &DiskLocation) {}

    fn records_gone(&self, _: &[LiveRecord]) {}
}
