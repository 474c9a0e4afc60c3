//! Pinned memory between a caller's bytes and the device. Bytes for it are gathered in a slot of a
//! ring and copied in few pieces; bytes from it come through two more slots, one of which is
//! emptied while the other is filled. A slot is used again when the event behind its last copy was
//! waited for. All of it is taken when the device is opened.

use super::wait::WaitLimit;
use crate::driver::{DeviceStream, Driver, DriverError, EventId, PinnedId, PinnedRange};

/// Slots of the ring: one is gathered in while others are on their way.
const SLOTS: usize = 4;
/// Slots for bytes from the device.
const BACK_SLOTS: usize = 2;
/// Alignment of the host's end of a copy, bytes.
const ALIGN: u64 = 64;

/// Pinned memory, and the event that frees it.
struct PinnedSlot {
    memory: PinnedId,
    event: EventId,
    /// Bytes in use from the start.
    filled: u64,
    /// Whether a copy before its event may be under way.
    busy: bool,
}

/// Gathered bytes of the current slot for one range of the device.
struct GatheredRun {
    start: u64,
    to: u64,
    bytes: u64,
}

/// The slots of one device.
pub(super) struct PinnedRing {
    slots: Vec<PinnedSlot>,
    back: Vec<PinnedSlot>,
    slot_bytes: u64,
    at: usize,
    run: Option<GatheredRun>,
    patience: WaitLimit,
}

impl PinnedRing {
    /// Nothing is taken yet.
    pub(super) fn new(slot_bytes: u64, patience: WaitLimit) -> Self {
        let slot_bytes = slot_bytes.next_multiple_of(ALIGN).max(ALIGN);
        Self { slots: Vec::new(), back: Vec::new(), slot_bytes, at: 0, run: None, patience }
    }

    /// Takes the memory. What was taken before an error is given back by [`PinnedRing::close`].
    pub(super) fn allocate_slots(&mut self, driver: &mut dyn Driver) -> Result<(), DriverError> {
        for index in 0..SLOTS + BACK_SLOTS {
            let memory = driver.allocate_pinned(self.slot_bytes)?;
            let event = driver.create_event().inspect_err(|_| driver.free_pinned(memory))?;
            let slot = PinnedSlot { memory, event, filled: 0, busy: false };
            if index < SLOTS { &mut self.slots } else { &mut self.back }.push(slot);
        }
        Ok(())
    }

    /// Gives the memory back; no copy is under way.
    pub(super) fn free_slots(&mut self, driver: &mut dyn Driver) {
        for slot in self.slots.drain(..).chain(self.back.drain(..)) {
            driver.destroy_event(slot.event);
            driver.free_pinned(slot.memory);
        }
    }

    /// Where the gathered bytes end on the device.
    pub(super) fn gathered_end(&self) -> Option<u64> {
        self.run.as_ref().map(|run| run.to + run.bytes)
    }

    /// Gathers bytes for the device; those of neighbouring ranges are one copy.
    pub(super) fn gather_bytes(
        &mut self,
        driver: &mut dyn Driver,
        mut to: u64,
        mut bytes: &[u8],
    ) -> Result<(), DriverError> {
        while !bytes.is_empty() {
            if self.gathered_end() != Some(to) {
                self.start_copy(driver)?;
                let slot = &mut self.slots[self.at];
                slot.filled = slot.filled.next_multiple_of(ALIGN);
            }
            if self.slots[self.at].filled == self.slot_bytes {
                self.advance_slot(driver)?;
            }
            let slot = &mut self.slots[self.at];
            let room = (self.slot_bytes - slot.filled) as usize;
            let (now, later) = bytes.split_at(bytes.len().min(room));
            driver.write_pinned(slot.memory, slot.filled, now);
            let fresh = GatheredRun { start: slot.filled, to, bytes: 0 };
            self.run.get_or_insert(fresh).bytes += now.len() as u64;
            slot.filled += now.len() as u64;
            to += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    /// Starts the copy of the gathered bytes.
    pub(super) fn start_copy(&mut self, driver: &mut dyn Driver) -> Result<(), DriverError> {
        let Some(GatheredRun { start, to, bytes }) = self.run.take() else { return Ok(()) };
        let memory = self.slots[self.at].memory;
        driver.copy_to_device(to, PinnedRange { memory, start, bytes })
    }

    /// Goes on to the next slot, when it is free.
    fn advance_slot(&mut self, driver: &mut dyn Driver) -> Result<(), DriverError> {
        self.start_copy(driver)?;
        let full = &mut self.slots[self.at];
        driver.record_event(full.event, DeviceStream::Copy)?;
        full.busy = true;
        self.at = (self.at + 1) % self.slots.len();
        let next = &mut self.slots[self.at];
        if next.busy {
            self.patience.wait_event(driver, next.event)?;
        }
        (next.busy, next.filled) = (false, 0);
        Ok(())
    }

    /// Copies from the device, after everything that [`DeviceStream::Compute`] was given; returns
    /// when the bytes are there.
    pub(super) fn read_device(
        &mut self,
        driver: &mut dyn Driver,
        mut from: u64,
        bytes: &mut [u8],
    ) -> Result<(), DriverError> {
        let mut before: Option<(usize, &mut [u8])> = None;
        for (index, piece) in bytes.chunks_mut(self.slot_bytes as usize).enumerate() {
            let slot = &self.back[index % BACK_SLOTS];
            let len = piece.len() as u64;
            driver.copy_to_host(from, PinnedRange { memory: slot.memory, start: 0, bytes: len })?;
            driver.record_event(slot.event, DeviceStream::Compute)?;
            from += len;
            if let Some((index, piece)) = before.replace((index, piece)) {
                self.drain_slot(driver, index, piece)?;
            }
        }
        before.map_or(Ok(()), |(index, piece)| self.drain_slot(driver, index, piece))
    }

    /// Waits for a slot of bytes from the device and copies its content.
    fn drain_slot(
        &self,
        driver: &mut dyn Driver,
        index: usize,
        piece: &mut [u8],
    ) -> Result<(), DriverError> {
        let slot = &self.back[index % BACK_SLOTS];
        self.patience.wait_event(driver, slot.event)?;
        driver.read_pinned(slot.memory, 0, piece);
        Ok(())
    }

    /// Every copy to the device has ended, as the host has seen: all slots are free.
    pub(super) fn mark_idle(&mut self) {
        debug_assert!(self.run.is_none(), "gathered bytes are not on their way");
        self.slots.iter_mut().for_each(|slot| (slot.filled, slot.busy) = (0, false));
    }
}
