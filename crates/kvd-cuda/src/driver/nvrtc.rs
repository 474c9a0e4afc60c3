//! NVRTC, opened when the program runs: no part of CUDA is needed to build or to start.
//!
//! Unsafe code: calls of the library's C functions, each looked for before it is called.
#![expect(unsafe_code, reason = "calls of the compiler's C functions")]

use crate::jit::{CompileError, KernelCompiler, KernelSource};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

/// By what names it is looked for, in the loader's paths.
const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];
/// Compiler options, beside the target.
const OPTIONS: [&CStr; 2] = [c"--std=c++17", c"-default-device"];
/// Bytes of a compiler's log that are kept.
const LOG_BYTES_MAX: usize = 4096;

type NvrtcProgram = *mut c_void;
type VersionFn = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type CreateFn = unsafe extern "C" fn(
    *mut NvrtcProgram,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type CompileFn = unsafe extern "C" fn(NvrtcProgram, c_int, *const *const c_char) -> c_int;
type SizeFn = unsafe extern "C" fn(NvrtcProgram, *mut usize) -> c_int;
type BytesFn = unsafe extern "C" fn(NvrtcProgram, *mut c_char) -> c_int;
type DestroyFn = unsafe extern "C" fn(*mut NvrtcProgram) -> c_int;

/// The compiler.
pub struct Nvrtc {
    calls: NvrtcCalls,
    version: String,
    /// After the calls, which are addresses in it.
    _library: Library,
}

#[derive(Clone, Copy)]
struct NvrtcCalls {
    create: CreateFn,
    compile: CompileFn,
    image_size: SizeFn,
    image: BytesFn,
    log_size: SizeFn,
    log: BytesFn,
    destroy: DestroyFn,
}

impl Nvrtc {
    /// Opens the library.
    ///
    /// # Errors
    /// When there is none, or it is not NVRTC.
    pub fn open_library() -> Result<Self, CompileError> {
        let mut why = String::new();
        for name in NAMES {
            // SAFETY: what the library runs when it is opened is the vendor's.
            match unsafe { Library::new(name) } {
                Ok(library) => return Self::from_library(library, name),
                Err(error) if why.is_empty() => why = error.to_string(),
                Err(_) => {}
            }
        }
        Err(CompileError::NoLibrary(why))
    }

    fn from_library(library: Library, name: &'static str) -> Result<Self, CompileError> {
        /// A function of the library.
        fn find_symbol<T: Copy>(
            library: &Library,
            name: &'static str,
            symbol: &'static str,
        ) -> Result<T, CompileError> {
            // SAFETY: the types above are those of NVRTC's header for these names, since CUDA 11.
            let found = unsafe { library.get::<T>(symbol.as_bytes()) };
            found.map(|found| *found).map_err(|_| CompileError::NoSymbol { library: name, symbol })
        }
        let version: VersionFn = find_symbol(&library, name, "nvrtcVersion")?;
        let calls = NvrtcCalls {
            create: find_symbol(&library, name, "nvrtcCreateProgram")?,
            compile: find_symbol(&library, name, "nvrtcCompileProgram")?,
            image_size: find_symbol(&library, name, "nvrtcGetCUBINSize")?,
            image: find_symbol(&library, name, "nvrtcGetCUBIN")?,
            log_size: find_symbol(&library, name, "nvrtcGetProgramLogSize")?,
            log: find_symbol(&library, name, "nvrtcGetProgramLog")?,
            destroy: find_symbol(&library, name, "nvrtcDestroyProgram")?,
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        let result = unsafe { version(&raw mut major, &raw mut minor) };
        check_call("nvrtcVersion", result)?;
        Ok(Self { calls, version: version_of(major, minor), _library: library })
    }
}

impl KernelCompiler for Nvrtc {
    fn compiler_version(&self) -> String {
        self.version.clone()
    }

    fn compile_kernel(&mut self, source: KernelSource<'_>) -> Result<Vec<u8>, CompileError> {
        let text = c_text(source.text)?;
        let names = source.headers.iter().map(|(name, _)| c_text(name));
        let names = names.collect::<Result<Vec<_>, _>>()?;
        let texts = source.headers.iter().map(|(_, text)| c_text(text));
        let texts = texts.collect::<Result<Vec<_>, _>>()?;
        let pointers =
            |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let mut program = OwnedProgram { program: ptr::null_mut(), calls: self.calls };
        // SAFETY: all texts end with a zero and outlive the call, which copies them; as many names
        // as texts; writes the handle.
        let result = unsafe {
            (self.calls.create)(
                &raw mut program.program,
                text.as_ptr(),
                c"kvd.cu".as_ptr(),
                names.len() as c_int,
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        check_call("nvrtcCreateProgram", result)?;
        let target = c_text(&format!("--gpu-architecture={}", source.target))?;
        let mut options = vec![target.as_ptr()];
        options.extend(OPTIONS.map(CStr::as_ptr));
        // SAFETY: a program that was created, and options that end with a zero.
        let result = unsafe {
            (self.calls.compile)(program.program, options.len() as c_int, options.as_ptr())
        };
        /// `nvrtcResult`: the source has errors, which the log lists.
        const COMPILATION: c_int = 6;
        if result == COMPILATION {
            let log =
                program.read_output("nvrtcGetProgramLog", self.calls.log_size, self.calls.log)?;
            let log = String::from_utf8_lossy(&log[..log.len().min(LOG_BYTES_MAX)]);
            return Err(CompileError::Rejected(log.trim_end_matches('\0').trim().to_owned()));
        }
        check_call("nvrtcCompileProgram", result)?;
        program.read_output("nvrtcGetCUBIN", self.calls.image_size, self.calls.image)
    }
}

/// Text that differs between compiler versions and options.
fn version_of(major: c_int, minor: c_int) -> String {
    let options = OPTIONS.map(|option| option.to_string_lossy());
    format!("nvrtc {major}.{minor} {}", options.join(" "))
}

/// A program that is given back when it goes.
struct OwnedProgram {
    program: NvrtcProgram,
    calls: NvrtcCalls,
}

impl OwnedProgram {
    /// Reads the output of a pair of calls: the first gives its size, the second its bytes.
    fn read_output(
        &self,
        call: &'static str,
        size: SizeFn,
        bytes: BytesFn,
    ) -> Result<Vec<u8>, CompileError> {
        let mut len = 0;
        // SAFETY: writes a number.
        check_call(call, unsafe { size(self.program, &raw mut len) })?;
        let mut read = vec![0u8; len];
        // SAFETY: writes as many bytes as it has said.
        check_call(call, unsafe { bytes(self.program, read.as_mut_ptr().cast()) })?;
        Ok(read)
    }
}

impl Drop for OwnedProgram {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created, and given back once.
            let _ = unsafe { (self.calls.destroy)(&raw mut self.program) };
        }
    }
}

fn c_text(text: &str) -> Result<CString, CompileError> {
    CString::new(text).map_err(|_| CompileError::Rejected("a text with a zero in it".to_owned()))
}

fn check_call(call: &'static str, code: c_int) -> Result<(), CompileError> {
    if code == 0 { Ok(()) } else { Err(CompileError::Failed { call, code }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_names_the_options_so_that_kernels_of_others_are_not_taken() {
        let version = version_of(13, 2);
        assert!(version.starts_with("nvrtc 13.2 "), "{version}");
        for option in OPTIONS {
            assert!(version.contains(option.to_str().unwrap()), "{version}");
        }
    }
}
