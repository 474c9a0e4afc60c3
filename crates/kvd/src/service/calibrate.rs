//! `CalibrateModel`: fits codecs to what sequences of a model hold that keeps rows exactly.
//!
//! Rows come from the device piece by piece, as a load's; the fit runs on a thread of its own, one
//! at a time in a daemon. A caller that leaves does not end a fit that has begun.

use super::{CallContext, LoadPiece, RegisteredModel, Service, ServiceError};
use kvd_codec::{Calibration, CodecSpec, FloatFormat, Quantizer};
use kvd_core::{DType, ErrorCode, Geometry, LayerIndex, Side};
use kvd_fit::{SampleShortage, Samples, fit_calibration};
use kvd_proto::domain::{CalibrationOrder, LoadRange};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// When another calibration may have ended.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// A calibration that was made.
pub struct CalibrationReply {
    /// The artefact.
    pub calibration: Vec<u8>,
    /// Tokens that it was fitted on.
    pub tokens: u64,
    /// Queries of the KV head that has the fewest.
    pub queries_per_head: u64,
}

/// Codecs, and the rows that they are fitted to.
struct FitInput {
    codecs: Vec<CodecSpec>,
    samples: Samples,
    seed: u64,
    /// The one right to fit, which stays with the work.
    _turn: OwnedSemaphorePermit,
}

impl Service {
    /// Fits codecs to what sequences of a model hold.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a model whose rows are not exact, for codecs that need no calibration
    /// and for rows that are too few; `LIMIT_EXCEEDED`; `QUEUE_FULL` while another is being made.
    pub async fn calibrate_model(
        &self,
        call: &CallContext,
        order: CalibrationOrder,
    ) -> Result<CalibrationReply, ServiceError> {
        let model = self.find_model(call, order.model)?;
        check_exact_rows(&model)?;
        let codecs = order.codecs.iter().map(|codec| fitted_spec(codec));
        let codecs = codecs.collect::<Result<Vec<_>, _>>()?;
        let ranges = self.sampled_ranges(call, &model, &order)?;
        let turn = self.calibrating.clone().try_acquire_owned().map_err(|_| {
            let message = "another calibration is being made; one runs at a time";
            ServiceError::new(ErrorCode::QueueFull, message).retry_after(RETRY_AFTER)
        })?;
        let tokens = ranges.iter().map(|range| u64::from(range.end)).sum();
        let mut samples = Samples::new(&model.shape.geometry);
        for range in &ranges {
            self.sample_sequence(call, range, &mut samples).await?;
        }
        push_queries(&model, &mut samples)?;
        for (codec, name) in codecs.iter().zip(&order.codecs) {
            let lacking = |shortage: SampleShortage| {
                let message = format!(
                    "codec {name}: {shortage}; store more tokens, and attend them, in sequences \
                     of this model"
                );
                ServiceError::new(ErrorCode::InvalidArgument, message)
            };
            samples.check_counts(codec).map_err(lacking)?;
            samples.check_zeros().map_err(lacking)?;
        }
        let queries_per_head = samples.queries_per_head() as u64;
        let input = FitInput { codecs, samples, seed: order.seed, _turn: turn };
        let calibration = fit_apart(input).await?;
        self.check_message_size(calibration.len() as u64, "fewer codecs")?;
        Ok(CalibrationReply { calibration, tokens, queries_per_head })
    }

    /// Ranges that are taken of each sequence, of one layer.
    fn sampled_ranges(
        &self,
        call: &CallContext,
        model: &RegisteredModel,
        order: &CalibrationOrder,
    ) -> Result<Vec<LoadRange>, ServiceError> {
        let mut ranges = Vec::new();
        let mut tokens = 0;
        for &sequence in &order.sequences {
            let store = &self.shard_of(sequence)?.store;
            if store.model_of(&call.namespace, sequence)?.id != model.shape.id {
                let message = format!("sequence {} is of another model", sequence.0);
                return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
            }
            let stored = store.describe_sequence(&call.namespace, sequence)?.length;
            let end = stored.min(order.tokens_max.unwrap_or(u32::MAX));
            if end == 0 {
                let message = format!("sequence {} has no tokens on every layer", sequence.0);
                return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
            }
            tokens += u64::from(end);
            let (layer, dtype) = (LayerIndex(0), Some(DType::F32));
            ranges.push(LoadRange { sequence, layer, start: 0, end, dtype });
        }
        let geometry = &model.shape.geometry;
        let values = geometry.values_per_token() * u64::from(geometry.layers);
        let token_bytes = values * DType::F32.size_bytes() as u64;
        let (bytes, max) =
            (tokens.saturating_mul(token_bytes), self.config.calibration_rows_bytes_max);
        if bytes > max {
            let message = format!(
                "{tokens} tokens have {bytes} bytes of rows, over \
                 limits.calibration_rows_bytes_max = {max}: set tokens_max so that {} are left",
                max / token_bytes
            );
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        Ok(ranges)
    }

    /// Reads the rows of all layers of a sequence.
    async fn sample_sequence(
        &self,
        call: &CallContext,
        of_layer: &LoadRange,
        samples: &mut Samples,
    ) -> Result<(), ServiceError> {
        let geometry = samples.geometry().clone();
        for layer in (0..geometry.layers).map(LayerIndex) {
            for piece in self.load_pieces(call, &LoadRange { layer, ..*of_layer })? {
                let rows = self.load_piece(call, &piece).await?;
                push_rows(samples, layer, &rows)?;
            }
        }
        Ok(())
    }
}

/// Refuses models whose codec gives other rows back than it was given.
fn check_exact_rows(model: &RegisteredModel) -> Result<(), ServiceError> {
    let is_exact = |side: Side| {
        model.spec.side_specs(side).iter().all(|of_side| {
            of_side.transforms.is_empty()
                && of_side.quantizer == Quantizer::Float(FloatFormat::Native)
        })
    };
    if Side::BOTH.into_iter().all(is_exact) {
        return Ok(());
    }
    let message = format!(
        "model {} keeps rows as {}: calibrate from one that is registered with codec raw",
        model.name, model.spec
    );
    Err(ServiceError::new(ErrorCode::InvalidArgument, message))
}

/// A codec that takes something from samples.
fn fitted_spec(codec: &str) -> Result<CodecSpec, ServiceError> {
    let spec = kvd_codec::resolve_spec(codec)?;
    if spec.needs_calibration() {
        return Ok(spec);
    }
    let message = format!("codec {codec} needs no calibration: register it as it is");
    Err(ServiceError::new(ErrorCode::InvalidArgument, message))
}

fn push_rows(
    samples: &mut Samples,
    layer: LayerIndex,
    piece: &LoadPiece,
) -> Result<(), ServiceError> {
    let geometry = samples.geometry().clone();
    for (side, bytes) in [(Side::Key, &piece.k), (Side::Value, &piece.v)] {
        let values = widen_bytes(bytes, DType::F32);
        for head in 0..geometry.kv_heads as usize {
            let heads = geometry.kv_heads as usize;
            let rows = head_rows(&values, HeadRows { head, heads, dim: geometry.head_dim(side) });
            samples.push(layer, side, head, &rows)?;
        }
    }
    Ok(())
}

/// The model's sample of queries, where every layer has one.
fn push_queries(model: &Arc<RegisteredModel>, samples: &mut Samples) -> Result<(), ServiceError> {
    let Some(sample) = &model.queries else { return Ok(()) };
    let geometry: Geometry = samples.geometry().clone();
    let layers = (0..geometry.layers).map(LayerIndex);
    let sampled: Vec<_> = layers.map(|layer| sample.queries_of_layer(layer)).collect();
    let heads = sampled.first().map_or(0, |first| first.q_heads);
    // Rows of all layers, or a fit could not weigh them all.
    if heads == 0 || sampled.iter().any(|layer| layer.q_heads != heads) {
        return Ok(());
    }
    let (heads, dim) = (heads as usize, geometry.head_dim(Side::Key));
    let group = heads / geometry.kv_heads as usize;
    for (layer, sampled) in (0..).map(LayerIndex).zip(&sampled) {
        let values = widen_bytes(&sampled.q, sampled.dtype);
        for head in 0..heads {
            let rows = head_rows(&values, HeadRows { head, heads, dim });
            samples.push_queries(layer, head / group, &rows)?;
        }
    }
    Ok(())
}

fn widen_bytes(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.size_bytes()];
    dtype.widen_values(bytes, &mut values);
    values
}

/// One of the heads of `[tokens, heads, dim]`.
#[derive(Clone, Copy)]
struct HeadRows {
    head: usize,
    heads: usize,
    dim: usize,
}

fn head_rows(values: &[f32], of: HeadRows) -> Vec<f32> {
    values.chunks(of.dim).skip(of.head).step_by(of.heads).flatten().copied().collect()
}

/// Fits on a thread that nobody waits for at the daemon's end: a fit takes longer than a drain.
async fn fit_apart(input: FitInput) -> Result<Vec<u8>, ServiceError> {
    let (answer, fitted) = oneshot::channel();
    let work = move || {
        let fitted = fit_codecs(&input);
        // Who has the answer may ask for the next one.
        drop(input);
        // The caller may have left.
        drop(answer.send(fitted));
    };
    let failed = |reason: &dyn std::fmt::Display| {
        let message = format!("the calibration could not be made: {reason}");
        ServiceError::new(ErrorCode::Internal, message)
    };
    let thread = std::thread::Builder::new().name("kvd-calibrate".to_owned());
    thread.spawn(work).map_err(|error| failed(&error))?;
    fitted.await.unwrap_or_else(|error| Err(failed(&error)))
}

fn fit_codecs(input: &FitInput) -> Result<Vec<u8>, ServiceError> {
    let (geometry, samples) = (input.samples.geometry(), &input.samples);
    let mut all: Option<Calibration> = None;
    for codec in &input.codecs {
        let fitted = fit_calibration(geometry, codec, samples, input.seed, &mut |_| {})?;
        match &mut all {
            None => all = Some(fitted),
            Some(all) => all.merge_parts(fitted)?,
        }
    }
    Ok(all.map(|all| all.to_bytes()).unwrap_or_default())
}
