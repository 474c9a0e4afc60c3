//! A service manager that listens: when the daemon serves, lives and ends.

use super::process::{Process, kvd};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

/// Longest wait for what happens at once.
const PATIENCE: Duration = Duration::from_secs(20);

/// The end of `NOTIFY_SOCKET` that a manager has.
struct FakeManager {
    socket: UnixDatagram,
    folder: tempfile::TempDir,
}

impl FakeManager {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a set-up");
        let socket = UnixDatagram::bind(folder.path().join("notify")).expect("a set-up");
        socket.set_read_timeout(Some(PATIENCE)).expect("a set-up");
        Self { socket, folder }
    }

    fn start_daemon(&self, watchdog_us: &str) -> Process {
        let mut command = kvd();
        command.env("NOTIFY_SOCKET", self.folder.path().join("notify"));
        command.env("WATCHDOG_USEC", watchdog_us).env_remove("WATCHDOG_PID");
        Process::start_by(command, &[])
    }

    /// The next that is told.
    fn hear(&self) -> String {
        let mut bytes = [0; 512];
        let length = self.socket.recv(&mut bytes).expect("something is told");
        String::from_utf8(bytes[..length].to_vec()).expect("a set-up")
    }

    /// Hears until something has that line; how many signs of life came before.
    fn hear_until(&self, line: &str) -> usize {
        let mut signs = 0;
        loop {
            let told = self.hear();
            if told.lines().any(|told| told == line) {
                return signs;
            }
            signs += usize::from(told.lines().any(|told| told == "WATCHDOG=1"));
        }
    }
}

#[test]
fn a_service_manager_hears_that_the_daemon_serves_lives_and_ends() {
    let manager = FakeManager::new();
    let daemon = manager.start_daemon("150000");
    let first = manager.hear();
    let status = format!("STATUS=serves at {}", daemon.tcp());
    assert_eq!(first.lines().collect::<Vec<_>>(), ["READY=1", status.as_str()]);
    let began = Instant::now();
    for _ in 0..4 {
        assert_eq!(manager.hear().trim(), "WATCHDOG=1");
    }
    // Three in each timeout.
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(100), "{took:?}");
    // One that hangs says nothing: the manager ends it.
    daemon.signal("STOP");
    manager.socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut bytes = [0; 512];
    // Signs that were under way.
    while manager.socket.recv(&mut bytes).is_ok() {
        assert!(began.elapsed() < PATIENCE, "a stopped daemon gives signs of life");
    }
    manager.socket.set_read_timeout(Some(PATIENCE)).unwrap();
    daemon.signal("CONT");
    daemon.signal("TERM");
    manager.hear_until("STOPPING=1");
    assert_eq!(daemon.wait().code, Some(0));
}

#[test]
fn a_manager_that_does_not_listen_is_no_hindrance() {
    let mut command = kvd();
    command.env("NOTIFY_SOCKET", "/nowhere/notify").env_remove("WATCHDOG_USEC");
    let daemon = Process::start_by(command, &[]);
    daemon.signal("TERM");
    let ended = daemon.wait();
    assert_eq!(ended.code, Some(0));
    assert!(ended.log.contains("NOTIFY_SOCKET"), "{}", ended.log);
}
