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
