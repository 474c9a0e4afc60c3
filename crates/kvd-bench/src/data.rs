//! Synthetic keys, values and queries, and a backend filled with their pages.

use crate::{BenchError, HeadShape, limits};
use bytes::Bytes;
use kvd_codec::{Calibration, CodecSpec, ModelCodec};
use kvd_compute::affinity;
use kvd_compute::{
    AppendSteps, CpuBackend, CpuOptions, EncodeSource, EncodedPages, IncomingRows, InstructionSet,
    PageBackend, Precision, RawTarget, Source,
};
use kvd_core::{DType, Extent, Geometry, LayerIndex, ModelId, Side};
use kvd_fit::{Samples, fit_calibration};
use std::sync::Arc;

pub(crate) const MODEL: ModelId = ModelId(1);
pub(crate) const LAYER: LayerIndex = LayerIndex(0);
/// Blocks that are encoded; their pages are then repeated.
const DISTINCT_BLOCKS: usize = 4;
/// Rows per head that a calibration is fitted on.
const FIT_ROWS: usize = 2048;

/// Roughly normal values of unit deviation, the same in every run.
pub(crate) struct NormalValues(u64);

impl NormalValues {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn draw_value(&mut self) -> f32 {
        let mut sum = 0.0;
        for _ in 0..4 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            sum += (self.0 >> 40) as f32 / (1 << 24) as f32 - 0.5;
        }
        // Four uniform values have a variance of one third.
        sum * 3f32.sqrt()
    }

    pub(crate) fn draw_bytes(&mut self, count: usize, gain: f32) -> Bytes {
        let values: Vec<f32> = (0..count).map(|_| self.draw_value() * gain).collect();
        let mut bytes = vec![0; count * DType::F16.size_bytes()];
        DType::F16.narrow_values(&values, &mut bytes);
        bytes.into()
    }
}

/// K and V of `tokens` tokens.
pub(crate) fn draw_rows(geometry: &Geometry, tokens: u32, seed: u64) -> IncomingRows {
    let mut normal = NormalValues::new(seed);
    let count = |side| tokens as usize * geometry.kv_heads as usize * geometry.head_dim(side);
    let k = normal.draw_bytes(count(Side::Key), 1.0);
    let v = normal.draw_bytes(count(Side::Value), 1.0);
    IncomingRows { tokens, k, v }
}

/// A codec bound to a geometry, fitted on normal rows where it needs that.
///
/// # Errors
/// When there is no such codec, or it is not for that geometry.
pub fn fit_codec(geometry: &Geometry, name: &str) -> Result<ModelCodec, BenchError> {
    let spec = kvd_codec::resolve_spec(name).map_err(BenchError::codec_error(name))?;
    bind_codec(geometry, spec, name)
}

/// A calibration as a model is registered with; nothing for codecs that need none.
#[cfg(feature = "clients")]
pub(crate) fn fit_calibration_bytes(
    geometry: &Geometry,
    name: &str,
) -> Result<Vec<u8>, BenchError> {
    let spec = kvd_codec::resolve_spec(name).map_err(BenchError::codec_error(name))?;
    if !spec.needs_calibration() {
        return Ok(Vec::new());
    }
    let calibration = calibrate_codec(geometry, &spec).map_err(BenchError::codec_error(name))?;
    Ok(calibration.to_bytes())
}

pub(crate) fn bind_codec(
    geometry: &Geometry,
    spec: CodecSpec,
    name: &str,
) -> Result<ModelCodec, BenchError> {
    let calibration = if spec.needs_calibration() {
        Some(calibrate_codec(geometry, &spec).map_err(BenchError::codec_error(name))?)
    } else {
        None
    };
    ModelCodec::new(geometry.clone(), spec, calibration.as_ref())
        .map_err(BenchError::codec_error(name))
}

fn calibrate_codec(
    geometry: &Geometry,
    spec: &CodecSpec,
) -> Result<Calibration, kvd_codec::CalibrationError> {
    let mut samples = Samples::new(geometry);
    let mut normal = NormalValues::new(7);
    let mut draw = |dim| (0..FIT_ROWS * dim).map(|_| normal.draw_value()).collect::<Vec<_>>();
    for head in 0..geometry.kv_heads as usize {
        for side in Side::BOTH {
            samples.push(LAYER, side, head, &draw(geometry.head_dim(side)))?;
        }
        samples.push_queries(LAYER, head, &draw(geometry.head_dim(Side::Key)))?;
    }
    fit_calibration(geometry, spec, &samples, 1, &mut |_| {})
}

/// How a backend is to be filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FillOptions {
    pub(crate) shape: HeadShape,
    pub(crate) block_tokens: u32,
    pub(crate) threads: usize,
    pub(crate) instruction_set: Option<InstructionSet>,
    pub(crate) precision: Precision,
    /// Fewest bytes of pages.
    pub(crate) buffer_bytes: u64,
    /// Fewest blocks.
    pub(crate) blocks: usize,
}

/// A backend whose arena is full of one codec's pages.
pub(crate) struct FilledBackend {
    pub(crate) backend: CpuBackend,
    pub(crate) geometry: Geometry,
    /// The blocks, in the order of the arena.
    pub(crate) blocks: Vec<Source>,
    pub(crate) block_bytes: f64,
}

impl FilledBackend {
    /// Encodes a few blocks and repeats them over the arena.
    pub(crate) fn new(name: &str, fill: FillOptions) -> Result<Self, BenchError> {
        let geometry = fill.shape.layer_geometry(fill.block_tokens);
        let raw = geometry.raw_layout(fill.block_tokens).size_bytes();
        limits::check_memory(name, DISTINCT_BLOCKS as u64, 4 * raw)?;
        let codec = fit_codec(&geometry, name)?;
        let pages = encode_blocks(&geometry, codec.clone(), name)?;
        let mean = pages.iter().map(|page| page.bytes.len()).sum::<usize>() / pages.len();
        let count = fill
            .blocks
            .max(usize::try_from(fill.buffer_bytes.div_ceil(mean as u64)).unwrap_or(usize::MAX));
        // A block begins on a granule of the pool.
        let stride = |page: &EncodedPages| page.bytes.len().next_multiple_of(64) as u64;
        let largest = pages.iter().map(stride).max().unwrap_or(0);
        limits::check_memory(name, count as u64, largest)?;
        let bytes = (0..count).map(|i| stride(&pages[i % pages.len()])).sum();
        let mut backend = open_backend(bytes, fill, name)?;
        backend.register(MODEL, codec);
        // Tables are trained on what is encoded: let this backend have the same ones.
        train_tables(&mut backend, &geometry, name)?;
        let (mut blocks, mut offset) = (Vec::with_capacity(count), 0);
        for i in 0..count {
            let page = &pages[i % pages.len()];
            let extent = Extent { offset, len: page.bytes.len() as u64 };
            backend.move_pages(page, extent);
            blocks.push(Source::Pages { extent, ends: Arc::clone(&page.page_ends), first_row: 0 });
            offset += stride(page);
        }
        Ok(Self { backend, geometry, blocks, block_bytes: mean as f64 })
    }
}

fn open_backend(bytes: u64, fill: FillOptions, name: &str) -> Result<CpuBackend, BenchError> {
    let geometry = fill.shape.layer_geometry(fill.block_tokens);
    // Room for the raw slots that tables are trained from.
    let slots = DISTINCT_BLOCKS as u64 * geometry.raw_layout(fill.block_tokens).size_bytes();
    let options =
        CpuOptions { arena_bytes: bytes.max(slots), prefault: true, threads: fill.threads };
    let backend = CpuBackend::starting(options, |thread| {
        if let Err(error) = affinity::keep_on_one(&affinity::allowed_cores(), thread) {
            tracing::warn!(thread, %error, "compute thread is not kept on a core");
        }
    });
    let mut backend = backend.map_err(limits::open_error(name))?;
    backend.set_precision(fill.precision);
    if let Some(set) = fill.instruction_set {
        backend.limit(set).map_err(BenchError::failed_step(name))?;
    }
    Ok(backend)
}

/// Writes the distinct blocks into raw slots at the start of the arena.
fn write_blocks(
    backend: &mut CpuBackend,
    geometry: &Geometry,
) -> Result<Vec<EncodeSource>, String> {
    let tokens = geometry.block_tokens;
    let len = geometry.raw_layout(tokens).size_bytes();
    let mut sources = Vec::new();
    for block in 0..DISTINCT_BLOCKS as u64 {
        let extent = Extent { offset: block * len, len };
        let to = RawTarget { extent, capacity_rows: tokens, first_row: 0 };
        let rows = draw_rows(geometry, tokens, 100 + block);
        backend.write(MODEL, &rows, 0, tokens, to).map_err(|error| error.to_string())?;
        sources.push(EncodeSource { extent, capacity_rows: tokens, first_row: 0, rows: tokens });
    }
    Ok(sources)
}

fn encode_blocks(
    geometry: &Geometry,
    codec: ModelCodec,
    name: &str,
) -> Result<Vec<EncodedPages>, BenchError> {
    let arena_bytes =
        DISTINCT_BLOCKS as u64 * geometry.raw_layout(geometry.block_tokens).size_bytes();
    let options = CpuOptions { arena_bytes, prefault: false, threads: 1 };
    let mut backend = CpuBackend::new(options).map_err(limits::open_error(name))?;
    backend.register(MODEL, codec);
    let sources = write_blocks(&mut backend, geometry).map_err(BenchError::failed_step(name))?;
    let pages = backend.encode(MODEL, LAYER, &sources).map_err(BenchError::failed_step(name))?;
    pages.into_iter().collect::<Result<_, _>>().map_err(BenchError::failed_step(name))
}

fn train_tables(
    backend: &mut CpuBackend,
    geometry: &Geometry,
    name: &str,
) -> Result<(), BenchError> {
    let sources = write_blocks(backend, geometry).map_err(BenchError::failed_step(name))?;
    backend.encode(MODEL, LAYER, &sources).map_err(BenchError::failed_step(name))?;
    Ok(())
}
