//! Who may have which bytes of an arena: rows from slabs at its low end, pages from its high end.
//!
//! Slots of rows are all of one size per model. They come from slabs of that size, so that a slot
//! that was given back serves the next request of its kind exactly. Pages are of any size: the
//! tightest free range serves them (best fit). A slab that is empty is given back whole. The two
//! kinds grow towards each other and do not mix while there is space between them: pages that
//! lie between rows would leave holes that no row fits in.
//!
//! No lock (the pool's mutex guards it), and no memory of what is taken: whoever took a range gives
//! exactly that range back.

use crate::free_ranges::{FreeRanges, SizedRange};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a granule: offsets and sizes of what is taken are multiples of it. One cache line, so
/// that two slots never share one.
pub(crate) const GRANULE_BYTES: u64 = 64;

/// Bytes of a slab, about.
const SLAB_BYTES: u64 = 2 << 20;

/// Slots of a slab at most: the bits of its mask.
const SLAB_SLOTS_MAX: u64 = 64;

/// A slab takes at most this part of the arena.
const SLABS_OF_ARENA: u64 = 64;

/// Free slots of slabs may hold this part of the arena before pages may take them.
const IDLE_PART_OF_ARENA: u64 = 32;

/// The use of a slot's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlotRegion {
    /// Rows in the stored precision: slots of few sizes.
    Rows,
    /// Encoded pages, of any size.
    Pages,
}

/// Bytes that `len_bytes` takes: rounded up to granules, at least one.
pub(crate) fn taken_bytes(len_bytes: u64) -> Option<u64> {
    len_bytes.max(1).checked_next_multiple_of(GRANULE_BYTES)
}

/// Slots of one size, side by side.
#[derive(Debug)]
struct RowSlab {
    slot_bytes: u64,
    slots: u64,
    /// A bit for each free slot.
    free: u64,
}

impl RowSlab {
    fn is_empty(&self) -> bool {
        u64::from(self.free.count_ones()) == self.slots
    }
}

/// The free bytes of an arena.
#[derive(Debug)]
pub(crate) struct ArenaAllocator {
    capacity_bytes: u64,
    /// Bytes of a slab, about.
    slab_bytes: u64,
    used_bytes: u64,
    slots: u64,
    ranges: FreeRanges,
    /// By offset.
    slabs: BTreeMap<u64, RowSlab>,
    /// Slabs with a free slot, by the size of their slots and then by offset.
    open_slabs: BTreeSet<OpenSlab>,
    /// Bytes of free slots in slabs.
    idle_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct OpenSlab {
    slot_bytes: u64,
    offset: u64,
}

impl ArenaAllocator {
    /// An empty arena; a capacity that is no multiple of the granule is rounded down.
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let capacity_bytes = capacity_bytes - capacity_bytes % GRANULE_BYTES;
        let slab_bytes = SLAB_BYTES.min(capacity_bytes / SLABS_OF_ARENA);
        let mut ranges = FreeRanges::default();
        if capacity_bytes > 0 {
            ranges.give_range(SizedRange { offset: 0, len: capacity_bytes });
        }
        Self {
            capacity_bytes,
            slab_bytes,
            used_bytes: 0,
            slots: 0,
            ranges,
            slabs: BTreeMap::new(),
            open_slabs: BTreeSet::new(),
            idle_bytes: 0,
        }
    }

    /// Takes [`taken_bytes`] of `len_bytes`; `None` when no free bytes of that region hold them.
    pub(crate) fn take_slot(&mut self, region: SlotRegion, len_bytes: u64) -> Option<u64> {
        let len = taken_bytes(len_bytes)?;
        let offset = match region {
            SlotRegion::Rows => self.take_rows(len)?,
            SlotRegion::Pages => self.take_pages(len)?,
        };
        self.used_bytes += len;
        self.slots += 1;
        Some(offset)
    }

    /// Gives back what `take_slot(region, len_bytes)` returned as `offset`.
    pub(crate) fn give_slot(&mut self, region: SlotRegion, offset: u64, len_bytes: u64) {
        let Some(len) = taken_bytes(len_bytes) else {
            return;
        };
        self.used_bytes -= len;
        self.slots -= 1;
        match region {
            SlotRegion::Rows => self.give_rows(offset),
            SlotRegion::Pages => self.ranges.give_range(SizedRange { offset, len }),
        }
    }

    /// Bytes in all.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes taken, rounding included.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Slots taken.
    pub(crate) fn count_slots(&self) -> u64 {
        self.slots
    }

    /// Bytes of the largest free range: a request of either region can have so many.
    pub(crate) fn largest_range_bytes(&self) -> u64 {
        self.ranges.largest_bytes()
    }

    /// Bytes of the largest slot that could be taken: of the largest free range, or of a free slot
    /// of rows.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        let slot_bytes = self.open_slabs.last().map_or(0, |slab| slab.slot_bytes);
        self.ranges.largest_bytes().max(slot_bytes)
    }

    /// Bytes of free slots in slabs: rows of their size alone can have them.
    pub(crate) fn idle_bytes(&self) -> u64 {
        self.idle_bytes
    }

    /// The tightest range when that is a hole; else, of the large ones, the highest.
    fn find_page_range(&self, len: u64) -> Option<SizedRange> {
        let tightest = self.ranges.at_least(len).next()?;
        if tightest.len < self.slab_bytes {
            return Some(tightest);
        }
        self.ranges.find_large(tightest.len).max_by_key(|range| range.offset)
    }

    /// Bytes for pages. The first holes are those between pages; free slots of rows are taken
    /// only where many are idle.
    fn take_pages(&mut self, len: u64) -> Option<u64> {
        loop {
            if let Some(range) = self.find_page_range(len) {
                return Some(self.ranges.take_back(range, len));
            }
            if self.idle_bytes <= self.capacity_bytes / IDLE_PART_OF_ARENA {
                return None;
            }
            self.break_slab(len)?;
        }
    }

    /// Turns the free slots of the highest slab of slots of `len` bytes or more into ranges.
    fn break_slab(&mut self, len: u64) -> Option<()> {
        let from = OpenSlab { slot_bytes: len, offset: 0 };
        let open = self.open_slabs.range(from..).max_by_key(|slab| slab.offset).copied()?;
        self.open_slabs.remove(&open);
        let slab = self.slabs.remove(&open.offset)?;
        for slot in 0..slab.slots {
            let range =
                SizedRange { offset: open.offset + slot * slab.slot_bytes, len: slab.slot_bytes };
            if slab.free & (1 << slot) > 0 {
                self.idle_bytes -= slab.slot_bytes;
                self.ranges.give_range(range);
            } else {
                let alone = RowSlab { slot_bytes: slab.slot_bytes, slots: 1, free: 0 };
                self.slabs.insert(range.offset, alone);
            }
        }
        Some(())
    }

    fn take_rows(&mut self, len: u64) -> Option<u64> {
        let from = OpenSlab { slot_bytes: len, offset: 0 };
        let open = self.open_slabs.range(from..).next().copied();
        let open = match open.filter(|slab| slab.slot_bytes == len) {
            Some(open) => open,
            None => self.add_slab(len)?,
        };
        let slab = self.slabs.get_mut(&open.offset)?;
        let slot = u64::from(slab.free.trailing_zeros());
        slab.free &= slab.free - 1;
        if slab.free == 0 {
            self.open_slabs.remove(&open);
        }
        self.idle_bytes -= len;
        Some(open.offset + slot * len)
    }

    /// Adds a slab for slots of `len` bytes: at the start of the lowest range that holds a whole
    /// one, else in the largest range, of as many slots as that holds.
    fn add_slab(&mut self, len: u64) -> Option<OpenSlab> {
        let slots = (self.slab_bytes / len).clamp(1, SLAB_SLOTS_MAX);
        let slots = slots.min(self.ranges.largest_bytes() / len);
        if slots == 0 {
            return None;
        }
        let fitting = self.ranges.find_large(slots * len);
        let range = fitting.min_by_key(|range| range.offset)?;
        let offset = self.ranges.take_front(range, slots * len);
        let free = u64::MAX >> (SLAB_SLOTS_MAX - slots);
        self.slabs.insert(offset, RowSlab { slot_bytes: len, slots, free });
        self.idle_bytes += slots * len;
        let open = OpenSlab { slot_bytes: len, offset };
        self.open_slabs.insert(open);
        Some(open)
    }

    fn give_rows(&mut self, slot_offset: u64) {
        let Some((&offset, slab)) = self.slabs.range_mut(..=slot_offset).next_back() else {
            debug_assert!(false, "{slot_offset} is of no slab");
            return;
        };
        let slot = (slot_offset - offset) / slab.slot_bytes;
        debug_assert!(slot < slab.slots && slab.free & (1 << slot) == 0, "given back twice");
        slab.free |= 1 << slot;
        self.idle_bytes += slab.slot_bytes;
        let open = OpenSlab { slot_bytes: slab.slot_bytes, offset };
        if !slab.is_empty() {
            self.open_slabs.insert(open);
            return;
        }
        let len = slab.slots * slab.slot_bytes;
        self.idle_bytes -= len;
        self.open_slabs.remove(&open);
        self.slabs.remove(&offset);
        self.ranges.give_range(SizedRange { offset, len });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pages_take_the_tightest_hole_and_rows_the_low_end() {
        let mut a = ArenaAllocator::new(64 * 10 + 5);
        assert_eq!(a.capacity_bytes(), 640);
        let offsets: Vec<u64> =
            (0..5).map(|_| a.take_slot(SlotRegion::Pages, 128).unwrap()).collect();
        assert_eq!(offsets, [512, 384, 256, 128, 0]);
        assert_eq!(a.take_slot(SlotRegion::Pages, 1), None);
        a.give_slot(SlotRegion::Pages, 0, 128);
        a.give_slot(SlotRegion::Pages, 128, 128);
        a.give_slot(SlotRegion::Pages, 512, 128);
        assert_eq!(a.largest_free_bytes(), 256);
        assert_eq!(a.take_slot(SlotRegion::Rows, 128), Some(0));
        assert_eq!(a.take_slot(SlotRegion::Rows, 0), Some(128));
        assert_eq!(a.take_slot(SlotRegion::Rows, u64::MAX), None);
    }

    #[test]
    fn slots_of_rows_lie_side_by_side_and_their_slab_is_given_back_whole() {
        let mut a = ArenaAllocator::new(1 << 20);
        let (slot, in_slab) = (1024, (1 << 20) / SLABS_OF_ARENA / 1024);
        let page = a.take_slot(SlotRegion::Pages, 100).unwrap();
        assert_eq!(page, (1 << 20) - 128);
        let offsets: Vec<_> =
            (0..in_slab + 1).map(|_| a.take_slot(SlotRegion::Rows, slot).unwrap()).collect();
        assert_eq!(offsets, (0..=in_slab).map(|i| i * slot).collect::<Vec<_>>());
        assert_eq!(a.idle_bytes(), (in_slab - 1) * slot);
        let pages: Vec<_> = std::iter::from_fn(|| a.take_slot(SlotRegion::Pages, 64)).collect();
        assert_eq!((a.largest_range_bytes(), a.largest_free_bytes()), (0, slot));
        // A slot that is free serves the next, wherever there is space besides.
        a.give_slot(SlotRegion::Rows, offsets[3], slot);
        assert_eq!(a.take_slot(SlotRegion::Rows, slot), Some(offsets[3]));
        offsets.iter().for_each(|&offset| a.give_slot(SlotRegion::Rows, offset, slot));
        pages.iter().for_each(|&offset| a.give_slot(SlotRegion::Pages, offset, 64));
        a.give_slot(SlotRegion::Pages, page, 100);
        assert_eq!((a.idle_bytes(), a.largest_free_bytes()), (0, 1 << 20));
    }

    #[test]
    fn pages_take_free_slots_of_rows_once_many_are_idle() {
        let (capacity, slot) = (1 << 20, 1024);
        let mut a = ArenaAllocator::new(capacity);
        let offsets: Vec<_> =
            (0..capacity / slot).map(|_| a.take_slot(SlotRegion::Rows, slot).unwrap()).collect();
        let given: Vec<_> = offsets.iter().skip(1).step_by(2).copied().collect();
        // Every second slot: nothing that a slab gives back whole.
        let idle_max = capacity / IDLE_PART_OF_ARENA;
        let (few, more) = given.split_at((idle_max / slot) as usize);
        few.iter().for_each(|&offset| a.give_slot(SlotRegion::Rows, offset, slot));
        assert_eq!((a.idle_bytes(), a.take_slot(SlotRegion::Pages, 600)), (idle_max, None));
        more.iter().for_each(|&offset| a.give_slot(SlotRegion::Rows, offset, slot));
        while let Some(offset) = a.take_slot(SlotRegion::Pages, 600) {
            assert!(given.contains(&(offset + 640 - slot)), "{offset}");
        }
        assert!(a.idle_bytes() <= idle_max && a.idle_bytes() > 0);
    }

    proptest! {
        #[test]
        fn never_overlaps_never_leaks_and_coalesces(
            capacity in prop_oneof![Just(64 * 128u64), Just(64 * 4096)],
            steps in proptest::collection::vec(
                (any::<bool>(), any::<bool>(), 0u64..900, any::<usize>()),
                1..300,
            ),
        ) {
            let mut a = ArenaAllocator::new(capacity);
            let mut live: Vec<(SlotRegion, u64, u64)> = Vec::new();
            for (take, pages, len, pick) in steps {
                if take || live.is_empty() {
                    let free_before = a.largest_range_bytes();
                    let region = if pages { SlotRegion::Pages } else { SlotRegion::Rows };
                    // Rows are of few sizes.
                    let len = if pages { len } else { len / 300 * 300 + 64 };
                    let rounded = taken_bytes(len).unwrap();
                    match a.take_slot(region, len) {
                        Some(offset) => {
                            prop_assert_eq!(offset % GRANULE_BYTES, 0);
                            prop_assert!(offset + rounded <= a.capacity_bytes());
                            for &(_, o, l) in &live {
                                let other = taken_bytes(l).unwrap();
                                prop_assert!(offset >= o + other || o >= offset + rounded);
                            }
                            live.push((region, offset, len));
                        }
                        None => prop_assert!(free_before < rounded),
                    }
                } else {
                    let (region, offset, len) = live.swap_remove(pick % live.len());
                    a.give_slot(region, offset, len);
                }
                let used: u64 = live.iter().map(|&(_, _, l)| taken_bytes(l).unwrap()).sum();
                prop_assert_eq!(a.used_bytes(), used);
                prop_assert_eq!(a.count_slots(), live.len() as u64);
                let free: u64 = a.ranges.by_offset().values().sum();
                prop_assert_eq!(free + a.idle_bytes() + used, a.capacity_bytes());
                let ends: Vec<_> = a.ranges.by_offset().iter().map(|(o, l)| (*o, o + l)).collect();
                prop_assert!(ends.windows(2).all(|w| w[0].1 < w[1].0), "neighbours not joined");
            }
            for (region, offset, len) in live {
                a.give_slot(region, offset, len);
            }
            prop_assert_eq!(a.largest_free_bytes(), a.capacity_bytes());
        }
    }
}
