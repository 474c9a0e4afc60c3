//! The instruction set does not change an answer: under `fast` sums of products are exact integers
//! and softmax rounds alike everywhere, so answers over full tiles have the same bits on every
//! instruction set, unless a side keeps something else in f32. Elsewhere two answers differ by the
//! order of sums in f32 ([`AllowedGaps::of_order`]), or, where two instruction sets round queries
//! or weights differently, by their budgets ([`AllowedGaps::of_budgets`]).

use super::super::{attend_job, int_dot};
use super::*;
use crate::cpu::attend;
use crate::cpu::huffman::StreamTiles;
use crate::cpu::simd::KernelConfig;
use std::collections::BTreeSet;

/// Codecs whose answers over full tiles have the same bits wherever factors are cut alike.
const SAME_ANSWERS: &[&str] = &[
    "k=hadamard/uniform(b=3,axis=block); v=hadamard/uniform(b=5,g=32,axis=channel)",
    "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)",
    "vecinfer-4",
    "vecinfer-2",
    "vecinfer-2-reg",
    "k=vq(d=2,b=6); v=vq(d=4,b=7)",
    "kvd-4",
    "kvd-3",
    "kvd-2",
    "kvd-1.5",
    "kvd-1",
    "kvd-2-fast",
    "k=mean+qpca/bitalloc(b=4.6); v=hadamard/bitalloc(b=5)",
    "k=bitalloc(b=0.7); v=gain/bitalloc(b=7.4)",
    "k=mean+qpca/grid(rate=4)/huffman; v=hadamard/grid(rate=1)/huffman",
    "k=vq(d=2,b=4); v=gain/vq(d=2,b=4)",
    "k=norm/uniform(b=3,g=16,axis=token); v=uniform(b=2,axis=channel,mode=sym)",
    "k=uniform(b=3,axis=channel,mode=sym); v=uniform(b=4,g=32,axis=token,mode=sym)",
    "k=uniform(b=2,axis=token,mode=sym); v=uniform(b=3,axis=block,mode=sym)",
    "k=vq(d=2,b=4)/huffman; v=vq(d=2,b=4)/huffman",
    "k=hadamard/lloyd(b=4)/huffman; v=vq(d=2,b=4)",
    "k=hadamard/lloyd(b=6); v=hadamard+gain/lloyd(b=3)",
    "innerq-2",
    "k=uniform(b=4,g=8,axis=token,mode=hybrid); v=uniform(b=5,g=32,axis=channel,mode=hybrid)",
];

/// Codecs whose scores alone have the same bits; minima of values by token are summed in f32,
/// beside the codes.
const SAME_SCORES: &[&str] = &["kvcomp", "turbo-4", "turbo-3", "polar-4+4", "polar-4+2"];

/// Sides that AVX-512 has kernels of another shape for: a run of one width, or a group of signs, is
/// cut by its own largest there, where others cut a whole row.
const CUT_BY_RUN: &[&str] = &["bitalloc", "kvd-2-fast", "innerq-2", "mode=hybrid"];

/// How the factors of a question are rounded: with one `FactorRounding` all integers are the same.
#[derive(Clone, Copy, Debug, PartialEq)]
enum FactorRounding {
    /// No rounding.
    Float,
    /// To words of their row's largest.
    Words,
    /// To words of their run's largest.
    WordsOfRuns,
    /// To bytes, tables or bf16, as that level does; the kernels may take bf16.
    Bytes(InstructionSet, bool),
}

impl FactorRounding {
    fn of_kernels(config: KernelConfig, codec: &ModelCodec, name: &str, rows: usize) -> Self {
        let config = attend_job::effective_config(config, rows);
        let simd = config.simd;
        let [k, v] = Side::BOTH.map(|side| codec.head_codec(LAYER, side, 0));
        let tiles = [(k, Side::Key), (v, Side::Value)].map(|(head, of)| StreamTiles::new(head, of));
        let keys =
            side_kernels::KeyKernel::new(config, k, tiles[0].as_ref(), &vec![1.0; k.dim() * rows]);
        let values = side_kernels::ValueKernel::new(config, v, tiles[1].as_ref(), rows);
        let float_keys = matches!(keys, None | Some(side_kernels::KeyKernel::Fp8(_)));
        if float_keys && matches!(values, None | Some(side_kernels::ValueKernel::Fp8(_))) {
            return Self::Float;
        }
        let wide = simd.vector_set() == InstructionSet::Avx512;
        // What plain AVX2 has of `int8`.
        let tables =
            matches!(keys, Some(side_kernels::KeyKernel::Tables(_))) || TABLES.contains(&name);
        let nibbles = matches!(keys, Some(side_kernels::KeyKernel::Nibbles(_)))
            || matches!(values, Some(side_kernels::ValueKernel::Nibbles(_)));
        if config.precision == Precision::Int8 && (wide || simd.has_avx_vnni() || tables || nibbles)
        {
            let bf16 = matches!(keys, Some(side_kernels::KeyKernel::Bf16(_)))
                || matches!(values, Some(side_kernels::ValueKernel::Bf16(_)));
            return Self::Bytes(simd.vector_set(), bf16 || simd.has_avx_vnni());
        }
        let by_run = CUT_BY_RUN.iter().any(|side| name.contains(side));
        if wide && by_run && !int_dot::wants_bytes(simd, rows) {
            Self::WordsOfRuns
        } else {
            Self::Words
        }
    }
}

/// Whether units of these numbers of rows round factors alike, so that a row has the same bits in
/// either.
pub(super) fn rounds_alike(
    config: KernelConfig,
    codec: &ModelCodec,
    name: &str,
    rows: [usize; 2],
) -> bool {
    let [a, b] = rows.map(|rows| FactorRounding::of_kernels(config, codec, name, rows));
    a == b
}

/// The answer of one level to a question.
#[derive(Clone)]
struct LevelAnswer {
    config: KernelConfig,
    way: FactorRounding,
    /// `[query heads, tokens]`.
    scores: Vec<f32>,
    lse: Vec<f32>,
    out: Vec<f32>,
    /// Rows that were answered again in f64: `int8` answers none, so it may differ there.
    again: usize,
}

/// How far scores, log-sum-exps and outputs of two levels may lie apart.
#[derive(Clone, Copy, Debug)]
struct AllowedGaps {
    scores: f64,
    lse: f64,
    out: f64,
}

impl AllowedGaps {
    /// Sums of f32 in any order lie within [`SINGLE_ERROR_MAX`] of what they should be, so two of
    /// them within twice that. A weight that changes so little may still be rounded to the other
    /// one of two neighbours, `2^-15` of the largest apart. Any of the tokens may do that, up as
    /// likely as down, so that it comes to that difference times the root of their number.
    fn of_order(truth: &[RowTruth], rows: &LoadedRows, tokens: usize) -> Self {
        let most = |values: Vec<f64>| values.into_iter().fold(0f64, |max, x| max.max(x.abs()));
        let weight = most(truth.iter().map(|row| row.largest_weight).collect());
        let norm = most(truth.iter().flat_map(|row| &row.out).copied().collect());
        let flipped = (tokens as f64).sqrt() * 2f64.powi(-15) * weight * most(floats(&rows.v));
        let single = 2.0 * SINGLE_ERROR_MAX;
        Self { scores: single, lse: single, out: single * norm + flipped }
    }

    /// Where factors are rounded otherwise, each level keeps within its own budget; of single
    /// scores there is none.
    fn of_budgets(budgets: &[(f64, f64); 2]) -> Self {
        let [a, b] = budgets;
        Self { scores: f64::INFINITY, lse: a.1 + b.1, out: a.0 + b.0 }
    }
}

/// Some parts of a sequence, and how many of its tokens lie in full tiles of pages.
struct PlanSlice<'a> {
    parts: &'a [PlanPart],
    in_tiles: usize,
}

impl PlanSlice<'_> {
    /// Where tokens are in no tile, their rows are decoded to f32, or lie in f16.
    fn is_full(&self) -> bool {
        self.tokens() == self.in_tiles
    }

    fn tokens(&self) -> usize {
        self.parts.last().unwrap().end_token() as usize
    }
}

/// Holds `got` against `wanted`; `exact` are bits of scores in tiles, of log-sum-exps and outputs.
fn compare(
    wanted: &LevelAnswer,
    got: &LevelAnswer,
    exact: [bool; 3],
    apart: AllowedGaps,
    part: &PlanSlice<'_>,
    what: &str,
) {
    let what = format!("{what}: {:?} and {:?}, {:?}", got.config, wanted.config, got.way);
    let (tokens, tiles) = (part.tokens(), part.in_tiles);
    let near = |kind: &str, exact: bool, a: &[f32], b: &[f32], most: f64| {
        for (at, (a, b)) in a.iter().zip(b).enumerate() {
            let same = a.to_bits() == b.to_bits();
            let off = f64::from((a - b).abs());
            let in_tile = kind != "score" || at % tokens < tiles;
            let allowed = if exact && in_tile { same } else { same || off <= most };
            assert!(allowed, "{what}: {kind} {at}: {a} and {b}, {off:e} of {most:e}, {exact}");
        }
    };
    near("score", exact[0], &got.scores, &wanted.scores, apart.scores);
    near("log-sum-exp", exact[1], &got.lse, &wanted.lse, apart.lse);
    near("output", exact[2], &got.out, &wanted.out, apart.out);
}

/// Asks every level, with every precision, and compares the answers.
fn compare_levels(backend: &mut CpuBackend, codec: &ModelCodec, name: &str, part: &PlanSlice<'_>) {
    let geometry = codec.geometry();
    let (tokens, parts) = (part.tokens(), part.parts);
    let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts: parts.into() };
    let rows = backend.load(&load).unwrap();
    for group in [3, 8] {
        let position = tokens as u32 - 1;
        let ask = Question { group, n_q: 1, position, window: None, cap: None };
        let plan = plan(geometry, parts, InputKind::Normal, ask);
        let truth = reference(geometry, &plan, &rows, |_| {});
        let half = budget(geometry, &plan, &rows, &truth, to_half, 11);
        let byte = budget(geometry, &plan, &rows, &truth, to_byte, 8);
        let order = AllowedGaps::of_order(&truth, &rows, tokens);
        let mut firsts: Vec<LevelAnswer> = Vec::new();
        let levels = Simd::available_levels();
        for (precision, simd) in Precision::ALL.iter().flat_map(|p| levels.iter().map(|s| (*p, *s)))
        {
            let config = KernelConfig { simd, precision };
            (backend.simd, backend.precision) = (simd, precision);
            let way = FactorRounding::of_kernels(config, codec, name, group);
            let mut scores = vec![0f32; tokens * HEADS * group];
            backend.key_scores(&plan, &mut scores).unwrap();
            let answer = backend.attend(&plan).unwrap();
            let out = floats(&answer.out).iter().map(|x| *x as f32).collect();
            let again = backend.with_job(&plan, attend::rows_again).unwrap();
            let got = LevelAnswer { config, way, scores, lse: answer.lse, out, again };
            let what = format!("{name}, {geometry:?}, {group}, {tokens} tokens");
            if let Some(first) = firsts.iter().find(|first| first.way == way) {
                let exact = exact(name, way, (first.config.simd, simd), part.is_full());
                if first.config.precision == got.config.precision || first.again == got.again {
                    compare(first, &got, exact, order, part, &what);
                } else {
                    let apart = AllowedGaps::of_budgets(&[half, half]);
                    compare(first, &got, [exact[0], false, false], apart, part, &what);
                }
            } else {
                if let Some(first) = firsts.first() {
                    let of =
                        |way| if matches!(way, FactorRounding::Bytes(..)) { byte } else { half };
                    let apart = AllowedGaps::of_budgets(&[first.way, way].map(of));
                    compare(first, &got, [false; 3], apart, part, &what);
                }
                firsts.push(got);
            }
        }
    }
}

/// Results whose bits are to be the same: scores in tiles, log-sum-exps and outputs.
fn exact(name: &str, way: FactorRounding, (a, b): (Simd, Simd), full: bool) -> [bool; 3] {
    // The same kernels: products of bf16 are all that one of them has and the other has not.
    if [a, b].iter().all(|simd| simd.level() == InstructionSet::Avx512) {
        return [true; 3];
    }
    match way {
        FactorRounding::Words | FactorRounding::WordsOfRuns => {
            let answers = SAME_ANSWERS.contains(&name);
            let scores = answers || SAME_SCORES.contains(&name);
            [scores, scores && full, answers && full]
        }
        // Lanes of f32 are as many as a register has. Bytes are one level's own.
        FactorRounding::Float | FactorRounding::Bytes(..) => [false; 3],
    }
}

#[test]
fn levels_that_round_alike_have_the_same_bits_or_differ_by_the_order_of_sums() {
    let presets = kvd_codec::presets().iter().map(|preset| preset.name);
    let names: BTreeSet<&str> = presets.chain(ROUNDED.iter().chain(EXACT).copied()).collect();
    // Under an emulator the larger heads are minutes more of the same kernels.
    let dims: &[u32] = if emulated() { &[64] } else { &[64, 128] };
    for dim in dims {
        for name in &names {
            let codec = codec(&geometry(*dim), name);
            let (mut backend, parts) = filled(codec.clone(), InputKind::Normal);
            // Two blocks of whole tiles; then one with a tile and nine tokens, and seven raw ones.
            for (parts, in_tiles) in [(&parts[..2], 128), (&parts[..], 160)] {
                compare_levels(&mut backend, &codec, name, &PlanSlice { parts, in_tiles });
            }
        }
    }
}
