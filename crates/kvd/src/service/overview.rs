//! The daemon at a glance, for the web page of the admin port: pools, and models and sequences of
//! the namespaces that the reader may know of. It asks no device and answers while draining, too.

use super::stats::StorageSaving;
use super::{RegisteredModel, Service};
use crate::access::AccessPrincipal;
use crate::metrics::Metric;
use kvd_core::{Namespace, SessionId};
use kvd_proto::domain::SequenceFilter;
use kvd_store::PoolUsage;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most sequences of an overview; of others their number is told.
const SEQUENCES_MAX: usize = 500;

/// The daemon at one moment. Ids are texts: they do not fit the numbers of every reader of JSON.
#[derive(Debug, Serialize)]
pub(crate) struct DaemonOverview {
    version: &'static str,
    boot_id: String,
    device: String,
    precision: &'static str,
    ready: bool,
    /// Why it is not ready, for people.
    unready: String,
    pools: Vec<PoolOverview>,
    models: Vec<ModelOverview>,
    sessions: usize,
    /// Open sequences, those that are left out included.
    sequences_open: u64,
    sequences: Vec<SequenceOverview>,
}

#[derive(Debug, Serialize)]
struct PoolOverview {
    device: String,
    tier: &'static str,
    capacity_bytes: u64,
    used_bytes: u64,
}

#[derive(Debug, Serialize)]
struct ModelOverview {
    id: String,
    name: String,
    namespace: String,
    codec: String,
    sequences: u64,
    held_bytes: f64,
    /// Bytes of the same values in the stored precision.
    logical_bytes: f64,
    /// Bits of a packed value; none while nothing is packed.
    bits_per_value: Option<f64>,
    /// Relative error of scores and of outputs; none before the first sample.
    error_k: Option<f64>,
    error_v: Option<f64>,
    /// Bytes of work since the registration, in the stored precision.
    stored_bytes: u64,
    encoded_bytes: u64,
    attended_bytes: u64,
    loaded_bytes: u64,
}

#[derive(Debug, Serialize)]
struct SequenceOverview {
    id: String,
    /// The model's id.
    model: String,
    /// The session's name, `gone` of one that has ended; none without a session.
    owner: Option<String>,
    tokens: u32,
    held_bytes: u64,
    idle_ms: u64,
    age_ms: u64,
}

impl Service {
    /// Looks at the namespaces that a principal may use, at all where none are configured.
    pub(crate) fn describe_overview(&self, reader: Option<&AccessPrincipal>) -> DaemonOverview {
        let is_told = |namespace: &Namespace| {
            let allows = |of: &AccessPrincipal| of.namespaces.allow_namespace(namespace);
            reader.is_none_or(allows)
        };
        let mut models = self.models.list_models(None);
        models.retain(|model| is_told(&model.shape.namespace));
        let (mut described, mut open) = (Vec::new(), 0);
        for model in &models {
            let model = self.model_overview(model);
            open += model.sequences;
            described.push(model);
        }
        let namespaces = models.iter().map(|model| &model.shape.namespace).collect();
        let sessions = self.sessions.list_namespaces();
        DaemonOverview {
            version: env!("CARGO_PKG_VERSION"),
            boot_id: self.boot_id().to_owned(),
            device: self.device_names(),
            precision: self.precision_name(),
            ready: self.is_ready(),
            unready: self.why_unready(),
            pools: self.device_pools().map(|of| pool_overview(of.device, of.pool)).collect(),
            models: described,
            sessions: sessions.iter().filter(|namespace| is_told(namespace)).count(),
            sequences_open: open,
            sequences: self.sequence_overviews(namespaces),
        }
    }

    fn model_overview(&self, model: &Arc<RegisteredModel>) -> ModelOverview {
        let usage = self.model_usage(model);
        let saving = StorageSaving::from_stored(&usage.stored, model.shape.geometry.dtype);
        let [error_k, error_v] = model.sampled_error();
        let packed = usage.stored.packed_values as f64;
        let bits = 8.0 * usage.stored.packed_bytes as f64;
        let count = |metric| model.metrics.read_count(metric);
        ModelOverview {
            id: model.shape.id.to_string(),
            name: model.name.clone(),
            namespace: model.shape.namespace.as_str().to_owned(),
            codec: model.codec.clone(),
            sequences: usage.sequences,
            held_bytes: saving.held_bytes,
            logical_bytes: saving.logical_bytes,
            bits_per_value: (packed > 0.0).then(|| bits / packed),
            error_k,
            error_v,
            stored_bytes: count(Metric::StoredLogicalBytesTotal),
            encoded_bytes: count(Metric::EncodedLogicalBytesTotal),
            attended_bytes: count(Metric::AttendedLogicalBytesTotal),
            loaded_bytes: count(Metric::LoadedLogicalBytesTotal),
        }
    }

    /// The first sequences of each namespace, by their ids, until there are enough.
    fn sequence_overviews(&self, namespaces: BTreeSet<&Namespace>) -> Vec<SequenceOverview> {
        let mut overviews = Vec::new();
        for namespace in namespaces {
            let limit = SEQUENCES_MAX.saturating_sub(overviews.len()) as u32;
            let filter = SequenceFilter { limit, ..SequenceFilter::default() };
            let sessions = self.sessions.list_sessions(namespace, Instant::now());
            let names: BTreeMap<SessionId, String> =
                sessions.into_iter().map(|session| (session.id, session.name)).collect();
            let owner = |session: SessionId| {
                names.get(&session).cloned().unwrap_or_else(|| "gone".to_owned())
            };
            let page = self.list_page(namespace, &filter);
            overviews.extend(page.sequences.into_iter().map(|sequence| SequenceOverview {
                id: sequence.id.to_string(),
                model: sequence.model.to_string(),
                owner: sequence.session.map(owner),
                tokens: sequence.length,
                held_bytes: sequence.stored.packed_bytes + sequence.stored.raw_bytes,
                idle_ms: whole_ms(sequence.idle),
                age_ms: whole_ms(sequence.age),
            }));
        }
        overviews
    }
}

fn pool_overview(device: &str, pool: PoolUsage) -> PoolOverview {
    let PoolUsage { tier, capacity_bytes, used_bytes, .. } = pool;
    PoolOverview { device: device.to_owned(), tier, capacity_bytes, used_bytes }
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
