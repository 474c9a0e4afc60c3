//! The loop whose warps own tokens (ADR 52): what presets do not ask of it. Windows, several query
//! tokens, pages that end within a tile, gains, caps, sequences long enough that sums are kept, and
//! steps beyond what the first page made warps expect. Bugs planted in it are noticed.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::compare::{agree, kernel, layout, value};
use common::reference::{check, expected};
use common::run::{kernels, run_in};
use common::{Ask, Layout, Stored, geometry};
use kvd_core::{DType, Side};
use kvd_emu::{ThreadOrder, is_available, is_sanitized};
use std::panic::catch_unwind;

fn codec(bits: u32) -> String {
    format!("k=uniform(b={bits},axis=channel,g=32); v=uniform(b={bits},axis=token,g=32)")
}

fn stored(
    (codec, dim): (&str, u32),
    layout: &Layout,
    value: impl Fn(Side, usize, usize, usize) -> f32,
) -> Stored {
    Stored::new(&geometry(dim, dim, DType::F16), codec, layout, value)
}

/// Asks, and checks that the loop has answered, alone.
fn holds(stored: &Stored, ask: &Ask, bits: u32) {
    let dim = stored.codec.geometry().head_dim(Side::Key);
    let rows = ask.queries[0].0 as usize * ask.group;
    agree(stored, ask, &format!("{bits} bits, {dim} channels"));
    let of_codec = format!("kivi{bits}");
    assert_eq!(kernels(), [kernel("", Some(&of_codec), (dim, rows))]);
}

#[test]
fn ranges_tails_and_caps_are_answered_as_the_reference_does() {
    if !is_available() {
        return;
    }
    for (bits, dim) in [(4, 128), (2, 128), (4, 64), (2, 64)] {
        let pages = layout(&[64, 64, 45, 64, 33, 64], 0);
        let stored = stored((&codec(bits), dim), &pages, value);
        let last = stored.tokens;
        let of = |queries: &[(u32, u32)], group, window, soft_cap| Ask {
            group,
            queries: queries.to_vec(),
            window,
            soft_cap,
        };
        for ask in [
            of(&[(2, last - 2)], 2, None, None),
            of(&[(4, last - 4), (1, 70)], 1, Some(70), None),
            of(&[(1, last - 1)], 3, Some(1), None),
            of(&[(1, last - 1)], 4, None, Some(3.0)),
            of(&[(2, last - 2)], 4, Some(90), Some(3.0)),
            of(&[(7, last - 7)], 1, None, None),
        ] {
            holds(&stored, &ask, bits);
        }
    }
}

#[test]
fn gains_and_long_sequences_are_answered_as_the_reference_does() {
    if !is_available() || is_sanitized("thread") {
        return;
    }
    let short = |side: Side, head: usize, token: usize, channel: usize| {
        let length = if side == Side::Value && token % 5 == 2 { 0.1 } else { 1.0 };
        value(side, head, token, channel) * length
    };
    let raised = "k=uniform(b=4,axis=channel,g=32); v=gain/uniform(b=4,axis=token,g=32)";
    for (dim, rows) in [(128, 4), (64, 8)] {
        let gains = stored((raised, dim), &layout(&[64, 64, 45], 0), short);
        assert!(gains.headers.values().any(|header| header.gain_bytes() > 0));
        holds(&gains, &Ask::last(rows, gains.tokens), 4);
        // Over eight stops of each warp of a thread block.
        let long = stored((&codec(2), dim), &layout(&[64; 34], 0), value);
        holds(&long, &Ask::last(rows, long.tokens), 2);
    }
}

#[test]
fn steps_that_the_first_page_does_not_foretell_keep_the_bound() {
    if !is_available() {
        return;
    }
    // Of the first page, and of those behind it: small and large ones, and both in turn.
    for (first, later) in [(1.0, 1e-3), (1e-3, 1.0), (1e-3, 2e3), (1e3, 1e3)] {
        let value = |side: Side, head: usize, token: usize, channel: usize| {
            value(side, head, token, channel) * if token < 64 { first } else { later }
        };
        for (bits, dim, rows) in [(4, 128, 4), (2, 128, 8), (4, 64, 8), (2, 64, 4)] {
            let stored = stored((&codec(bits), dim), &layout(&[64; 5], 0), value);
            assert!(stored.headers.values().all(|header| !header.fallback));
            holds(&stored, &Ask::last(rows, stored.tokens), bits);
        }
    }
}

#[test]
fn bugs_planted_in_it_are_noticed() {
    if !is_available() {
        return;
    }
    for (dim, rows, of) in [(128, 4, ""), (64, 8, "_64")] {
        let stored = stored((&codec(4), dim), &layout(&[64, 64], 0), value);
        let plan = Ask::last(rows, stored.tokens).plan(&stored, |i| (i % 7) as f32 / 7.0);
        let wanted = expected(&stored, &plan);
        for order in ThreadOrder::EACH {
            let is_right = |kernel: &str| {
                let answer = run_in(&stored, &plan, kernel, order).unwrap();
                catch_unwind(|| check(&answer, &wanted, kernel)).is_ok()
            };
            let sound = kernel("", Some("kivi4"), (dim as usize, rows));
            assert!(is_right(&sound), "{sound}, {order:?}");
            for bug in ["swapped_tiles", "unordered_steps", "swapped_halves"] {
                let kernel = format!("planted_{bug}{of}");
                assert!(!is_right(&kernel), "{kernel}, {order:?}");
            }
        }
    }
}
