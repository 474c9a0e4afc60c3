//! The cache: matching keys, leases, opening on a prefix, pins and drops.

use super::{CallContext, DeviceShard, RegisteredModel, Service, ServiceError, ids};
use crate::config::CacheConfig;
use crate::metrics::{Metric, Metrics};
use kvd_core::{ErrorCode, IdCounter, IdSpace, LeaseId, ModelId, SequenceId, SessionId};
use kvd_proto::domain::BlockKeys;
use kvd_store::{
    AttachedSequence, CacheLimits, CacheUsage, DeviceQuotas, DroppedBlocks, KeyChain, LeaseRequest,
    ModelShape, PackedKeys, PinRequest, PinnedPrefixes, SequenceStore, SessionSequences,
};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The cached part of some chains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MatchReply {
    /// Keys of each chain, from its start.
    pub keys: Vec<u32>,
    /// As many tokens.
    pub tokens: Vec<u32>,
    /// Those of them that are in the pool; the others are on disk.
    pub pool_tokens: Vec<u32>,
    /// Keeps them; none where nothing was matched or nobody asked for it.
    pub lease: Option<LeaseId>,
}

/// The pinned part of some chains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinReply {
    /// Tokens of each chain.
    pub tokens: Vec<u32>,
    /// Bytes of all pinned blocks of the device.
    pub pinned_bytes: u64,
}

/// A sequence to open on a prefix.
#[derive(Clone, Debug)]
pub struct PrefixOpening {
    /// Its model.
    pub model: ModelId,
    /// The session that is to own it.
    pub session: Option<SessionId>,
    /// The chain.
    pub prefix: BlockKeys,
    /// A lease that ends with it.
    pub lease: Option<LeaseId>,
}

/// Use of the cache of one device.
pub(crate) struct DeviceCache<'a> {
    /// The device, as the label `device` of metrics has it.
    pub(crate) device: &'a str,
    /// Levels and counts.
    pub(crate) usage: CacheUsage,
    /// Bytes that cached blocks may take.
    pub(crate) limit_bytes: u64,
}

/// Leases of one device's cache.
pub(super) type LeaseIds = IdCounter<LeaseId>;

/// The limits of a cache in a pool of so many bytes.
pub(super) fn cache_limits(
    config: &CacheConfig,
    pool_bytes: u64,
    quotas: DeviceQuotas,
) -> CacheLimits {
    CacheLimits {
        eviction: config.policy,
        bytes_max: config.limit_bytes(pool_bytes),
        entries_max: config.blocks_max,
        leases_max: config.leases_max,
        pinned_bytes_max: config.pinned_bytes_max,
        quotas,
        // Random at each start: nobody can choose keys whose hashes meet.
        seed: RandomState::new().hash_one(0),
        events: None,
    }
}

/// Makes the metrics of the cache known before it is used.
pub(super) fn describe_cache(metrics: &Metrics) {
    for metric in [
        Metric::MatchKeysTotal,
        Metric::MatchHitTokensTotal,
        Metric::AttachedTokensTotal,
        Metric::PromotedBlocksTotal,
        Metric::ImportRefusedTotal,
    ] {
        metrics.counter(metric, &[]).increment(0);
    }
    // Registered is shown, with a count of 0.
    for metric in [Metric::MatchSeconds, Metric::PromoteSeconds] {
        let _shown = metrics.histogram(metric, &[]);
    }
    for op in kvd_remote::RemoteOp::ALL {
        let _shown = metrics.histogram(Metric::RemoteSeconds, &[("op", op.op_label())]);
    }
}

impl Service {
    /// How much of each chain is cached, and a lease on it where a time is given, which may be cut.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, `INVALID_ARGUMENT` for keys that do not fit the model, `LIMIT_EXCEEDED`.
    pub fn match_prefixes(
        &self,
        call: &CallContext,
        model: ModelId,
        chains: &[BlockKeys],
        lease: Duration,
    ) -> Result<MatchReply, ServiceError> {
        self.admit_call(call)?;
        let began = Instant::now();
        let found = self.models.find_model(&call.namespace, model)?;
        let chains = self.read_chains(&found, chains)?;
        let reply = self.match_chains(call, &found, &chains, lease)?;
        self.count_match(began.elapsed(), &chains, &reply);
        Ok(reply)
    }

    /// [`Service::match_prefixes`] of chains that were read; counts nothing.
    pub(super) fn match_chains(
        &self,
        call: &CallContext,
        found: &RegisteredModel,
        chains: &[KeyChain<'_>],
        lease: Duration,
    ) -> Result<MatchReply, ServiceError> {
        let (shard, model) = (&self.shards[found.shard], found.shape.id);
        let (index, time) = (shard.store.prefix_index(), lease.min(self.config.cache.lease_max));
        let (blocks, lease) = if time.is_zero() {
            (index.match_prefixes(model, chains), None)
        } else {
            let (id, now) = (shard.leases.next()?, Instant::now());
            let namespace = &call.namespace;
            let request = LeaseRequest { id, namespace, model, now, ends: now + time };
            let blocks = index.lease_prefixes(&request, chains)?;
            let is_held = blocks.iter().any(|blocks| *blocks > 0);
            (blocks, is_held.then_some(id))
        };
        let block_tokens = found.shape.geometry.block_tokens;
        let keys =
            chains.iter().zip(&blocks).map(|(chain, blocks)| chain.count_keys(*blocks) as u32);
        let keys = keys.collect();
        let as_tokens = |blocks: &[usize]| -> Vec<u32> {
            blocks.iter().map(|blocks| *blocks as u32 * block_tokens).collect()
        };
        let tokens = as_tokens(&blocks);
        let pool_tokens = match self.tiers {
            None => tokens.clone(),
            Some(_) => as_tokens(&index.count_in_pool(model, chains, &blocks)),
        };
        Ok(MatchReply { keys, tokens, pool_tokens, lease })
    }

    /// Counts a call that matched, and the time that the index took.
    pub(super) fn count_match(&self, took: Duration, chains: &[KeyChain<'_>], reply: &MatchReply) {
        let asked: usize = chains.iter().map(|chain| chain.count_keys(chain.count_blocks())).sum();
        let hit: u64 = reply.tokens.iter().map(|tokens| u64::from(*tokens)).sum();
        self.metrics.counter(Metric::MatchKeysTotal, &[]).increment(asked as u64);
        self.metrics.counter(Metric::MatchHitTokensTotal, &[]).increment(hit);
        self.metrics.histogram(Metric::MatchSeconds, &[]).record(took.as_secs_f64());
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// `UNKNOWN_LEASE` for one that has ended or is of others.
    pub fn release_lease(&self, call: &CallContext, id: LeaseId) -> Result<(), ServiceError> {
        // Also while draining: giving back is never refused.
        self.check_namespace(&call.namespace)?;
        let shard = self.shard_of_lease(call, id)?;
        Ok(shard.store.prefix_index().release_lease(&call.namespace, id, Instant::now())?)
    }

    /// A new sequence that begins with the longest cached prefix of a chain.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, `UNKNOWN_SESSION`, `UNKNOWN_LEASE`, `INVALID_ARGUMENT` or
    /// `LIMIT_EXCEEDED`; nothing is open then.
    pub fn open_on_prefix(
        &self,
        call: &CallContext,
        opening: &PrefixOpening,
    ) -> Result<AttachedSequence, ServiceError> {
        let chains = std::slice::from_ref(&opening.prefix);
        self.open_by(call, opening, |store, shape, session| {
            let found = self.models.find_model(&call.namespace, shape.id)?;
            let chains = self.read_chains(&found, chains)?;
            Ok(store.open_with_prefix(shape, &chains[0], session)?)
        })
    }

    /// Opens a sequence by `open`, and ends the lease of its opening.
    pub(super) fn open_by(
        &self,
        call: &CallContext,
        opening: &PrefixOpening,
        open: impl FnOnce(
            &SequenceStore,
            Arc<ModelShape>,
            Option<&Arc<SessionSequences>>,
        ) -> Result<AttachedSequence, ServiceError>,
    ) -> Result<AttachedSequence, ServiceError> {
        self.admit_call(call)?;
        let PrefixOpening { model, session, lease, .. } = opening;
        let find = |id| self.sessions.find_session(&call.namespace, id, Instant::now());
        let session = session.map(find).transpose()?;
        let found = self.models.find_model(&call.namespace, *model)?;
        let store = &self.shards[found.shard].store;
        let opened = open(store, found.shape.clone(), session.as_ref())?;
        // The model may have been unregistered meanwhile: then it would be a sequence of none.
        let still_there = self.models.find_model(&call.namespace, *model).map(drop);
        let released = lease.map_or(Ok(()), |lease| self.release_lease(call, lease));
        if let Err(error) = still_there.and(released) {
            store.close_sequence(&call.namespace, opened.id)?;
            if error.code() == ErrorCode::UnknownModel {
                store.forget_model(*model);
            }
            return Err(error);
        }
        self.metrics.counter(Metric::AttachedTokensTotal, &[]).increment(opened.length.into());
        Ok(opened)
    }

    /// Gives a sequence up, and the blocks that it published and nothing else needs.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`.
    pub fn close_and_drop(&self, call: &CallContext, id: SequenceId) -> Result<(), ServiceError> {
        self.check_namespace(&call.namespace)?;
        let store = &self.shard_of(id)?.store;
        let model = store.model_of(&call.namespace, id)?;
        let dropped = store.close_and_drop(&call.namespace, id)?;
        if let Ok(model) = self.models.find_model(&call.namespace, model.id) {
            self.drop_records(&model, &dropped);
        }
        Ok(())
    }

    /// Drops blocks from disk that were dropped from the index.
    fn drop_records(&self, model: &RegisteredModel, dropped: &DroppedBlocks) {
        if let (Some(tiers), Some(scope)) = (&self.tiers, model.scope) {
            tiers.remove_records(scope, &dropped.on_disk);
        }
    }

    /// Keeps what is cached of chains, for a time or until it is unpinned.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, `INVALID_ARGUMENT`, or `LIMIT_EXCEEDED` of pins or of their bytes.
    pub fn pin_prefixes(
        &self,
        call: &CallContext,
        model: ModelId,
        chains: &[BlockKeys],
        ttl: Option<Duration>,
    ) -> Result<PinReply, ServiceError> {
        self.admit_call(call)?;
        let found = self.models.find_model(&call.namespace, model)?;
        let chains = self.read_chains(&found, chains)?;
        let now = Instant::now();
        // One that ends in centuries is one that stays.
        let ends = ttl.and_then(|ttl| now.checked_add(ttl));
        let index = self.shards[found.shard].store.prefix_index();
        let pinned = index.pin_prefixes(PinRequest { model, now, ends }, &chains)?;
        let PinnedPrefixes { blocks, pinned_bytes } = pinned;
        let block_tokens = found.shape.geometry.block_tokens;
        let tokens = blocks.into_iter().map(|blocks| blocks as u32 * block_tokens).collect();
        Ok(PinReply { tokens, pinned_bytes })
    }

    /// Takes the pins back that are on prefixes of chains; how many these were.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL` or `INVALID_ARGUMENT`.
    pub fn unpin_prefixes(
        &self,
        call: &CallContext,
        model: ModelId,
        chains: &[BlockKeys],
    ) -> Result<u64, ServiceError> {
        self.check_namespace(&call.namespace)?;
        let found = self.models.find_model(&call.namespace, model)?;
        let chains = self.read_chains(&found, chains)?;
        Ok(self.shards[found.shard].store.prefix_index().unpin_prefixes(model, &chains))
    }

    /// Drops the cached blocks of chains, or all of the model where there are none.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL` or `INVALID_ARGUMENT`.
    pub fn drop_blocks(
        &self,
        call: &CallContext,
        model: ModelId,
        chains: &[BlockKeys],
    ) -> Result<DroppedBlocks, ServiceError> {
        self.check_namespace(&call.namespace)?;
        let found = self.models.find_model(&call.namespace, model)?;
        let index = self.shards[found.shard].store.prefix_index();
        let dropped = if chains.is_empty() {
            index.drop_model_blocks(model)
        } else {
            let chains = self.read_chains(&found, chains)?;
            self.drop_objects(&found, &chains);
            index.drop_prefixes(model, &chains)
        };
        self.drop_records(&found, &dropped);
        Ok(dropped)
    }

    /// Use of each device's cache.
    pub(crate) fn device_caches(&self) -> impl Iterator<Item = DeviceCache<'_>> {
        let now = Instant::now();
        self.shards.iter().map(move |shard| DeviceCache {
            device: &shard.worker.metrics().label,
            usage: shard.store.prefix_index().read_usage(now),
            limit_bytes: self.config.cache.limit_bytes(shard.worker.device_info().arena_bytes),
        })
    }

    /// Reads chains of keys for a model.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, which names the chain, or `LIMIT_EXCEEDED`.
    pub(super) fn read_chains<'a>(
        &self,
        model: &RegisteredModel,
        chains: &'a [BlockKeys],
    ) -> Result<Vec<KeyChain<'a>>, ServiceError> {
        // A chain without keys is work too.
        let keys: u64 = chains.iter().map(|chain| chain.count_keys().max(1)).sum();
        let max = self.config.cache.keys_per_call_max;
        if keys > max {
            let message = format!("{keys} keys in one call; cache.keys_per_call_max is {max}");
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        let block_tokens = model.shape.geometry.block_tokens;
        let read = |(index, chain): (usize, &'a BlockKeys)| {
            let key_tokens = if chain.key_tokens == 0 { block_tokens } else { chain.key_tokens };
            let keys = PackedKeys { bytes: &chain.keys, key_bytes: chain.key_bytes, key_tokens };
            KeyChain::new(keys, block_tokens).map_err(|error| {
                let message = format!("chain {index}: {error}");
                ServiceError::new(ErrorCode::InvalidArgument, message)
            })
        };
        chains.iter().enumerate().map(read).collect()
    }

    /// The device of a lease, if it is anywhere.
    fn shard_of_lease(
        &self,
        call: &CallContext,
        id: LeaseId,
    ) -> Result<&DeviceShard, ServiceError> {
        let device = self.ids.device_of_lease(id, self.shards.len() as u64);
        device
            .and_then(|device| self.shards.get(device as usize))
            .ok_or_else(|| ids::unknown_lease(&self.ids, &call.namespace, id))
    }
}

/// The counters of leases of `count` devices.
pub(super) fn lease_ids(ids: &Arc<IdSpace>, index: u64, count: u64) -> LeaseIds {
    ids.lease_counter(index, count)
}
