//! Device memory that workers share: lane jobs, and a guard that gives it back.

use super::{Call, Model, Service, ServiceError};
use crate::lane::Lane;
use kvd_compute::{DeviceRegion, OpenedRegion, RegionHandle};
use kvd_core::ErrorCode;
use kvd_proto::domain::AttendBatch;
use std::sync::Arc;
use std::time::Duration;

/// How long a full queue is left alone before a region is closed again.
const CLOSE_PAUSE: Duration = Duration::from_millis(20);

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
        if let Some(known) = known.iter().find(|known| known.eq_ignore_ascii_case(uuid)) {
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
    /// Opens it, on the device that its UUID names, else on the first that can: a driver refuses
    /// what is another GPU's, unless it reaches that one's memory. Given up half-way, it is closed
    /// again.
    ///
    /// # Errors
    /// Why the device cannot, or queue errors.
    pub(crate) async fn open(
        service: &Arc<Service>,
        call: &Call,
        offer: Offer,
    ) -> Result<Self, ServiceError> {
        let (service, call) = (service.clone(), call.clone());
        let Offer { handle, size_bytes, uuid } = offer;
        // On a task of its own, whose outcome is dropped, and so closed, when nobody waits for it.
        let opening = tokio::spawn(async move {
            let mut refused = None;
            let of_gpu = |lane: &Lane| uuid.is_none() || lane.info().uuid == uuid;
            let lanes = service.lanes().enumerate();
            for (seat, lane) in lanes.filter(|(_, lane)| of_gpu(lane) && !lane.failed()) {
                let handle = again(&handle)?;
                let work = move |backend: &mut dyn kvd_compute::Backend| {
                    Ok(backend.open_region(handle, size_bytes)?)
                };
                match lane.run(&call, work).await {
                    Ok(opened) => {
                        return Ok(Self { lane: lane.clone(), seat, call, opened, size_bytes });
                    }
                    Err(error) => refused = Some(error),
                }
            }
            Err(refused.unwrap_or_else(|| {
                ServiceError::new(ErrorCode::DeviceFailed, "every device that could has failed")
            }))
        });
        let ended = |_| ServiceError::new(ErrorCode::ShuttingDown, "the daemon has stopped");
        opening.await.unwrap_or_else(|error| Err(ended(error)))
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
    /// and no queries that the host keeps a sample of.
    pub(crate) fn reaches(&self, model: &Model, batch: &AttendBatch) -> bool {
        self.opened.copied.is_none()
            && model.seat == self.seat
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
        self.lane.run(call, work).await
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
        self.lane.run(call, work).await
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
                        tokio::time::sleep(CLOSE_PAUSE).await;
                    }
                    // Closed, or with the whole device.
                    _ => return,
                }
            }
        });
    }
}
