//! Inputs that are bad for integers: under `fast` no error of an output or a log-sum-exp is more
//! than four times that of a plain reference with f16 queries and weights and f32 sums, over the
//! same rows, row by row (`docs/adr/0019-rows-that-integers-do-not-serve.md`,
//! `docs/adr/0046-errors-of-f16-are-means.md`).

use super::hostile_inputs::{HostileInput, KINDS, TOKENS, to_half_all};
use super::*;
use proptest::prelude::*;
use std::fmt::Write as _;

/// Errors over the reference's.
pub(super) const SLACK: f64 = 4.0;
/// Factors of queries and weights whose errors of f16 make a mean: powers of the root of that order
/// of 2, after which the same significant bits come again.
const FACTORS: i32 = 8;

/// Rounds values times `factor` to eleven bits.
fn to_half_times(values: &mut [f32], factor: f32) {
    values.iter_mut().for_each(|value| *value *= factor);
    to_half_all(values);
    values.iter_mut().for_each(|value| *value /= factor);
}

/// Answers of a plain implementation in f32: scores, then weights, then sums, one after the other;
/// with queries and weights that have eleven bits times `half`, where there is one.
fn plain(
    geometry: &Geometry,
    plan: &AttendPlan,
    rows: &LoadedRows,
    half: Option<f32>,
) -> Vec<(Vec<f64>, f64)> {
    let [dim, dim_v] = Side::BOTH.map(|side| geometry.head_dim(side));
    let narrow = |bytes: &[u8]| -> Vec<f32> { floats(bytes).iter().map(|x| *x as f32).collect() };
    let (mut q, k, v) = (narrow(&plan.q), narrow(&rows.k), narrow(&rows.v));
    if let Some(factor) = half {
        to_half_times(&mut q, factor);
    }
    let (tokens, heads) = (k.len() / (HEADS * dim), plan.q_heads as usize);
    let scale = 1.0 / (dim as f32).sqrt();
    let one = |(row, q): (usize, &[f32])| {
        let head = row % heads / (heads / HEADS);
        let visible = plan.queries[0].visible((row / heads) as u32);
        let visible = visible.start as usize..tokens.min(visible.end as usize);
        let scores: Vec<f32> = visible
            .clone()
            .map(|t| {
                let key = &k[(t * HEADS + head) * dim..][..dim];
                scale * q.iter().zip(key).fold(0f32, |sum, (a, b)| sum + a * b)
            })
            .collect();
        let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut weights: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
        let sum: f32 = weights.iter().sum();
        if let Some(factor) = half {
            to_half_times(&mut weights, factor);
        }
        let mut out = vec![0f32; dim_v];
        for (t, weight) in visible.zip(&weights) {
            let value = &v[(t * HEADS + head) * dim_v..][..dim_v];
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * v);
        }
        let out = out.iter().map(|out| f64::from(*out / sum)).collect();
        (out, f64::from(most + sum.ln()))
    };
    q.chunks_exact(dim).enumerate().map(one).collect()
}

/// Errors of a row: of its output and of its log-sum-exp.
#[derive(Clone, Copy, Debug, Default)]
struct RowErrors {
    out: f64,
    lse: f64,
}

impl RowErrors {
    /// An answer's.
    fn new(truth: &RowTruth, out: impl Iterator<Item = f64>, lse: f64) -> Self {
        let errors = truth.out.iter().zip(out).map(|(a, b)| (a - b).abs());
        let errors = errors.map(|error| if error.is_nan() { f64::INFINITY } else { error });
        Self { out: errors.fold(0.0, f64::max), lse: (truth.lse - lse).abs() }
    }

    /// Their root mean squares.
    fn mean_of(errors: impl Iterator<Item = Self>) -> Self {
        let (mut out, mut lse, mut count) = (0.0, 0.0, 0.0);
        for error in errors {
            out += error.out.powi(2);
            lse += error.lse.powi(2);
            count += 1.0;
        }
        Self { out: f64::sqrt(out / count), lse: f64::sqrt(lse / count) }
    }

    /// The larger of both; NaN is larger than all.
    fn larger_of(self, other: Self) -> Self {
        let larger = |a: f64, b: f64| if b <= a { a } else { b };
        Self { out: larger(self.out, other.out), lse: larger(self.lse, other.lse) }
    }
}

/// One error of the reference, by row.
fn units(
    geometry: &Geometry,
    plan: &AttendPlan,
    rows: &LoadedRows,
    truth: &[RowTruth],
) -> Vec<RowErrors> {
    let single = plain(geometry, plan, rows, None);
    let factors = (0..FACTORS).map(|power| 2f32.powf(power as f32 / FACTORS as f32));
    let halves: Vec<_> = factors.map(|factor| plain(geometry, plan, rows, Some(factor))).collect();
    let (epsilon, rounding) = (f64::from(f32::EPSILON), 2f64.powi(-11));
    let one = |(row, truth): (usize, &RowTruth)| {
        let floor = RowErrors {
            out: (epsilon * truth.largest_seen).max(rounding * truth.largest_value),
            lse: (epsilon * truth.lse.abs().max(1.0)).max(rounding * truth.largest_term),
        };
        let errors_of = |answers: &Vec<(Vec<f64>, f64)>| {
            let (out, lse) = &answers[row];
            RowErrors::new(truth, out.iter().copied(), *lse)
        };
        let half = RowErrors::mean_of(halves.iter().map(errors_of));
        floor.larger_of(errors_of(&single)).larger_of(half)
    };
    truth.iter().enumerate().map(one).collect()
}

/// Errors over the reference's by instruction set, of the row where they are largest.
pub(super) fn errors(
    name: &str,
    dim: u32,
    kind: HostileInput,
    ask: Question,
) -> Vec<(Simd, f64, f64)> {
    errors_over(&[64, 64, 41], name, dim, kind, ask)
}

/// As [`errors`], over blocks of so many tokens.
pub(super) fn errors_over(
    blocks: &[u32],
    name: &str,
    dim: u32,
    kind: HostileInput,
    ask: Question,
) -> Vec<(Simd, f64, f64)> {
    let geometry = Geometry { dtype: kind.dtype(), ..geometry(dim) };
    errors_of_codec(codec(&geometry, name), blocks, kind, ask)
}

/// As [`errors_over`], with a codec that may be fitted on other rows.
pub(super) fn errors_of_codec(
    codec: ModelCodec,
    blocks: &[u32],
    kind: HostileInput,
    ask: Question,
) -> Vec<(Simd, f64, f64)> {
    let geometry = codec.geometry().clone();
    let [dim_k, dim_v] = Side::BOTH.map(|side| geometry.head_dim(side));
    let (mut backend, parts) =
        filled_with(codec, blocks, |block, tokens| kind.rows((dim_k, dim_v), block, tokens));
    let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts: parts.clone() };
    let rows = backend.load(&load).unwrap();
    let mut plan = plan(&geometry, &parts, InputKind::Normal, ask);
    let count = ask.n_q as usize * HEADS * ask.group;
    plan.q = payload(DType::F32, &kind.queries(dim_k, count));
    let truth = reference(&geometry, &plan, &rows, |_| {});
    let units = units(&geometry, &plan, &rows, &truth);
    let mut errors = Vec::new();
    for simd in Simd::available_levels() {
        (backend.simd, backend.precision) = (simd, Precision::Fast);
        let answer = backend.attend(&plan).unwrap();
        let got = floats(&answer.out);
        let got = got.chunks_exact(dim_v).zip(&answer.lse).zip(truth.iter().zip(&units));
        let worst = got.fold(RowErrors::default(), |worst, ((out, lse), (truth, unit))| {
            let RowErrors { out, lse } =
                RowErrors::new(truth, out.iter().copied(), f64::from(*lse));
            worst.larger_of(RowErrors { out: out / unit.out, lse: lse / unit.lse })
        });
        errors.push((simd, worst.out, worst.lse));
    }
    errors
}

/// Values by token behind a rotation, which adds up what all channels have in common.
const ROTATED: [&str; 2] =
    ["k=raw; v=hadamard/uniform(b=2,g=32,axis=token)", "k=raw; v=hadamard/uniform(b=4,axis=token)"];

/// All codecs that have a name, those of the other tests, and [`ROTATED`].
fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = kvd_codec::presets().iter().map(|preset| preset.name).collect();
    names.extend(ROUNDED.iter().chain(EXACT).filter(|name| name.contains('=')));
    names.extend(ROTATED);
    names
}

pub(super) const ASK: Question =
    Question { group: 3, n_q: 2, position: 174, window: None, cap: None };

fn assert_served(name: &str, dim: u32, kind: HostileInput, ask: Question) {
    for (simd, out, lse) in errors(name, dim, kind, ask) {
        let what = format!("{name}, {dim}, {kind:?}, {simd:?}, {ask:?}");
        assert!(out <= SLACK, "{what}: out errs {out:.2} times the reference's");
        assert!(lse <= SLACK, "{what}: lse errs {lse:.2} times the reference's");
    }
}

/// Errors over the reference's, by kind of data and by instruction set.
type ErrorsByKind = Vec<Vec<(Simd, f64)>>;

/// The rows of `bench/results/fast-bound.json`, as a Markdown table.
fn page(found: &[(&str, ErrorsByKind)]) -> String {
    let sets: Vec<_> = CpuBackend::instruction_sets();
    let mut page = String::from("| codec |");
    for heading in
        KINDS.iter().map(|kind| format!("{kind:?}")).chain(sets.iter().map(|s| s.name().to_owned()))
    {
        let _ = write!(page, " {heading} |");
    }
    let columns = 1 + KINDS.len() + sets.len();
    let _ = write!(page, "\n|{}\n", "---|".repeat(columns));
    let most = |errors: &mut dyn Iterator<Item = f64>| errors.fold(0f64, f64::max);
    for (name, kinds) in found {
        let _ = write!(page, "| `{name}` |");
        for errors in kinds {
            let _ = write!(page, " {:.2} |", most(&mut errors.iter().map(|(_, error)| *error)));
        }
        for set in &sets {
            let of = kinds.iter().flatten().filter(|(simd, _)| simd.level() == *set);
            let _ = write!(page, " {:.2} |", most(&mut of.map(|(_, error)| *error)));
        }
        page.push('\n');
    }
    page
}

#[test]
fn hostile_inputs_err_no_more_than_four_times_f16() {
    let mut found = Vec::new();
    let mut failed = Vec::new();
    for name in names() {
        let of_kind = |kind: &HostileInput| {
            let errors = errors(name, 64, *kind, ASK).into_iter();
            let errors = errors.map(|(simd, out, lse)| {
                let error = if (out + lse).is_nan() { f64::INFINITY } else { out.max(lse) };
                if error > SLACK {
                    failed.push(format!("{name}, {kind:?}, {simd:?}: {out:.2} {lse:.2}"));
                }
                (simd, error)
            });
            errors.collect()
        };
        found.push((name, KINDS.iter().map(of_kind).collect()));
    }
    println!("{}", page(&found));
    assert!(failed.is_empty(), "{} over the bound:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn hostile_inputs_are_served_at_every_head_size_and_with_a_window() {
    let asks = [
        Question { group: 1, n_q: 5, position: 100, ..ASK },
        Question { group: 8, n_q: 1, position: 175, window: Some(50), ..ASK },
    ];
    for (dim, name) in [(96, "kvcomp"), (128, "kivi-4"), (256, "turbo-4"), (128, "vecinfer-2")] {
        for ask in asks {
            assert_served(name, dim, HostileInput::QueryChannel(448.0, 0.01), ask);
            assert_served(name, dim, HostileInput::KeyBias(1000.0), ask);
            assert_served(name, dim, HostileInput::EmptySink, ask);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn magnitudes_over_twelve_decades_are_served(seed in 1u64..1 << 40, index in 0usize..1 << 16) {
        let names = names();
        assert_served(names[index % names.len()], 64, HostileInput::Decades(seed), ASK);
    }
}

#[test]
fn ordinary_rows_are_not_answered_twice() {
    for name in names() {
        let codec = codec(&geometry(64), name);
        for (data, position) in [(InputKind::Normal, 174), (InputKind::Normal, 100)] {
            let (backend, parts) = filled(codec.clone(), data);
            let ask = Question { position, ..ASK };
            let plan = plan(&geometry(64), &parts, data, ask);
            let rows = backend.with_job(&plan, attend::rows_again).unwrap();
            assert_eq!(rows, 0, "{name}, {data:?}, {position}");
        }
    }
    for name in ["kivi-4", "vecinfer-2", "kvcomp", "kvd-4", "kvd-2", "turbo-4", "kvd-2-fast"] {
        let (backend, parts) = filled(codec(&geometry(64), name), InputKind::Flat);
        let plan = plan(&geometry(64), &parts, InputKind::Flat, Question { position: 8192, ..ASK });
        let rows = backend.with_job(&plan, attend::rows_again).unwrap();
        assert_eq!(rows, 0, "{name}, flat");
    }
}

/// Scores that differ more than keys do, over blocks that repeat as those of `kvd bench attend`.
fn rows_again_over(name: &str, blocks: usize, distinct: u64) -> usize {
    let geometry = geometry(128);
    let (backend, parts) =
        filled_with(codec(&geometry, name), &vec![64; blocks], |block, tokens| {
            let count = tokens as usize * HEADS * 128;
            [2, 3].map(|side| values(count, 1000 * side + block % distinct))
        });
    let position = 64 * blocks as u32 - 1;
    let ask = Question { group: 4, n_q: 1, position, window: None, cap: None };
    let mut plan = plan(&geometry, &parts, InputKind::Normal, ask);
    let mut q: Vec<f32> = floats(&plan.q).iter().map(|q| 1.3 * *q as f32).collect();
    to_half_all(&mut q);
    plan.q = payload(DType::F32, &q);
    backend.with_job(&plan, attend::rows_again).unwrap()
}

#[test]
fn ordinary_contexts_of_every_length_are_not_answered_twice() {
    let names = ["kivi-4", "kivi-2", "vecinfer-2", "vecinfer-2-reg", "kvcomp", "kvd-4", "kvd-2"];
    let others = ["kvd-3", "kvd-1.5", "kvd-1", "kvd-2-fast", "turbo-4", "turbo-3", "polar-4+4"];
    for name in names.into_iter().chain(others) {
        for (blocks, distinct) in [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (64, 64), (128, 4)] {
            let rows = rows_again_over(name, blocks, distinct);
            assert_eq!(rows, 0, "{name}, {blocks} blocks, {distinct} of them differ");
        }
    }
}

#[test]
fn int8_errs_by_a_quarter_at_most_where_rotated_values_share_a_part() {
    let kind = HostileInput::CommonPart(0.05);
    let geometry = Geometry { dtype: kind.dtype(), ..geometry(64) };
    for name in ROTATED {
        let codec = codec(&geometry, name);
        let (mut backend, parts) =
            filled_with(codec, &[64, 64, 41], |block, tokens| kind.rows((64, 64), block, tokens));
        let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts: parts.clone() };
        let rows = backend.load(&load).unwrap();
        let mut plan = plan(&geometry, &parts, InputKind::Normal, ASK);
        plan.q = payload(DType::F32, &kind.queries(64, 2 * HEADS * 3));
        let truth = reference(&geometry, &plan, &rows, |_| {});
        for simd in Simd::available_levels() {
            (backend.simd, backend.precision) = (simd, Precision::Int8);
            let outputs = floats(&backend.attend(&plan).unwrap().out);
            let errors = outputs
                .chunks_exact(64)
                .zip(&truth)
                .flat_map(|(out, truth)| out.iter().zip(&truth.out).map(|(a, b)| (a - b).abs()));
            let most = errors.fold(0f64, f64::max);
            // Values are about one. AVX2 has codes of four bits with weights of seven.
            assert!(most < 0.25, "{name}, {simd:?}: {most:.2e}");
        }
    }
}

#[test]
fn answers_saturate_and_are_never_infinite() {
    for (dtype, size) in [(DType::F16, 65504f32), (DType::BF16, 3.38e38)] {
        let geometry = Geometry { dtype, ..geometry(64) };
        for name in ["raw", "fp8", "kivi-4", "kvcomp", "turbo-4", "vecinfer-2", "kvd-2"] {
            let (mut backend, parts) =
                filled_with(codec(&geometry, name), &[64, 64, 41], |block, tokens| {
                    let count = tokens as usize * HEADS * 64;
                    let mut rows = values(count, 2 * block + 1);
                    rows.iter_mut().for_each(|v| *v = size.copysign(*v));
                    rows.chunks_exact_mut(64).for_each(|row| row[..8].fill(size));
                    [values(count, 2 * block), rows]
                });
            let mut plan = plan(&geometry, &parts, InputKind::Normal, ASK);
            let q = floats(&plan.q).iter().map(|q| *q as f32).collect::<Vec<_>>();
            (plan.dtype, plan.q) = (dtype, payload(dtype, &q));
            for simd in Simd::available_levels() {
                for precision in Precision::ALL {
                    (backend.simd, backend.precision) = (simd, precision);
                    let answer = backend.attend(&plan).unwrap();
                    let mut out = vec![0f32; answer.out.len() / 2];
                    dtype.widen_values(&answer.out, &mut out);
                    let what = format!("{name}, {dtype}, {simd:?}, {precision:?}");
                    assert!(out.iter().all(|out| out.is_finite()), "{what}");
                    assert!(answer.lse.iter().all(|lse| lse.is_finite()), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_query_times_the_scale_beyond_f32_is_refused_by_its_number() {
    for name in ["raw", "kivi-4", "vecinfer-2"] {
        let (mut backend, parts) = filled(codec(&geometry(64), name), InputKind::Normal);
        for cap in [None, Some(5.0)] {
            let mut plan = plan(&geometry(64), &parts, InputKind::Normal, Question { cap, ..ASK });
            // Two queries of a batch; the second one is short in all but one channel.
            let mut second = vec![1e-30f32; 2 * HEADS * 3 * 64];
            second[3 * 64 + 7] = 2.0;
            let mut q = vec![0.0; second.len()];
            q.extend(second);
            plan.queries.push(plan.queries[0].clone());
            (plan.scale, plan.q) = (Some(3e38), payload(DType::F32, &q));
            let error = backend.attend(&plan).unwrap_err();
            assert!(
                matches!(error, BackendError::QueryOverflow { query: 1, token: 0, head: 3, .. }),
                "{name}: {error}"
            );
            assert!(error.to_string().contains("q of query 1"), "{error}");
        }
    }
}

/// Blocks where the keys of three tokens, in a page, in a short one and in the raw tail, have
/// products with a query of tens whose sums leave f32.
fn with_keys_beyond_f32(codec: ModelCodec, first: [f32; 4]) -> (CpuBackend, Vec<PlanPart>) {
    filled_with(codec, &[64, 64, 41], |block, tokens| {
        let count = tokens as usize * HEADS * 64;
        let mut keys = values(count, 2 * block);
        for (index, key) in keys.chunks_exact_mut(64).enumerate() {
            // The tail, of which the first row is token 169, counts as block 3.
            if [20, 131, 194].contains(&(block as usize * 64 + index / HEADS)) {
                key[..4].copy_from_slice(&first);
            }
        }
        [keys, values(count, 2 * block + 1)]
    })
}

#[test]
fn scores_whose_sums_leave_f32_get_their_weight() {
    let geometry = Geometry { dtype: DType::F32, ..geometry(64) };
    // Of which f32 makes NaN, infinity of the wrong sign, and of the right ones.
    let keys = [
        [3e38f32, -1e38, 0.0, 0.0],
        [-3e38, 1e38, 0.0, 0.0],
        [-1e38, -1e38, 3e38, 3e38],
        [-3e38, -3e38, 0.0, 0.0],
        [3e38, 3e38, 0.0, 0.0],
    ];
    let names = ["raw", "k=f32; v=hadamard/f32", "k=bf16; v=vq(d=2,b=4)", "kivi-4"];
    for ((name, first), cap) in names
        .into_iter()
        .flat_map(|name| keys.map(|first| (name, first)))
        .flat_map(|case| [(case, None), (case, Some(5.0))])
    {
        let (mut backend, parts) = with_keys_beyond_f32(codec(&geometry, name), first);
        let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts: parts.clone() };
        let rows = backend.load(&load).unwrap();
        let mut plan = plan(&geometry, &parts, InputKind::Normal, Question { n_q: 1, cap, ..ASK });
        let mut q: Vec<f32> = floats(&plan.q).iter().map(|q| *q as f32).collect();
        q.chunks_exact_mut(64).for_each(|row| row[..4].fill(10.0));
        plan.q = payload(DType::F32, &q);
        let truth = reference(&geometry, &plan, &rows, |_| {});
        for simd in Simd::available_levels() {
            for precision in [Precision::Fast, Precision::Single] {
                (backend.simd, backend.precision) = (simd, precision);
                let what = format!("{name}, {first:?}, {simd:?}, {precision:?}, {cap:?}");
                let answer = backend.attend(&plan).unwrap();
                for (row, got) in truth.iter().zip(floats(&answer.out).chunks_exact(64)) {
                    let off = row.out.iter().zip(got).map(|(a, b)| (a - b).abs());
                    assert!(off.fold(0.0, f64::max) < 2e-3, "{what}: {got:?} {:?}", row.out);
                }
                for (row, lse) in truth.iter().zip(&answer.lse) {
                    let exact = row.lse.clamp(f64::from(f32::MIN), f64::from(f32::MAX));
                    let off = (exact - f64::from(*lse)).abs();
                    assert!(off <= 1e-3 * exact.abs().max(1.0), "{what}: {lse} {exact}");
                }
                let mut scores = vec![0f32; TOKENS * plan.q_heads as usize];
                backend.key_scores(&plan, &mut scores).unwrap();
                let sign = f64::from(first.iter().sum::<f32>());
                for token in [20, 131, 171].iter().filter(|_| name != "kivi-4") {
                    let score = f64::from(scores[*token]);
                    assert!(score * sign > 0.0 && score.is_finite(), "{what}: {score}");
                }
            }
        }
    }
}
