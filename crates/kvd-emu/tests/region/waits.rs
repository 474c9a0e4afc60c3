//! Waits of a store in place: for units, for the rows that they are written from, and for the
//! scratch memory that both hand over to encoding.

use super::stage::{
    BLOCK, LAYER, MODEL, incoming, refused, registered, shaped, stage, stored, writes,
};
use super::*;
use kvd_compute::EncodeSource;

#[test]
fn units_of_a_write_wait_for_no_kernel_unless_another_write_still_reads_such() {
    if !is_available() {
        return;
    }
    let geometry = shaped((2, 64, 64), DType::F16);
    for pace in Pace::EACH {
        let mut fixture = registered("raw", &geometry, (ThreadOrder::Ascending, pace));
        let (begun, tokens) = (9, 20);
        let (before, rows) = (incoming(&geometry, BLOCK, 9.0), incoming(&geometry, tokens, 0.2));
        let writes = writes(&geometry, begun, tokens);
        let (extent, capacity_rows) =
            (Extent { offset: 256 << 10, len: geometry.raw_layout(BLOCK).size_bytes() }, BLOCK);
        let to = RawTarget { extent, capacity_rows, first_row: 0 };
        fixture.backend.backend.write(MODEL, &before, 0, BLOCK, to).unwrap();
        let (_, staged) = stage(&mut fixture, &rows);
        let Fixture { backend, watch, .. } = &mut fixture;
        let backend = &mut backend.backend;
        // A tail that others see is copied within the device, which does work meanwhile.
        let source = Source::Raw { extent, capacity_rows, first_row: 0 };
        let tail = RawTarget { first_row: 0, ..writes[0].to };
        backend.copy(MODEL, LAYER, &source, begun, tail).unwrap();
        let ordered = |backend: &mut CudaBackend| {
            let calls = || ["record", "wait"].map(|call| watch.lock().calls[call]);
            let before = calls();
            backend.write_staged(&staged, &writes).unwrap();
            std::array::from_fn(|i| calls()[i] - before[i])
        };
        // Kernels wait for the units.
        assert_eq!(ordered(backend), [1, 1], "{pace:?}");
        // Units of a second write take the place of those that a kernel may still be reading.
        assert_eq!(ordered(backend), [2, 2], "{pace:?}");
        let wanted = [rows.k.to_vec(), rows.v.to_vec()];
        assert_eq!(stored(backend, &writes, DType::F16), wanted, "{pace:?}");
        assert_eq!(backend.failure(), None, "{pace:?}");
    }
}

/// A store in place on a device that copies at once, whose full blocks are encoded while `kvd_rows`
/// may still be reading their rows from scratch memory: the rows that are stored, and how often the
/// host waited until the pages were known.
fn encoded_behind_rows(rows: &IncomingRows, planted: Planted) -> ([Vec<u8>; 2], usize) {
    let geometry = shaped((2, 64, 64), DType::F16);
    let how = (ThreadOrder::Ascending, Pace::EagerCopies);
    let mut fixture = registered("k=uniform(b=4,axis=token); v=fp8", &geometry, how);
    let backend = &mut fixture.backend.backend;
    // The first block is measured, by the host, which waits for all kernels; others are not.
    let (extent, capacity_rows) =
        (Extent { offset: 256 << 10, len: geometry.raw_layout(BLOCK).size_bytes() }, BLOCK);
    let to = RawTarget { extent, capacity_rows, first_row: 0 };
    backend.write(MODEL, &incoming(&geometry, BLOCK, 9.0), 0, BLOCK, to).unwrap();
    let block = EncodeSource { extent, capacity_rows, first_row: 0, rows: BLOCK };
    // After these none of the next seven is measured.
    for encoded in backend.encode(MODEL, LAYER, &[block; 9]).unwrap() {
        encoded.unwrap();
    }

    let writes = writes(&geometry, 0, rows.tokens);
    let (_, staged) = stage(&mut fixture, rows);
    let Fixture { backend, watch, .. } = &mut fixture;
    let backend = &mut backend.backend;
    backend.write_staged(&staged, &writes).unwrap();
    let waits = watch.lock().waits;
    watch.lock().planted = planted;
    let whole = writes.iter().filter(|write| write.rows == BLOCK);
    let sources = whole.map(|write| EncodeSource { extent: write.to.extent, ..block });
    backend.encode(MODEL, LAYER, &sources.collect::<Vec<_>>()).unwrap();
    let waits = watch.lock().waits - waits;
    (stored(backend, &writes, DType::F16), waits)
}

#[test]
fn scratch_memory_goes_from_rows_to_encoding_behind_the_kernel_that_reads_it() {
    if !is_available() {
        return;
    }
    let rows = incoming(&shaped((2, 64, 64), DType::F16), 38, 0.2);
    let wanted = [rows.k.to_vec(), rows.v.to_vec()];
    let (stored, waits) = encoded_behind_rows(&rows, Planted::Nothing);
    assert_eq!(stored, wanted);
    // For the headers of pages: the host had not seen the rows written before.
    assert_eq!(waits, 1);
    // A copy that encoding makes to scratch memory would overwrite rows. The driver does not see
    // which: the kernel finds them by a table.
    let (spoiled, _) = encoded_behind_rows(&rows, Planted::CopiesDoNotWait);
    assert_ne!(spoiled, wanted);
}

#[test]
fn a_wait_that_a_store_lacks_is_noticed() {
    if !is_available() {
        return;
    }
    let geometry = shaped((2, 64, 64), DType::F16);
    let mut fixture = registered("raw", &geometry, (ThreadOrder::Ascending, Pace::EagerKernels));
    let (rows, writes) = (incoming(&geometry, 8, 0.3), writes(&geometry, 0, 8));
    let (_, staged) = stage(&mut fixture, &rows);
    fixture.watch.lock().planted = Planted::KernelsDoNotWait;
    let backend = &mut fixture.backend.backend;
    refused(backend.write_staged(&staged, &writes), ErrorCode::DeviceFailed);
    let complaints = fixture.watch.lock().complaints.clone();
    assert!(complaints[0].contains("before a copy that was asked"), "{complaints:?}");
}
