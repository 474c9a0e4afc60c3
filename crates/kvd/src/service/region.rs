//! Device memory that workers share: lane jobs, and a guard that gives it back.

use super::{Call, Model, Service, ServiceError};
use crate::lane::Lane;
use kvd_compute::{DeviceInfo, DeviceRegion, OpenedRegion, RegionHandle};
use kvd_core::ErrorCode;
use kvd_proto::domain::AttendBatch;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

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
            self.lanes().filter_map(|lane| lane.info().uuid.as_deref()).collect();
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
    lane: &Lane,
    call: &Call,
    (handle, size_bytes): (&RegionHandle, u64),
    asker: &Asker,
) -> Result<OpenedRegion, ServiceError> {
    loop {
        let handle = again(handle)?;
        let work = move |backend: &mut dyn kvd_compute::Backend| {
            Ok(backend.open_region(handle, size_bytes)?)
        };
        match lane.run(call, work).await {
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
    /// Of the device that has opened it, and the number of its seat.
    lane: Lane,
    seat: usize,
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
        let has_gpu = service.lanes().any(|lane| lane.info().uuid.is_some());
        // A processor's refusal says nothing of a GPU's memory.
        let is_asked = |lane: &Lane| match &lane.info().uuid {
            None => uuid.is_none() && !has_gpu,
            of_lane => uuid.is_none() || *of_lane == uuid,
        };
        let lanes = service.lanes().enumerate();
        let mut refused = Vec::new();
        for (seat, lane) in lanes.filter(|(_, lane)| is_asked(lane) && !lane.failed()) {
            match open_on(lane, &call, (&handle, size_bytes), asker).await {
                Ok(opened) => {
                    return Ok(Self { lane: lane.clone(), seat, call, opened, size_bytes });
                }
                // What another device says of the memory would be no better an answer.
                Err(error) if is_of_queue(error.code()) => return Err(error),
                Err(error) => refused.push((lane.info(), error)),
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
            && model.seat == self.seat
            && model.recent_queries.as_ref().is_none_or(|recent| recent.passes(batch))
            && model.queries.as_ref().is_none_or(|sample| sample.passes(batch))
    }

    /// Whether kernels read K and V to store from it: a model of the device, and places that are
    /// aligned to values.
    pub(crate) fn stages(&self, model: &Model, offsets: [u64; 2]) -> bool {
        let value_bytes = model.shape.geometry.dtype.size_bytes() as u64;
        self.opened.copied.is_none()
            && model.seat == self.seat
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
        let region = self.region();
        let work = move |backend: &mut dyn kvd_compute::Backend| {
            let mut to = vec![0; bytes as usize];
            backend.read_region(region, offset, &mut to)?;
            Ok(to)
        };
        // It touches the worker's memory alone: in no order with what stores write.
        self.lane.attend(call, work).await
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
        let region = self.region();
        let work = move |backend: &mut dyn kvd_compute::Backend| {
            Ok(backend.write_region(region, offset, &bytes)?)
        };
        self.lane.attend(call, work).await
    }
}

impl Drop for OpenMemory {
    fn drop(&mut self) {
        // Without a runtime the daemon is gone, and the backend closes what is open itself.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (lane, region) = (self.lane.clone(), self.region());
        let call = Call { deadline: None, ..self.call.clone() };
        runtime.spawn(async move {
            loop {
                let work = move |backend: &mut dyn kvd_compute::Backend| {
                    backend.close_region(region);
                    Ok(())
                };
                match lane.run(&call, work).await {
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
