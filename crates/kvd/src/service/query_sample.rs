//! A sample of the queries that a model is asked, from which a running daemon can be calibrated:
//! codecs with `qpca` weigh keys as queries see them.
//!
//! A call gives all of its query tokens. Only models whose keys are kept exactly have a sample,
//! because only theirs are calibrated from. It is bounded, and every query token has the same
//! chance to be in it however many there were.

use super::{CallContext, Service, ServiceError};
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
    layers: Vec<Mutex<TokenReservoir>>,
}

/// A uniform sample of all query tokens so far (Li 1994, algorithm L): once it is full it knows
/// which token is kept next, and the others cost a comparison for each batch.
#[derive(Default)]
struct TokenReservoir {
    q_heads: u32,
    /// Query tokens so far.
    seen: u64,
    /// Number of the next token that is kept, once the sample is full.
    next: u64,
    /// The largest of as many uniform draws as the sample has tokens, if each token made one and
    /// the smallest draws were kept.
    largest: f64,
    /// Random numbers drawn so far.
    drawn: u64,
    /// `[tokens, q_heads, head_dim_k]` in the model's dtype.
    rows: Vec<u8>,
}

/// Shape of a sample.
#[derive(Clone, Copy)]
struct SampleShape {
    /// Values of a query token, all heads.
    values: usize,
    /// Its bytes in the model's dtype.
    row_bytes: usize,
    /// Tokens that there is memory for.
    tokens: usize,
}

impl TokenReservoir {
    /// Whether batches like this one are sampled.
    fn takes_batch(&self, shape: SampleShape, batch: &AttendBatch) -> bool {
        shape.tokens > 0
            && batch.query_rows() > 0
            && (self.seen == 0 || self.q_heads == batch.q_heads)
    }

    fn is_full(&self, shape: SampleShape) -> bool {
        self.rows.len() >= shape.tokens * shape.row_bytes
    }

    /// Number of the first token from `token` on that is kept.
    fn next_kept(&self, shape: SampleShape, token: u64) -> u64 {
        if self.is_full(shape) { self.next.max(token) } else { token }
    }

    /// A number between 0 and 1, neither of them. The same calls give the same sample.
    fn draw_number(&mut self) -> f64 {
        let bits = mix_bits(self.drawn) >> 12;
        self.drawn += 1;
        (bits as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// Decides which token is kept after `token`, of a full sample.
    fn skip_from(&mut self, shape: SampleShape, token: u64) {
        let kept = shape.tokens as f64;
        self.largest *= (self.draw_number().ln() / kept).exp();
        // Beyond what an integer holds: none is.
        let skipped = (self.draw_number().ln() / (-self.largest).ln_1p()).floor() as u64;
        self.next = token.saturating_add(1).saturating_add(skipped);
    }

    /// Keeps a token.
    fn keep_token(&mut self, shape: SampleShape, token: u64, row: &[u8]) {
        if self.is_full(shape) {
            let index = ((self.draw_number() * shape.tokens as f64) as usize).min(shape.tokens - 1);
            self.rows[index * shape.row_bytes..][..shape.row_bytes].copy_from_slice(row);
            self.skip_from(shape, token);
            return;
        }
        self.rows.extend_from_slice(row);
        if self.is_full(shape) {
            self.largest = 1.0;
            self.skip_from(shape, token);
        }
    }
}

impl QuerySample {
    /// For a model whose keys are kept exactly; `None` for others, and where the limit is 0.
    pub(super) fn new(geometry: &Geometry, spec: &CodecSpec, config: &Config) -> Option<Self> {
        let exact = |side: &&kvd_codec::SideSpec| {
            side.transforms.is_empty() && side.quantizer == Quantizer::Float(FloatFormat::Native)
        };
        let bytes = config.query_sample_bytes_max / u64::from(geometry.layers);
        (spec.side_specs(Side::Key).iter().all(exact) && bytes > 0).then(|| Self {
            geometry: geometry.clone(),
            bytes_per_layer: usize::try_from(bytes).unwrap_or(usize::MAX),
            layers: (0..geometry.layers).map(|_| Mutex::default()).collect(),
        })
    }

    fn sample_shape(&self, batch: &AttendBatch) -> SampleShape {
        let values = batch.q_heads as usize * self.geometry.head_dim(Side::Key);
        let row_bytes = values * self.geometry.dtype.size_bytes();
        SampleShape {
            values,
            row_bytes,
            tokens: (self.bytes_per_layer / row_bytes.max(1)).min(TOKENS_MAX),
        }
    }

    /// Counts the tokens of a batch whose queries are not here, unless one of them is to be kept:
    /// then they must be brought here and offered.
    pub(super) fn passes_batch(&self, batch: &AttendBatch) -> bool {
        let shape = self.sample_shape(batch);
        let mut layer = self.layers[batch.layer.0 as usize].lock();
        if !layer.takes_batch(shape, batch) {
            return true;
        }
        let end = layer.seen + u64::from(batch.query_rows());
        let passes = layer.next_kept(shape, layer.seen) >= end;
        if passes {
            layer.seen = end;
        }
        passes
    }

    /// Looks at the query tokens of a batch whose shape was checked: each has the same chance to be
    /// kept as every one before.
    pub(super) fn offer_batch(&self, batch: &AttendBatch) {
        let shape = self.sample_shape(batch);
        let (to, from) = (self.geometry.dtype, batch.dtype);
        let mut layer = self.layers[batch.layer.0 as usize].lock();
        if !layer.takes_batch(shape, batch) {
            return;
        }
        let (first, row_bytes) = (layer.seen, shape.values * from.size_bytes());
        let end = first + u64::from(batch.query_rows());
        let mut token = layer.next_kept(shape, first);
        while token < end {
            let row = &batch.q[(token - first) as usize * row_bytes..][..row_bytes];
            match convert_row(row, from, to) {
                Some(row) => layer.keep_token(shape, token, &row),
                None if layer.is_full(shape) => layer.skip_from(shape, token),
                None => {}
            }
            token = layer.next_kept(shape, token + 1);
        }
        layer.q_heads = batch.q_heads;
        layer.seen = end;
    }

    pub(super) fn queries_of_layer(&self, layer: LayerIndex) -> SampledQueries {
        let layer = self.layers[layer.0 as usize].lock();
        let (q_heads, dtype) = (layer.q_heads, self.geometry.dtype);
        SampledQueries { q_heads, dtype, q: layer.rows.clone().into() }
    }
}

/// `None` when a value is not finite: the attend is refused for it.
fn convert_row(row: &[u8], from: DType, to: DType) -> Option<Vec<u8>> {
    let mut values = vec![0.0; row.len() / from.size_bytes()];
    from.widen_values(row, &mut values);
    let finite = values.iter().all(|value| value.is_finite());
    values
        .iter_mut()
        .for_each(|value| *value = value.clamp(-to.largest_finite(), to.largest_finite()));
    let mut bytes = vec![0; values.len() * to.size_bytes()];
    to.narrow_values(&values, &mut bytes);
    finite.then_some(bytes)
}

/// Random bits of an index; equal calls give equal samples.
pub(super) fn mix_bits(index: u64) -> u64 {
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
        call: &CallContext,
        model: ModelId,
        layer: LayerIndex,
    ) -> Result<SampledQueries, ServiceError> {
        let model = self.find_model(call, model)?;
        let geometry = &model.shape.geometry;
        if layer.0 >= geometry.layers {
            let message = format!("layer {layer} of a model of {} layers", geometry.layers);
            return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
        }
        let none = || SampledQueries { q_heads: 0, dtype: geometry.dtype, q: Vec::new().into() };
        let sampled =
            model.queries.as_ref().map_or_else(none, |sample| sample.queries_of_layer(layer));
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
        DType::F32.narrow_values(values, &mut q);
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
            per_query_errors: false,
        }
    }

    /// First values of the kept tokens.
    fn kept(sample: &QuerySample, layer: u32) -> Vec<f32> {
        let sampled = sample.queries_of_layer(LayerIndex(layer));
        let mut values = vec![0.0; sampled.q.len() / 2];
        sampled.dtype.widen_values(&sampled.q, &mut values);
        values.into_iter().step_by(2).collect()
    }

    #[test]
    fn a_call_gives_as_many_tokens_as_it_has_and_there_is_memory_for() {
        let sample = sample(64 * 4);
        let call = |from: u16, tokens: u16| -> Vec<f32> {
            (from..from + tokens).flat_map(|index| [f32::from(index), 0.5]).collect()
        };
        sample.offer_batch(&batch(1, &call(0, 48)));
        assert_eq!(kept(&sample, 1), (0..48u16).map(f32::from).collect::<Vec<_>>());
        sample.offer_batch(&batch(1, &call(48, 1000)));
        assert_eq!(kept(&sample, 1).len(), 64);
        assert!(kept(&sample, 1).iter().any(|value| *value > 512.0));
        assert!(kept(&sample, 0).is_empty());
    }

    #[test]
    fn every_token_has_the_same_chance_however_calls_are_cut() {
        // 6400 tokens in calls of as many tokens as it says, in every one of 4 quarters 16 of 64
        // kept in the mean, with a deviation of 3.5: means of 100 samples deviate by 0.35.
        for tokens in [1, 16, 1024] {
            let mut quarters = [0usize; 4];
            for shift in 0..100 {
                let sample = sample(64 * 4);
                sample.layers[1].lock().drawn = shift << 32;
                let all: Vec<f32> =
                    (0..6400).flat_map(|index| [index as f32 / 6400.0, 1.0]).collect();
                all.chunks(2 * tokens).for_each(|call| sample.offer_batch(&batch(1, call)));
                let kept = kept(&sample, 1);
                assert_eq!(kept.len(), 64);
                kept.iter().for_each(|value| quarters[((value * 4.0) as usize).min(3)] += 1);
            }
            assert!(quarters.iter().all(|kept| (1460..1740).contains(kept)), "{quarters:?}");
        }
    }

    #[test]
    fn queries_that_are_elsewhere_are_asked_for_when_one_is_kept() {
        let (here, elsewhere) = (sample(2 * 64 * 2), sample(2 * 64 * 2));
        let mut brought = 0;
        for index in 0..2000u16 {
            let batch = batch(1, &[f32::from(index), 0.5]);
            here.offer_batch(&batch);
            if !elsewhere.passes_batch(&batch) {
                elsewhere.offer_batch(&batch);
                brought += 1;
            }
        }
        assert_eq!(
            here.queries_of_layer(LayerIndex(1)).q,
            elsewhere.queries_of_layer(LayerIndex(1)).q
        );
        // 64 and, in the mean, 64 ln(2000 / 64) more.
        assert!((200..400).contains(&brought), "{brought} of 2000 batches were copied");
        // Without memory none is.
        assert!(sample(1).passes_batch(&batch(1, &[1.0, 0.5])));
    }

    #[test]
    fn what_no_attend_would_take_is_left_out() {
        let sample = sample(1024);
        sample.offer_batch(&batch(0, &[f32::NAN, 1.0]));
        sample.offer_batch(&batch(0, &[1e9, -1.0]));
        let mut values = [0.0; 2];
        DType::F16.widen_values(&sample.queries_of_layer(LayerIndex(0)).q, &mut values);
        assert_eq!(values, [65504.0, -1.0]);
    }
}
