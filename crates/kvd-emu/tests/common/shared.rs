//! A worker's device memory, and how it hands it over.
#![allow(dead_code, reason = "each test file uses its own part")]

use kvd_compute::RegionHandle;
use kvd_emu::EmulatorMemory;
use memmap2::MmapMut;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Granularity of a descriptor's memory, as an allocation of virtual memory management has it; a
/// GPU's is larger.
pub(crate) const GRANULE: u64 = 4096;

/// How a worker names its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By a legacy IPC handle: here its address.
    Ipc,
    /// By a descriptor: here of a file, which every process maps where it likes.
    Fd,
}

impl Kind {
    pub(crate) const EACH: [Self; 2] = [Self::Ipc, Self::Fd];
}

/// Memory of a worker.
pub(crate) enum Shared {
    Ipc(EmulatorMemory),
    Fd { file: File, mapping: MmapMut, path: PathBuf, dir: tempfile::TempDir },
}

impl Shared {
    /// Memory that begins with `bytes`, which are followed by zeros up to a whole granule where it
    /// is made of such.
    pub(crate) fn of(kind: Kind, bytes: &[u8]) -> Self {
        if kind == Kind::Ipc {
            return Self::Ipc(EmulatorMemory::copy_from(bytes));
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("allocation");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len((bytes.len() as u64).next_multiple_of(GRANULE)).unwrap();
        // SAFETY: nobody else knows the file but those whom the test hands it to, and none cuts it.
        let mut mapping = unsafe { MmapMut::map_mut(&file) }.unwrap();
        mapping[..bytes.len()].copy_from_slice(bytes);
        Self::Fd { file, mapping, path, dir }
    }

    /// Its bytes; no kernel is running.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Ipc(memory) => memory.bytes(),
            Self::Fd { mapping, .. } => mapping,
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes().len() as u64
    }

    /// The handle that the worker passes, a new one each time.
    pub(crate) fn handle(&self) -> RegionHandle {
        match self {
            Self::Ipc(memory) => RegionHandle::CudaIpc(ipc_handle(memory)),
            Self::Fd { file, .. } => RegionHandle::CudaFd(OwnedFd::from(file.try_clone().unwrap())),
        }
    }

    /// Mappings and descriptors of this process beside the worker's own; none of what has only an
    /// address.
    pub(crate) fn held(&self) -> [usize; 2] {
        let Self::Fd { path, .. } = self else { return [0; 2] };
        held(path).map(|count| count - 1)
    }
}

/// A handle that the made-up driver opens.
pub(crate) fn ipc_handle(memory: &EmulatorMemory) -> [u8; RegionHandle::IPC_BYTES] {
    let mut handle = [0; RegionHandle::IPC_BYTES];
    handle[..8].copy_from_slice(&memory.address().to_le_bytes());
    handle
}

fn held(path: &Path) -> [usize; 2] {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.ends_with(path.to_str().unwrap())).count();
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == path));
    [mapped, open.count()]
}
