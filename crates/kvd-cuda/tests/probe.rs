//! The probe answers whatever library it finds, and never panics. A process has one driver, so
//! each case is a process of its own with a made-up `libcuda.so` in front.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test may fail, and says a skip")]

use kvd_cuda::{GpuName, probe_devices};
use std::path::Path;
use std::process::Command;

/// The probe's answer with a driver compiled with `macros`; none without a C compiler.
fn with_driver(macros: &[&str]) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_libcuda.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(dir.path().join("libcuda.so"));
    cc.args(macros).arg(source);
    match cc.output() {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(_) => {
            eprintln!("SKIP probe: no C compiler to make a driver with");
            return None;
        }
    }
    Some(answer(Some(dir.path())))
}

/// The probe's answer in a process that finds libraries in `path` first.
fn answer(path: Option<&Path>) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("answer");
    let mut probe = Command::new(std::env::current_exe().unwrap());
    probe.args(["--exact", "--ignored", "answers", "--nocapture"]).env("PROBE_ANSWER", &file);
    if let Some(path) = path {
        probe.env("LD_LIBRARY_PATH", path);
    }
    let output = probe.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    std::fs::read_to_string(file).unwrap()
}

#[test]
#[ignore = "what the other tests start as a process"]
fn answers() {
    let Some(file) = std::env::var_os("PROBE_ANSWER") else { return };
    // The first that there is; all of them where it can be used.
    let found = probe_devices().and_then(|gpus| {
        let first = gpus.iter().position(Result::is_ok).unwrap_or(0);
        GpuName::Ordinal(first as u32).find_gpu(&gpus).map(|_| gpus)
    });
    let answer = match found {
        Ok(gpus) => format!("{gpus:?}"),
        Err(error) => error.to_string(),
    };
    std::fs::write(file, answer).unwrap();
}

#[test]
fn a_machine_without_a_driver_says_so() {
    let answer = answer(None);
    if answer.starts_with('[') || !answer.contains("libcuda.so is not found") {
        eprintln!("SKIP probe: this machine has a driver: {answer}");
        return;
    }
    assert!(answer.contains("use device = \"cpu\""), "{answer}");
}

#[test]
fn drivers_that_refuse_are_quoted() {
    for (macros, wanted) in [
        (&["-DINIT=100"][..], "finds no GPU"),
        (&["-DCOUNT=0"], "finds no GPU"),
        (&["-DINIT=34"], "answers CUDA_ERROR_STUB_LIBRARY (34) to cuInit"),
        (&["-DINIT=803"], "answers CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803) to cuInit"),
        (&["-DVERSION=12080"], "is of version 12080; 13000 or later"),
        (&["-DWITHOUT_LAUNCH"], "lacks cuLaunchKernel"),
        (&["-DMAJOR=7"], "Fake GPU has compute capability 7.0; the kernels need 8.0"),
    ] {
        let Some(answer) = with_driver(macros) else { return };
        assert!(answer.contains(wanted), "{macros:?}: {answer}");
    }
}

#[test]
fn a_gpu_that_fails_is_named_and_the_others_are_listed() {
    let Some(answer) = with_driver(&["-DCOUNT=2", "-DBROKEN=0"]) else { return };
    let failed = "Err(Driver { call: \"cuDeviceGetAttribute\", code: 999";
    let (lost, rest) = answer.split_once("Ok(").unwrap();
    assert!(lost.contains(failed) && rest.contains("ordinal: 1"), "{answer}");
    let Some(answer) = with_driver(&["-DBROKEN=0"]) else { return };
    let wanted = "answers CUDA_ERROR_UNKNOWN (999) to cuDeviceGetAttribute";
    assert!(answer.contains(wanted), "{answer}");
}

#[test]
fn gpus_are_listed_with_their_limits() {
    let Some(answer) = with_driver(&["-DCOUNT=2"]) else { return };
    for wanted in [
        "ordinal: 1",
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f",
        "name: \"Fake GPU\"",
        "multiprocessors: 132",
        "block_shared_bytes: 232448",
        "memory_gbps: 3352",
    ] {
        assert!(answer.contains(wanted), "{wanted} in {answer}");
    }
}
