//! A plan as block tables and launches. Pure: it reads no page memory; what a page is comes from
//! the header that whoever placed it kept.

mod fits;
mod queries;
mod shapes;

pub(crate) use fits::one_page;
pub use shapes::LayerShapes;

use crate::PlanError;
use crate::abi::{
    ATTEND_THREADS, AttendUnit, COEFFICIENTS, PageEntry, SideKernel, SideShape, TILE_TOKENS,
    TransformUnit,
};
use crate::buffers::{BUFFERS_MIN, TileBuffers};
use crate::codebook_table::split_channels;
use crate::huffman_tables::{BlockRoom, SharedMemory, plan_decoding};
use crate::kernel_choice::{
    COPY_BYTES, ChosenKernel, KernelPair, KernelVariant, ROWS, fallback_shape, rows_shape,
};
use crate::late_pairs::LatePairs;
use crate::page_shapes::TileShape;
use crate::specialized;
use crate::tensor_core::{
    choose_variant, fixed_bytes, resident_blocks, rows_of_kernel, staged_bytes, table_bytes,
    tiles_together, work_bytes,
};
use kvd_codec::{HEADER_BYTES, ModelCodec, PageHeader};
use kvd_compute::{AttendPlan, PlanPart, PlanQuery, Source};
use kvd_core::Side;
use queries::HeadRows;
use std::collections::BTreeMap;

/// Shared memory of two tiles' gains, 4 bits per row wherever they begin: `tile_scheduler.cuh`.
pub(crate) const GAIN_STAGE: usize = 3 * COPY_BYTES;
/// Value channels that a thread block sums.
const DIM_MAX: usize = 2 * ATTEND_THREADS as usize;

/// Choices that do not change the result.
#[derive(Clone, Copy, Debug)]
pub struct TableOptions {
    /// Parts (blocks) of one unit at most: the split of the stored range.
    pub parts_per_unit: usize,
    /// The GPU's shared memory.
    pub shared: SharedMemory,
    /// Chunks of Huffman codes of each side that a thread block decodes together, 1, 2 or 4, where
    /// it has room for them. Without, as many as make a multiprocessor decode the most.
    pub chunks: Option<u32>,
    /// Units among which the channels of values are split at most, where codebooks belong to groups
    /// of channels and no tensor cores sum them; at least 1.
    pub channel_split: u32,
    /// Pairs that are read by kernels compiled late, with products on tensor cores, where their
    /// shapes allow it.
    pub late: LatePairs,
}

/// One launch of `kvd_attend_*`.
#[derive(Clone, Debug, Default)]
pub struct AttendLaunch {
    /// The kernel.
    pub kernel: String,
    /// One per thread block.
    pub units: Vec<AttendUnit>,
    /// As in [`crate::AttendParameters`].
    pub key_stage: u32,
    /// As in [`crate::AttendParameters`].
    pub value_stage: u32,
    /// As in [`crate::AttendParameters`].
    pub key_table: u32,
    /// As in [`crate::AttendParameters`].
    pub value_table: u32,
    /// As in [`crate::AttendParameters`].
    pub chunks: u32,
    /// As in [`crate::AttendParameters`].
    pub key_chunk: u32,
    /// As in [`crate::AttendParameters`].
    pub value_chunk: u32,
    /// As in [`crate::AttendParameters`].
    pub buffers: u32,
    /// Dynamic shared memory, bytes.
    pub shared_bytes: usize,
}

/// The tables and launches that answer a plan on a device.
#[derive(Clone, Debug, Default)]
pub struct AttendTables {
    /// The block table.
    pub pages: Vec<PageEntry>,
    /// Scaled queries, `[rows, key channels]`: as given and folded into coefficient space. None
    /// where a kernel takes them from a worker's memory.
    pub queries: Vec<f32>,
    /// Terms added to a row's scores; empty in the same case.
    pub offsets: Vec<f32>,
    /// Rows of both.
    pub query_rows: usize,
    /// Units that take queries from a worker's memory and write answers into it.
    pub turns: Vec<TransformUnit>,
    /// Launches; they may run side by side.
    pub launches: Vec<AttendLaunch>,
    /// Rows of partial results.
    pub partials: usize,
    /// End of each output row's list in `order`.
    pub ends: Vec<u32>,
    /// Partial results by output row, with the mark of coefficients.
    pub order: Vec<u32>,
    /// Soft cap, 0 for none.
    pub soft_cap: f32,
}

/// Both sides of a part: kernels, shapes, and which of them hold coefficients.
#[derive(Clone, Copy, PartialEq)]
struct PartSides {
    kernels: [SideKernel; 2],
    shapes: [SideShape; 2],
    folded: [bool; 2],
}

/// A kernel with a number of rows, and which one has the shapes of its units as constants: what one
/// launch runs.
type LaunchKey = (KernelPair, KernelVariant, u32, Option<&'static str>);

struct TableBuilder<'a> {
    plan: &'a AttendPlan,
    codec: &'a ModelCodec,
    shapes: &'a LayerShapes,
    /// Header of the page that begins at an offset of the arena.
    header: &'a dyn Fn(u64) -> Option<PageHeader>,
    /// The queries, where the host has them.
    q: Option<Vec<f32>>,
    options: TableOptions,
    tables: AttendTables,
    units: BTreeMap<LaunchKey, (Vec<AttendUnit>, [usize; 9])>,
    /// Partial results of each output row.
    rows: Vec<Vec<u32>>,
}

impl AttendTables {
    /// Builds the tables of a plan whose shapes the caller has checked. `header` gives the header
    /// of the page that begins at an offset of the arena.
    ///
    /// # Errors
    /// When no kernel reads what the plan names, or a page is unknown.
    pub fn new(
        plan: &AttendPlan,
        codec: &ModelCodec,
        shapes: &LayerShapes,
        header: &dyn Fn(u64) -> Option<PageHeader>,
        options: TableOptions,
    ) -> Result<Self, PlanError> {
        let mut q = vec![0f32; plan.q.len() / plan.dtype.size_bytes()];
        plan.dtype.widen_values(&plan.q, &mut q);
        Self::build_tables(plan, codec, shapes, header, (options, Some(q)))
    }

    /// Builds the tables where kernels read the queries from a worker's memory: the plan's own are
    /// ignored.
    ///
    /// # Errors
    /// As [`AttendTables::new`].
    pub fn in_place(
        plan: &AttendPlan,
        codec: &ModelCodec,
        shapes: &LayerShapes,
        header: &dyn Fn(u64) -> Option<PageHeader>,
        options: TableOptions,
    ) -> Result<Self, PlanError> {
        Self::build_tables(plan, codec, shapes, header, (options, None))
    }

    fn build_tables(
        plan: &AttendPlan,
        codec: &ModelCodec,
        shapes: &LayerShapes,
        header: &dyn Fn(u64) -> Option<PageHeader>,
        (options, q): (TableOptions, Option<Vec<f32>>),
    ) -> Result<Self, PlanError> {
        let geometry = codec.geometry();
        let dim = geometry.head_dim(Side::Value);
        if dim > DIM_MAX {
            return Err(PlanError::HeadDim { dim, max: DIM_MAX });
        }
        let tables = Self { soft_cap: plan.soft_cap.unwrap_or(0.0), ..Self::default() };
        let rows = plan.queries.iter().map(|query| query.n_q as usize).sum::<usize>();
        let rows = vec![Vec::new(); rows * plan.q_heads as usize];
        let units = BTreeMap::new();
        let mut builder =
            TableBuilder { plan, codec, shapes, header, q, options, tables, units, rows };
        let mut batch_row = 0;
        for query in &plan.queries {
            for head in 0..geometry.kv_heads as usize {
                builder.append_head(query, head, batch_row)?;
            }
            batch_row += query.n_q as usize;
        }
        builder.into_tables()
    }
}

impl TableBuilder<'_> {
    /// Everything of one query and KV head.
    fn append_head(
        &mut self,
        query: &PlanQuery,
        head: usize,
        batch_row: usize,
    ) -> Result<(), PlanError> {
        let rows = self.append_queries(query, head, batch_row);
        let parts = query.parts.iter().map(|part| Ok((self.part_sides(part, head)?, part)));
        let parts = parts.collect::<Result<Vec<_>, PlanError>>()?;
        for run in parts.chunk_by(|a, b| a.0 == b.0) {
            for run in run.chunks(self.options.parts_per_unit.max(1)) {
                self.append_run(query, &rows, run)?;
            }
        }
        Ok(())
    }

    /// How both sides of a part are stored.
    fn part_sides(&self, part: &PlanPart, head: usize) -> Result<PartSides, PlanError> {
        let geometry = self.codec.geometry();
        let dtype = geometry.dtype;
        let mut sides = PartSides {
            kernels: [SideKernel::of_rows(dtype); 2],
            shapes: Side::BOTH.map(|side| rows_shape(dtype, geometry.head_dim(side))),
            folded: [false; 2],
        };
        if let Source::Pages { .. } = part.source {
            for side in Side::BOTH {
                let header = self.part_page(part, side, head)?.1;
                let index = side.index();
                let error = |what| self.shapes.no_side(side, head, what);
                let of_head = self.shapes.heads[head][index].as_ref();
                let known = if header.fallback {
                    let dim = geometry.head_dim(side);
                    fallback_shape(header.quantizer, dim).ok_or("a page of an unknown fallback")
                } else {
                    sides.folded[index] =
                        !self.codec.head_codec(self.plan.layer, side, head).is_identity();
                    of_head
                        .map_err(|what| *what)
                        .and_then(|shapes| shapes.version_shape(header.table_version))
                };
                (sides.kernels[index], sides.shapes[index]) = known.map_err(error)?;
            }
        }
        Ok(sides)
    }

    /// Where the page of one side and head begins, and its header.
    fn part_page(
        &self,
        part: &PlanPart,
        side: Side,
        head: usize,
    ) -> Result<(u64, PageHeader), PlanError> {
        let Source::Pages { extent, ends, .. } = &part.source else {
            unreachable!("asked of pages only");
        };
        let index = side.index() * self.codec.geometry().kv_heads as usize + head;
        let start = if index == 0 { 0 } else { ends[index - 1] };
        let offset = extent.offset + u64::from(start);
        Ok((offset, (self.header)(offset).ok_or(PlanError::UnknownPage(offset))?))
    }

    /// The entry of a part in the block table.
    fn page_entry(&self, part: &PlanPart, head: usize) -> Result<PageEntry, PlanError> {
        let (rows, first_token) = (part.rows, part.first_token);
        let of_part = PageEntry { rows, first_token, ..PageEntry::default() };
        match &part.source {
            Source::Raw { extent, capacity_rows, first_row } => {
                let layout = self.codec.geometry().raw_layout(*capacity_rows);
                let [key, value] =
                    Side::BOTH.map(|side| extent.offset + layout.row_offset(side, head as u64, 0));
                let (tokens, first_row) = (*capacity_rows, *first_row);
                Ok(PageEntry { key, value, tokens, first_row, ..of_part })
            }
            Source::Pages { first_row, .. } => {
                let (key, keys) = self.part_page(part, Side::Key, head)?;
                let (value, values) = self.part_page(part, Side::Value, head)?;
                if keys.tokens != values.tokens {
                    let (keys, values) = (keys.tokens, values.tokens);
                    return Err(PlanError::Lengths { offset: key, keys, values });
                }
                // Kernels have shared memory for the tiles of a block.
                let (tokens, max) = (keys.tokens, self.codec.geometry().block_tokens);
                if u32::from(tokens) > max {
                    return Err(PlanError::TooLong { offset: key, tokens, max });
                }
                let header = HEADER_BYTES as u64;
                let gain_bytes = values.gain_bytes() as u32;
                Ok(PageEntry {
                    key: key + header,
                    value: value + header,
                    tokens: u32::from(tokens),
                    first_row: *first_row,
                    key_bytes: keys.payload_len,
                    value_bytes: values.payload_len - gain_bytes,
                    gain_bytes,
                    ..of_part
                })
            }
        }
    }

    /// The units over parts that are stored alike.
    fn append_run(
        &mut self,
        query: &PlanQuery,
        rows: &HeadRows,
        parts: &[(PartSides, &PlanPart)],
    ) -> Result<(), PlanError> {
        let sides = parts[0].0;
        let first_page = self.tables.pages.len() as u32;
        let (mut tokens, mut tile) = (0, 0);
        for (_, part) in parts {
            let entry = self.page_entry(part, rows.head)?;
            tokens = tokens.max(entry.tokens as usize);
            tile = tile.max(self.tile_bytes(&entry));
            self.tables.pages.push(entry);
        }
        let most = ROWS[ROWS.len() - 1] as usize;
        for first_row in (0..rows.count).step_by(most) {
            let count = (rows.count - first_row).min(most);
            let partial = self.tables.partials;
            let folded = if sides.folded[0] { rows.count } else { 0 };
            let unit = AttendUnit {
                key: sides.shapes[0],
                value: sides.shapes[1],
                first_page,
                pages: parts.len() as u32,
                query: (rows.first + folded + first_row) as u32,
                rows: count as u32,
                first_row: first_row as u32,
                heads: rows.group as u32,
                position: query.position,
                window: query.sliding_window.unwrap_or(0),
                partial: partial as u32,
                page_stops: tokens.div_ceil(specialized::STOP_TOKENS) as u32,
            };
            let mark = if sides.folded[1] { COEFFICIENTS } else { 0 };
            for row in first_row..first_row + count {
                let token = rows.batch_row + row / rows.group;
                let out =
                    token * self.plan.q_heads as usize + rows.head * rows.group + row % rows.group;
                self.rows[out].push((partial + row - first_row) as u32 | mark);
            }
            self.tables.partials += count;
            self.push(&sides, unit, (tokens, tile));
        }
        Ok(())
    }

    /// Bytes of a full tile of a page, or of rows as they came.
    fn tile_bytes(&self, entry: &PageEntry) -> usize {
        let payload = (entry.key_bytes + entry.value_bytes + entry.gain_bytes) as usize;
        match payload {
            0 => {
                let layout = self.codec.geometry().raw_layout(1);
                let row = Side::BOTH.iter().map(|side| layout.row_bytes(*side)).sum::<u64>();
                TILE_TOKENS * row as usize
            }
            _ => payload * TILE_TOKENS / (entry.tokens as usize).max(1),
        }
    }

    fn push(&mut self, sides: &PartSides, unit: AttendUnit, (tokens, tile): (usize, usize)) {
        let [keys, values] = sides.kernels;
        let huffman = unit.key.stride > 0 || unit.value.stride > 0;
        let pair = KernelPair { keys, values, huffman };
        let variant = choose_variant(pair, &unit.key, &unit.value, self.options.late);
        let mut unit = unit;
        if matches!(variant, KernelVariant::Floats | KernelVariant::Any) && values == SideKernel::Vq
        {
            let room = self.shapes.rooms[Side::Value.index()];
            split_channels(&mut unit.value, self.options.channel_split, room.bytes);
        }
        let rows = rows_of_kernel(variant, unit.rows);
        let chosen = ChosenKernel { pair, variant };
        let work = |side, shape| work_bytes(chosen, side, shape, rows as usize);
        let work = [work(Side::Key, &unit.key), work(Side::Value, &unit.value)];
        let fixed = specialized::specialized_kernel(chosen, rows, &unit.key, &unit.value);
        let (units, sizes) = self.units.entry((pair, variant, rows, fixed)).or_default();
        // Runs and Huffman tables stand behind a side's own table.
        let table = |side, shape: &SideShape| {
            let lanes = shape.lane_bytes as usize;
            table_bytes(chosen, side, shape) + lanes.next_multiple_of(COPY_BYTES)
        };
        let tiles = tiles_together(chosen, rows as usize);
        let staged = |side, shape| staged_bytes(chosen, side, TileShape { shape, tokens }, rows);
        let needed = [
            staged(Side::Key, &unit.key),
            staged(Side::Value, &unit.value),
            table(Side::Key, &unit.key),
            table(Side::Value, &unit.value),
            unit.key.chunk_bytes as usize,
            unit.value.chunk_bytes as usize,
            work[0],
            work[1],
            tiles * tile,
        ];
        for (size, needed) in sizes.iter_mut().zip(needed) {
            *size = (*size).max(needed);
        }
        for part in 0..unit.value.parts {
            units.push(AttendUnit { value: SideShape { part, ..unit.value }, ..unit });
        }
    }

    fn into_tables(mut self) -> Result<AttendTables, PlanError> {
        for row in std::mem::take(&mut self.rows) {
            self.tables.order.extend(row);
            self.tables.ends.push(self.tables.order.len() as u32);
        }
        let dim = self.codec.geometry().head_dim(Side::Key);
        for ((pair, variant, rows, fixed), (units, sizes)) in std::mem::take(&mut self.units) {
            let chosen = ChosenKernel { pair, variant };
            if let Some(block) = fixed.and_then(specialized::token_block) {
                self.check_shared(block.shared_bytes)?;
                self.tables.launches.push(AttendLaunch {
                    kernel: fixed.unwrap_or_default().to_owned(),
                    units,
                    buffers: BUFFERS_MIN as u32,
                    shared_bytes: block.shared_bytes,
                    ..AttendLaunch::default()
                });
                continue;
            }
            let [key_stage, value_stage, key_table, value_table, ..] = sizes;
            let [.., key_chunk, value_chunk, key_work, value_work, tile] = sizes;
            let sizes = [key_stage, value_stage, key_table, value_table];
            let own = fixed_bytes(chosen, rows as usize, dim);
            let other = shared_bytes(own, sizes) + key_work + value_work;
            let (resident, _) = resident_blocks(chosen, fixed.is_some());
            let room = BlockRoom { shared: self.options.shared, resident };
            let planned = self.options.chunks.map(|chunks| chunks as usize);
            let (chunks, bytes) = plan_decoding([key_chunk, value_chunk], other, room, planned);
            let buffer = key_stage + value_stage + GAIN_STAGE;
            let staging = TileBuffers { block: other + bytes, buffer, tile, huffman: pair.huffman };
            let buffers = staging.buffer_count(room);
            let shared_bytes = other + bytes + (buffers - BUFFERS_MIN) * buffer;
            self.check_shared(shared_bytes)?;
            self.tables.launches.push(AttendLaunch {
                kernel: fixed.map_or_else(|| pair.kernel_name(variant, rows), str::to_owned),
                units,
                key_stage: key_stage as u32,
                value_stage: value_stage as u32,
                key_table: key_table as u32,
                value_table: value_table as u32,
                chunks: chunks as u32,
                key_chunk: key_chunk as u32,
                value_chunk: value_chunk as u32,
                buffers: buffers as u32,
                shared_bytes,
            });
        }
        Ok(self.tables)
    }

    /// Refuses a launch that asks for more than a thread block may, which would cost the device.
    fn check_shared(&self, bytes: usize) -> Result<(), PlanError> {
        let (max, layer) = (self.options.shared.block, self.plan.layer.0);
        if bytes > max { Err(PlanError::SharedMemory { layer, bytes, max }) } else { Ok(()) }
    }
}

/// Shared memory of a thread block with [`BUFFERS_MIN`] buffers, decoding and products apart.
fn shared_bytes(fixed: usize, sizes: [usize; 4]) -> usize {
    let [key_stage, value_stage, key_table, value_table] = sizes;
    let staged = BUFFERS_MIN * (key_stage + value_stage + GAIN_STAGE);
    fixed + key_table + value_table + staged
}
