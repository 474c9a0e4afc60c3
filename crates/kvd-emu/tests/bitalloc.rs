//! Bit allocations: codes that are spread to bytes, and groups of sixteen coefficients whose codes
//! are multiplied as they lie.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::compare::{agree, layout, value};
use common::reference::{check, expected};
use common::run::run;
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_core::{DType, Geometry, Side};
use kvd_emu::{ThreadOrder, is_available};

fn stored(geometry: &Geometry, codec: &str, layout: &Layout) -> Stored {
    Stored::new(geometry, codec, layout, value)
}

#[test]
fn bit_allocations_and_their_outliers_answer_as_the_reference() {
    if !is_available() {
        return;
    }
    // Widths of all kinds, levels of one byte and of two, runs whose last four are not full.
    for (key, value) in [(3.1, 1.3), (1.7, 2.5), (5.6, 4.4), (0.3, 7.2)] {
        let codec = format!("k=mean+pca/bitalloc(b={key}); v=mean+pca/bitalloc(b={value})");
        // Whole groups of 16 in pages of 64 tokens are not spread, where both sides are so.
        for (dim_k, dim_v, tokens) in [(64, 64, 96), (36, 80, 96), (112, 80, 64), (36, 80, 64)] {
            let geometry = Geometry { block_tokens: tokens, ..geometry(dim_k, dim_v, DType::F16) };
            for pages in [&[64, 45][..], &[33], &[1]] {
                let stored = stored(&geometry, &codec, &layout(pages, 3));
                agree(&stored, &Ask::last(3, stored.tokens), &codec);
            }
        }
        let geometry = Geometry { block_tokens: 64, ..geometry(96, 128, DType::F16) };
        let stored = stored(&geometry, &codec, &layout(&[64, 64, 17], 20));
        for (group, window) in [(1, Some(1)), (4, Some(70)), (5, Some(100))] {
            agree(&stored, &Ask { window, ..Ask::last(group, stored.tokens - 30) }, &codec);
        }
    }
}

#[test]
fn sums_of_groups_shrink_once_when_scores_rise() {
    if !is_available() {
        return;
    }
    // Each page has larger scores than the one before; of values most levels are two bytes.
    let rising = |side: Side, head: usize, token: usize, channel: usize| {
        let rises = side == Side::Key && channel == 0;
        if rises { 2.0 * (token / 64) as f32 } else { value(side, head, token, channel) }
    };
    for (dim_k, dim_v, bits) in [(64, 48, 6.5), (64, 64, 6.0), (96, 128, 4.5)] {
        let geometry = Geometry { block_tokens: 64, ..geometry(dim_k, dim_v, DType::F16) };
        let codec = format!("k=mean+pca/bitalloc(b=4.5); v=mean+pca/bitalloc(b={bits})");
        let stored = Stored::new(&geometry, &codec, &layout(&[64, 64, 64, 33], 3), rising);
        for group in [1, 4, 8] {
            let ask = Ask::last(group, stored.tokens);
            let first = |i: usize| i.is_multiple_of(dim_k as usize);
            let plan = ask.plan(&stored, |i| if first(i) { 8.0 } else { noise(77_777 + i) });
            let answer = run(&stored, &plan, 100, ThreadOrder::Ascending).unwrap();
            check(&answer, &expected(&stored, &plan), &format!("{codec}, {ask:?}"));
        }
    }
}
