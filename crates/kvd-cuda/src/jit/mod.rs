//! Kernels for pairs of sides that have none ahead of time, or none that reads their shapes. The
//! kernel that all such pairs share serves at once; a thread compiles the pair's own from the same
//! headers, or finds it on disk, and from then on that one serves. Nothing waits for it, and
//! nothing fails because of it.
//!
//! Owned by the lane's thread, but for the compiler and the cache, which its own thread owns.

mod cache;
mod source;

use crate::abi::SideKernel;
use crate::kernel_choice::{KernelPair, ROWS, rows_of};
use crate::late_pairs::{LatePairs, wanted_pairs};
use crate::tensor_core::multiplies_late;
use cache::{CacheEntry, ImageCache};
use kvd_codec::ModelCodec;
use kvd_core::LayerIndex;
use source::SIDES_MAX;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The kernels that pairs share whose pages none of their own reads, fixed width and Huffman codes.
const SHARED: [&str; 2] = ["kvd_attend_any_any_8", "kvd_attend_huffman_any_any_8"];

/// How long the thread is waited for at the end: a pair can take minutes to compile, and whoever
/// ends the process has a limit of its own.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// Why a kernel was not compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// There is no compiler.
    #[error("no libnvrtc.so.13 or libnvrtc.so.12 is found: {0}")]
    NoLibrary(String),
    /// A library that is not, or not wholly, NVRTC.
    #[error("{library} lacks {symbol}")]
    NoSymbol {
        /// The library.
        library: &'static str,
        /// Name of the function that it lacks.
        symbol: &'static str,
    },
    /// The compiler refuses.
    #[error("{call} answers {code}")]
    Failed {
        /// Name of the compiler function.
        call: &'static str,
        /// As a number.
        code: i32,
    },
    /// The compiler has found an error.
    #[error("the compiler says: {0}")]
    Rejected(String),
}

/// A file to compile.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource<'a> {
    /// The file.
    pub text: &'a str,
    /// Headers that it includes: name and text.
    pub headers: &'a [(&'a str, &'a str)],
    /// For which GPUs, `sm_90`.
    pub target: &'a str,
}

/// Compiles kernels while the program runs.
pub trait KernelCompiler: Send {
    /// Name, version and options: what another compiles, or with others, is another kernel.
    fn compiler_version(&self) -> String;

    /// Compiles one file to an image that the driver loads.
    ///
    /// # Errors
    /// Why there is none.
    fn compile_kernel(&mut self, source: KernelSource<'_>) -> Result<Vec<u8>, CompileError>;
}

/// The outcome for the kernel of a pair, for logs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum CompileEvent {
    /// It serves from the next launch on.
    Ready {
        /// Keys and values.
        pair: String,
        /// Whether it was on disk.
        from_cache: bool,
        /// Time that it took.
        seconds: f64,
    },
    /// It is not to be had, and the shared one goes on.
    Failed {
        /// Keys and values.
        pair: String,
        /// Why.
        reason: String,
    },
    /// A file of the cache is not used, and is replaced.
    Damaged {
        /// The file.
        path: PathBuf,
        /// Description of the damage.
        reason: String,
    },
    /// It cannot be kept on disk.
    NotKept {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// Tells of events; called on any thread.
pub type CompileReport = Arc<dyn Fn(CompileEvent) + Send + Sync>;

/// The sides of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PairSource {
    keys: SideKernel,
    values: SideKernel,
    huffman: bool,
    /// Whether products are on tensor cores.
    tensor: bool,
}

impl PairSource {
    /// Its part of the kernels' names: none that a kernel has which is compiled ahead of time.
    fn pair_name(self) -> String {
        let Self { keys, values, huffman, tensor } = self;
        let is_known = KernelPair { keys, values, huffman }.is_known();
        let products = match (tensor, is_known) {
            (true, _) => "tensor_",
            (false, true) => "plain_",
            (false, false) => "",
        };
        format!("{products}{}_{}", keys.name(), values.name())
    }

    /// Its kernel for so many query rows.
    fn kernel_name(self, rows: u32) -> String {
        let stage = if self.huffman { "huffman_" } else { "" };
        format!("kvd_attend_{stage}{}_{rows}", self.pair_name())
    }
}

/// The file that is compiled for a pair whose products are on CUDA cores; for tests of a compiler.
#[must_use]
pub fn kernel_source(keys: SideKernel, values: SideKernel, huffman: bool) -> String {
    source::source_text(PairSource { keys, values, huffman, tensor: false })
}

/// The pair's source with products on tensor cores; none where they cannot take the values of a
/// side, or where the pair's kernel is compiled ahead of time.
#[must_use]
pub fn tensor_source(keys: SideKernel, values: SideKernel, huffman: bool) -> Option<String> {
    let takes = multiplies_late(KernelPair { keys, values, huffman });
    takes.then(|| source::source_text(PairSource { keys, values, huffman, tensor: true }))
}

/// Headers that [`kernel_source`] includes.
#[must_use]
pub fn kernel_headers() -> &'static [(&'static str, &'static str)] {
    source::kernel_headers()
}

/// A finished compilation of one pair, sent by the thread.
struct CompiledPair {
    sides: PairSource,
    image: Result<Vec<u8>, String>,
    from_cache: bool,
    seconds: f64,
}

/// Which pairs were asked for, and which of them are ready.
pub(crate) struct JitCompiler {
    /// Gone when it ends.
    wanted: Option<SyncSender<PairSource>>,
    made: Receiver<CompiledPair>,
    asked: BTreeSet<PairSource>,
    /// Loaded kernels on CUDA cores, by the kernels' numbers, as in units.
    ready: BTreeMap<[u32; 3], PairSource>,
    /// Those on tensor cores.
    late: LatePairs,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    report: CompileReport,
}

impl JitCompiler {
    /// Starts the thread, for GPUs of a compute capability.
    pub(crate) fn start_thread(
        compiler: Box<dyn KernelCompiler>,
        cache: Option<PathBuf>,
        compute: [u32; 2],
        report: CompileReport,
    ) -> std::io::Result<Self> {
        // Each pair is asked for once, so neither is ever full.
        let (wanted, requests) = sync_channel(SIDES_MAX);
        let (replies, made) = sync_channel(SIDES_MAX);
        let stop = Arc::new(AtomicBool::new(false));
        let mut worker = CompileThread {
            compiler,
            cache: cache.map(ImageCache::new),
            target: format!("sm_{}{}", compute[0], compute[1]),
            report: report.clone(),
        };
        let on_thread = stop.clone();
        let thread =
            std::thread::Builder::new().name("kvd-kernels".to_owned()).spawn(move || {
                if let Some(cache) = &worker.cache {
                    cache.remove_leftovers();
                }
                for sides in requests {
                    if on_thread.load(Ordering::Acquire) {
                        return;
                    }
                    let begun = Instant::now();
                    let (image, from_cache) = worker.make_image(sides);
                    let seconds = begun.elapsed().as_secs_f64();
                    if replies.send(CompiledPair { sides, image, from_cache, seconds }).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            wanted: Some(wanted),
            made,
            asked: BTreeSet::new(),
            ready: BTreeMap::new(),
            late: LatePairs::NONE,
            stop,
            thread: Some(thread),
            report,
        })
    }

    /// Asks for the pairs of a codec whose pages no kernels of their own read.
    pub(crate) fn request_codec(&mut self, codec: &ModelCodec) {
        let geometry = codec.geometry();
        for layer in (0..geometry.layers).map(LayerIndex) {
            for (KernelPair { keys, values, huffman }, tensor) in wanted_pairs(codec, layer) {
                let sides = PairSource { keys, values, huffman, tensor };
                if self.asked.insert(sides)
                    && let Some(wanted) = &self.wanted
                {
                    // A thread that is gone compiles nothing; the shared kernel serves.
                    let _ = wanted.try_send(sides);
                }
            }
        }
    }

    /// Takes what was made since it was last asked to `load`: an image, with these kernels.
    pub(crate) fn load_compiled(
        &mut self,
        mut load: impl FnMut(&[u8], &[String]) -> Result<(), String>,
    ) {
        while let Ok(CompiledPair { sides, image, from_cache, seconds }) = self.made.try_recv() {
            let (pair, kernels) = (sides.pair_name(), ROWS.map(|rows| sides.kernel_name(rows)));
            (self.report)(match image.and_then(|image| load(&image, &kernels)) {
                Ok(()) => {
                    let PairSource { keys, values, huffman, tensor } = sides;
                    if tensor {
                        self.late = self.late.with_pair(KernelPair { keys, values, huffman });
                    } else {
                        self.ready.insert([keys as u32, values as u32, huffman.into()], sides);
                    }
                    CompileEvent::Ready { pair, from_cache, seconds }
                }
                Err(reason) => CompileEvent::Failed { pair, reason },
            });
        }
    }

    /// The pairs whose kernels with products on tensor cores are loaded.
    pub(crate) fn loaded_late_pairs(&self) -> LatePairs {
        self.late
    }

    /// The kernel on CUDA cores to launch in the place of `kernel`, for units of at most `rows`
    /// rows whose sides have these numbers; none where that is the shared one still, or never was.
    pub(crate) fn own_kernel(&self, kernel: &str, sides: [u32; 2], rows: u32) -> Option<String> {
        let [keys, values] = sides;
        let huffman = SHARED.iter().position(|shared| *shared == kernel)?;
        let sides = self.ready.get(&[keys, values, huffman as u32])?;
        Some(sides.kernel_name(rows_of(rows)))
    }
}

impl Drop for JitCompiler {
    /// Waits a moment for what is being compiled, and else leaves the thread behind, which owns all
    /// that it uses and ends when that is compiled, or with the process.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wanted = None;
        let end = Instant::now() + LAST_WAIT;
        loop {
            match self.made.recv_timeout(end.saturating_duration_since(Instant::now())) {
                // For nobody any more.
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => return,
            }
        }
        // Its panic, if it had one, was printed, and the shared kernel has served since.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The state that the compile thread owns.
struct CompileThread {
    compiler: Box<dyn KernelCompiler>,
    /// None where there is no folder for it.
    cache: Option<ImageCache>,
    target: String,
    report: CompileReport,
}

impl CompileThread {
    /// The image of a pair, and whether it was on disk.
    fn make_image(&mut self, sides: PairSource) -> (Result<Vec<u8>, String>, bool) {
        let text = source::source_text(sides);
        let (version, hash) = (self.compiler.compiler_version(), source::headers_hash());
        let key = format!("{version}\n{}\n{hash:032x}\n{text}", self.target);
        match self.cache.as_ref().map_or(CacheEntry::Nothing, |cache| cache.read_image(&key)) {
            CacheEntry::Image(image) => return (Ok(image), true),
            CacheEntry::Nothing => {}
            CacheEntry::Damaged(path, reason) => {
                (self.report)(CompileEvent::Damaged { path, reason })
            }
        }
        let (headers, target) = (source::kernel_headers(), self.target.as_str());
        let made = self.compiler.compile_kernel(KernelSource { text: &text, headers, target });
        if let Ok(image) = &made
            && let Some(cache) = &self.cache
            && let Err(error) = cache.write_image(&key, image)
        {
            let (path, reason) = (cache.image_path(&key), error.to_string());
            (self.report)(CompileEvent::NotKept { path, reason });
        }
        (made.map_err(|error| error.to_string()), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_choice::KernelVariant;
    use kvd_core::{DType, Geometry, RopePairing};
    use std::sync::mpsc::RecvError;

    /// Says that it compiles, and begins when it may.
    struct MadeUp {
        begun: SyncSender<()>,
        go: Receiver<()>,
    }

    impl KernelCompiler for MadeUp {
        fn compiler_version(&self) -> String {
            "made up".to_owned()
        }

        fn compile_kernel(&mut self, source: KernelSource<'_>) -> Result<Vec<u8>, CompileError> {
            self.begun.send(()).unwrap();
            self.go.recv().unwrap();
            Ok(source.text.as_bytes().to_vec())
        }
    }

    /// With one pair to compile, of keys and values of `side`, and how its compiler is followed.
    fn start(report: CompileReport, side: &str) -> (JitCompiler, Receiver<()>, SyncSender<()>) {
        let (begun, begins) = sync_channel(4);
        let (go, gate) = sync_channel(4);
        let compiler = Box::new(MadeUp { begun, go: gate });
        // No folder: it is compiled nonetheless.
        let mut jit = JitCompiler::start_thread(compiler, None, [9, 0], report).unwrap();
        want(&mut jit, side);
        (jit, begins, go)
    }

    fn want(jit: &mut JitCompiler, side: &str) {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 64,
            head_dim_v: 64,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let spec = kvd_codec::resolve_spec(&format!("k={side}; v={side}")).unwrap();
        jit.request_codec(&ModelCodec::new(geometry, spec, None).unwrap());
    }

    const SYMMETRIC: &str = "uniform(b=4,g=32,axis=token,mode=sym)";

    #[test]
    fn a_pair_with_kernels_ahead_of_time_has_others_names_late() {
        for huffman in [false, true] {
            let sides = |keys, values| {
                PairSource { keys, values, huffman, tensor: false }.kernel_name(ROWS[1])
            };
            let stage = if huffman { "huffman_" } else { "" };
            let (uniform, grid) = (SideKernel::Uniform, SideKernel::Grid);
            let ahead = KernelPair { keys: uniform, values: uniform, huffman }
                .kernel_name(KernelVariant::Own, 4);
            assert_eq!(ahead, format!("kvd_attend_{stage}uniform_uniform_4"));
            let late = format!("kvd_attend_{stage}plain_uniform_uniform_4");
            assert_eq!(sides(uniform, uniform), late);
            assert!(kernel_source(uniform, uniform, huffman).contains("(plain_uniform_uniform, "));
            assert_eq!(sides(grid, uniform), format!("kvd_attend_{stage}grid_uniform_4"));
        }
    }

    /// The report about a pair's image, which `load` loads.
    fn heard(load: impl Fn(&[String]) -> Result<(), String>) -> (JitCompiler, CompileEvent) {
        let (tell, heard) = sync_channel(4);
        let report: CompileReport = Arc::new(move |event| tell.send(event).unwrap());
        let (mut jit, _begins, go) = start(report, SYMMETRIC);
        go.send(()).unwrap();
        loop {
            jit.load_compiled(|image, kernels| {
                assert!(String::from_utf8_lossy(image).contains("symmetric_symmetric"));
                load(kernels)
            });
            if let Ok(event) = heard.try_recv() {
                return (jit, event);
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_pair_is_ready_when_all_of_its_kernels_are_there_and_else_the_shared_one_serves() {
        let sides = [SideKernel::Symmetric as u32; 2];
        let own = |jit: &JitCompiler| jit.own_kernel(SHARED[0], sides, 3);
        let wanted = ROWS.map(|rows| format!("kvd_attend_symmetric_symmetric_{rows}"));
        let (jit, event) = heard(|kernels| {
            assert_eq!(kernels, wanted);
            Ok(())
        });
        assert!(matches!(event, CompileEvent::Ready { .. }), "{event:?}");
        assert_eq!(own(&jit).unwrap(), wanted[1]);
        let (jit, event) = heard(|kernels| Err(format!("no kernel {}", kernels[2])));
        let CompileEvent::Failed { reason, .. } = event else { panic!("{event:?}") };
        assert_eq!((reason, own(&jit)), (format!("no kernel {}", wanted[2]), None));
    }

    #[test]
    fn whoever_ends_does_not_wait_for_what_is_compiled() {
        let (mut jit, begins, go) = start(Arc::new(|_| {}), SYMMETRIC);
        want(&mut jit, "uniform(b=4,g=48,axis=channel)");
        begins.recv().unwrap();
        let begun = Instant::now();
        drop(jit);
        let seconds = begun.elapsed().as_secs();
        assert!((1..30).contains(&seconds), "{seconds} s");
        // The thread goes on by itself, compiles nothing else, and gives its compiler up.
        go.send(()).unwrap();
        assert_eq!(begins.recv(), Err(RecvError));
    }

    #[test]
    fn a_thread_with_nothing_to_do_is_not_waited_for() {
        let (mut jit, begins, go) = start(Arc::new(|_| {}), SYMMETRIC);
        go.send(()).unwrap();
        begins.recv().unwrap();
        while jit.ready.is_empty() {
            jit.load_compiled(|_, _| Ok(()));
        }
        let begun = Instant::now();
        drop(jit);
        assert!(begun.elapsed() < LAST_WAIT);
        assert_eq!(begins.recv(), Err(RecvError));
    }

    #[test]
    fn shared_kernels_are_those_that_pairs_without_their_own_are_launched_with() {
        for (huffman, shared) in [false, true].into_iter().zip(SHARED) {
            let pair = KernelPair { keys: SideKernel::Vq, values: SideKernel::F16, huffman };
            assert_eq!(pair.kernel_name(KernelVariant::Any, 1), shared);
        }
    }
}
