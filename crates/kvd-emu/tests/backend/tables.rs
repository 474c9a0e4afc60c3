//! Tables of layers: their room, and the first ones of Huffman codes.

use super::*;

#[test]
fn tables_that_find_no_room_are_an_answer_and_the_device_goes_on() {
    if !available() {
        return;
    }
    let (mut backend, watch, part) = with_rows(CudaOptions { table_bytes: 1 << 10, ..OPTIONS });
    let plan = suite::attend_plan(vec![part.clone()], 1);
    let first = backend.attend(&plan).unwrap();
    // Another model's tables have no room beside them.
    backend.register(ModelId(2), suite::codec("kvd-2", RopePairing::Half));
    let other = AttendPlan { model: ModelId(2), ..plan.clone() };
    let error = backend.attend(&other).unwrap_err();
    assert_eq!(error.code(), ErrorCode::LimitExceeded);
    assert!(error.to_string().contains("raise device.table_bytes"), "{error}");
    assert_eq!(backend.failure(), None);
    let again = backend.attend(&plan).unwrap();
    assert_eq!((again.out, again.lse), (first.out, first.lse));
    // When it is gone, its place is free again.
    backend.unregister(ModelId(2));
    for _ in 0..10 {
        backend.register(ModelId(1), suite::codec("kivi-4", RopePairing::Half));
        backend.attend(&plan).unwrap();
    }
    drop(backend);
    assert_eq!(watch.lock().live, 0);
}

#[test]
fn first_tables_of_a_layer_are_the_hosts_and_its_rows_stay_on_the_device() {
    if !available() {
        return;
    }
    let value = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0;
    let rows = 8 * 2 * (64 + 64) * 4;
    assert_eq!(counters("kvcomp"), 240);
    for text in ["kvcomp", "kvcomp-channel"] {
        // What the host alone makes of the same rows, at the same place.
        let mut host = CpuBackend::new(CpuOptions {
            arena_bytes: OPTIONS.arena_bytes,
            prefault: false,
            threads: 1,
        })
        .unwrap();
        host.register(ModelId(1), suite::codec(text, RopePairing::Half));
        // All at once; a block at a time; none, so that the host counts.
        for (scratch_bytes, counted, whole) in
            [(1 << 20, true, true), (12 << 10, true, false), (512, false, false)]
        {
            let options = CudaOptions { scratch_bytes, ..OPTIONS };
            let (mut backend, watch, part) = with_codec(text, value, Pace::Late, options);
            let blocks = blocks(&part, 20);
            let bytes: Vec<u8> = (0..8 * 2 * 64).flat_map(|i| value(i).to_le_bytes()).collect();
            let both = IncomingRows { tokens: 8, k: bytes.clone().into(), v: bytes.into() };
            let to = RawTarget { extent: blocks[0].extent, capacity_rows: 8, first_row: 0 };
            host.unregister(ModelId(1));
            host.register(ModelId(1), suite::codec(text, RopePairing::Half));
            host.write(ModelId(1), &both, 0, 8, to).unwrap();
            let wanted = host.encode(ModelId(1), LayerIndex(0), &blocks).unwrap();
            let encoded = backend.encode(ModelId(1), LayerIndex(0), &blocks).unwrap();
            let made = |kernel: &String| kernel.starts_with("kvd_histogram_");
            assert_eq!(watch.lock().kernels.iter().any(made), counted, "{scratch_bytes}");
            if whole {
                // Blocks 0 and 16 are measured.
                let wanted = 2 * rows + 18 * 4 * 32 + counters(text);
                assert_eq!(watch.lock().read_bytes, wanted, "{text}");
            }
            let versions = backend.model_bytes(ModelId(1)).unwrap().table_versions;
            assert_eq!(versions, host.model_bytes(ModelId(1)).unwrap().table_versions);
            for (pages, wanted) in encoded.iter().zip(&wanted) {
                let (pages, wanted) = (pages.as_ref().unwrap(), wanted.as_ref().unwrap());
                assert!(pages.held.is_some() || pages.bytes == wanted.bytes, "{text}");
                assert_eq!(pages.page_ends, wanted.page_ends, "{text}");
                assert_eq!(pages.parts, wanted.parts, "{text}");
            }
            assert_eq!(backend.failure(), None);
        }
    }
}
