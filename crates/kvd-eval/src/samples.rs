//! Rows for calibrations: queries, keys and values of held-out text.

use anyhow::Result;
use kvd_core::{Geometry, LayerIndex, Side};
use kvd_engine::{
    AttentionRecorder, HeadCounts, LanguageModel, LayerRecording, LocalAttention, ModelConfig,
    TokenWindow,
};
use kvd_fit::Samples;

/// Tokens per step of a calibration window. Without kvd the step changes nothing but the time
/// it takes.
const CHUNK: usize = 256;

/// Memory that the rows of a calibration may take; a fit takes about as much again.
const BYTES_MAX: usize = 4 << 30;

/// How many of the `wanted` windows of `tokens` tokens have room for their rows, at least one. Says
/// so where it is not all: large models have large rows, and need fewer of them.
pub(crate) fn windows_with_room(config: &ModelConfig, tokens: usize, wanted: usize) -> usize {
    let heads = config.attention_heads();
    let per_token = config.num_hidden_layers * (heads.query + 2 * heads.kv) * heads.dim;
    // Shapes are a config's until the weights are read: nothing yet says that they can be.
    let window = per_token.saturating_mul(tokens).saturating_mul(size_of::<f32>()).max(1);
    let room = (BYTES_MAX / window).max(1);
    if room < wanted {
        tracing::warn!(
            "calibrating on {room} windows of {tokens} tokens instead of {wanted}: more rows of \
             this model would take over {} GiB",
            BYTES_MAX >> 30
        );
    }
    wanted.min(room)
}

/// Runs `windows` without kvd and collects queries, and keys and values as a cache keeps
/// them.
pub(crate) async fn collect_samples(
    model: &LanguageModel,
    windows: &[TokenWindow],
    geometry: &Geometry,
    mut on_step: impl FnMut(usize),
) -> Result<Samples> {
    let mut samples = Samples::new(geometry);
    for window in windows {
        let layers = record_window(model, window, &mut on_step).await?;
        push(&mut samples, model.config().attention_heads(), &layers)?;
    }
    Ok(samples)
}

/// Queries, keys and values of every layer over `window`.
pub(crate) async fn record_window(
    model: &LanguageModel,
    window: &TokenWindow,
    on_step: &mut dyn FnMut(usize),
) -> Result<Vec<LayerRecording>> {
    let layers = model.config().num_hidden_layers;
    let local = LocalAttention::new(model.config().attention_heads(), layers);
    let mut recorder = AttentionRecorder::new(local, layers);
    let mut position = 0;
    for tokens in window.inputs.chunks(CHUNK) {
        model.forward_tokens(tokens, position, &mut recorder).await?;
        position += tokens.len();
        on_step(tokens.len());
    }
    Ok(recorder.into_layers())
}

/// Appends recorded rows.
pub(crate) fn push(
    samples: &mut Samples,
    heads: HeadCounts,
    layers: &[LayerRecording],
) -> Result<()> {
    for (layer, recording) in layers.iter().enumerate() {
        let index = LayerIndex(u32::try_from(layer)?);
        for query_head in 0..heads.query {
            let rows = head_rows(&recording.q, query_head, heads.query, heads.dim);
            samples.push_queries(index, query_head / heads.query_group(), &rows)?;
        }
        for (side, values) in [(Side::Key, &recording.k), (Side::Value, &recording.v)] {
            for head in 0..heads.kv {
                let rows = head_rows(values, head, heads.kv, heads.dim);
                samples.push(index, side, head, &rows)?;
            }
        }
    }
    Ok(())
}

/// The rows of one of `heads` heads of `[tokens, heads, dim]`.
pub(crate) fn head_rows(values: &[f32], head: usize, heads: usize, dim: usize) -> Vec<f32> {
    values.chunks(dim).skip(head).step_by(heads).flatten().copied().collect()
}
