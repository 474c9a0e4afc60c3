//! Calls that need layers of a prefix which is on its way: they wait for these and no others.

use super::{CallContext, Service};
use kvd_core::{LayerIndex, SequenceId};
use kvd_proto::domain::{AttendBatch, StepPart};
use tokio::time::timeout_at;

impl Service {
    /// Waits until a layer of a sequence's prefix may be read or will not come, within the call's
    /// deadline. What became of it the call itself is told.
    pub(crate) async fn wait_for_layer(
        &self,
        call: &CallContext,
        sequence: SequenceId,
        layer: LayerIndex,
    ) {
        self.wait_for_layers(call, sequence, layer.0.saturating_add(1)).await;
    }

    /// As [`Service::wait_for_layer`], of all layers.
    pub(crate) async fn wait_for_prefix(&self, call: &CallContext, sequence: SequenceId) {
        self.wait_for_layers(call, sequence, u32::MAX).await;
    }

    /// As [`Service::wait_for_layer`], of all sequences of a batch.
    pub(super) async fn wait_for_batch(&self, call: &CallContext, batch: &AttendBatch) {
        for query in &batch.queries {
            self.wait_for_layer(call, query.sequence, batch.layer).await;
        }
    }

    /// As [`Service::wait_for_layer`], of all layers of a step's parts.
    pub(super) async fn wait_for_parts(&self, call: &CallContext, parts: &[StepPart]) {
        for part in parts {
            let layers = part.layers.unwrap_or(u32::MAX);
            let end = part.first_layer.0.saturating_add(layers);
            self.wait_for_layers(call, part.sequence, end).await;
        }
    }

    async fn wait_for_layers(&self, call: &CallContext, sequence: SequenceId, layers: u32) {
        let Ok(shard) = self.shard_of(sequence) else { return };
        let Some(arrival) = shard.store.find_arrival(&call.namespace, sequence) else { return };
        let came = arrival.wait_layers(layers.min(arrival.count_layers()));
        match call.deadline {
            None => came.await,
            // The call finds out itself that its time is over.
            Some(end) => drop(timeout_at(end.into(), came).await),
        }
    }
}
