//! The admin port and file descriptors under those who take what they can.

use super::assert_serves;
use super::process::{Process, kvd, refused};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

/// The usual limit of open files.
const USUAL: &str = "1024";

/// `kvd` of a process that may open so many files.
fn limited(files: &str) -> Command {
    let mut command = Command::new("sh");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("KVD_")) {
        command.env_remove(name);
    }
    let program = kvd().get_program().to_owned();
    command.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")]).arg(program);
    command
}

/// Sockets that this test itself holds.
fn allow_many_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("the hard limit");
}

/// A page of the admin port.
pub(crate) fn page(address: &str, path: &str) -> String {
    let mut socket = TcpStream::connect(address).expect("connect");
    socket.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    let request = format!("GET {path} HTTP/1.1\r\nHost: kvd\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).expect("ask");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("an answer");
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_requests_stop_neither_probes_nor_engines() {
    allow_many_files();
    let daemon = Process::start_by(limited(USUAL), &[]);
    let ask = |path: &'static str| {
        let address = daemon.admin().to_owned();
        tokio::task::spawn_blocking(move || page(&address, path))
    };
    let early = daemon.client().await;
    let mut halves = Vec::new();
    for number in 0..1100 {
        let mut half = TcpStream::connect(daemon.admin()).expect("connect");
        half.write_all(b"GET /metrics HTTP/1.1\r\nHost: k").expect("half a request");
        halves.push(half);
        if number % 200 == 199 {
            assert!(ask("/healthz").await.unwrap().starts_with("HTTP/1.1 200"), "after {number}");
        }
    }
    let began = Instant::now();
    assert!(ask("/healthz").await.unwrap().ends_with("ok\n"));
    assert!(ask("/readyz").await.unwrap().ends_with("ready\n"));
    assert!(ask("/metrics").await.unwrap().contains("kvd_ready 1"));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_serves(&daemon.client().await).await;
    early.server_info().await.unwrap();
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.id())).unwrap().count();
    assert!(open < 64 + 64, "{open} descriptors are open");
    // The last of them have the time of a head to go on.
    let mut last = halves.pop().unwrap();
    last.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut rest = Vec::new();
    let _ = last.read_to_end(&mut rest);
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}

#[test]
fn idle_connections_of_scrapers_end_and_others_are_answered_twice() {
    let daemon = Process::start(&["--set", "admin.head_timeout_ms=500"]);
    let mut socket = TcpStream::connect(daemon.admin()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut bytes = [0; 4096];
    for _ in 0..2 {
        socket.write_all(b"GET /healthz HTTP/1.1\r\nHost: kvd\r\n\r\n").unwrap();
        let got = socket.read(&mut bytes).unwrap();
        assert!(bytes[..got].ends_with(b"ok\n"));
    }
    let began = Instant::now();
    assert_eq!(socket.read(&mut bytes).unwrap(), 0, "it is closed");
    assert!(began.elapsed() < Duration::from_secs(5));
    // Dripping one byte at a time is no way around.
    let mut dripping = TcpStream::connect(daemon.admin()).unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(10) && dripping.write_all(b"G").is_ok() {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn limits_that_the_descriptors_do_not_allow_exit_64_with_the_numbers() {
    for (files, flags, names) in [
        (USUAL, &["--set", "server.connections_max=1024"][..], &["1024 files", "1216"][..]),
        ("100", &[], &["100 files", "admin.connections_max"]),
        (USUAL, &["--set", "server.connections_max=many"], &["many", "auto"]),
    ] {
        let mut command = limited(files);
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]).args(flags);
        let (code, said) = refused(command);
        assert_eq!(code, Some(64), "{said}");
        for name in names.iter().chain(&["server.connections_max"]) {
            assert!(said.contains(name), "{name}: {said}");
        }
    }
}

#[test]
fn the_soft_limit_is_raised_to_the_hard_one() {
    // A soft limit that is too low for the defaults, under a hard one that is enough.
    let mut command = limited("2048");
    command = {
        let program = command.get_program().to_owned();
        let mut args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        args[1] = "ulimit -Sn 100; ulimit -Hn 2048; exec \"$0\" \"$@\"".into();
        let mut command = Command::new(program);
        command.args(args);
        command
    };
    let daemon = Process::start_by(command, &[]);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.id())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<_> = files.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers, ["2048", "2048"]);
}
