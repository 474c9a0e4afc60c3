//! Reading rows of one head from a part, a tile at a time, so that decoded values never leave
//! the first-level cache.

use super::arena::HostArena;
use crate::{BackendError, PlanPart, Source};
use kvd_codec::{ModelCodec, PageReader, Space};
use kvd_core::{Extent, Geometry, LayerIndex, Side};

/// Tokens decoded at once: 32 rows of 128 channels of K and V are 32 KiB.
pub(crate) const TILE_TOKENS: u32 = 32;

/// Everything needed to read a layer's rows.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) arena: &'a HostArena,
    pub(crate) codec: &'a ModelCodec,
    pub(crate) layer: LayerIndex,
}

/// One head and side of one part, opened for reading.
pub(crate) enum Rows<'a> {
    Raw { bytes: &'a [u8], geometry: &'a Geometry, dim: usize },
    Page { page: PageReader<'a>, first_row: usize },
}

impl<'a> Reader<'a> {
    pub(crate) fn open(
        &self,
        source: &Source,
        rows: u32,
        side: Side,
        head: usize,
    ) -> Result<Rows<'a>, BackendError> {
        let geometry = self.codec.geometry();
        match source {
            Source::Raw { extent, capacity_rows, first_row } => {
                let layout = geometry.raw_layout(*capacity_rows);
                let row_bytes = layout.row_bytes(side);
                let start = layout.row_offset(side, head as u64, u64::from(*first_row));
                let bytes = extent.part(start, start + u64::from(rows) * row_bytes);
                let dim = geometry.head_dim(side);
                Ok(Rows::Raw { bytes: self.arena.read(bytes), geometry, dim })
            }
            Source::Pages { extent, ends, first_row } => {
                let bytes = self.arena.read(page_extent(*extent, ends, geometry, side, head));
                let page = PageReader::open(self.codec, self.layer, side, head, bytes)?;
                Ok(Rows::Page { page, first_row: *first_row as usize })
            }
        }
    }
}

/// Where the page of one head and side lies in its slot.
pub(crate) fn page_extent(
    slot: Extent,
    ends: &[u32],
    geometry: &Geometry,
    side: Side,
    head: usize,
) -> Extent {
    let index = side.index() * geometry.kv_heads as usize + head;
    let start = if index == 0 { 0 } else { ends[index - 1] };
    slot.part(u64::from(start), u64::from(ends[index]))
}

impl Rows<'_> {
    /// Whether rows come as stored values or as coefficients of the side's transform.
    pub(crate) fn space(&self) -> Space {
        match self {
            Rows::Raw { .. } => Space::Raw,
            Rows::Page { page, .. } => page.space(),
        }
    }

    /// Tests a page's checksum; raw rows have none.
    pub(crate) fn verify(&self) -> Result<(), BackendError> {
        match self {
            Rows::Raw { .. } => Ok(()),
            Rows::Page { page, .. } => Ok(page.verify()?),
        }
    }

    /// Decodes `count` rows from `first` on (counted in the part) into `out[count * dim]`.
    pub(crate) fn decode(
        &self,
        first: u32,
        count: u32,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        match self {
            Rows::Raw { bytes, geometry, dim } => {
                let row_bytes = dim * geometry.dtype.size_bytes();
                let start = first as usize * row_bytes;
                geometry.dtype.widen(&bytes[start..][..count as usize * row_bytes], out);
                Ok(())
            }
            Rows::Page { page, first_row } => {
                Ok(page.decode_rows(first_row + first as usize, count as usize, out)?)
            }
        }
    }
}

/// The tiles of a part that hold tokens of `[start, end)`, as `(first row in part, rows)`.
///
/// Tiles are aligned in the page, not in the part, because entropy-coded rows decode in streams.
pub(crate) fn tiles(part: &PlanPart, start: u32, end: u32) -> impl Iterator<Item = (u32, u32)> {
    let origin = match part.source {
        Source::Raw { .. } => 0,
        Source::Pages { first_row, .. } => first_row,
    };
    let from = start.saturating_sub(part.first_token);
    let to = end.min(part.end_token()).saturating_sub(part.first_token);
    let mut next = from;
    std::iter::from_fn(move || {
        if next >= to {
            return None;
        }
        let first = next;
        let aligned_end = (origin + first) / TILE_TOKENS * TILE_TOKENS + TILE_TOKENS - origin;
        next = aligned_end.min(to);
        Some((first, next - first))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_range_once_and_are_aligned_in_the_page() {
        let source = Source::Pages {
            extent: Extent { offset: 0, len: 0 },
            ends: Vec::new().into(),
            first_row: 5,
        };
        let part = PlanPart { first_token: 100, rows: 59, source };
        assert_eq!(tiles(&part, 0, 1000).collect::<Vec<_>>(), [(0, 27), (27, 32)]);
        assert_eq!(tiles(&part, 130, 140).collect::<Vec<_>>(), [(30, 10)]);
        assert_eq!(tiles(&part, 120, 130).collect::<Vec<_>>(), [(20, 7), (27, 3)]);
        assert_eq!(tiles(&part, 0, 100).count(), 0);
        assert_eq!(tiles(&part, 159, 500).count(), 0);
    }
}
