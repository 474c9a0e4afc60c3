//! Reading rows of one head from a part, a tile at a time, so that decoded values never leave
//! the first-level cache.

use crate::cpu::arena::HostArena;
use crate::cpu::float::FloatRows;
use crate::cpu::huffman::StreamTiles;
use crate::{BackendError, Source};
use kvd_codec::{FixedCodes, ModelCodec, PageReader, RowSpace};
use kvd_core::{DType, Extent, Geometry, LayerIndex, Side};
use std::ops::Range;

/// Tokens decoded at once: 32 rows of 128 channels of K and V are 32 KiB.
pub(crate) const TILE_TOKENS: u32 = 32;

/// Everything needed to read a layer's rows.
#[derive(Clone, Copy)]
pub(crate) struct LayerReader<'a> {
    pub(crate) arena: &'a HostArena,
    pub(crate) codec: &'a ModelCodec,
    pub(crate) layer: LayerIndex,
}

/// One head and side of one part, opened for reading.
pub(crate) enum RowReader<'a> {
    Raw { bytes: &'a [u8], geometry: &'a Geometry, dim: usize },
    Page { page: PageReader<'a>, first_row: usize },
}

impl<'a> LayerReader<'a> {
    pub(crate) fn open_rows(
        &self,
        source: &Source,
        rows: u32,
        side: Side,
        head: usize,
    ) -> Result<RowReader<'a>, BackendError> {
        self.open_bytes(source, self.bytes_of(source, rows, side, head), side, head)
    }

    /// As [`LayerReader::open_rows`], where [`LayerReader::bytes_of`] was asked already.
    pub(crate) fn open_bytes(
        &self,
        source: &Source,
        bytes: &'a [u8],
        side: Side,
        head: usize,
    ) -> Result<RowReader<'a>, BackendError> {
        let geometry = self.codec.geometry();
        match source {
            Source::Raw { .. } => {
                Ok(RowReader::Raw { bytes, geometry, dim: geometry.head_dim(side) })
            }
            Source::Pages { first_row, .. } => {
                let page = PageReader::open_page(self.codec, self.layer, side, head, bytes)?;
                Ok(RowReader::Page { page, first_row: *first_row as usize })
            }
        }
    }

    /// Opens what lies in `bytes`, in the place of what was opened before on the same side and
    /// head: pages of a sequence mostly differ in their codes alone.
    pub(crate) fn turn_to(
        &self,
        rows: &mut RowReader<'a>,
        source: &Source,
        bytes: &'a [u8],
        side: Side,
        head: usize,
    ) -> Result<(), BackendError> {
        if let (RowReader::Page { page, first_row }, Source::Pages { first_row: first, .. }) =
            (&mut *rows, source)
            && page.turn_to(bytes)
        {
            *first_row = *first as usize;
            return Ok(());
        }
        *rows = self.open_bytes(source, bytes, side, head)?;
        Ok(())
    }

    /// The bytes of a head's rows, or of its page.
    pub(crate) fn bytes_of(&self, source: &Source, rows: u32, side: Side, head: usize) -> &'a [u8] {
        let geometry = self.codec.geometry();
        self.arena.extent_bytes(match source {
            Source::Raw { extent, capacity_rows, first_row } => {
                let layout = geometry.raw_layout(*capacity_rows);
                let start = layout.row_offset(side, head as u64, u64::from(*first_row));
                extent.sub_extent(start, start + u64::from(rows) * layout.row_bytes(side))
            }
            Source::Pages { extent, ends, .. } => page_extent(*extent, ends, geometry, side, head),
        })
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
    slot.sub_extent(u64::from(start), u64::from(ends[index]))
}

impl<'a> RowReader<'a> {
    /// Whether rows come as stored values or as coefficients of the side's transform.
    pub(crate) fn row_space(&self) -> RowSpace {
        match self {
            RowReader::Raw { .. } => RowSpace::Raw,
            RowReader::Page { page, .. } => page.space(),
        }
    }

    /// Tests a page's checksum; raw rows have none.
    pub(crate) fn verify_checksum(&self) -> Result<(), BackendError> {
        match self {
            RowReader::Raw { .. } => Ok(()),
            RowReader::Page { page, .. } => Ok(page.verify_checksum()?),
        }
    }

    /// The page, unless rows are raw.
    pub(crate) fn as_page(&self) -> Option<&PageReader<'a>> {
        match self {
            RowReader::Raw { .. } => None,
            RowReader::Page { page, .. } => Some(page),
        }
    }

    /// The page's codes, when they have a fixed width, or `streams` has them.
    pub(crate) fn codes_by_tile<'b>(
        &self,
        streams: Option<&'b StreamTiles>,
    ) -> Option<FixedCodes<'b>>
    where
        'a: 'b,
    {
        // A page that fell back is of another side than the kernel's.
        let page = self.as_page().filter(|page| !page.header().fallback)?;
        match (streams, page.stream_codes()) {
            (Some(streams), Some((_, scales))) => Some(streams.as_fixed_codes(scales)),
            _ => page.fixed_codes().or_else(|| page.allocated_codes()),
        }
    }

    /// Rows `first..first + count` (counted in the source) as they are multiplied: those in a dtype
    /// as they lie, others decoded into `tile` (`[count * dim]`).
    pub(crate) fn float_rows<'b>(
        &self,
        first: usize,
        count: usize,
        tile: &'b mut [f32],
    ) -> Result<FloatRows<'b>, BackendError>
    where
        'a: 'b,
    {
        let (dim, stored) = match self {
            RowReader::Raw { bytes, geometry, dim } => (*dim, Some((geometry.dtype, *bytes))),
            RowReader::Page { page, .. } => (tile.len() / count, page.float_rows()),
        };
        if let Some((dtype, bytes)) = stored {
            let row = dim * dtype.size_bytes();
            return Ok(FloatRows::Stored(dtype, &bytes[first * row..(first + count) * row]));
        }
        self.decode_at(first, count, tile)?;
        Ok(FloatRows::Wide(tile))
    }

    /// Decodes `count` rows from `first` on (counted in the source) into `out[count * dim]`.
    pub(crate) fn decode_at(
        &self,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        match self {
            RowReader::Raw { bytes, geometry, dim } => {
                let row_bytes = dim * geometry.dtype.size_bytes();
                geometry.dtype.widen_values(&bytes[first * row_bytes..][..count * row_bytes], out);
                Ok(())
            }
            RowReader::Page { page, .. } => Ok(page.decode_rows(first, count, out)?),
        }
    }

    /// The bytes of rows of `dim` channels (counted in the part), where they lie in `dtype`.
    pub(crate) fn stored_in_part(
        &self,
        rows: Range<u32>,
        dim: usize,
        dtype: DType,
    ) -> Option<&[u8]> {
        let (origin, (of, bytes)) = match self {
            RowReader::Raw { bytes, geometry, .. } => (0, (geometry.dtype, *bytes)),
            RowReader::Page { page, first_row } => (*first_row, page.float_rows()?),
        };
        let at = |row: u32| (origin + row as usize) * dim * dtype.size_bytes();
        (of == dtype).then(|| &bytes[at(rows.start)..at(rows.end)])
    }

    /// Decodes `count` rows from `first` on (counted in the part) into `out[count * dim]`.
    pub(crate) fn decode_in_part(
        &self,
        first: u32,
        count: u32,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let origin = match self {
            RowReader::Raw { .. } => 0,
            RowReader::Page { first_row, .. } => *first_row,
        };
        self.decode_at(origin + first as usize, count as usize, out)
    }
}
