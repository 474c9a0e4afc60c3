//! A range of a device's arena. The store hands out extents; only a backend turns one into bytes.

/// `len` bytes at `offset` of one device's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// First byte, counted from the start of the arena.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Extent {
    /// One past the last byte.
    #[must_use]
    pub fn end(self) -> u64 {
        self.offset + self.len
    }

    /// The part `[start, end)` of this extent, counted from its own start.
    ///
    /// # Panics
    /// When the part does not lie inside: the caller computed an address wrongly.
    #[must_use]
    pub fn sub_extent(self, start: u64, end: u64) -> Self {
        assert!(start <= end && end <= self.len, "part {start}..{end} of {self:?}");
        Self { offset: self.offset + start, len: end - start }
    }

    /// Whether two extents share a byte.
    #[must_use]
    pub fn overlaps_extent(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}
