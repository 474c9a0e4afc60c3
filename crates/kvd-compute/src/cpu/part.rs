//! A part of a plan on its way through a unit.

use crate::cpu::tile::{Reader, Rows};
use crate::{BackendError, PlanPart};
use kvd_core::Side;

/// A part of the plan, and where its rows or pages lie, by side.
pub(super) struct Part<'a> {
    pub(super) plan: &'a PlanPart,
    pub(super) bytes: [&'a [u8]; 2],
}

impl<'a> Part<'a> {
    /// With the bytes of some sides.
    pub(super) fn new(plan: &'a PlanPart, reader: Reader<'a>, head: usize, sides: &[Side]) -> Self {
        let mut bytes: [&[u8]; 2] = [&[]; 2];
        for side in sides {
            bytes[side.index()] = reader.bytes(&plan.source, plan.rows, *side, head);
        }
        Self { plan, bytes }
    }

    /// Opens those sides in place of what was in `slot` before.
    pub(super) fn open(
        &self,
        reader: Reader<'a>,
        (head, sides): (usize, &[Side]),
        slot: usize,
        opened: &mut Vec<Rows<'a>>,
    ) -> Result<(), BackendError> {
        for (at, side) in (slot * sides.len()..).zip(sides) {
            let of = (&self.plan.source, self.bytes[side.index()]);
            match opened.get_mut(at) {
                Some(old) => reader.turn_to(old, of, *side, head)?,
                None => opened.push(reader.open_bytes(of, *side, head)?),
            }
        }
        Ok(())
    }
}
