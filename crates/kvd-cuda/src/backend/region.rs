//! Memory that workers share through the device.

use super::memory::DeviceMemory;
use super::{CudaBackend, device_error};
use crate::driver::EventId;
use kvd_compute::{BackendError, DeviceRegion, OpenedRegion, RegionHandle};
use kvd_core::ErrorCode;
use std::collections::BTreeMap;

/// Kernels that read and write a worker's memory where it is.
const IN_PLACE: [&str; 4] = ["kvd_queries", "kvd_answer", "kvd_stage", "kvd_rows"];

/// Memory that is open.
struct OpenRegion {
    address: u64,
    bytes: u64,
    /// Recorded behind each answer, for the worker to wait for.
    event: Option<EventId>,
}

/// Values in a region.
#[derive(Clone, Copy)]
pub(super) struct RegionValues {
    pub(super) count: u64,
    pub(super) bytes_each: usize,
}

/// The regions that are open, by id.
#[derive(Default)]
pub(super) struct OpenRegions {
    open: BTreeMap<DeviceRegion, OpenRegion>,
    next: u64,
}

impl OpenRegions {
    /// Closes everything.
    pub(super) fn clear(&mut self, device: &mut DeviceMemory) {
        std::mem::take(&mut self.open).into_values().for_each(|open| close_region(device, open));
    }

    fn get(&self, region: DeviceRegion) -> Result<&OpenRegion, BackendError> {
        let unknown = || refuse_region(format!("no device memory {} is open", region.0));
        self.open.get(&region).ok_or_else(unknown)
    }

    /// Where a range of a region is.
    pub(super) fn find_range(
        &self,
        region: DeviceRegion,
        offset: u64,
        len: u64,
    ) -> Result<u64, BackendError> {
        let OpenRegion { address, bytes, .. } = self.get(region)?;
        if offset.checked_add(len).is_none_or(|end| end > *bytes) {
            let message =
                format!("bytes {offset}..{offset}+{len} are not inside the {bytes} of the device");
            return Err(refuse_region(message));
        }
        Ok(address + offset)
    }

    /// Finds a range of values, which must be aligned to their size.
    pub(super) fn find_values(
        &self,
        region: DeviceRegion,
        offset: u64,
        values: RegionValues,
    ) -> Result<u64, BackendError> {
        let RegionValues { count, bytes_each } = values;
        let address = self.find_range(region, offset, count.saturating_mul(bytes_each as u64))?;
        if !address.is_multiple_of(bytes_each as u64) {
            let message = format!("offset {offset} of a region is not aligned to {bytes_each}");
            return Err(refuse_region(message));
        }
        Ok(address)
    }

    /// The event recorded behind an answer.
    pub(super) fn answer_event(&self, region: DeviceRegion) -> Option<EventId> {
        self.open.get(&region).and_then(|open| open.event)
    }
}

fn refuse_region(message: String) -> BackendError {
    device_error(ErrorCode::InvalidArgument, message)
}

fn close_region(device: &mut DeviceMemory, open: OpenRegion) {
    device.close_shared(open.address);
    if let Some(event) = open.event {
        device.destroy_event(event);
    }
}

impl CudaBackend {
    pub(super) fn open_memory(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<OpenedRegion, BackendError> {
        if bytes == 0 {
            return Err(device_error(ErrorCode::InvalidArgument, "a region of 0 bytes"));
        }
        let address = self.device.open_shared(handle, bytes)?;
        let found = IN_PLACE.iter().try_for_each(|kernel| self.device.find_kernel(kernel));
        let copied = found.err().map(|error| error.to_string());
        // An answer that no event marks is there when the call has ended.
        let shared = copied.is_none().then(|| self.device.share_event());
        let (shared, no_event) = match shared {
            None => (None, None),
            Some(Ok(shared)) => (Some(shared), None),
            Some(Err(error)) => (None, Some(error.to_string())),
        };
        let (event, handle) = shared.unzip();
        let region = DeviceRegion(self.regions.next);
        self.regions.next += 1;
        self.regions.open.insert(region, OpenRegion { address, bytes, event });
        Ok(OpenedRegion { region, event: handle, no_event, copied })
    }

    pub(super) fn close_memory(&mut self, region: DeviceRegion) {
        if let Some(open) = self.regions.open.remove(&region) {
            close_region(&mut self.device, open);
        }
    }

    pub(super) fn read_memory(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        let from = self.regions.find_range(region, offset, bytes.len() as u64)?;
        self.device.download_scratch(from, bytes)
    }

    pub(super) fn write_memory(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let to = self.regions.find_range(region, offset, bytes.len() as u64)?;
        self.device.write_shared(to, bytes)
    }
}
