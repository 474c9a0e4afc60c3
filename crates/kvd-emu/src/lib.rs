//! The kernels of `kernels/` as CPU code: each CUDA thread is a fiber. For tests; no other crate
//! may use it. `kernels/README.md` says what this lane notices and what it cannot.
//!
//! Unsafe code: a kernel reads and writes through the addresses in its parameters.

#[cfg(kvd_emu)]
use std::ffi::{CStr, CString, c_char, c_int, c_void};

/// Set to make a machine without g++ a failure instead of a skip.
pub const REQUIRE: &str = "KVD_REQUIRE_EMU";

/// In which order the threads of a block, and blocks, run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadOrder {
    /// By number.
    Ascending,
    /// From the last.
    Descending,
    /// Any, with a seed; whenever threads wait, another may go on.
    Random(u32),
}

impl ThreadOrder {
    /// One of each kind.
    pub const EACH: [Self; 3] = [Self::Ascending, Self::Descending, Self::Random(1)];

    #[cfg(kvd_emu)]
    fn order_code(self) -> u64 {
        match self {
            Self::Ascending => 0,
            Self::Descending => 1,
            Self::Random(seed) => 2 + u64::from(seed),
        }
    }
}

/// A launch: which kernel, how many thread blocks, how much shared memory.
#[derive(Clone, Copy, Debug)]
pub struct LaunchGrid<'a> {
    /// Name of the kernel.
    pub kernel: &'a str,
    /// Thread blocks.
    pub blocks: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: usize,
    /// Order of threads and blocks.
    pub order: ThreadOrder,
}

/// Whether this build has the kernels. Prints `SKIP` and why when it has not.
///
/// # Panics
/// When it has not and [`REQUIRE`] is set.
#[must_use]
#[expect(clippy::print_stderr, reason = "a skipped test says so")]
pub fn is_available() -> bool {
    if !cfg!(kvd_emu) {
        let why = "the kernels' CPU lane needs g++ on x86_64 Linux at build time";
        assert!(std::env::var_os(REQUIRE).is_none(), "{why}, and {REQUIRE} is set");
        eprintln!("SKIP emu: {why}");
    }
    cfg!(kvd_emu)
}

/// Whether the kernels were built with a sanitizer: `address`, `undefined`, `thread`, or the lane's
/// own, `blocks`.
#[must_use]
pub fn is_sanitized(by: &str) -> bool {
    cfg!(kvd_emu) && env!("KVD_EMU_SANITIZERS").split(',').any(|sanitizer| sanitizer == by)
}

#[cfg(kvd_emu)]
unsafe extern "C" {
    fn kvd_emu_launch(
        kernel: *const c_char,
        blocks: u32,
        shared_bytes: usize,
        parameters: *const c_void,
        parameter_bytes: usize,
        order: u64,
        error: *mut c_char,
        error_bytes: usize,
    ) -> c_int;
    fn kvd_emu_copied_bytes() -> u64;
}

/// Runs a kernel to its end; `parameters` are the bytes of its parameter.
///
/// # Errors
/// Faults that the emulator noticed: a divergent barrier, a stuck block, a wrong size, an unknown
/// kernel.
///
/// # Safety
/// The addresses in `parameters` must be what the kernel expects there, for as long as it runs.
#[cfg(kvd_emu)]
pub unsafe fn launch_kernel(grid: LaunchGrid<'_>, parameters: &[u8]) -> Result<(), String> {
    let kernel = CString::new(grid.kernel).map_err(|error| error.to_string())?;
    let mut error: [c_char; 512] = [0; 512];
    // The kernel reads its parameter as a struct: at an address aligned for one.
    let mut aligned = vec![0u64; parameters.len().div_ceil(8)];
    // SAFETY: `aligned` has room for `parameters`, the error buffer for its length; the name ends
    // with a zero. What the kernel does with its addresses is the caller's promise.
    let failed = unsafe {
        let to = aligned.as_mut_ptr().cast::<u8>();
        std::ptr::copy_nonoverlapping(parameters.as_ptr(), to, parameters.len());
        kvd_emu_launch(
            kernel.as_ptr(),
            grid.blocks,
            grid.shared_bytes,
            to.cast::<c_void>(),
            parameters.len(),
            grid.order.order_code(),
            error.as_mut_ptr(),
            error.len(),
        )
    };
    if failed == 0 {
        return Ok(());
    }
    // SAFETY: the callee ends the message with a zero within the buffer.
    Err(unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned())
}

/// There are no kernels in this build.
///
/// # Errors
/// Always.
///
/// # Safety
/// None is needed.
#[cfg(not(kvd_emu))]
pub unsafe fn launch(grid: LaunchGrid<'_>, _: &[u8]) -> Result<(), String> {
    Err(format!("{}: built without the kernels' CPU lane", grid.kernel))
}

/// Bytes that asynchronous copies have moved from device memory to shared memory, in this thread's
/// launches since it last asked. 0 in a build without kernels.
#[must_use]
pub fn copied_bytes() -> u64 {
    #[cfg(kvd_emu)]
    // SAFETY: reads and clears a counter of this thread.
    unsafe {
        kvd_emu_copied_bytes()
    }
    #[cfg(not(kvd_emu))]
    0
}

/// Device memory: exactly as many bytes as asked for, so that a sanitizer sees an overrun, aligned
/// as CUDA's, and full of 0xFF (NaN, -1) at first.
#[derive(Debug)]
pub struct EmulatorMemory {
    start: *mut u8,
    len: usize,
}

// SAFETY: it owns its bytes, and whoever holds it may use them on any thread.
unsafe impl Send for EmulatorMemory {}

impl EmulatorMemory {
    const ALIGN: usize = 256;

    /// `len` bytes.
    ///
    /// # Panics
    /// When there is no memory.
    #[must_use]
    pub fn new(len: usize) -> Self {
        // SAFETY: the layout is not empty, and the bytes written are those allocated.
        unsafe {
            let start = std::alloc::alloc(Self::memory_layout(len));
            assert!(!start.is_null(), "no memory for {len} bytes");
            start.write_bytes(0xFF, len);
            Self { start, len }
        }
    }

    /// A copy of `bytes`.
    #[must_use]
    pub fn copy_from(bytes: &[u8]) -> Self {
        let memory = Self::new(bytes.len());
        // SAFETY: the memory is new and as long as `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.start, bytes.len()) };
        memory
    }

    /// Its address, for a kernel's parameters.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// The bytes it holds.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and initialised with this length, and no launch is running: a launch
        // returns when its kernel has ended.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    fn memory_layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len.max(1), Self::ALIGN)
            .unwrap_or_else(|_| panic!("{len} bytes are too many"))
    }
}

impl Drop for EmulatorMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.start, Self::memory_layout(self.len)) };
    }
}
