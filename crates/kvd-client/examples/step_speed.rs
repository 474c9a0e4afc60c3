//! How long a step of all layers takes through a region, beside one call a layer, and how fast a
//! prefix comes back: `step_speed REGION_SOCKET DAEMON_PID [CODEC...]`, over a daemon that serves
//! there. Wall times tell of a quiet machine alone, so processor times stand beside them.
#![expect(clippy::print_stdout, reason = "its figures are for a person to read")]

use kvd_client::{
    ClientError, DType, Geometry, LayerIndex, LoadStep, ModelSpec, RegionClient, RegionOptions,
    RegionSlice, RopePairing, RowLayout, SequenceId, StepPart, StoreChunk, StoreStep,
};
use std::time::{Duration, Instant};

/// Layers, KV heads and channels of an 8B model, in f16.
const GEOMETRY: Geometry = Geometry {
    layers: 32,
    kv_heads: 8,
    head_dim_k: 128,
    head_dim_v: 128,
    block_tokens: 64,
    dtype: DType::F16,
    rope_pairing: RopePairing::Half,
};
/// Bytes of K, or of V, of one token of one layer.
const TOKEN_BYTES: u64 = 8 * 128 * 2;
const PREFIX_TOKENS: u32 = 1024;
const STEP_TOKENS: u32 = 64;
const ROUNDS: usize = 9;

/// Rows of one step, and the places of its calls.
const ROWS_BYTES: u64 = 2 * 32 * PREFIX_TOKENS as u64 * TOKEN_BYTES;
const DONE: u64 = ROWS_BYTES;
const ROOM: RegionSlice = RegionSlice { offset: ROWS_BYTES + 256, bytes: 1 << 20 };

type SpeedError = Box<dyn std::error::Error>;

fn main() -> Result<(), SpeedError> {
    let mut words = std::env::args().skip(1);
    let path = words.next().ok_or("step_speed REGION_SOCKET DAEMON_PID [CODEC...]")?;
    let daemon: u32 = words.next().ok_or("the daemon's process, by number")?.parse()?;
    let mut codecs: Vec<String> = words.collect();
    if codecs.is_empty() {
        codecs = ["raw", "kivi-4"].map(str::to_owned).to_vec();
    }
    let bytes = ROOM.offset + ROOM.bytes;
    let region = RegionClient::open_region(path, &RegionOptions::default().with_bytes(bytes))?;
    fill_with_noise(&region)?;
    println!("medians (bests): wall ms, processor ms of both sides");
    for codec in codecs {
        let spec = ModelSpec {
            name: format!("speed/{codec}"),
            geometry: GEOMETRY,
            codec: codec.clone(),
            calibration: bytes::Bytes::new(),
        };
        let calls = region.control_calls(DONE, ROOM);
        let model = calls.register_model(spec)?.model;
        let sequence = calls.open_sequence(model, None)?;
        let (mut by_layer, mut by_step) = (Vec::new(), Vec::new());
        let mut start = 0;
        // In turns, so that both meet the same machine.
        for _ in 0..ROUNDS {
            by_layer.push(measure_call(daemon, || store_layers(&region, sequence, start))?);
            start += STEP_TOKENS;
            let parts = vec![layers_of(sequence, start, STEP_TOKENS)];
            let step = StoreStep { model, parts, memory: bytes::Bytes::new() };
            by_step.push(measure_call(daemon, || calls.store_step(step).map(drop))?);
            start += STEP_TOKENS;
        }
        let parts = vec![layers_of(sequence, 0, PREFIX_TOKENS)];
        let load = LoadStep { model, parts, dtype: None, memory_bytes: 0 };
        let mut loads = Vec::new();
        for _ in 0..ROUNDS {
            loads.push(measure_call(daemon, || calls.load_step(load.clone()).map(drop))?);
        }
        println!("{codec}, store of {STEP_TOKENS} tokens of 32 layers");
        println!("  a call a layer   {}", describe_times(&by_layer));
        println!("  one step         {}", describe_times(&by_step));
        println!("{codec}, load of {PREFIX_TOKENS} tokens, {} MB", ROWS_BYTES / 1_000_000);
        println!("  one step         {}", describe_times(&loads));
        calls.close_sequence(sequence)?;
        let request = kvd_proto::v1::UnregisterModelRequest { model_id: model.0 };
        calls.call_rpc::<kvd_proto::v1::UnregisterModelResponse>("UnregisterModel", &request)?;
    }
    Ok(())
}

fn fill_with_noise(region: &RegionClient) -> Result<(), SpeedError> {
    let mut bits = 0x2545_F491_4F6C_DD1Du64;
    let mut piece = vec![0; 1 << 20];
    for offset in (0..ROWS_BYTES).step_by(piece.len()) {
        for value in piece.as_chunks_mut::<2>().0 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Between 1 and 2, either sign.
            let value_bits = 0x3C00 | (bits >> 54) as u16 | (bits >> 32 & 0x8000) as u16;
            *value = value_bits.to_le_bytes();
        }
        region.memory().write_bytes(offset, &piece)?;
    }
    Ok(())
}

/// Dense rows at the region's begin, K before V.
fn layers_of(sequence: SequenceId, start: u32, tokens: u32) -> StepPart {
    let side = 32 * u64::from(tokens) * TOKEN_BYTES;
    let (first_layer, layers) = (LayerIndex(0), None);
    let (k, v) = (RowLayout::from_offset(0), RowLayout::from_offset(side));
    StepPart { sequence, start, tokens, first_layer, layers, k, v }
}

/// One call for each layer, one after another, as a client does that waits for each.
fn store_layers(
    region: &RegionClient,
    sequence: SequenceId,
    start: u32,
) -> Result<(), ClientError> {
    let bytes = u64::from(STEP_TOKENS) * TOKEN_BYTES;
    for layer in 0..32 {
        let side = 32 * bytes;
        let k = RegionSlice { offset: u64::from(layer) * bytes, bytes };
        let v = RegionSlice { offset: side + u64::from(layer) * bytes, bytes };
        let (layer, tokens, nothing) = (LayerIndex(layer), STEP_TOKENS, bytes::Bytes::new());
        let chunk = StoreChunk { sequence, layer, start, tokens, k: nothing.clone(), v: nothing };
        region.send_store(chunk, DONE, [k, v])?;
        region.wait_call(DONE)?;
    }
    Ok(())
}

/// Times of one call.
#[derive(Clone, Copy)]
struct CallTimes {
    wall: Duration,
    /// Processor time of this process and the daemon.
    processor: Duration,
}

fn measure_call(
    daemon: u32,
    call: impl FnOnce() -> Result<(), ClientError>,
) -> Result<CallTimes, SpeedError> {
    let both = || -> Result<u64, SpeedError> {
        Ok(processor_ns(daemon)? + processor_ns(std::process::id())?)
    };
    let (began, before) = (Instant::now(), both()?);
    call()?;
    let wall = began.elapsed();
    Ok(CallTimes { wall, processor: Duration::from_nanos(both()? - before) })
}

/// Processor time of all threads of a process so far, nanoseconds.
fn processor_ns(process: u32) -> Result<u64, SpeedError> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        // A thread may have ended meanwhile.
        let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else { continue };
        sum += text.split(' ').next().unwrap_or_default().parse::<u64>()?;
    }
    Ok(sum)
}

/// Medians and bests.
fn describe_times(times: &[CallTimes]) -> String {
    let sorted = |time: fn(&CallTimes) -> Duration| {
        let mut all: Vec<f64> = times.iter().map(|of| time(of).as_secs_f64() * 1e3).collect();
        all.sort_by(f64::total_cmp);
        format!("{:8.2} ({:7.2})", all[all.len() / 2], all[0])
    };
    format!("{}  {}", sorted(|of| of.wall), sorted(|of| of.processor))
}
