//! The daemon that `kvd bench transport` measures, in this process.

use super::echo::open_echo;
use crate::config::{Config, ConfigOverrides};
use crate::daemon::{Daemon, RunningDaemon};
use crate::service::{AttendReply, CallContext};
use kvd_bench::{BenchError, BenchedDaemon, DeviceClock, EchoCaller, EchoPlan};
use kvd_client::{AttendBatch, Attended};
use kvd_core::Namespace;
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

    fn open_echo(
        &self,
        runtime: &Runtime,
        plan: EchoPlan<'_>,
    ) -> Result<Box<dyn EchoCaller>, BenchError> {
        open_echo(runtime, &plan)
    }

    fn attend_inside(&self, runtime: &Runtime, batch: AttendBatch) -> Result<Attended, BenchError> {
        let namespace = Namespace::new("default").map_err(BenchError::failed_step("namespace"))?;
        let call = CallContext::new(namespace);
        let reply = runtime.block_on(self.0.service().attend_batch(&call, batch));
        let AttendReply { out, lse, .. } = reply.map_err(BenchError::failed_step("attend"))?;
        Ok(Attended { out: out.into(), lse, query_errors: Vec::new() })
    }

    fn device_clock(&self) -> DeviceClock {
        let page = self.0.service().metrics().render_page();
        let sum_of = |name: &str| -> f64 {
            let values = page.lines().filter(|line| line.starts_with(name));
            let values = values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            values.sum()
        };
        let calls = sum_of("kvd_attend_seconds_count");
        DeviceClock { calls, seconds: sum_of("kvd_attend_seconds_sum") }
    }

    fn drain_daemon(self: Box<Self>, runtime: &Runtime) {
        runtime.block_on(self.0.drain());
    }
}
