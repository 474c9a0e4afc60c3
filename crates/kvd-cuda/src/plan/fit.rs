//! How a thread block of a pair of sides fits a GPU: what a plan says and the launches follow.

use super::books::{Codebooks, held, kernels, register_slack, share};
use super::occupancy::{Block, Occupancy};
use super::{CodebookPlan, Limits, bits};
use crate::buffers::{BUFFERS_MIN, Staging};
use crate::lanes::{self, PIECE_BYTES, decoding};
use crate::late::LatePairs;
use crate::products;
use crate::side::TILE_TOKENS;
use crate::table::CodebookRoom;
use crate::tables::GAIN_STAGE;
use kvd_codec::{Entropy, SideSpec};
use kvd_core::{Geometry, Side};

/// A thread block, and what a multiprocessor holds of it.
pub(super) struct Fit {
    pub(super) block: Block,
    pub(super) occupancy: Occupancy,
    /// Tiles in shared memory.
    pub(super) buffers: u32,
    /// Bytes on their way to it at once.
    pub(super) under_way: u32,
    /// Chunks of each side that are decoded together.
    pub(super) chunks: u32,
    pub(super) books: [Option<Codebooks>; 2],
    /// How they are kept where channels are not split.
    pub(super) codebooks: [Option<CodebookPlan>; 2],
    /// Shared memory for the codebooks of each side.
    pub(super) table_bytes: [u32; 2],
    /// Why products are not on tensor cores.
    pub(super) products: [Option<&'static str>; 2],
    /// Whether the kernel is compiled when a model is registered.
    pub(super) is_late: bool,
}

impl Fit {
    /// Of units of `rows` query rows, where `late` were compiled; `None` when not even one thread
    /// block fits.
    pub(super) fn new(
        specs: [&SideSpec; 2],
        geometry: &Geometry,
        rows: u32,
        (limits, late): (&Limits, LatePairs),
    ) -> Option<Self> {
        let of = |side: Side| (specs[side.index()], geometry.head_dim(side));
        let coded = Side::BOTH.map(|side| lanes::expected(side, of(side)));
        let kernel = products::expected(specs, geometry, rows, late);
        let (rows, products) = (kernel.rows, kernel.sides);
        let buffer = products[0].stage + products[1].stage + GAIN_STAGE;
        let work = products.iter().map(|of_side| of_side.bytes + of_side.table).sum::<usize>();
        let other = kernel.fixed_bytes + BUFFERS_MIN * buffer + coded[0][1] + coded[1][1] + work;
        let huffman = coded[0][0] + coded[1][0] > 0;
        let (resident, registers) = kernel.resident;
        let room = (limits.shared(), resident);
        let (chunks, decoded) = decoding([coded[0][0], coded[1][0]], other, room, None);
        let tile =
            Side::BOTH.map(|side| tile_bytes(of(side), geometry, side)).iter().sum::<usize>();
        let tile = kernel.tiles * tile;
        let buffers = Staging { block: other + decoded, buffer, tile, huffman }.buffers(room);
        let shared_bytes = other + decoded + (buffers - BUFFERS_MIN) * buffer;
        let block = Block { registers, shared_bytes: shared_bytes as u32 };
        let occupancy = block.occupancy(limits)?;
        let by = kernels(specs, [0, 1].map(|side: usize| products[side].not.is_none()));
        let books = Side::BOTH.map(|side| Codebooks::of(of(side).0, of(side).1, by[side.index()]));
        // Tables begin on sixteens, those of both sides.
        let table_bytes = share(occupancy.shared_slack / 32 * 32, books);
        let held = held(register_slack(rows, block.registers, occupancy.register_slack), books);
        let codebooks = Side::BOTH.map(|side| {
            let index = side.index();
            Some(books[index]?.plan(side, table_bytes[index], held[index]))
        });
        let rings = coded.iter().filter(|[chunk, _]| *chunk > 0).count() * chunks * PIECE_BYTES;
        Some(Self {
            block,
            buffers: buffers as u32,
            under_way: ((buffers - 1) * tile + rings) as u32,
            chunks: chunks as u32,
            books,
            codebooks,
            table_bytes,
            occupancy,
            products: products.map(|of_side| of_side.not),
            is_late: kernel.is_late,
        })
    }
}

impl Fit {
    /// Where codebooks are kept; none of a side that has none.
    pub(super) fn rooms(&self) -> [Option<CodebookRoom>; 2] {
        [0, 1].map(|side| Some(self.codebooks[side].as_ref()?.room(self.table_bytes[side])))
    }
}

/// Bytes that are staged of one tile of a side.
fn tile_bytes((spec, dim): (&SideSpec, usize), geometry: &Geometry, side: Side) -> usize {
    let implied = spec.implied_bits(geometry, side);
    // Huffman codes are decoded, not staged: of them only scales are.
    let staged = match spec.entropy {
        Entropy::Huffman => implied.scales,
        Entropy::None => bits(spec, geometry, side) - implied.header,
    };
    (staged / 8.0 * (dim * TILE_TOKENS) as f64).round() as usize
}
