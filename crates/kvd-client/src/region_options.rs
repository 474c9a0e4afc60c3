//! How a region of shared memory is opened.

#[cfg(doc)]
use crate::RegionClient;
use kvd_core::Namespace;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Device memory of this process for the payloads of a region.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RegionDevice {
    /// The handle that `cudaIpcGetMemHandle` gave.
    CudaIpc([u8; 64]),
    /// The POSIX descriptor that `cuMemExportToShareableHandle` gave.
    CudaFd(Arc<OwnedFd>),
}

/// How a region is opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RegionOptions {
    /// Bytes of the memory; 16 MiB.
    pub bytes: u64,
    /// Namespace of the calls through it; `default` when absent.
    pub namespace: Option<Namespace>,
    /// Deadline of each call; none.
    pub timeout: Option<Duration>,
    /// Device memory for the payloads, and its bytes; none. Where the daemon cannot open it, they
    /// are in the region's own memory, and [`RegionClient::reason`] says why.
    pub device: Option<(RegionDevice, u64)>,
    /// UUID of the GPU that the device memory is of (`nvidia-smi -L`); the daemon refuses one that
    /// is not its own. Numbers of GPUs differ between processes, UUIDs do not.
    pub device_uuid: Option<String>,
    /// Whether [`RegionClient::wait_launched`] is to work: one wake more per call.
    pub say_launched: bool,
    /// Boot id that the daemon must have, since ids of its will be used in the region; any.
    pub boot_id: Option<String>,
}

impl Default for RegionOptions {
    fn default() -> Self {
        Self {
            bytes: 16 << 20,
            namespace: None,
            timeout: None,
            device: None,
            device_uuid: None,
            say_launched: false,
            boot_id: None,
        }
    }
}

impl RegionOptions {
    /// With this much memory.
    #[must_use]
    pub fn with_bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// For a tenant.
    #[must_use]
    pub fn with_namespace(mut self, namespace: &Namespace) -> Self {
        self.namespace = Some(namespace.clone());
        self
    }

    /// With device memory for the payloads.
    #[must_use]
    pub fn with_device(mut self, device: RegionDevice, bytes: u64) -> Self {
        self.device = Some((device, bytes));
        self
    }

    /// With the UUID of the GPU that the device memory is of.
    #[must_use]
    pub fn with_device_uuid(mut self, uuid: impl Into<String>) -> Self {
        self.device_uuid = Some(uuid.into());
        self
    }

    /// With calls that say when the device has all of them.
    #[must_use]
    pub fn with_launches(mut self) -> Self {
        self.say_launched = true;
        self
    }

    /// At the daemon of that boot alone; [`Client::boot_id`](crate::Client::boot_id) knows it.
    #[must_use]
    pub fn with_boot_id(mut self, boot_id: impl Into<String>) -> Self {
        self.boot_id = Some(boot_id.into());
        self
    }

    /// With a deadline for each call.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}
