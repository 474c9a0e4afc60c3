//! Memory that workers share through the device.

use super::memory::Device;
use super::{CudaBackend, error};
use kvd_compute::{BackendError, DeviceRegion, RegionHandle};
use kvd_core::ErrorCode;
use std::collections::BTreeMap;

/// What is open: where, and how many bytes.
#[derive(Default)]
pub(super) struct Regions {
    open: BTreeMap<DeviceRegion, (u64, u64)>,
    next: u64,
}

impl Regions {
    /// Closes everything.
    pub(super) fn clear(&mut self, device: &mut Device) {
        for (address, _) in std::mem::take(&mut self.open).into_values() {
            device.close_shared(address);
        }
    }

    /// Where a range of a region is.
    fn find(&self, region: DeviceRegion, offset: u64, len: u64) -> Result<u64, BackendError> {
        let refuse = |message: String| error(ErrorCode::InvalidArgument, message);
        let unknown = || refuse(format!("no device memory {} is open", region.0));
        let (address, bytes) = self.open.get(&region).ok_or_else(unknown)?;
        if offset.checked_add(len).is_none_or(|end| end > *bytes) {
            let message =
                format!("bytes {offset}..{offset}+{len} are not inside the {bytes} of the device");
            return Err(refuse(message));
        }
        Ok(address + offset)
    }
}

impl CudaBackend {
    pub(super) fn open_memory(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<DeviceRegion, BackendError> {
        if bytes == 0 {
            return Err(error(ErrorCode::InvalidArgument, "a region of 0 bytes"));
        }
        let address = self.device.open_shared(handle, bytes)?;
        let region = DeviceRegion(self.regions.next);
        self.regions.next += 1;
        self.regions.open.insert(region, (address, bytes));
        Ok(region)
    }

    pub(super) fn close_memory(&mut self, region: DeviceRegion) {
        if let Some((address, _)) = self.regions.open.remove(&region) {
            self.device.close_shared(address);
        }
    }

    pub(super) fn read_memory(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        let from = self.regions.find(region, offset, bytes.len() as u64)?;
        self.device.download(from, bytes)
    }

    pub(super) fn write_memory(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let to = self.regions.find(region, offset, bytes.len() as u64)?;
        self.device.write_shared(to, bytes)
    }
}
