//! The queries that a model was asked last, by which the errors of its pages are measured.
//!
//! Only models whose codec declares a bound have them: a few rows for each layer and KV head, in
//! f32 and times the scale of scores, so that products with keys are scores in nats. A soft cap is
//! left out: it makes errors of scores smaller. One call replaces one row of those that are there,
//! so that no single caller decides what is measured.

use super::query_sample::mix_bits;
use kvd_codec::{CodecSpec, LayerQueries};
use kvd_core::{Geometry, LayerIndex, Side};
use kvd_proto::domain::AttendBatch;
use parking_lot::Mutex;

/// One call in this many, whose queries are elsewhere, brings them here.
const CALL_INTERVAL: u64 = 64;

/// The last queries of one model.
pub(super) struct RecentQueries {
    geometry: Geometry,
    layers: Vec<Mutex<RecentLayer>>,
}

/// The last queries of one layer.
#[derive(Default)]
struct RecentLayer {
    calls: u64,
    heads: Vec<RecentRows>,
    changed: bool,
}

/// The last queries of one KV head, at most [`LayerQueries::MOST`].
#[derive(Clone, Default)]
struct RecentRows {
    /// `[n, head_dim_k]`.
    values: Vec<f32>,
    /// The row that the next one replaces.
    oldest: usize,
}

impl RecentRows {
    fn push(&mut self, row: &[f32]) {
        if self.values.len() < LayerQueries::MOST * row.len() {
            self.values.extend_from_slice(row);
            return;
        }
        self.values[self.oldest * row.len()..][..row.len()].copy_from_slice(row);
        self.oldest = (self.oldest + 1) % LayerQueries::MOST;
    }
}

impl RecentQueries {
    /// For a model whose codec declares a bound; `None` for others.
    pub(super) fn new(geometry: &Geometry, spec: &CodecSpec) -> Option<Self> {
        let layers = (0..geometry.layers).map(|_| Mutex::default()).collect();
        let bounded = spec.bounds.iter().any(Option::is_some);
        bounded.then(|| Self { geometry: geometry.clone(), layers })
    }

    /// Counts a call whose queries are not here, unless they must be brought and offered.
    pub(super) fn passes_batch(&self, batch: &AttendBatch) -> bool {
        let mut layer = self.layers[batch.layer.0 as usize].lock();
        let few = LayerQueries::FEWEST * self.geometry.head_dim(Side::Key);
        let all_have = || layer.heads.iter().all(|rows| rows.values.len() >= few);
        let known = !layer.heads.is_empty() && all_have();
        // Heads whose queries say nothing for so long may never say more.
        let known = known || layer.calls >= CALL_INTERVAL;
        let passes = known && !layer.calls.is_multiple_of(CALL_INTERVAL);
        layer.calls += u64::from(passes);
        passes
    }

    /// Takes queries of a batch whose shape was checked: as many tokens as are missing, else one.
    pub(super) fn offer_batch(&self, batch: &AttendBatch) {
        let dim = self.geometry.head_dim(Side::Key);
        let kv_heads = self.geometry.kv_heads as usize;
        let (tokens, q_heads) = (batch.query_rows() as usize, batch.q_heads as usize);
        let group = q_heads / kv_heads;
        if tokens == 0 || group == 0 {
            return;
        }
        let scale = batch.scale.unwrap_or(1.0 / (dim as f32).sqrt());
        let row_bytes = dim * batch.dtype.size_bytes();
        let mut layer = self.layers[batch.layer.0 as usize].lock();
        let layer = &mut *layer;
        layer.heads.resize(kv_heads, RecentRows::default());
        let mut row = vec![0.0; dim];
        for (head, rows) in layer.heads.iter_mut().enumerate() {
            let missing = LayerQueries::MOST - rows.values.len() / dim;
            let count = missing.clamp(1, tokens);
            for index in 0..count {
                // Spread over the tokens of the call, and over the heads that share the keys.
                let drawn = mix_bits(layer.calls * LayerQueries::MOST as u64 + index as u64);
                let [first, end] = [index, index + 1].map(|index| index * tokens / count);
                let token = first + drawn as usize % (end - first);
                let q_head = head * group + (drawn >> 32) as usize % group;
                let bytes = &batch.q[(token * q_heads + q_head) * row_bytes..][..row_bytes];
                batch.dtype.widen_values(bytes, &mut row);
                row.iter_mut().for_each(|value| *value *= scale);
                // Such rows say nothing, and must not take the place of others.
                if row.iter().all(|x| x.is_finite()) && row.iter().any(|x| *x != 0.0) {
                    rows.push(&row);
                    layer.changed = true;
                }
            }
        }
        layer.calls += 1;
    }

    /// Queries of a layer by KV head, if any came since they were last taken.
    pub(super) fn take_changed(&self, layer: LayerIndex) -> Option<Vec<Vec<f32>>> {
        let mut layer = self.layers[layer.0 as usize].lock();
        let changed = std::mem::take(&mut layer.changed);
        changed.then(|| layer.heads.iter().map(|rows| rows.values.clone()).collect())
    }

    /// Gives queries back that were taken and not used.
    pub(super) fn give_back(&self, layer: LayerIndex) {
        self.layers[layer.0 as usize].lock().changed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_codec::resolve_spec;
    use kvd_core::{DType, ModelId, RopePairing, SequenceId};
    use kvd_proto::domain::AttendQuery;

    fn recent(codec: &str) -> Option<RecentQueries> {
        let geometry = Geometry {
            layers: 2,
            kv_heads: 2,
            head_dim_k: 4,
            head_dim_v: 4,
            block_tokens: 16,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        RecentQueries::new(&geometry, &resolve_spec(codec).unwrap())
    }

    /// Query heads 0 and 1 share a KV head, 2 and 3 the other; all values of a row are alike.
    fn batch(layer: u32, tokens: u32, value: impl Fn(u32, u32) -> f32) -> AttendBatch {
        let heads = (0..tokens).flat_map(|token| (0..4).map(move |head| (token, head)));
        let values: Vec<f32> = heads.flat_map(|(token, head)| [value(token, head); 4]).collect();
        let mut q = vec![0; 4 * values.len()];
        DType::F32.narrow_values(&values, &mut q);
        let mut query = AttendQuery::new(SequenceId(1), 1);
        query.n_q = tokens;
        AttendBatch {
            model: ModelId(1),
            layer: LayerIndex(layer),
            q_heads: 4,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries: vec![query],
            q: q.into(),
            per_query_errors: false,
        }
    }

    #[test]
    fn only_codecs_with_a_bound_keep_queries() {
        assert!(recent("fp8").is_none());
        assert!(recent("fp8; k.bound=0.1").is_some() && recent("fp8; v.bound=0.1").is_some());
    }

    #[test]
    fn one_long_call_fills_the_rows_and_later_ones_replace_one_each() {
        let recent = recent("fp8; k.bound=0.1").unwrap();
        recent.offer_batch(&batch(1, 1000, |token, head| 1.0 + token as f32 + 1e4 * head as f32));
        assert!(recent.take_changed(LayerIndex(0)).is_none());
        let heads = recent.take_changed(LayerIndex(1)).unwrap();
        assert!(recent.take_changed(LayerIndex(1)).is_none(), "they are taken once");
        recent.give_back(LayerIndex(1));
        assert_eq!(recent.take_changed(LayerIndex(1)).as_ref(), Some(&heads));
        for (head, rows) in heads.iter().enumerate() {
            assert_eq!(rows.len(), LayerQueries::MOST * 4);
            // Times 1/sqrt(4).
            let values: Vec<f32> = rows.iter().step_by(4).map(|x| 2.0 * x).collect();
            let of_group = |value: &f32| (value / 1e4) as usize / 2 == head;
            assert!(values.iter().all(of_group), "{head}: {values:?}");
            let tokens = values.iter().map(|value| value % 1e4);
            let (first, last) = tokens.fold((1e9f32, 0f32), |(a, b), x| (a.min(x), b.max(x)));
            assert!(first < 100.0 && last > 900.0, "from {first} to {last} of 1000");
        }
        for _ in 0..LayerQueries::MOST - 1 {
            recent.offer_batch(&batch(1, 1, |_, _| -1.0));
        }
        let heads = recent.take_changed(LayerIndex(1)).unwrap();
        assert_eq!(heads[0].iter().filter(|x| **x > 0.0).count(), 4, "one row is left");
    }

    #[test]
    fn rows_that_say_nothing_take_no_place() {
        let recent = recent("fp8; k.bound=0.1").unwrap();
        recent.offer_batch(&batch(0, 3, |_, _| 0.0));
        recent.offer_batch(&batch(0, 3, |_, _| f32::NAN));
        assert!(recent.take_changed(LayerIndex(0)).is_none());
        recent.offer_batch(&batch(0, 3, |_, head| if head < 2 { 1.0 } else { 0.0 }));
        let heads = recent.take_changed(LayerIndex(0)).unwrap();
        assert_eq!([heads[0].len(), heads[1].len()], [12, 0]);
    }

    #[test]
    fn queries_are_brought_until_each_head_has_enough_or_has_said_nothing_for_long() {
        let brought = |second_from: usize| {
            let recent = recent("fp8; k.bound=0.1").unwrap();
            let mut brought = 0;
            for call in 0..1000 {
                let says = call >= second_from;
                let batch = batch(0, 1, |_, head| if head < 2 || says { 1.0 } else { 0.0 });
                if !recent.passes_batch(&batch) {
                    recent.offer_batch(&batch);
                    brought += 1;
                }
            }
            brought
        };
        // The first head has enough long before the second one says anything.
        let at_once = brought(0);
        assert!((at_once + 20..80).contains(&brought(30)), "{at_once} {}", brought(30));
        let never = brought(usize::MAX);
        let interval = CALL_INTERVAL as usize;
        assert!((interval..interval + 40).contains(&never), "{never} of 1000");
    }

    #[test]
    fn queries_that_are_elsewhere_are_brought_until_there_are_enough_and_then_seldom() {
        let recent = recent("fp8; v.bound=0.1").unwrap();
        let mut brought = 0;
        for _ in 0..1000 {
            let batch = batch(0, 1, |_, _| 1.0);
            if !recent.passes_batch(&batch) {
                recent.offer_batch(&batch);
                brought += 1;
            }
        }
        assert!((LayerQueries::FEWEST..40).contains(&brought), "{brought} of 1000");
    }
}
