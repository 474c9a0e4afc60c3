//! Device memory that workers share: its jobs, and a guard that gives it back.

use super::{CallContext, RegisteredModel, Service, ServiceError};
use crate::device_worker::{DeviceWork, DeviceWorker};
use crate::scheduler::JobKind;
use kvd_compute::{Backend, DeviceInfo, DeviceRegion, OpenedRegion, RegionHandle, Stop};
use kvd_core::ErrorCode;
use kvd_proto::domain::AttendBatch;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// The job that opens device memory.
pub(crate) struct OpenRegion {
    /// None once it has begun.
    handle: Option<RegionHandle>,
    size_bytes: u64,
}

impl DeviceWork for OpenRegion {
    type Reply = OpenedRegion;

    fn job_kind(&self) -> JobKind {
        JobKind::Other
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<OpenedRegion>, ServiceError> {
        let Some(handle) = self.handle.take() else { return Ok(None) };
        Ok(Some(backend.open_region(handle, self.size_bytes)?))
    }
}

/// The job that gives it back.
pub(crate) struct CloseRegion {
    region: DeviceRegion,
}

impl DeviceWork for CloseRegion {
    type Reply = ();

    fn job_kind(&self) -> JobKind {
        JobKind::Other
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<()>, ServiceError> {
        backend.close_region(self.region);
        Ok(Some(()))
    }
}

/// The job that copies out of it.
pub(crate) struct ReadRegion {
    region: DeviceRegion,
    offset: u64,
    bytes: u64,
}

impl DeviceWork for ReadRegion {
    type Reply = Vec<u8>;

    /// It runs as attends do: it touches the worker's memory alone, in no order with stores.
    fn job_kind(&self) -> JobKind {
        JobKind::Attend
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<Vec<u8>>, ServiceError> {
        let mut to = vec![0; self.bytes as usize];
        backend.read_region(self.region, self.offset, &mut to)?;
        Ok(Some(to))
    }
}

/// The job that copies into it.
pub(crate) struct WriteRegion {
    region: DeviceRegion,
    offset: u64,
    bytes: Vec<u8>,
}

impl DeviceWork for WriteRegion {
    type Reply = ();

    /// As [`ReadRegion`].
    fn job_kind(&self) -> JobKind {
        JobKind::Attend
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<()>, ServiceError> {
        Ok(Some(backend.write_region(self.region, self.offset, &self.bytes)?))
    }
}

/// How long a full queue is left alone before a region is opened, or closed, again.
const QUEUE_PAUSE: Duration = Duration::from_millis(20);

impl Service {
    /// The UUID of one of the daemon's GPUs, as they write it; none for an empty text.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when no device has it.
    pub(crate) fn find_gpu(&self, uuid: &str) -> Result<Option<String>, ServiceError> {
        if uuid.is_empty() {
            return Ok(None);
        }
        let known: Vec<&str> =
            self.workers().filter_map(|worker| worker.device_info().uuid.as_deref()).collect();
        if let Some(known) = known.iter().find(|known| kvd_cuda::is_same_gpu(known, uuid)) {
            return Ok(Some((*known).to_owned()));
        }
        let served = if known.is_empty() { "no GPU".to_owned() } else { known.join(", ") };
        let message = format!(
            "device_uuid {uuid:?} is none of the daemon's devices, which serves from {served}; \
             use a daemon of that GPU, or a region without device memory"
        );
        Err(ServiceError::new(ErrorCode::InvalidArgument, message))
    }
}

/// Names the memory of a handle once more.
fn clone_handle(handle: &RegionHandle) -> Result<RegionHandle, ServiceError> {
    match handle {
        RegionHandle::CudaIpc(handle) => Ok(RegionHandle::CudaIpc(*handle)),
        RegionHandle::CudaFd(file) => file.try_clone().map(RegionHandle::CudaFd).map_err(|error| {
            ServiceError::new(ErrorCode::LimitExceeded, format!("another descriptor: {error}"))
        }),
    }
}

/// Who waits for memory to be opened.
type MemoryAsker = oneshot::Sender<Result<OpenMemory, ServiceError>>;

/// Opens memory on a device. Where its queue is full it is asked again, until nobody waits for it:
/// others' calls are no reason that the memory is of another device.
async fn open_on(
    worker: &DeviceWorker,
    call: &CallContext,
    offer: &MemoryOffer,
    asker: &MemoryAsker,
) -> Result<OpenedRegion, ServiceError> {
    loop {
        let (handle, size_bytes) = (Some(clone_handle(&offer.handle)?), offer.size_bytes);
        match worker.ask_device(call, OpenRegion { handle, size_bytes }).await {
            Err(error) if error.code() == ErrorCode::QueueFull && !asker.is_closed() => {
                tokio::time::sleep(QUEUE_PAUSE).await;
            }
            opened => return opened,
        }
    }
}

/// Whether an error is of the way to a device, and not of what it was asked.
fn is_of_queue(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::QueueFull | ErrorCode::DeadlineExceeded | ErrorCode::ShuttingDown)
}

/// Why a device does not open memory.
struct DeviceRefusal<'a> {
    info: &'a DeviceInfo,
    error: ServiceError,
}

/// Joins what all devices that were asked say, each by its name.
fn join_refusals(mut refused: Vec<DeviceRefusal<'_>>) -> ServiceError {
    if refused.len() == 1 {
        return refused.remove(0).error;
    }
    let Some(code) = refused.first().map(|refusal| refusal.error.code()) else {
        let message = "every device that could has failed";
        return ServiceError::new(ErrorCode::DeviceFailed, message);
    };
    let reasons = refused.iter().map(|DeviceRefusal { info, error }| {
        let name = info.uuid.as_ref().unwrap_or(&info.description);
        format!("{name}: {error}; ")
    });
    let reasons: String = reasons.collect();
    ServiceError::new(code, format!("{reasons}name the GPU by device_uuid"))
}

/// Device memory that is open until this is dropped.
pub(crate) struct OpenMemory {
    /// Worker of the device that has opened it, and the number of its shard.
    worker: DeviceWorker,
    shard: usize,
    call: CallContext,
    opened: OpenedRegion,
    size_bytes: u64,
}

/// Memory that a worker offers.
pub(crate) struct MemoryOffer {
    pub(crate) handle: RegionHandle,
    pub(crate) size_bytes: u64,
    /// UUID of the GPU that it is of; whichever opens it when absent.
    pub(crate) uuid: Option<String>,
}

impl OpenMemory {
    /// Opens it, on the device that its UUID names, else on the first GPU that can, or of a daemon
    /// without one the first device: a driver refuses what is another GPU's, unless it reaches that
    /// one's memory. Given up half-way, it is closed again.
    ///
    /// # Errors
    /// Why no device can, or queue errors.
    pub(crate) async fn open_memory(
        service: &Arc<Service>,
        call: &CallContext,
        offer: MemoryOffer,
    ) -> Result<Self, ServiceError> {
        let (service, call) = (service.clone(), call.clone());
        let (tell, told) = oneshot::channel();
        // On a task of its own, whose outcome is dropped, and so closed, when nobody waits for it.
        tokio::spawn(async move {
            let opened = Self::open_on_one(&service, call, offer, &tell).await;
            let _ = tell.send(opened);
        });
        let ended = |_| ServiceError::new(ErrorCode::ShuttingDown, "the daemon has stopped");
        told.await.unwrap_or_else(|error| Err(ended(error)))
    }

    async fn open_on_one(
        service: &Service,
        call: CallContext,
        offer: MemoryOffer,
        asker: &MemoryAsker,
    ) -> Result<Self, ServiceError> {
        let (size_bytes, uuid) = (offer.size_bytes, &offer.uuid);
        let has_gpu = service.workers().any(|worker| worker.device_info().uuid.is_some());
        // A processor's refusal says nothing of a GPU's memory.
        let is_asked = |worker: &DeviceWorker| match &worker.device_info().uuid {
            None => uuid.is_none() && !has_gpu,
            of_worker => uuid.is_none() || of_worker == uuid,
        };
        let workers = service.workers().enumerate();
        let mut refused = Vec::new();
        for (shard, worker) in
            workers.filter(|(_, worker)| is_asked(worker) && !worker.has_failed())
        {
            match open_on(worker, &call, &offer, asker).await {
                Ok(opened) => {
                    return Ok(Self { worker: worker.clone(), shard, call, opened, size_bytes });
                }
                // What another device says of the memory would be no better an answer.
                Err(error) if is_of_queue(error.code()) => return Err(error),
                Err(error) => refused.push(DeviceRefusal { info: worker.device_info(), error }),
            }
        }
        Err(join_refusals(refused))
    }

    /// The region's name on its device.
    pub(crate) fn device_region(&self) -> DeviceRegion {
        self.opened.region
    }

    /// The answer of the device that opened it.
    pub(crate) fn opened_region(&self) -> &OpenedRegion {
        &self.opened
    }

    /// Whether kernels take a batch's queries from it and answer into it: a model of the device,
    /// and no queries that the host keeps, as a sample or to measure pages by.
    pub(crate) fn reaches_queries(&self, model: &RegisteredModel, batch: &AttendBatch) -> bool {
        self.opened.copied.is_none()
            && model.shard == self.shard
            && model.recent_queries.as_ref().is_none_or(|recent| recent.passes_batch(batch))
            && model.queries.as_ref().is_none_or(|sample| sample.passes_batch(batch))
    }

    /// Whether kernels read K and V to store from it: a model of the device, and places that are
    /// aligned to values.
    pub(crate) fn stages_rows(&self, model: &RegisteredModel, offsets: [u64; 2]) -> bool {
        let value_bytes = model.shape.geometry.dtype.size_bytes() as u64;
        self.opened.copied.is_none()
            && model.shard == self.shard
            && offsets.iter().all(|offset| offset.is_multiple_of(value_bytes))
    }

    /// Tests that a range lies inside.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`.
    pub(crate) fn check_range(&self, offset: u64, bytes: u64) -> Result<(), ServiceError> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.size_bytes) {
            return Ok(());
        }
        let size = self.size_bytes;
        let message =
            format!("bytes {offset}..{offset}+{bytes} are not inside the {size} of the device");
        Err(ServiceError::new(ErrorCode::InvalidArgument, message))
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// As [`OpenMemory::check_range`], or queue and device errors.
    pub(crate) async fn read_bytes(
        &self,
        call: &CallContext,
        offset: u64,
        bytes: u64,
    ) -> Result<Vec<u8>, ServiceError> {
        self.check_range(offset, bytes)?;
        self.worker
            .ask_device(call, ReadRegion { region: self.device_region(), offset, bytes })
            .await
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// As [`OpenMemory::read_bytes`].
    pub(crate) async fn write_bytes(
        &self,
        call: &CallContext,
        offset: u64,
        bytes: Vec<u8>,
    ) -> Result<(), ServiceError> {
        self.check_range(offset, bytes.len() as u64)?;
        self.worker
            .ask_device(call, WriteRegion { region: self.device_region(), offset, bytes })
            .await
    }
}

impl Drop for OpenMemory {
    fn drop(&mut self) {
        // Without a runtime the daemon is gone, and the backend closes what is open itself.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (worker, region) = (self.worker.clone(), self.device_region());
        let call = CallContext { deadline: None, ..self.call.clone() };
        runtime.spawn(async move {
            loop {
                match worker.ask_device(&call, CloseRegion { region }).await {
                    Err(error) if error.code() == ErrorCode::QueueFull => {
                        tokio::time::sleep(QUEUE_PAUSE).await;
                    }
                    // Closed, or with the whole device.
                    _ => return,
                }
            }
        });
    }
}
