//! The K and V of one block in one layer: where they lie and in which form.
//!
//! Owns the two forms ([`RawSlot`], [`PackedPages`]), what a reader or a copy is told
//! ([`RowExtent`]), and one sequence's view of a block. No locks: a view belongs to its layer's
//! mutex; what several sequences share is immutable, set once, or atomic.

use crate::pool::{FreedSlots, PoolSlot};
use kvd_core::{Extent, PackedBytes, StoredBytes};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A slot of rows in the stored precision, laid out as `geometry.raw_layout(rows)`. Which rows
/// are filled is for the holder to know: rows are appended while others already read.
#[derive(Clone, Debug)]
pub struct RawSlot {
    slot: PoolSlot,
    rows: u32,
}

impl RawSlot {
    /// A slot with space for `rows` rows. The store makes its own; this serves tests of others.
    #[must_use]
    pub fn new(slot: PoolSlot, rows: u32) -> Self {
        Self { slot, rows }
    }

    /// Where the rows are.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.slot.extent()
    }

    /// Rows the slot has space for: what the layout is computed from.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The slot: its bytes and how long they are held.
    #[must_use]
    pub fn slot(&self) -> &PoolSlot {
        &self.slot
    }

    /// Declares the first `rows` rows readable (and the others not).
    pub(crate) fn set_filled(&self, rows: u32) {
        if let Some(account) = self.slot.slot_account() {
            account.set_rows(rows);
        }
    }

    /// Rows that somebody may read.
    pub(crate) fn filled_rows(&self) -> u32 {
        self.slot.slot_account().map_or(self.rows, |account| account.rows())
    }

    /// Bytes of the slot, and the values of its filled rows, in number.
    fn count_filled(&self) -> StoredBytes {
        let values = self.slot.slot_account().map_or(0, |account| account.row_values());
        StoredBytes::count_raw(values, self.slot.reserved_bytes())
    }
}

/// The encoded pages of one block, one after another in one slot. A clone is a pin.
#[derive(Clone, Debug)]
pub struct PackedPages(Arc<PagesInner>);

#[derive(Debug)]
struct PagesInner {
    slot: PoolSlot,
    ends: Arc<[u32]>,
    accounting: PackedBytes,
}

impl PackedPages {
    /// Pages that a device worker has put into `slot`. `ends` is the end of each page in bytes from
    /// the slot's start, K pages of all heads and then V pages; a page starts where the one before
    /// it ends.
    #[must_use]
    pub fn new(slot: PoolSlot, ends: Arc<[u32]>, accounting: PackedBytes) -> Self {
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
    pub fn page_extent(&self, index: usize) -> Extent {
        let start = if index == 0 { 0 } else { self.0.ends[index - 1] };
        self.extent().sub_extent(u64::from(start), u64::from(self.0.ends[index]))
    }

    /// End of each page in bytes from the slot's start.
    #[must_use]
    pub fn ends(&self) -> &Arc<[u32]> {
        &self.0.ends
    }

    /// Bytes of the pages by kind.
    #[must_use]
    pub fn accounting(&self) -> &PackedBytes {
        &self.0.accounting
    }

    /// The slot: its bytes and how long they are held.
    #[must_use]
    pub fn slot(&self) -> &PoolSlot {
        &self.0.slot
    }

    /// Gives the slot's bytes to `freed` when nobody else holds the pages.
    fn free_into(self, freed: &mut FreedSlots) {
        if let Some(inner) = Arc::into_inner(self.0) {
            freed.take_slot(inner.slot);
        }
    }
}

/// The form in which rows are held, and the holder of their bytes.
#[derive(Clone, Debug)]
pub enum RowForm {
    /// In the stored precision.
    Raw(RawSlot),
    /// Encoded.
    Pages(PackedPages),
}

/// Some rows of a block, all in one form. A clone is a pin.
#[derive(Clone, Debug)]
pub struct RowExtent {
    /// Rows of the block that are meant; never empty.
    pub rows: Range<u32>,
    /// Row `r` of the block is row `r - origin` of the slot, or of each page.
    pub origin: u32,
    /// Where they are.
    pub form: RowForm,
}

impl RowExtent {
    /// These rows, borrowed.
    #[must_use]
    pub fn borrow(&self) -> RowExtentRef<'_> {
        let form = match &self.form {
            RowForm::Raw(raw) => RowFormRef::Raw(raw),
            RowForm::Pages(pages) => RowFormRef::Pages(pages),
        };
        RowExtentRef { rows: self.rows.clone(), origin: self.origin, form }
    }
}

/// A [`RowForm`] that something else keeps alive.
#[derive(Clone, Copy, Debug)]
pub enum RowFormRef<'a> {
    /// In the stored precision.
    Raw(&'a RawSlot),
    /// Encoded.
    Pages(&'a PackedPages),
}

/// A [`RowExtent`] that something else keeps alive.
#[derive(Clone, Debug)]
pub struct RowExtentRef<'a> {
    /// Rows of the block that are meant; never empty.
    pub rows: Range<u32>,
    /// Row `r` of the block is row `r - origin` of the slot, or of each page.
    pub origin: u32,
    /// Where they are.
    pub form: RowFormRef<'a>,
}

impl RowExtentRef<'_> {
    /// These rows with a pin of their own.
    #[must_use]
    pub fn to_pinned(&self) -> RowExtent {
        let form = match self.form {
            RowFormRef::Raw(raw) => RowForm::Raw(raw.clone()),
            RowFormRef::Pages(pages) => RowForm::Pages(pages.clone()),
        };
        RowExtent { rows: self.rows.clone(), origin: self.origin, form }
    }
}

/// The form that a full block takes when its first holder moves past it.
#[derive(Debug)]
pub(crate) struct PackedBlock {
    /// The rows that stay raw because they belong to the sink: all its rows, from row 0.
    pub(crate) sink: Option<RawSlot>,
    /// The other rows.
    pub(crate) pages: PackedPages,
}

impl PackedBlock {
    /// Counts what the block holds.
    fn count_bytes(&self) -> StoredBytes {
        let pages = &self.pages;
        let mut sum = StoredBytes::count_packed(pages.accounting(), pages.slot().reserved_bytes());
        if let Some(sink) = &self.sink {
            sum += sink.count_filled();
        }
        sum
    }

    fn free_into(self: Arc<Self>, freed: &mut FreedSlots) {
        if let Some(block) = Arc::into_inner(self) {
            block.pages.free_into(freed);
            block.sink.into_iter().for_each(|sink| freed.take_slot(sink.slot));
        }
    }
}

/// State that the holders of a raw block share besides its slot. Each holds one `Arc` of it (pins
/// of readers do not), so "am I alone" is a question to that `Arc`.
#[derive(Debug, Default)]
pub(crate) struct LayerBlock {
    /// Set by the first holder that moved past the block; the others change over without encoding
    /// when they do.
    pub(crate) packed: OnceLock<Arc<PackedBlock>>,
    /// It was to be packed before and stayed raw.
    pub(crate) deferred: AtomicBool,
    /// Its rows cannot be encoded: it stays raw for good.
    pub(crate) unpackable: AtomicBool,
}

impl LayerBlock {
    /// Whether there is nothing left to do for a block that left the window.
    pub(crate) fn is_unpackable(&self) -> bool {
        self.unpackable.load(Ordering::Relaxed)
    }

    /// Forgets what was tried with rows that are about to change.
    fn forget_attempts(&mut self) {
        *self.deferred.get_mut() = false;
        *self.unpackable.get_mut() = false;
    }
}

/// One sequence's view of one block. The raw slot lives as long as some view (or pin) has it: it
/// goes when no sequence's window covers the block any more.
#[derive(Clone, Debug)]
pub(crate) enum BlockView {
    /// In this sequence's window (or not yet packed).
    Raw {
        /// Row `r` of the block is row `r` of this slot.
        raw: RawSlot,
        /// Shared with the other sequences that see the same slot.
        block: Arc<LayerBlock>,
    },
    /// Left this sequence's window.
    Packed(Arc<PackedBlock>),
}

/// A reader's hold on one block: what a [`BlockView`] holds but the right to count as a sequence.
#[derive(Clone, Debug)]
pub(crate) enum PinnedBlock {
    Raw(RawSlot),
    Packed(Arc<PackedBlock>),
}

impl BlockView {
    /// A new block in a new slot.
    pub(crate) fn new_raw(raw: RawSlot) -> Self {
        Self::Raw { raw, block: Arc::default() }
    }

    /// Whether an append may write from `row` on into this view's slot: no other sequence sees
    /// the block, nobody has encoded it, and no reader has pinned the rows to be overwritten
    /// (rows that a truncation forgot may still be read by who pinned them before).
    pub(crate) fn is_appendable(&mut self, row: u32) -> bool {
        match self {
            Self::Raw { raw, block } => {
                // `get_mut` and not `strong_count`: it orders this after the others' last use.
                let Some(block) = Arc::get_mut(block).filter(|b| b.packed.get().is_none()) else {
                    return false;
                };
                let appendable = raw.filled_rows() <= row || raw.slot.is_unshared();
                if appendable {
                    block.forget_attempts();
                }
                appendable
            }
            Self::Packed(_) => false,
        }
    }

    /// Forgets the rows from `rows` on, as far as others do not need them.
    pub(crate) fn forget_rows(&mut self, rows: u32) {
        if self.is_appendable(rows)
            && let Self::Raw { raw, .. } = self
        {
            raw.set_filled(rows.min(raw.filled_rows()));
        }
    }

    /// A reader's hold.
    pub(crate) fn pin_block(&self) -> PinnedBlock {
        match self {
            Self::Raw { raw, .. } => PinnedBlock::Raw(raw.clone()),
            Self::Packed(packed) => PinnedBlock::Packed(Arc::clone(packed)),
        }
    }

    /// Where `rows` of the block lie.
    pub(crate) fn find_rows(&self, rows: Range<u32>) -> FoundRows<'_> {
        match self {
            Self::Raw { raw, .. } => find_raw_rows(raw, rows),
            Self::Packed(packed) => find_packed_rows(packed, rows),
        }
    }

    /// Whether all rows are read from pages.
    pub(crate) fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(packed) if packed.sink.is_none())
    }

    /// Counts what the block holds in the form that this view reads; the values of a raw one are
    /// not counted, since its rows change.
    pub(crate) fn count_bytes(&self) -> StoredBytes {
        match self {
            Self::Packed(packed) => packed.count_bytes(),
            Self::Raw { raw, .. } => StoredBytes::count_raw(0, raw.slot.reserved_bytes()),
        }
    }

    /// Drops the view and gives the slots that nobody else holds to `freed`.
    pub(crate) fn free_into(self, freed: &mut FreedSlots) {
        match self {
            Self::Packed(packed) => packed.free_into(freed),
            Self::Raw { raw, block } => {
                freed.take_slot(raw.slot);
                let packed = Arc::into_inner(block).and_then(|block| block.packed.into_inner());
                packed.into_iter().for_each(|packed| packed.free_into(freed));
            }
        }
    }
}

impl PinnedBlock {
    /// Bytes of the pool that are held.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.slot.reserved_bytes(),
            Self::Packed(packed) => {
                let sink = packed.sink.as_ref().map_or(0, |sink| sink.slot.reserved_bytes());
                packed.pages.slot().reserved_bytes() + sink
            }
        }
    }

    /// Gives the slots that nobody else holds to `freed`.
    pub(crate) fn free_into(self, freed: &mut FreedSlots) {
        match self {
            Self::Raw(raw) => freed.take_slot(raw.slot),
            Self::Packed(packed) => packed.free_into(freed),
        }
    }

    /// Where `rows` of the block lie.
    pub(crate) fn find_rows(&self, rows: Range<u32>) -> FoundRows<'_> {
        match self {
            Self::Raw(raw) => find_raw_rows(raw, rows),
            Self::Packed(packed) => find_packed_rows(packed, rows),
        }
    }
}

/// Where rows of one block lie: in the sink's slot, in a slot or pages.
pub(crate) type FoundRows<'a> =
    std::iter::Flatten<std::array::IntoIter<Option<RowExtentRef<'a>>, 2>>;

fn find_raw_rows(raw: &RawSlot, rows: Range<u32>) -> FoundRows<'_> {
    [name_rows(rows, 0, RowFormRef::Raw(raw)), None].into_iter().flatten()
}

fn find_packed_rows(packed: &PackedBlock, rows: Range<u32>) -> FoundRows<'_> {
    let origin = packed.sink.as_ref().map_or(0, RawSlot::rows);
    let in_sink = rows.start..rows.end.min(origin);
    let sink = packed.sink.as_ref();
    let sink = sink.and_then(|sink| name_rows(in_sink, 0, RowFormRef::Raw(sink)));
    let rest = rows.start.max(origin)..rows.end;
    [sink, name_rows(rest, origin, RowFormRef::Pages(&packed.pages))].into_iter().flatten()
}

fn name_rows(rows: Range<u32>, origin: u32, form: RowFormRef<'_>) -> Option<RowExtentRef<'_>> {
    (!rows.is_empty()).then_some(RowExtentRef { rows, origin, form })
}
