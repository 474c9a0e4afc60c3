//! Huffman codes of every form answer as f64 attention over the decoded pages does: alphabets,
//! tables and groupings, tails, drifted data, table versions, little shared memory. Presets are in
//! `presets.rs`.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;
#[path = "huffman/walk.rs"]
mod walk;

use common::compare::{agree, layout, value};
use common::reference::{check, expected};
use common::run::run_within;
use common::{Ask, Stored, geometry, noise};
use kvd_codec::PageReader;
use kvd_compute::Source;
use kvd_core::{DType, Geometry, LayerIndex, Side};
use kvd_cuda::{GpuLimits, SharedMemory};
use kvd_emu::{ThreadOrder, is_available};

fn conforms(geometry: &Geometry, codec: &str) {
    if !is_available() {
        return;
    }
    for pages in [&[64, 45, 96, 17][..], &[96, 96, 64, 64, 64], &[3]] {
        let stored = Stored::new(geometry, codec, &layout(pages, 3), value);
        assert!(stored.headers.values().all(|header| !header.fallback), "{codec}");
        agree(&stored, &Ask::last(3, stored.tokens), codec);
    }
}

#[test]
fn uniform_codes_of_every_width_and_mode() {
    let geometry = geometry(80, 36, DType::F16);
    for (key, value) in [
        ("b=1,axis=channel", "b=8,axis=token,g=10"),
        ("b=2,axis=token", "b=3,axis=channel,g=48"),
        ("b=4,axis=channel,g=7,mode=sym", "rel=0.15,axis=block"),
        // Words that begin at odd addresses.
        ("b=2,axis=token,g=16,mode=hybrid", "b=3,axis=token,g=9,mode=hybrid"),
        // Codes of more than a byte, tables of 512 entries and more.
        ("rel=0.004,axis=channel,mode=sym", "b=8,axis=token,mode=sym"),
    ] {
        conforms(&geometry, &format!("k=uniform({key})/huffman; v=uniform({value})/huffman"));
    }
}

#[test]
fn codes_of_every_other_side() {
    for codec in [
        "k=fp8/huffman; v=hadamard/fp8/huffman",
        "k=polar(a=3,r=2,g=64)/huffman; v=fp8/huffman",
        "k=polar(a=4,r=3,g=5)/huffman; v=vq(d=4,b=6)/huffman",
        "k=vq(d=2,b=9)/huffman; v=vq(d=4,b=4,stages=2)/huffman",
        "k=rotate/lloyd(b=3)/huffman; v=gain/lloyd(b=4)/huffman",
    ] {
        conforms(&geometry(48, 48, DType::F16), codec);
    }
}

#[test]
fn one_side_of_codes_beside_one_of_fixed_width() {
    for codec in [
        "k=uniform(b=4,axis=channel)/huffman; v=f16",
        "k=uniform(b=4,axis=channel); v=uniform(b=4,axis=token)/huffman",
        "k=mean+pca/grid(rate=2)/huffman; v=mean+pca/bitalloc(b=2)",
    ] {
        conforms(&geometry(64, 40, DType::F16), codec);
    }
}

#[test]
fn grids_of_every_rate() {
    for (key, value) in [(6.0, 5.0), (3.0, 0.7), (0.8, 1.6)] {
        let codec =
            format!("k=mean+qpca/grid(rate={key})/huffman; v=pca/grid(rate={value})/huffman");
        conforms(&geometry(36, 80, DType::F16), &codec);
        // Classes as they come, in many short runs.
        let codec = format!("k=grid(rate={key})/huffman; v=smooth/grid(rate={value})/huffman");
        conforms(&geometry(64, 36, DType::F16), &codec);
    }
}

/// The outliers of every chunk of head 0's keys.
fn outliers(stored: &Stored) -> Vec<Vec<i32>> {
    let pages = stored.parts.iter().filter_map(|part| match &part.source {
        Source::Pages { extent, ends, .. } => Some((extent.offset as usize, ends[0] as usize)),
        Source::Raw { .. } => None,
    });
    let of_page = |(start, len): (usize, usize)| {
        let bytes = &stored.arena[start..start + len];
        let page =
            PageReader::open_page(&stored.codec, LayerIndex(0), Side::Key, 0, bytes).unwrap();
        let lanes = page.stream_codes().map(|(lanes, _)| lanes);
        let of_chunk = |lanes: &kvd_codec::StreamCodes<'_>, index| {
            lanes.chunk_outliers(&lanes.chunk(index)).map(|outlier| outlier.unwrap().rest).collect()
        };
        let chunks =
            lanes.iter().flat_map(|lanes| (0..lanes.chunk_count()).map(|i| of_chunk(lanes, i)));
        chunks.collect::<Vec<_>>()
    };
    pages.flat_map(of_page).collect()
}

#[test]
fn grids_of_data_that_has_drifted() {
    if !is_available() {
        return;
    }
    let geometry = geometry(64, 64, DType::F16);
    let codec = "k=mean+qpca/grid(rate=2)/huffman; v=mean+gain+pca/grid(rate=1.5)/huffman";
    let (mut most, mut longest) = (0, 0);
    let shared = GpuLimits::h200().shared_memory();
    // Few outliers, more than a list holds, and rests that take a word of their own.
    for (channels, tokens, factor) in [(40, 1, 3.0), (5, 1, 4.0), (1, 11, 90.0)] {
        let far = |side: Side, head: usize, token: usize, channel: usize| {
            let is_far = channel % channels == channels / 2 && token.is_multiple_of(tokens);
            value(side, head, token, channel) * if is_far { factor } else { 1.0 }
        };
        for pages in [&[64, 64, 45][..], &[96, 96], &[2]] {
            let stored = Stored::new(&geometry, codec, &layout(pages, 3), far);
            for chunk in outliers(&stored) {
                most = most.max(chunk.len());
                longest = longest.max(chunk.into_iter().filter(|rest| rest.abs() > 7).count());
            }
            let what = format!("{codec}, {channels}, {tokens}, {factor}");
            let ask = Ask::last(4, stored.tokens);
            agree(&stored, &ask, &what);
            // Half of each warp has no chunk, and must leave the lists of others alone.
            let plan = ask.plan(&stored, |i| noise(99 + i));
            for order in ThreadOrder::EACH {
                let answer = run_within(&stored, &plan, (shared, Some(1)), order).unwrap().0;
                check(&answer, &expected(&stored, &plan), &format!("{what}, one chunk"));
            }
        }
    }
    assert!(most > 120 && longest > 60, "{most} outliers in a chunk, {longest} long ones");
}

#[test]
fn pages_of_several_table_versions() {
    if !is_available() {
        return;
    }
    let geometry = geometry(64, 64, DType::F16);
    let codec = "k=uniform(rel=0.05,axis=block)/huffman; v=uniform(rel=0.15,axis=token)/huffman";
    let mut stored = Stored::new(&geometry, codec, &layout(&[64, 64], 0), value);
    // Others than the first were made for.
    let others = |side, head, token, channel| value(side, head, token, channel).powi(3);
    stored.train(64, others);
    stored.push_pages(64, &others);
    // Pages that the newest table makes longer than codes of fixed width take the prior: all but
    // one.
    stored.push_pages(33, &value);
    let mut versions = [0; 3];
    stored.headers.values().for_each(|header| versions[usize::from(header.table_version)] += 1);
    assert_eq!(versions, [3, 8, 5]);
    agree(&stored, &Ask::last(4, stored.tokens), codec);
}

#[test]
fn several_query_tokens_and_ranges_see_what_they_may() {
    if !is_available() {
        return;
    }
    let geometry = geometry(64, 64, DType::F16);
    for codec in ["kvcomp", "k=pca/grid(rate=3)/huffman; v=pca/grid(rate=2)/huffman"] {
        let mut stored = Stored::new(&geometry, codec, &layout(&[96, 64, 96, 64, 64], 9), value);
        for window in [None, Some(1), Some(70)] {
            let queries = vec![(5, 392), (5, 62), (1, 0)];
            agree(&stored, &Ask { group: 3, queries, window, soft_cap: Some(5.0) }, codec);
        }
        // Parts that begin inside a page, in its second chunk, and leave gaps.
        for (index, first, rows) in [(0, 40, 50), (1, 0, 1), (2, 70, 20), (3, 33, 31)] {
            let part = &mut stored.parts[index];
            part.first_token += first;
            part.rows = rows;
            match &mut part.source {
                Source::Raw { first_row, .. } | Source::Pages { first_row, .. } => {
                    *first_row += first;
                }
            }
        }
        agree(&stored, &Ask::last(4, stored.tokens), codec);
    }
}

#[test]
fn thread_blocks_with_little_shared_memory_decode_fewer_chunks_at_once() {
    if !is_available() {
        return;
    }
    let geometry = geometry(128, 128, DType::F16);
    let stored = Stored::new(&geometry, "kvcomp", &layout(&[64; 6], 0), value);
    let plan = Ask::last(4, stored.tokens).plan(&stored, |i| noise(99 + i));
    let wanted = expected(&stored, &plan);
    let mut sizes = Vec::new();
    // KiB of a block and of a multiprocessor: 4 chunks, 2, 1, and 2 in two blocks rather than 4 in
    // one.
    for (block, multiprocessor) in [(227, 228), (70, 70), (45, 45), (227, 160)] {
        let (block, multiprocessor) = (block << 10, multiprocessor << 10);
        let shared = SharedMemory { block, multiprocessor, under_way: 0 };
        let (answer, bytes) =
            run_within(&stored, &plan, (shared, None), ThreadOrder::Random(3)).unwrap();
        check(&answer, &wanted, &format!("{shared:?}"));
        assert!(bytes <= shared.block, "{bytes} of {shared:?}");
        sizes.push(bytes);
    }
    assert!(sizes[0] > sizes[1] && sizes[1] > sizes[2] && sizes[3] == sizes[1], "{sizes:?}");
    // One chunk has no room either.
    let shared = SharedMemory { block: 30 << 10, multiprocessor: 31 << 10, under_way: 0 };
    let refused = run_within(&stored, &plan, (shared, None), ThreadOrder::Ascending).unwrap_err();
    assert!(refused.contains("of shared memory, of which the GPU has 30720"), "{refused}");
}
