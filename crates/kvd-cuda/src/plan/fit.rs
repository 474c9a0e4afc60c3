//! How a thread block of a pair of sides fits a GPU: what a plan says and the launches follow.

use super::codebook_cache::{
    HeadCodebooks, lookup_kernels, register_slack, share_slack, sides_in_registers,
};
use super::occupancy::{BlockResources, Occupancy};
use super::{CodebookPlan, GpuLimits, stored_bits};
use crate::abi::TILE_TOKENS;
use crate::block_table::GAIN_STAGE;
use crate::buffers::{BUFFERS_MIN, TileBuffers};
use crate::codebook_table::CodebookRoom;
use crate::huffman_tables::{self, BlockRoom, PIECE_BYTES, plan_decoding};
use crate::late_pairs::LatePairs;
use crate::tensor_core;
use kvd_codec::{EntropyCoding, SideSpec};
use kvd_core::{Geometry, Side};

/// A thread block, and what a multiprocessor holds of it.
pub(super) struct BlockFit {
    pub(super) block: BlockResources,
    pub(super) occupancy: Occupancy,
    /// Tiles in shared memory.
    pub(super) buffers: u32,
    /// Bytes on their way to it at once.
    pub(super) under_way: u32,
    /// Chunks of each side that are decoded together.
    pub(super) chunks: u32,
    pub(super) books: [Option<HeadCodebooks>; 2],
    /// How they are kept where channels are not split.
    pub(super) codebooks: [Option<CodebookPlan>; 2],
    /// Shared memory for the codebooks of each side.
    pub(super) table_bytes: [u32; 2],
    /// Why products are not on tensor cores.
    pub(super) products: [Option<&'static str>; 2],
    /// Whether the kernel is compiled when a model is registered.
    pub(super) is_late: bool,
    /// Whether its warps own tokens.
    pub(super) owns_tokens: bool,
}

impl BlockFit {
    /// The fit for units of `rows` query rows, where `late` were compiled; `None` when not even one
    /// thread block fits.
    pub(super) fn new(
        specs: [&SideSpec; 2],
        geometry: &Geometry,
        rows: u32,
        (limits, late): (&GpuLimits, LatePairs),
    ) -> Option<Self> {
        let coded = Side::BOTH.map(|side| {
            huffman_tables::expected_bytes(side, specs[side.index()], geometry.head_dim(side))
        });
        let kernel = tensor_core::expected_kernel(specs, geometry, rows, late);
        let (rows, products) = (kernel.rows, kernel.sides);
        let buffer = products[0].stage + products[1].stage + GAIN_STAGE;
        let work = products.iter().map(|of_side| of_side.bytes + of_side.table).sum::<usize>();
        let other = kernel.fixed_bytes + BUFFERS_MIN * buffer + coded[0][1] + coded[1][1] + work;
        let huffman = coded[0][0] + coded[1][0] > 0;
        let (resident, registers) = kernel.resident;
        let room = BlockRoom { shared: limits.shared_memory(), resident };
        let (chunks, decoded) = plan_decoding([coded[0][0], coded[1][0]], other, room, None);
        let tile = Side::BOTH.map(|side| tile_bytes(specs[side.index()], geometry, side));
        let tile = tile.iter().sum::<usize>();
        let tile = kernel.tiles * tile;
        let buffers =
            TileBuffers { block: other + decoded, buffer, tile, huffman }.buffer_count(room);
        let (buffers, shared_bytes, under_way) = match kernel.of_tokens {
            Some(block) => (BUFFERS_MIN, block.shared_bytes, block.bytes_under_way),
            None => {
                let rings = coded.iter().filter(|[chunk, _]| *chunk > 0).count();
                let rings = rings * chunks * PIECE_BYTES;
                let shared_bytes = other + decoded + (buffers - BUFFERS_MIN) * buffer;
                (buffers, shared_bytes, (buffers - 1) * tile + rings)
            }
        };
        let block = BlockResources { registers, shared_bytes: shared_bytes as u32 };
        let occupancy = block.fit_multiprocessor(limits)?;
        let by = lookup_kernels(specs, [0, 1].map(|side: usize| products[side].not.is_none()));
        let books = Side::BOTH.map(|side| {
            let (index, dim) = (side.index(), geometry.head_dim(side));
            HeadCodebooks::from_spec(specs[index], dim, by[index])
        });
        // Tables begin on sixteens, those of both sides.
        let table_bytes = share_slack(occupancy.shared_slack / 32 * 32, books);
        let held = sides_in_registers(
            register_slack(rows, block.registers, occupancy.register_slack),
            books,
        );
        let codebooks = Side::BOTH.map(|side| {
            let index = side.index();
            Some(books[index]?.plan_cache(side, table_bytes[index], held[index]))
        });
        Some(Self {
            block,
            buffers: buffers as u32,
            under_way: under_way as u32,
            chunks: chunks as u32,
            books,
            codebooks,
            table_bytes,
            occupancy,
            products: products.map(|of_side| of_side.not),
            is_late: kernel.is_late,
            owns_tokens: kernel.of_tokens.is_some(),
        })
    }
}

impl BlockFit {
    /// Where codebooks are kept; none of a side that has none.
    pub(super) fn codebook_rooms(&self) -> [Option<CodebookRoom>; 2] {
        [0, 1]
            .map(|side| Some(self.codebooks[side].as_ref()?.codebook_room(self.table_bytes[side])))
    }
}

/// Bytes that are staged of one tile of a side.
fn tile_bytes(spec: &SideSpec, geometry: &Geometry, side: Side) -> usize {
    let dim = geometry.head_dim(side);
    let implied = spec.implied_bits(geometry, side);
    // Huffman codes are decoded, not staged: of them only scales are.
    let staged = match spec.entropy {
        EntropyCoding::Huffman => implied.scales,
        EntropyCoding::None => stored_bits(spec, geometry, side) - implied.header,
    };
    (staged / 8.0 * (dim * TILE_TOKENS) as f64).round() as usize
}
