//! Device memory for what stays beside the arena, the tables of layers: taken once, when the device
//! is opened, and handed out in pieces, one for each model. Knows addresses alone; never reads or
//! writes them.

use super::memory::ALIGN;
use std::collections::BTreeMap;

/// A piece of device memory, and which parts of it are held.
pub(super) struct TableArena {
    start: u64,
    bytes: u64,
    /// Bytes of each part, by its offset.
    held: BTreeMap<u64, u64>,
}

/// There is no room for a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the tables of the model's layers take up to {needed} bytes of GPU memory, and of the {all} \
     for tables at most {left} are left in one piece: unregister models, or raise \
     device.table_bytes"
)]
pub(super) struct ArenaFull {
    needed: u64,
    left: u64,
    all: u64,
}

impl TableArena {
    pub(super) fn new(start: u64, bytes: u64) -> Self {
        Self { start, bytes, held: BTreeMap::new() }
    }

    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Offset and bytes of what lies between the parts that are held.
    fn free_gaps(&self) -> Vec<(u64, u64)> {
        let held = self.held.iter().map(|(offset, bytes)| (*offset, offset + bytes));
        let mut gaps = Vec::new();
        let mut end = 0;
        for (offset, next) in held.chain([(self.bytes, self.bytes)]) {
            gaps.push((end, offset - end));
            end = next;
        }
        gaps
    }

    /// Where a part begins that has room, and what is held of it: the first gap large enough.
    fn find_gap(&self, bytes: u64) -> Result<(u64, u64), ArenaFull> {
        let gaps = self.free_gaps();
        let left = gaps.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        let full = ArenaFull { needed: bytes, left, all: self.bytes };
        let len = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or(full)?;
        let fits = gaps.into_iter().find(|(_, bytes)| *bytes >= len);
        fits.map(|(offset, _)| (offset, len)).ok_or(full)
    }

    /// Whether a part has room.
    pub(super) fn has_room(&self, bytes: u64) -> Result<(), ArenaFull> {
        self.find_gap(bytes).map(|_| ())
    }

    /// The address of the first gap that is large enough.
    pub(super) fn allocate(&mut self, bytes: u64) -> Result<u64, ArenaFull> {
        let (offset, len) = self.find_gap(bytes)?;
        self.held.insert(offset, len);
        Ok(self.start + offset)
    }

    /// Gives a part back.
    pub(super) fn release(&mut self, address: u64) {
        let given = self.held.remove(&(address - self.start));
        debug_assert!(given.is_some(), "a part is given back once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_filled_and_parts_never_overlap() {
        let mut kept = TableArena::new(4096, 1024);
        let parts = [1, 256, 257].map(|bytes| kept.allocate(bytes).unwrap());
        assert_eq!(parts, [4096, 4352, 4608]);
        let full = ArenaFull { needed: 1, left: 0, all: 1024 };
        assert_eq!(kept.allocate(1), Err(full));
        kept.release(parts[1]);
        // Too small for two, then taken again.
        let full = ArenaFull { needed: 257, left: 256, all: 1024 };
        assert_eq!((kept.has_room(257), kept.allocate(257)), (Err(full), Err(full)));
        assert_eq!(kept.has_room(256), Ok(()));
        let said = full.to_string();
        for part in ["up to 257 bytes", "of the 1024", "at most 256 are left", "device.table_bytes"]
        {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(kept.allocate(0), Ok(parts[1]));
        kept.release(parts[0]);
        kept.release(parts[1]);
        assert_eq!(kept.allocate(512), Ok(parts[0]));
        assert_eq!(kept.allocate(u64::MAX).unwrap_err().left, 0);
    }
}
