//! Huffman tables follow what is stored: whatever comes first, soon after it changes, and a bounded
//! number of times. No page pays for a table that does not fit it.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{codec, decode, geometry, noise, page};
use kvd_codec::{BlockRows, ModelCodec, Page, resolve_spec};
use kvd_core::{DType, LayerIndex, Side};
use kvd_fit::{Samples, fit_calibration};

const LAYER: LayerIndex = LayerIndex(0);
const SPEC: &str = "k=uniform(rel=0.05,axis=block)/huffman; v=uniform(b=4,axis=token)";
/// Channels, heads and tokens of a block.
const DIM: usize = 64;
const HEADS: usize = 2;
const TOKENS: usize = 64;
const VALUES: usize = HEADS * TOKENS * DIM;

/// A block with one large value in `rare`: the rarer, the more codes are alike.
fn rows(seed: usize, rare: usize) -> Vec<f32> {
    let gain = |i: usize| if i.is_multiple_of(rare) { 8.0 } else { 1.0 };
    (0..VALUES).map(|i| noise(seed * VALUES + i) * gain(i)).collect()
}

/// A block of values near a normal distribution.
fn normal(seed: usize) -> Vec<f32> {
    let value = |i: usize| (0..6).map(|n| noise((seed * VALUES + i) * 6 + n)).sum::<f32>();
    (0..VALUES).map(value).collect()
}

fn block(rows: &[f32]) -> BlockRows<'_> {
    BlockRows { tokens: TOKENS, k: rows, v: rows }
}

/// Stores blocks in calls of so many; returns the bytes of each.
fn store(codec: &mut ModelCodec, blocks: &[Vec<f32>], per_call: usize) -> Vec<usize> {
    let mut bytes = Vec::new();
    for call in blocks.chunks(per_call) {
        let call: Vec<_> = call.iter().map(|rows| block(rows)).collect();
        codec.watch_tables(LAYER, &call).unwrap();
        for block in call {
            let mut out = Vec::new();
            codec.encode_block(LAYER, &block, &mut out).unwrap();
            bytes.push(out.len());
        }
    }
    bytes
}

fn fresh(text: &str) -> ModelCodec {
    let geometry = geometry(DIM as u32, DType::F32);
    ModelCodec::new(geometry, resolve_spec(text).unwrap(), None).unwrap()
}

fn many(count: usize, of_seed: impl Fn(usize) -> Vec<f32>) -> Vec<Vec<f32>> {
    (0..count).map(|index| of_seed(100 + index)).collect()
}

/// Every codec whose tables are built from blocks and that needs no calibration.
const CODECS: [&str; 6] = [
    "kvcomp",
    "kvcomp-channel",
    SPEC,
    "k=fp8/huffman; v=fp8/huffman",
    "k=hadamard/lloyd(b=4)/huffman; v=uniform(b=3,axis=token)/huffman",
    "k=polar(a=4,r=4,g=64)/huffman; v=uniform(b=8,axis=block)/huffman",
];

#[test]
fn whatever_comes_first_later_blocks_take_what_they_would() {
    let constant = |_| vec![0.75f32; VALUES];
    let per_channel = |_| (0..VALUES).map(|i| (i % DIM) as f32 - 9.0).collect();
    let one_token = |_| (0..VALUES).map(|i| noise(i % DIM)).collect();
    let one_spike = |seed| {
        let mut rows = rows(seed, 2);
        rows[17] = 1e4;
        rows
    };
    type Rows<'a> = &'a dyn Fn(usize) -> Vec<f32>;
    let warm_ups: [(&str, Rows<'_>); 6] = [
        ("zeros", &|_| vec![0.0; VALUES]),
        ("a constant", &constant),
        ("constant channels", &per_channel),
        ("one token", &one_token),
        ("a spike", &one_spike),
        ("other data", &|seed| rows(seed, 4096)),
    ];
    for text in CODECS {
        for per_call in [1, 16] {
            let data = many(50, normal);
            let usual: usize = store(&mut fresh(text), &data, per_call)[8..].iter().sum();
            for (what, warm_up) in warm_ups {
                for blocks in [1, 8] {
                    let mut codec = fresh(text);
                    store(&mut codec, &many(blocks, warm_up), 1);
                    let taken: usize = store(&mut codec, &data, per_call)[8..].iter().sum();
                    let ratio = taken as f64 / usual as f64;
                    assert!(
                        ratio < 1.03,
                        "{text}, {blocks} blocks of {what}, {per_call} a call: {ratio}"
                    );
                }
            }
        }
    }
}

#[test]
fn tables_follow_data_that_changes() {
    for text in ["kvcomp", "kvcomp-channel", SPEC] {
        let mut codec = fresh(text);
        store(&mut codec, &many(200, |seed| rows(seed, 4096)), 1);
        let (data, mut other) = (many(50, normal), fresh(text));
        let usual: usize = store(&mut other, &data, 1)[16..].iter().sum();
        let taken: usize = store(&mut codec, &data, 1)[16..].iter().sum();
        assert!(taken as f64 <= 1.03 * usual as f64, "{text}: {taken} bytes instead of {usual}");
    }
}

#[test]
fn no_page_takes_more_than_codes_of_fixed_width() {
    let zeros = vec![0.0; VALUES];
    for text in CODECS {
        let mut codec = fresh(text);
        codec.train_tables(LAYER, &[block(&zeros)]).unwrap();
        let mut with_prior = 0;
        let spec = resolve_spec(text).unwrap().to_string();
        let fixed = fresh(&spec.replace("/huffman", "").replace("+huffman", ""));
        for rows in [normal(1), rows(2, 2), rows(3, 4096), zeros.clone()] {
            let [mut bytes, mut of_fixed] = [Vec::new(), Vec::new()];
            let encoded = codec.encode_block(LAYER, &block(&rows), &mut bytes).unwrap();
            let wanted = fixed.encode_block(LAYER, &block(&rows), &mut of_fixed).unwrap();
            for index in 0..2 * HEADS {
                let [taken, wanted] =
                    [page(&bytes, &encoded, index), page(&of_fixed, &wanted, index)];
                let limit = wanted.len() as f64 * 1.02;
                assert!(taken.len() as f64 <= limit, "{text}: {} of {}", taken.len(), wanted.len());
            }
            for head in 0..HEADS {
                let of_head = page(&bytes, &encoded, head);
                let header = *Page::parse_page(of_head).unwrap().header();
                let dim = codec.head_codec(LAYER, Side::Key, head).dim();
                assert_eq!(decode(&codec, Side::Key, head, of_head).len(), TOKENS * dim);
                assert!(header.huffman || header.fallback);
                with_prior += usize::from(header.huffman && header.table_version == 0);
            }
        }
        // A table of few codes is hardly longer than codes of fixed width, whatever it is made of.
        assert!(with_prior > 0 || text == "kvcomp-channel", "{text}: no page took its prior");
    }
}

fn trained(rare: usize) -> ModelCodec {
    let rows = rows(1, rare);
    codec(&geometry(DIM as u32, DType::F32), SPEC, &block(&rows))
}

#[test]
fn blocks_of_the_same_kind_keep_their_table() {
    let mut codec = fresh(SPEC);
    // The first table is of a single block; those of more may replace it.
    store(&mut codec, &many(64, |seed| rows(seed, 2)), 1);
    let versions = codec.table_versions();
    store(&mut codec, &many(256, |seed| rows(200 + seed, 2)), 4);
    assert_eq!(codec.table_versions(), versions);
}

#[test]
fn pages_of_older_versions_still_decode() {
    let mut codec = trained(2);
    let old_rows = rows(1, 2);
    let mut old = Vec::new();
    let encoded = codec.encode_block(LAYER, &block(&old_rows), &mut old).unwrap();
    let before = decode(&codec, Side::Key, 0, page(&old, &encoded, 0));
    store(&mut codec, &many(16, |seed| rows(seed, 4096)), 1);
    assert!((2..=5).contains(&codec.table_versions()), "{} versions", codec.table_versions());
    assert_eq!(decode(&codec, Side::Key, 0, page(&old, &encoded, 0)), before);
}

#[test]
fn data_that_comes_and_goes_takes_up_its_table_again() {
    let mut codec = fresh(SPEC);
    for turn in 0..20 {
        let rare = if turn % 2 == 0 { 4096 } else { 2 };
        store(&mut codec, &many(64, |seed| rows(seed, rare)), 4);
    }
    assert!((2..=6).contains(&codec.table_versions()), "{} versions", codec.table_versions());
}

#[test]
fn kinds_that_alternate_take_what_each_would_alone() {
    let zeros = |_: usize| vec![0.0; VALUES];
    let cubed = |seed: usize| normal(seed).into_iter().map(|x| x * x * x).collect();
    let spread = |seed: usize| rows(seed, 4096);
    type Rows<'a> = &'a dyn Fn(usize) -> Vec<f32>;
    let others: [(&str, Rows<'_>); 3] =
        [("zeros", &zeros), ("cubes", &cubed), ("a spike", &spread)];
    for text in CODECS {
        let data = many(50, normal);
        // Without the blocks that begin a table, and those until data that is back is counted.
        let usual: usize = store(&mut fresh(text), &data, 1)[8..].iter().sum();
        for (what, other) in others {
            let mut codec = fresh(text);
            let turns = 40;
            for turn in 0..turns {
                store(&mut codec, &[other(500 + turn), normal(900 + turn)], 1);
            }
            let taken: usize = store(&mut codec, &data, 1)[8..].iter().sum();
            let ratio = taken as f64 / usual as f64;
            assert!(ratio < 1.03, "{text}, after {turns} turns with {what}: {ratio}");
            // Of blocks in turn, those of normal data.
            let turn: Vec<usize> = (0..20)
                .map(|turn| store(&mut codec, &[other(700 + turn), normal(100 + turn)], 1)[1])
                .collect();
            let alone: usize = store(&mut fresh(text), &data, 1)[8..20].iter().sum();
            let ratio = turn[8..].iter().sum::<usize>() as f64 / alone as f64;
            assert!(ratio < 1.05, "{text}, in turns with {what}: {ratio}");
        }
    }
}

#[test]
fn versions_are_bounded_and_bad_blocks_passed_over() {
    let mut codec = trained(2);
    // Ever other data: values that stand at other codes each time.
    for kind in 0..40 {
        let at = |seed: usize| {
            let value = |i: usize| match (noise(seed * VALUES + i).abs() * 64.0) as usize {
                0 => 20.0 * ((i % 2) as f32),
                n if n % 3 == 0 => (kind % 20) as f32,
                n if n % 3 == 1 => (kind * 7 % 19) as f32,
                _ => (kind * 11 % 17) as f32,
            };
            (0..VALUES).map(value).collect()
        };
        store(&mut codec, &many(64, at), 8);
    }
    let versions = codec.table_versions();
    // Six at any time, the next after 4, 8, 16, … blocks: of 2560 blocks, ten.
    assert!((7..=16).contains(&versions), "{versions} versions");
    let bad = vec![f32::NAN; VALUES];
    for _ in 0..64 {
        codec.watch_tables(LAYER, &[block(&bad)]).unwrap();
    }
    assert_eq!(codec.table_versions(), versions);
}

/// Calibrations of normal data; the last one has no tables of its own.
const CALIBRATED: [&str; 7] = [
    "kvd-4",
    "kvd-3",
    "kvd-2",
    "kvd-1.5",
    "kvd-1",
    "kvd-2-fast",
    "k=smooth+hadamard/vq(d=2,b=4)/huffman; v=vq(d=2,b=4)/huffman",
];

fn calibrated(text: &str) -> ModelCodec {
    let (geometry, spec) = (geometry(DIM as u32, DType::F32), resolve_spec(text).unwrap());
    let mut samples = Samples::new(&geometry);
    for (layer, head) in (0..2).flat_map(|layer| (0..HEADS).map(move |head| (layer, head))) {
        let rows = |of: usize| {
            let seed = 3_000 + 100 * (6 * layer as usize + 3 * head + of);
            many(16, |index| normal(seed + index)).concat()
        };
        samples.push(LayerIndex(layer), Side::Key, head, &rows(0)).unwrap();
        samples.push(LayerIndex(layer), Side::Value, head, &rows(1)).unwrap();
        samples.push_queries(LayerIndex(layer), head, &rows(2)).unwrap();
    }
    let fitted = fit_calibration(&geometry, &spec, &samples, 7, &mut |_| {}).unwrap();
    ModelCodec::new(geometry, spec, Some(&fitted)).unwrap()
}

/// Bits of a value of such blocks.
fn bits_per_value(bytes: &[usize]) -> f64 {
    8.0 * bytes.iter().sum::<usize>() as f64 / (2 * VALUES * bytes.len()) as f64
}

/// Tables of a calibration stay as they were fitted: data of another kind costs what comes after it
/// nothing, and itself never more than raw rows.
#[test]
fn calibrated_codecs_take_after_other_data_what_they_would() {
    let cubed = |seed: usize| normal(seed).into_iter().map(|x| x * x * x).collect();
    let longer = |seed: usize| normal(seed).into_iter().map(|x| 8.0 * x).collect();
    type Rows<'a> = &'a dyn Fn(usize) -> Vec<f32>;
    let others: [(&str, Rows<'_>); 5] = [
        ("zeros", &|_| vec![0.0; VALUES]),
        ("a constant", &|_| vec![0.75; VALUES]),
        ("a spike", &|seed| rows(seed, 4096)),
        ("cubes", &cubed),
        ("8 times as long", &longer),
    ];
    for text in CALIBRATED {
        let data = many(40, normal);
        let fresh = calibrated(text);
        let usual = store(&mut fresh.clone(), &data, 4);
        println!("{text}: {:.3} bits a value", bits_per_value(&usual[8..]));
        for (what, other) in others {
            let mut codec = fresh.clone();
            let of_other = store(&mut codec, &many(24, other), 4);
            let after = store(&mut codec, &data, 4);
            let [own, after_bits] = [&of_other, &after].map(|bytes| bits_per_value(&bytes[8..]));
            println!("    {what}: {own:.3} themselves, {after_bits:.3} after them");
            if text.starts_with("kvd") {
                assert_eq!(after, usual, "{text}, after {what}");
            }
            let ratio = after_bits / bits_per_value(&usual[8..]);
            assert!(ratio < 1.03, "{text}, after {what}: {ratio}");
            assert!(own <= 32.0 * 1.02, "{text}, {what}: {own} bits");
        }
    }
}
