//! The part of `kvd demo` that kills a daemon: two processes of this program, one after the other,
//! on one folder.

use super::CliError;
use anyhow::Context;
use kvd_client::{Client, Endpoint};
use kvd_eval::demo::{DemoOptions, RestartDemo, RestartReport};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a daemon to serve.
const START_TIME: Duration = Duration::from_secs(30);
const LOOK_TIME: Duration = Duration::from_millis(20);

/// A folder of this process, removed with all in it.
struct DemoFolder {
    path: PathBuf,
}

impl DemoFolder {
    fn make_folder() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("kvd-demo-{}", std::process::id()));
        // One that is there is somebody else's.
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }
}

impl Drop for DemoFolder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a folder of the demo stays");
        }
    }
}

/// A daemon in a process of its own; killed when it is dropped.
struct ServedDaemon {
    child: Child,
    endpoint: Endpoint,
}

impl ServedDaemon {
    /// Starts this program as a daemon with its disk in a folder, and waits until it serves.
    async fn start_daemon(folder: &Path) -> anyhow::Result<Self> {
        let socket = folder.join("kvd.sock");
        let mut command = Command::new(std::env::current_exe()?);
        for (name, _) in std::env::vars_os() {
            // Settings are the demo's own.
            if name.to_string_lossy().starts_with("KVD_") {
                command.env_remove(name);
            }
        }
        command.args(["serve", "--listen", "", "--admin", "", "--pool", "256 MiB"]);
        command.arg("--unix").arg(&socket);
        let path = format!("cache.disk.path={}", folder.join("cache").display());
        for setting in [
            &path[..],
            "cache.disk.bytes=64 MiB",
            "cache.disk.segment_bytes=16 MiB",
            "cache.disk.reserve_free_bytes=0 B",
            "log.filter=error",
        ] {
            command.args(["--set", setting]);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let endpoint: Endpoint = format!("unix:{}", socket.display()).parse()?;
        let mut daemon = Self { child, endpoint };
        let until = Instant::now() + START_TIME;
        loop {
            if let Some(status) = daemon.child.try_wait()? {
                anyhow::bail!("it ended with {status}");
            }
            match Client::connect(daemon.endpoint.clone()).await {
                Ok(_) => return Ok(daemon),
                Err(error) if Instant::now() > until => return Err(error.into()),
                Err(_) => tokio::time::sleep(LOOK_TIME).await,
            }
        }
    }

    /// Ends it as a crash would: nothing is written any more.
    fn kill_daemon(mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }
}

impl Drop for ServedDaemon {
    fn drop(&mut self) {
        // It may have ended before.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// Publishes a prompt in one daemon, kills it, and goes on in the next.
pub(super) async fn show_restart(options: &DemoOptions) -> Result<RestartReport, CliError> {
    let folder = DemoFolder::make_folder().context("a folder for the demo's daemon")?;
    let mut prompt = RestartDemo::load_prompt(options)?;
    let start = || async {
        ServedDaemon::start_daemon(&folder.path).await.context("start a daemon of the demo")
    };
    let first = start().await?;
    prompt.publish_prompt(&first.endpoint).await?;
    first.kill_daemon().context("kill a daemon of the demo")?;
    let second = start().await?;
    Ok(prompt.resume_prompt(&second.endpoint).await?)
}
