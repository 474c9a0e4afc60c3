//! Prefetches the next page while one is worked on: a line here and a line there, because a core
//! that requests many at once waits for them.

use crate::cpu::simd;
use kvd_core::Side;

/// Bytes of a line of the cache.
const LINE: usize = 64;
/// Steps in which a side is prefetched that no kernel prefetches.
const STEPS: usize = 16;

/// Bytes that will be read soon.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PrefetchBytes<'a> {
    bytes: &'a [u8],
}

/// Bytes that are yet to be prefetched, a few lines at a time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefetchSteps<'a> {
    bytes: &'a [u8],
    /// Bytes of one step.
    step: usize,
}

impl<'a> PrefetchBytes<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Number `index` of `count` shares, of whole lines.
    pub(super) fn share_of(self, index: usize, count: usize) -> Self {
        if count <= 1 {
            return if index == 0 { self } else { Self::default() };
        }
        let len = share_len(self.bytes, count);
        let rest = self.bytes.get(index * len..).unwrap_or_default();
        Self { bytes: &rest[..rest.len().min(len)] }
    }

    /// To be prefetched in so many steps.
    #[inline]
    pub(super) fn in_steps(self, count: usize) -> PrefetchSteps<'a> {
        PrefetchSteps { bytes: self.bytes, step: share_len(self.bytes, count) }
    }

    /// Prefetches all of them.
    pub(super) fn request_all(self) {
        simd::prefetch_lines(self.bytes);
    }
}

/// Bytes of one of `count` parts, of whole lines.
#[inline]
fn share_len(bytes: &[u8], count: usize) -> usize {
    match bytes {
        [] => 0,
        _ => bytes.len().div_ceil(count.max(1)).next_multiple_of(LINE),
    }
}

impl PrefetchSteps<'_> {
    /// Prefetches a few more lines.
    #[inline(always)]
    pub(super) fn next_step(&mut self) {
        if !self.bytes.is_empty() {
            let (now, later) = self.bytes.split_at(self.bytes.len().min(self.step));
            simd::prefetch_lines(now);
            self.bytes = later;
        }
    }
}

/// The next part, prefetched while one is attended to: a side by the kernel that reads it now, or
/// in steps between.
#[derive(Default)]
pub(super) struct PartPrefetch<'a> {
    /// By side, the bytes that kernels prefetch; and in how many calls.
    kernels: [(PrefetchBytes<'a>, usize); 2],
    /// Calls so far.
    calls: [usize; 2],
    steps: [PrefetchSteps<'a>; 2],
}

impl<'a> PartPrefetch<'a> {
    /// Takes the next bytes of a side; and in how many calls a kernel reads that side now, if one
    /// does.
    pub(super) fn begin_side(&mut self, side: usize, bytes: &'a [u8], calls: Option<usize>) {
        let bytes = PrefetchBytes::new(bytes);
        self.calls[side] = 0;
        self.kernels[side] = (bytes, calls.unwrap_or(0));
        self.steps[side] = PrefetchSteps::default();
        if calls.is_none() {
            self.kernels[side].0 = PrefetchBytes::default();
            self.steps[side] = bytes.in_steps(STEPS);
        }
    }

    /// The share that the next call of a side's kernel prefetches.
    pub(super) fn next_share(&mut self, side: Side) -> PrefetchBytes<'a> {
        let (prefetch, of) = self.kernels[side.index()];
        let call = &mut self.calls[side.index()];
        *call += 1;
        prefetch.share_of(*call - 1, of)
    }

    /// Prefetches a few lines more of the sides that no kernel prefetches.
    pub(super) fn next_step(&mut self) {
        self.steps.iter_mut().for_each(PrefetchSteps::next_step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_steps_are_all_of_it_in_whole_lines() {
        let bytes: Vec<u8> = (0..1000).map(|i| i as u8).collect();
        for (len, count) in [(0, 3), (1, 4), (64, 2), (700, 3), (1000, 16), (1000, 40)] {
            let prefetch = PrefetchBytes::new(&bytes[..len]);
            let shares: Vec<_> =
                (0..count).map(|index| prefetch.share_of(index, count).bytes).collect();
            assert_eq!(shares.concat(), bytes[..len], "{len} {count}");
            let full = shares.windows(2).filter(|two| !two[1].is_empty()).map(|two| two[0].len());
            assert!(full.into_iter().all(|len| len.is_multiple_of(LINE)), "{len} {count}");
            let mut steps = prefetch.in_steps(count);
            for _ in 0..count {
                steps.next_step();
            }
            assert!(steps.bytes.is_empty(), "{len} {count}");
        }
    }

    #[test]
    fn kernels_ask_for_their_sides_and_steps_for_the_others() {
        let bytes = [1u8; 640];
        let mut next = PartPrefetch::default();
        next.begin_side(0, &bytes, Some(2));
        next.begin_side(1, &bytes[..320], None);
        let calls = [0; 3].map(|_| next.next_share(Side::Key).bytes.len());
        assert_eq!(calls, [320, 320, 0]);
        assert!(next.next_share(Side::Value).bytes.is_empty());
        next.next_step();
        assert_eq!(next.steps.map(|steps| steps.bytes.len()), [0, 320 - LINE]);
    }
}
