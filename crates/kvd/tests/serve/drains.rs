//! A drain under load, as clients and the file system see it.

use super::process::Process;
use super::{assert_serves, batch, chunk};
use kvd_client::{Client, ClientError, ErrorCode, RegionClient, RegionOptions};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Streams of stores that a drain meets.
const STREAMS: usize = 24;
/// Drains.
const ROUNDS: usize = 6;

/// Stores until it is refused; the refusal.
async fn store_on(
    client: Client,
    model: kvd_client::ModelId,
    begun: Arc<AtomicUsize>,
) -> ClientError {
    let sequence = client.open_sequence(model).await.expect("open");
    let mut stream = client.store_stream(8).await.expect("a stream");
    for number in 0.. {
        if let Err(error) = stream.send_chunk(chunk(sequence, number * 2048, 2048)).await {
            return error;
        }
        if number == 0 {
            begun.fetch_add(1, Ordering::Relaxed);
        }
    }
    unreachable!("it never ends by itself")
}

/// The codes of streams over as many connections that a drain ended.
async fn drained(daemon: Process, client: impl AsyncFn() -> Client) -> Vec<ClientError> {
    let first = client().await;
    let (model, _) = assert_serves(&first).await;
    let begun = Arc::<AtomicUsize>::default();
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        streams.push(tokio::spawn(store_on(client().await, model, begun.clone())));
    }
    // All are in the middle of their work.
    let patience = Instant::now();
    while begun.load(Ordering::Relaxed) < STREAMS {
        assert!(patience.elapsed() < Duration::from_secs(20), "not all have begun");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    daemon.signal("TERM");
    let mut errors = Vec::new();
    for stream in streams {
        errors.push(stream.await.expect("a stream's task"));
    }
    let ended = tokio::task::spawn_blocking(|| daemon.wait()).await.expect("the wait");
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    errors
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_under_load_are_told_of_a_drain_and_never_find_a_broken_pipe() {
    for round in 0..ROUNDS {
        let daemon = Process::start(&["--set", "device.pool_bytes=2 GiB"]);
        let endpoint: kvd_client::Endpoint = format!("http://{}", daemon.tcp()).parse().unwrap();
        let connect = async || Client::connect(endpoint.clone()).await.expect("connect");
        for error in drained(daemon, connect).await {
            assert_eq!(error.code, Some(ErrorCode::ShuttingDown), "round {round}: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_a_region_is_told_of_a_drain() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("regions.sock");
    let flag = format!("server.listen_region={}", path.display());
    for busy in [true, false] {
        let daemon = Process::start(&["--set", &flag]);
        let (model, sequence) = assert_serves(&daemon.client().await).await;
        let region = RegionClient::open_region(&path, &RegionOptions::default()).unwrap();
        let ask = move || region.attend_once(batch(model, sequence), [64, 64]);
        ask().unwrap();
        let asking = std::thread::spawn(move || {
            let began = Instant::now();
            loop {
                match ask() {
                    Ok(_) if began.elapsed() < Duration::from_secs(20) => {}
                    Ok(_) => panic!("the region never ends"),
                    Err(error) => return error,
                }
                if !busy {
                    std::thread::sleep(Duration::from_millis(1500));
                }
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        daemon.signal("TERM");
        let error = tokio::task::spawn_blocking(|| asking.join().unwrap()).await.unwrap();
        assert_eq!(error.code, Some(ErrorCode::ShuttingDown), "busy {busy}: {error}");
        assert_eq!(daemon.wait().code, Some(0));
        assert!(!path.exists());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_keeps_the_socket_that_it_took_over_while_the_old_daemon_drained() {
    // Beside the test's program, which is on a disk in most places: there inode numbers come again.
    let beside = std::env::current_exe().unwrap();
    let places = [beside.parent().unwrap(), Path::new("/dev/shm")];
    for place in places.into_iter().filter(|place| place.is_dir()) {
        let folder = tempfile::tempdir_in(place).unwrap();
        let [grpc, regions] = ["kvd.sock", "regions.sock"].map(|name| folder.path().join(name));
        let unix = format!("server.listen_unix={}", grpc.display());
        let region = format!("server.listen_region={}", regions.display());
        let sockets = ["--set", &unix, "--set", &region];
        // A silent connection holds its drain.
        let hold = ["--set", "server.grace_period_ms=2000", "--set"];
        let hold = [&hold[..], &["server.keepalive_timeout_ms=60000"]].concat();
        let mut old = Process::start(&[&sockets[..], &hold].concat());
        let _silent = TcpStream::connect(old.tcp()).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        old.signal("TERM");
        let began = Instant::now();
        while grpc.exists() || regions.exists() {
            assert!(began.elapsed() < Duration::from_secs(1), "the files stay through the drain");
            std::thread::sleep(Duration::from_millis(5));
        }
        let new = Process::start(&sockets);
        assert!(old.is_alive(), "it drains yet");
        assert_eq!(old.wait().code, Some(0));
        let client = Client::connect(format!("unix:{}", grpc.display()).parse().unwrap()).await;
        let (model, sequence) = assert_serves(&client.unwrap()).await;
        let region = RegionClient::open_region(&regions, &RegionOptions::default()).unwrap();
        region.attend_once(batch(model, sequence), [64, 64]).unwrap();
        new.signal("TERM");
        assert_eq!(new.wait().code, Some(0));
        assert!(!grpc.exists() && !regions.exists());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signals_that_are_no_stop_end_nothing_and_sigquit_drains() {
    let mut daemon = Process::start(&["--set", "log.filter=kvd=debug"]);
    let client = daemon.client().await;
    let (model, sequence) = assert_serves(&client).await;
    let named = ["HUP", "USR1", "USR2", "HUP", "PIPE", "ALRM", "VTALRM", "PROF", "IO", "XFSZ"];
    // SIGSTKFLT and those of real time, the first and the last too.
    let numbers = [16].into_iter().chain(34..=64).map(|number: u32| number.to_string());
    for signal in named.into_iter().map(str::to_owned).chain(numbers) {
        daemon.signal(&signal);
        std::thread::sleep(Duration::from_millis(50));
        assert!(daemon.is_alive(), "SIG{signal} ended it");
    }
    // What it held is there.
    client.attend_batch(batch(model, sequence)).await.unwrap();
    daemon.signal("QUIT");
    let ended = tokio::task::spawn_blocking(|| daemon.wait()).await.unwrap();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(ended.log.contains("\"drained\":\"Clean\""), "{}", ended.log);
    assert_eq!(ended.log.matches("SIGHUP").count(), 2, "{}", ended.log);
    for line in ["SIGUSR1", "SIGUSR2", "SIGXFSZ", "SIGSTKFLT", "SIGRTMIN+0", "SIGRTMIN+29"] {
        let line = format!("{line} is ignored");
        assert_eq!(ended.log.matches(&line).count(), 1, "{}", ended.log);
    }
}

#[test]
fn loss_of_power_and_of_processor_time_drain() {
    for signal in ["PWR", "XCPU"] {
        let daemon = Process::start(&[]);
        daemon.signal(signal);
        let ended = daemon.wait();
        assert_eq!(ended.code, Some(0), "SIG{signal}: {}", ended.log);
        assert!(ended.log.contains("\"drained\":\"Clean\""), "{}", ended.log);
    }
}
