//! The CPU's page memory: one buffer, taken at start, addressed by extents.

use kvd_core::Extent;

/// A fixed buffer. Safe Rust suffices, because the lane is the only one who holds it: reads
/// borrow it shared, writes borrow it exclusively.
pub(crate) struct HostArena {
    bytes: Box<[u8]>,
}

impl HostArena {
    /// Takes `capacity_bytes`. With `prefault` every page is touched now, so that a machine that
    /// cannot give the memory says so at start and not under load.
    pub(crate) fn new(capacity_bytes: u64, prefault: bool) -> Self {
        let capacity = usize::try_from(capacity_bytes).expect("arena fits the address space");
        let mut bytes = vec![0u8; capacity].into_boxed_slice();
        if prefault {
            const PAGE_BYTES: usize = 4096;
            for byte in bytes.iter_mut().step_by(PAGE_BYTES) {
                // A plain store of the value that is there already would be optimised away.
                *std::hint::black_box(byte) = 0;
            }
        }
        Self { bytes }
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(crate) fn read(&self, extent: Extent) -> &[u8] {
        &self.bytes[range(extent)]
    }

    pub(crate) fn write(&mut self, extent: Extent) -> &mut [u8] {
        &mut self.bytes[range(extent)]
    }

    /// Copies between two extents of equal length, which must not overlap by accident of the
    /// pool: a slot is never its own copy target.
    pub(crate) fn copy(&mut self, from: Extent, to: Extent) {
        assert_eq!(from.len, to.len, "copy keeps the length");
        assert!(!from.overlaps(to), "copy target {to:?} overlaps its source {from:?}");
        self.bytes.copy_within(range(from), range(to).start);
    }
}

/// Extents come from the pool of this arena, so they fit `usize` whenever the arena does.
fn range(extent: Extent) -> std::ops::Range<usize> {
    let to_usize = |value| usize::try_from(value).expect("extent fits the address space");
    to_usize(extent.offset)..to_usize(extent.end())
}
