//! One look at a daemon.

use super::super::models::ModelRow;
use kvd_client::{Client, ClientError, PoolStats, SequenceFilter, SequenceInfo, SessionInfo};
use std::time::Instant;

/// A daemon at one moment.
pub(super) struct DaemonSample {
    pub(super) at: Instant,
    pub(super) version: String,
    pub(super) device: String,
    pub(super) serving: bool,
    pub(super) pools: Vec<PoolStats>,
    pub(super) models: Vec<SampledModel>,
    pub(super) sessions: Vec<SessionInfo>,
    pub(super) sequences: Vec<SequenceInfo>,
    /// Whether there are more sequences than were looked at.
    pub(super) has_more: bool,
}

/// A model, and its counts since it was registered.
pub(super) struct SampledModel {
    pub(super) row: ModelRow,
    pub(super) counts: WorkBytes,
    pub(super) error: [f64; 2],
}

/// Bytes of K and V in the stored precision that work was done on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WorkBytes {
    pub(super) stored: u64,
    pub(super) encoded: u64,
    pub(super) attended: u64,
    pub(super) loaded: u64,
}

impl DaemonSample {
    /// Looks at the client's namespace.
    pub(super) async fn take_sample(client: &Client) -> Result<Self, ClientError> {
        let info = client.server_info().await?;
        let serving = client.is_serving().await?;
        let stats = client.stats().await?;
        let described = client.list_models().await?;
        let sampled = |model: &kvd_client::ModelDescription| {
            let row = ModelRow::of_description(model)?;
            let stats = model.model.as_ref()?;
            let counts = WorkBytes {
                stored: stats.stored_logical_bytes,
                encoded: stats.encoded_logical_bytes,
                attended: stats.attended_logical_bytes,
                loaded: stats.loaded_logical_bytes,
            };
            Some(SampledModel {
                row,
                counts,
                error: [stats.sampled_error_k, stats.sampled_error_v],
            })
        };
        let filter =
            SequenceFilter { limit: SequenceFilter::PAGE_MAX, ..SequenceFilter::default() };
        let page = client.list_sequences(filter).await?;
        Ok(Self {
            at: Instant::now(),
            version: info.version,
            device: info.device,
            serving,
            pools: stats.pools,
            models: described.iter().filter_map(sampled).collect(),
            sessions: client.list_sessions().await?,
            has_more: page.next_after_id != 0,
            sequences: page.sequences,
        })
    }

    /// Work on all models.
    pub(super) fn count_work(&self) -> WorkBytes {
        self.models.iter().fold(WorkBytes::default(), |sum, model| WorkBytes {
            stored: sum.stored + model.counts.stored,
            encoded: sum.encoded + model.counts.encoded,
            attended: sum.attended + model.counts.attended,
            loaded: sum.loaded + model.counts.loaded,
        })
    }
}
