//! A driver with its staging, and the order between its two streams: kernels start after the copies
//! that were asked for before them, and a copy to where kernels may still be reading comes after
//! them. The host waits for events alone, and only for bytes that it wants.

use super::pinned_ring::PinnedRing;
use super::wait::WaitLimit;
use crate::driver::{
    DeviceCopy, DeviceStream, Driver, DriverError, EventId, GraphId, KernelLaunch,
};

/// Zeros for the bytes between two ranges that are copied as one.
const GAP: [u8; 256] = [0; 256];

/// A driver whose calls take effect in their order.
pub(super) struct DeviceStreams {
    driver: Box<dyn Driver>,
    staging: PinnedRing,
    patience: WaitLimit,
    /// The last copy to the device that kernels wait for.
    copied: Option<EventId>,
    /// The last work of kernels that copies or the host wait for.
    computed: Option<EventId>,
    /// Whether there are copies that kernels do not wait for yet.
    copies_ahead: bool,
    /// Whether there is work of kernels that copies do not wait for yet.
    kernels_ahead: bool,
    /// Whether there is work that the host has not seen end.
    busy: bool,
}

impl DeviceStreams {
    /// Takes pinned memory, `staging_bytes` per slot, and events.
    pub(super) fn open_streams(
        driver: Box<dyn Driver>,
        staging_bytes: u64,
        patience: WaitLimit,
    ) -> Result<Self, DriverError> {
        let mut ordered = Self {
            driver,
            staging: PinnedRing::new(staging_bytes, patience),
            patience,
            copied: None,
            computed: None,
            copies_ahead: false,
            kernels_ahead: false,
            busy: false,
        };
        // After an error `drop` gives back what was taken.
        ordered.staging.allocate_slots(ordered.driver.as_mut())?;
        ordered.copied = Some(ordered.driver.create_event()?);
        ordered.computed = Some(ordered.driver.create_event()?);
        Ok(ordered)
    }

    /// For calls that have no place in the streams.
    pub(super) fn driver(&self) -> &dyn Driver {
        self.driver.as_ref()
    }

    /// The driver, mutably; memory that is given back must have been [settled](Self::wait_for_all).
    pub(super) fn driver_mut(&mut self) -> &mut dyn Driver {
        self.driver.as_mut()
    }

    /// Copies to the device, after all kernels before; `bytes` may be reused at once.
    pub(super) fn write_ordered(&mut self, to: u64, bytes: &[u8]) -> Result<(), DriverError> {
        self.follow_kernels()?;
        self.upload_free(to, bytes)
    }

    /// Copies to memory of the device that no kernel is using.
    pub(super) fn upload_free(&mut self, to: u64, bytes: &[u8]) -> Result<(), DriverError> {
        self.copies_ahead |= !bytes.is_empty();
        self.busy |= !bytes.is_empty();
        self.staging.gather_bytes(self.driver.as_mut(), to, bytes)
    }

    /// Copies to free memory that ends on a multiple of the alignment. A gap smaller than the
    /// alignment is padding, so both ranges are merged into one copy.
    pub(super) fn upload_aligned(&mut self, to: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let gap = self.staging.gathered_end().and_then(|end| to.checked_sub(end).zip(Some(end)));
        if let Some((gap, end)) = gap.filter(|(gap, _)| (1..GAP.len() as u64).contains(gap)) {
            self.upload_free(end, &GAP[..gap as usize])?;
        }
        self.upload_free(to, bytes)
    }

    /// Has copies from now on wait for all kernels so far.
    pub(super) fn follow_kernels(&mut self) -> Result<(), DriverError> {
        if let Some(computed) = self.computed.filter(|_| self.kernels_ahead) {
            // Gathered copies were requested before this point.
            self.staging.start_copy(self.driver.as_mut())?;
            self.driver.record_event(computed, DeviceStream::Compute)?;
            self.driver.wait_event(DeviceStream::Copy, computed)?;
            self.kernels_ahead = false;
        }
        Ok(())
    }

    /// Has kernels from now on wait for all copies so far.
    fn follow_copies(&mut self) -> Result<(), DriverError> {
        self.staging.start_copy(self.driver.as_mut())?;
        if let Some(copied) = self.copied.filter(|_| self.copies_ahead) {
            self.driver.record_event(copied, DeviceStream::Copy)?;
            self.driver.wait_event(DeviceStream::Compute, copied)?;
            self.copies_ahead = false;
        }
        Ok(())
    }

    /// Copies from the device, after everything before; the bytes are there when it returns.
    pub(super) fn read_ordered(&mut self, from: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.follow_copies()?;
        self.staging.read_device(self.driver.as_mut(), from, bytes)?;
        // The bytes came after all kernels, and those after all copies.
        self.mark_idle();
        Ok(())
    }

    pub(super) fn copy_ordered(&mut self, copies: &[DeviceCopy]) -> Result<(), DriverError> {
        self.follow_copies()?;
        (self.kernels_ahead, self.busy) = (true, true);
        self.driver.copy_on_device(copies)
    }

    pub(super) fn launch_ordered(&mut self, launch: KernelLaunch<'_>) -> Result<(), DriverError> {
        self.follow_copies()?;
        (self.kernels_ahead, self.busy) = (true, true);
        self.driver.launch_kernel(launch)
    }

    pub(super) fn launch_graph(&mut self, graph: GraphId) -> Result<(), DriverError> {
        self.follow_copies()?;
        (self.kernels_ahead, self.busy) = (true, true);
        self.driver.launch_graph(graph)
    }

    /// Marks where kernels are now.
    pub(super) fn record_event(&mut self, event: EventId) -> Result<(), DriverError> {
        self.driver.record_event(event, DeviceStream::Compute)
    }

    /// Waits for everything.
    pub(super) fn wait_for_all(&mut self) -> Result<(), DriverError> {
        let Some(computed) = self.computed.filter(|_| self.busy) else { return Ok(()) };
        self.follow_copies()?;
        self.driver.record_event(computed, DeviceStream::Compute)?;
        self.patience.wait_event(self.driver.as_mut(), computed)?;
        self.mark_idle();
        Ok(())
    }

    /// Everything that was asked for has happened.
    fn mark_idle(&mut self) {
        (self.kernels_ahead, self.busy) = (false, false);
        self.staging.mark_idle();
    }
}

impl Drop for DeviceStreams {
    fn drop(&mut self) {
        self.staging.free_slots(self.driver.as_mut());
        for event in [self.copied, self.computed].into_iter().flatten() {
            self.driver.destroy_event(event);
        }
    }
}
