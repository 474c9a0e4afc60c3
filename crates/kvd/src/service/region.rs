//! Device memory that workers share: its jobs, and a guard that gives it back.

use super::{Call, Model, Service, ServiceError};
use crate::device_worker::{DeviceWorker, Work};
use crate::scheduler::Kind;
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

impl Work for OpenRegion {
    type Reply = OpenedRegion;

    fn kind(&self) -> Kind {
        Kind::Other
    }

    fn run(
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

impl Work for CloseRegion {
    type Reply = ();

    fn kind(&self) -> Kind {
        Kind::Other
    }

    fn run(&mut self, backend: &mut dyn Backend, _: &Stop) -> Result<Option<()>, ServiceError> {
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

impl Work for ReadRegion {
    type Reply = Vec<u8>;

    /// It touches the worker's memory alone: in no order with what stores write.
    fn kind(&self) -> Kind {
        Kind::Attend
    }

    fn run(
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

impl Work for WriteRegion {
    type Reply = ();

    /// As [`ReadRegion`].
    fn kind(&self) -> Kind {
        Kind::Attend
    }

    fn run(&mut self, backend: &mut dyn Backend, _: &Stop) -> Result<Option<()>, ServiceError> {
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
    pub(crate) fn gpu(&self, uuid: &str) -> Result<Option<String>, ServiceError> {
        if uuid.is_empty() {
            return Ok(None);
        }
        let known: Vec<&str> =
            self.workers().filter_map(|worker| worker.info().uuid.as_deref()).collect();
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

/// The same handle once more.
fn again(handle: &RegionHandle) -> Result<RegionHandle, ServiceError> {
    match handle {
        RegionHandle::CudaIpc(handle) => Ok(RegionHandle::CudaIpc(*handle)),
        RegionHandle::CudaFd(file) => file.try_clone().map(RegionHandle::CudaFd).map_err(|error| {
            ServiceError::new(ErrorCode::LimitExceeded, format!("another descriptor: {error}"))
        }),
    }
}

/// Who waits for memory to be opened.
type Asker = oneshot::Sender<Result<OpenMemory, ServiceError>>;

/// Opens memory on a device. Where its queue is full it is asked again, until nobody waits for it:
/// others' calls are no reason that the memory is of another device.
async fn open_on(
    worker: &DeviceWorker,
    call: &Call,
    (handle, size_bytes): (&RegionHandle, u64),
    asker: &Asker,
) -> Result<OpenedRegion, ServiceError> {
    loop {
        let handle = Some(again(handle)?);
        match worker.ask(call, OpenRegion { handle, size_bytes }).await {
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

/// What all devices that were asked say, each by its name.
fn refusal(mut refused: Vec<(&DeviceInfo, ServiceError)>) -> ServiceError {
    if refused.len() == 1 {
        return refused.remove(0).1;
    }
    let Some(code) = refused.first().map(|(_, error)| error.code()) else {
        let message = "every device that could has failed";
        return ServiceError::new(ErrorCode::DeviceFailed, message);
    };
    let reasons = refused.iter().map(|(info, error)| {
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
    call: Call,
    opened: OpenedRegion,
    size_bytes: u64,
}

/// Memory that a worker offers.
pub(crate) struct Offer {
    pub(crate) handle: RegionHandle,
    pub(crate) size_bytes: u64,
    /// Of the GPU that it is of; whichever opens it.
    pub(crate) uuid: Option<String>,
}

impl OpenMemory {
    /// Opens it, on the device that its UUID names, else on the first GPU that can, or of a daemon
    /// without one the first device: a driver refuses what is another GPU's, unless it reaches that
    /// one's memory. Given up half-way, it is closed again.
    ///
    /// # Errors
    /// Why no device can, or queue errors.
    pub(crate) async fn open(
        service: &Arc<Service>,
        call: &Call,
        offer: Offer,
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
        call: Call,
        offer: Offer,
        asker: &Asker,
    ) -> Result<Self, ServiceError> {
        let Offer { handle, size_bytes, uuid } = offer;
        let has_gpu = service.workers().any(|worker| worker.info().uuid.is_some());
        // A processor's refusal says nothing of a GPU's memory.
        let is_asked = |worker: &DeviceWorker| match &worker.info().uuid {
            None => uuid.is_none() && !has_gpu,
            of_lane => uuid.is_none() || *of_lane == uuid,
        };
        let workers = service.workers().enumerate();
        let mut refused = Vec::new();
        for (shard, worker) in workers.filter(|(_, worker)| is_asked(worker) && !worker.failed()) {
            match open_on(worker, &call, (&handle, size_bytes), asker).await {
                Ok(opened) => {
                    return Ok(Self { worker: worker.clone(), shard, call, opened, size_bytes });
                }
                // What another device says of the memory would be no better an answer.
                Err(error) if is_of_queue(error.code()) => return Err(error),
                Err(error) => refused.push((worker.info(), error)),
            }
        }
        Err(refusal(refused))
    }

    /// The region's name on its device.
    pub(crate) fn region(&self) -> DeviceRegion {
        self.opened.region
    }

    /// What the device says of it.
    pub(crate) fn opened(&self) -> &OpenedRegion {
        &self.opened
    }

    /// Whether kernels take a batch's queries from it and answer into it: a model of the device,
    /// and no queries that the host keeps, as a sample or to measure pages by.
    pub(crate) fn reaches(&self, model: &Model, batch: &AttendBatch) -> bool {
        self.opened.copied.is_none()
            && model.shard == self.shard
            && model.recent_queries.as_ref().is_none_or(|recent| recent.passes(batch))
            && model.queries.as_ref().is_none_or(|sample| sample.passes(batch))
    }

    /// Whether kernels read K and V to store from it: a model of the device, and places that are
    /// aligned to values.
    pub(crate) fn stages(&self, model: &Model, offsets: [u64; 2]) -> bool {
        let value_bytes = model.shape.geometry.dtype.size_bytes() as u64;
        self.opened.copied.is_none()
            && model.shard == self.shard
            && offsets.iter().all(|offset| offset.is_multiple_of(value_bytes))
    }

    /// Tests that a range lies inside.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`.
    pub(crate) fn check(&self, offset: u64, bytes: u64) -> Result<(), ServiceError> {
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
    /// As [`OpenMemory::check`], or queue and device errors.
    pub(crate) async fn read(
        &self,
        call: &Call,
        offset: u64,
        bytes: u64,
    ) -> Result<Vec<u8>, ServiceError> {
        self.check(offset, bytes)?;
        self.worker.ask(call, ReadRegion { region: self.region(), offset, bytes }).await
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// As [`OpenMemory::read`].
    pub(crate) async fn write(
        &self,
        call: &Call,
        offset: u64,
        bytes: Vec<u8>,
    ) -> Result<(), ServiceError> {
        self.check(offset, bytes.len() as u64)?;
        self.worker.ask(call, WriteRegion { region: self.region(), offset, bytes }).await
    }
}

impl Drop for OpenMemory {
    fn drop(&mut self) {
        // Without a runtime the daemon is gone, and the backend closes what is open itself.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (worker, region) = (self.worker.clone(), self.region());
        let call = Call { deadline: None, ..self.call.clone() };
        runtime.spawn(async move {
            loop {
                match worker.ask(&call, CloseRegion { region }).await {
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
