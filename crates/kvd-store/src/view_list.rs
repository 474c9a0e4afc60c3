//! A layer's views of its blocks, in chunks that sequences and readers share.
//!
//! Owns [`ViewList`]: full chunks of [`CHUNK_VIEWS`] views behind `Arc`s, and the last views in a
//! tail of the list's own. A fork or a pin copies one pointer per chunk and the tail. A chunk that
//! others hold is copied before one of its views changes. Totals are kept beside the views, so
//! that nobody walks them. No locks: a list belongs to its layer's mutex.

use crate::layer_block::BlockView;
use crate::pool::FreedSlots;
use kvd_core::StoredBytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Views of a chunk. Tests use a small one, so that short sequences have several.
pub(crate) const CHUNK_VIEWS: usize = if cfg!(test) { 4 } else { 64 };

/// Totals of what some views read, in the form in which they read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ViewTotals {
    /// Blocks of which every row is read from pages.
    pub(crate) packed_blocks: u64,
    /// Blocks that are raw as a whole.
    pub(crate) raw_views: u64,
    /// Bytes of all, and values but those of [`ViewTotals::raw_views`].
    pub(crate) stored: StoredBytes,
}

impl ViewTotals {
    fn of_view(view: &BlockView) -> Self {
        Self {
            packed_blocks: u64::from(view.is_packed()),
            raw_views: u64::from(matches!(view, BlockView::Raw { .. })),
            stored: view.count_bytes(),
        }
    }

    fn of_views(views: &[BlockView]) -> Self {
        let mut totals = Self::default();
        views.iter().for_each(|view| totals.add_totals(&Self::of_view(view)));
        totals
    }

    fn add_totals(&mut self, other: &Self) {
        self.packed_blocks += other.packed_blocks;
        self.raw_views += other.raw_views;
        self.stored += other.stored;
    }

    fn subtract_totals(&mut self, other: &Self) {
        self.packed_blocks -= other.packed_blocks;
        self.raw_views -= other.raw_views;
        self.stored -= other.stored;
    }
}

/// How many views a list or a chunk adds to the views of all sequences.
#[derive(Debug)]
struct ViewCount {
    /// Views of all sequences.
    all: Arc<AtomicU64>,
    counted: u64,
}

impl ViewCount {
    fn new(all: &Arc<AtomicU64>, views: usize) -> Self {
        let mut count = Self { all: Arc::clone(all), counted: 0 };
        count.set_views(views);
        count
    }

    fn set_views(&mut self, views: usize) {
        let views = views as u64;
        // Wraps where it falls: the sum is right all the same.
        self.all.fetch_add(views.wrapping_sub(self.counted), Relaxed);
        self.counted = views;
    }
}

impl Drop for ViewCount {
    fn drop(&mut self) {
        self.all.fetch_sub(self.counted, Relaxed);
    }
}

/// [`CHUNK_VIEWS`] views of full blocks, and their totals.
#[derive(Debug)]
pub(crate) struct ViewChunk {
    views: Vec<BlockView>,
    totals: ViewTotals,
    count: ViewCount,
}

impl ViewChunk {
    fn new(views: Vec<BlockView>, all: &Arc<AtomicU64>) -> Self {
        let (totals, count) = (ViewTotals::of_views(&views), ViewCount::new(all, views.len()));
        Self { views, totals, count }
    }

    pub(crate) fn views(&self) -> &[BlockView] {
        &self.views
    }

    fn into_views(self) -> Vec<BlockView> {
        self.views
    }
}

impl Clone for ViewChunk {
    fn clone(&self) -> Self {
        let count = ViewCount::new(&self.count.all, self.views.len());
        Self { views: self.views.clone(), totals: self.totals, count }
    }
}

/// The views of a layer's blocks, in order. A list that is not empty has views in its tail, so the
/// last block, which may be filled in part, is never in a chunk.
#[derive(Debug)]
pub(crate) struct ViewList {
    chunks: Vec<Arc<ViewChunk>>,
    /// At most [`CHUNK_VIEWS`].
    tail: Vec<BlockView>,
    /// None for zeros: most layers of a daemon may be empty.
    totals: Option<Box<ViewTotals>>,
    count: ViewCount,
}

impl ViewList {
    /// A list without views; `all` counts the views of all sequences.
    pub(crate) fn new(all: &Arc<AtomicU64>) -> Self {
        Self { chunks: Vec::new(), tail: Vec::new(), totals: None, count: ViewCount::new(all, 0) }
    }

    pub(crate) fn len(&self) -> usize {
        self.chunks.len() * CHUNK_VIEWS + self.tail.len()
    }

    pub(crate) fn totals(&self) -> ViewTotals {
        self.totals.as_deref().copied().unwrap_or_default()
    }

    fn totals_mut(&mut self) -> &mut ViewTotals {
        self.totals.get_or_insert_default()
    }

    pub(crate) fn chunks(&self) -> &[Arc<ViewChunk>] {
        &self.chunks
    }

    pub(crate) fn tail(&self) -> &[BlockView] {
        &self.tail
    }

    pub(crate) fn get(&self, block: usize) -> &BlockView {
        let in_chunk = self.chunks.get(block / CHUNK_VIEWS);
        match in_chunk {
            Some(chunk) => &chunk.views[block % CHUNK_VIEWS],
            None => &self.tail[block - self.chunks.len() * CHUNK_VIEWS],
        }
    }

    /// The last view. Its form must not be changed through this: totals would not follow.
    pub(crate) fn last_mut(&mut self) -> Option<&mut BlockView> {
        self.tail.last_mut()
    }

    pub(crate) fn push(&mut self, view: BlockView) {
        if self.tail.len() == CHUNK_VIEWS {
            let full = std::mem::replace(&mut self.tail, Vec::with_capacity(1));
            self.chunks.push(Arc::new(ViewChunk::new(full, &self.count.all)));
        }
        self.totals_mut().add_totals(&ViewTotals::of_view(&view));
        self.tail.push(view);
        self.count_own();
    }

    /// Puts `view` in place of another, which is returned. A chunk that others hold is copied.
    pub(crate) fn replace_view(&mut self, block: usize, view: BlockView) -> BlockView {
        let new = ViewTotals::of_view(&view);
        let old = ViewTotals::of_view(self.get(block));
        self.totals_mut().subtract_totals(&old);
        self.totals_mut().add_totals(&new);
        let Some(chunk) = self.chunks.get_mut(block / CHUNK_VIEWS) else {
            let index = block - self.chunks.len() * CHUNK_VIEWS;
            return std::mem::replace(&mut self.tail[index], view);
        };
        let chunk = Arc::make_mut(chunk);
        chunk.totals.subtract_totals(&old);
        chunk.totals.add_totals(&new);
        std::mem::replace(&mut chunk.views[block % CHUNK_VIEWS], view)
    }

    /// Chunks and tail views of the first `len` views.
    fn split_point(len: usize) -> SplitPoint {
        let chunks = len.saturating_sub(1) / CHUNK_VIEWS;
        SplitPoint { chunks, tail: len - chunks * CHUNK_VIEWS }
    }

    /// Views that a fork of the first `len` adds to the views of all sequences.
    pub(crate) fn fork_count(len: usize) -> u64 {
        let SplitPoint { chunks, tail } = Self::split_point(len);
        (chunks + tail) as u64
    }

    /// The first `len` views for another sequence. Takes time in proportion to the chunks.
    pub(crate) fn fork_first(&self, len: usize) -> Self {
        let SplitPoint { chunks, tail } = Self::split_point(len);
        let shared = self.chunks[..chunks].to_vec();
        let tail = self.views_from(chunks)[..tail].to_vec();
        let totals = if len == self.len() {
            self.totals()
        } else {
            let mut totals = ViewTotals::of_views(&tail);
            shared.iter().for_each(|chunk| totals.add_totals(&chunk.totals));
            totals
        };
        let count = ViewCount::new(&self.count.all, shared.len() + tail.len());
        Self { chunks: shared, tail, totals: Some(Box::new(totals)), count }
    }

    /// Views of the chunk with that index, or of the tail behind the last.
    fn views_from(&self, chunk: usize) -> &[BlockView] {
        self.chunks.get(chunk).map_or(&self.tail, |chunk| &chunk.views)
    }

    /// Drops the views from `len` on and returns them.
    pub(crate) fn truncate_to(&mut self, len: usize) -> DiscardedViews {
        if len >= self.len() {
            return DiscardedViews::default();
        }
        let SplitPoint { chunks, tail } = Self::split_point(len);
        let mut gone = DiscardedList::default();
        if chunks < self.chunks.len() {
            gone.views = std::mem::take(&mut self.tail);
            let mut chunks = self.chunks.drain(chunks..);
            // Its first views are the tail from now on: its own when nobody else holds the chunk.
            if tail > 0
                && let Some(first) = chunks.next()
            {
                let mut views = Arc::unwrap_or_clone(first).views;
                gone.views.extend(views.drain(tail..));
                self.tail = views;
            }
            gone.chunks = chunks.collect();
        } else {
            gone.views = self.tail.split_off(tail);
        }
        let totals = self.totals_mut();
        gone.chunks.iter().for_each(|chunk| totals.subtract_totals(&chunk.totals));
        totals.subtract_totals(&ViewTotals::of_views(&gone.views));
        self.count_own();
        DiscardedViews { lists: vec![gone] }
    }

    /// Drops all views and returns them. Takes no time in proportion to them.
    pub(crate) fn take_all(&mut self) -> DiscardedViews {
        let (chunks, views) = (std::mem::take(&mut self.chunks), std::mem::take(&mut self.tail));
        self.totals = None;
        self.count_own();
        DiscardedViews { lists: vec![DiscardedList { chunks, views }] }
    }

    fn count_own(&mut self) {
        self.count.set_views(self.chunks.len() + self.tail.len());
    }
}

struct SplitPoint {
    chunks: usize,
    tail: usize,
}

/// Views that nobody reads through any more; dropping them gives bytes back.
#[derive(Debug, Default)]
pub(crate) struct DiscardedViews {
    lists: Vec<DiscardedList>,
}

/// Views that one layer had.
#[derive(Debug, Default)]
struct DiscardedList {
    chunks: Vec<Arc<ViewChunk>>,
    views: Vec<BlockView>,
}

impl DiscardedViews {
    /// Views in all.
    pub(crate) fn len(&self) -> usize {
        let count = |list: &DiscardedList| list.chunks.len() * CHUNK_VIEWS + list.views.len();
        self.lists.iter().map(count).sum()
    }

    /// Takes over what `other` has.
    pub(crate) fn append_all(&mut self, mut other: Self) {
        self.lists.append(&mut other.lists);
    }

    /// Takes over a view.
    pub(crate) fn push(&mut self, view: BlockView) {
        match self.lists.last_mut() {
            Some(list) => list.views.push(view),
            None => self.lists.push(DiscardedList { chunks: Vec::new(), views: vec![view] }),
        }
    }

    /// Frees the views of one chunk, at most; whether there are more.
    pub(crate) fn free_some(&mut self, freed: &mut FreedSlots) -> bool {
        let Some(list) = self.lists.last_mut() else { return false };
        let start = list.views.len().saturating_sub(CHUNK_VIEWS);
        list.views.drain(start..).for_each(|view| view.free_into(freed));
        if start == 0 {
            match list.chunks.pop() {
                // Of a chunk that others hold, nothing goes.
                Some(chunk) => {
                    list.views = Arc::into_inner(chunk).map_or(Vec::new(), ViewChunk::into_views)
                }
                None => drop(self.lists.pop()),
            }
        }
        !self.lists.is_empty()
    }
}
