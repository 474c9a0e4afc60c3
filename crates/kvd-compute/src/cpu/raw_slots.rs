//! Rows in and out of raw slots.

use crate::cpu::arena::HostArena;
use crate::cpu::row_reader::{LayerReader, RowReader, TILE_TOKENS};
use crate::{
    BackendError, EncodeSource, IncomingRows, LoadPlan, LoadedRows, PlanPart, RawTarget, Source,
};
use kvd_codec::{HeadCodec, ModelCodec, RowSpace, widen_values};
use kvd_core::{DType, Extent, Geometry, LayerIndex, Side};
use rayon::prelude::*;

/// First value of `bytes` that is NaN or infinite, and its index.
#[must_use]
pub fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<(usize, f32)> {
    // Exponent bits all ones; tested on the bits, since most values need no conversion.
    let found = match dtype {
        DType::F32 => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .position(|b| u32::from_le_bytes(*b) & 0x7f80_0000 == 0x7f80_0000),
        DType::F16 => non_finite_16(bytes, 0x7c00),
        DType::BF16 => non_finite_16(bytes, 0x7f80),
    }?;
    let mut value = [0f32];
    let size = dtype.size_bytes();
    dtype.widen_values(&bytes[found * size..][..size], &mut value);
    Some((found, value[0]))
}

fn non_finite_16(bytes: &[u8], exponent: u16) -> Option<usize> {
    let values = bytes.as_chunks::<2>().0;
    let bad = |b: &[u8; 2]| u16::from_le_bytes(*b) & exponent == exponent;
    // Without an early exit per value the search vectorises; a chunk is short enough to repeat.
    const CHUNK: usize = 1024;
    values.chunks(CHUNK).enumerate().find_map(|(i, chunk)| {
        let any = chunk.iter().fold(false, |any, b| any | bad(b));
        any.then(|| i * CHUNK + chunk.iter().position(bad).expect("one is bad"))
    })
}

pub(crate) fn check_finite(geometry: &Geometry, rows: &IncomingRows) -> Result<(), BackendError> {
    for (side, bytes) in [(Side::Key, &rows.k), (Side::Value, &rows.v)] {
        if let Some((index, value)) = first_non_finite(geometry.dtype, bytes) {
            return Err(BackendError::non_finite(geometry, side, index, value));
        }
    }
    Ok(())
}

/// Where one row lies in the arena.
fn row_extent(geometry: &Geometry, to: RawTarget, side: Side, head: usize, row: u64) -> Extent {
    let layout = geometry.raw_layout(to.capacity_rows);
    let start = layout.row_offset(side, head as u64, u64::from(to.first_row) + row);
    to.extent.sub_extent(start, start + layout.row_bytes(side))
}

/// Writes `[tokens, heads, dim]` payload rows into the `[head][row]` layout of a slot.
pub(crate) fn write_rows(
    arena: &mut HostArena,
    geometry: &Geometry,
    rows: &IncomingRows,
    source: std::ops::Range<u32>,
    to: RawTarget,
) {
    let heads = geometry.kv_heads as usize;
    for (side, bytes) in [(Side::Key, &rows.k), (Side::Value, &rows.v)] {
        let row_bytes = geometry.head_dim(side) * geometry.dtype.size_bytes();
        for head in 0..heads {
            for (row, token) in source.clone().enumerate() {
                let from = (token as usize * heads + head) * row_bytes;
                let extent = row_extent(geometry, to, side, head, row as u64);
                arena.extent_bytes_mut(extent).copy_from_slice(&bytes[from..from + row_bytes]);
            }
        }
    }
}

/// Copies rows into a raw slot; pages are decoded and rounded to the stored precision. What a
/// lossy codec decodes to past that precision's range becomes its largest value: an infinity
/// could be neither encoded again nor attended to.
pub(crate) fn copy_rows(
    arena: &mut HostArena,
    codec: &ModelCodec,
    layer: LayerIndex,
    from: &Source,
    count: u32,
    to: RawTarget,
) -> Result<(), BackendError> {
    let geometry = codec.geometry();
    for side in Side::BOTH {
        for head in 0..geometry.kv_heads as usize {
            if let Source::Raw { extent, capacity_rows, first_row } = *from {
                let from = RawTarget { extent, capacity_rows, first_row };
                for row in 0..u64::from(count) {
                    let source = row_extent(geometry, from, side, head, row);
                    arena.copy_extent(source, row_extent(geometry, to, side, head, row));
                }
                continue;
            }
            let reader = LayerReader { arena, codec, layer };
            let values = decode_values(reader, from, count, side, head)?;
            for (row, values) in values.chunks_exact(geometry.head_dim(side)).enumerate() {
                let extent = row_extent(geometry, to, side, head, row as u64);
                geometry.dtype.narrow_values(values, arena.extent_bytes_mut(extent));
            }
        }
    }
    Ok(())
}

/// Decodes `count` rows of one head all the way back to K or V. Not on the way of attention, so
/// there is time to test a page's checksum.
fn decode_values(
    reader: LayerReader<'_>,
    from: &Source,
    count: u32,
    side: Side,
    head: usize,
) -> Result<Vec<f32>, BackendError> {
    let dim = reader.codec.geometry().head_dim(side);
    let rows = reader.open_rows(from, count, side, head)?;
    rows.verify_checksum()?;
    let mut values = vec![0f32; count as usize * dim];
    for first in (0..count).step_by(TILE_TOKENS as usize) {
        let tile = TILE_TOKENS.min(count - first);
        rows.decode_in_part(
            first,
            tile,
            &mut values[first as usize * dim..][..tile as usize * dim],
        )?;
    }
    restore_rows(reader.codec.head_codec(reader.layer, side, head), rows.row_space(), &mut values);
    Ok(values)
}

/// Turns decoded rows of that space (`[rows, dim]`) back into K or V.
pub(crate) fn restore_rows(side: &HeadCodec, space: RowSpace, values: &mut [f32]) {
    if space == RowSpace::Coefficient {
        let mut restored = vec![0f32; side.dim()];
        for row in values.chunks_exact_mut(side.dim()) {
            side.invert_row(row, &mut restored);
            row.copy_from_slice(&restored);
        }
    }
}

/// Reads a raw block as `[heads, rows, dim]`, the shape that codecs take.
pub(crate) fn read_block(
    arena: &HostArena,
    geometry: &Geometry,
    block: EncodeSource,
    side: Side,
    values: &mut Vec<f32>,
) {
    let layout = geometry.raw_layout(block.capacity_rows);
    let per_head = block.rows as usize * geometry.head_dim(side);
    values.resize(per_head * geometry.kv_heads as usize, 0.0);
    for (head, values) in values.chunks_exact_mut(per_head).enumerate() {
        let start = layout.row_offset(side, head as u64, u64::from(block.first_row));
        let len = u64::from(block.rows) * layout.row_bytes(side);
        widen_values(
            geometry.dtype,
            arena.extent_bytes(block.extent.sub_extent(start, start + len)),
            values,
        );
    }
}

/// Decodes a range of a layer, `[tokens, heads, dim]`; parts beside one another where `threads`
/// has more than one.
pub(crate) fn load_rows(
    reader: LayerReader<'_>,
    plan: &LoadPlan,
    threads: &rayon::ThreadPool,
) -> Result<LoadedRows, BackendError> {
    let geometry = reader.codec.geometry();
    let token_bytes = Side::BOTH
        .map(|side| geometry.kv_heads as usize * geometry.head_dim(side) * plan.dtype.size_bytes());
    let tokens: usize = plan.parts.iter().map(|part| part.rows as usize).sum();
    let [mut k, mut v] = token_bytes.map(|bytes| vec![0u8; tokens * bytes]);
    let mut rest = [&mut k[..], &mut v[..]];
    let mut parts = Vec::with_capacity(plan.parts.len());
    for part in &plan.parts {
        let mut sides = rest.into_iter().zip(token_bytes);
        let mut take = || {
            let (bytes, of_token) = sides.next().unwrap_or_default();
            bytes.split_at_mut(part.rows as usize * of_token)
        };
        let (k_part, k_rest) = take();
        let (v_part, v_rest) = take();
        rest = [k_rest, v_rest];
        parts.push(PartRows { part, dtype: plan.dtype, sides: [k_part, v_part] });
    }
    if parts.len() > 1 && threads.current_num_threads() > 1 {
        let load = |tile: &mut Vec<f32>, mut part: PartRows<'_>| part.load_part(reader, tile);
        threads.install(|| parts.into_par_iter().try_for_each_init(Vec::new, load))?;
    } else {
        let mut tile = Vec::new();
        parts.iter_mut().try_for_each(|part| part.load_part(reader, &mut tile))?;
    }
    Ok(LoadedRows { k, v })
}

/// Rows of one part, K and V, `[tokens, heads, dim]`.
struct PartRows<'a> {
    part: &'a PlanPart,
    dtype: DType,
    sides: [&'a mut [u8]; 2],
}

impl PartRows<'_> {
    fn load_part(
        &mut self,
        reader: LayerReader<'_>,
        tile: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let (part, dtype) = (self.part, self.dtype);
        let heads = reader.codec.geometry().kv_heads as usize;
        for side in Side::BOTH {
            for head in 0..heads {
                let rows = reader.open_rows(&part.source, part.rows, side, head)?;
                rows.verify_checksum()?;
                let codec = reader.codec.head_codec(reader.layer, side, head);
                let bytes = &mut *self.sides[side.index()];
                let to = HeadRows { dtype, heads, head, bytes };
                load_head(&rows, codec, part.rows, tile, to)?;
            }
        }
        Ok(())
    }
}

/// Rows of one head among `[tokens, heads, dim]`.
struct HeadRows<'a> {
    dtype: DType,
    heads: usize,
    head: usize,
    /// Those of all heads.
    bytes: &'a mut [u8],
}

impl HeadRows<'_> {
    /// The bytes of a row, counted in the part.
    fn row_bytes_mut(&mut self, row: usize, dim: usize) -> &mut [u8] {
        let row_bytes = dim * self.dtype.size_bytes();
        &mut self.bytes[(row * self.heads + self.head) * row_bytes..][..row_bytes]
    }
}

/// Brings the rows of one head back, a tile at a time. Those that are kept as they came, in the
/// dtype that is asked for, are copied.
fn load_head(
    rows: &RowReader<'_>,
    codec: &HeadCodec,
    count: u32,
    tile: &mut Vec<f32>,
    mut to: HeadRows<'_>,
) -> Result<(), BackendError> {
    let (dim, dtype, space) = (codec.dim(), to.dtype, rows.row_space());
    tile.resize(TILE_TOKENS as usize * dim, 0.0);
    for first in (0..count).step_by(TILE_TOKENS as usize) {
        let tokens = TILE_TOKENS.min(count - first);
        if let Some(stored) = rows.stored_in_part(first..first + tokens, dim, dtype)
            && space == RowSpace::Raw
        {
            for (row, stored) in stored.chunks_exact(dim * dtype.size_bytes()).enumerate() {
                to.row_bytes_mut(first as usize + row, dim).copy_from_slice(stored);
            }
            continue;
        }
        let values = &mut tile[..tokens as usize * dim];
        rows.decode_in_part(first, tokens, values)?;
        restore_rows(codec, space, values);
        for (row, values) in values.chunks_exact(dim).enumerate() {
            dtype.narrow_values(values, to.row_bytes_mut(first as usize + row, dim));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_non_finite_finds_the_exact_value_in_every_dtype() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for len in [1usize, 5, 1023, 1024, 1025, 3000] {
                let mut values = vec![1.5f32; len];
                let mut bytes = vec![0u8; len * dtype.size_bytes()];
                dtype.narrow_values(&values, &mut bytes);
                assert_eq!(first_non_finite(dtype, &bytes), None);
                values[len - 1] = f32::NEG_INFINITY;
                dtype.narrow_values(&values, &mut bytes);
                assert_eq!(first_non_finite(dtype, &bytes), Some((len - 1, f32::NEG_INFINITY)));
                values[len / 2] = f32::NAN;
                dtype.narrow_values(&values, &mut bytes);
                let (index, value) = first_non_finite(dtype, &bytes).unwrap();
                assert!(index == len / 2 && value.is_nan());
            }
        }
    }
}
