//! The K and V of one block in one layer: where they lie and in which form.
//!
//! Owns the two forms ([`RawSlot`], [`Pages`]), what a reader or a copy is told ([`Part`]), and
//! one sequence's view of a cell. No locks: a view belongs to its sequence's mutex; what several
//! sequences share is immutable, set once, or atomic.

use crate::ledger::{PackedBytes, StoredBytes};
use crate::pool::Slot;
use kvd_core::Extent;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A slot of rows in the stored precision, laid out as `geometry.raw_layout(rows)`. Which rows
/// are filled is for the holder to know: rows are appended while others already read.
#[derive(Clone, Debug)]
pub struct RawSlot {
    slot: Slot,
    rows: u32,
}

impl RawSlot {
    /// A slot of room for `rows` rows. The store makes its own; this serves tests of others.
    #[must_use]
    pub fn new(slot: Slot, rows: u32) -> Self {
        Self { slot, rows }
    }

    /// Where the rows are.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.slot.extent()
    }

    /// Rows the slot has room for: what the layout is computed from.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The slot: its bytes and how long they are held.
    #[must_use]
    pub fn slot(&self) -> &Slot {
        &self.slot
    }

    /// Declares the first `rows` rows readable (and the others not).
    pub(crate) fn set_filled(&self, rows: u32) {
        if let Some(tally) = self.slot.tally() {
            tally.set_rows(rows);
        }
    }

    /// Rows that somebody may read.
    pub(crate) fn filled(&self) -> u32 {
        self.slot.tally().map_or(self.rows, |tally| tally.rows())
    }
}

/// The encoded pages of one block, one after another in one slot. A clone is a pin.
#[derive(Clone, Debug)]
pub struct Pages(Arc<PagesInner>);

#[derive(Debug)]
struct PagesInner {
    slot: Slot,
    ends: Arc<[u32]>,
    accounting: PackedBytes,
}

impl Pages {
    /// Pages that a lane has put into `slot`. `ends` is the end of each page in bytes from the
    /// slot's start, K pages of all heads and then V pages; a page starts where the one before
    /// it ends.
    #[must_use]
    pub fn new(slot: Slot, ends: Arc<[u32]>, accounting: PackedBytes) -> Self {
        debug_assert!(ends.is_sorted(), "page ends {ends:?}");
        debug_assert!(ends.last().is_none_or(|end| u64::from(*end) <= slot.extent().len));
        Self(Arc::new(PagesInner { slot, ends, accounting }))
    }

    /// Where all the pages are.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.0.slot.extent()
    }

    /// Where page `index` is: K of head `index`, then V of head `index - kv_heads`.
    ///
    /// # Panics
    /// When there is no such page: the caller counted heads wrongly.
    #[must_use]
    pub fn page(&self, index: usize) -> Extent {
        let start = if index == 0 { 0 } else { self.0.ends[index - 1] };
        self.extent().sub_extent(u64::from(start), u64::from(self.0.ends[index]))
    }

    /// End of each page in bytes from the slot's start.
    #[must_use]
    pub fn ends(&self) -> &Arc<[u32]> {
        &self.0.ends
    }

    /// What the pages are made of.
    #[must_use]
    pub fn accounting(&self) -> &PackedBytes {
        &self.0.accounting
    }

    /// The slot: its bytes and how long they are held.
    #[must_use]
    pub fn slot(&self) -> &Slot {
        &self.0.slot
    }
}

/// The form in which rows are held.
#[derive(Clone, Debug)]
pub enum PartKind {
    /// In the stored precision.
    Raw(RawSlot),
    /// Encoded.
    Pages(Pages),
}

/// Some rows of a block, all in one form. A clone is a pin.
#[derive(Clone, Debug)]
pub struct Part {
    /// Rows of the block that are meant; never empty.
    pub rows: Range<u32>,
    /// Row `r` of the block is row `r - origin` of the slot, or of each page.
    pub origin: u32,
    /// Where they are.
    pub kind: PartKind,
}

/// What became of a full cell when its first holder moved past it.
#[derive(Debug)]
pub(crate) struct Packed {
    /// The rows that stay raw because they belong to the sink: all its rows, from row 0.
    pub(crate) sink: Option<RawSlot>,
    /// The other rows.
    pub(crate) pages: Pages,
}

/// What the holders of a raw cell share besides its slot. Each holds one `Arc` of it (pins of
/// readers do not), so "am I alone" is a question to that `Arc`.
#[derive(Debug, Default)]
pub(crate) struct RawCell {
    /// Set by the first holder that moved past the cell; the others change over without encoding
    /// when they do.
    pub(crate) packed: OnceLock<Arc<Packed>>,
    /// It was to be packed before and stayed raw.
    pub(crate) deferred: AtomicBool,
    /// Its rows cannot be encoded: it stays raw for good.
    pub(crate) unpackable: AtomicBool,
}

impl RawCell {
    /// Whether there is nothing left to do for a cell that left the window.
    pub(crate) fn is_unpackable(&self) -> bool {
        self.unpackable.load(Ordering::Relaxed)
    }

    /// Forgets what was tried with rows that are about to change.
    fn forget_attempts(&mut self) {
        *self.deferred.get_mut() = false;
        *self.unpackable.get_mut() = false;
    }
}

/// One sequence's view of one cell. The raw slot lives as long as some view (or pin) has it: it
/// goes when no sequence's window covers the cell any more.
#[derive(Clone, Debug)]
pub(crate) enum View {
    /// In this sequence's window (or not yet packed).
    Raw {
        /// Row `r` of the block is row `r` of this slot.
        raw: RawSlot,
        /// Shared with the other sequences that see the same slot.
        cell: Arc<RawCell>,
    },
    /// Left this sequence's window.
    Packed(Arc<Packed>),
}

impl View {
    /// A new cell in a new slot.
    pub(crate) fn fresh(raw: RawSlot) -> Self {
        Self::Raw { raw, cell: Arc::default() }
    }

    /// Whether an append may write from `row` on into this view's slot: no other sequence sees
    /// the cell, nobody has encoded it, and no reader has pinned the rows to be overwritten
    /// (rows that a truncation forgot may still be read by who pinned them before).
    pub(crate) fn is_appendable(&mut self, row: u32) -> bool {
        match self {
            Self::Raw { raw, cell } => {
                // `get_mut` and not `strong_count`: it orders this after the others' last use.
                let Some(cell) = Arc::get_mut(cell).filter(|c| c.packed.get().is_none()) else {
                    return false;
                };
                let appendable = raw.filled() <= row || raw.slot.is_unshared();
                if appendable {
                    cell.forget_attempts();
                }
                appendable
            }
            Self::Packed(_) => false,
        }
    }

    /// Forgets the rows from `rows` on, as far as others do not need them.
    pub(crate) fn truncate(&mut self, rows: u32) {
        if self.is_appendable(rows)
            && let Self::Raw { raw, .. } = self
        {
            raw.set_filled(rows.min(raw.filled()));
        }
    }

    /// Appends where `rows` of the block lie.
    pub(crate) fn parts(&self, rows: Range<u32>, out: &mut Vec<Part>) {
        let mut push = |rows: Range<u32>, origin, kind| {
            if !rows.is_empty() {
                out.push(Part { rows, origin, kind });
            }
        };
        match self {
            Self::Raw { raw, .. } => push(rows, 0, PartKind::Raw(raw.clone())),
            Self::Packed(packed) => {
                let mut origin = 0;
                if let Some(sink) = &packed.sink {
                    origin = sink.rows;
                    let inside = rows.start..rows.end.min(origin);
                    push(inside, 0, PartKind::Raw(sink.clone()));
                }
                let rest = rows.start.max(origin)..rows.end;
                push(rest, origin, PartKind::Pages(packed.pages.clone()));
            }
        }
    }

    /// Whether all rows are read from pages.
    pub(crate) fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(packed) if packed.sink.is_none())
    }

    /// What the cell holds; `rows` of a raw slot's rows are the sequence's.
    pub(crate) fn stored(&self, rows: u32, values_per_row: u64) -> StoredBytes {
        let packed_bytes = |packed: &Packed| {
            let pages = &packed.pages;
            let mut sum = StoredBytes::packed(pages.accounting(), pages.slot().reserved_bytes());
            if let Some(sink) = &packed.sink {
                let values = u64::from(sink.rows) * values_per_row;
                sum += StoredBytes::raw(values, sink.slot.reserved_bytes());
            }
            sum
        };
        match self {
            Self::Packed(packed) => packed_bytes(packed),
            Self::Raw { raw, cell } => {
                let values = u64::from(rows) * values_per_row;
                let mut sum = StoredBytes::raw(values, raw.slot.reserved_bytes());
                if let Some(packed) = cell.packed.get() {
                    sum += packed_bytes(packed);
                }
                sum
            }
        }
    }
}
