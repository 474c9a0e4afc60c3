//! The kernels of a store alone: what they copy, find and hash, for every length, place and dtype.

use bytemuck::{bytes_of, cast_slice, cast_slice_mut};
use kvd_compute::{content_hash, content_hash_of};
use kvd_core::{DType, Side};
use kvd_cuda::{RowsParameters, RowsUnit, StageCheck, StageParameters};
use kvd_emu::{EmulatorMemory, LaunchGrid, ThreadOrder, is_available, is_sanitized, launch_kernel};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Bytes that are finite values of any dtype, zeros of both signs and the largest among them.
fn finite(count: usize, seed: usize) -> Vec<u8> {
    let word = |i: usize| match (i * 7 + seed) % 11 {
        0 => 0x7BFF_u16,
        1 => 0x8000,
        2 => 0,
        more => ((i + seed) * 2477 + more) as u16 & 0xBBFF,
    };
    (0..count.div_ceil(2)).flat_map(|i| word(i).to_le_bytes()).take(count).collect()
}

/// The output of `kvd_stage` for K and V: the hash, the first bad value of each, and their copies.
fn stage(
    sides: [&[u8]; 2],
    shift: usize,
    dtype: DType,
    order: ThreadOrder,
) -> (u64, [Option<u32>; 2], [Vec<u8>; 2]) {
    let from = sides.map(|bytes| EmulatorMemory::copy_from(&[&vec![0xFF; shift], bytes].concat()));
    let addresses = from.each_ref().map(|from| from.address() + shift as u64);
    stage_from(addresses, sides.map(|bytes| bytes.len() as u64), dtype, order)
}

fn stage_from(
    from: [u64; 2],
    bytes: [u64; 2],
    dtype: DType,
    order: ThreadOrder,
) -> (u64, [Option<u32>; 2], [Vec<u8>; 2]) {
    let mut plan = StageParameters::new(bytes, dtype);
    let to = Side::BOTH.map(|side| EmulatorMemory::new(plan.copy_bytes(side) as usize));
    for (side, (from, to)) in Side::BOTH.into_iter().zip(from.iter().zip(&to)) {
        plan.set_side(side, *from, to.address());
    }
    let blocks = plan.thread_blocks();
    let checks = EmulatorMemory::new(blocks as usize * size_of::<StageCheck>());
    plan.checks = checks.address();
    let shared_bytes = StageParameters::SHARED_BYTES as usize;
    let grid = LaunchGrid { kernel: "kvd_stage", blocks, shared_bytes, order };
    // SAFETY: every address is of memory of the caller's or above, as long as the plan says.
    unsafe { launch_kernel(grid, bytes_of(&plan)) }.unwrap();
    let mut read = vec![StageCheck::default(); blocks as usize];
    cast_slice_mut::<_, u8>(&mut read).copy_from_slice(checks.bytes());
    let (sum, bad) = plan.read_checks(&read);
    let hash = content_hash_of(sum, plan.sides.map(|side| side.bytes));
    (hash, bad, to.map(|to| to.bytes().to_vec()))
}

#[test]
fn a_device_hashes_and_copies_content_of_every_length_as_the_host_does() {
    if !is_available() {
        return;
    }
    let mut orders = ThreadOrder::EACH.into_iter().cycle();
    for dtype in DTYPES {
        let each = dtype.size_bytes();
        let lengths =
            (1..20).map(|values| values * each).chain([8 * 1023, 8 * 1024 + each, 20_000]);
        for (seed, length) in lengths.enumerate() {
            // Alignments that a slice of values may have.
            for shift in [0, 2, 4, 6, 8].into_iter().filter(|shift| shift % each == 0) {
                let (k, v) =
                    (finite(length, seed), finite(length / each / 3 * each + each, 50 + seed));
                let (hash, bad, copies) = stage([&k, &v], shift, dtype, orders.next().unwrap());
                let context = format!("{dtype}, {length} bytes, {shift} off");
                assert_eq!(hash, content_hash(&k, &v), "{context}");
                assert_eq!(bad, [None; 2], "{context}");
                for (copy, mut wanted) in copies.into_iter().zip([k, v]) {
                    wanted.resize(wanted.len().next_multiple_of(8), 0);
                    assert_eq!(copy, wanted, "{context}");
                }
            }
        }
    }
}

#[test]
fn the_first_value_that_is_no_number_is_found_wherever_it_stands() {
    if !is_available() {
        return;
    }
    let worst = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN];
    for dtype in DTYPES {
        let each = dtype.size_bytes();
        let count = 5000;
        let good = finite(count * each, 3);
        for (index, value) in
            [0, 1, 2, 3, 4, 2047, 2048, 4998, 4999].into_iter().zip(worst.repeat(3))
        {
            let mut bad = good.clone();
            // A later one besides.
            for at in [index, (index + 900).min(count - 1)] {
                dtype.narrow_values(&[value], &mut bad[at * each..][..each]);
            }
            for (sides, wanted) in [
                ([&bad[..], &good], [Some(index as u32), None]),
                ([&good, &bad], [None, Some(index as u32)]),
                ([&bad, &bad], [Some(index as u32); 2]),
            ] {
                let (hash, found, _) = stage(sides, 0, dtype, ThreadOrder::Random(9));
                assert_eq!(found, wanted, "{dtype}, {value} at {index}");
                assert_eq!(hash, content_hash(sides[0], sides[1]));
            }
        }
    }
}

#[test]
fn rows_of_every_size_and_alignment_go_to_their_places_and_nowhere_else() {
    if !is_available() {
        return;
    }
    for (row_bytes, align) in [(4, 4), (12, 4), (32, 16), (256, 16), (200, 4)] {
        for rows in [1, 3, 64] {
            // Heads that share the rows of three; the middle one is copied.
            let (stride, gap) = (3 * row_bytes, 16);
            let source = finite(stride * rows, row_bytes);
            let (from, to) = (
                EmulatorMemory::copy_from(&source),
                EmulatorMemory::new(gap + rows * row_bytes + gap),
            );
            let at = if align == 16 { row_bytes.next_multiple_of(16) } else { row_bytes };
            let unit = RowsUnit {
                from: from.address() + at as u64,
                to: to.address() + gap as u64,
                rows: rows as u32,
                row_bytes: row_bytes as u32,
                stride: stride as u32,
                unused: 0,
            };
            assert_eq!(RowsUnit::common_alignment(&[unit]), align);
            let units = EmulatorMemory::copy_from(cast_slice(&[unit]));
            let parameters = RowsParameters { units: units.address(), align, unused: 0 };
            let grid = LaunchGrid {
                kernel: "kvd_rows",
                blocks: 1,
                shared_bytes: 0,
                order: ThreadOrder::Random(5),
            };
            // SAFETY: every address is of a memory above, as long as the unit says.
            unsafe { launch_kernel(grid, bytes_of(&parameters)) }.unwrap();
            let wanted: Vec<u8> =
                source.chunks(stride).flat_map(|row| &row[at..][..row_bytes]).copied().collect();
            let wanted = [vec![0xFF; gap], wanted, vec![0xFF; gap]].concat();
            assert_eq!(to.bytes(), wanted, "{rows} rows of {row_bytes} bytes");
        }
    }
}

#[test]
fn the_hash_is_of_the_copy_whatever_a_worker_writes_meanwhile() {
    // ThreadSanitizer would report an intended race.
    if !is_available() || is_sanitized("thread") {
        return;
    }
    let (bytes, stop) = (64 << 10, AtomicBool::new(false));
    let from = [0, 1].map(|seed| EmulatorMemory::copy_from(&finite(bytes, seed)));
    let addresses = from.each_ref().map(EmulatorMemory::address);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut state = 1u64;
            // It ends by itself, so that a panic beside it does not wait for it.
            for _ in 0..1 << 30 {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 40) % (bytes as u64 / 8) * 8;
                let word = (addresses[(state >> 63) as usize] + at) as *mut u64;
                // SAFETY: inside memory that outlives this thread, aligned; the kernel reads it
                // by volatile loads, as it would on a device.
                unsafe { AtomicU64::from_ptr(word) }.store(state, Ordering::Relaxed);
            }
        });
        for order in ThreadOrder::EACH.into_iter().cycle().take(30) {
            let (hash, bad, copies) = stage_from(addresses, [bytes as u64; 2], DType::F16, order);
            assert_eq!(hash, content_hash(&copies[0], &copies[1]));
            for (bad, copy) in bad.into_iter().zip(copies) {
                let values = copy.as_chunks::<2>().0.iter();
                let none = |value: &[u8; 2]| u16::from_le_bytes(*value) & 0x7C00 == 0x7C00;
                assert_eq!(bad, values.map(none).position(|none| none).map(|at| at as u32));
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop(from);
}
