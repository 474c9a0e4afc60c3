//! `PublishBlocks`: blocks that are still raw are packed, then all become findable.

use super::tiers::{CacheTiers, ExportSource, PublishedKeys};
use super::{CallContext, RegisteredModel, Service, ServiceError, pack};
use crate::device_worker::DeviceWork;
use crate::scheduler::JobKind;
use kvd_compute::{Backend, Stop};
use kvd_core::{ErrorCode, SequenceId};
use kvd_proto::domain::BlockKeys;
use kvd_store::{ArenaPool, HeldChain, PublishTicket, PublishedBlocks, QuotaKind, SequenceStore};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a publish waits for the disk whose caller has no deadline.
const DISK_WAIT_MAX: Duration = Duration::from_secs(60);

/// How a publish is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublishMode {
    /// The sequence reads the pages as they are found.
    pub settles: bool,
    /// The answer waits until the pages are on disk, or will not be.
    pub waits_for_disk: bool,
}

/// Outcome of a publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishReply {
    /// In the index.
    pub published: PublishedBlocks,
    /// Tokens of the sequence, from its start, that a restart leaves.
    pub durable_length: u32,
    /// Why these are fewer than are found; none where it was not waited for them.
    pub not_durable: Option<&'static str>,
}

impl Service {
    /// [`Service::publish_blocks`] or [`Service::publish_settled`], and the way of the pages to
    /// disk.
    ///
    /// # Errors
    /// As those. Pages that do not get to disk are no error: they can be found all the same.
    pub async fn publish_in_mode(
        &self,
        call: &CallContext,
        sequence: SequenceId,
        start: u32,
        keys: &BlockKeys,
        mode: PublishMode,
    ) -> Result<PublishReply, ServiceError> {
        let change: fn(PublishTicket) -> PublishTicket =
            if mode.settles { PublishTicket::with_settling } else { |ticket| ticket };
        self.wait_for_prefix(call, sequence).await;
        let published = self.publish_by(call, sequence, start, keys, change).await?;
        let mut reply = PublishReply { published, durable_length: 0, not_durable: None };
        let shard = self.shard_of(sequence)?;
        // A sequence that was closed meanwhile has published all the same.
        let held = shard.store.hold_published(&call.namespace, sequence);
        let (Ok(Some(held)), Ok(shape)) = (held, shard.store.model_of(&call.namespace, sequence))
        else {
            reply.not_durable = mode.waits_for_disk.then_some("DISK_ERROR");
            return Ok(reply);
        };
        let model = self.models.find_model(&call.namespace, shape.id)?;
        let Some((tiers, scope)) = self.tiers.as_ref().zip(model.scope) else {
            let reason = match &self.tiers {
                None => "NO_DISK",
                Some(_) if model.is_identified => "SCOPE_IN_USE",
                Some(_) => "NO_IDENTITY",
            };
            reply.not_durable = mode.waits_for_disk.then_some(reason);
            return Ok(reply);
        };
        let (worker, store) = (&shard.worker, &*shard.store);
        let source = ExportSource { scope, model: &model, worker, store, shard: model.shard };
        let chains = self.read_chains(&model, std::slice::from_ref(keys))?;
        let first = start / shape.geometry.block_tokens;
        let prefix_tokens = reply.published.length;
        let keys = PublishedKeys { first, chain: &chains[0], prefix_tokens };
        let account = self.quotas.quota_table().find_account(&call.namespace);
        let refusals = || account.as_ref().map_or(0, |of| of.refused_count(QuotaKind::DiskBytes));
        let refused_before = refusals();
        tiers.queue_blocks(&source, &held, keys);
        let is_over_quota = refusals() > refused_before;
        let waits = mode.waits_for_disk && tiers.has_disk();
        let is_late = waits && !wait_for_disk(call, tiers, store, &held).await;
        let found = store.prefix_index().find_residency(&held);
        let durable = found.durable as u32 * shape.geometry.block_tokens;
        reply.durable_length = durable.min(reply.published.length);
        if mode.waits_for_disk && reply.durable_length < reply.published.length {
            reply.not_durable = Some(match is_over_quota {
                true => ErrorCode::QuotaExceeded.name(),
                false if is_late => "DEADLINE",
                false => tiers.failure_reason(),
            });
        }
        Ok(reply)
    }

    /// Makes whole pages of a sequence findable from token `start` on. What needs no packing takes
    /// no part of the device's queue.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_GAP`, `RANGE_NOT_STORED`, `INVALID_ARGUMENT` and errors of the
    /// queue and the device; nothing has happened then.
    pub async fn publish_blocks(
        &self,
        call: &CallContext,
        sequence: SequenceId,
        start: u32,
        keys: &BlockKeys,
    ) -> Result<PublishedBlocks, ServiceError> {
        self.publish_by(call, sequence, start, keys, |ticket| ticket).await
    }

    /// [`Service::publish_blocks`], after which the sequence reads the pages as they are found.
    ///
    /// # Errors
    /// As that.
    pub async fn publish_settled(
        &self,
        call: &CallContext,
        sequence: SequenceId,
        start: u32,
        keys: &BlockKeys,
    ) -> Result<PublishedBlocks, ServiceError> {
        self.publish_by(call, sequence, start, keys, PublishTicket::with_settling).await
    }

    async fn publish_by(
        &self,
        call: &CallContext,
        sequence: SequenceId,
        start: u32,
        keys: &BlockKeys,
        change: fn(PublishTicket) -> PublishTicket,
    ) -> Result<PublishedBlocks, ServiceError> {
        self.admit_call(call)?;
        let shard = self.shard_of(sequence)?;
        let shape = shard.store.model_of(&call.namespace, sequence)?;
        let model = self.models.find_model(&call.namespace, shape.id)?;
        let chains = self.read_chains(&model, std::slice::from_ref(keys))?;
        let ticket = shard.store.begin_publish(&call.namespace, sequence, start, &chains[0])?;
        let ticket = change(ticket);
        if ticket.layers_to_pack().next().is_none() {
            return Ok(ticket.commit_blocks());
        }
        let pool = shard.store.pool().clone();
        let job = PublishJob { ticket: Some(ticket), model, pool };
        shard.worker.ask_device(call, job).await
    }
}

/// Waits until no block of a prefix waits to be written; whether that came in time.
async fn wait_for_disk(
    call: &CallContext,
    tiers: &CacheTiers,
    store: &SequenceStore,
    held: &HeldChain,
) -> bool {
    let own_end = Instant::now() + DISK_WAIT_MAX;
    let end = call.deadline.map_or(own_end, |deadline| own_end.min(deadline));
    loop {
        let mut written = std::pin::pin!(tiers.written_blocks().notified());
        // From here on no block is missed.
        written.as_mut().enable();
        if store.prefix_index().find_residency(held).queued == 0 {
            return true;
        }
        if tokio::time::timeout_at(end.into(), written).await.is_err() {
            return false;
        }
    }
}

/// The job of a publish: packs one layer at a time, so that attends come between.
pub(crate) struct PublishJob {
    /// None once it is committed.
    ticket: Option<PublishTicket>,
    model: Arc<RegisteredModel>,
    pool: Arc<ArenaPool>,
}

impl DeviceWork for PublishJob {
    type Reply = PublishedBlocks;

    fn job_kind(&self) -> JobKind {
        JobKind::Other
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<PublishedBlocks>, ServiceError> {
        let Some(ticket) = &mut self.ticket else { return Ok(None) };
        let next = ticket.layers_to_pack().next();
        if let Some(layer) = next {
            let batch = ticket.pack_batch(layer);
            let (pool, model) = (&self.pool, &self.model);
            let packed = pack::pack_blocks(backend, pool, model, &batch)?;
            ticket.set_packed(layer, packed);
        }
        // Placing pages has no answer of its own: what a failed device holds is never published.
        if let Some(reason) = backend.failure() {
            return Err(ServiceError::new(ErrorCode::DeviceFailed, reason));
        }
        if ticket.layers_to_pack().next().is_some() {
            return Ok(None);
        }
        Ok(self.ticket.take().map(PublishTicket::commit_blocks))
    }
}
