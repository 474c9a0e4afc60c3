//! The lane notices what it is for: each planted bug is reported or changes the result, and the
//! same kernel without one is clean in every order.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

use kvd_emu::{EmulatorMemory, LaunchGrid, ThreadOrder, is_available, is_sanitized, launch_kernel};

const WORDS: u32 = 64;
const SHARED_BYTES: usize = 256;

/// Runs a planted kernel on `0..64`; it should leave these words reversed.
fn run(kernel: &str, order: ThreadOrder) -> Result<Vec<u32>, String> {
    let words: Vec<u32> = (0..WORDS).collect();
    let memory = EmulatorMemory::copy_from(bytemuck::cast_slice(&words));
    let grid = LaunchGrid { kernel, blocks: 1, shared_bytes: SHARED_BYTES, order };
    // SAFETY: planted kernels take one address, of 64 words.
    unsafe { launch_kernel(grid, &memory.address().to_le_bytes())? };
    Ok(bytemuck::cast_slice(memory.bytes()).to_vec())
}

fn reversed() -> Vec<u32> {
    (0..WORDS).rev().collect()
}

/// Checks that the emulator reports `message` for a kernel, in every order.
fn reported(kernel: &str, message: &str) {
    if !is_available() {
        return;
    }
    for order in ThreadOrder::EACH {
        let error = run(kernel, order).unwrap_err();
        assert!(error.contains(message), "{kernel}, {order:?}: {error}");
        assert!(error.starts_with(kernel), "{error}");
    }
}

#[test]
fn correct_kernel_is_clean_in_every_order() {
    if !is_available() {
        return;
    }
    let random = (0..20).map(ThreadOrder::Random);
    for order in ThreadOrder::EACH.into_iter().chain(random) {
        assert_eq!(run("planted_correct", order).unwrap(), reversed(), "{order:?}");
    }
}

/// The words, reversed within each warp.
fn reversed_by_warp() -> Vec<u32> {
    (0..WORDS).map(|at| at / 32 * 32 + 31 - at % 32).collect()
}

#[test]
fn missing_barrier_changes_the_result_in_every_order() {
    if !is_available() || is_sanitized("thread") {
        // A race ends the process of a test under ThreadSanitizer: below.
        return;
    }
    for order in ThreadOrder::EACH {
        let words = run("planted_missing_barrier", order).unwrap();
        assert_ne!(words, reversed(), "{order:?}");
        // A read that is too early finds the initial content of shared memory.
        assert!(words.contains(&u32::MAX), "{order:?}");
    }
}

#[test]
fn divergent_barrier_is_reported() {
    reported("planted_divergent_barrier", "divergent barrier: others wait at ");
}

#[test]
fn barrier_that_a_thread_never_reaches_is_reported() {
    reported("planted_skipped_barrier", "ended");
}

#[test]
fn shuffle_of_half_a_warp_is_reported() {
    reported("planted_half_shuffle", "is stuck");
}

#[test]
fn unwritten_shared_memory_shows() {
    if !is_available() {
        return;
    }
    for order in ThreadOrder::EACH {
        let words = run("planted_unwritten", order).unwrap();
        let mut wanted = reversed();
        wanted[WORDS as usize - 1 - 5] = u32::MAX;
        assert_eq!(words, wanted, "{order:?}");
    }
}

#[test]
fn warp_barriers_order_the_memory_of_a_warp() {
    if !is_available() {
        return;
    }
    for order in ThreadOrder::EACH {
        assert_eq!(run("planted_meeting_lanes", order).unwrap(), reversed_by_warp(), "{order:?}");
    }
}

#[test]
fn copies_read_before_their_wait_show() {
    if !is_available() || is_sanitized("thread") {
        return;
    }
    for order in ThreadOrder::EACH {
        assert_eq!(run("planted_early_read", order).unwrap(), [u32::MAX; 64], "{order:?}");
    }
}

#[test]
fn copies_in_turns_show_what_is_read_too_early_and_what_is_overwritten() {
    if !is_available() {
        return;
    }
    for order in ThreadOrder::EACH {
        assert_eq!(run("planted_in_turns", order).unwrap(), reversed(), "{order:?}");
    }
    if is_sanitized("thread") {
        return;
    }
    for order in ThreadOrder::EACH {
        // Only some threads read too early, as others run ahead.
        let words = run("planted_early_turn", order).unwrap();
        assert!(words.contains(&u32::MAX), "{order:?}: {words:?}");
    }
    // Where the thread that copies runs before those that still read.
    let words = run("planted_reused_buffer", ThreadOrder::Ascending).unwrap();
    assert_ne!(words, reversed());
    assert!(words.contains(&u32::MAX));
}

#[test]
fn unknown_kernels_and_wrong_parameters_are_reported() {
    if !is_available() {
        return;
    }
    assert!(run("planted_nothing", ThreadOrder::Ascending).unwrap_err().contains("no kernel"));
    let grid = LaunchGrid {
        kernel: "planted_correct",
        blocks: 1,
        shared_bytes: SHARED_BYTES,
        order: ThreadOrder::Ascending,
    };
    // SAFETY: refused before any address is used.
    let error = unsafe { launch_kernel(grid, &[0; 4]) }.unwrap_err();
    assert!(error.contains("takes 8 bytes of parameters, not 4"), "{error}");
}

/// Runs a planted kernel in a process of its own, this test again, which a sanitizer ends. Gives
/// what it printed.
fn ended_by_a_sanitizer(test: &str, kernel: &str) -> Option<String> {
    const CHILD: &str = "KVD_PLANTED_KERNEL";
    if let Some(kernel) = std::env::var_os(CHILD) {
        run(kernel.to_str().unwrap(), ThreadOrder::Ascending).unwrap();
        return None;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, kernel)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{kernel}: {text}");
    // The frame on top is the kernel; lines of source are known to builds with debug information.
    assert!(text.contains(kernel), "{kernel}: {text}");
    Some(text)
}

#[test]
fn shared_overrun_is_seen_by_the_sanitizer() {
    if !is_available() {
        return;
    }
    if !is_sanitized("address") {
        // Without a sanitizer the overrun would only write where it must not.
        eprintln!("SKIP overrun: built without KVD_EMU_SANITIZE=address,undefined");
        return;
    }
    let test = "shared_overrun_is_seen_by_the_sanitizer";
    if let Some(text) = ended_by_a_sanitizer(test, "planted_shared_overrun") {
        assert!(text.contains("heap-buffer-overflow"), "{text}");
    }
}

/// Also those that give the right result in every order.
#[test]
fn races_are_seen_by_the_sanitizer() {
    if !is_available() {
        return;
    }
    if !is_sanitized("thread") {
        // In one system thread, what the lanes did in turns was right.
        let in_turns = run("planted_racing_lanes", ThreadOrder::Random(1)).unwrap();
        assert_eq!(in_turns, reversed_by_warp());
        eprintln!("SKIP races: built without KVD_EMU_SANITIZE=thread");
        return;
    }
    for kernel in [
        "planted_racing_lanes",
        "planted_missing_barrier",
        "planted_early_read",
        "planted_early_turn",
        "planted_reused_buffer",
    ] {
        let text = ended_by_a_sanitizer("races_are_seen_by_the_sanitizer", kernel);
        let Some(text) = text else { return };
        assert!(text.contains("ThreadSanitizer: data race"), "{kernel}: {text}");
    }
}

/// Runs a planted kernel of two thread blocks on 130 words, the first two a counter.
fn run_two_blocks(kernel: &str, order: ThreadOrder) -> Result<Vec<u32>, String> {
    let words: Vec<u32> = [0, 0].into_iter().chain(0..2 * WORDS).collect();
    let memory = EmulatorMemory::copy_from(bytemuck::cast_slice(&words));
    let grid = LaunchGrid { kernel, blocks: 2, shared_bytes: SHARED_BYTES, order };
    // SAFETY: these kernels take one address, of 128 words, or 130.
    unsafe { launch_kernel(grid, &memory.address().to_le_bytes())? };
    Ok(bytemuck::cast_slice(memory.bytes()).to_vec())
}

#[test]
fn thread_blocks_that_only_meet_in_atomics_are_clean() {
    if !is_available() {
        return;
    }
    let reversed = (0..WORDS).rev().chain((WORDS..2 * WORDS).rev());
    let wanted: Vec<u32> = [2 * WORDS, 0].into_iter().chain(reversed).collect();
    for order in ThreadOrder::EACH {
        assert_eq!(run_two_blocks("planted_blocks_apart", order).unwrap(), wanted, "{order:?}");
    }
}

#[test]
fn thread_blocks_that_meet_in_device_memory_are_reported() {
    if !is_available() {
        return;
    }
    if !is_sanitized("blocks") {
        // Two blocks that write the same are right in every order.
        let words = run_two_blocks("planted_blocks_together", ThreadOrder::Random(1)).unwrap();
        assert!(words.iter().take(WORDS as usize).copied().eq(0..WORDS));
        eprintln!("SKIP blocks: built without KVD_EMU_SANITIZE=blocks");
        return;
    }
    let (written, read) = ("a write to what another thread block has", "a read of what another");
    for (kernel, messages) in [
        ("planted_blocks_together", [written, written]),
        ("planted_blocks_in_order", [written, read]),
        ("planted_blocks_half_atomic", [written, written]),
    ] {
        for order in ThreadOrder::EACH {
            let error = run_two_blocks(kernel, order).unwrap_err();
            assert!(messages.iter().any(|what| error.contains(what)), "{order:?}: {error}");
            assert!(error.starts_with(kernel), "{error}");
        }
    }
}

/// Sums of all products of bytes of `a` (`[16, 32]`) and `b` (`[8, 32]`, by column), `[16, 8]`.
fn products(a: &[u8], b: &[u8], signed: [bool; 2]) -> Vec<i32> {
    let number = |byte: u8, signed| if signed { i32::from(byte as i8) } else { i32::from(byte) };
    let sum = |row: &[u8], column: &[u8]| {
        let terms = row.iter().zip(column);
        terms.map(|(a, b)| number(*a, signed[0]) * number(*b, signed[1])).sum::<i32>()
    };
    a.chunks(32).flat_map(|row| b.chunks(32).map(move |column| sum(row, column))).collect()
}

#[test]
fn products_of_tensor_cores_have_the_layout_of_their_fragments() {
    if !is_available() {
        return;
    }
    let bytes: Vec<u8> =
        (0..24 * 32).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let (a, b) = bytes.split_at(16 * 32);
    let kinds = [[false, false], [false, true], [true, false], [true, true]];
    let wanted: Vec<i32> = kinds.into_iter().flat_map(|signed| products(a, b, signed)).collect();
    let run = |kernel| {
        let memory = EmulatorMemory::copy_from(&[&bytes[..], &[0; 4 * 4 * 128]].concat());
        let grid = LaunchGrid { kernel, blocks: 1, shared_bytes: 0, order: ThreadOrder::Random(4) };
        // SAFETY: these kernels take one address, of two factors and the sums of four products.
        unsafe { launch_kernel(grid, &memory.address().to_le_bytes()).unwrap() };
        bytemuck::cast_slice::<u8, i32>(&memory.bytes()[bytes.len()..]).to_vec()
    };
    assert_eq!(run("planted_products"), wanted);
    assert_ne!(run("planted_swapped_products"), wanted);
}
