//! Memory that a worker hands over as a descriptor: mapped for each region, given back with it.

use super::*;
use driver::shared::GRANULE;

#[test]
fn a_descriptor_is_mapped_for_each_region_and_nothing_of_it_stays() {
    if !is_available() {
        return;
    }
    // Graphs would count among what lives.
    let options = CudaOptions { graphs: 0, ..OPTIONS };
    let (mut fixture, part) = with_rows_as(Kind::Fd, "raw", options);
    let plan = plan(&part, DType::F32, 2, &[1]);
    let (places, lengths) = fixture.backend.plan_places(&plan);
    let right = fixture.backend.attend(&plan).unwrap();
    let Fixture { backend, watch, memory, .. } = &mut fixture;
    let by_host = backend.backend.attend(&plan).unwrap();
    assert_eq!((&right.out, &right.lse), (&by_host.out, &by_host.lse));
    // A mapping keeps the memory: the descriptor is closed.
    assert_eq!(memory.held(), [1, 0]);
    let live = watch.lock().live;
    let again = backend.backend.open_region(memory.handle(), REGION_BYTES as u64).unwrap();
    assert_eq!((again.copied, memory.held()), (None, [2, 0]));
    // Both are the worker's memory; the other one stays when one is closed.
    let backend = &mut backend.backend;
    backend.write_region(places.region, places.out, &vec![0; lengths[0] as usize]).unwrap();
    backend.close_region(places.region);
    assert_eq!(memory.held(), [1, 0]);
    let places = RegionPlaces { region: again.region, ..places };
    backend.attend_in_place(&plan, &places, &mut || {}).unwrap();
    assert_eq!(memory.bytes()[places.out as usize..][..right.out.len()], right.out);
    assert_eq!(watch.lock().live, live);
    backend.close_region(again.region);
    assert_eq!((memory.held(), backend.failure()), ([0, 0], None));
}

#[test]
fn a_descriptor_of_less_memory_or_no_whole_granules_is_refused_and_the_device_goes_on() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows_as(Kind::Fd, "raw", OPTIONS);
    let plan = plan(&part, DType::F32, 2, &[1]);
    let right = fixture.backend.attend(&plan).unwrap();
    for bytes in [REGION_BYTES as u64 + GRANULE, REGION_BYTES as u64 - 1] {
        let handle = fixture.memory.handle();
        let error = fixture.backend.backend.open_region(handle, bytes).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("cuMemMap"), "{error}");
        assert_eq!(fixture.memory.held(), [1, 0]);
    }
    assert_eq!(fixture.backend.attend(&plan).unwrap().out, right.out);
    // Open mappings are closed with the device.
    let Fixture { backend, watch, memory, .. } = fixture;
    drop(backend);
    assert_eq!((memory.held(), watch.lock().live), ([0, 0], 0));
}

#[test]
fn what_a_driver_lacks_is_said_when_a_region_is_opened() {
    for (fail, event, copied) in [
        (Fail::Kernels, false, Some("no kernel kvd_queries")),
        (Fail::Events, false, None),
        (Fail::Never, true, None),
    ] {
        let (driver, watch) = EmuDriver::new(ThreadOrder::Ascending, Pace::Late);
        let mut backend =
            CudaBackend::open_backend(Box::new(driver), &[b"kernels"], OPTIONS).unwrap();
        watch.lock().fail = fail;
        let memory = shared(Kind::Ipc);
        let opened = backend.open_region(memory.handle(), 64).unwrap();
        assert_eq!(opened.event.is_some(), event);
        let reason = opened.no_event.unwrap_or_default();
        assert_eq!(reason.contains("CUDA_ERROR_NOT_SUPPORTED"), !event && copied.is_none());
        match copied {
            None => assert_eq!(opened.copied, None),
            Some(wanted) => assert!(opened.copied.unwrap().contains(wanted)),
        }
        assert_eq!(backend.failure(), None);
        drop(backend);
        assert_eq!(watch.lock().live, 0);
    }
}
