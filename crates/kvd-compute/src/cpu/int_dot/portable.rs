//! The products of `mod.rs` as plain loops that a compiler turns into what vectors a target has:
//! codes become 16-bit values of one channel first, four of them meet four factors after that.

use crate::cpu::int_dot::{CodeLookup, SumTarget, TileCodes};
use crate::cpu::int_operands::{IntRows, ScaledRows};
use crate::cpu::span_scores::{SPAN, TILE};

/// Codes of the summed axis that lie together.
const QUAD: usize = 4;

/// Values of one channel of all codes of a tile.
fn channel_values(lookup: &CodeLookup, dim: usize, codes: &[u8], out: &mut Vec<i16>) {
    out.clear();
    if lookup.tables.is_empty() {
        let bias = lookup.bias as i16;
        out.extend(codes.iter().map(|code| i16::from(*code) - bias));
    } else {
        let values: [i16; 256] =
            std::array::from_fn(|code| lookup.value_of(dim, code as u8) as i16);
        out.extend(codes.iter().map(|code| values[usize::from(*code)]));
    }
}

/// Adds to each lane's sum its four values times four factors.
fn add_products(sums: &mut [i32], values: &[i16], factors: [i32; QUAD]) {
    for (sum, values) in sums.iter_mut().zip(values.as_chunks::<QUAD>().0) {
        let products: [i32; QUAD] = std::array::from_fn(|i| i32::from(values[i]) * factors[i]);
        *sum += (products[0] + products[1]) + (products[2] + products[3]);
    }
}

/// As `int_dot::key_dots`.
pub(super) fn key_dots(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    q: ScaledRows<'_>,
    scores: &mut [f32],
) {
    let ScaledRows { rows: q, units } = q;
    let per_row = codes.per_row;
    let (mut plain, mut values) = (Vec::new(), Vec::new());
    let plain = codes.as_bytes(&mut plain);
    let mut sums = vec![[0i32; TILE]; units.len()];
    for dim in 0..lookup.dims {
        channel_values(lookup, dim, plain, &mut values);
        for (row, sums) in sums.iter_mut().enumerate() {
            for (quad, values) in values.chunks_exact(QUAD * TILE).enumerate() {
                let at = dim * per_row + quad * QUAD;
                add_products(
                    sums,
                    values,
                    std::array::from_fn(|i| q.portable_value_at(row, at + i)),
                );
            }
        }
    }
    for (row, (sums, unit)) in sums.iter().zip(units).enumerate() {
        let scores = scores[row * SPAN..].iter_mut();
        scores.zip(sums).for_each(|(score, sum)| *score = *sum as f32 * unit);
    }
}

/// As `int_dot::value_dots`.
pub(super) fn value_dots(
    codes: TileCodes<'_>,
    lookup: &CodeLookup,
    weights: IntRows<'_>,
    target: SumTarget<'_>,
    out: &mut [f32],
) {
    let SumTarget { units, factors, first, count } = target;
    let per_row = codes.per_row;
    let (mut plain, mut values) = (Vec::new(), Vec::new());
    let mut sums = vec![0i32; units.len() * lookup.dims * count];
    let plain = codes.as_bytes(&mut plain);
    for (tile, plain) in plain.chunks_exact(TILE * per_row).enumerate() {
        for dim in 0..lookup.dims {
            channel_values(lookup, dim, plain, &mut values);
            for row in 0..units.len() {
                let sums = &mut sums[(row * lookup.dims + dim) * count..][..count];
                for (quad, values) in values.chunks_exact(QUAD * per_row).enumerate() {
                    let at = tile * TILE + quad * QUAD;
                    let factors = std::array::from_fn(|i| weights.portable_value_at(row, at + i));
                    add_products(sums, &values[QUAD * first..], factors);
                }
            }
        }
    }
    let rows = out.chunks_exact_mut(per_row).zip(sums.chunks_exact(count));
    for (index, (out, sums)) in rows.enumerate() {
        let unit = units[index / lookup.dims];
        for (position, (out, sum)) in (first..).zip(out[first..].iter_mut().zip(sums)) {
            let factor = factors.get(position).map_or(unit, |f| f * unit);
            *out += *sum as f32 * factor;
        }
    }
}
