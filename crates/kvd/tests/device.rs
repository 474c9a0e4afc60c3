//! The program itself, on a machine without a GPU: what `device.device` does to it.
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

fn serve(device: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
    command.arg("serve").args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    command.args(["--pool", "2 MiB", "--set", &format!("device.device={device}")]);
    command.env("KVD_LOG__FORMAT", "text").env("NO_COLOR", "1");
    command
}

/// Whether this machine has no GPU that kvd could use; says so when it has one.
fn without_gpu() -> bool {
    let found = kvd_cuda::probe_devices().is_ok();
    if found {
        eprintln!("SKIP device: this machine has a GPU");
    }
    !found
}

#[test]
fn a_gpu_asked_for_by_name_that_is_not_there_ends_the_program_with_70_and_the_reason() {
    if !without_gpu() {
        return;
    }
    for device in ["cuda:0", "cuda:GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"] {
        let output = serve(device).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(70), "{text}");
        assert!(text.contains(&format!("kvd: open device {device} (device.device): ")), "{text}");
        assert!(text.contains("driver"), "{text}");
    }
    let output = serve("cuda:first").output().unwrap();
    assert_eq!(output.status.code(), Some(64));
}

#[test]
fn auto_serves_from_the_processor_and_logs_why() {
    if !without_gpu() {
        return;
    }
    let child = serve("auto").stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    let mut why = None;
    let mut serves = None;
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        if line.contains("no GPU, so the CPU serves") {
            why = Some(line);
        } else if line.contains("kvd serves") {
            serves = Some(line);
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let (why, serves) = (why.expect("a reason"), serves.expect("it serves"));
    assert!(why.contains("reason=") && why.contains("driver"), "{why}");
    assert!(serves.contains("cpu ("), "{serves}");
}
