//! Stores through regions.

use super::*;
use kvd_compute::{DeviceRegion, RegionRows};
use kvd_core::SequenceId;
use std::sync::mpsc;

const LAYER: LayerIndex = LayerIndex(0);
/// Bytes of K, or of V, of a token.
const ROW: u64 = 2 * DIM as u64 * 4;
/// Room for 50 tokens of both behind the completion record, and a little more.
const MEMORY: u64 = START + 100 * ROW + 256;
/// Completion record of a second call, in a file without payloads.
const NEXT: u64 = DONE + 256;

impl Fixture {
    async fn sequence(&self) -> SequenceId {
        self.client.open_sequence(self.batch.model).await.unwrap()
    }

    /// A worker with memory for rows.
    fn shared(&self, name: u8) -> Worker {
        self.worker(&self.memories, name, MEMORY, |options| options).unwrap()
    }

    /// Stores a chunk whose rows are left in the worker's memory, K from `offset` on (of the
    /// payloads) and V behind it; what the record says.
    fn store_from(
        &self,
        worker: &Worker,
        chunk: &StoreChunk,
        offset: u64,
    ) -> Result<[u32; 3], ClientError> {
        self.send_from(worker, chunk, offset, DONE)?;
        tokio::task::block_in_place(|| worker.wait_call(DONE))
    }

    /// Sends a store with its record at `done`, and waits for nothing.
    fn send_from(
        &self,
        worker: &Worker,
        chunk: &StoreChunk,
        offset: u64,
        done: u64,
    ) -> Result<(), ClientError> {
        let k = RegionSlice { offset: START + offset, bytes: chunk.k.len() as u64 };
        let v = RegionSlice { offset: k.offset + k.bytes, bytes: chunk.v.len() as u64 };
        for (at, bytes) in [(k, &chunk.k), (v, &chunk.v)] {
            worker.payloads().write_bytes(at.offset, bytes).unwrap();
        }
        tokio::task::block_in_place(|| worker.send_store(chunk.clone(), done, [k, v]))
    }

    /// Keeps the device busy until the answer is dropped.
    async fn hold(&self) -> mpsc::SyncSender<()> {
        let (release, released) = mpsc::sync_channel::<()>(1);
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let worker = self.running.service().first_worker().clone();
        let call = CallContext::new(Namespace::new("default").unwrap());
        tokio::spawn(async move {
            let work = move |_: &mut dyn Backend| {
                let _ = begun.send(());
                let _ = released.recv();
                Ok(())
            };
            worker.run_closure(&call, work).await
        });
        has_begun.await.unwrap();
        release
    }

    /// Attention over all of a sequence.
    async fn seen(&self, sequence: SequenceId) -> Attended {
        let queries = vec![AttendQuery::new(sequence, 1)];
        self.client.attend_batch(AttendBatch { queries, ..self.batch.clone() }).await.unwrap()
    }
}

/// Rows of so many tokens.
fn chunk(sequence: SequenceId, start: u32, tokens: u32) -> StoreChunk {
    let rows = |step: f32| {
        let values = start * 2 * DIM..(start + tokens) * 2 * DIM;
        let values = values.map(|i| (i as f32 * step).sin());
        bytes::Bytes::from(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
    };
    StoreChunk { sequence, layer: LAYER, start, tokens, k: rows(0.7), v: rows(1.3) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_are_stored_from_where_they_are_and_read_as_if_they_had_been_sent() {
    for kind in KINDS {
        let fixture = Fixture::new(kind).await;
        let region = fixture.shared(7);
        let (there, sent) = (fixture.sequence().await, fixture.sequence().await);
        let (mut start, mut packed) = (0, 0);
        // Over the ends of blocks and of the window.
        for tokens in [1, 15, 7, 50, 48, 40, 50] {
            let ack = fixture.client.store_chunk(chunk(sent, start, tokens)).await.unwrap();
            let at = [0, 64, 4][start as usize % 3];
            let values = fixture.store_from(&region, &chunk(there, start, tokens), at).unwrap();
            assert_eq!(values, [ack.length, 0, ack.packed_blocks]);
            (start, packed) = (start + tokens, packed + ack.packed_blocks);
        }
        assert!(packed > 2, "blocks left the window");
        assert_eq!(fixture.seen(there).await, fixture.seen(sent).await);
        assert_eq!(fixture.calls(), fixture.counted(7, 0));
        assert_eq!(fixture.memories.copies(), 0, "no row went through the host");
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_range_that_came_one_way_is_known_when_it_comes_another() {
    for kind in KINDS {
        let fixture = Fixture::new(kind).await;
        let region = &fixture.shared(1);
        let sequence = fixture.sequence().await;
        let (first, second) = (chunk(sequence, 0, 20), chunk(sequence, 20, 20));
        fixture.client.store_chunk(first.clone()).await.unwrap();
        assert_eq!(fixture.store_from(region, &first, 0).unwrap(), [20, 1, 0]);
        fixture.store_from(region, &second, 0).unwrap();
        let again = fixture.client.store_chunk(second.clone()).await.unwrap();
        assert_eq!((again.length, again.replayed), (40, true));
        assert_eq!(fixture.store_from(region, &second, 64).unwrap()[..2], [40, 1]);
        // Other content, by one bit; rows that changed places; K for V.
        let mut other = second.k.to_vec();
        other[77] ^= 1;
        let swapped = [&second.k[ROW as usize..2 * ROW as usize], &second.k[..ROW as usize]];
        let swapped = [&swapped.concat(), &second.k[2 * ROW as usize..]].concat();
        for chunk in [
            StoreChunk { k: other.into(), ..second.clone() },
            StoreChunk { k: swapped.into(), ..second.clone() },
            StoreChunk { k: second.v.clone(), v: second.k.clone(), ..second.clone() },
        ] {
            let there = fixture.store_from(region, &chunk, 0).unwrap_err();
            let sent = fixture.client.store_chunk(chunk).await.unwrap_err();
            assert_eq!(there.code, Some(ErrorCode::RangeConflict), "{there}");
            assert_eq!((there.code, there.message), (sent.code, sent.message));
        }
        // Ranges that do not fit, which the device is not asked for.
        let staged = fixture.memories.stores.lock().staged;
        for (start, code) in [(41, ErrorCode::RangeGap), (39, ErrorCode::RangeOverlap)] {
            let refused = fixture.store_from(region, &chunk(sequence, start, 5), 0).unwrap_err();
            assert_eq!(refused.code, Some(code), "{refused}");
        }
        assert_eq!(fixture.memories.stores.lock().staged, staged);
        let sent = fixture.sequence().await;
        fixture.client.store_chunk(chunk(sent, 0, 40)).await.unwrap();
        assert_eq!(fixture.seen(sequence).await, fixture.seen(sent).await);
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_waits_for_the_device_is_in_flight_for_every_other_append() {
    let fixture = Fixture::new(RegionKind::CudaIpc).await;
    let region = fixture.shared(1);
    let (sequence, sent) = (fixture.sequence().await, fixture.sequence().await);
    let (first, second) = (chunk(sequence, 0, 20), chunk(sequence, 20, 20));
    let wait = |done| tokio::task::block_in_place(|| region.wait_call(done));
    let device = fixture.hold().await;
    fixture.send_from(&region, &first, 0, DONE).unwrap();
    // On the same connection, sent at once, and again: what comes first is taken up first.
    for _ in 0..20 {
        fixture.send_from(&region, &second, 40 * ROW, NEXT).unwrap();
        let refused = wait(NEXT).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::SequenceBusy), "{refused}");
        assert!(refused.message.contains("wait for its answer, then try again"), "{refused}");
    }
    // By another way, with the same range, and what would move the range's start.
    for chunk in [&second, &first] {
        let refused = fixture.client.store_chunk(chunk.clone()).await.unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::SequenceBusy), "{refused}");
    }
    let refused = fixture.client.truncate_sequence(sequence, 0).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::SequenceBusy), "{refused}");
    assert_eq!(fixture.memories.stores.lock().staged, 0, "the device was asked for none of them");
    drop(device);
    assert_eq!(wait(DONE).unwrap(), [20, 0, 0]);
    assert_eq!(fixture.store_from(&region, &second, 0).unwrap()[..2], [40, 0]);
    fixture.client.store_chunk(chunk(sent, 0, 40)).await.unwrap();
    assert_eq!(fixture.seen(sequence).await, fixture.seen(sent).await);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_fails_on_the_device_or_is_given_up_lets_others_append() {
    let fixture = Fixture::new(RegionKind::CudaIpc).await;
    let region = fixture.shared(1);
    let sequence = fixture.sequence().await;
    let (first, second) = (chunk(sequence, 0, 20), chunk(sequence, 20, 20));
    let wait = |done| tokio::task::block_in_place(|| region.wait_call(done));
    let mut k = first.k.to_vec();
    k[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let device = fixture.hold().await;
    fixture.send_from(&region, &StoreChunk { k: k.into(), ..first.clone() }, 0, DONE).unwrap();
    fixture.send_from(&region, &second, 40 * ROW, NEXT).unwrap();
    assert_eq!(wait(NEXT).unwrap_err().code, Some(ErrorCode::SequenceBusy));
    drop(device);
    assert_eq!(wait(DONE).unwrap_err().code, Some(ErrorCode::NonFinite));
    // Now there is a gap, and it can be filled.
    let refused = fixture.store_from(&region, &second, 0).unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::RangeGap), "{refused}");
    assert_eq!(fixture.store_from(&region, &first, 0).unwrap(), [20, 0, 0]);
    // A worker that leaves while its store waits.
    let other = fixture.shared(2);
    let device = fixture.hold().await;
    fixture.send_from(&other, &second, 0, DONE).unwrap();
    while fixture.client.truncate_sequence(sequence, 20).await.is_ok() {}
    drop(other);
    // It leaves the queue, and the sequence, while the device is still held; what closes its memory
    // is left.
    while fixture.client.truncate_sequence(sequence, 20).await.is_err() {}
    while fixture.running.service().first_worker().queued_jobs() != 1 {
        tokio::task::yield_now().await;
    }
    let staged = fixture.memories.stores.lock().staged;
    drop(device);
    fixture.eventually_open(&[1]).await;
    let stored = fixture.client.store_chunk(second.clone()).await.unwrap();
    assert_eq!((stored.length, stored.replayed), (40, false));
    assert_eq!(fixture.memories.stores.lock().staged, staged);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_are_no_numbers_leave_nothing_and_are_named_as_in_a_message() {
    for kind in KINDS {
        let fixture = Fixture::new(kind).await;
        let region = &fixture.shared(1);
        let sequence = fixture.sequence().await;
        let good = chunk(sequence, 0, 20);
        let pool = || fixture.running.service().pool_stats().used_bytes;
        let before = pool();
        for (side, at) in [(0, 3), (1, 2000)] {
            let mut sides = [good.k.to_vec(), good.v.to_vec()];
            sides[side][4 * at..4 * at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
            let [k, v] = sides.map(bytes::Bytes::from);
            let bad = StoreChunk { k, v, ..good.clone() };
            let there = fixture.store_from(region, &bad, 0).unwrap_err();
            let sent = fixture.client.store_chunk(bad).await.unwrap_err();
            assert_eq!(there.code, Some(ErrorCode::NonFinite), "{there}");
            assert_eq!(there.message, sent.message);
            assert_eq!(pool(), before);
        }
        assert_eq!(fixture.store_from(region, &good, 0).unwrap(), [20, 0, 0]);
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_writes_over_its_rows_changes_nothing_of_what_is_stored() {
    for kind in DEVICE_KINDS {
        let fixture = Fixture::new(kind).await;
        let region = &fixture.shared(1);
        let (there, sent) = (fixture.sequence().await, fixture.sequence().await);
        fixture.memories.stores.lock().spoil = true;
        fixture.store_from(region, &chunk(there, 0, 50), 0).unwrap();
        fixture.client.store_chunk(chunk(sent, 0, 50)).await.unwrap();
        assert_eq!(fixture.seen(there).await, fixture.seen(sent).await);
        // What is remembered is what was stored.
        let again = fixture.client.store_chunk(chunk(there, 0, 50)).await.unwrap();
        assert!(again.replayed);
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_the_device_cannot_take_where_they_are_go_through_the_host() {
    for kind in DEVICE_KINDS {
        let fixture = Fixture::new(kind).await;
        let region = &fixture.shared(1);
        let sequence = fixture.sequence().await;
        let mut start = 0;
        let mut store = |fixture: &Fixture, region: &Worker, at: u64| {
            let [length, replayed, _] =
                fixture.store_from(region, &chunk(sequence, start, 20), at).unwrap();
            start += 20;
            assert_eq!((length, replayed), (start, 0));
        };
        // Not aligned to values.
        store(&fixture, region, 2);
        assert_eq!(fixture.calls(), [0, 0, 1]);
        // More than there is room for, until there is.
        fixture.memories.stores.lock().room = Some(40 * ROW);
        store(&fixture, region, 0);
        fixture.memories.stores.lock().room = Some(40 * ROW + 1);
        store(&fixture, region, 0);
        assert_eq!(fixture.calls(), [0, 1, 2]);
        // No kernels.
        *fixture.memories.copied.lock() = Some("no kernel kvd_stage".to_owned());
        let without = fixture.shared(2);
        assert_eq!(without.copy_reason(), "no kernel kvd_stage");
        store(&fixture, &without, 0);
        assert_eq!(fixture.calls(), [0, 1, 3]);
        assert_eq!(fixture.memories.copies(), 6, "K and V of three");
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_of_another_device_is_stored_through_the_host() {
    for kind in DEVICE_KINDS {
        let other = Memories::default();
        let fixture = Fixture::over(kind, vec![Memories::default(), other.clone()]).await;
        let of_other = |options: RegionOptions| options.with_device_uuid(UUIDS[1]);
        let region = fixture.worker(&other, 5, MEMORY, of_other).unwrap();
        let sequence = fixture.sequence().await;
        let rows = chunk(sequence, 0, 20);
        assert_eq!(fixture.store_from(&region, &rows, 0).unwrap(), [20, 0, 0]);
        assert_eq!(fixture.calls(), [0, 0, 1]);
        assert_eq!((other.copies(), other.stores.lock().staged), (2, 0));
        fixture.client.store_chunk(rows).await.unwrap();
        fixture.running.drain().await;
    }
}

/// More tokens than one append may have, which no message of this daemon has room for.
async fn too_many_tokens(fixture: &Fixture, sequence: SequenceId) {
    let nothing = bytes::Bytes::new();
    let tokens = 65_537;
    let chunk =
        StoreChunk { sequence, layer: LAYER, start: 0, tokens, k: nothing.clone(), v: nothing };
    let rows = RegionRows { region: DeviceRegion(1), tokens, k: 0, v: 0 };
    let call = CallContext::new(Namespace::new("default").unwrap());
    let bytes = [u64::from(tokens) * ROW; 2];
    let stored = fixture.running.service().store_in_place(&call, &chunk, rows, bytes).await;
    let refused = stored.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::LimitExceeded, "{refused}");
    assert!(refused.to_string().contains("tokens_per_append_max"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_through_regions_have_the_limits_and_names_of_messages() {
    for kind in KINDS {
        let fixture = Fixture::new(kind).await;
        let region = fixture.shared(1);
        let sequence = fixture.sequence().await;
        let send = |worker: &Worker, tokens: u32, [k, v]: [RegionSlice; 2]| {
            let nothing = bytes::Bytes::new();
            let chunk = StoreChunk {
                sequence,
                layer: LAYER,
                start: 0,
                tokens,
                k: nothing.clone(),
                v: nothing,
            };
            tokio::task::block_in_place(|| {
                worker.send_store(chunk, DONE, [k, v])?;
                worker.wait_call(DONE)
            })
        };
        let slice = |offset, bytes| RegionSlice { offset, bytes };
        let half = u64::from(MESSAGE_BYTES) / 2;
        for (tokens, slices, code) in [
            (256, [slice(0, half), slice(0, half + 4)], ErrorCode::InvalidArgument),
            (
                20,
                [slice(MEMORY - 20 * ROW + 4, 20 * ROW), slice(0, 20 * ROW)],
                ErrorCode::InvalidArgument,
            ),
            (20, [slice(0, 20 * ROW), slice(u64::MAX, 20 * ROW)], ErrorCode::InvalidArgument),
            (20, [slice(0, 20 * ROW), slice(0, 20 * ROW - 4)], ErrorCode::ShapeMismatch),
            (0, [slice(0, 0), slice(0, 0)], ErrorCode::InvalidArgument),
        ] {
            let refused = send(&region, tokens, slices).unwrap_err();
            assert_eq!(refused.code, Some(code), "{refused}");
        }
        // In a region that has the bytes, but not in one message.
        let memory = u64::from(MESSAGE_BYTES) * 2;
        let wide = fixture.worker(&fixture.memories, 3, memory, |options| options).unwrap();
        let refused = send(&wide, 256, [slice(0, half), slice(half, half + 4)]).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::MessageTooLarge), "{refused}");
        assert_eq!(fixture.memories.stores.lock().staged, 0, "nothing was launched");
        too_many_tokens(&fixture, sequence).await;
        assert_eq!(fixture.memories.stores.lock().staged, 0);
        // Of a namespace that does not have the sequence.
        let namespace = Namespace::new("other").unwrap();
        let of_other = |options: RegionOptions| options.with_namespace(&namespace);
        let foreign = fixture.worker(&fixture.memories, 2, MEMORY, of_other).unwrap();
        let refused = fixture.store_from(&foreign, &chunk(sequence, 0, 5), 0).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::UnknownSequence), "{refused}");
        assert_eq!(fixture.memories.stores.lock().staged, 0);
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_drains_looks_nothing_up_and_copies_nothing() {
    let fixture = Fixture::new(RegionKind::CudaIpc).await;
    let region = &fixture.shared(1);
    let sequence = fixture.sequence().await;
    fixture.running.service().drain();
    let call = CallContext::new(Namespace::new("default").unwrap());
    // One that is not there, one that is in place, one that would be copied through the host.
    let nowhere = SequenceId(1 << 40);
    let refused = fixture.running.service().model_of(&call, nowhere).err().unwrap();
    assert_eq!(refused.code(), ErrorCode::ShuttingDown, "{refused}");
    for (sequence, offset) in [(nowhere, 0), (sequence, 0), (sequence, 2)] {
        let refused = fixture.store_from(region, &chunk(sequence, 0, 5), offset).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::ShuttingDown), "{refused}");
    }
    assert_eq!((fixture.memories.copies(), fixture.memories.stores.lock().staged), (0, 0));
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_is_lost_in_a_store_answers_it_with_a_refusal_and_publishes_nothing() {
    for kind in DEVICE_KINDS {
        let fixture = Fixture::new(kind).await;
        let region = &fixture.shared(1);
        let sequence = fixture.sequence().await;
        fixture.store_from(region, &chunk(sequence, 0, 20), 0).unwrap();
        fixture.memories.faults.lose_in_write(true);
        let lost = fixture.store_from(region, &chunk(sequence, 20, 20), 0).unwrap_err();
        assert_eq!(lost.code, Some(ErrorCode::DeviceFailed), "{lost}");
        let call = CallContext::new(Namespace::new("default").unwrap());
        let known = fixture.running.service().describe_sequence(&call, sequence).unwrap();
        assert_eq!(known.length, 20);
        let lost = fixture.store_from(region, &chunk(sequence, 20, 20), 0).unwrap_err();
        assert_eq!(lost.code, Some(ErrorCode::DeviceFailed), "{lost}");
        assert!(!fixture.running.service().is_ready());
        fixture.running.drain().await;
    }
}
