//! What attention reads of pages, counted: each byte once for all query rows of a unit, in whole
//! copies of 16 bytes. With `--nocapture` it prints the table of docs/perf/gpu-plan.md.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::run::run;
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_core::{DType, Side};
use kvd_emu::{Order, available, copied_bytes};

const TOKENS: u32 = 4 * 64;

/// Bytes of the pages' payloads, and bytes that are copied for one query token of four heads each.
fn traffic(name: &str) -> (u64, u64) {
    let value = |side: Side, head: usize, token: usize, channel: usize| {
        noise(((side.index() * 2 + head) * 4096 + token) * 512 + channel)
    };
    let layout = Layout { pages: vec![64; 4], window: 0 };
    let stored = Stored::new(&geometry(128, 128, DType::F16), name, &layout, value);
    let plan = Ask::last(4, TOKENS).plan(&stored, |i| noise(99 + i));
    let _ = copied_bytes();
    run(&stored, &plan, 2, Order::Ascending).unwrap();
    let payload = stored.headers.values().map(|header| u64::from(header.payload_len)).sum();
    (payload, copied_bytes())
}

#[test]
fn pages_are_read_once_for_all_query_heads() {
    if !available() {
        return;
    }
    println!("| codec | bytes per token and KV head | copied | of the least |");
    println!("|---|---|---|---|");
    // Entropy coded.
    let without_kernel = ["kvcomp", "kvcomp-channel", "kvd-4", "kvd-3", "kvd-2", "kvd-1.5"];
    for preset in kvd_codec::presets() {
        if without_kernel.contains(&preset.name) {
            continue;
        }
        let (payload, copied) = traffic(preset.name);
        let (per_token, ratio) = (f64::from(2 * TOKENS), copied as f64 / payload as f64);
        println!(
            "| {} | {:.1} | {:.1} | {ratio:.3} |",
            preset.name,
            payload as f64 / per_token,
            copied as f64 / per_token
        );
        // Outliers are read where they are, and not counted.
        assert!((0.999..1.12).contains(&ratio), "{}: {copied} of {payload}", preset.name);
    }
}
