//! Times a disk tier against plain loops.
//!
//! `cargo run --release --example tier_bench -p kvd-tier -- FOLDER`
#![allow(clippy::print_stdout, reason = "prints its table")]

use kvd_tier::bench::{BenchPlan, measure_tier};
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let folder = std::env::args().nth(1).ok_or("usage: tier_bench FOLDER")?;
    let figures = measure_tier(&PathBuf::from(folder), &BenchPlan::default())?;
    let mega = |rate: f64| rate / 1e6;
    println!("O_DIRECT: {}, record: {} bytes", figures.is_direct, figures.record_bytes);
    println!(
        "publish to durable: {:.0} MB/s, plain loop {:.0} MB/s, ratio {:.2}, dropped {}",
        mega(figures.publish_rate),
        mega(figures.plain_write_rate),
        figures.publish_rate / figures.plain_write_rate,
        figures.dropped
    );
    println!(
        "random records, verified: {:.0} MB/s, plain reads {:.0} MB/s, ratio {:.2}",
        mega(figures.read_rate),
        mega(figures.plain_read_rate),
        figures.read_rate / figures.plain_read_rate
    );
    println!(
        "32 records: first layer {:.2} ms, all layers {:.2} ms",
        figures.first_layer.as_secs_f64() * 1e3,
        figures.all_layers.as_secs_f64() * 1e3
    );
    println!(
        "recovery of {} records ({:.0} MB): {:.0} ms, full scan {:.0} ms",
        figures.recovered,
        mega(figures.recovered_bytes as f64),
        figures.recover_time.as_secs_f64() * 1e3,
        figures.full_scan_time.as_secs_f64() * 1e3
    );
    Ok(())
}
