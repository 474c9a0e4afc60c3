//! An arena of real bytes and a device worker that executes tickets on it.
//!
//! A token is one `u32`. A raw row holds it once per side and head, with a mark that tells
//! whether it ever went through pages (the stand-in for lost precision). A page holds only the
//! tokens, so decoding sets the mark.

use crate::append::{AppendTicket, BegunAppend, RowCopy};
use crate::cache::CachedBlock;
use crate::layer_block::{BlockView, PinnedBlock};
use crate::pinned::{PinnedRange, PinnedRows};
use crate::sequence::{SequenceEntry, SequenceUsage};
use crate::shape::BlockRows;
use crate::{
    ArenaPool, ModelShape, PackedBytes, PoolSlot, SequenceStore, StoreError, StoreLimits,
    StoredBytes,
};
use crate::{CacheLimits, KeyChain, PackTask, PublishTicket, PublishedBlocks};
use crate::{PackedPages, RawSlot, RowExtent, RowExtentRef, RowForm, RowFormRef};
use kvd_core::{
    BootId, DType, Extent, Geometry, IdSpace, LayerIndex, ModelId, Namespace, PageBytes,
    RopePairing,
};
use kvd_core::{SequenceId, Side};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) const HEADS: u32 = 2;
const PAGE_HEADER: u64 = 12;

/// A token as it is read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) value: u32,
    /// Went through pages at least once.
    pub(super) lossy: bool,
    /// Is read from pages.
    pub(super) packed: bool,
}

pub(super) fn namespace(name: &str) -> Namespace {
    Namespace::new(name).unwrap()
}

pub(super) fn shape(id: u64, block_tokens: u32, sink: u32, recent: u32) -> Arc<ModelShape> {
    let geometry = Geometry {
        layers: 2,
        kv_heads: HEADS,
        head_dim_k: 2,
        head_dim_v: 4,
        block_tokens,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    };
    let namespace = namespace(&format!("ns{id}"));
    Arc::new(ModelShape { id: ModelId(id), namespace, geometry, sink, recent })
}

/// A store with its arena.
pub(super) struct Bench {
    pub(super) store: SequenceStore,
    pub(super) pool: Arc<ArenaPool>,
    pub(super) model: Arc<ModelShape>,
    pub(super) bytes: Mutex<Vec<u8>>,
}

impl Bench {
    pub(super) fn new(capacity: u64, model: Arc<ModelShape>) -> Self {
        Self::limited(capacity, model, StoreLimits::default())
    }

    pub(super) fn limited(capacity: u64, model: Arc<ModelShape>, limits: StoreLimits) -> Self {
        let pool = ArenaPool::new("host", capacity);
        let ids = Arc::new(IdSpace::new(BootId::new([1; 16]).unwrap(), [2; 16]));
        let store = SequenceStore::new(Arc::clone(&pool), limits, ids.sequence_counter(0, 1));
        Self { store, pool, model, bytes: Mutex::new(vec![0xEE; capacity as usize]) }
    }

    /// A store whose cache has limits.
    pub(super) fn cached(capacity: u64, model: Arc<ModelShape>, cache: CacheLimits) -> Self {
        let Self { store, pool, model, bytes } = Self::new(capacity, model);
        Self { store: store.with_cache(cache), pool, model, bytes }
    }

    /// Publishes blocks of a sequence from a token on; packing a block fails where `fail` says so.
    pub(super) fn publish(
        &self,
        id: SequenceId,
        start: u32,
        chain: &KeyChain<'_>,
        fail: impl Fn(u32) -> bool,
    ) -> Result<PublishedBlocks, StoreError> {
        let ticket = self.store.begin_publish(self.ns(), id, start, chain)?;
        Ok(self.finish_publish(ticket, fail))
    }

    /// Packs what a publish asks for, and commits it.
    pub(super) fn finish_publish(
        &self,
        mut ticket: PublishTicket,
        fail: impl Fn(u32) -> bool,
    ) -> PublishedBlocks {
        let layers: Vec<_> = ticket.layers_to_pack().collect();
        for layer in layers {
            let packed = self.pack_tasks(ticket.pack_batch(layer).tasks, &fail);
            ticket.set_packed(layer, packed);
        }
        ticket.commit_blocks()
    }

    fn pack_tasks(
        &self,
        tasks: &[PackTask],
        fail: impl Fn(u32) -> bool,
    ) -> Vec<Option<PackedPages>> {
        let mut answers = Vec::new();
        for task in tasks {
            let tokens: Vec<u32> = {
                let mut bytes = self.bytes.lock();
                if let Some(keep) = &task.keep {
                    self.copy(&mut bytes, keep);
                }
                let rows = task.rows.clone();
                rows.map(|row| self.get_row(&bytes, &task.from, row).value).collect()
            };
            let pack = || self.pack(&mut self.bytes.lock(), &tokens);
            answers.push(if fail(task.block) { None } else { pack() });
        }
        answers
    }

    pub(super) fn ns(&self) -> &Namespace {
        &self.model.namespace
    }

    pub(super) fn open(&self) -> SequenceId {
        self.store.open_sequence(Arc::clone(&self.model)).unwrap()
    }

    /// Bytes in use once all that was closed is free.
    pub(super) fn used(&self) -> u64 {
        self.pool.finish_reclaim();
        self.pool.read_usage().used_bytes
    }

    /// The model's totals once all that was closed is free.
    pub(super) fn usage(&self) -> crate::ModelUsage {
        self.pool.finish_reclaim();
        self.store.model_usage(self.model.id)
    }

    /// The description of a sequence, computed by a walk over all its blocks.
    pub(super) fn recount(&self, id: SequenceId) -> SequenceUsage {
        let entry = self.store.all_entries().into_iter().find(|entry| entry.id == id).unwrap();
        let mut usage = SequenceUsage {
            model: self.model.id,
            length: u32::MAX,
            layer_lengths: Vec::new(),
            packed_blocks: 0,
            raw_blocks: 0,
            stored: StoredBytes::default(),
        };
        let values = |rows: u32| u64::from(rows) * self.model.geometry.values_per_token();
        for layer in entry.layer_mutexes() {
            let layer = layer.lock();
            usage.length = usage.length.min(layer.length);
            usage.layer_lengths.push(layer.length);
            for BlockRows { block, rows } in self.model.rows_by_block(0..layer.length) {
                match layer.views.get(block) {
                    BlockView::Raw { raw, .. } => {
                        let bytes = raw.slot().reserved_bytes();
                        usage.stored += StoredBytes::count_raw(values(rows.end), bytes);
                        usage.raw_blocks += 1;
                    }
                    BlockView::Packed(packed) => {
                        let (pages, sink) = (&packed.pages, &packed.sink);
                        let bytes = pages.slot().reserved_bytes();
                        usage.stored += StoredBytes::count_packed(pages.accounting(), bytes);
                        if let Some(sink) = sink {
                            let bytes = sink.slot().reserved_bytes();
                            usage.stored += StoredBytes::count_raw(values(sink.rows()), bytes);
                        }
                        usage.packed_blocks += u64::from(sink.is_none());
                        usage.raw_blocks += u64::from(sink.is_some());
                    }
                }
            }
        }
        usage
    }

    /// Slots in use once all that was closed is free.
    pub(super) fn slots(&self) -> u64 {
        self.pool.finish_reclaim();
        self.pool.read_usage().slots
    }

    /// Asks to append; a replay is a failed test.
    pub(super) fn begin(
        &self,
        id: SequenceId,
        layer: u32,
        start: u32,
        tokens: u32,
    ) -> Result<AppendTicket, StoreError> {
        match self.store.begin_append(self.ns(), id, LayerIndex(layer), start, tokens, 7)? {
            BegunAppend::Ticket(ticket) => Ok(ticket),
            BegunAppend::Replayed { .. } => panic!("replayed"),
        }
    }

    /// Appends `values` to a layer, packing all that is due.
    pub(super) fn append(&self, id: SequenceId, layer: u32, start: u32, values: &[u32]) {
        let ticket = self.begin(id, layer, start, values.len() as u32).unwrap();
        self.finish(ticket, values, |_| false);
    }

    /// Tokens `range` of every layer, with values equal to their position.
    pub(super) fn fill(&self, id: SequenceId, range: std::ops::Range<u32>) {
        let values: Vec<u32> = range.clone().collect();
        for layer in 0..self.model.geometry.layers {
            self.append(id, layer, range.start, &values);
        }
    }

    /// Executes a ticket as a device worker does, and commits it; returns the blocks that were
    /// packed.
    pub(super) fn finish(
        &self,
        ticket: AppendTicket,
        values: &[u32],
        fail: impl Fn(u32) -> bool,
    ) -> Vec<u32> {
        let packed = self.execute(&ticket, values, fail);
        let blocks = ticket.pack_tasks().iter().zip(&packed).filter(|(_, p)| p.is_some());
        let blocks = blocks.map(|(task, _)| task.block).collect();
        let after = ticket.length_after();
        assert_eq!(ticket.commit(packed), after);
        blocks
    }

    /// Does what the device worker does between begin and commit.
    pub(super) fn execute(
        &self,
        ticket: &AppendTicket,
        values: &[u32],
        fail: impl Fn(u32) -> bool,
    ) -> Vec<Option<PackedPages>> {
        let mut bytes = self.bytes.lock();
        for copy in ticket.row_copies() {
            self.copy(&mut bytes, copy);
        }
        let mut next = 0;
        for write in ticket.row_writes() {
            assert_eq!(write.source_row, next, "writes cover the request in order");
            next += write.rows;
            for i in 0..write.rows {
                let value = values[(write.source_row + i) as usize];
                self.put_row(&mut bytes, &write.to, write.to_row + i, value, false);
            }
        }
        assert_eq!(next as usize, values.len());
        let mut answers = Vec::new();
        for task in ticket.pack_tasks() {
            if let Some(keep) = &task.keep {
                self.copy(&mut bytes, keep);
            }
            let rows = task.rows.clone();
            let tokens: Vec<u32> =
                rows.map(|row| self.get_row(&bytes, &task.from, row).value).collect();
            answers.push(if fail(task.block) { None } else { self.pack(&mut bytes, &tokens) });
        }
        answers
    }

    fn copy(&self, bytes: &mut [u8], copy: &RowCopy) {
        for (i, row) in copy.from.rows.clone().enumerate() {
            let token = self.get(bytes, &copy.from.borrow(), row);
            let to_row = copy.to_row + i as u32;
            self.put_row(bytes, &copy.to, to_row, token.value, token.lossy);
        }
    }

    fn pack(&self, bytes: &mut [u8], tokens: &[u32]) -> Option<PackedPages> {
        let page = PAGE_HEADER + 4 * tokens.len() as u64;
        let pages = u64::from(2 * HEADS);
        let reserved = self.pool.reserve_pages(page * pages).ok()?;
        let base = reserved.extent().offset;
        for p in 0..pages {
            for (i, token) in tokens.iter().enumerate() {
                let at = base + p * page + PAGE_HEADER + 4 * i as u64;
                put(bytes, at, *token);
            }
        }
        let ends = (1..=pages).map(|p| (p * page) as u32).collect();
        let accounting = PackedBytes {
            parts: PageBytes {
                codes: 4 * tokens.len() as u64 * pages,
                header: PAGE_HEADER * pages,
                ..PageBytes::default()
            },
            sides: [page * pages / 2; 2],
            values: tokens.len() as u64 * self.model.geometry.values_per_token(),
        };
        Some(PackedPages::new(reserved.seal_slot(), ends, accounting))
    }

    fn put_row(&self, bytes: &mut [u8], to: &RawSlot, row: u32, value: u32, lossy: bool) {
        let layout = self.model.geometry.raw_layout(to.rows());
        assert!(row < to.rows());
        for side in Side::BOTH {
            for head in 0..u64::from(HEADS) {
                let at = to.extent().offset + layout.row_offset(side, head, u64::from(row));
                put(bytes, at, value);
                put(bytes, at + 4, u32::from(lossy));
            }
        }
    }

    fn get_row(&self, bytes: &[u8], from: &RawSlot, row: u32) -> Token {
        let layout = self.model.geometry.raw_layout(from.rows());
        assert!(row < from.rows());
        let mut copies = Side::BOTH.into_iter().flat_map(|side| {
            (0..u64::from(HEADS)).map(move |head| layout.row_offset(side, head, u64::from(row)))
        });
        let read = |offset| {
            let at = from.extent().offset + offset;
            (get(bytes, at), get(bytes, at + 4))
        };
        let (value, mark) = read(copies.next().unwrap());
        assert!(mark <= 1, "row {row} of {from:?} was never written: {mark:#x}");
        assert!(copies.all(|o| read(o) == (value, mark)), "heads of row {row} differ");
        Token { value, lossy: mark == 1, packed: false }
    }

    fn get(&self, bytes: &[u8], extent: &RowExtentRef<'_>, row: u32) -> Token {
        let row = row - extent.origin;
        match extent.form {
            RowFormRef::Raw(raw) => self.get_row(bytes, raw, row),
            RowFormRef::Pages(pages) => {
                let read = |index: usize| {
                    let page = pages.page_extent(index);
                    let at = PAGE_HEADER + 4 * u64::from(row);
                    assert!(at + 4 <= page.len, "row {row} is not in {page:?}");
                    get(bytes, page.offset + at)
                };
                let value = read(0);
                assert!((1..pages.ends().len()).all(|i| read(i) == value), "pages differ");
                Token { value, lossy: true, packed: true }
            }
        }
    }

    /// The rows that a pin lends; checks that they cover its range in order.
    pub(super) fn show(&self, pinned: &PinnedRange) -> Vec<Token> {
        let bytes = self.bytes.lock();
        let block = self.model.geometry.block_tokens;
        let mut tokens = Vec::new();
        for PinnedRows { first_token, extent } in pinned.find_rows() {
            assert_eq!(first_token as usize, pinned.range.start as usize + tokens.len());
            assert_eq!(first_token % block, extent.rows.start);
            assert!(!extent.rows.is_empty() && extent.rows.end <= block);
            tokens.extend(extent.rows.clone().map(|row| self.get(&bytes, &extent, row)));
        }
        assert_eq!(tokens.len(), pinned.range.len());
        tokens
    }

    pub(super) fn pin(&self, id: SequenceId, layer: u32) -> PinnedRange {
        self.store.pin_range(self.ns(), id, LayerIndex(layer), .., None).unwrap()
    }

    /// All tokens of a layer.
    pub(super) fn read(&self, id: SequenceId, layer: u32) -> Vec<Token> {
        self.show(&self.pin(id, layer))
    }

    pub(super) fn values(&self, id: SequenceId, layer: u32) -> Vec<u32> {
        self.read(id, layer).iter().map(|t| t.value).collect()
    }

    /// One character per token: `r` raw, `p` packed, `d` raw after decoding.
    pub(super) fn states(&self, id: SequenceId, layer: u32) -> String {
        let state = |t: &Token| match (t.packed, t.lossy) {
            (true, _) => 'p',
            (false, true) => 'd',
            (false, false) => 'r',
        };
        self.read(id, layer).iter().map(state).collect()
    }
}

fn put(bytes: &mut [u8], at: u64, value: u32) {
    let at = at as usize;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn get(bytes: &[u8], at: u64) -> u32 {
    let at = at as usize;
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Distinct slots, by offset.
#[derive(Default)]
pub(super) struct Live(BTreeMap<u64, (Extent, u64)>);

impl Live {
    pub(super) fn add(&mut self, slot: &PoolSlot) {
        self.0.insert(slot.extent().offset, (slot.extent(), slot.reserved_bytes()));
    }

    fn add_extent(&mut self, extent: &RowExtent) {
        match &extent.form {
            RowForm::Raw(raw) => self.add(raw.slot()),
            RowForm::Pages(pages) => self.add(pages.slot()),
        }
    }

    fn add_view(&mut self, view: &BlockView) {
        self.add_block(&view.pin_block());
        if let BlockView::Raw { block, .. } = view
            && let Some(packed) = block.packed.get()
        {
            self.add_block(&PinnedBlock::Packed(packed.clone()));
        }
    }

    fn add_block(&mut self, block: &PinnedBlock) {
        match block {
            PinnedBlock::Raw(raw) => self.add(raw.slot()),
            PinnedBlock::Packed(packed) => {
                self.add(packed.pages.slot());
                packed.sink.iter().for_each(|sink| self.add(sink.slot()));
            }
        }
    }

    pub(super) fn add_pinned(&mut self, pinned: &PinnedRange) {
        let chunks = pinned.views.pinned_chunks().iter();
        chunks.flat_map(|chunk| chunk.views()).for_each(|view| self.add_view(view));
        pinned.views.pinned_blocks().iter().for_each(|block| self.add_block(block));
    }

    pub(super) fn add_entry(&mut self, entry: &SequenceEntry) {
        for layer in entry.layer_mutexes() {
            let layer = layer.lock();
            (0..layer.views.len()).for_each(|block| self.add_view(layer.views.get(block)));
        }
    }

    pub(super) fn add_cached(&mut self, block: &CachedBlock) {
        block.layer_forms().iter().for_each(|layer| self.add_block(layer));
    }

    pub(super) fn add_ticket(&mut self, ticket: &AppendTicket) {
        self.add_entry(ticket.sequence_entry());
        for copy in ticket.row_copies() {
            self.add_extent(&copy.from);
        }
        ticket.row_writes().iter().for_each(|write| self.add(write.to.slot()));
        for task in ticket.pack_tasks() {
            self.add(task.from.slot());
            task.keep.iter().for_each(|keep| self.add(keep.to.slot()));
        }
    }

    /// Bytes taken in all; fails when two overlap.
    pub(super) fn total(&self) -> u64 {
        let mut end = 0;
        for (extent, reserved) in self.0.values() {
            assert!(extent.offset >= end, "{extent:?} overlaps the slot before it");
            end = extent.offset + reserved;
        }
        self.0.values().map(|(_, reserved)| reserved).sum()
    }
}
