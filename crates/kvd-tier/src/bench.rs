//! Measures a tier on a folder against plain loops with O_DIRECT on the same file system.
//!
//! For `kvd bench cache --disk` and the example. It makes folders of its own below the one it is
//! given, and removes them.

use crate::aligned::AlignedBytes;
use crate::draft::{LayerShape, RecordDraft, RecordShape};
use crate::error::RefusedWrite;
use crate::files::{OpenPurpose, RealFolder, StoredFolder};
use crate::listener::KeepNothing;
use crate::name::{BlockName, LiveRecord, RecordMeta, ScopeId};
use crate::offline::{OfflineAccess, OfflineStore};
use crate::settings::{DirectChoice, DiskSettings};
use crate::tier::DiskTier;
use parking_lot::Mutex;
use std::error::Error;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How much is measured. `BenchPlan::default` is what `docs/perf/cache.md` has.
#[derive(Clone, Copy, Debug)]
pub struct BenchPlan {
    /// Large records: layers, and bytes of each.
    pub layers: usize,
    /// See `layers`.
    pub layer_bytes: usize,
    /// Large records written, then read at random.
    pub records: usize,
    /// Threads that read.
    pub threads: usize,
    /// Small records that are recovered.
    pub small_records: usize,
    /// Rounds; the median is told.
    pub rounds: usize,
}

impl Default for BenchPlan {
    fn default() -> Self {
        // A block of 64 tokens of a model with 8 billion parameters, at 2 bits.
        Self {
            layers: 32,
            layer_bytes: 33_000,
            records: 512,
            threads: 4,
            small_records: 100_000,
            rounds: 3,
        }
    }
}

/// Medians. Rates are in bytes a second.
#[derive(Clone, Copy, Debug, Default)]
pub struct BenchFigures {
    /// Whether O_DIRECT worked.
    pub is_direct: bool,
    /// Bytes of a large record.
    pub record_bytes: u64,
    /// From the first write to the last acknowledgement.
    pub publish_rate: f64,
    /// A plain loop: the same bytes, with a sync each 8 MiB.
    pub plain_write_rate: f64,
    /// Records refused or failed while publishing.
    pub dropped: u64,
    /// Random whole records, verified.
    pub read_rate: f64,
    /// Reads of equal sizes without a look at the bytes.
    pub plain_read_rate: f64,
    /// First layer of 32 records, one thread, heads read before.
    pub first_layer: Duration,
    /// All layers of the same records.
    pub all_layers: Duration,
    /// Small records recovered.
    pub recovered: u64,
    /// Bytes of their segments.
    pub recovered_bytes: u64,
    /// Opening the folder after a clean end.
    pub recover_time: Duration,
    /// Reading and verifying every record, as a store without footers would.
    pub full_scan_time: Duration,
}

type AnyError = Box<dyn Error + Send + Sync>;

/// Measures in folders below `folder`.
///
/// # Errors
///
/// The system's, and the tier's.
pub fn measure_tier(folder: &Path, plan: &BenchPlan) -> Result<BenchFigures, AnyError> {
    fs::create_dir_all(folder)?;
    let mut figures = BenchFigures::default();
    let (mut publish, mut plain_write) = (Vec::new(), Vec::new());
    let (mut read, mut plain_read) = (Vec::new(), Vec::new());
    let (mut first, mut all) = (Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        let records = measure_publish(folder, plan, &mut figures, &mut publish)?;
        plain_write.push(measure_plain_write(folder, plan, figures.record_bytes)?);
        measure_reads(folder, plan, &records, &mut read)?;
        plain_read.push(measure_plain_read(folder, plan, figures.record_bytes)?);
        let times = measure_first_layer(folder, &records)?;
        first.push(times.first_layer.as_secs_f64());
        all.push(times.all_layers.as_secs_f64());
        fs::remove_dir_all(folder.join("tier"))?;
        fs::remove_dir_all(folder.join("plain"))?;
    }
    measure_recovery(folder, plan, &mut figures)?;
    figures.publish_rate = find_median(&mut publish);
    figures.plain_write_rate = find_median(&mut plain_write);
    figures.read_rate = find_median(&mut read);
    figures.plain_read_rate = find_median(&mut plain_read);
    figures.first_layer = Duration::from_secs_f64(find_median(&mut first));
    figures.all_layers = Duration::from_secs_f64(find_median(&mut all));
    Ok(figures)
}

fn find_median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn tier_settings(folder: &Path, bytes: u64) -> DiskSettings {
    let mut settings = DiskSettings::new(folder.to_owned(), bytes.max(1 << 30));
    settings.reserve_free_bytes = 0;
    settings
}

/// The block with this number: roots and their children in turns.
fn bench_name(number: usize) -> BlockName {
    let position = (number % 2) as u32;
    let lineage = number as u128 + 1;
    let parent_lineage = if position == 0 { 0 } else { lineage - 1 };
    BlockName { scope: ScopeId([1; 16]), digest: lineage, lineage, parent_lineage, position }
}

fn bench_draft(number: usize, layers: usize, layer_bytes: usize) -> Result<RecordDraft, AnyError> {
    let layer = LayerShape { form: vec![0; 68], bytes: layer_bytes };
    let meta = RecordMeta { name: bench_name(number), key: Box::new([0; 32]) };
    let shape = RecordShape { meta, tables: Vec::new(), layers: vec![layer; layers] };
    let mut draft = RecordDraft::new(&shape)?;
    for layer in 0..layers {
        if let Some(bytes) = draft.layer_mut(layer) {
            bytes.fill((number + layer) as u8);
        }
    }
    Ok(draft)
}

/// Writes records and waits for their acknowledgements.
fn write_all(
    tier: &DiskTier,
    count: usize,
    make_draft: impl Fn(usize) -> Result<RecordDraft, AnyError>,
) -> Result<(Vec<LiveRecord>, u64), AnyError> {
    let done = Arc::new(Mutex::new(Vec::with_capacity(count)));
    let failed = Arc::new(AtomicUsize::new(0));
    for number in 0..count {
        // A publisher that is faster than the disk waits for room, as a daemon's does.
        loop {
            let (done, failed) = (Arc::clone(&done), Arc::clone(&failed));
            let name = bench_name(number);
            let on_durable = Box::new(move |result: Result<_, _>| match result {
                Ok(location) => done.lock().push(LiveRecord { name, location }),
                Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
            });
            match tier.write_record(make_draft(number)?, on_durable) {
                Ok(()) => break,
                Err(RefusedWrite::QueueFull { .. }) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(refused) => return Err(refused.into()),
            }
        }
    }
    while done.lock().len() + failed.load(Ordering::Relaxed) < count {
        std::thread::sleep(Duration::from_micros(200));
    }
    let records = std::mem::take(&mut *done.lock());
    Ok((records, failed.load(Ordering::Relaxed) as u64))
}

fn measure_publish(
    folder: &Path,
    plan: &BenchPlan,
    figures: &mut BenchFigures,
    rates: &mut Vec<f64>,
) -> Result<Vec<LiveRecord>, AnyError> {
    let bytes = (plan.records * plan.layers * plan.layer_bytes * 2) as u64;
    let settings = tier_settings(&folder.join("tier"), bytes);
    let (tier, _) = DiskTier::open_folder(settings, Arc::new(KeepNothing))?;
    let begin = Instant::now();
    let make_draft = |number| bench_draft(number, plan.layers, plan.layer_bytes);
    let (records, failed) = write_all(&tier, plan.records, make_draft)?;
    let seconds = begin.elapsed().as_secs_f64();
    figures.is_direct = tier.is_direct();
    figures.dropped += failed;
    figures.record_bytes = records.first().map_or(0, |record| record.location.disk_bytes());
    rates.push(figures.record_bytes as f64 * records.len() as f64 / seconds);
    tier.close_tier(Duration::from_secs(10));
    Ok(records)
}

fn open_plain(folder: &Path) -> io::Result<RealFolder> {
    Ok(RealFolder::open_or_make(&folder.join("plain"))?.choose_direct(DirectChoice::Auto))
}

fn measure_plain_write(folder: &Path, plan: &BenchPlan, bytes: u64) -> Result<f64, AnyError> {
    let plain = open_plain(folder)?;
    let mut buffer = AlignedBytes::with_zeros(bytes as usize);
    buffer.fill(7);
    let begin = Instant::now();
    // As segments are: allocated before they are written.
    let file = plain.create_file("peer", bytes * plan.records as u64)?;
    let mut unsynced = 0;
    for index in 0..plan.records as u64 {
        file.write_at(&buffer, index * bytes)?;
        unsynced += bytes;
        if unsynced >= 8 << 20 {
            file.sync_data()?;
            unsynced = 0;
        }
    }
    file.sync_data()?;
    Ok(bytes as f64 * plan.records as f64 / begin.elapsed().as_secs_f64())
}

/// Numbers below `count` in an order without order.
fn shuffle_numbers(count: usize) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..count).collect();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for index in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        numbers.swap(index, (state >> 33) as usize % (index + 1));
    }
    numbers
}

/// Runs `read` for each number once, on several threads; seconds.
fn read_in_threads(
    plan: &BenchPlan,
    read: &(dyn Fn(usize) -> Result<(), AnyError> + Sync),
) -> Result<f64, AnyError> {
    let numbers = shuffle_numbers(plan.records);
    let next = AtomicUsize::new(0);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let run = || -> Result<(), AnyError> {
            while let Some(number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
                read(*number)?;
            }
            Ok(())
        };
        let threads: Vec<_> = (0..plan.threads).map(|_| scope.spawn(run)).collect();
        for thread in threads {
            thread.join().map_err(|_| "a reader panicked")??;
        }
        Ok::<(), AnyError>(())
    })?;
    Ok(begin.elapsed().as_secs_f64())
}

fn measure_reads(
    folder: &Path,
    plan: &BenchPlan,
    records: &[LiveRecord],
    rates: &mut Vec<f64>,
) -> Result<(), AnyError> {
    let bytes = records.iter().map(|record| record.location.disk_bytes()).sum::<u64>();
    let settings = tier_settings(&folder.join("tier"), 2 * bytes);
    let (tier, _) = DiskTier::open_folder(settings, Arc::new(KeepNothing))?;
    let seconds = read_in_threads(plan, &|number| {
        tier.read_record(&records[number].location)?;
        Ok(())
    })?;
    rates.push(bytes as f64 / seconds);
    Ok(())
}

fn measure_plain_read(folder: &Path, plan: &BenchPlan, bytes: u64) -> Result<f64, AnyError> {
    let file = open_plain(folder)?.open_file("peer", OpenPurpose::Read)?;
    let seconds = read_in_threads(plan, &|number| {
        let mut buffer = AlignedBytes::with_zeros(bytes as usize);
        file.read_at(&mut buffer, number as u64 * bytes)?;
        Ok(())
    })?;
    Ok(bytes as f64 * plan.records as f64 / seconds)
}

fn measure_first_layer(folder: &Path, records: &[LiveRecord]) -> Result<BenchFigures, AnyError> {
    const PREFIX: usize = 32;
    let settings = tier_settings(&folder.join("tier"), 0);
    let (tier, _) = DiskTier::open_folder(settings, Arc::new(KeepNothing))?;
    let mut heads = Vec::new();
    for record in records.iter().take(PREFIX) {
        heads.push(tier.read_head(&record.location)?);
    }
    let mut figures = BenchFigures::default();
    let begin = Instant::now();
    for (record, head) in records.iter().zip(&heads) {
        tier.read_layers(&record.location, head, 0..1)?;
    }
    figures.first_layer = begin.elapsed();
    let begin = Instant::now();
    for record in records.iter().take(PREFIX) {
        tier.read_record(&record.location)?;
    }
    figures.all_layers = begin.elapsed();
    Ok(figures)
}

fn measure_recovery(
    folder: &Path,
    plan: &BenchPlan,
    figures: &mut BenchFigures,
) -> Result<(), AnyError> {
    let path = folder.join("small");
    let settings = tier_settings(&path, plan.small_records as u64 * 16_384);
    {
        let (tier, _) = DiskTier::open_folder(settings.clone(), Arc::new(KeepNothing))?;
        let (_, failed) =
            write_all(&tier, plan.small_records, |number| bench_draft(number, 2, 3_000))?;
        figures.dropped += failed;
    }
    let begin = Instant::now();
    let (tier, found) = DiskTier::open_folder(settings, Arc::new(KeepNothing))?;
    figures.recover_time = begin.elapsed();
    figures.recovered = found.counts.live;
    figures.recovered_bytes = tier.read_levels().used_bytes;
    drop(tier);
    let begin = Instant::now();
    let store = OfflineStore::open_folder(&path, OfflineAccess::Exclusive)?;
    let report = store.verify_records();
    figures.full_scan_time = begin.elapsed();
    if report.sound != figures.recovered {
        return Err(format!("{} sound of {}", report.sound, figures.recovered).into());
    }
    fs::remove_dir_all(path)?;
    Ok(())
}
