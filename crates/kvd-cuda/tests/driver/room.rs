//! Too little memory on the device, at the start and later.

use super::*;

/// An error of too little memory, which names what there was none for.
fn assert_no_room(error: &DriverError, what: &str) {
    assert!(matches!(error, DriverError::NoRoom(of) if of == what), "{error}");
}

#[test]
#[ignore = "what another test starts as a process"]
fn no_room() {
    let mut driver = CudaDriver::open_gpu(probe_devices().unwrap().remove(0).unwrap()).unwrap();
    assert_no_room(&driver.load_image(b"kernels").unwrap_err(), "kernels");
    // It goes on, without kernels that would be loaded later.
    let own = driver.allocate_device(8).unwrap();
    put(&mut driver, own, b"queries");
    assert_eq!(read(&mut driver, own, 7), b"queries");
    let missing = driver.find_kernel("first").unwrap_err();
    assert!(matches!(missing, DriverError::NoKernel(_)), "{missing}");
    driver.free_device(own);
    let Err(CudaOpenError::Driver(error)) = backend_of(&[b"kernels"]) else { panic!("it opens") };
    assert_no_room(&error, "kernels");
    assert!(error.to_string().contains("device.pool_bytes"), "{error}");
}

#[test]
#[ignore = "what another test starts as a process"]
fn no_launch() {
    let (mut driver, at) = with_number();
    let node = digits(at, [1, 2, 3, 4], 0)[0];
    assert_no_room(&driver.launch_kernel(launch(&node)).unwrap_err(), "first");
    assert_eq!(number(&mut driver, at), 0);
    driver.free_device(at);
}

#[test]
#[ignore = "what another test starts as a process"]
fn no_stage() {
    let mut peer = vec![0u8; 1 << 16];
    let mut backend = backend_of(&[b"kernels"]).unwrap();
    register(&mut backend);
    let region = backend.open_region(handle(&mut peer, 1 << 16), 1 << 16).unwrap().region;
    let rows = RegionRows { region, tokens: 2, k: 0, v: 1 << 12 };
    // A worker's store is refused, and the lane goes on.
    let error = backend.stage_rows(ModelId(1), &rows).unwrap_err();
    assert_eq!(error.code(), ErrorCode::LimitExceeded, "{error}");
    assert!(error.to_string().contains("no memory left for kvd_stage"), "{error}");
    assert_eq!(backend.failure(), None);
    let part = write(&mut backend, 1).unwrap();
    assert_eq!(load(&mut backend, part).unwrap()[..4], 4f32.to_le_bytes());
}
