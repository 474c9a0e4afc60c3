//! Products on every instruction set: the same bits, and exact.

use super::*;
use crate::cpu::int_operands::lane_offsets::LANE_OFFSETS;
use crate::cpu::int_operands::{IntOperands, largest_fitting};
use crate::cpu::prefetch::PrefetchBytes;
use crate::cpu::simd::{KernelConfig, Precision};

const UNITS: [f32; ROWS] = [0.5, 0.1, 3.0, 1.0, 0.7, 2.0, 0.3, 1.5];

/// Values in `-1.0..1.0`, equal in every run.
fn waves(count: usize, seed: usize) -> Vec<f32> {
    let wave = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
    (0..count).map(wave).collect()
}

/// Bytes of a plane; those that are a code each hold no larger one than the lookup has.
fn codes(lookup: &CodeLookup, width: u32, count: usize) -> Vec<u8> {
    let mask = if width == 8 { u8::MAX >> (8 - lookup.bits) } else { u8::MAX };
    (0..count).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8 & mask).collect()
}

/// The widths of planes that can hold a lookup's codes: any that holds a code for itself.
fn widths(lookup: &CodeLookup) -> &'static [u32] {
    match (lookup.tables.is_empty(), lookup.bits) {
        (true, _) => &[1, 2, 4, 8],
        (_, 1) => &[1, 8],
        (_, 2) => &[2],
        (_, 3 | 4) => &[4, 8],
        _ => &[8],
    }
}

fn lookups() -> Vec<CodeLookup> {
    let mut lookups = vec![CodeLookup::identity(), CodeLookup::biased_bytes()];
    for (dims, bits) in [(2, 1), (2, 2), (2, 4), (4, 5), (4, 6), (2, 7), (4, 8), (8, 8), (1, 4)] {
        let levels = (0..dims << bits).map(|i| (i * 89 % 255) as f32 - 127.0);
        let levels: Vec<f32> = levels.collect();
        lookups.push(CodeLookup::of_entries(dims, bits, &levels).unwrap());
    }
    lookups
}

fn parts(simd: Simd, rows: usize, len: usize) -> IntOperands {
    let mut parts = IntOperands::of_queries(KernelConfig { simd, precision: Precision::Fast });
    parts.clear_rows(len);
    for row in 0..rows {
        let values = waves(len, row);
        let pushed = parts.push(simd, &values, 1.0, Some(values.iter().sum()));
        assert_eq!(pushed.unit, 1.0 / largest_fitting(len, 255).min(32639.0));
        assert!(pushed.lost.abs() < pushed.unit * len as f32 / 2.0);
    }
    parts
}

#[test]
fn key_dots_are_the_same_on_every_level() {
    for lookup in lookups() {
        for per_row in [8, 16, 32, 80] {
            let widths = widths(&lookup).iter();
            let widths = widths.filter(|width| (per_row as u32 * **width).is_multiple_of(32));
            for (width, rows) in widths.flat_map(|w| (1..=ROWS).map(move |rows| (*w, rows))) {
                let bytes = &codes(&lookup, width, 4 * per_row * width as usize);
                let run = |simd| {
                    let parts = parts(simd, rows, per_row * lookup.dims);
                    let mut out = vec![0.0; rows * SPAN];
                    let codes =
                        TileCodes { bytes, width, per_row, prefetch: PrefetchBytes::default() };
                    let q = ScaledRows { rows: parts.rows_from(0), units: &UNITS[..rows] };
                    key_dots(simd, codes, &lookup, q, &mut out);
                    out
                };
                let levels = Simd::available_levels();
                let portable = run(levels[0]);
                assert!(portable.iter().any(|dot| *dot != 0.0));
                for simd in levels.into_iter().filter(|simd| lookup.is_fast(*simd)) {
                    assert_eq!(run(simd), portable, "{simd:?}, {per_row} x {}", lookup.dims);
                }
            }
        }
    }
}

#[test]
fn value_dots_are_the_same_on_every_level() {
    for lookup in lookups() {
        for (per_row, first, count) in [(4, 0, 4), (20, 0, 20), (40, 0, 40), (80, 32, 32)] {
            let shapes = [(1, 1), (2, 4), (3, 1), (4, 2), (7, 3), (8, 4)];
            let shapes = widths(&lookup).iter().flat_map(|width| shapes.map(|s| (*width, s)));
            for (width, (rows, tiles)) in shapes {
                let bytes = &codes(&lookup, width, tiles * 4 * per_row * width as usize);
                let factors = waves(per_row, 5);
                let factors = if tiles == 1 { &factors[..] } else { &[] };
                let run = |simd| {
                    let parts = parts(simd, rows, tiles * 32);
                    let mut out = vec![0.25; rows * lookup.dims * per_row];
                    let codes =
                        TileCodes { bytes, width, per_row, prefetch: PrefetchBytes::default() };
                    let units = &UNITS[..rows];
                    let target = SumTarget { units, factors, first, count };
                    value_dots(simd, codes, &lookup, parts.rows_from(0), target, &mut out);
                    out
                };
                let levels = Simd::available_levels();
                let portable = run(levels[0]);
                assert!(portable.iter().any(|dot| *dot != 0.25));
                for simd in levels.into_iter().filter(|simd| lookup.is_fast(*simd)) {
                    assert_eq!(run(simd), portable, "{simd:?}, {per_row} x {}", lookup.dims);
                }
            }
        }
    }
}

/// Rows of one byte each: queries with signs, weights without.
fn bytes(simd: Simd, rows: usize, len: usize, weights: bool) -> (IntOperands, Vec<Vec<i32>>) {
    let config = KernelConfig { simd, precision: Precision::Int8 };
    let mut parts =
        if weights { IntOperands::of_weights(config) } else { IntOperands::of_queries(config) };
    let top = if weights { 255.0 } else { 127.0 };
    parts.clear_rows(len);
    let rows = (0..rows).map(|row| {
        let values = waves(len, row);
        let values = values.into_iter().map(|x| if weights { x.abs() } else { x });
        let values: Vec<f32> = values.collect();
        assert_eq!(parts.push(simd, &values, 1.0, None).unit, 1.0 / top);
        let offsets = LANE_OFFSETS[0].into_iter().cycle().map(|x| if weights { x } else { 0.0 });
        values
            .iter()
            .zip(offsets)
            .map(|(x, add)| (x * top + add).round_ties_even() as i32)
            .collect()
    });
    let rows = rows.collect();
    (parts, rows)
}

/// Sets that multiply bytes.
fn with_bytes() -> impl Iterator<Item = Simd> {
    let bytes = |simd: &Simd| simd.vector_set() == InstructionSet::Avx512 || simd.has_avx_vnni();
    Simd::available_levels().into_iter().filter(bytes)
}

#[test]
fn queries_of_a_byte_are_multiplied_exactly() {
    const PER_ROW: usize = 24;
    for (simd, lookup) in
        with_bytes().flat_map(|simd| lookups().into_iter().map(move |l| (simd, l)))
    {
        if !lookup.is_fast(simd) {
            continue;
        }
        for (width, rows) in widths(&lookup).iter().flat_map(|w| [1, 4, 7].map(|r| (*w, r))) {
            if !(PER_ROW as u32 * width).is_multiple_of(32) {
                continue;
            }
            let bytes = &codes(&lookup, width, 2 * 4 * PER_ROW * width as usize);
            let codes =
                TileCodes { bytes, width, per_row: PER_ROW, prefetch: PrefetchBytes::default() };
            let (parts, q) = self::bytes(simd, rows, PER_ROW * lookup.dims, false);
            let mut out = vec![0.0; rows * SPAN];
            let of_units = ScaledRows { rows: parts.rows_from(0), units: &UNITS[..rows] };
            key_dots(simd, codes, &lookup, of_units, &mut out);
            for (tile, (codes, _)) in codes.each_tile().enumerate() {
                let mut buffer = Vec::new();
                let plain = codes.as_bytes(&mut buffer);
                for (row, token) in (0..rows).flat_map(|row| (0..TILE).map(move |t| (row, t))) {
                    let value = |at: usize, dim| {
                        let code = plain[(at / 4 * TILE + token) * 4 + at % 4];
                        lookup.value_of(dim, code) * q[row][dim * PER_ROW + at]
                    };
                    let sum = (0..PER_ROW).flat_map(|at| (0..lookup.dims).map(move |d| (at, d)));
                    let sum: i32 = sum.map(|(at, dim)| value(at, dim)).sum();
                    let got = out[row * SPAN + tile * TILE + token];
                    assert_eq!(got, sum as f32 * UNITS[row], "{simd:?}, {width} bits");
                }
            }
        }
    }
}

#[test]
fn weights_of_a_byte_are_multiplied_exactly() {
    const PER_ROW: usize = 40;
    for (simd, lookup) in
        with_bytes().flat_map(|simd| lookups().into_iter().map(move |l| (simd, l)))
    {
        if !lookup.is_fast(simd) {
            continue;
        }
        for (width, rows) in widths(&lookup).iter().flat_map(|w| [1, 4, 7].map(|r| (*w, r))) {
            let bytes = &codes(&lookup, width, 2 * 4 * PER_ROW * width as usize);
            let codes =
                TileCodes { bytes, width, per_row: PER_ROW, prefetch: PrefetchBytes::default() };
            let (parts, weights) = self::bytes(simd, rows, 2 * TILE, true);
            let mut out = vec![0.0; rows * lookup.dims * PER_ROW];
            let units = &UNITS[..rows];
            let target = SumTarget { units, factors: &[], first: 0, count: PER_ROW };
            value_dots(simd, codes, &lookup, parts.rows_from(0), target, &mut out);
            let mut buffer = Vec::new();
            let plain = codes.as_bytes(&mut buffer);
            for (row, dim) in (0..rows).flat_map(|row| (0..lookup.dims).map(move |d| (row, d))) {
                for at in 0..PER_ROW {
                    let value = |token: usize| {
                        let code = plain[(token / 4 * PER_ROW + at) * 4 + token % 4];
                        lookup.value_of(dim, code) * weights[row][token]
                    };
                    let sum: i32 = (0..2 * TILE).map(value).sum();
                    let got = out[(row * lookup.dims + dim) * PER_ROW + at];
                    assert_eq!(got, sum as f32 * UNITS[row], "{simd:?}, {width} bits");
                }
            }
        }
    }
}

#[test]
fn largest_queries_against_the_largest_codes_do_not_overflow() {
    const LENS: [usize; 5] = [128, 256, 260, 576, 1024];
    // The largest and the least value of each lookup, one per code.
    let levels = CodeLookup::of_entries(1, 1, &[127.0, -127.0]).unwrap().after_lookup();
    let lookups = [
        (CodeLookup::identity(), [255, 0]),
        (CodeLookup::biased_by(127), [254, 0]),
        (levels, [255, 1]),
    ];
    let lens = Simd::available_levels().into_iter().flat_map(|simd| LENS.map(|len| (simd, len)));
    for ((simd, len), (lookup, ends)) in lens.flat_map(|at| lookups.iter().map(move |l| (at, l))) {
        for (sign, code) in [1, -1].iter().flat_map(|sign| ends.map(|code| (*sign, code))) {
            let most = lookup.largest_value();
            let mut parts =
                IntOperands::of_queries(KernelConfig { simd, precision: Precision::Fast })
                    .multiplied_with(most);
            parts.clear_rows(len);
            parts.push(simd, &vec![sign as f32; len], 1.0, None);
            let top = parts.rows_from(0).value_at(simd, 0, 0);
            assert_eq!(
                top,
                sign * largest_fitting(len, most).min(32639.0) as i32,
                "{simd:?}, {len}"
            );
            let (bytes, mut out) = (vec![code; 32 * len], [0.0; SPAN]);
            let prefetch = PrefetchBytes::default();
            let codes = TileCodes { bytes: &bytes, width: 8, per_row: len, prefetch };
            let rows = ScaledRows { rows: parts.rows_from(0), units: &[1.0] };
            key_dots(simd, codes, lookup, rows, &mut out);
            let sum = i64::from(top) * i64::from(lookup.value_of(0, code)) * len as i64;
            assert!(i32::try_from(sum).is_ok(), "{len}");
            assert_eq!(out[..TILE], [sum as f32; TILE], "{simd:?}, {len}, {code}");
        }
    }
}

#[test]
fn entries_off_their_levels_have_no_table() {
    assert!(CodeLookup::of_entries(1, 1, &[127.0, -33.0]).is_some());
    assert!(CodeLookup::of_entries(1, 1, &[127.0, -33.5]).is_none());
    assert!(CodeLookup::of_entries(1, 1, &[0.0, 0.0]).is_none());
}
