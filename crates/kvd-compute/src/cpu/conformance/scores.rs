//! Scores of keys alone against f64 and against what attention makes of them.

use super::*;
use crate::cpu::score_probe::RowDecoder;

#[test]
fn scores_of_keys_are_those_that_attention_weighs() {
    let geometry = geometry(64);
    let plain = Question { group: 4, n_q: 1, position: 175, window: None, cap: None };
    let asks =
        [plain, Question { group: 7, position: 120, window: Some(45), cap: Some(3.0), ..plain }];
    for name in ["raw", "kivi-4", "k=vq(d=2,b=4); v=vq(d=2,b=4)", "kvd-2", "innerq-2", "polar-4+4"]
    {
        let (mut backend, parts) = filled(codec(&geometry, name), InputKind::Normal);
        let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts: parts.clone() };
        let keys = floats(&backend.load(&load).unwrap().k);
        let levels = Simd::available_levels();
        let ways = levels.iter().flat_map(|simd| Precision::ALL.map(|p| (*simd, p)));
        for ((simd, precision), ask) in ways.flat_map(|way| asks.map(|ask| (way, ask))) {
            backend.simd = simd;
            backend.set_precision(precision);
            let plan = plan(&geometry, &parts, InputKind::Normal, ask);
            let tokens = plan.queries[0].tokens() as usize;
            let mut scores = vec![f32::NAN; tokens * plan.q_heads as usize];
            backend.key_scores(&plan, &mut scores).unwrap();
            let lse = backend.attend(&plan).unwrap().lse;
            let q = floats(&plan.q);
            let context = format!("{name}, {simd:?}, {precision:?}, {ask:?}");
            let round: fn(&mut [f64]) = match precision {
                Precision::Int8 => to_byte,
                Precision::Fast => to_half,
                Precision::Single => |_| {},
            };
            for (row, (scores, lse)) in scores.chunks_exact(tokens).zip(lse).enumerate() {
                let seen = plan.queries[0].visible(0);
                let seen = seen.start as usize..tokens.min(seen.end as usize);
                let sum: f64 = scores.iter().map(|score| f64::from(*score).exp()).sum();
                assert!((sum.ln() - f64::from(lse)).abs() < 1e-4, "{context}: {} {lse}", sum.ln());
                let keys = keys.chunks_exact(HEADS * 64).map(|keys| &keys[row / ask.group * 64..]);
                let exact = exact_scores(&q[row * 64..][..64], keys.clone(), ask.cap);
                let mut rounded = q[row * 64..][..64].to_vec();
                round(&mut rounded);
                let rounded = exact_scores(&rounded, keys, ask.cap);
                let off = exact.iter().zip(rounded).map(|(a, b)| (a - b).abs());
                let most = 4.0 * off.fold(SINGLE_ERROR_MAX, f64::max);
                for (token, (score, exact)) in scores.iter().zip(exact).enumerate() {
                    let near = (f64::from(*score) - exact).abs() <= most;
                    let hidden = *score == f32::NEG_INFINITY;
                    assert!(
                        if seen.contains(&token) { near } else { hidden },
                        "{context}: {token}"
                    );
                }
            }
        }
    }
}

/// Scores of a query against keys of 64 channels.
fn exact_scores<'a>(
    q: &[f64],
    keys: impl Iterator<Item = &'a [f64]>,
    cap: Option<f32>,
) -> Vec<f64> {
    let score = |keys: &[f64]| {
        let score = q.iter().zip(keys).map(|(a, b)| a * b).sum::<f64>() / 8.0;
        cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    keys.map(score).collect()
}

#[test]
fn rows_that_are_decoded_alone_are_those_of_the_codec() {
    let geometry = geometry(64);
    let names = [
        "kvcomp",
        "kvcomp-channel",
        "kvd-2",
        "kvd-4",
        "kivi-4",
        "k=vq(d=2,b=4)/huffman; v=gain/vq(d=2,b=4)/huffman",
        "k=hadamard/lloyd(b=4)/huffman; v=vq(d=2,b=4)",
        "k=uniform(b=7,axis=channel)/huffman; v=uniform(b=8,axis=token)/huffman",
    ];
    for name in names {
        let (mut backend, parts) = filled(codec(&geometry, name), InputKind::Quiet);
        let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts: parts.clone() };
        let LoadedRows { k, v } = backend.load(&load).unwrap();
        let ask = Question { group: 1, n_q: 1, position: 9, window: None, cap: None };
        let plan = plan(&geometry, &parts, InputKind::Quiet, ask);
        for simd in Simd::available_levels() {
            backend.simd = simd;
            let compare = |job: &attend_job::AttendJob<'_>| {
                for (side, all) in [(Side::Key, floats(&k)), (Side::Value, floats(&v))] {
                    let mut decoder = RowDecoder::new(job, 1);
                    for token in [0, 63, 64, 101, 127, 128, 168, 170] {
                        let row = decoder.decoded_row(side, &parts, token)?;
                        let wanted = &all[(token as usize * HEADS + 1) * 64..][..64];
                        let largest = wanted.iter().fold(0f64, |most, x| most.max(x.abs()));
                        for (a, b) in row.iter().zip(wanted) {
                            let gap = (f64::from(*a) - b).abs();
                            assert!(gap <= 1e-6 * largest, "{name} {simd:?} {side:?} {token}");
                        }
                    }
                }
                Ok(())
            };
            backend.with_job(&plan, compare).unwrap();
        }
    }
}
