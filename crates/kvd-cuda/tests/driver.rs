//! The driver's memory calls over a made-up `libcuda.so` whose memory is this process's: that they
//! come with the right arguments and in the right order, not what a GPU makes of them. A process
//! has one driver, so the work is done in a process of its own.
#![expect(clippy::unwrap_used, reason = "a test may fail")]
#![cfg(target_os = "linux")]

use kvd_compute::RegionHandle;
use kvd_cuda::{CudaDriver, Driver, DriverError, devices};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

#[test]
fn memory_of_this_and_of_other_processes_is_opened_copied_and_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_libcuda.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(dir.path().join("libcuda.so")).arg(source);
    match cc.output() {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(_) => return eprintln!("SKIP driver: no C compiler to make a driver with"),
    }
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", "--ignored", "memory", "--nocapture"]);
    let output = process.env("LD_LIBRARY_PATH", dir.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}

#[test]
#[ignore = "what the other test starts as a process"]
fn memory() {
    let gpu = devices().unwrap().remove(0);
    let mut driver = CudaDriver::open(gpu).unwrap();
    let own = driver.alloc(512).unwrap();
    driver.write(own, b"queries").unwrap();
    driver.copy(own, own + 256, 7).unwrap();
    assert_eq!(read(&mut driver, own + 256, 7), b"queries");
    ipc(&mut driver);
    descriptor(&mut driver);
    driver.free(own);
    // What is still open is closed with the driver.
    let mut memory = vec![0u8; 64];
    driver.open_shared(handle(&mut memory, 64), 64).unwrap();
    drop(driver);
    assert_eq!(memory[0], b'C');
}

fn read(driver: &mut CudaDriver, from: u64, bytes: usize) -> Vec<u8> {
    let mut to = vec![0; bytes];
    driver.read(from, &mut to).unwrap();
    to
}

/// A handle as the made-up driver gives them.
fn handle(memory: &mut [u8], bytes: u64) -> RegionHandle {
    let mut handle = [0; 64];
    handle[..8].copy_from_slice(&(memory.as_mut_ptr() as u64).to_ne_bytes());
    handle[8..16].copy_from_slice(&bytes.to_ne_bytes());
    RegionHandle::CudaIpc(handle)
}

fn refused(result: Result<u64, DriverError>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, DriverError::Refused { .. }), "{error}");
    error.to_string()
}

fn ipc(driver: &mut CudaDriver) {
    let mut peer = vec![0u8; 4096];
    let at = driver.open_shared(handle(&mut peer, 4096), 4096).unwrap();
    driver.write(at + 100, b"out").unwrap();
    assert_eq!(read(driver, at + 100, 3), b"out");
    driver.close_shared(at);
    assert_eq!((peer[0], &peer[100..103]), (b'C', &b"out"[..]));
    let short = refused(driver.open_shared(handle(&mut peer, 4095), 4096));
    assert!(short.contains("it has 4095 bytes, not 4096"), "{short}");
    let unknown = refused(driver.open_shared(RegionHandle::CudaIpc([0; 64]), 64));
    assert!(unknown.contains("CUDA_ERROR_INVALID_VALUE (1)"), "{unknown}");
}

/// Mappings of the file, and descriptors of this process.
fn held(path: &Path) -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.ends_with(path.to_str().unwrap())).count();
    (mapped, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

fn descriptor(driver: &mut CudaDriver) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join("allocation");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(8192).unwrap();
    let before = held(&path);
    let open = || RegionHandle::CudaFd(OwnedFd::from(file.try_clone().unwrap()));
    let at = driver.open_shared(open(), 8192).unwrap();
    driver.write(at + 8000, b"out").unwrap();
    assert_eq!(read(driver, at + 8000, 3), b"out");
    // The mapping keeps the allocation; neither descriptor nor handle stays.
    assert_eq!(held(&path), (1, before.1));
    driver.close_shared(at);
    assert_eq!(held(&path), before);
    assert_eq!(&std::fs::read(&path).unwrap()[8000..8003], b"out");
    for bytes in [8192 + 4096, 100] {
        let over = refused(driver.open_shared(open(), bytes));
        assert!(over.contains("cuMemMap refuses"), "{over}");
        assert_eq!(held(&path), before, "nothing stays of what was refused");
    }
}
