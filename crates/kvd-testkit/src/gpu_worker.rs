//! A real other process that shares memory: `kernels/gpu/worker.py`, or what `KVD_GPU_WORKER`
//! names.

use kvd_compute::{Backend, OpenedRegion, RegionHandle};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::process::{Child, ChildStdout, Command, Stdio};

/// How a worker hands its memory over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// A legacy IPC handle.
    Ipc,
    /// A descriptor of virtual memory management, over a Unix socket.
    Fd,
}

impl MemoryKind {
    /// Both ways.
    pub const EACH: [Self; 2] = [Self::Ipc, Self::Fd];
}

/// The process.
pub struct WorkerProcess {
    /// Its handle, to kill it.
    pub process: Child,
    lines: BufReader<ChildStdout>,
}

impl WorkerProcess {
    /// Starts it, and says how its memory is opened and how much there is.
    pub fn start_process(kind: MemoryKind) -> (Self, RegionHandle, u64) {
        Self::start_with(kind, None)
    }

    /// A worker with `bytes` of memory behind an IPC handle.
    pub fn start_with(kind: MemoryKind, bytes: Option<u64>) -> (Self, RegionHandle, u64) {
        let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/gpu/worker.py");
        let script = std::env::var("KVD_GPU_WORKER").unwrap_or(beside.to_owned());
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("memory");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut command = Command::new("python3");
        command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
        match kind {
            MemoryKind::Ipc => command.arg("ipc").args(bytes.map(|bytes| bytes.to_string())),
            MemoryKind::Fd => command.arg("fd").arg(&socket),
        };
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap());
        let mut worker = Self { process, lines };
        // A descriptor is in the socket by then, unless the worker is dead.
        let line = worker.read_line();
        let (bytes, handle) = line.split_once(' ').expect("bytes and a handle");
        let handle = match kind {
            MemoryKind::Ipc => RegionHandle::CudaIpc(from_hex(handle).try_into().unwrap()),
            MemoryKind::Fd => {
                let (_, mut files) =
                    kvd_shm::receive_files(listener.accept().unwrap().0, &mut [0]).unwrap();
                RegionHandle::CudaFd(files.remove(0))
            }
        };
        let bytes = bytes.parse().unwrap();
        (worker, handle, bytes)
    }

    /// Starts it and opens its memory.
    pub fn open_memory(backend: &mut dyn Backend, kind: MemoryKind) -> (Self, OpenedRegion) {
        let (worker, handle, bytes) = Self::start_process(kind);
        (worker, backend.open_region(handle, bytes).unwrap())
    }

    fn read_line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Bytes that it prints.
    pub fn read_bytes(&mut self) -> Vec<u8> {
        from_hex(&self.read_line())
    }

    /// Sends it a command.
    pub fn send_line(&mut self, line: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Writes to its memory.
    pub fn write_memory(&mut self, offset: u64, bytes: &[u8]) {
        self.send_line(&format!("write {offset} {}", to_hex(bytes)));
        assert_eq!(self.read_line(), "written");
    }

    /// Reads from its memory.
    pub fn read_memory(&mut self, offset: u64, bytes: u64) -> Vec<u8> {
        self.send_line(&format!("read {offset} {bytes}"));
        self.read_bytes()
    }

    /// Its exit status.
    pub fn end_process(mut self) -> bool {
        self.send_line("end");
        self.process.wait().unwrap().success()
    }
}

/// Bytes as lower-case hexadecimal digits.
#[must_use]
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(digits: &str) -> Vec<u8> {
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16);
    digits.as_bytes().as_chunks::<2>().0.iter().map(|pair| byte(pair).unwrap()).collect()
}

/// Reads the worker's message from its memory, and leaves the one that it looks for.
pub fn exchange_messages(backend: &mut dyn Backend, kind: MemoryKind) {
    let (mut worker, OpenedRegion { region, .. }) = WorkerProcess::open_memory(backend, kind);
    worker.write_memory(1000, b"queries");
    let mut bytes = [0; 7];
    backend.read_region(region, 1000, &mut bytes).unwrap();
    assert_eq!(
        (&bytes, worker.read_memory(1000, 7)),
        (b"queries", b"queries".to_vec()),
        "{kind:?}"
    );
    let mut bytes = [0; 256];
    backend.read_region(region, 0, &mut bytes).unwrap();
    assert!(bytes.iter().copied().eq(0..=255), "{kind:?}");
    bytes.reverse();
    backend.write_region(region, 0, &bytes).unwrap();
    backend.close_region(region);
    assert!(worker.end_process(), "{kind:?}: the worker does not see what was written");
}
