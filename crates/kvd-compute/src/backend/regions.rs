//! Memory of a device that a worker shares: opened, read and written, and used in place.

use crate::region::no_region_error;
use crate::{
    AttendPlan, BackendError, DeviceRegion, OpenedRegion, RegionHandle, RegionPlaces, RegionRows,
    StagedRows,
};
use kvd_core::ModelId;

/// Opens memory that workers share with the device. The default is a device without any.
pub trait RegionBackend {
    /// Opens device memory that a worker shares.
    ///
    /// # Errors
    /// Why this device cannot.
    fn open_region(
        &mut self,
        handle: RegionHandle,
        bytes: u64,
    ) -> Result<OpenedRegion, BackendError> {
        let _ = (handle, bytes);
        Err(no_region_error())
    }

    /// Gives it back; one that is not open is none.
    fn close_region(&mut self, region: DeviceRegion) {
        let _ = region;
    }

    /// Copies out of it.
    ///
    /// # Errors
    /// When it is not open, the range is not inside it, or the device has failed.
    fn read_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        let _ = (region, offset, bytes);
        Err(no_region_error())
    }

    /// Copies into it; what was written is there when this returns.
    ///
    /// # Errors
    /// As [`RegionBackend::read_region`].
    fn write_region(
        &mut self,
        region: DeviceRegion,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        let _ = (region, offset, bytes);
        Err(no_region_error())
    }

    /// [`crate::AttendBackend::attend`] with queries and answer in a region; the plan's own queries
    /// are ignored. Gives the bytes of pages and raw rows that lay in the plan's parts. `launched`
    /// is called once all of it is the device's and the region's event is recorded behind it, and
    /// before it is known to be done; never where the region has no event. What is refused later
    /// has written something to the answer's places.
    ///
    /// # Errors
    /// As `attend`; when the region is not open or a place not inside it or not aligned.
    fn attend_in_place(
        &mut self,
        plan: &AttendPlan,
        places: &RegionPlaces,
        launched: &mut dyn FnMut(),
    ) -> Result<u64, BackendError> {
        let _ = (plan, places, launched);
        Err(no_region_error())
    }

    /// Copies K and V of a region within the device, and says of the copy what the host would of
    /// rows that it was sent; `None` where the device has no room for so many at once.
    ///
    /// # Errors
    /// When the model is unknown, the region is not open or a place not inside it or not aligned.
    fn stage_rows(
        &mut self,
        model: ModelId,
        rows: &RegionRows,
    ) -> Result<Option<StagedRows>, BackendError> {
        let _ = (model, rows);
        Err(no_region_error())
    }
}
