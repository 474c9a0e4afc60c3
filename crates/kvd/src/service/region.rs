//! Device memory that workers share: lane jobs, and a guard that gives it back.

use super::{Call, Service, ServiceError};
use kvd_compute::{DeviceRegion, RegionHandle};
use kvd_core::ErrorCode;
use std::sync::Arc;
use std::time::Duration;

/// How long a full queue is left alone before a region is closed again.
const CLOSE_PAUSE: Duration = Duration::from_millis(20);

/// Device memory that is open until this is dropped.
pub(crate) struct OpenMemory {
    service: Arc<Service>,
    call: Call,
    region: DeviceRegion,
    size_bytes: u64,
}

impl OpenMemory {
    /// Opens it. Given up half-way, it is closed again.
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
            let work = move |backend: &mut dyn kvd_compute::Backend| {
                Ok(backend.open_region(handle, size_bytes)?)
            };
            let region = service.lane.run(&call, work).await?;
            Ok(Self { service, call, region, size_bytes })
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
        self.service.lane.run(call, work).await
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
        self.service.lane.run(call, work).await
    }
}

impl Drop for OpenMemory {
    fn drop(&mut self) {
        // Without a runtime the daemon is gone, and the backend closes what is open itself.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (service, region) = (self.service.clone(), self.region);
        let call = Call { deadline: None, ..self.call.clone() };
        runtime.spawn(async move {
            loop {
                let work = move |backend: &mut dyn kvd_compute::Backend| {
                    backend.close_region(region);
                    Ok(())
                };
                match service.lane.run(&call, work).await {
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
