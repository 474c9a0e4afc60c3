//! `kvd serve` as a process: started, read by its log, signalled, waited for.

use kvd_client::{Client, Endpoint};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for a process to end; no healthy one comes near.
const PATIENCE: Duration = Duration::from_secs(30);

/// `kvd`, undisturbed by settings of whoever runs the tests.
pub(crate) fn kvd() -> Command {
    let program = std::env::var_os("KVD_GPU_DAEMON");
    let mut command = Command::new(program.unwrap_or(env!("CARGO_BIN_EXE_kvd").into()));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("KVD_")) {
        command.env_remove(name);
    }
    command
}

/// A serving daemon; killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    /// Lines that it writes after it began to serve.
    log: Option<JoinHandle<Vec<String>>>,
    /// The line that says where it serves.
    serves: String,
}

/// How a daemon ended.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) log: String,
}

impl Process {
    /// Starts `kvd serve` on free loopback ports, and waits until it serves.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_by(kvd(), flags)
    }

    /// Starts it by a command that runs `kvd` with the arguments that it gets.
    pub(crate) fn start_by(mut command: Command, flags: &[&str]) -> Self {
        let mut child = command
            .args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
            .args(["--pool", "64 MiB", "--set", "log.format=json"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .expect("start kvd");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut serves = None;
        let mut said = Vec::new();
        for line in lines.by_ref().map_while(Result::ok) {
            if line.contains("kvd serves") {
                serves = Some(line);
                break;
            }
            said.push(line);
        }
        let serves = serves.unwrap_or_else(|| panic!("kvd did not serve: {said:#?}"));
        let rest = std::thread::spawn(move || lines.map_while(Result::ok).collect());
        Self { child, log: Some(rest), serves }
    }

    /// An address of the log line: `"<listener>":"127.0.0.1:1234"`.
    fn address(&self, listener: &str) -> &str {
        let (_, after) = self.serves.split_once(&format!("\"{listener}\":\"")).expect("there");
        after.split_once('"').expect("an end").0
    }

    /// The line that says where it serves.
    pub(crate) fn serves(&self) -> &str {
        &self.serves
    }

    /// Where gRPC is served over TCP.
    pub(crate) fn tcp(&self) -> &str {
        self.address("tcp")
    }

    /// Where metrics are served.
    pub(crate) fn admin(&self) -> &str {
        self.address("admin")
    }

    pub(crate) async fn client(&self) -> Client {
        let endpoint: Endpoint = format!("http://{}", self.tcp()).parse().expect("an endpoint");
        Client::connect(endpoint).await.expect("connect")
    }

    /// The process's id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has not ended.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("wait for kvd").is_none()
    }

    /// Sends a signal by name.
    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        let status = Command::new("sh").args(["-c", &kill]).status().expect("run kill");
        assert!(status.success(), "{kill}: {status}");
    }

    /// Waits for the end.
    pub(crate) fn wait(mut self) -> Ended {
        let code = wait(&mut self.child);
        let log = self.log.take().expect("taken once").join().expect("read the log");
        Ended { code, log: log.join("\n") }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait(child: &mut Child) -> Option<i32> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("wait for kvd") {
            return status.code();
        }
        assert!(began.elapsed() < PATIENCE, "kvd does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs `kvd serve` where it must not come to serve; its exit code and what it says.
pub(crate) fn refused(mut command: Command) -> (Option<i32>, String) {
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("start kvd");
    let mut process = Process { child, log: None, serves: String::new() };
    let code = wait(&mut process.child);
    let stderr = process.child.stderr.take().expect("piped");
    let said: Vec<_> = BufReader::new(stderr).lines().map_while(Result::ok).collect();
    (code, said.join("\n"))
}

/// Runs `kvd` with these arguments at a daemon's endpoint; its exit code, and all that it says.
pub(crate) fn run_at(endpoint: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = kvd();
    command.args(arguments).args(["--endpoint", endpoint]);
    let said = output(command);
    let text = [said.stdout, said.stderr].concat();
    (said.status.code(), String::from_utf8(text).expect("text"))
}

/// Runs a command that ends by itself.
pub(crate) fn output(mut command: Command) -> Output {
    command.output().expect("run kvd")
}
