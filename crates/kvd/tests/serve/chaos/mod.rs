//! A daemon among workers that are killed, stopped and flooding, and that is itself killed and
//! started again.
//!
//! Each worker is a process of its own ([`worker`]). It checks every answer against rows that
//! anybody can compute ([`rows`]), and that no call takes longer than its deadline. At the end
//! nothing is left of any of them: every gauge is back at zero, and memory and descriptors are
//! where they were.
//!
//! `KVD_CHAOS_KILLS` and `KVD_CHAOS_RESTARTS` make the run longer, `KVD_CHAOS_SEED` another:
//!
//! ```text
//! KVD_CHAOS_KILLS=1000 KVD_CHAOS_RESTARTS=50 cargo test -p kvd --test serve -- chaos --nocapture
//! ```

mod crowd;
mod flood;
mod rows;
mod worker;

use super::process::Process;
use crowd::{Crowd, Sockets};
use kvd_client::{Client, ClientOptions, Namespace};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait until nothing is left of killed workers.
const PATIENCE: Duration = Duration::from_secs(20);
/// Memory beside the pool and what requests may hold, as `docs/operating.md` has it.
const RESIDENT_BESIDE_BYTES: u64 = 64 << 20;
const POOL_BYTES: u64 = 32 << 20;
const INFLIGHT_BYTES: u64 = 64 << 20;

/// Gauges that count what workers hold.
const HELD_GAUGES: [&str; 11] = [
    "kvd_sequences",
    "kvd_sessions",
    "kvd_open_streams",
    "kvd_connections{listener=\"tcp\"}",
    "kvd_connections{listener=\"unix\"}",
    "kvd_regions",
    "kvd_region_bytes",
    "kvd_inflight_bytes",
    "kvd_queue_depth",
    "kvd_queued_stream_messages",
    "kvd_leases",
];

/// How much is done to the daemon and its workers.
struct ChaosPlan {
    kills: u64,
    restarts: u64,
    seed: u64,
}

impl ChaosPlan {
    fn from_environment() -> Self {
        let read = |name, default| {
            std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
        };
        Self {
            kills: read("KVD_CHAOS_KILLS", 40),
            restarts: read("KVD_CHAOS_RESTARTS", 3),
            seed: read("KVD_CHAOS_SEED", 1),
        }
    }
}

fn start_daemon(sockets: &Sockets) -> Process {
    let set = |key: &str, value: String| ["--set".to_owned(), format!("{key}={value}")];
    let settings = [
        set("device.pool_bytes", POOL_BYTES.to_string()),
        set("limits.inflight_bytes_max", INFLIGHT_BYTES.to_string()),
        // Workers that are stopped do not end their streams.
        set("server.grace_period_ms", "500".to_owned()),
        set("server.message_bytes_max", "4 MiB".to_owned()),
        set("limits.calibration_bytes_max", "1 MiB".to_owned()),
        set("limits.attend_parts_max", "4096".to_owned()),
        set("namespaces.allowed", "[\"*\"]".to_owned()),
        set("server.listen_unix", sockets.grpc.display().to_string()),
        set("server.listen_region", sockets.region.display().to_string()),
        set("log.filter", "kvd=warn,kvd::daemon=info".to_owned()),
    ];
    let settings = settings.concat();
    Process::start(&settings.iter().map(String::as_str).collect::<Vec<_>>())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_workers_and_daemons_leave_no_wrong_answer_and_nothing_behind() {
    let plan = ChaosPlan::from_environment();
    let folder = tempfile::tempdir().expect("a folder");
    let sockets = Sockets::in_folder(folder.path());
    let mut daemon = start_daemon(&sockets);
    let descriptors = count_descriptors(&daemon);
    let mut crowd = Crowd::start(&sockets, plan.seed);
    let (mut kills, mut restarts) = (0, 0);
    while kills < plan.kills || restarts < plan.restarts {
        let due = (kills + 1) * plan.restarts / plan.kills.max(1);
        if restarts < due.min(plan.restarts) || kills >= plan.kills {
            let signal = if crowd.draw(2) == 0 { "KILL" } else { "TERM" };
            daemon.signal(signal);
            let ended = daemon.wait();
            assert_eq!(ended.code, (signal == "TERM").then_some(0), "{}", ended.log);
            daemon = start_daemon(&sockets);
            restarts += 1;
        }
        kills += u64::from(crowd.disturb_one());
        crowd.check_workers();
        let pause = 50 + crowd.draw(100);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        assert!(daemon.is_alive(), "the daemon has ended: {}", daemon.wait().log);
        check_resident(&daemon);
    }
    let checks = crowd.end_all();
    println!("{kills} workers killed, {restarts} daemons, {checks} answers checked");
    assert!(checks > 2 * plan.kills, "only {checks} answers were checked");
    await_zero(&daemon, &HELD_GAUGES).await;
    drop_everything(&sockets).await;
    let left = ["kvd_pool_used_bytes", "kvd_pool_slots", "kvd_index_entries", "kvd_models"];
    await_zero(&daemon, &left).await;
    let now = count_descriptors(&daemon);
    assert!(now <= descriptors + 4, "{descriptors} descriptors at the start, {now} at the end");
    daemon.signal("TERM");
    let ended = daemon.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert!(!ended.log.contains("panicked"), "{}", ended.log);
}

fn count_descriptors(daemon: &Process) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.id())).expect("descriptors").count()
}

fn check_resident(daemon: &Process) {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id()));
    let status = status.expect("a running daemon");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kib: u64 = line.trim_end_matches("kB").trim().parse().expect("a number");
    let most = POOL_BYTES + INFLIGHT_BYTES + RESIDENT_BESIDE_BYTES;
    assert!(kib << 10 <= most, "{kib} KiB resident, {most} bytes allowed");
}

/// The sum of a gauge's series, or the value of one series. A page that does not describe the gauge
/// is a wrong name here.
fn read_gauge(page: &str, name: &str) -> f64 {
    let gauge = name.split('{').next().unwrap_or_default();
    assert!(page.contains(&format!("# TYPE {gauge} gauge")), "no gauge {gauge}");
    let of_gauge = page
        .lines()
        .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
    of_gauge.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

fn read_metrics(daemon: &Process) -> String {
    let mut socket = TcpStream::connect(daemon.admin()).expect("the admin port");
    let request = b"GET /metrics HTTP/1.1\r\nHost: kvd\r\nConnection: close\r\n\r\n";
    socket.write_all(request).expect("a request");
    let mut page = String::new();
    socket.read_to_string(&mut page).expect("a page");
    page
}

/// Waits until all gauges are zero.
async fn await_zero(daemon: &Process, gauges: &[&str]) {
    let began = Instant::now();
    loop {
        let page = read_metrics(daemon);
        let held: Vec<_> = gauges.iter().map(|name| (*name, read_gauge(&page, name))).collect();
        let held: Vec<_> = held.into_iter().filter(|(_, value)| *value != 0.0).collect();
        if held.is_empty() {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "still held after {PATIENCE:?}: {held:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Unregisters every model of every tenant, with what is cached of it.
async fn drop_everything(sockets: &Sockets) {
    for tenant in 0..worker::TENANTS {
        let client = connect(&sockets.grpc, tenant).await.expect("the daemon");
        for model in client.list_models().await.expect("models") {
            let model = model.model.expect("a model").model_id;
            client.unregister_model(kvd_client::ModelId(model)).await.expect("unregister");
        }
    }
}

/// A client of a tenant, with the deadline that every call has.
async fn connect(path: &Path, tenant: u64) -> Result<Client, kvd_client::ClientError> {
    let endpoint = format!("unix:{}", path.display()).parse().expect("an endpoint");
    let options = ClientOptions::default().with_timeout(worker::DEADLINE);
    let client = Client::connect_with(endpoint, &options).await?;
    let namespace = Namespace::new(&format!("tenant-{tenant}")).expect("a namespace");
    Ok(client.with_namespace(&namespace))
}
