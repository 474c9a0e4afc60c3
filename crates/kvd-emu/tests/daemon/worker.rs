//! A worker over the region socket, whose memory is handed over by an IPC handle or as a
//! descriptor.

use super::*;
use driver::shared::{Kind, Shared};
use kvd_client::{
    AttendLayout, RegionClient, RegionDevice, RegionKind, RegionOptions, RegionSlice,
};
use kvd_compute::RegionHandle;

/// The made-up GPU's.
const UUID: &str = "GPU-00000000-0000-0000-0000-0000000000e7";

/// A worker's memory: queries, keys, values, and room for an answer.
struct Worker {
    region: RegionClient,
    batch: AttendBatch,
    chunk: StoreChunk,
    /// Given back after the region.
    memory: Shared,
}

impl Worker {
    fn open(daemon: &Daemon, kind: Kind, batch: AttendBatch, chunk: StoreChunk) -> Self {
        let room = vec![0; 2 * batch.q.len()];
        let memory = Shared::of(kind, &[&batch.q[..], &chunk.k, &chunk.v, &room].concat());
        let (device, kind) = match memory.handle() {
            RegionHandle::CudaIpc(handle) => (RegionDevice::CudaIpc(handle), RegionKind::CudaIpc),
            RegionHandle::CudaFd(file) => (RegionDevice::CudaFd(file.into()), RegionKind::CudaFd),
        };
        let options = RegionOptions::default()
            .with_bytes(4096)
            .with_device(device, memory.len())
            .with_device_uuid(UUID);
        let path = daemon.dir.path().join("region");
        let region = block_in_place(|| RegionClient::open_region(path, &options)).unwrap();
        assert_eq!((region.kind(), region.fallback_reason(), region.copy_reason()), (kind, "", ""));
        Self { region, batch, chunk, memory }
    }

    fn slices(&self) -> [RegionSlice; 5] {
        let (q, row) = (self.batch.q.len() as u64, self.chunk.k.len() as u64);
        let mut offset = 0;
        [q, row, row, q, q / u64::from(SHAPE.dim)].map(|bytes| {
            offset += bytes;
            RegionSlice { offset: offset - bytes, bytes }
        })
    }

    fn store(&self) -> Result<[u32; 3], ClientError> {
        let [_, k, v, ..] = self.slices();
        block_in_place(|| {
            self.region.send_store(self.chunk.clone(), 256, [k, v])?;
            self.region.wait_call(256)
        })
    }

    fn attend(&self) -> Result<Attended, ClientError> {
        let [q, _, _, out, lse] = self.slices();
        block_in_place(|| {
            self.region.send_attend(self.batch.clone(), AttendLayout { done: 512, q, out, lse })?;
            self.region.wait_call(512)
        })?;
        let at = |at: RegionSlice| &self.memory.bytes()[at.offset as usize..][..at.bytes as usize];
        let (out, lse) = (at(out).to_vec().into(), read_floats(at(lse)));
        Ok(Attended { out, lse, query_errors: Vec::new() })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_stores_and_attends_in_its_own_memory_as_in_messages() {
    for (kind, fail) in Kind::EACH.into_iter().zip([Fail::Later, Fail::Hang]) {
        let Some(daemon) = Daemon::start(Pace::Late).await else { return };
        let models = daemon.models(CODECS[0]).await;
        let both = daemon.open(models).await;
        daemon.grow(both, 5, 0, 70).await;
        let next = SHAPE.store_chunk(both[0], 5, 70, 30);
        let worker = Worker::open(&daemon, kind, SHAPE.attend_batch(models[0], &both[..1]), next);
        assert_eq!(worker.store().unwrap()[..2], [100, 0]);
        daemon.client.store_chunk(SHAPE.store_chunk(both[1], 5, 70, 30)).await.unwrap();
        daemon.assert_same(models, &[(both, 100)], "stored from a worker's memory").await;
        let right = daemon.attend(models[0], &both[..1]).await.unwrap();
        let apart = largest_distance(&worker.attend().unwrap(), &right);
        assert!(apart < MOST_APART, "{kind:?}: {apart:.1e}");
        {
            // Nothing of it went through messages or the host's copies.
            let watch = daemon.watch.lock();
            for kernel in ["kvd_stage", "kvd_rows", "kvd_queries", "kvd_answer"] {
                assert!(watch.kernels.iter().any(|name| name == kernel), "{kind:?}: {kernel}");
            }
        }
        // A GPU that is lost while a worker's memory is open.
        daemon.watch.lock().fail = fail;
        for _ in 0..2 {
            let refused = worker.attend().unwrap_err();
            assert_eq!(refused.code, Some(ErrorCode::DeviceFailed), "{kind:?}: {refused}");
        }
        let Worker { region, memory, .. } = worker;
        drop(region);
        daemon.stop().await;
        assert_eq!(memory.held(), [0, 0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_a_descriptor_is_given_back_when_its_worker_is_gone() {
    let Some(daemon) = Daemon::start(Pace::Late).await else { return };
    let model = daemon.model("gpu", CODECS[0]).await;
    let sequence = daemon.client.open_sequence(model).await.unwrap();
    daemon.client.store_chunk(SHAPE.store_chunk(sequence, 8, 0, 70)).await.unwrap();
    for seed in 0..3 {
        let next = SHAPE.store_chunk(sequence, 8, 70 + 10 * seed, 10);
        let worker = Worker::open(&daemon, Kind::Fd, SHAPE.attend_batch(model, &[sequence]), next);
        assert_eq!(worker.store().unwrap()[0], 80 + 10 * seed);
        worker.attend().unwrap();
        let Worker { region, memory, .. } = worker;
        // The daemon's mapping; the descriptors of both are closed.
        assert_eq!(memory.held(), [1, 0]);
        drop(region);
        let gone = async {
            while memory.held() != [0, 0] {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), gone).await.unwrap();
    }
    // A worker that offers more than there is learns why its payloads are in the memory file.
    let memory = Shared::of(Kind::Fd, &[0; 100]);
    let RegionHandle::CudaFd(file) = memory.handle() else { panic!("a descriptor") };
    let device = RegionDevice::CudaFd(file.into());
    let options = RegionOptions::default().with_bytes(4096);
    let options = options.with_device(device, 8192).with_device_uuid(UUID);
    let path = daemon.dir.path().join("region");
    let region = block_in_place(|| RegionClient::open_region(path, &options)).unwrap();
    assert_eq!(region.kind(), RegionKind::Memfd);
    assert!(region.fallback_reason().contains("cuMemMap"), "{}", region.fallback_reason());
    drop((region, options));
    assert_eq!(memory.held(), [0, 0]);
    daemon.stop().await;
}
