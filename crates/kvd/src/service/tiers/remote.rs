//! The store that daemons share: what it is asked for, and what becomes findable on its word.

use super::CacheTiers;
use crate::config::{ConfigError, RemoteCacheConfig};
use crate::metrics::{Metric, Metrics};
use crate::service::{CallContext, MatchReply, RegisteredModel, Service, ServiceError};
use kvd_core::ModelId;
use kvd_proto::domain::BlockKeys;
use kvd_remote::{RemoteLevels, RemoteOp, RemoteTier, name_object};
use kvd_store::{BlockDigests, KeyChain, RemoteBlocks, RemotePlace};
use kvd_tier::{ObjectName, ScopeId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A store, opened, and what it is used for.
pub(super) struct RemoteCache {
    pub(super) tier: RemoteTier,
    pub(super) config: RemoteCacheConfig,
}

impl RemoteCache {
    /// Takes the store of settings. Does not wait for it. Call on a tokio runtime.
    pub(super) fn open_store(
        config: &RemoteCacheConfig,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, ConfigError> {
        let mut settings = config.read_settings()?;
        let metrics = Arc::clone(metrics);
        let on_request = move |op: RemoteOp, spent: Duration| {
            let labels = [("op", op.op_label())];
            metrics.histogram(Metric::RemoteSeconds, &labels).record(spent.as_secs_f64());
        };
        settings.on_request = Some(Arc::new(on_request));
        let tier = RemoteTier::open_store(settings)
            .map_err(|error| ConfigError::new("cache.remote", error.to_string()))?;
        tracing::info!(url = config.store_url(), "the cache is shared through a store");
        Ok(Self { tier, config: config.clone() })
    }
}

/// The name of an object as the index keeps it.
pub(super) fn place_of_object(name: &ObjectName) -> RemotePlace {
    let halves = |number: u128| [number as u64, (number >> 64) as u64];
    let ([a, b], [c, d]) = (halves(name.digest), halves(name.parent));
    RemotePlace([a, b, c, d])
}

/// The name that the index keeps of a block.
pub(super) fn object_of_place(
    scope: ScopeId,
    digests: &BlockDigests,
    place: &RemotePlace,
) -> ObjectName {
    let join = |low: u64, high: u64| u128::from(low) | u128::from(high) << 64;
    let [a, b, c, d] = place.0;
    let position = digests.position;
    ObjectName { scope, digest: join(a, b), parent: join(c, d), position }
}

/// Names of the blocks of a chain from `first` on.
fn name_chain(scope: ScopeId, chain: &KeyChain<'_>, first: usize) -> Vec<ObjectName> {
    let mut parent = first.checked_sub(1).and_then(|block| chain.find_key(block));
    let mut names = Vec::new();
    for (position, block) in (first as u32..).zip(first..chain.count_blocks()) {
        let Some(key) = chain.find_key(block) else { break };
        names.push(name_object(scope, position, key, parent));
        parent = Some(key);
    }
    names
}

impl CacheTiers {
    /// Counters and levels of the store that daemons share, if there is one.
    pub(crate) fn read_remote(&self) -> Option<RemoteLevels> {
        self.remote.as_ref().map(|remote| remote.tier.read_levels())
    }
}

impl Service {
    /// [`Service::match_prefixes`], after a look for what is missing in the store that daemons
    /// share. That look takes a bounded time, and none where nothing is missing.
    ///
    /// # Errors
    /// As that.
    pub async fn match_shared(
        &self,
        call: &CallContext,
        model: ModelId,
        chains: &[BlockKeys],
        lease: Duration,
    ) -> Result<MatchReply, ServiceError> {
        if !self.reads_remotely() {
            return self.match_prefixes(call, model, chains, lease);
        }
        self.admit_call(call)?;
        let began = Instant::now();
        let found = self.models.find_model(&call.namespace, model)?;
        let chains = self.read_chains(&found, chains)?;
        let mut reply = self.match_chains(call, &found, &chains, lease)?;
        let mut took = began.elapsed();
        let block_tokens = found.shape.geometry.block_tokens;
        let cached: Vec<_> =
            reply.tokens.iter().map(|tokens| (*tokens / block_tokens) as usize).collect();
        if self.find_remotely(call, &found, &chains, &cached).await > 0 {
            let (first, began) = (reply.lease.take(), Instant::now());
            let longer = self.match_chains(call, &found, &chains, lease);
            took += began.elapsed();
            // Held until the longer one is, or is refused. It may have ended by itself.
            let _ended = first.map(|first| self.release_lease(call, first));
            reply = longer?;
        }
        self.count_match(took, &chains, &reply);
        Ok(reply)
    }

    /// Whether blocks are looked for in a store that daemons share.
    pub(super) fn reads_remotely(&self) -> bool {
        let remote = self.tiers.as_ref().and_then(|tiers| tiers.remote.as_ref());
        remote.is_some_and(|remote| remote.config.reads)
    }

    /// Makes blocks of chains findable that a shared store has, behind the blocks of each that are
    /// cached here; how many.
    pub(super) async fn find_remotely(
        &self,
        call: &CallContext,
        model: &Arc<RegisteredModel>,
        chains: &[KeyChain<'_>],
        cached: &[usize],
    ) -> usize {
        let remote = self.tiers.as_ref().and_then(|tiers| tiers.remote.as_ref());
        let Some(remote) = remote.filter(|remote| remote.config.reads) else { return 0 };
        let Some(scope) = model.scope else { return 0 };
        let index = self.shards[model.shard].store.prefix_index();
        let (id, namespace) = (model.shape.id, &model.shape.namespace);
        let block_tokens = model.shape.geometry.block_tokens;
        let min_blocks = remote.config.min_prefix_tokens.div_ceil(block_tokens).max(1) as usize;
        let own_end = Instant::now() + remote.config.find_time_max();
        let end = call.deadline.map_or(own_end, |deadline| deadline.min(own_end));
        let mut added = 0;
        for (chain, first) in chains.iter().zip(cached.iter().copied()) {
            let is_worth_it = chain.count_blocks() >= min_blocks;
            let Some(key) = chain.find_key(first).filter(|_| is_worth_it) else { continue };
            // Its parent does not matter to whether it is there.
            if !remote.tier.may_have(&name_object(scope, first as u32, key, None)) {
                continue;
            }
            let names = name_chain(scope, chain, first);
            let found = remote.tier.find_blocks(&names, end).await;
            let places: Vec<_> = names[..found].iter().map(place_of_object).collect();
            let blocks = RemoteBlocks { first, places: &places, bytes: 0 };
            added += index.add_remote_blocks(namespace, id, chain, blocks);
        }
        if added > 0 {
            tracing::debug!(model = model.name, added, "blocks were found in a shared store");
        }
        added
    }

    /// Removes the objects of dropped chains, soon.
    pub(in crate::service) fn drop_objects(
        &self,
        model: &RegisteredModel,
        chains: &[KeyChain<'_>],
    ) {
        let remote = self.tiers.as_ref().and_then(|tiers| tiers.remote.as_ref());
        let Some(remote) = remote.filter(|remote| remote.config.writes) else { return };
        let Some(scope) = model.scope else { return };
        let names: Vec<_> = chains.iter().flat_map(|chain| name_chain(scope, chain, 0)).collect();
        let tier = remote.tier.clone();
        tokio::spawn(async move {
            let removed = tier.remove_blocks(&names).await;
            tracing::debug!(asked = names.len(), removed, "dropped blocks left a shared store");
        });
    }
}
