//! Bytes beside a scalar model of how they are cut, and exact sums of them.

use super::*;
use crate::cpu::simd::{InstructionSet, Simd};
use kvd_core::DType;

fn has_kernels() -> bool {
    Simd::of_set(InstructionSet::Avx2).is_some()
}

fn halves(values: impl Iterator<Item = f32>) -> Vec<u8> {
    let values: Vec<f32> = values.collect();
    let mut bytes = vec![0; 2 * values.len()];
    DType::F16.narrow_values(&values, &mut bytes);
    bytes
}

/// A tile's codes `[quads, lanes, 4]` in planes of so many bits.
fn tile(width: usize, quads: usize, lanes: usize, code: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let plane = quads * width / 8;
    let byte = |i: usize| {
        let (quad, lane, place) = (i / (4 * lanes), i / 4 % lanes, i % 4);
        (0..8 / width)
            .fold(0, |byte, p| byte | code(4 * (p * plane + quad) + place, lane) << (p * width))
    };
    (0..plane * lanes * 4).map(byte).collect()
}

/// A whole number of up to `top`; the first of each 8 is that.
fn whole(i: usize, top: usize) -> f32 {
    if i.is_multiple_of(8) { top as f32 } else { (i * 7919 % top) as f32 }
}

/// A power of two, the same of each [`TOKENS`].
fn step(i: usize) -> f32 {
    [0.5, 2.0, 0.25, 1.0, 4.0][i / TOKENS % 5]
}

fn minimum(i: usize) -> f32 {
    (i * 31 % 17) as f32 - 8.0
}

fn shapes() -> impl Iterator<Item = (u32, usize, usize)> {
    let widths = [(1, 1), (2, 2), (3, 8), (4, 4), (2, 8)];
    widths.into_iter().flat_map(|(bits, width)| (1..=ROWS).map(move |r| (bits, width, r)))
}

fn f16(bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / 2];
    DType::F16.widen_values(bytes, &mut values);
    values
}

fn wave(i: usize) -> f32 {
    (i as f32 * 0.7).sin() * (1.0 + (i % 7) as f32)
}

fn reciprocal(value: f32) -> f32 {
    if value > LEAST && value < f32::INFINITY { 1.0 / value } else { 0.0 }
}

/// The largest of some that are not negative.
fn largest(values: &[f32]) -> f32 {
    values.iter().copied().fold(0.0, f32::max)
}

/// Folded queries of the scalar model: factors, units, residues, uneven blocks.
type FoldedQueries = (Vec<u8>, Vec<f32>, Vec<u8>, Vec<usize>);

fn cut_queries(queries: &[f32], dim: usize, steps: &[f32]) -> FoldedQueries {
    let (mut factors, mut residues) = (vec![0; queries.len()], vec![0; queries.len()]);
    let (mut units, mut uneven) = (vec![0.0; dim / BLOCK * ROWS], Vec::new());
    for (block, steps) in steps.chunks(BLOCK).enumerate() {
        let most = largest(steps);
        let least = steps.iter().copied().fold(f32::INFINITY, f32::min);
        let is_uneven = most > least * UNEVEN;
        uneven.extend(is_uneven.then_some(block));
        for (row, queries) in queries.chunks(dim).enumerate() {
            let values = &queries[block * BLOCK..][..BLOCK];
            let top = largest(&values.iter().map(|q| q.abs()).collect::<Vec<_>>());
            units[block * ROWS + row] = top / TOP_QUERY * most;
            for (i, (q, step)) in values.iter().zip(steps).enumerate() {
                let scaled = q * (TOP_QUERY / top);
                let factor = scaled * (step * reciprocal(most));
                let whole = factor.round_ties_even();
                let at = row * dim + block * BLOCK + i;
                factors[at] = (whole as i8) as u8;
                if is_uneven {
                    residues[at] = (((factor - whole) * RESIDUES).round_ties_even() as i8) as u8;
                }
            }
        }
    }
    (factors, units, residues, uneven)
}

#[test]
fn queries_are_cut_to_the_bytes_of_a_scalar_model() {
    let dim = 128;
    for (rows, large) in (1..=ROWS).flat_map(|r| [1.0, 3.0, 16.0].map(|large| (r, large))) {
        if !has_kernels() {
            return;
        }
        let queries: Vec<f32> = (0..rows * dim).map(wave).collect();
        let step =
            |i: usize| (0.05 + wave(3 * i).abs() * 0.01) * if i % 13 == 3 { large } else { 1.0 };
        let scales = (halves((0..dim).map(step)), halves((0..dim).map(minimum)));
        let mut block = QueryBlock::new(&queries, dim);
        let (of, folded) = block.for_fold();
        let (steps, minima) = (&scales.0[..], &scales.1[..]);
        let middle = MiddleCode { steps: 7.5, code: 7.5 };
        avx2_nibbles::fold_queries(of, FoldScales { steps, minima }, middle, folded);
        let (factors, units, residues, uneven) = cut_queries(&queries, dim, &f16(&scales.0));
        assert_eq!(block.factors, factors, "{rows} {large}");
        assert_eq!(block.residues, residues, "{rows} {large}");
        assert_eq!(block.uneven, uneven, "{rows} {large}");
        for (got, unit) in block.units.chunks(ROWS).zip(units.chunks(ROWS)) {
            assert_eq!(got[..rows], unit[..rows], "{rows} {large}");
        }
        assert_eq!(uneven.is_empty(), large == 1.0, "{rows} {large}");
    }
}

/// Units are powers of two, those of residues where there are such, so that no sum of f32 is
/// rounded.
#[test]
fn scores_are_exact_sums_of_their_bytes() {
    let uneven = [&[][..], &[0, 3, 15]].into_iter();
    let cases = uneven.flat_map(|uneven| shapes().map(move |of| (of, uneven)));
    for ((bits, width, rows), uneven) in cases.filter(|_| has_kernels()) {
        let dim = 128;
        let code = |channel: usize, t: usize| ((channel * 5 + t * 3) % (1 << bits)) as u8;
        let bytes = tile(width, dim / 4, TILE, code);
        let signed: Vec<u8> =
            (0..rows * dim).map(|i| ((i * 7919 % 255) as i32 - 127) as i8 as u8).collect();
        let none = vec![0; rows * dim];
        let [of_factors, of_residues] =
            if uneven.is_empty() { [&signed, &none] } else { [&none, &signed] };
        let least = if uneven.is_empty() { 1.0 } else { RESIDUES };
        let units: Vec<f32> = (0..dim / BLOCK * ROWS).map(|i| step(i) * least).collect();
        let bases = [8.0, -3.0, 0.5, 100.0];
        let of = KeyFactors {
            bytes: of_factors,
            units: &units,
            bases: &bases[..rows],
            residues: of_residues,
            uneven,
        };
        let mut out = vec![0f32; rows * SPAN];
        let prefetch = PrefetchBytes::default();
        let codes = TileCodes { bytes: &bytes, width: width as u32, per_row: dim, prefetch };
        avx2_nibbles::score_tile(codes, of, &mut out);
        for (row, token) in (0..rows).flat_map(|row| (0..TILE).map(move |t| (row, t))) {
            let of_block = |block: usize| {
                let product =
                    |c: usize| i32::from(signed[row * dim + c] as i8) * i32::from(code(c, token));
                let sum: i32 = (block * BLOCK..(block + 1) * BLOCK).map(product).sum();
                let counts = uneven.is_empty() || uneven.contains(&block);
                let unit = f64::from(units[block * ROWS + row] / least);
                if counts { f64::from(sum) * unit } else { 0.0 }
            };
            let score = f64::from(bases[row]) + (0..dim / BLOCK).map(of_block).sum::<f64>();
            let got = f64::from(out[row * SPAN + token]);
            assert_eq!(got, score, "{bits} {width} {rows} {token}");
        }
    }
}

/// Factors that are whole numbers of a unit are not rounded, and neither are their sums. Where
/// one channel of each block has larger steps, each factor is off by half a unit of residues.
#[test]
fn scores_of_whole_factors_are_exact_and_of_uneven_ones_half_a_residue_off() {
    let large = [1.0, 16.0].into_iter().flat_map(|large| shapes().map(move |of| (of, large)));
    for ((bits, width, rows), large) in large.filter(|_| has_kernels()) {
        let dim = 128;
        let code = |channel: usize, t: usize| ((channel * 5 + t * 3) % (1 << bits)) as u8;
        let bytes = tile(width, dim / 4, TILE, code);
        let sign = |i: usize| if i * 13 % 7 < 3 { -1.0 } else { 1.0 };
        let queries: Vec<f32> = (0..rows * dim).map(|i| sign(i) * whole(i, 127)).collect();
        let mut block = QueryBlock::new(&queries, dim);
        let step = |channel: usize| {
            step(channel * TOKENS / BLOCK) * if channel % BLOCK == 3 { large } else { 1.0 }
        };
        let scales = (halves((0..dim).map(step)), halves((0..dim).map(minimum)));
        let middle = ((1 << bits) - 1) as f32 / 2.0;
        let (of, folded) = block.for_fold();
        let of_scales = FoldScales { steps: &scales.0, minima: &scales.1 };
        let of_middle = MiddleCode { steps: middle, code: middle };
        avx2_nibbles::fold_queries(of, of_scales, of_middle, folded);
        assert_eq!(block.uneven.len(), if large > UNEVEN { dim / BLOCK } else { 0 });
        let mut out = vec![0f32; rows * SPAN];
        let prefetch = PrefetchBytes::default();
        let codes = TileCodes { bytes: &bytes, width: width as u32, per_row: dim, prefetch };
        avx2_nibbles::score_tile(codes, block.key_factors(), &mut out);
        for (row, token) in (0..rows).flat_map(|row| (0..TILE).map(move |t| (row, t))) {
            let (mut score, mut sizes, mut cut) = (0f64, 0f64, 0f64);
            for channel in 0..dim {
                let code = f32::from(code(channel, token));
                let query = queries[row * dim + channel];
                score += f64::from(query * (code * step(channel) + minimum(channel)));
                let unit = f64::from(block.units[channel / BLOCK * ROWS + row]);
                cut += 0.5 * unit / f64::from(RESIDUES) * f64::from((code - middle).abs());
                // What is summed: products of the code and of the middle, and minima.
                let summed = (code + 2.0 * middle) * step(channel) + minimum(channel).abs();
                sizes += f64::from(query.abs() * summed);
            }
            // Each channel, block and residue is an addition that rounds to half of an epsilon.
            let rounded = 2.0 * dim as f64 * f64::from(f32::EPSILON) / 2.0 * sizes;
            let allowed = if large > UNEVEN { cut + rounded } else { 0.0 };
            let got = f64::from(out[row * SPAN + token]);
            assert!((got - score).abs() <= allowed, "{bits} {rows} {token}: {got} {score}");
        }
    }
}

/// Folds a row's weights and a group's steps one by one: factors, and units by block of tokens.
fn cut_weights(weights: &[f32], steps: &[f32], gain: f32) -> (Vec<u8>, Vec<f32>) {
    let (mut factors, mut units) = (Vec::new(), Vec::new());
    for (weights, steps) in weights.chunks(TOKENS).zip(steps.chunks(TOKENS)) {
        let (unit, most) = (largest(weights) * (1.0 / TOP_WEIGHT), largest(steps));
        units.push(unit * gain * most);
        let factor = |(weight, step): (&f32, &f32)| {
            let scaled = weight * reciprocal(unit);
            (scaled * (step * reciprocal(most))).round_ties_even() as u8
        };
        factors.extend(weights.iter().zip(steps).map(factor));
    }
    (factors, units)
}

/// Weighted sums of codes that all differ, and the room that the last group's factors are in.
struct SummedValues {
    scratch: WeightScratch,
    offset: CodeOffset,
    bases: Vec<[f32; LANES]>,
    sums: Vec<f32>,
}

/// Channels of a group, how many groups, and tokens.
const SUMMED: (usize, usize, usize) = (16, 3, 2 * TILE);

fn summed(
    bits: u32,
    width: usize,
    rows: usize,
    weights: &[f32],
    scales: FoldScales<'_>,
) -> SummedValues {
    let FoldScales { steps, minima } = scales;
    let (channels, groups, tokens) = SUMMED;
    let dim = channels * groups;
    let of_tile = |first| {
        tile(width, TILE / 4, dim, |token, channel| value_code(bits, first + token, channel))
    };
    let bytes = [0, TILE].map(of_tile).concat();
    let of = WeightedTokens { weights, rows, tokens, steps, minima, channels };
    let mut scratch = WeightScratch { scaled: [0.0; ROWS * SPAN], factors: [0; ROWS * SPAN] };
    let (mut bases, mut sums) = (vec![[0f32; LANES]; ROWS * groups], vec![1f32; rows * dim]);
    let prefetch = PrefetchBytes::default();
    let codes = TileCodes { bytes: &bytes, width: width as u32, per_row: dim, prefetch };
    let (mode, group) = (UniformMode::Asym, Some(channels));
    let top = (1 << bits) - 1;
    let of_codes = UniformGroups { axis: GroupAxis::Token, group, bits, mode, top };
    let offset = value_offset(of_codes, top as u8, width as u32);
    avx2_nibble_values::add_tiles(codes, offset, of, &mut scratch, &mut bases, &mut sums);
    SummedValues { scratch, offset, bases, sums }
}

fn value_code(bits: u32, token: usize, channel: usize) -> u8 {
    ((channel * 7 + token * 3) % (1 << bits)) as u8
}

#[test]
fn weights_are_cut_to_the_bytes_of_a_scalar_model() {
    let (_, groups, tokens) = SUMMED;
    for (bits, width, rows) in shapes().filter(|_| has_kernels()) {
        let weights: Vec<f32> = (0..rows * SPAN).map(|i| wave(i).abs()).collect();
        let step = |i: usize| 0.05 + wave(3 * i).abs() * 0.1;
        let scales = groups * tokens;
        let (steps, minima) = (halves((0..scales).map(step)), halves((0..scales).map(minimum)));
        let of = summed(bits, width, rows, &weights, FoldScales { steps: &steps, minima: &minima });
        let last = &f16(&steps)[(groups - 1) * tokens..];
        for row in 0..rows {
            let (factors, _) = cut_weights(&weights[row * SPAN..][..tokens], last, 1.0);
            assert_eq!(of.scratch.factors[row * SPAN..][..tokens], factors, "{bits} {rows}");
        }
    }
}

/// Weights are whole numbers of a unit and steps powers of two, so that neither factors nor
/// sums are rounded: they are those of the model's bytes, and of weights times levels.
#[test]
fn sums_of_whole_factors_are_exact() {
    let (channels, groups, tokens) = SUMMED;
    for (bits, width, rows) in shapes().filter(|_| has_kernels()) {
        let dim = channels * groups;
        let weights: Vec<f32> = (0..rows * SPAN).map(|i| whole(i, 255)).collect();
        let scales = groups * tokens;
        let (steps, minima) = (halves((0..scales).map(step)), halves((0..scales).map(minimum)));
        let of = summed(bits, width, rows, &weights, FoldScales { steps: &steps, minima: &minima });
        for (row, channel) in (0..rows).flat_map(|row| (0..dim).map(move |c| (row, c))) {
            let group = channel / channels;
            let weights = &weights[row * SPAN..][..tokens];
            let at = group * tokens..(group + 1) * tokens;
            let (factors, units) =
                cut_weights(weights, &f16(&steps[2 * at.start..2 * at.end]), of.offset.gain);
            let code = |token: usize| f64::from(value_code(bits, token, channel));
            let doubled = f64::from(1.0 / of.offset.gain);
            let of_bytes: f64 = (0..tokens)
                .map(|token| {
                    let code = code(token) * doubled - f64::from(of.offset.code);
                    f64::from(units[token / TOKENS]) * f64::from(factors[token]) * code
                })
                .sum();
            let got = f64::from(of.sums[row * dim + channel]) - 1.0;
            assert_eq!(got, of_bytes, "{bits} {rows} {channel}");
            let term = |token: usize| {
                let at = group * tokens + token;
                let level = code(token) * f64::from(step(at)) + f64::from(minimum(at));
                f64::from(weights[token]) * level
            };
            let base: f64 = of.bases[group * ROWS + row].map(f64::from).iter().sum();
            let sum: f64 = (0..tokens).map(term).sum();
            assert_eq!(got + base, sum, "{bits} {rows} {channel}");
        }
    }
}
