//! `kvd serve` as a process: its signals and its log.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Kills what a failed test leaves running.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.0.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("kill").success());
    }

    fn ends_within(&mut self, patience: Duration) -> Option<ExitStatus> {
        let began = Instant::now();
        while began.elapsed() < patience {
            if let Some(status) = self.0.try_wait().expect("wait for kvd") {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

#[test]
fn a_second_signal_ends_a_drain_at_once() {
    for second in ["TERM", "INT"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("KVD_")) {
            command.env_remove(name);
        }
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "", "--pool", "1 MiB"]);
        command.args(["--set", "server.grace_period_ms=60000"]);
        // Longer than the test: the silent client must be what holds the drain.
        command.args(["--set", "server.keepalive_timeout_ms=60000"]);
        let mut process = Process(command.stderr(Stdio::piped()).spawn().expect("start kvd"));
        let mut log = BufReader::new(process.0.stderr.take().expect("piped")).lines();
        let mut line = |what: &str| {
            log.find_map(|line| Some(line.expect("a log")).filter(|line| line.contains(what)))
                .expect("a line of the log")
        };
        let serves = line("kvd serves");
        // Plain text, as no terminal reads it; so the address can be cut out.
        assert!(!serves.contains('\x1b'), "{serves:?}");
        let (_, address) = serves.split_once("tcp=").expect("an address");
        let address = address.split_once(' ').expect("an address").0;
        let _silent = TcpStream::connect(address).expect("connect");
        // The daemon accepts in its own time; a connection it never saw would not hold it.
        std::thread::sleep(Duration::from_millis(300));
        process.signal("TERM");
        line("draining");
        assert!(process.ends_within(Duration::from_millis(300)).is_none(), "nothing held it");
        process.signal(second);
        let status = process.ends_within(Duration::from_secs(20)).expect("it ends at once");
        assert_eq!(status.code(), Some(1), "{second}");
    }
}

/// A socket may be bound some time before the daemon serves.
#[test]
fn a_signal_before_the_daemon_serves_leaves_no_socket() {
    let dir = tempfile::tempdir().expect("a folder");
    for wait_ms in (0..40).step_by(2) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
        command.args(["serve", "--listen", "", "--admin", "", "--pool", "1 MiB", "--unix"]);
        let mut process = Process(
            command.arg(dir.path().join("kvd.sock")).stderr(Stdio::null()).spawn().expect("kvd"),
        );
        std::thread::sleep(Duration::from_millis(wait_ms));
        process.signal("TERM");
        let status = process.ends_within(Duration::from_secs(20)).expect("it ends");
        // Without a code it had not yet come to say what a signal does.
        if let Some(code) = status.code() {
            assert_eq!(code, 0, "after {wait_ms} ms");
            let left: Vec<_> = dir.path().read_dir().expect("a folder").collect();
            assert!(left.is_empty(), "{left:?} after {wait_ms} ms");
        }
    }
}

/// Whoever reads the exit code must not take a table that never came for one that did.
#[cfg(feature = "eval")]
#[test]
fn a_signal_ends_an_evaluation_at_once_and_is_no_success() {
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
        // The fits of all presets take longer than the test waits.
        command.args(["eval", "--all-presets", "--passages", "1", "--tokens", "64"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Process(command.spawn().expect("start kvd"));
        std::thread::sleep(Duration::from_secs(3));
        assert!(process.ends_within(Duration::ZERO).is_none(), "it had ended before");
        process.signal(name);
        let status = process.ends_within(Duration::from_secs(10)).expect("it ends");
        assert_eq!(status.code(), Some(code));
        let stderr = process.0.stderr.take().expect("piped");
        let said = std::io::read_to_string(stderr).expect("text");
        assert!(said.contains(&format!("ended by signal {}", code - 128)), "{said}");
    }
}

/// Whether the process has a handler for SIGHUP, and lives.
fn catches_hangup(process: &Process) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.0.id()));
    let status = status.expect("a process");
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).expect("a mask") & 1 == 1)
}

#[test]
fn hangups_do_not_end_a_daemon_that_reads_its_configuration() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = dir.path().join("kvd.toml");
    assert!(Command::new("mkfifo").arg(&config).status().expect("mkfifo").success());
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "", "--pool", "1 MiB"]);
    command.arg("--config").arg(&config).stderr(Stdio::piped());
    let mut process = Process(command.spawn().expect("start kvd"));
    let began = Instant::now();
    while !catches_hangup(&process) {
        assert!(began.elapsed() < Duration::from_secs(20), "it waits for its file unprotected");
        std::thread::sleep(Duration::from_millis(1));
    }
    for signal in ["HUP", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "XFSZ"] {
        process.signal(signal);
    }
    std::fs::write(&config, "[server]\ngrace_period_ms = 100\n").expect("it reads the file");
    let log = BufReader::new(process.0.stderr.take().expect("piped")).lines();
    let serves = log.map(|line| line.expect("a log")).any(|line| line.contains("kvd serves"));
    assert!(serves, "{:?}", process.0.wait());
    process.signal("TERM");
    let status = process.ends_within(Duration::from_secs(20)).expect("it drains");
    assert_eq!(status.code(), Some(0));
}

/// Before its first instruction a process is not protected, so that a signal counts from then on.
#[test]
fn hangups_in_the_first_milliseconds_end_no_daemon() {
    let mut counted = 0;
    for start in 0..50 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "", "--pool", "1 MiB"]);
        let mut process = Process(command.stderr(Stdio::null()).spawn().expect("start kvd"));
        std::thread::sleep(Duration::from_micros(200 * start));
        let began = Instant::now();
        // The first ones come as early as they can.
        while !catches_hangup(&process) && began.elapsed() < Duration::from_secs(20) {}
        counted += usize::from(catches_hangup(&process));
        process.signal("HUP");
        assert_eq!(process.ends_within(Duration::from_millis(20)), None, "start {start}");
    }
    assert_eq!(counted, 50);
}
