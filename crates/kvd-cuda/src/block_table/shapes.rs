//! How the heads of a layer are stored, for its launches.

use crate::PlanError;
use crate::abi::{SideKernel, SideShape};
use crate::codebook_table::{CodebookRoom, TableVersions, table_versions};
use crate::kernel_choice::{
    COPY_BYTES, HeadShapes, LayerTables, TrainedTables, head_shapes, in_groups,
};
use crate::page_shapes::PageHead;
use kvd_codec::ModelCodec;
use kvd_core::{LayerIndex, Side};

/// How the heads of one layer are stored, and what their kernels look values up in. Made once per
/// model and layer.
#[derive(Clone, Debug)]
pub struct LayerShapes {
    /// Codebooks, levels, directions: goes to the device as it is.
    pub tables: Vec<u8>,
    pub(super) layer: LayerIndex,
    /// Codebook memory of keys and of values.
    pub(super) rooms: [CodebookRoom; 2],
    pub(super) heads: Vec<[Result<HeadShapes, &'static str>; 2]>,
    /// Huffman tables that it was made with, by head.
    versions: Vec<[TableVersions; 2]>,
}

impl LayerShapes {
    /// Builds a layer's shapes. Codebooks of keys and values are kept where `rooms` says, or in
    /// that many bytes of shared memory and what registers there are.
    #[must_use]
    pub fn new(codec: &ModelCodec, layer: LayerIndex, rooms: [impl Into<CodebookRoom>; 2]) -> Self {
        let rooms = rooms.map(Into::into);
        let mut tables = LayerTables::default();
        let heads = (0..codec.geometry().kv_heads as usize).map(|head| {
            let of_side = |side| codec.head_codec(layer, side, head);
            let tokens = codec.geometry().block_tokens;
            // One kernel reads both.
            let grouped = Side::BOTH.iter().all(|side| in_groups(of_side(*side), *side, tokens));
            Side::BOTH.map(|side| {
                let trained = TrainedTables {
                    versions: codec.trained_tables(layer, side, head),
                    current: codec.current_table(layer, side, head),
                };
                let of = PageHead { head: of_side(side), side, grouped };
                head_shapes(of, trained, &mut tables, rooms[side.index()])
            })
        });
        let heads = heads.collect();
        let mut tables = tables.bytes;
        // An address that is given to a kernel is one of something.
        tables.resize(tables.len().next_multiple_of(COPY_BYTES).max(COPY_BYTES), 0);
        Self { tables, layer, rooms, heads, versions: table_versions(codec, layer) }
    }

    /// Whether no Huffman table was built, or took the place of another, since it was made.
    #[must_use]
    pub fn is_current(&self, codec: &ModelCodec) -> bool {
        self.versions == table_versions(codec, self.layer)
    }

    /// Whether every head has kernels.
    ///
    /// # Errors
    /// The first side that has none.
    pub fn check_heads(&self) -> Result<(), PlanError> {
        for (head, sides) in self.heads.iter().enumerate() {
            for side in Side::BOTH {
                let of_side = sides[side.index()].as_ref();
                of_side.map_err(|what| self.no_side(side, head, what))?;
            }
        }
        Ok(())
    }

    /// How kernels see pages of a head with that version of its Huffman tables, 0 for the prior or
    /// none.
    ///
    /// # Errors
    /// When the head has no kernel, or pages no such version.
    ///
    /// # Panics
    /// When the layer has no such head.
    pub fn side_shape(
        &self,
        head: usize,
        side: Side,
        version: u16,
    ) -> Result<SideShape, PlanError> {
        let of_side = self.heads[head][side.index()].as_ref().map_err(|what| *what);
        let shape = of_side.and_then(|head| head.version_shape(version));
        shape.map(|(_, shape)| shape).map_err(|what| self.no_side(side, head, what))
    }

    /// The kernel and shape of a head's pages that are written now.
    pub(crate) fn current_shape(&self, head: usize, side: Side) -> Option<(SideKernel, SideShape)> {
        self.heads[head][side.index()].as_ref().ok()?.current_shape()
    }

    /// The kernel and shape as if its codes had a fixed width.
    pub(crate) fn fixed_width_shape(
        &self,
        head: usize,
        side: Side,
    ) -> Option<(SideKernel, SideShape)> {
        Some(self.heads[head][side.index()].as_ref().ok()?.fixed_width_shape())
    }

    pub(super) fn no_side(&self, side: Side, head: usize, what: &'static str) -> PlanError {
        PlanError::NoSide { side, layer: self.layer.0, head, what }
    }
}
