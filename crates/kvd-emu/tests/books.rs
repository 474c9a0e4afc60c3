//! Codebooks on CUDA cores, wherever their entries are kept: the first in registers, then in shared
//! memory, then in global memory; exchanged by shuffles or not; channels split over thread blocks.
//! Every form answers as f64 attention over the decoded pages does.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::reference::{check, expected};
use common::run::run_split;
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_core::{DType, Side};
use kvd_cuda::CodebookRoom;
use kvd_emu::{ThreadOrder, is_available, is_sanitized};

/// Roughly normal rows, one channel much larger than the others.
fn value(side: Side, head: usize, token: usize, channel: usize) -> f32 {
    let index = ((side.index() * 2 + head) * 4096 + token) * 512 + channel;
    noise(index) * if channel == 3 { 8.0 } else { 1.0 }
}

/// Where entries are kept: in both forms of exchange all in shared memory, some, and none, and of
/// those before them all that registers can hold, a few, and none.
const ROOMS: [(usize, u32); 5] = [(1 << 20, 32), (700, 32), (0, 32), (700, 5), (3000, 0)];

/// Asks for one query head and for eight, with the channels split and whole.
fn agree(codec: &str, dims: [u32; 2], pages: &[usize]) {
    let layout = Layout { pages: pages.to_vec(), window: 2 };
    let stored = Stored::new(&geometry(dims[0], dims[1], DType::F16), codec, &layout, value);
    let mut turn = 0;
    for group in [1, 3, 8] {
        let plan = Ask::last(group, stored.tokens).plan(&stored, |i| 2.0 * noise(77_777 + i));
        let wanted = expected(&stored, &plan);
        for (bytes, registers) in ROOMS {
            for exchange in [true, false] {
                let rooms = [CodebookRoom { bytes, registers, exchange }; 2];
                let parts = ([1, 100, 2][turn % 3], [1, 2, 5, 64][turn % 4]);
                let order = ThreadOrder::EACH[turn / 2 % 3];
                turn += 1;
                // ThreadSanitizer takes ten times as long: some of them, of every kind.
                if is_sanitized("thread") && turn % 7 != 1 {
                    continue;
                }
                let answer = run_split(&stored, &plan, parts, rooms, order).unwrap();
                check(&answer, &wanted, &format!("{codec}, {group} heads, {rooms:?}, {parts:?}"));
            }
        }
    }
}

#[test]
fn stages_of_one_set_answer_as_the_reference_wherever_entries_are() {
    if !is_available() {
        return;
    }
    // Entries that lanes exchange and others; fewer than a warp has lanes; a stage too many; heads
    // that leave lanes of a warp without a channel.
    for (d, b, stages) in [(2, 6, 2), (4, 8, 2), (8, 6, 2), (4, 3, 2), (16, 5, 2), (4, 5, 3)] {
        let codec = format!("k=vq(d={d},b={b},stages={stages}); v=vq(d={d},b={b},stages={stages})");
        agree(&codec, [48, 80], &[64, 45]);
    }
}

#[test]
fn sides_of_different_entries_answer_as_the_reference() {
    if !is_available() {
        return;
    }
    for codec in [
        "k=vq(d=8,b=5,stages=2); v=vq(d=3,b=4)",
        "k=vq(d=6,b=6); v=vq(d=4,b=10)",
        "k=vq(d=12,b=4); v=vq(d=2,b=7,stages=2)",
    ] {
        agree(codec, [48, 48], &[33, 1, 32]);
    }
}

#[test]
fn channels_of_grouped_codebooks_answer_as_the_reference_split_and_whole() {
    if !is_available() {
        return;
    }
    for (d, b, stages) in [(2, 5, 2), (4, 6, 2), (8, 4, 2), (3, 3, 1), (16, 4, 2), (4, 4, 3)] {
        let side = format!("vq(d={d},b={b},stages={stages},scope=group)");
        agree(&format!("k={side}; v={side}"), [48, 96 - 48 % d], &[64, 37]);
    }
    // Values of more channels than threads, and of more than tensor cores sum.
    agree("k=vq(d=4,b=4,scope=group); v=vq(d=4,b=4,scope=group)", [32, 256], &[64, 5]);
    agree("k=vq(d=4,b=4,scope=group); v=vq(d=8,b=4,scope=group)", [32, 192], &[64]);
}

#[test]
fn pages_beside_those_that_fell_back_answer_with_split_channels() {
    if !is_available() {
        return;
    }
    // Keys of one block are beyond the codebooks, so that its pair is read by the kernel for all.
    let far = |side: Side, head, token, channel| {
        let far = side == Side::Key && (64..128).contains(&token);
        value(side, head, token, channel) * if far { 1.0e3 } else { 1.0 }
    };
    let side = "vq(d=4,b=5,stages=2,scope=group)";
    let layout = Layout { pages: vec![64; 3], window: 3 };
    let codec = format!("k={side}; v={side}");
    let stored = Stored::new(&geometry(64, 64, DType::F16), &codec, &layout, far);
    assert!(stored.headers.values().any(|header| header.fallback), "no page fell back");
    assert!(!stored.headers.values().all(|header| header.fallback));
    let plan = Ask::last(4, stored.tokens).plan(&stored, |i| noise(7 + i) / 8.0);
    let rooms = [CodebookRoom::from(900); 2];
    for (split, order) in [1, 4, 16].into_iter().zip(ThreadOrder::EACH) {
        let answer = run_split(&stored, &plan, (2, split), rooms, order).unwrap();
        check(&answer, &expected(&stored, &plan), &format!("{split} parts"));
    }
}
