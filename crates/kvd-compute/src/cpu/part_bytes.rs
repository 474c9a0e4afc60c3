//! A part of a plan on its way through a unit.

use crate::cpu::row_reader::{LayerReader, RowReader};
use crate::{BackendError, PlanPart};
use kvd_core::Side;
use smallvec::SmallVec;

/// Parts of a unit that take no memory beside its own.
pub(super) const PARTS: usize = 8;

/// A part of the plan, and where its rows or pages lie, by side.
pub(super) struct PartBytes<'a> {
    pub(super) plan: &'a PlanPart,
    pub(super) bytes: [&'a [u8]; 2],
}

impl<'a> PartBytes<'a> {
    /// With the bytes of some sides.
    pub(super) fn new(
        plan: &'a PlanPart,
        reader: LayerReader<'a>,
        head: usize,
        sides: &[Side],
    ) -> Self {
        let mut bytes: [&[u8]; 2] = [&[]; 2];
        for side in sides {
            bytes[side.index()] = reader.bytes_of(&plan.source, plan.rows, *side, head);
        }
        Self { plan, bytes }
    }

    /// Opens those sides in place of what was in `slot` before.
    pub(super) fn open_sides(
        &self,
        reader: LayerReader<'a>,
        head: usize,
        sides: &[Side],
        slot: usize,
        opened: &mut SmallVec<[RowReader<'a>; 2]>,
    ) -> Result<(), BackendError> {
        for (at, side) in (slot * sides.len()..).zip(sides) {
            let (source, bytes) = (&self.plan.source, self.bytes[side.index()]);
            match opened.get_mut(at) {
                Some(old) => reader.turn_to(old, source, bytes, *side, head)?,
                None => opened.push(reader.open_bytes(source, bytes, *side, head)?),
            }
        }
        Ok(())
    }
}
