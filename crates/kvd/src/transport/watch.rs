//! `WatchBlocks` on the wire: events of a watch, joined to chains of keys, sent one answer ahead.

use super::bytes::ByteMeter;
use super::call::wire_status;
use super::connection::ServerPhase;
use super::stream::{AnswerStream, ReplyStream, StreamAnswer, StreamState, shutting_down};
use crate::metrics::OpenCount;
use crate::service::{
    BlockWatch, CallContext, Service, ServiceError, WatchAnswer, WatchStart, WatchedEvents,
    WatchedModel,
};
use bytes::Bytes;
use kvd_core::ModelId;
use kvd_proto::v1;
use kvd_store::{BlockEvent, BlockTier, PlacedBlock};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::mpsc;
use tracing::Instrument;

/// Begins a watch.
pub(super) fn open_watch(
    service: &Arc<Service>,
    call: &CallContext,
    message: v1::WatchBlocksRequest,
) -> Result<BlockWatch, ServiceError> {
    let v1::WatchBlocksRequest { boot_id, after_number } = message;
    service.watch_blocks(call, &WatchStart { boot_id, after_number })
}

/// The answers of a watch, until its client, its right or the daemon ends. A client that does not
/// read holds up nobody: it is told to begin anew.
pub(super) fn watch_stream(
    mut watch: BlockWatch,
    streams: &StreamState,
    meter: ByteMeter,
) -> ReplyStream<v1::WatchBlocksResponse> {
    let (replies, receiver) = mpsc::channel(1);
    let (phase, open) = (streams.phase.clone(), OpenCount::new(&streams.watches));
    let send = async move {
        let _open = open;
        let mut models = HashMap::new();
        loop {
            let told = tokio::select! {
                biased;
                () = replies.closed() => return,
                () = ServerPhase::Draining.wait_until(phase.clone()) => Err(shutting_down()),
                told = watch.next_answer() => told.map_err(|error| wire_status(&error)),
            };
            let answer = match told {
                Ok(WatchAnswer { told, held }) => {
                    let reply = Ok(watch_response(&watch, &mut models, told));
                    StreamAnswer { reply, held: Some(held) }
                }
                Err(status) => Err(status).into(),
            };
            let has_ended = answer.reply.is_err();
            if replies.send(answer).await.is_err() || has_ended {
                return;
            }
        }
    };
    tokio::spawn(send.in_current_span());
    Box::pin(AnswerStream { receiver, meter })
}

/// An event of some blocks, which more may be joined to.
struct JoinedEvent {
    change: v1::BlockChange,
    /// The first of them.
    first: PlacedBlock,
    model: WatchedModel,
    /// Keys of all, side by side.
    keys: Vec<u8>,
}

impl JoinedEvent {
    fn new(change: v1::BlockChange, first: PlacedBlock, model: WatchedModel) -> Self {
        let keys = first.key.to_vec();
        Self { change, first, model, keys }
    }

    /// Adds a block, if the event goes on with it: a chain of stored ones, any removed ones.
    fn join_block(&mut self, change: v1::BlockChange, block: &PlacedBlock) -> bool {
        let (of, size) = (&self.first, self.first.key.len());
        let is_same = (self.change, of.model, of.tier) == (change, block.model, block.tier)
            && block.key.len() == size;
        let last = &self.keys[self.keys.len() - size..];
        let goes_on = change == v1::BlockChange::Removed || block.parent.as_deref() == Some(last);
        if is_same && goes_on {
            self.keys.extend_from_slice(&block.key);
        }
        is_same && goes_on
    }

    fn into_event(self) -> v1::BlockEvent {
        let Self { change, first, model, keys } = self;
        let key_bytes = first.key.len() as u32;
        let keys = v1::BlockKeys { keys: keys.into(), key_bytes, key_tokens: model.block_tokens };
        v1::BlockEvent {
            change: change.into(),
            model_id: first.model.0,
            model: model.name,
            tier: wire_tier(first.tier).into(),
            keys: Some(keys),
            parent_key: first.parent.map_or_else(Bytes::new, |key| Bytes::copy_from_slice(&key)),
            position: first.position,
        }
    }
}

fn watch_response(
    watch: &BlockWatch,
    models: &mut HashMap<ModelId, WatchedModel>,
    told: WatchedEvents,
) -> v1::WatchBlocksResponse {
    let WatchedEvents { number, is_reset: reset, events: told } = told;
    let events = join_events(told, models, |model| watch.describe_model(model));
    v1::WatchBlocksResponse { boot_id: watch.boot_id().to_owned(), number, reset, events }
}

/// Events as messages, those of chains joined.
fn join_events(
    told: Vec<BlockEvent>,
    models: &mut HashMap<ModelId, WatchedModel>,
    describe_model: impl Fn(ModelId) -> WatchedModel,
) -> Vec<v1::BlockEvent> {
    let (mut events, mut open) = (Vec::new(), None::<JoinedEvent>);
    for event in told {
        let (change, block) = match event {
            BlockEvent::Stored(block) => (v1::BlockChange::Stored, block),
            BlockEvent::Removed(block) => (v1::BlockChange::Removed, block),
            BlockEvent::Cleared(model) => {
                events.extend(open.take().map(JoinedEvent::into_event));
                let found = models.remove(&model).unwrap_or_else(|| describe_model(model));
                events.push(v1::BlockEvent {
                    change: v1::BlockChange::Cleared.into(),
                    model_id: model.0,
                    model: found.name,
                    ..v1::BlockEvent::default()
                });
                continue;
            }
        };
        if open.as_mut().is_some_and(|open| open.join_block(change, &block)) {
            continue;
        }
        events.extend(open.take().map(JoinedEvent::into_event));
        let describe = || describe_model(block.model);
        let model = models.entry(block.model).or_insert_with(describe).clone();
        open = Some(JoinedEvent::new(change, block, model));
    }
    events.extend(open.map(JoinedEvent::into_event));
    events
}

fn wire_tier(tier: BlockTier) -> v1::BlockTier {
    match tier {
        BlockTier::Pool => v1::BlockTier::Pool,
        BlockTier::Disk => v1::BlockTier::Disk,
        BlockTier::Remote => v1::BlockTier::Remote,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(tier: BlockTier, key: &str, parent: Option<&str>) -> PlacedBlock {
        let bytes = |text: &str| text.as_bytes().into();
        let (key, parent) = (bytes(key), parent.map(bytes));
        PlacedBlock { model: ModelId(1), tier, key, parent, position: 0 }
    }

    #[test]
    fn chains_of_stored_blocks_are_joined_and_others_are_not() {
        let stored = v1::BlockChange::Stored;
        let model = WatchedModel { name: "m".to_owned(), block_tokens: 64 };
        let mut event = JoinedEvent::new(stored, block(BlockTier::Pool, "aa", None), model);
        assert!(event.join_block(stored, &block(BlockTier::Pool, "bb", Some("aa"))));
        for other in [
            block(BlockTier::Pool, "cc", Some("aa")),
            block(BlockTier::Pool, "cc", None),
            block(BlockTier::Disk, "cc", Some("bb")),
            block(BlockTier::Pool, "ccc", Some("bb")),
            PlacedBlock { model: ModelId(2), ..block(BlockTier::Pool, "cc", Some("bb")) },
        ] {
            assert!(!event.join_block(stored, &other), "{other:?}");
        }
        let next = block(BlockTier::Pool, "cc", Some("bb"));
        assert!(!event.join_block(v1::BlockChange::Removed, &next));
        assert!(event.join_block(stored, &next));
        let keys = event.into_event().keys.unwrap();
        assert_eq!((&keys.keys[..], keys.key_bytes, keys.key_tokens), (&b"aabbcc"[..], 2, 64));
    }

    /// Bytes of messages in memory, about: what allocators keep of each is guessed.
    fn memory_of(events: &Vec<v1::BlockEvent>) -> usize {
        const ALLOCATION: usize = 16;
        let of_event = |event: &v1::BlockEvent| {
            let keys = event.keys.as_ref().map_or(0, |keys| keys.keys.len() + ALLOCATION);
            event.model.capacity() + keys + event.parent_key.len() + 2 * ALLOCATION
        };
        let lists = events.capacity() * size_of::<v1::BlockEvent>() + ALLOCATION;
        lists + events.iter().map(of_event).sum::<usize>()
    }

    #[test]
    fn an_answer_holds_no_more_bytes_than_it_is_counted_with() {
        let describe = |_| WatchedModel { name: "m".repeat(128), block_tokens: 64 };
        let (key, parent) = ("k".repeat(64), "p".repeat(64));
        let apart = block(BlockTier::Pool, &key, Some(&parent));
        let chained = block(BlockTier::Pool, &key, Some(&key));
        // One more than a power of two: a list has grown to twice its length.
        for (event, count) in [
            (BlockEvent::Stored(apart.clone()), 1),
            (BlockEvent::Stored(apart), 513),
            (BlockEvent::Stored(chained), 513),
            (BlockEvent::Cleared(ModelId(1)), 513),
        ] {
            let told = WatchedEvents { events: vec![event; count], ..WatchedEvents::default() };
            let counted = told.answer_bytes(|model| describe(model).name.len());
            let joined = join_events(told.events, &mut HashMap::new(), describe);
            let held = memory_of(&joined);
            assert!(held as u64 <= counted, "{count}: {held} bytes, counted as {counted}");
        }
    }
}
