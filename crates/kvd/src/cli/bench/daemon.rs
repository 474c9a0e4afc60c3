//! The daemon that `kvd bench transport` measures, in this process.

use crate::config::{Config, ConfigOverrides};
use crate::daemon::{Daemon, RunningDaemon};
use kvd_bench::{BenchError, BenchedDaemon};
use std::net::SocketAddr;
use tokio::runtime::Runtime;

struct InProcessDaemon(RunningDaemon);

/// Starts a daemon with these settings and no file.
pub(super) fn start_daemon(
    runtime: &Runtime,
    flags: Vec<(String, String)>,
) -> Result<Box<dyn BenchedDaemon>, BenchError> {
    let overrides = ConfigOverrides { file: None, environment: false, flags };
    let config = Config::load(&overrides).map_err(BenchError::failed_step("configuration"))?;
    let daemon = runtime.block_on(Daemon::build(config));
    let daemon = daemon.map_err(BenchError::failed_step("daemon"))?;
    let _inside = runtime.enter();
    Ok(Box::new(InProcessDaemon(daemon.spawn())))
}

impl BenchedDaemon for InProcessDaemon {
    fn tcp_address(&self) -> Option<SocketAddr> {
        self.0.bound_addresses().tcp
    }

    fn drain_daemon(self: Box<Self>, runtime: &Runtime) {
        runtime.block_on(self.0.drain());
    }
}
