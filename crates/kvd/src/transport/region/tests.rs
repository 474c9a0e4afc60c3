//! Regions of every kind: payloads in the memory file, and in a device's memory behind a handle or
//! a descriptor, over a device that a test can look into.

mod device;
mod fixture;
mod store;

use super::*;
use crate::config::{Config, ConfigOverrides};
use crate::daemon::{Daemon, RunningDaemon};
use device::Memories;
use fixture::{DEVICE_KINDS, DIM, DONE, Fixture, KINDS, MESSAGE_BYTES, START, UUIDS, Worker};
use kvd_client::{
    AttendBatch, AttendLayout, AttendQuery, Attended, CallProgress, Client, ClientError,
    RegionClient as Shared, RegionDevice, RegionKind, RegionOptions, RegionSlice, StoreChunk,
};
use kvd_compute::{Backend, CpuBackend, CpuOptions};
use kvd_core::{DType, Geometry, LayerIndex, RopePairing};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_are_answered_where_they_are_with_the_same_bytes() {
    for kind in KINDS {
        let fixture = Fixture::new(kind).await;
        let right = fixture.client.attend_batch(fixture.batch.clone()).await.unwrap();
        let worker = fixture.open(7);
        assert_eq!((worker.kind(), worker.fallback_reason(), worker.copy_reason()), (kind, "", ""));
        let of_device = kind != RegionKind::Memfd;
        assert_eq!(worker.event_handle(), of_device.then_some([7; 64]), "{kind:?}");
        assert_eq!(fixture.attend(&worker).unwrap(), right, "{kind:?}");
        assert_eq!(fixture.memories.copies(), 0, "{kind:?}: no payload went through the host");
        assert_eq!(fixture.calls(), fixture.counted(1, 0), "{kind:?}");
        // Past the payloads' memory, though a device's is smaller than the memory file.
        let end = worker.payloads().size_bytes();
        let lse = RegionSlice { offset: end, ..fixture.places().lse };
        let outside = AttendLayout { lse, ..fixture.places() };
        let refused = fixture.attend_at(&worker, outside).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::InvalidArgument), "{kind:?}: {refused}");
        assert_eq!(refused.message.contains("of the device"), of_device, "{kind:?}: {refused}");
        let blocking = || worker.attend_once(fixture.batch.clone(), [DIM, DIM]);
        let blocking = tokio::task::block_in_place(blocking);
        if of_device {
            let text = format!("device memory ({kind:?})");
            assert!(blocking.unwrap_err().message.contains(&text));
        } else {
            assert_eq!(blocking.unwrap(), right);
        }
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_have_the_limits_of_messages_and_large_ones_do_not_stop_a_sample() {
    for kind in KINDS {
        // Keys kept exactly: queries are drawn for a sample, and those that are, are copied.
        let codec = "k=raw; v=fp8";
        let mut fixture = Fixture::with_codec(kind, vec![Memories::default()], codec, 126).await;
        let worker = fixture.open(1);
        assert_eq!(fixture.attend(&worker).unwrap().lse.len(), 126 * 2);
        let row = fixture.batch.q.len() / 126;
        for (name, n_q) in [(2, 505), (3, 600)] {
            fixture.batch.q = vec![0; row * n_q as usize].into();
            fixture.batch.queries[0].n_q = n_q;
            let large = fixture.open(name);
            for _ in 0..3 {
                let refused = fixture.attend(&large).unwrap_err();
                assert_eq!(refused.code, Some(ErrorCode::MessageTooLarge), "{kind:?}: {refused}");
                assert!(refused.message.contains("server.message_bytes_max = 262144"), "{refused}");
            }
        }
        fixture.batch.queries[0].n_q = 1;
        fixture.batch.q.truncate(row);
        let small = fixture.open(4);
        let before: u64 = fixture.calls().iter().sum();
        for _ in 0..1100 {
            fixture.attend(&small).unwrap();
        }
        let [file, in_place, copied] = fixture.calls();
        assert_eq!(file + in_place + copied - before, 1100, "{kind:?}");
        match kind {
            RegionKind::Memfd => assert_eq!(in_place + copied, 0),
            _ => assert!(file == 0 && in_place > 0, "the sample is full and draws seldom"),
        }
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_and_values_have_the_limit_of_one_message_together() {
    let fixture = Fixture::new(RegionKind::Memfd).await;
    let region = fixture.connect(&RegionOptions::default().with_bytes(1 << 20)).unwrap();
    let sequence = fixture.client.open_sequence(fixture.batch.model).await.unwrap();
    let chunk = |tokens: u32| {
        let rows = bytes::Bytes::from(vec![0; tokens as usize * 2 * DIM as usize * 4]);
        StoreChunk { sequence, layer: LayerIndex(0), start: 0, tokens, k: rows.clone(), v: rows }
    };
    let refused = tokio::task::block_in_place(|| region.store_once(chunk(260))).unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::MessageTooLarge), "{refused}");
    let stored = tokio::task::block_in_place(|| region.store_once(chunk(250))).unwrap();
    assert_eq!(stored.length, 250);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_that_meet_are_copied_so_that_an_answer_over_its_queries_is_right() {
    for kind in KINDS {
        let fixture = Fixture::new(kind).await;
        let right = fixture.client.attend_batch(fixture.batch.clone()).await.unwrap();
        let at = fixture.places();
        let over_queries = AttendLayout { out: RegionSlice { offset: START, ..at.out }, ..at };
        let lse_inside = RegionSlice { offset: at.out.offset - 4, ..at.lse };
        let out = RegionSlice { offset: START + 1024, ..at.out };
        let over_one = AttendLayout { out, lse: lse_inside, ..at };
        for (name, at) in [(1, over_queries), (2, over_one)] {
            let worker = fixture.open(name);
            assert_eq!(fixture.attend_at(&worker, at).unwrap(), right, "{kind:?}");
        }
        assert_eq!(fixture.calls(), fixture.counted(0, 2), "{kind:?}");
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_given_back_when_its_worker_is_gone() {
    for kind in KINDS {
        let fixture = Fixture::new(kind).await;
        let (one, two) = (fixture.open(1), fixture.open(2));
        fixture.eventually_open(&[1, 2]).await;
        drop(one);
        fixture.eventually_open(&[2]).await;
        fixture.attend(&two).unwrap();
        drop(two);
        fixture.eventually_open(&[]).await;
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_descriptor_is_the_daemons_own_once_it_is_passed() {
    let fixture = Fixture::new(RegionKind::CudaFd).await;
    let right = fixture.client.attend_batch(fixture.batch.clone()).await.unwrap();
    let worker = fixture.open(1);
    // The device forgets the name: what it mapped is what the socket carried.
    fixture.memories.all.lock().clear();
    assert_eq!(fixture.attend(&worker).unwrap(), right);
    assert_eq!(fixture.memories.uses_after_close(), 0);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_the_device_cannot_open_is_replaced_with_the_reason() {
    let fixture = Fixture::new(RegionKind::Memfd).await;
    let mut handle = [0; 64];
    handle[0] = 99;
    let known = fixture.memories.add(1, 4096);
    let foreign = RegionMemory::create_memory(4096).unwrap();
    let descriptor = |memory: &RegionMemory| memory.file().try_clone_to_owned().unwrap();
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let by = |file: OwnedFd| RegionDevice::CudaFd(Arc::new(file));
    let right = fixture.client.attend_batch(fixture.batch.clone()).await.unwrap();
    for (device, bytes, reason) in [
        (RegionDevice::CudaIpc(handle), 4096, "no memory 99 of 4096 bytes"),
        (by(null), 4096, "the file can shrink: a region is a memory file with F_SEAL_SHRINK"),
        (by(descriptor(&foreign)), 4096, "memory of nobody"),
        (by(descriptor(&known)), 4097, "the file has 4096 bytes, fewer than the region's 4097"),
    ] {
        let region = fixture.region(device, bytes, |options| options).unwrap();
        assert_eq!((region.kind(), region.fallback_reason()), (RegionKind::Memfd, reason));
        let answer = || region.attend_once(fixture.batch.clone(), [DIM, DIM]);
        assert_eq!(tokio::task::block_in_place(answer).unwrap(), right);
    }
    assert!(fixture.memories.open.lock().is_empty());
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_that_kernels_cannot_reach_are_copied_and_the_reason_is_named() {
    for kind in DEVICE_KINDS {
        let fixture = Fixture::new(kind).await;
        let right = fixture.client.attend_batch(fixture.batch.clone()).await.unwrap();
        // Values that are not aligned: this call alone.
        let worker = fixture.open(1);
        let at = fixture.places();
        let odd = AttendLayout { out: RegionSlice { offset: at.out.offset + 1, ..at.out }, ..at };
        let odd = AttendLayout { lse: RegionSlice { offset: odd.lse.offset + 5, ..at.lse }, ..odd };
        assert_eq!(fixture.attend_at(&worker, odd).unwrap(), right, "{kind:?}");
        assert_eq!(fixture.calls(), [0, 0, 1]);
        assert_eq!(fixture.attend(&worker).unwrap(), right, "{kind:?}");
        // A device without the kernels: every call.
        *fixture.memories.copied.lock() = Some("no kernel kvd_queries".to_owned());
        let worker = fixture.open(2);
        assert_eq!((worker.kind(), worker.copy_reason()), (kind, "no kernel kvd_queries"));
        let before = fixture.memories.copies();
        assert_eq!(fixture.attend(&worker).unwrap(), right, "{kind:?}");
        assert_eq!(fixture.memories.copies() - before, 3, "queries, outputs, log-sum-exps");
        assert_eq!(fixture.calls(), [0, 1, 2]);
        // A device that shares no event: answers are there when their calls have ended.
        *fixture.memories.copied.lock() = None;
        *fixture.memories.no_event.lock() = Some("cuIpcGetEventHandle refuses it".to_owned());
        let worker = fixture.open(3);
        assert_eq!(
            (worker.event_handle(), worker.no_event()),
            (None, "cuIpcGetEventHandle refuses it")
        );
        assert_eq!(worker.copy_reason(), "");
        assert_eq!(fixture.attend(&worker).unwrap(), right, "{kind:?}");
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_opened_by_the_device_of_its_uuid_and_one_of_no_device_is_refused() {
    for kind in DEVICE_KINDS {
        let other = Memories::default();
        let fixture = Fixture::over(kind, vec![Memories::default(), other.clone()]).await;
        let bytes = fixture.payload_bytes();
        let by = |uuid: &str| {
            let uuid = uuid.to_owned();
            fixture.worker(&other, 5, bytes, |options| options.with_device_uuid(uuid))
        };
        // As another tool may write it.
        let region = by(&UUIDS[1].to_uppercase()).unwrap();
        assert_eq!((region.kind(), &other.open.lock()[..]), (kind, &[5][..]));
        assert!(fixture.memories.open.lock().is_empty());
        // Without one the first device that can.
        let _first = fixture.open(5);
        assert_eq!(*fixture.memories.open.lock(), [5]);
        for wrong in ["GPU-33333333-3333-3333-3333-333333333333", "0", "cuda:1"] {
            let refused = by(wrong).err().unwrap();
            assert_eq!(refused.code, Some(ErrorCode::InvalidArgument), "{refused}");
            let named = [wrong, UUIDS[0], UUIDS[1]];
            assert!(named.iter().all(|name| refused.message.contains(name)), "{refused}");
        }
        // Of memory that is not offered.
        let options = RegionOptions::default().with_bytes(4096).with_device_uuid(UUIDS[0]);
        let refused = fixture.connect(&options).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::InvalidArgument), "{refused}");
        assert!(refused.message.contains("no device memory is offered"), "{refused}");
        // Its device refuses it: the others, which have it, are not asked.
        let mine = fixture.memories.add(6, bytes);
        let change = |options: RegionOptions| options.with_device_uuid(UUIDS[1]);
        let region = fixture.region(fixture.offer(6, &mine), bytes, change).unwrap();
        let reason = match kind {
            RegionKind::CudaFd => "memory of nobody".to_owned(),
            _ => format!("no memory 6 of {bytes} bytes"),
        };
        assert_eq!((region.kind(), region.fallback_reason()), (RegionKind::Memfd, &reason[..]));
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_is_every_gpus_and_no_processors() {
    for kind in DEVICE_KINDS {
        let refused = |memories: Vec<Memories>| async move {
            let fixture = Fixture::over(kind, memories).await;
            let foreign = RegionMemory::create_memory(4096).unwrap();
            let offer = fixture.offer(9, &foreign);
            let region = fixture.region(offer, 4096, |options| options).unwrap();
            assert_eq!(region.kind(), RegionKind::Memfd);
            let reason = region.fallback_reason().to_owned();
            fixture.running.drain().await;
            reason
        };
        let why = match kind {
            RegionKind::CudaFd => "memory of nobody",
            _ => "no memory 9 of 4096 bytes",
        };
        let beside = Memories::of_processor();
        assert_eq!(refused(vec![Memories::default(), beside.clone()]).await, why);
        assert_eq!(*beside.asked.lock(), 0);
        assert_eq!(refused(vec![Memories::of_processor()]).await, why);
        let [first, second] = UUIDS;
        let both = format!("{first}: {why}; {second}: {why}; name the GPU by device_uuid");
        assert_eq!(refused(vec![Memories::default(), Memories::default()]).await, both);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_is_waited_for_and_no_other_gpu_asked() {
    let other = Memories::default();
    let all = vec![Memories::default(), other.clone()];
    let fixture = Fixture::over(RegionKind::CudaIpc, all).await;
    let memory = fixture.memories.add(3, 4096);
    other.all.lock().insert(3, memory.clone());
    let worker = fixture.running.service().first_worker().clone();
    // One job runs until it is let go; as many as fit wait behind it.
    let (let_go, gate) = std::sync::mpsc::sync_channel::<()>(1);
    let (begin, begun) = tokio::sync::oneshot::channel();
    let job = |work: Box<dyn FnOnce() + Send>| {
        let call = CallContext::new(Namespace::new("default").unwrap());
        let worker = worker.clone();
        drop(tokio::spawn(async move {
            let work = |_: &mut dyn Backend| {
                work();
                Ok(())
            };
            worker.run_closure(&call, work).await
        }));
    };
    job(Box::new(move || {
        let _ = begin.send(());
        let _ = gate.recv();
    }));
    begun.await.unwrap();
    while worker.queued_jobs() < fixture.running.service().config().queue_jobs_max {
        job(Box::new(|| ()));
        tokio::task::yield_now().await;
    }
    let offer = fixture.offer(3, &memory);
    let path = fixture.dir.path().join("region");
    let options = RegionOptions::default().with_bytes(8192).with_device(offer, 4096);
    let opening = tokio::task::spawn_blocking(move || Shared::open_region(path, &options));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!opening.is_finished(), "the queue is full");
    drop(let_go);
    let region = opening.await.unwrap().unwrap();
    assert_eq!((region.kind(), region.fallback_reason()), (RegionKind::CudaIpc, ""));
    assert_eq!((*fixture.memories.asked.lock(), *other.asked.lock()), (1, 0));
    drop(region);
    fixture.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launch_is_told_before_the_answer_and_a_worker_that_leaves_then_keeps_its_memory_open() {
    for kind in DEVICE_KINDS {
        let fixture = Fixture::new(kind).await;
        let right = fixture.client.attend_batch(fixture.batch.clone()).await.unwrap();
        let worker = fixture.open_with(3, RegionOptions::with_launches).unwrap();
        let at = fixture.places();
        let send = || {
            tokio::task::block_in_place(|| {
                worker.send_attend(fixture.batch.clone(), at).unwrap();
                worker.wait_launched(at.done).unwrap()
            })
        };
        let busy = fixture.memories.busy.lock();
        assert_eq!(send(), CallProgress::Launched);
        assert_ne!(fixture.answer(&worker, at), right, "the device is not done yet");
        drop(busy);
        tokio::task::block_in_place(|| worker.wait_call(at.done)).unwrap();
        assert_eq!(fixture.answer(&worker, at), right);
        let ended = tokio::task::block_in_place(|| worker.wait_launched(at.done)).unwrap();
        assert_eq!(ended, CallProgress::Ended);
        // The worker dies while kernels use its memory.
        let busy = fixture.memories.busy.lock();
        assert_eq!(send(), CallProgress::Launched);
        drop(worker);
        tokio::task::block_in_place(|| std::thread::sleep(Duration::from_millis(50)));
        assert_eq!(*fixture.memories.open.lock(), [3], "{kind:?}: the device still uses it");
        drop(busy);
        fixture.eventually_open(&[]).await;
        assert_eq!(fixture.memories.uses_after_close(), 0);
        let next = fixture.open(4);
        assert_eq!(fixture.attend(&next).unwrap(), right);
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_of_another_namespace_reaches_no_model_and_nothing_is_launched() {
    for kind in KINDS {
        let fixture = Fixture::new(kind).await;
        let other = Namespace::new("other").unwrap();
        let foreign = fixture.open_with(9, |options| options.with_namespace(&other)).unwrap();
        let refused = fixture.attend(&foreign).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::UnknownModel), "{kind:?}: {refused}");
        // A length that is not the batch's, and a value that is none.
        let worker = fixture.open(8);
        let at = fixture.places();
        let short = AttendLayout { q: RegionSlice { bytes: at.q.bytes - 4, ..at.q }, ..at };
        let refused = fixture.attend_at(&worker, short).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::ShapeMismatch), "{kind:?}: {refused}");
        assert_eq!(fixture.calls()[1], 0);
        worker.payloads().write_bytes(START + 4, &[0xFF; 4]).unwrap();
        let refused = fixture.attend(&worker).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::NonFinite), "{kind:?}: {refused}");
        fixture.running.drain().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_query_of_a_batch_fails_alone() {
    for kind in KINDS {
        let mut fixture = Fixture::new(kind).await;
        let good = fixture.client.attend_batch(fixture.batch.clone()).await.unwrap();
        // The good query between one of no sequence and one that is not finite.
        let query = fixture.batch.queries[0];
        let unknown = AttendQuery { sequence: kvd_core::SequenceId(u64::MAX), ..query };
        let q = fixture.batch.q.to_vec();
        let mut nan = q.clone();
        nan[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        fixture.batch.q = [q.clone(), q, nan].concat().into();
        fixture.batch.queries = vec![unknown, query, query];
        fixture.batch.per_query_errors = true;
        let worker = fixture.open(7);
        let at = fixture.places();
        let bytes = 3 * kvd_client::QUERY_ERROR_BYTES;
        let errors_at = RegionSlice { offset: worker.memory().size_bytes() - bytes, bytes };
        let (failed, said) = tokio::task::block_in_place(|| {
            worker.send_attend_with_errors(fixture.batch.clone(), at, errors_at).unwrap();
            (worker.wait_call(at.done).unwrap(), worker.query_errors(errors_at).unwrap())
        });
        assert_eq!(failed, [2, 0, 0], "{kind:?}");
        let codes: Vec<_> = said.iter().map(|said| (said.query, said.error.code)).collect();
        let expected = [(0, ErrorCode::UnknownSequence), (2, ErrorCode::NonFinite)];
        assert_eq!(codes, expected, "{kind:?}");
        assert!(said[1].error.message.contains("must be finite"), "{said:?}");
        let answer = fixture.answer(&worker, at);
        let row = good.out.len();
        assert_eq!(answer.out[row..2 * row], good.out[..], "{kind:?}");
        assert!([&answer.out[..row], &answer.out[2 * row..]].concat().iter().all(|b| *b == 0));
        let none = vec![f32::NEG_INFINITY; 2];
        assert_eq!(answer.lse, [none.clone(), good.lse.clone(), none].concat(), "{kind:?}");
        // Without a place for errors nothing is answered.
        let refused = fixture.attend(&worker).unwrap_err();
        assert_eq!(refused.code, Some(ErrorCode::InvalidArgument), "{kind:?}");
        assert!(refused.message.contains("query_errors is missing"), "{refused}");
        fixture.running.drain().await;
    }
}
