//! Device memory for what stays beside the arena, the tables of layers: taken once, when the device
//! is opened, and handed out in pieces. Knows addresses alone; never reads or writes them.

use super::memory::ALIGN;
use std::collections::BTreeMap;

/// A piece of device memory, and which parts of it are held.
pub(super) struct Kept {
    start: u64,
    bytes: u64,
    /// Bytes of each part, by its offset.
    held: BTreeMap<u64, u64>,
}

/// There is no room for a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "tables of layers take {used} of {all} bytes of GPU memory and {asked} more have no room: \
     unregister models, or raise device.table_bytes"
)]
pub(super) struct KeptFull {
    asked: u64,
    used: u64,
    all: u64,
}

impl Kept {
    pub(super) fn new(start: u64, bytes: u64) -> Self {
        Self { start, bytes, held: BTreeMap::new() }
    }

    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// The address of the first gap that is large enough.
    pub(super) fn take(&mut self, bytes: u64) -> Result<u64, KeptFull> {
        let used = self.held.values().sum();
        let full = KeptFull { asked: bytes, used, all: self.bytes };
        let len = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or(full)?;
        let mut offset = 0;
        for (held, of_held) in &self.held {
            if held - offset >= len {
                break;
            }
            offset = held + of_held;
        }
        if self.bytes - offset < len {
            return Err(full);
        }
        self.held.insert(offset, len);
        Ok(self.start + offset)
    }

    /// Gives a part back.
    pub(super) fn give(&mut self, address: u64) {
        let given = self.held.remove(&(address - self.start));
        debug_assert!(given.is_some(), "a part is given back once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_filled_and_parts_never_overlap() {
        let mut kept = Kept::new(4096, 1024);
        let parts = [1, 256, 257].map(|bytes| kept.take(bytes).unwrap());
        assert_eq!(parts, [4096, 4352, 4608]);
        let full = KeptFull { asked: 1, used: 1024, all: 1024 };
        assert_eq!(kept.take(1), Err(full));
        assert!(full.to_string().contains("1024 of 1024 bytes"), "{full}");
        kept.give(parts[1]);
        // Too small for two, then taken again.
        assert_eq!(kept.take(257).unwrap_err().used, 768);
        assert_eq!(kept.take(0), Ok(parts[1]));
        kept.give(parts[0]);
        kept.give(parts[1]);
        assert_eq!(kept.take(512), Ok(parts[0]));
        assert_eq!(kept.take(u64::MAX).unwrap_err().all, 1024);
    }
}
