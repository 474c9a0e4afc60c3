//! The record of the test driver's calls, and the faults that a test plants.

use crate::streams::Work;
use kvd_compute::RegionHandle;
use std::collections::BTreeMap;
use std::time::Instant;

/// Counts of the test driver's calls, and the planted fault.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Memory, pinned memory, events and graphs that were not given back.
    pub(crate) live: usize,
    /// Calls so far that may fail, by name.
    pub(crate) calls: BTreeMap<&'static str, usize>,
    /// Names of the kernels that were launched.
    pub(crate) kernels: Vec<String>,
    /// Thread blocks of each of them.
    pub(crate) blocks: Vec<u32>,
    /// Launches so far.
    pub(crate) launches: usize,
    /// Copies to the device so far.
    pub(crate) writes: usize,
    /// Bytes copied to the device so far.
    pub(crate) written_bytes: usize,
    /// Graphs launched so far.
    pub(crate) graphs: usize,
    /// Calls that copied within the device so far.
    pub(crate) copies: usize,
    /// How often the host waited.
    pub(crate) waits: usize,
    /// Bytes copied to the host so far.
    pub(crate) read_bytes: usize,
    /// Shared events that were recorded, by handle, and the kernel before.
    pub(crate) recorded: Vec<([u8; RegionHandle::IPC_BYTES], String)>,
    /// Calls after the first error that sticks.
    pub(crate) calls_after_failure: usize,
    pub(crate) fail: Fail,
    /// No event has happened before.
    pub(crate) until: Option<Instant>,
    pub(crate) planted: Planted,
    /// Races that a GPU could have had.
    pub(crate) complaints: Vec<String>,
    pub(super) failed: bool,
}

/// Which call fails from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fail {
    #[default]
    Never,
    /// The next launch, and everything after it.
    Launch,
    /// The next copy to the device, and everything after it.
    Write,
    /// The next wait of the host, because of work before it, and everything after it.
    Later,
    /// No event happens any more.
    Hang,
    /// Every allocation.
    Memory,
    /// Pinned memory, all but the first.
    Pinned,
    /// Images that were compiled are refused.
    Image,
    /// None of the kernels that are looked for is there.
    Kernels,
    /// No event has a handle.
    Events,
    /// No graph is made.
    Graphs,
    /// No graph is changed.
    Updates,
    /// When a graph is changed, the third node finds no memory.
    Node,
}

/// A call that does nothing, as if the backend had forgotten it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Planted {
    #[default]
    Nothing,
    /// Kernels do not wait for copies.
    KernelsDoNotWait,
    /// Copies do not wait for kernels.
    CopiesDoNotWait,
    /// The host does not wait.
    HostDoesNotWait,
}

impl Watch {
    pub(super) fn launched(&mut self, work: &Work) {
        self.launches += 1;
        if let Work::Launch { kernel, blocks, .. } = work {
            self.kernels.push(kernel.clone());
            self.blocks.push(*blocks);
        }
    }
}
