//! Calibration of the codecs that need it, from queries, keys and values of held-out text.

use crate::assets::Window;
use crate::attention::{Recorder, Recording};
use crate::config::ModelConfig;
use crate::local::LocalAttention;
use crate::model::Model;
use anyhow::{Context, Result};
use kvd_codec::{CodecSpec, Samples};
use kvd_core::{Geometry, LayerIndex, Side};

/// Runs `windows` without kvd and collects queries, and keys and values as a cache keeps
/// them.
pub(crate) async fn samples(
    model: &Model,
    windows: &[Window],
    geometry: &Geometry,
    chunk: usize,
    mut on_step: impl FnMut(usize),
) -> Result<Samples> {
    let mut samples = Samples::new(geometry);
    for window in windows {
        let layers = record(model, window, chunk, &mut on_step).await?;
        push(&mut samples, model.config(), &layers)?;
    }
    Ok(samples)
}

/// Queries, keys and values of every layer over `window`.
async fn record(
    model: &Model,
    window: &Window,
    chunk: usize,
    mut on_step: impl FnMut(usize),
) -> Result<Vec<Recording>> {
    let layers = model.config().num_hidden_layers;
    let local = LocalAttention::new(model.config().heads(), layers);
    let mut recorder = Recorder::new(local, layers);
    let mut position = 0;
    for tokens in window.inputs.chunks(chunk) {
        model.forward(tokens, position, &mut recorder).await?;
        position += tokens.len();
        on_step(tokens.len());
    }
    Ok(recorder.into_layers())
}

fn push(samples: &mut Samples, config: &ModelConfig, layers: &[Recording]) -> Result<()> {
    let heads = config.heads();
    for (layer, recording) in layers.iter().enumerate() {
        let index = LayerIndex(u32::try_from(layer)?);
        for query_head in 0..heads.query {
            let rows = head_rows(&recording.q, query_head, heads.query, heads.dim);
            samples.push_queries(index, query_head / heads.group(), &rows)?;
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
fn head_rows(values: &[f32], head: usize, heads: usize, dim: usize) -> Vec<f32> {
    values.chunks(dim).skip(head).step_by(heads).flatten().copied().collect()
}

/// Fits `spec` to the samples.
pub(crate) fn fit(
    geometry: &Geometry,
    spec: &CodecSpec,
    samples: &Samples,
    seed: u64,
) -> Result<Vec<u8>> {
    let fitted = kvd_codec::fit(geometry, spec, samples, seed, &mut |_| {});
    Ok(fitted.context("calibration")?.to_bytes())
}
