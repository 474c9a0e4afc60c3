//! Device memory that workers share: lane jobs, and a guard that gives it back.

use super::{Call, Service, ServiceError};
use crate::lane::Lane;
use kvd_compute::{DeviceRegion, RegionHandle};
use kvd_core::ErrorCode;
use std::sync::Arc;
use std::time::Duration;

/// How long a full queue is left alone before a region is closed again.
const CLOSE_PAUSE: Duration = Duration::from_millis(20);

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
    /// Of the device that has opened it.
    lane: Lane,
    call: Call,
    region: DeviceRegion,
    size_bytes: u64,
}

impl OpenMemory {
    /// Opens it, on the first device that can: a driver refuses what is another GPU's, unless it
    /// reaches that one's memory. Given up half-way, it is closed again.
    ///
    /// # Errors
    /// Why the device cannot, or queue errors.
    pub(crate) async fn open(
        service: &Arc<Service>,
        call: &Call,
        handle: RegionHandle,
        size_bytes: u64,
    ) -> Result<Self, ServiceError> {
        let (service, call) = (service.clone(), call.clone());
        // On a task of its own, whose outcome is dropped, and so closed, when nobody waits for it.
        let opening = tokio::spawn(async move {
            let mut refused = None;
            for lane in service.lanes().filter(|lane| !lane.failed()) {
                let handle = again(&handle)?;
                let work = move |backend: &mut dyn kvd_compute::Backend| {
                    Ok(backend.open_region(handle, size_bytes)?)
                };
                match lane.run(&call, work).await {
                    Ok(region) => return Ok(Self { lane: lane.clone(), call, region, size_bytes }),
                    Err(error) => refused = Some(error),
                }
            }
            Err(refused.unwrap_or_else(|| {
                ServiceError::new(ErrorCode::DeviceFailed, "every device has failed")
            }))
        });
        let ended = |_| ServiceError::new(ErrorCode::ShuttingDown, "the daemon has stopped");
        opening.await.unwrap_or_else(|error| Err(ended(error)))
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
        let region = self.region;
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
        let region = self.region;
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
        let (lane, region) = (self.lane.clone(), self.region);
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
