//! A sample of the queries that a model is asked, from which a running daemon can be calibrated:
//! codecs with `qpca` weigh keys as queries see them.
//!
//! Only models whose keys are kept exactly have one, because only theirs are calibrated from. It is
//! bounded, and every query token has the same chance to be in it however many there were.

use super::{Call, Service, ServiceError};
use crate::config::Config;
use kvd_codec::{CodecSpec, FloatFormat, Quantizer};
use kvd_core::{DType, ErrorCode, Geometry, LayerIndex, ModelId, Side};
use kvd_proto::domain::{AttendBatch, SampledQueries};
use parking_lot::Mutex;

/// Query tokens of a layer at most: more tell little about where queries look.
const TOKENS_MAX: usize = 1024;

/// The sample of one model.
pub(super) struct QuerySample {
    geometry: Geometry,
    bytes_per_layer: usize,
    layers: Vec<Mutex<Reservoir>>,
}

#[derive(Default)]
struct Reservoir {
    q_heads: u32,
    /// Calls so far, each of which offers one of its query tokens.
    seen: u64,
    /// `[tokens, q_heads, head_dim_k]` in the model's dtype.
    rows: Vec<u8>,
}

impl Reservoir {
    /// Whether batches like this one are sampled.
    fn takes(&self, room: usize, batch: &AttendBatch) -> bool {
        room > 0 && batch.rows() > 0 && (self.seen == 0 || self.q_heads == batch.q_heads)
    }

    /// Where a token of the next batch goes, and what decides which; none when none is kept.
    fn draw(&self, (row_bytes, room): (usize, usize), batch: &AttendBatch) -> Option<(usize, u64)> {
        let drawn = splitmix(self.seen);
        let kept = self.rows.len().checked_div(row_bytes)?;
        let place = if kept < room { kept } else { (drawn % (self.seen + 1)) as usize };
        (self.takes(room, batch) && place < room).then_some((place, drawn))
    }
}

impl QuerySample {
    /// For a model whose keys are kept exactly; `None` for others, and where the limit is 0.
    pub(super) fn new(geometry: &Geometry, spec: &CodecSpec, config: &Config) -> Option<Self> {
        let exact = |side: &&kvd_codec::SideSpec| {
            side.transforms.is_empty() && side.quantizer == Quantizer::Float(FloatFormat::Native)
        };
        let bytes = config.query_sample_bytes_max / u64::from(geometry.layers);
        (spec.variants(Side::Key).iter().all(exact) && bytes > 0).then(|| Self {
            geometry: geometry.clone(),
            bytes_per_layer: usize::try_from(bytes).unwrap_or(usize::MAX),
            layers: (0..geometry.layers).map(|_| Mutex::default()).collect(),
        })
    }

    /// Channels of all heads of a query token, and how many tokens there is room for.
    fn room(&self, batch: &AttendBatch) -> (usize, usize) {
        let values = batch.q_heads as usize * self.geometry.head_dim(Side::Key);
        let row_bytes = values * self.geometry.dtype.size_bytes();
        (values, (self.bytes_per_layer / row_bytes).min(TOKENS_MAX))
    }

    /// Counts a batch whose queries are not here, unless one of them is to be kept: then they must
    /// be brought here and offered.
    pub(super) fn passes(&self, batch: &AttendBatch) -> bool {
        let (values, room) = self.room(batch);
        let mut layer = self.layers[batch.layer.0 as usize].lock();
        let passes = layer.draw((values * self.geometry.dtype.size_bytes(), room), batch).is_none();
        layer.seen += u64::from(passes && layer.takes(room, batch));
        passes
    }

    /// Looks at one query token of a batch whose shape was checked.
    pub(super) fn offer(&self, batch: &AttendBatch) {
        let (values, room) = self.room(batch);
        let (to, from) = (self.geometry.dtype, batch.dtype);
        let row_bytes = values * to.size_bytes();
        let mut layer = self.layers[batch.layer.0 as usize].lock();
        if !layer.takes(room, batch) {
            return;
        }
        if let Some((place, drawn)) = layer.draw((row_bytes, room), batch) {
            let token = (drawn >> 32) as usize % batch.rows() as usize;
            let row = &batch.q[token * values * from.size_bytes()..][..values * from.size_bytes()];
            let Some(row) = converted(row, from, to) else { return };
            let end = layer.rows.len().max((place + 1) * row_bytes);
            layer.rows.resize(end, 0);
            layer.rows[place * row_bytes..][..row_bytes].copy_from_slice(&row);
            layer.q_heads = batch.q_heads;
        }
        layer.seen += 1;
    }

    fn of(&self, layer: LayerIndex) -> SampledQueries {
        let layer = self.layers[layer.0 as usize].lock();
        let (q_heads, dtype) = (layer.q_heads, self.geometry.dtype);
        SampledQueries { q_heads, dtype, q: layer.rows.clone().into() }
    }
}

/// `None` when a value is not finite: the attend is refused for it.
fn converted(row: &[u8], from: DType, to: DType) -> Option<Vec<u8>> {
    let mut values = vec![0.0; row.len() / from.size_bytes()];
    from.widen(row, &mut values);
    let finite = values.iter().all(|value| value.is_finite());
    values.iter_mut().for_each(|value| *value = value.clamp(-to.largest(), to.largest()));
    let mut bytes = vec![0; values.len() * to.size_bytes()];
    to.narrow(&values, &mut bytes);
    finite.then_some(bytes)
}

/// The same calls give the same sample.
pub(super) fn splitmix(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Service {
    /// Queries that attends of a layer have asked, a sample of them; none where the model's keys
    /// are not kept exactly.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, a layer that the model has not, or an answer over the message size.
    pub fn sampled_queries(
        &self,
        call: &Call,
        model: ModelId,
        layer: LayerIndex,
    ) -> Result<SampledQueries, ServiceError> {
        let model = self.model(call, model)?;
        let geometry = &model.shape.geometry;
        if layer.0 >= geometry.layers {
            let message = format!("layer {layer} of a model of {} layers", geometry.layers);
            return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
        }
        let none = || SampledQueries { q_heads: 0, dtype: geometry.dtype, q: Vec::new().into() };
        let sampled = model.queries.as_ref().map_or_else(none, |sample| sample.of(layer));
        self.check_message_size(sampled.q.len() as u64, "a smaller limits.query_sample_bytes_max")?;
        Ok(sampled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::RopePairing;

    fn sample(bytes_per_layer: usize) -> QuerySample {
        let geometry = Geometry {
            layers: 2,
            kv_heads: 1,
            head_dim_k: 2,
            head_dim_v: 2,
            block_tokens: 16,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let layers = (0..2).map(|_| Mutex::default()).collect();
        QuerySample { geometry, bytes_per_layer, layers }
    }

    fn batch(layer: u32, values: &[f32]) -> AttendBatch {
        let mut q = vec![0; 4 * values.len()];
        DType::F32.narrow(values, &mut q);
        let mut query = kvd_proto::domain::AttendQuery::new(kvd_core::SequenceId(1), 1);
        query.n_q = values.len() as u32 / 2;
        AttendBatch {
            model: ModelId(1),
            layer: LayerIndex(layer),
            q_heads: 1,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries: vec![query],
            q: q.into(),
        }
    }

    #[test]
    fn a_full_sample_is_of_all_calls_alike() {
        let sample = sample(64 * 4);
        for index in 0..6400 {
            sample.offer(&batch(1, &[index as f32 / 6400.0, 1.0]));
        }
        let of = |layer| {
            let sampled = sample.of(LayerIndex(layer));
            let mut values = vec![0.0; sampled.q.len() / 2];
            sampled.dtype.widen(&sampled.q, &mut values);
            values
        };
        assert!(of(0).is_empty());
        let rows = of(1);
        assert_eq!(rows.len(), 64 * 2);
        let mean = rows.iter().step_by(2).sum::<f32>() / 64.0;
        assert!((0.35..0.65).contains(&mean), "{mean}");
    }

    #[test]
    fn queries_that_are_elsewhere_are_asked_for_when_one_is_kept() {
        let (here, elsewhere) = (sample(2 * 64 * 2), sample(2 * 64 * 2));
        let mut brought = 0;
        for index in 0..2000u16 {
            let batch = batch(1, &[f32::from(index), 0.5]);
            here.offer(&batch);
            if !elsewhere.passes(&batch) {
                elsewhere.offer(&batch);
                brought += 1;
            }
        }
        assert_eq!(here.of(LayerIndex(1)).q, elsewhere.of(LayerIndex(1)).q);
        assert!((64..500).contains(&brought), "{brought} of 2000 batches were copied");
        // Without room none is.
        assert!(sample(1).passes(&batch(1, &[1.0, 0.5])));
    }

    #[test]
    fn what_no_attend_would_take_is_left_out() {
        let sample = sample(1024);
        sample.offer(&batch(0, &[f32::NAN, 1.0]));
        sample.offer(&batch(0, &[1e9, -1.0]));
        let mut values = [0.0; 2];
        DType::F16.widen(&sample.of(LayerIndex(0)).q, &mut values);
        assert_eq!(values, [65504.0, -1.0]);
    }
}
