//! The worker processes: started, killed, stopped for a while, and asked what they found.

use super::worker::{SEED_VARIABLE, SOCKET_VARIABLE};
use fastrand::Rng;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Workers at one time.
const WORKERS: usize = 5;

/// Where a daemon listens, before and after it is started again.
pub(super) struct Sockets {
    pub(super) grpc: PathBuf,
    pub(super) region: PathBuf,
    folder: PathBuf,
}

impl Sockets {
    pub(super) fn in_folder(folder: &Path) -> Self {
        let [grpc, region] = ["kvd.sock", "regions.sock"].map(|name| folder.join(name));
        Self { grpc, region, folder: folder.to_owned() }
    }
}

/// One worker process.
struct Worker {
    seed: u64,
    child: Child,
    /// Lines of its output that are no count.
    said: Option<JoinHandle<Vec<String>>>,
    checks: Arc<AtomicU64>,
    /// When a stopped one goes on.
    wakes: Option<Instant>,
}

impl Worker {
    fn start(sockets: &Sockets, seed: u64) -> Self {
        let program = std::env::current_exe().expect("this test");
        let mut child = Command::new(program)
            .args(["--exact", "chaos::worker::run_worker_process", "--ignored", "--nocapture"])
            .env(SOCKET_VARIABLE, &sockets.folder)
            .env(SEED_VARIABLE, seed.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("start a worker");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let checks = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&checks);
        let said = std::thread::spawn(move || {
            let read = |line: String| match line.strip_prefix("checks ") {
                Some(count) => {
                    counted.store(count.parse().expect("a count"), Relaxed);
                    None
                }
                None => Some(line),
            };
            lines.map_while(Result::ok).filter_map(read).collect()
        });
        Self { seed, child, said: Some(said), checks, wakes: None }
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        // One that has ended is found by `check_workers`.
        let _ = Command::new("kill").args([&format!("-{name}"), &id]).status();
    }

    /// Kills it, stopped or not; how many answers it had checked.
    fn kill(mut self) -> u64 {
        // Gone already is as good.
        let _ = self.child.kill();
        self.child.wait().expect("an end");
        self.said.take().map(JoinHandle::join);
        self.checks.load(Relaxed)
    }
}

/// All workers.
pub(super) struct Crowd<'a> {
    sockets: &'a Sockets,
    random: Rng,
    seed: u64,
    started: u64,
    workers: Vec<Worker>,
    /// Answers that workers checked that are gone.
    checks: u64,
}

impl<'a> Crowd<'a> {
    pub(super) fn start(sockets: &'a Sockets, seed: u64) -> Self {
        let random = Rng::with_seed(seed);
        let mut crowd = Self { sockets, random, seed, started: 0, workers: Vec::new(), checks: 0 };
        (0..WORKERS).for_each(|_| crowd.add_worker());
        crowd
    }

    fn add_worker(&mut self) {
        self.started += 1;
        self.workers.push(Worker::start(self.sockets, self.seed * 1_000_000 + self.started));
    }

    /// A number below `end`.
    pub(super) fn draw(&mut self, end: u64) -> u64 {
        self.random.u64(0..end)
    }

    /// Kills one worker and starts another, or stops one for a while; whether one was killed.
    pub(super) fn disturb_one(&mut self) -> bool {
        let now = Instant::now();
        for worker in &mut self.workers {
            if worker.wakes.is_some_and(|wakes| wakes <= now) {
                worker.signal("CONT");
                worker.wakes = None;
            }
        }
        let chosen = self.draw(WORKERS as u64) as usize;
        if self.draw(4) == 0 {
            let pause = Duration::from_millis(50 + self.draw(1500));
            self.workers[chosen].signal("STOP");
            self.workers[chosen].wakes = Some(now + pause);
            return false;
        }
        self.checks += self.workers.swap_remove(chosen).kill();
        self.add_worker();
        true
    }

    /// Fails if a worker ended by itself: it met a wrong answer.
    pub(super) fn check_workers(&mut self) {
        for worker in &mut self.workers {
            let Some(status) = worker.child.try_wait().expect("a child") else { continue };
            let said = worker.said.take().map(JoinHandle::join);
            panic!("worker {} ended with {status}: {said:#?}", worker.seed);
        }
    }

    /// Kills all; how many answers they checked.
    pub(super) fn end_all(mut self) -> u64 {
        self.check_workers();
        let workers = self.workers.drain(..);
        self.checks + workers.map(Worker::kill).sum::<u64>()
    }
}
