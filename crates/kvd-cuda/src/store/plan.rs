//! Blocks as launches of store kernels.

use super::sizes::PageSizes;
use super::{CodeOutput, HeadStore, StoreShapes, dtype_number};
use crate::abi::{IN_SHARED, SideKernel, StoreUnit};
use crate::huffman_tables::SharedMemory;
use crate::kernel_choice::{COPY_BYTES, rows_shape};
use kvd_codec::{HEADER_BYTES, ModelCodec, PageBytes, PageHeader, PayloadSizes};
use kvd_compute::EncodeSource;
use kvd_core::{LayerIndex, Side};
use std::collections::BTreeMap;

/// Sums of the checksum, and a slot for each warp: `StoreShared` of `page.cuh`.
const SHARED_BYTES: usize = 8 * 128 + 4 * 4;
/// Rows that all warps hold of a step that reads whole rows.
const ROWS: usize = 4 * 4;

/// One launch of `kvd_store_*`.
#[derive(Clone, Debug)]
pub struct StoreLaunch {
    /// The kernel.
    pub kernel: String,
    /// One per thread block.
    pub units: Vec<StoreUnit>,
    /// The page of each: `[block, side, head]`.
    pages: Vec<usize>,
    /// As in [`super::StoreParameters`].
    pub row_bytes: u32,
    /// As in [`super::StoreParameters`].
    pub gain_bytes: u32,
    /// Dynamic shared memory, bytes.
    pub shared_bytes: usize,
}

/// A page that a kernel has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPage {
    /// Its header.
    pub header: PageHeader,
    /// Its offset in [`super::StoreParameters::pages`].
    pub offset: u64,
    /// Bytes of its parts.
    pub parts: PageBytes,
}

/// Launches that write the pages of some blocks of a layer, each page behind the one before.
#[derive(Clone, Debug, Default)]
pub struct StorePlan {
    /// They may run side by side.
    pub launches: Vec<StoreLaunch>,
    /// Bytes of [`super::StoreParameters::pages`].
    pub page_bytes: u64,
    /// Bytes of [`super::StoreParameters::words`].
    pub words: u64,
    /// Place and sizes of each page, `[block, side, head]`; none of a page that is not asked for.
    pages: Vec<Option<(u64, PageSizes)>>,
}

/// A store plan that is being built.
pub(super) struct StorePlanBuilder<'a> {
    pub(super) codec: &'a ModelCodec,
    pub(super) layer: LayerIndex,
    pub(super) shared: SharedMemory,
    pub(super) plan: StorePlan,
    /// By kernel.
    pub(super) launches: BTreeMap<String, StoreLaunch>,
}

impl StoreShapes {
    /// The pages of whole blocks.
    #[must_use]
    pub fn plan_pages(
        &self,
        codec: &ModelCodec,
        blocks: &[EncodeSource],
        shared: SharedMemory,
    ) -> StorePlan {
        self.plan_of(codec, blocks, shared, |_| true, HeadStore::clone)
    }

    /// Those pages that have no codes, as rows.
    #[must_use]
    pub fn plan_fallback(
        &self,
        codec: &ModelCodec,
        blocks: &[EncodeSource],
        shared: SharedMemory,
        missing: impl Fn(usize) -> bool,
    ) -> StorePlan {
        let dtype = codec.geometry().dtype;
        let as_rows = |head: &HeadStore| HeadStore {
            kernel: SideKernel::of_rows(dtype),
            side: rows_shape(dtype, head.side.dim as usize),
            steps: 0,
            norms: 0,
            stage: CodeOutput::Fixed,
            prior: None,
            limit: dtype.largest_finite(),
            median: 0.0,
            reads_rows: false,
            sizes: PayloadSizes::of_rows(dtype, head.side.dim as usize),
        };
        self.plan_of(codec, blocks, shared, missing, as_rows)
    }

    /// Those pages whose Huffman codes take too much, with the priors of their heads.
    #[must_use]
    pub fn plan_priors(
        &self,
        codec: &ModelCodec,
        blocks: &[EncodeSource],
        shared: SharedMemory,
        too_long: impl Fn(usize) -> bool,
    ) -> StorePlan {
        let with_prior = |head: &HeadStore| HeadStore {
            stage: head.prior.map_or(head.stage, CodeOutput::Huffman),
            ..head.clone()
        };
        self.plan_of(codec, blocks, shared, too_long, with_prior)
    }

    fn plan_of(
        &self,
        codec: &ModelCodec,
        blocks: &[EncodeSource],
        shared: SharedMemory,
        wanted: impl Fn(usize) -> bool,
        store: impl Fn(&HeadStore) -> HeadStore,
    ) -> StorePlan {
        let mut builder = StorePlanBuilder::new(codec, self.layer, shared);
        for block in blocks {
            for side in Side::BOTH {
                for (head, of_head) in self.heads.iter().enumerate() {
                    let index = builder.plan.pages.len();
                    let page = wanted(index).then(|| {
                        let page = PlannedPage { block, index, side, head };
                        builder.push_page(page, &store(&of_head[side.index()]))
                    });
                    builder.plan.pages.push(page);
                }
            }
        }
        builder.into_plan()
    }
}

impl HeadStore {
    fn kernel_name(&self) -> String {
        let name = self.kernel.name();
        match &self.stage {
            CodeOutput::Fixed => format!("kvd_store_{name}"),
            CodeOutput::Huffman(_) => format!("kvd_store_huffman_{name}"),
            CodeOutput::Counted(counters) if counters.count == 0 => "kvd_histogram_rows".to_owned(),
            CodeOutput::Counted(_) => format!("kvd_histogram_{name}"),
        }
    }

    /// Shared memory between the sums of the checksum and the shifts of rows, bytes.
    fn row_bytes(&self) -> usize {
        let rows = if self.reads_rows { ROWS * 4 * self.side.dim as usize } else { 0 };
        match &self.stage {
            CodeOutput::Counted(counters) => rows.max(4 * counters.count * counters.copies),
            _ => rows,
        }
    }
}

/// A page that is planned: of a block, by its number among all pages.
#[derive(Clone, Copy)]
pub(super) struct PlannedPage<'a> {
    pub(super) block: &'a EncodeSource,
    pub(super) index: usize,
    pub(super) side: Side,
    pub(super) head: usize,
}

impl<'a> StorePlanBuilder<'a> {
    pub(super) fn new(codec: &'a ModelCodec, layer: LayerIndex, shared: SharedMemory) -> Self {
        Self { codec, layer, shared, plan: StorePlan::default(), launches: BTreeMap::new() }
    }

    pub(super) fn into_plan(self) -> StorePlan {
        StorePlan { launches: self.launches.into_values().collect(), ..self.plan }
    }

    /// Adds a page; gives its place and sizes.
    pub(super) fn push_page(
        &mut self,
        page: PlannedPage<'_>,
        store: &HeadStore,
    ) -> (u64, PageSizes) {
        let PlannedPage { block, index, side, head } = page;
        let geometry = self.codec.geometry();
        let (tokens, dim) = (block.rows as usize, store.side.dim as usize);
        let layout = geometry.raw_layout(block.capacity_rows);
        let rows = layout.row_offset(side, head as u64, u64::from(block.first_row));
        let place = kvd_codec::LayerSide { layer: self.layer, side };
        let header = if store.steps == 0 {
            self.codec.fallback_header(place, head, tokens).0
        } else {
            let version = store.stage.table_version();
            let header = self.codec.page_header(place, head, tokens);
            let table_version = version.unwrap_or(0);
            PageHeader { huffman: version.is_some(), table_version, ..header }
        };
        let mut words = [0; 5];
        for (word, bytes) in words.iter_mut().zip(header.to_bytes().as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let gain_bytes = if store.median > 0.0 { tokens } else { 0 };
        let [row_bytes, gain_bytes] =
            [store.row_bytes(), gain_bytes].map(|bytes| bytes.next_multiple_of(COPY_BYTES));
        let needed = tokens * (dim.next_multiple_of(4) + 4);
        let in_shared = SHARED_BYTES + row_bytes + gain_bytes + 4 * needed;
        let fits = in_shared <= self.shared.block;
        let sizes = store.page_sizes(side, tokens, geometry.dtype);
        let offset = self.plan.page_bytes;
        let (codes, room, copies) = match &store.stage {
            CodeOutput::Fixed => (0, sizes.room, 0),
            CodeOutput::Huffman(lanes) => (lanes.codes, sizes.room, 0),
            CodeOutput::Counted(to) => (to.first as u64, to.count, to.copies),
        };
        let kernel = store.kernel_name();
        let launch = self.launches.entry(kernel.clone()).or_insert_with(|| StoreLaunch {
            kernel,
            units: Vec::new(),
            pages: Vec::new(),
            row_bytes: 0,
            gain_bytes: 0,
            shared_bytes: 0,
        });
        launch.pages.push(index);
        launch.units.push(StoreUnit {
            side: store.side,
            rows: block.extent.offset + rows,
            page: offset,
            steps: store.steps,
            norms: store.norms,
            codes,
            words: if fits { IN_SHARED } else { self.plan.words },
            tokens: block.rows,
            dtype: dtype_number(geometry.dtype),
            is_value: u32::from(side == Side::Value),
            header: words,
            limit: store.limit,
            median: store.median,
            room: room as u32,
            copies: copies as u32,
        });
        launch.reserve_unit(row_bytes, gain_bytes, if fits { 4 * needed } else { 0 });
        self.plan.page_bytes += sizes.most as u64;
        self.plan.words += if fits { 0 } else { needed as u64 };
        (offset, sizes)
    }
}

impl StoreLaunch {
    /// Makes room for another unit.
    fn reserve_unit(&mut self, row_bytes: usize, gain_bytes: usize, word_bytes: usize) {
        let before = SHARED_BYTES + self.row_bytes as usize + self.gain_bytes as usize;
        let words = self.shared_bytes.saturating_sub(before).max(word_bytes);
        self.row_bytes = self.row_bytes.max(row_bytes as u32);
        self.gain_bytes = self.gain_bytes.max(gain_bytes as u32);
        let after = SHARED_BYTES + self.row_bytes as usize + self.gain_bytes as usize;
        self.shared_bytes = after + words;
    }
}

impl StorePlan {
    /// Bytes of [`super::StoreParameters::headers`] of all launches, one after another.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.launches.iter().map(|launch| launch.units.len() * HEADER_BYTES).sum()
    }

    /// Whether a page that was written, `[block, side, head]`, has Huffman codes by a table that
    /// fits it so badly that its prior is tried, as the host's encoder does.
    #[must_use]
    pub fn takes_too_much(&self, index: usize, page: &StoredPage) -> bool {
        let by_table = page.header.huffman && page.header.table_version > 0;
        let codes = page.parts.codes as usize;
        let sizes = self.pages.get(index).copied().flatten();
        by_table && sizes.is_some_and(|(_, sizes)| kvd_codec::takes_too_much(codes, sizes.fixed))
    }

    /// The pages that the launches wrote, by their headers: one for each `[block, side, head]`,
    /// none where it has no codes or was not asked for.
    #[must_use]
    pub fn read_pages(&self, headers: &[u8]) -> Vec<Option<StoredPage>> {
        let mut stored = vec![None; self.pages.len()];
        let indices = self.launches.iter().flat_map(|launch| &launch.pages);
        for (index, bytes) in indices.zip(headers.as_chunks::<HEADER_BYTES>().0) {
            let page = self.pages[*index].zip(PageHeader::from_bytes(bytes).ok());
            stored[*index] = page.map(|((offset, sizes), header)| StoredPage {
                header,
                offset,
                parts: sizes.page_bytes(&header),
            });
        }
        stored
    }
}
