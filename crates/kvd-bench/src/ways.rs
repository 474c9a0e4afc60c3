//! Ways of one attend to a daemon and back, and the two ends of the scale: gRPC that does nothing,
//! and the daemon's service without a way to it.

use crate::BenchError;
use bytes::Bytes;
use kvd_client::{AttendBatch, AttendRing, AttendStream, Attended, Client, RegionClient};
use std::net::SocketAddr;
use std::path::Path;
use tokio::runtime::Runtime;

/// Starts a daemon in this process with these settings, on a runtime.
pub type DaemonStarter =
    fn(&Runtime, Vec<(String, String)>) -> Result<Box<dyn BenchedDaemon>, BenchError>;

/// A bare server of gRPC to be.
#[derive(Clone, Copy, Debug)]
pub struct EchoPlan<'a> {
    /// The socket.
    pub socket: &'a Path,
    /// Bytes of each answer.
    pub answer_bytes: usize,
}

/// A bare server of gRPC, which does nothing with what it is sent.
pub trait EchoCaller {
    /// One call.
    ///
    /// # Errors
    /// When the server does not answer.
    fn call_echo(&mut self, runtime: &Runtime, message: Bytes) -> Result<Bytes, BenchError>;
}

/// Time of a device for attends, so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceClock {
    /// Attends.
    pub calls: f64,
    /// Seconds that the device's backend took for them.
    pub seconds: f64,
}

/// A daemon that is measured.
pub trait BenchedDaemon {
    /// Where it listens on TCP.
    fn tcp_address(&self) -> Option<SocketAddr>;

    /// Starts a bare server beside it.
    ///
    /// # Errors
    /// When the socket is not to be had.
    fn open_echo(
        &self,
        runtime: &Runtime,
        plan: EchoPlan<'_>,
    ) -> Result<Box<dyn EchoCaller>, BenchError>;

    /// Calls its service from this thread, without a transport.
    ///
    /// # Errors
    /// As the rpc.
    fn attend_inside(&self, runtime: &Runtime, batch: AttendBatch) -> Result<Attended, BenchError>;

    /// Device time of its attends.
    fn device_clock(&self) -> DeviceClock;

    /// Ends it, and waits until it has ended.
    fn drain_daemon(self: Box<Self>, runtime: &Runtime);
}

/// A client's way to the daemon.
pub(crate) enum TransportWay {
    Echo(Box<dyn EchoCaller>),
    Unary(&'static str, Client),
    Stream(AttendStream),
    Region(RegionClient),
    Ring(Box<AttendRing>),
    Inside,
}

/// The daemon that calls are made to, and how.
#[derive(Clone, Copy)]
pub(crate) struct CallSite<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) daemon: &'a dyn BenchedDaemon,
    /// Channels of keys and values.
    pub(crate) dims: [u32; 2],
}

impl TransportWay {
    pub(crate) fn way_name(&self) -> &'static str {
        match self {
            Self::Echo(_) => "bare gRPC",
            Self::Unary(name, _) => name,
            Self::Stream(_) => "unix stream",
            Self::Region(_) => "region",
            Self::Ring(_) => "ring",
            Self::Inside => "in process",
        }
    }

    /// One call; what it answers, if it is an attend.
    pub(crate) fn attend_once(
        &mut self,
        site: CallSite<'_>,
        batch: &AttendBatch,
    ) -> Result<Option<Attended>, BenchError> {
        let CallSite { runtime, daemon, dims } = site;
        let failed = BenchError::failed_step("attend");
        match self {
            Self::Echo(echo) => return echo.call_echo(runtime, batch.q.clone()).map(|_| None),
            Self::Unary(_, client) => {
                runtime.block_on(client.attend_batch(batch.clone())).map_err(failed)
            }
            Self::Stream(stream) => {
                runtime.block_on(stream.attend_batch(batch.clone())).map_err(failed)
            }
            Self::Region(region) => region.attend_once(batch.clone(), dims).map_err(failed),
            Self::Ring(ring) => ring.attend_once(batch, dims).map_err(failed),
            Self::Inside => daemon.attend_inside(runtime, batch.clone()),
        }
        .map(Some)
    }
}
