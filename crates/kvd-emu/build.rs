//! Compiles `kernels/` with g++ for the CPU lane. Without g++, or on a processor whose stack switch
//! the lane does not have, the crate says so when it is used.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the sanitizers of the kernels, as in `-fsanitize=`: `address,undefined`, `thread`, or
/// nothing; or [`BLOCKS`].
const SANITIZE: &str = "KVD_EMU_SANITIZE";

/// The lane's own: who writes and reads what of device memory, by thread block
/// (`kernels/emu/blocks.cc`). What calls it at every access is ThreadSanitizer's half of the
/// compiler.
const BLOCKS: &str = "blocks";

fn main() {
    println!("cargo:rerun-if-changed=../../kernels");
    println!("cargo:rerun-if-env-changed={SANITIZE}");
    println!("cargo:rustc-check-cfg=cfg(kvd_emu)");
    let sanitize = env::var(SANITIZE).unwrap_or_default();
    println!("cargo:rustc-env=KVD_EMU_SANITIZERS={sanitize}");
    let target = env::var("TARGET").unwrap_or_default();
    let gxx = Command::new("g++").arg("--version").output();
    if !target.starts_with("x86_64-unknown-linux") || !gxx.is_ok_and(|out| out.status.success()) {
        return;
    }
    println!("cargo:rustc-cfg=kvd_emu");
    // The scheduler switches stacks, which a sanitizer must be told of, not see.
    let mut scheduler = build();
    scheduler.file("../../kernels/emu/emu.cc").cargo_metadata(false);
    let mut kernels = build();
    kernels.flag("-x").flag("c++");
    kernels.files(sources("../../kernels")).files(emu_files());
    // As they are compiled while a program runs: with headers by their bare names.
    kernels.files(sources("../../kernels/emu/late")).include("../../kernels/include/kvd");
    kernels.flag("-Wno-unknown-pragmas").flag("-Wno-unused-parameter");
    // Kernels make themselves known before main: nothing names them, all are needed.
    kernels.cargo_metadata(false);
    if sanitize == BLOCKS {
        scheduler.file("../../kernels/emu/blocks.cc");
        kernels.flag("-fsanitize=thread");
    } else if !sanitize.is_empty() {
        kernels.flag(format!("-fsanitize={sanitize}")).flag("-fno-omit-frame-pointer");
        kernels.flag("-fno-sanitize-recover=all");
    }
    kernels.compile("kvd_emu_kernels");
    scheduler.compile("kvd_emu_scheduler");
    let out = env::var("OUT_DIR").unwrap_or_default();
    println!("cargo:rustc-link-search=native={out}");
    // For a test that links them into a library of its own.
    println!("cargo:rustc-env=KVD_EMU_KERNELS={out}/libkvd_emu_kernels.a");
    println!("cargo:rustc-link-lib=static:+whole-archive=kvd_emu_kernels");
    println!("cargo:rustc-link-lib=static=kvd_emu_scheduler");
    if sanitize != BLOCKS {
        link_sanitizers(&sanitize);
    }
    println!("cargo:rustc-link-lib=stdc++");
}

/// The kernels' files in a folder.
fn sources(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.map(|entry| entry.path());
    let mut files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|extension| extension == "cu")).collect();
    files.sort();
    files
}

/// Kernels of tests alone: bugs, and what others are compared with.
fn emu_files() -> [&'static str; 2] {
    ["../../kernels/emu/planted.cu", "../../kernels/emu/walk.cu"]
}

/// Compiler flags of both libraries: optimised, or the tests take minutes.
fn build() -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).compiler("g++").std("c++17").opt_level(2).debug(false).warnings(true);
    // Lines, for what sanitizers report: all that is known of types takes a fifth of the time.
    build.flag("-g1");
    build.extra_warnings(true).warnings_into_errors(true);
    build.include("../../kernels/include").include("../../kernels/emu");
    build
}

/// rustc links with `-nodefaultlibs`, where `-fsanitize=` adds nothing: name the runtimes.
fn link_sanitizers(sanitize: &str) {
    let runtimes = [
        ("address", "libasan.a", "--whole-archive,"),
        ("undefined", "libubsan.a", ""),
        // It must be there before the first call that it intercepts.
        ("thread", "libtsan_preinit.o", ""),
        ("thread", "libtsan.a", "--whole-archive,"),
    ];
    for (name, file, whole) in runtimes {
        if !sanitize.split(',').any(|part| part == name) {
            continue;
        }
        let printed = Command::new("g++").arg(format!("-print-file-name={file}")).output();
        let Ok(printed) = printed else { continue };
        let path = String::from_utf8_lossy(&printed.stdout).trim().to_owned();
        if Path::new(&path).is_absolute() {
            println!("cargo:rustc-link-arg=-Wl,--push-state,{whole}{path},--pop-state");
        }
    }
    if !sanitize.is_empty() && sanitize != BLOCKS {
        println!("cargo:rustc-link-arg=-Wl,--export-dynamic");
        for library in ["stdc++", "m", "pthread", "dl", "rt"] {
            println!("cargo:rustc-link-arg=-l{library}");
        }
    }
}
