//! How a thread block of a pair of sides fits a GPU: what a plan says and the launches follow.

use super::books::{Codebooks, held, kernels, register_slack, share};
use super::occupancy::{Block, Occupancy};
use super::{CodebookPlan, Limits, bits};
use crate::lanes::{self, decoding};
use crate::products;
use crate::side::TILE_TOKENS;
use crate::table::CodebookRoom;
use crate::tables::{GAIN_STAGE, fixed_floats};
use kvd_codec::{Entropy, SideSpec};
use kvd_core::{Geometry, Side};

/// A thread block, and what a multiprocessor holds of it.
pub(super) struct Fit {
    pub(super) block: Block,
    pub(super) occupancy: Occupancy,
    /// Bytes of one tile of both sides.
    pub(super) stage_bytes: u32,
    /// Chunks of each side that are decoded together.
    pub(super) chunks: u32,
    pub(super) books: [Option<Codebooks>; 2],
    /// How they are kept where channels are not split.
    pub(super) codebooks: [Option<CodebookPlan>; 2],
    /// Shared memory for the codebooks of each side.
    pub(super) table_bytes: [u32; 2],
    /// Why products are not on tensor cores.
    pub(super) products: [Option<&'static str>; 2],
}

impl Fit {
    /// Of units of `rows` query rows; `None` when not even one thread block fits.
    pub(super) fn new(
        specs: [&SideSpec; 2],
        geometry: &Geometry,
        rows: u32,
        limits: &Limits,
    ) -> Option<Self> {
        let of = |side: Side| (specs[side.index()], geometry.head_dim(side));
        let stage_bytes: u32 =
            Side::BOTH.map(|side| stage_bytes(of(side), geometry, side)).iter().sum();
        let coded = Side::BOTH.map(|side| lanes::expected(of(side).0, of(side).1));
        let (rows, products) = products::expected(specs, geometry, rows);
        let tensor = products.iter().all(|of_side| of_side.not.is_none());
        let floats = fixed_floats(rows as usize, geometry.head_dim(Side::Key), tensor) as u32;
        let fixed = 4 * floats + 2 * (stage_bytes + GAIN_STAGE as u32);
        let work = products[0].bytes + products[1].bytes;
        let other = fixed as usize + coded[0][1] + coded[1][1] + work;
        let (resident, registers) = products::resident(coded[0][0] + coded[1][0] > 0);
        let (chunks, decoded) =
            decoding([coded[0][0], coded[1][0]], other, (limits.shared(), resident));
        let block = Block { registers, shared_bytes: (other + decoded) as u32 };
        let occupancy = block.occupancy(limits)?;
        let by = kernels(specs, [0, 1].map(|side: usize| products[side].not.is_none()));
        let books = Side::BOTH.map(|side| Codebooks::of(of(side).0, of(side).1, by[side.index()]));
        let table_bytes = share(occupancy.shared_slack, books);
        let held = held(register_slack(rows, block.registers, occupancy.register_slack), books);
        let codebooks = Side::BOTH.map(|side| {
            let index = side.index();
            Some(books[index]?.plan(side, table_bytes[index], held[index]))
        });
        Some(Self {
            block,
            stage_bytes,
            chunks: chunks as u32,
            books,
            codebooks,
            table_bytes,
            occupancy,
            products: products.map(|of_side| of_side.not),
        })
    }
}

impl Fit {
    /// Where codebooks are kept; none of a side that has none.
    pub(super) fn rooms(&self) -> [Option<CodebookRoom>; 2] {
        [0, 1].map(|side| Some(self.codebooks[side].as_ref()?.room(self.table_bytes[side])))
    }
}

/// Bytes of one staged tile of a side, and of what lies around it.
fn stage_bytes((spec, dim): (&SideSpec, usize), geometry: &Geometry, side: Side) -> u32 {
    // Huffman codes are decoded, not staged: of them only scales are.
    let staged = match spec.entropy {
        Entropy::Huffman => spec.implied_bits(geometry, side).scales,
        Entropy::None => bits(spec, geometry, side),
    };
    (staged / 8.0 * dim as f64 * TILE_TOKENS as f64) as u32 + 64
}
