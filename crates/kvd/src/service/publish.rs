//! `PublishBlocks`: blocks that are still raw are packed, then all become findable.

use super::{CallContext, RegisteredModel, Service, ServiceError, pack};
use crate::device_worker::DeviceWork;
use crate::scheduler::JobKind;
use kvd_compute::{Backend, Stop};
use kvd_core::{ErrorCode, SequenceId};
use kvd_proto::domain::BlockKeys;
use kvd_store::{ArenaPool, PublishTicket, PublishedBlocks};
use std::sync::Arc;

impl Service {
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
