//! The codecs under test, and their calibration.

use crate::TestRng;
use crate::budget::ErrorPrecision;
use crate::rows::{LayerRows, ModelShape};
use bytes::Bytes;
use kvd_codec::{Quantizer, SideSpec};
use kvd_core::{LayerIndex, Side};
use kvd_fit::Samples;

/// One preset of each kind: floats kept, floats narrowed, entropy-coded, vector-quantized.
pub const PRESETS: [&str; 4] = ["raw", "fp8", "kvcomp", "vecinfer-2"];

/// Codec texts of these kinds with a window at both ends that is neither 0 nor a whole number of
/// blocks.
#[must_use]
pub fn with_windows(preset: &str, sink: u32, recent: u32) -> String {
    let mut spec = kvd_codec::find_preset(preset).expect("a preset");
    (spec.sink, spec.recent) = (sink, recent);
    spec.to_string()
}

/// By what answers over `codec` are judged: where a side has codes that the daemon multiplies as
/// integers, queries and weights are rounded.
///
/// # Panics
/// When the codec is unknown.
#[must_use]
pub fn codec_precision(codec: &str) -> ErrorPrecision {
    let spec = kvd_codec::resolve_spec(codec).expect("a codec");
    let integers = |side: &SideSpec| {
        use Quantizer::{Grid, Uniform, Vq};
        matches!(side.quantizer, Uniform { .. } | Vq(_) | Grid { .. })
    };
    let any = integers(&spec.key) || integers(&spec.value);
    if any { ErrorPrecision::Half } else { ErrorPrecision::Single }
}

/// The calibration of `codec` on `rows` (one set for each layer); empty when it learns nothing.
///
/// # Panics
/// When the codec is unknown or cannot be fitted.
#[must_use]
pub fn fit_calibration(codec: &str, shape: &ModelShape, rows: &[LayerRows], seed: u64) -> Bytes {
    let spec = kvd_codec::resolve_spec(codec).expect("a codec");
    if !spec.needs_calibration() {
        return Bytes::new();
    }
    let geometry = shape.geometry();
    let mut samples = Samples::new(&geometry);
    for (layer, rows) in rows.iter().enumerate() {
        for (side, values) in [(Side::Key, &rows.k), (Side::Value, &rows.v)] {
            let dim = geometry.head_dim(side);
            for head in 0..shape.kv_heads as usize {
                let of_head: Vec<f32> = values
                    .chunks(dim * shape.kv_heads as usize)
                    .flat_map(|token| &token[head * dim..(head + 1) * dim])
                    .copied()
                    .collect();
                let pushed = samples.push(LayerIndex(layer as u32), side, head, &of_head);
                pushed.expect("rows of the geometry");
            }
        }
    }
    let fitted = kvd_fit::fit_calibration(&geometry, &spec, &samples, seed, &mut |_| {});
    fitted.expect("enough samples").to_bytes().into()
}

/// The calibration of `codec` for rows as [`LayerRows::random`] makes them.
#[must_use]
pub fn calibration_for_random(codec: &str, shape: &ModelShape) -> Bytes {
    let mut rng = TestRng::new(1);
    let rows: Vec<LayerRows> =
        (0..shape.layers).map(|_| LayerRows::random_rows(shape, 64, &mut rng)).collect();
    fit_calibration(codec, shape, &rows, 1)
}
