//! The CPU's page memory: one buffer, taken at start, addressed by extents.

use kvd_core::Extent;
use memmap2::MmapMut;
use parking_lot::Mutex;

/// Page memory that the operating system does not give.
#[derive(Debug, thiserror::Error)]
#[error(
    "take {bytes} bytes of page memory (device.pool_bytes): {source}; make the pool smaller than \
     the memory that is free"
)]
pub struct ArenaError {
    /// The size asked for.
    pub bytes: u64,
    /// Why not.
    pub source: std::io::Error,
}

/// A fixed buffer. Safe Rust suffices, because the lane is the only one who holds it: reads
/// borrow it shared, writes borrow it exclusively.
pub(crate) struct HostArena {
    bytes: MmapMut,
}

impl HostArena {
    /// Takes `capacity_bytes`, zeroed. They are mapped rather than allocated: a refusal is then
    /// an answer instead of an abort, and a page costs nothing before its first use. Threads given
    /// in `prefault` touch every page now, so that missing memory shows at start and not under
    /// load. They do in turns: memory comes from the node of who touches it first, so threads that
    /// are kept on cores of several nodes spread the arena evenly over those nodes.
    pub(crate) fn new(
        capacity_bytes: u64,
        prefault: Option<&rayon::ThreadPool>,
    ) -> Result<Self, ArenaError> {
        let failed = |source| ArenaError { bytes: capacity_bytes, source };
        let capacity = usize::try_from(capacity_bytes)
            .map_err(|_| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let mut bytes = MmapMut::map_anon(capacity).map_err(failed)?;
        // Codes are read a few KiB here and there: with small pages most of those would cost a walk
        // of the page table. Where the system has no huge pages, small ones do.
        #[cfg(target_os = "linux")]
        let _ = bytes.advise(memmap2::Advice::HugePage);
        if let Some(threads) = prefault {
            let shares: Vec<_> = deal_pieces(&mut bytes, threads.current_num_threads());
            let shares: Vec<_> = shares.into_iter().map(Mutex::new).collect();
            threads.broadcast(|thread| {
                shares[thread.index()].lock().iter_mut().for_each(|piece| touch_pages(piece));
            });
        }
        Ok(Self { bytes })
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(crate) fn extent_bytes(&self, extent: Extent) -> &[u8] {
        &self.bytes[byte_range(extent)]
    }

    pub(crate) fn extent_bytes_mut(&mut self, extent: Extent) -> &mut [u8] {
        &mut self.bytes[byte_range(extent)]
    }

    /// Copies between two extents of equal length, which must not overlap by accident of the
    /// pool: a slot is never its own copy target.
    pub(crate) fn copy_extent(&mut self, from: Extent, to: Extent) {
        assert_eq!(from.len, to.len, "copy keeps the length");
        assert!(!from.overlaps_extent(to), "copy target {to:?} overlaps its source {from:?}");
        self.bytes.copy_within(byte_range(from), byte_range(to).start);
    }
}

/// Bytes that one thread touches before it is another's turn: a huge page.
const TURN_BYTES: usize = 2 << 20;

/// Pieces of the arena for each thread, in turns.
fn deal_pieces(bytes: &mut [u8], threads: usize) -> Vec<Vec<&mut [u8]>> {
    let mut shares: Vec<_> = (0..threads).map(|_| Vec::new()).collect();
    for (turn, piece) in bytes.chunks_mut(TURN_BYTES).enumerate() {
        shares[turn % threads].push(piece);
    }
    shares
}

fn touch_pages(piece: &mut [u8]) {
    const PAGE_BYTES: usize = 4096;
    for byte in piece.iter_mut().step_by(PAGE_BYTES) {
        // A plain store of the value that is there already would be optimised away.
        *std::hint::black_box(byte) = 0;
    }
}

/// Extents come from the pool of this arena, so they fit `usize` whenever the arena does.
fn byte_range(extent: Extent) -> std::ops::Range<usize> {
    let to_usize = |value| usize::try_from(value).expect("extent fits the address space");
    to_usize(extent.offset)..to_usize(extent.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_what_cannot_be_had_is_an_error() {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let mut arena = HostArena::new(1 << 16, Some(&threads)).unwrap();
        let extent = Extent { offset: 100, len: 3 };
        assert_eq!(arena.extent_bytes(extent), [0; 3]);
        arena.extent_bytes_mut(extent).copy_from_slice(&[1, 2, 3]);
        arena.copy_extent(extent, Extent { offset: 200, len: 3 });
        assert_eq!(arena.extent_bytes(Extent { offset: 199, len: 5 }), [0, 1, 2, 3, 0]);
        for too_much in [1 << 60, u64::MAX] {
            let error = HostArena::new(too_much, None).err().unwrap().to_string();
            assert!(error.contains("device.pool_bytes"), "{error}");
            assert!(error.contains(&too_much.to_string()), "{error}");
        }
    }

    #[test]
    fn threads_touch_all_of_an_arena_in_turns() {
        let mut bytes = vec![0u8; 7 * TURN_BYTES / 2];
        let shares = deal_pieces(&mut bytes, 3);
        let lengths = |share: &Vec<&mut [u8]>| share.iter().map(|piece| piece.len()).collect();
        let lengths: Vec<Vec<_>> = shares.iter().map(lengths).collect();
        assert_eq!(lengths, [vec![TURN_BYTES, TURN_BYTES / 2], vec![TURN_BYTES], vec![TURN_BYTES]]);
    }
}
