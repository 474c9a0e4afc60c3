//! The kernels answer as f64 attention over the decoded pages does: codecs that no preset has, odd
//! shapes, ranges, fallbacks, and orders of threads. Presets are in `presets.rs`.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::compare::{agree, layout, value};
use common::reference::{check, expected, floats};
use common::run::{run, run_with};
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_core::{DType, Geometry, RopePairing, Side};
use kvd_emu::{ThreadOrder, is_available};

fn stored(geometry: &Geometry, codec: &str, layout: &Layout) -> Stored {
    Stored::new(geometry, codec, layout, value)
}

#[test]
fn uniform_answers_as_the_reference_for_every_width_and_axis() {
    if !is_available() {
        return;
    }
    // Head sizes that are no powers of two, groups that do not divide, keys unlike values.
    let geometry = geometry(80, 36, DType::F16);
    for bits in 1..=8 {
        for (key, value) in [
            ("axis=channel,g=7", "axis=token,g=10"),
            ("axis=token", "axis=channel,g=48"),
            ("axis=block", "axis=channel"),
        ] {
            let codec = format!("k=uniform(b={bits},{key}); v=uniform(b={},{value})", 9 - bits);
            let stored = stored(&geometry, &codec, &layout(&[64, 45], 3));
            agree(&stored, &Ask::last(3, stored.tokens), &codec);
        }
    }
}

#[test]
fn codes_of_large_heads_are_summed_by_all_warps() {
    if !is_available() {
        return;
    }
    for (bits, group) in [(1, 64), (2, 32), (3, 64), (4, 192), (8, 64)] {
        let codec = format!(
            "k=uniform(b={bits},g=32,axis=channel); v=uniform(b={},g={group},axis=token)",
            9 - bits
        );
        for (dim_k, dim_v) in [(256, 192), (192, 256)] {
            let stored = stored(&geometry(dim_k, dim_v, DType::F16), &codec, &layout(&[64], 0));
            agree(&stored, &Ask::last(8, stored.tokens), &codec);
        }
    }
}

#[test]
fn sums_of_integers_do_not_overflow_in_long_units() {
    if !is_available() {
        return;
    }
    // More tiles than 31 bits hold, of codes that are nearly all as large as can be.
    let high = |_: Side, head: usize, token: usize, channel: usize| {
        if (token + channel).is_multiple_of(16) {
            0.0
        } else {
            255.0 - (head + token % 3) as f32 / 4.0
        }
    };
    let geometry = geometry(16, 16, DType::F16);
    let layout = Layout { pages: vec![96; 352], window: 0 };
    for codec in ["uniform(b=8,axis=token)", "uniform(b=8,axis=token)/huffman"] {
        let stored = Stored::new(&geometry, &format!("k={codec}; v={codec}"), &layout, high);
        let plan = Ask::last(1, stored.tokens).plan(&stored, |_| 0.0);
        let answer = run(&stored, &plan, 100, ThreadOrder::Ascending).unwrap();
        check(&answer, &expected(&stored, &plan), codec);
    }
}

#[test]
fn relative_steps_and_mixed_sides_answer_as_the_reference() {
    if !is_available() {
        return;
    }
    for codec in [
        "k=hadamard/uniform(rel=0.05,axis=channel); v=uniform(rel=0.15,axis=token)",
        "k=mean/fp8; v=hadamard/uniform(b=3,axis=token,g=16)",
    ] {
        let stored = stored(&geometry(32, 64, DType::F16), codec, &layout(&[64, 45], 3));
        agree(&stored, &Ask::last(2, stored.tokens), codec);
    }
}

#[test]
fn raised_rows_weigh_as_much_less_in_every_tile() {
    if !is_available() {
        return;
    }
    // Short tokens by sixteens and alone: tiles without a raised row stand beside others.
    let short = |side: Side, head: usize, token: usize, channel: usize| {
        let lengths = [(token / 16 % 3 == 1, 0.01), (token % 5 == 2, 0.3), (true, 1.0)];
        let length = lengths.into_iter().find(|(is, _)| *is).unwrap().1;
        value(side, head, token, channel) * if side == Side::Value { length } else { 1.0 }
    };
    for codec in [
        "k=uniform(b=4,axis=token); v=mean+gain/uniform(b=4,axis=channel)",
        "k=fp8; v=gain+hadamard/fp8",
        "k=f16; v=gain/f16",
        "k=hadamard/lloyd(b=3); v=mean+gain+pca/bitalloc(b=3)",
    ] {
        let geometry = geometry(64, 48, DType::F16);
        let stored = Stored::new(&geometry, codec, &layout(&[64, 45, 96, 31, 1], 3), short);
        let raised = stored.headers.values().filter(|header| header.gain_bytes() > 0).count();
        assert!(raised >= 6, "{codec}: {raised} pages with gains");
        agree(&stored, &Ask::last(3, stored.tokens), codec);
    }
}

#[test]
fn vq_answers_as_the_reference_for_every_entry_length() {
    if !is_available() {
        return;
    }
    for (d, b) in [(2, 4), (2, 3), (2, 6), (4, 8), (8, 8), (8, 10), (16, 5), (3, 5)] {
        let dim = if d < 5 { 24 * d } else { 96 };
        let codec = format!("k=vq(d={d},b={b}); v=vq(d={d},b={b})");
        let stored = stored(&geometry(dim, dim, DType::F16), &codec, &layout(&[64, 37], 2));
        agree(&stored, &Ask::last(4, stored.tokens), &codec);
    }
}

#[test]
fn floats_of_every_format_and_large_heads_answer_as_the_reference() {
    if !is_available() {
        return;
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for dim in [256, 34] {
            let stored = stored(&geometry(dim, dim, dtype), "raw", &layout(&[40], 9));
            agree(&stored, &Ask::last(1, stored.tokens), &format!("raw {dtype:?}, {dim}"));
        }
    }
}

#[test]
fn several_query_tokens_see_what_the_causal_rule_lets_them() {
    if !is_available() {
        return;
    }
    let [kivi, innerq] = [("kivi-4", 64), ("innerq-2", 128)]
        .map(|(codec, dim)| stored(&geometry(dim, dim, DType::F16), codec, &layout(&[64, 64], 20)));
    // Two queries: one whose tokens end at the last stored, one in the middle; 15 rows each, so
    // that a unit of eight rows holds several tokens and the last is not full.
    for window in [None, Some(1), Some(40), Some(1000)] {
        for soft_cap in [None, Some(3.0)] {
            let queries = vec![(5, 143), (5, 62), (1, 0)];
            let ask = Ask { group: 3, queries, window, soft_cap };
            agree(&kivi, &ask, "causal, kivi-4");
            agree(&innerq, &ask, "causal, innerq-2");
        }
    }
}

#[test]
fn parts_may_begin_inside_a_page_and_leave_gaps() {
    if !is_available() {
        return;
    }
    for (codec, dim, group) in
        [("kivi-2", 64, 4), ("innerq-2", 128, 1), ("innerq-2", 128, 4), ("innerq-2", 128, 8)]
    {
        let mut stored = stored(&geometry(dim, dim, DType::F16), codec, &layout(&[96, 64, 64], 9));
        for (index, first, rows) in [(0, 40, 50), (1, 0, 1), (2, 33, 31), (3, 2, 7)] {
            let part = &mut stored.parts[index];
            part.first_token += first;
            part.rows = rows;
            match &mut part.source {
                kvd_compute::Source::Raw { first_row, .. }
                | kvd_compute::Source::Pages { first_row, .. } => *first_row += first,
            }
        }
        agree(&stored, &Ask::last(group, stored.tokens), &format!("{codec}, {group}, gaps"));
    }
}

#[test]
fn a_query_that_sees_nothing_has_no_weight() {
    if !is_available() {
        return;
    }
    let mut stored = stored(&geometry(64, 64, DType::F16), "fp8", &layout(&[32, 32], 0));
    stored.parts.remove(0);
    let plan = Ask { group: 2, queries: vec![(1, 5)], window: None, soft_cap: None }
        .plan(&stored, |_| 1.0);
    let answer = run(&stored, &plan, 1, ThreadOrder::Ascending).unwrap();
    assert_eq!(answer.lse, [f32::NEG_INFINITY; 4]);
    assert!(answer.out.iter().all(|byte| *byte == 0));
}

#[test]
fn a_large_score_is_not_much_above_what_weights_are_relative_to() {
    if !is_available() {
        return;
    }
    // Exact scores of 2^20 on the first page and 3/4 more on the second. Uniform values find new
    // units for a weight of 2, so these pass with a rounded comparison too; no such side is here.
    let value = |side: Side, _: usize, token: usize, channel: usize| match (side, channel) {
        (Side::Key, 0) => 1.0,
        (Side::Key, 1) => f32::from(token >= 64),
        (Side::Key, _) => 0.0,
        (Side::Value, _) => ((token * 7 + channel) % 16) as f32,
    };
    for values in ["uniform(b=4,axis=channel)", "uniform(b=4,axis=token)"] {
        let codec = format!("k=uniform(b=1,axis=channel,g=32); v={values}");
        let stored =
            Stored::new(&geometry(64, 64, DType::F16), &codec, &layout(&[64, 64], 0), value);
        let q = |i: usize| [8.0 * 1_048_576.0, 8.0 * 0.75].get(i % 64).copied().unwrap_or(0.0);
        let plan = Ask::last(4, stored.tokens).plan(&stored, q);
        let answer = run(&stored, &plan, 100, ThreadOrder::Ascending).unwrap();
        for (index, is) in floats(&answer.out).into_iter().enumerate() {
            let of = |tokens: std::ops::Range<usize>| {
                tokens.map(|token| value(Side::Value, 0, token, index % 64)).sum::<f32>() / 64.0
            };
            let above = 0.75_f32.exp();
            let wanted = (of(0..64) + above * of(64..128)) / (1.0 + above);
            assert!((is - wanted).abs() < 1e-4, "{codec}, {index}: {is} is not {wanted}");
        }
    }
}

#[test]
fn fp8_pages_with_the_largest_scale_are_read() {
    if !is_available() {
        return;
    }
    // A value that nothing sees, or that meets zeros, makes the scale of the first page 2^120.
    let huge = |side: Side, head: usize, token: usize, channel: usize| match (token, channel) {
        (7, 3) => 3.0e38,
        (0..64, _) => 0.0,
        _ => value(side, head, token, channel),
    };
    let stored = Stored::new(&geometry(64, 64, DType::F32), "fp8", &layout(&[64, 64], 0), huge);
    let queries = vec![(1, stored.tokens - 1)];
    let ask = Ask { group: 4, queries, window: Some(100), soft_cap: None };
    let plan = ask.plan(&stored, |i| if i % 64 == 3 { 0.0 } else { noise(i) });
    for order in ThreadOrder::EACH {
        let answer = run(&stored, &plan, 100, order).unwrap();
        check(&answer, &expected(&stored, &plan), "fp8 of 2^120");
    }
}

#[test]
fn a_page_that_fell_back_is_read_as_raw_rows() {
    if !is_available() {
        return;
    }
    // No f16 step reaches as far as the second page.
    let value = |side: Side, head, token, channel| {
        let far = side == Side::Key && (64..128).contains(&token);
        value(side, head, token, channel) * if far { 1.0e-9 } else { 1.0 }
    };
    let geometry = geometry(64, 64, DType::F32);
    let codec = "k=uniform(b=4,axis=channel); v=f32";
    let codec_all = "k=uniform(b=4,axis=channel); v=uniform(b=4,axis=channel)";
    let both = |side: Side, head, token, channel| {
        let _ = side;
        value(Side::Key, head, token, channel)
    };
    let stored = Stored::new(&geometry, codec_all, &layout(&[64, 64, 64], 0), both);
    let fallbacks = stored.headers.values().filter(|header| header.fallback).count();
    assert_eq!(fallbacks, 4, "the second block, both sides, both heads");
    agree(&stored, &Ask::last(4, stored.tokens), "fallback");
    // Keys of the second page fell back, values are always raw.
    let mixed = Stored::new(&geometry, codec, &layout(&[64, 64, 64], 5), value);
    assert_eq!(mixed.headers.values().filter(|header| header.fallback).count(), 2);
    agree(&mixed, &Ask::last(4, mixed.tokens), "fallback beside raw values");
}

#[test]
fn a_page_over_its_bound_is_read_as_what_it_was_kept_with() {
    if !is_available() {
        return;
    }
    let codec = "k=uniform(b=1,axis=block); v=uniform(b=2,axis=token); k.bound=0.001; v.bound=0.3";
    let stored = stored(&geometry(64, 64, DType::F16), codec, &layout(&[64, 33], 5));
    let kept: Vec<u8> = stored.headers.values().map(|header| header.quantizer).collect();
    assert!(stored.headers.values().any(|header| header.fallback), "{kept:?}");
    agree(&stored, &Ask::last(4, stored.tokens), "safer side");
}

#[test]
fn symmetric_and_hybrid_levels_answer_as_the_reference_for_every_axis() {
    if !is_available() {
        return;
    }
    let geometry = geometry(80, 36, DType::F16);
    for (key, value) in [
        ("b=2,axis=channel,g=7,mode=sym", "b=3,axis=token,g=10,mode=sym"),
        ("b=8,axis=token,mode=sym", "rel=0.2,axis=block,mode=sym"),
        ("b=2,axis=token,g=32,mode=hybrid", "b=2,axis=channel,g=32,mode=hybrid"),
        ("b=5,axis=block,mode=hybrid", "b=3,axis=token,g=7,mode=hybrid"),
        ("b=1,axis=channel,mode=hybrid", "rel=0.05,axis=channel,g=40,mode=hybrid"),
    ] {
        let codec = format!("k=uniform({key}); v=uniform({value})");
        for pages in [&[64, 45][..], &[3], &[96, 96]] {
            let stored = stored(&geometry, &codec, &layout(pages, 3));
            agree(&stored, &Ask::last(3, stored.tokens), &codec);
        }
    }
}

#[test]
fn groups_that_choose_their_mode_answer_as_the_reference_for_every_width() {
    if !is_available() {
        return;
    }
    // Groups of a step or of several, of a tile or of a page; tiles that are no whole words.
    for bits in 1..=8 {
        let [key, value] = [["g=32", "g=32"], ["g=64", "g=64"], ["g=96", "g=32"]][bits % 3];
        let codec = format!(
            "k=uniform(b={bits},axis=token,{key},mode=hybrid); \
             v=uniform(b={},axis=channel,{value},mode=hybrid)",
            9 - bits
        );
        for (dim_k, dim_v) in [(192, 44), (96, 160)] {
            for pages in [&[64, 45][..], &[3]] {
                let stored = stored(&geometry(dim_k, dim_v, DType::F16), &codec, &layout(pages, 3));
                agree(&stored, &Ask::last(5, stored.tokens), &codec);
            }
        }
    }
}

#[test]
fn polar_answers_as_the_reference_for_both_pairings() {
    if !is_available() {
        return;
    }
    for rope_pairing in [RopePairing::Half, RopePairing::Interleaved] {
        let geometry = Geometry { rope_pairing, ..geometry(36, 36, DType::F16) };
        for side in ["polar(a=3,r=2)", "polar(a=8,r=8,g=5)", "polar(a=1,r=1,g=40)"] {
            let codec = format!("k={side}; v=uniform(b=4,axis=token)");
            let stored = stored(&geometry, &codec, &layout(&[64, 45, 33], 3));
            agree(&stored, &Ask::last(3, stored.tokens), &format!("{codec} {rope_pairing:?}"));
        }
    }
}

#[test]
fn lloyd_and_vq_of_every_form_answer_as_the_reference() {
    if !is_available() {
        return;
    }
    for codec in [
        "k=rotate/lloyd(b=1); v=rotate(seed=9)/lloyd(b=6)",
        "k=hadamard/lloyd(b=8); v=vq(d=4,b=4,stages=3)",
        "k=vq(d=2,b=5,stages=2,scope=group); v=vq(d=3,b=3,scope=layer)",
        "k=vq(d=4,b=6,scope=model); v=vq(d=12,b=4,stages=2)",
    ] {
        let geometry = geometry(48, 48, DType::F16);
        for pages in [&[64, 45][..], &[33, 1]] {
            let stored = stored(&geometry, codec, &layout(pages, 3));
            agree(&stored, &Ask::last(3, stored.tokens), codec);
            let plan = Ask::last(8, stored.tokens).plan(&stored, |i| noise(99 + i));
            let wanted = expected(&stored, &plan);
            for table_bytes in [0, 100, 700] {
                let answer =
                    run_with(&stored, &plan, 1, table_bytes, ThreadOrder::Random(5)).unwrap();
                check(&answer, &wanted, &format!("{codec}, {table_bytes} bytes of codebooks"));
            }
        }
    }
}
