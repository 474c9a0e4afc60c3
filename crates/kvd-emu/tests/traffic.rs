//! Bytes of pages that attention reads, counted: each byte once for all query rows of a unit, in
//! whole copies of 16 bytes. With `--nocapture` it prints them as a table.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::run::{SHARED, run};
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_compute::AttendPlan;
use kvd_core::{DType, Side};
use kvd_cuda::{AttendTables, LatePairs, LayerShapes, SideShape, TableOptions};
use kvd_emu::{ThreadOrder, copied_bytes, is_available};

const TOKENS: u32 = 4 * 64;

/// Four pages, and one query token of four heads per KV head.
fn stored(name: &str) -> (Stored, AttendPlan) {
    let value = |side: Side, head: usize, token: usize, channel: usize| {
        noise(((side.index() * 2 + head) * 4096 + token) * 512 + channel)
    };
    let layout = Layout { pages: vec![64; 4], window: 0 };
    let stored = Stored::new(&geometry(128, 128, DType::F16), name, &layout, value);
    let plan = Ask::last(4, TOKENS).plan(&stored, |i| noise(99 + i));
    (stored, plan)
}

/// Bytes of the pages' payloads, and bytes that are copied.
fn traffic(name: &str) -> (u64, u64) {
    let (stored, plan) = stored(name);
    let _ = copied_bytes();
    run(&stored, &plan, 2, ThreadOrder::Ascending).unwrap();
    let payload = stored.headers.values().map(|header| u64::from(header.payload_len)).sum();
    (payload, copied_bytes())
}

#[test]
fn pages_are_read_once_for_all_query_heads() {
    if !is_available() {
        return;
    }
    println!("| codec | bytes per token and KV head | copied | of the least |");
    println!("|---|---|---|---|");
    for preset in kvd_codec::presets() {
        let (payload, copied) = traffic(preset.name);
        let (per_token, ratio) = (f64::from(2 * TOKENS), copied as f64 / payload as f64);
        println!(
            "| {} | {:.1} | {:.1} | {ratio:.3} |",
            preset.name,
            payload as f64 / per_token,
            copied as f64 / per_token
        );
        // Lengths and outliers are read where they are, and not counted.
        assert!((0.95..1.12).contains(&ratio), "{}: {copied} of {payload}", preset.name);
    }
}

/// Look-ups and top-ups per row of a side, the codes that they give, and those whose low bits
/// follow: what `huffman.cuh` reads of each run's table.
fn lock_step(shapes: &LayerShapes, shape: &SideShape, side: Side) -> [f64; 4] {
    const HEAD_WORDS: usize = 4;
    const RUN_WORDS: usize = 16;
    let word = |at: usize| {
        let at = shape.lanes as usize + 4 * at;
        u32::from_le_bytes(*shapes.tables[at..].first_chunk().unwrap())
    };
    let mut counts = [0.0; 4];
    for run in 0..word(0) as usize {
        let of_run = |field: usize| word(HEAD_WORDS + RUN_WORDS * run + field);
        let [len, per_entry, per_word, raw_bits] = [1, 5, 9, 11].map(of_run);
        assert!(len > 0 && 4 % per_word == 0 && per_word % per_entry == 0);
        // The last step of a run of keys may have less than four positions.
        let slots = if side == Side::Key { len.next_multiple_of(4) } else { len };
        let with_low_bits = if raw_bits > 0 { len } else { 0 };
        let of_run = [slots, slots, len, with_low_bits].map(f64::from);
        let per = [per_entry, per_word, 1, 1].map(f64::from);
        counts.iter_mut().zip(of_run).zip(per).for_each(|((sum, count), per)| *sum += count / per);
    }
    counts
}

#[test]
fn a_look_up_gives_several_codes_where_symbols_are_short() {
    if !is_available() {
        return;
    }
    println!(
        "| codec | codes per look-up, k / v | codes per top-up, k / v | low bits follow, k / v |"
    );
    println!("|---|---|---|---|");
    for preset in kvd_codec::presets().iter().filter(|p| p.spec_text.contains("huffman")) {
        let (stored, plan) = stored(preset.name);
        let shapes = LayerShapes::new(&stored.codec, plan.layer, [0; 2]);
        let header = |offset: u64| stored.headers.get(&offset).copied();
        let options = TableOptions {
            parts_per_unit: 4,
            shared: SHARED,
            chunks: None,
            channel_split: 1,
            late: LatePairs::NONE,
        };
        let tables = AttendTables::new(&plan, &stored.codec, &shapes, &header, options).unwrap();
        let unit = tables.launches[0].units[0];
        let rates = Side::BOTH.map(|side| {
            let shape = if side == Side::Key { unit.key } else { unit.value };
            let [look_ups, top_ups, codes, with_low_bits] = lock_step(&shapes, &shape, side);
            [codes / look_ups, codes / top_ups, with_low_bits / codes]
        });
        let [[k, k_word, k_low], [v, v_word, v_low]] = rates;
        let of_both = format!("{k:.2} / {v:.2} | {k_word:.2} / {v_word:.2}");
        println!("| {} | {of_both} | {k_low:.2} / {v_low:.2} |", preset.name);
        assert!([k_low, v_low].iter().all(|share| (0.0..=1.0).contains(share)), "{k_low} {v_low}");
        // Codes of four bits and more, every one by itself, but for the steps that are not full.
        assert!(k.min(v) > 0.9 && k_word >= k && v_word >= v, "{}", preset.name);
        // How many depends on the fit; that short symbols share look-ups must not.
        assert!(!["kvd-1.5", "kvcomp-channel"].contains(&preset.name) || k > 1.2, "{k} {v}");
    }
}
