//! Sockets: bind first, serve after, drain on request.

use super::authority::NamedUnixStream;
use super::connection::{ConnectionLimits, IncomingConnections, PeerInfo, ServerPhase};
use super::grpc::GrpcService;
use super::health::HealthOf;
use super::layer::RequestLayer;
use super::refusal::RefusalCounters;
use super::region::{RegionHost, RegionServer};
use super::socket::{self, BoundSocket};
use super::stream::StreamState;
use crate::config::Config;
use crate::metrics::{Metric, Metrics};
use crate::service::Service;
use crate::tls::{DoorStream, DoorTls};
use kvd_proto::v1::kvd_server::KvdServer;
use metrics::Gauge;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic_health::pb::health_server::HealthServer;
use tower::Layer;

/// A socket that could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("listen on {address} ({key}): {source}{}", advise_listener(address, source))]
pub struct ListenError {
    /// Where.
    pub address: String,
    /// The configuration key that says so.
    pub key: &'static str,
    /// Why not.
    pub source: std::io::Error,
}

/// A way out of the system's own errors; those that kvd words itself have theirs.
fn advise_listener(address: &str, source: &std::io::Error) -> &'static str {
    match source.kind() {
        _ if source.raw_os_error().is_none() => "",
        ErrorKind::AddrInUse => "; another program listens there: end it, or set another address",
        ErrorKind::AddrNotAvailable => "; no network of this machine has that address",
        ErrorKind::PermissionDenied if address.parse::<SocketAddr>().is_ok() => {
            "; this user may not: set a port from 1024 on"
        }
        ErrorKind::PermissionDenied => "; this user may not write there: set a folder of its own",
        _ => "",
    }
}

/// Where the daemon can be reached; ports are the real ones even when 0 was asked for.
#[derive(Clone, Debug, Default)]
pub struct BoundAddresses {
    /// gRPC over TCP.
    pub tcp: Option<SocketAddr>,
    /// gRPC over a Unix socket.
    pub unix: Option<PathBuf>,
    /// Regions.
    pub region: Option<PathBuf>,
}

/// Bound sockets, not yet serving.
pub struct GrpcServer {
    tcp: Option<TcpListener>,
    tls: Option<Arc<DoorTls>>,
    unix: Option<BoundSocket>,
    region: Option<RegionServer>,
    addresses: BoundAddresses,
}

impl GrpcServer {
    /// Opens the configured sockets; TCP speaks TLS where that is given.
    ///
    /// # Errors
    /// The socket that could not be opened.
    pub(crate) async fn bind_sockets(
        config: &Config,
        tls: Option<Arc<DoorTls>>,
    ) -> Result<Self, ListenError> {
        let mut addresses = BoundAddresses::default();
        let mut tcp = None;
        if let Some(address) = config.listen_tcp {
            let failed = |source| ListenError {
                address: address.to_string(),
                key: "server.listen_tcp",
                source,
            };
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            addresses.tcp = Some(listener.local_addr().map_err(failed)?);
            tcp = Some(listener);
        }
        let mut unix = None;
        if let Some(path) = &config.listen_unix {
            unix = Some(bind_unix(path, "server.listen_unix").await?);
            addresses.unix = Some(path.clone());
        }
        let mut region = None;
        if let Some(path) = &config.listen_region {
            let socket = bind_unix(path, "server.listen_region").await?;
            region = Some(RegionServer { socket });
            addresses.region = Some(path.clone());
        }
        Ok(Self { tcp, tls, unix, region, addresses })
    }

    /// Where the sockets are.
    #[must_use]
    pub fn bound_addresses(&self) -> &BoundAddresses {
        &self.addresses
    }

    /// Serves until `phase` says otherwise: draining answers the requests in flight, the cut
    /// ends what is left of them.
    ///
    /// # Errors
    /// When a listener breaks.
    pub async fn serve_all(
        self,
        service: Arc<Service>,
        phase: watch::Receiver<ServerPhase>,
    ) -> Result<(), tonic::transport::Error> {
        let config = service.config();
        let connections_max = config.connections_max.unwrap_or(Semaphore::MAX_PERMITS);
        let permits = Arc::new(Semaphore::new(connections_max));
        let limits = |listener| ConnectionLimits {
            permits: permits.clone(),
            silence_max: config.keepalive_timeout,
            phase: phase.clone(),
            bytes_max: config.connection_bytes_max as u64,
            open: connections_gauge(service.metrics(), listener),
        };
        let limits = ["tcp", "unix"].map(limits);
        let [of_tcp, of_unix] = limits;
        let refusals = RefusalCounters::new(service.metrics());
        let routes = build_routes(&service, &phase, &refusals);
        let requests = RequestLayer { service: service.clone(), refusals };
        // Control calls of regions go the way of gRPC's, from behind its connections on.
        let control = requests.layer(routes.clone());
        let region_host = RegionHost { service: service.clone(), control };
        let of_regions = phase.clone();
        let mut serving = JoinSet::new();
        if let Some(listener) = self.tcp {
            // The builder's TCP settings do not reach sockets that were bound elsewhere.
            let sockets = TcpIncoming::from(listener).with_nodelay(Some(true));
            let tls = self.tls;
            let sockets = sockets
                .map(move |socket| socket.map(|socket| DoorStream::new(socket, tls.as_deref())));
            let mut server = server_builder(config).layer(requests.clone());
            let router = server.add_routes(routes.clone());
            let drain = ServerPhase::Draining.wait_until(phase.clone());
            let incoming = IncomingConnections::new(sockets, of_tcp);
            serving.spawn(router.serve_with_incoming_shutdown(incoming, drain));
        }
        if let Some(sockets) = self.unix {
            let sockets = sockets.map(|socket| socket.map(NamedUnixStream::new));
            let router = server_builder(config).layer(requests).add_routes(routes);
            let drain = ServerPhase::Draining.wait_until(phase.clone());
            let incoming = IncomingConnections::new(sockets, of_unix);
            serving.spawn(router.serve_with_incoming_shutdown(incoming, drain));
        }
        if let Some(regions) = self.region {
            let regions = regions.serve_regions(region_host, of_regions);
            serving.spawn(async {
                regions.await;
                Ok(())
            });
        }
        let mut result = Ok(());
        while let Some(ended) = serving.join_next().await {
            result = result
                .and(ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())));
        }
        result
    }
}

async fn bind_unix(path: &Path, key: &'static str) -> Result<BoundSocket, ListenError> {
    let failed = |source| ListenError { address: path.display().to_string(), key, source };
    socket::bind_path(path).await.map_err(failed)
}

fn server_builder(config: &Config) -> Server {
    Server::builder()
        .initial_stream_window_size(config.stream_window_bytes)
        .initial_connection_window_size(config.connection_window_bytes)
        .max_concurrent_streams(config.streams_per_connection_max)
        .http2_keepalive_interval(Some(config.keepalive_interval))
        .http2_keepalive_timeout(Some(config.keepalive_timeout))
        .trace_fn(peer_span)
}

/// The span around each request, which says where it comes from; lines inside carry it.
fn peer_span(request: &http::Request<()>) -> tracing::Span {
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return tracing::Span::none();
    }
    let tcp = request.extensions().get::<PeerInfo<TcpConnectInfo>>();
    let tcp = tcp.and_then(|peer| peer.info.remote_addr());
    let peer = tcp.map_or_else(|| "unix".to_owned(), |address| address.to_string());
    tracing::debug_span!("request", peer)
}

/// How many connections of a listener are open, by what it listens on.
pub(crate) fn connections_gauge(metrics: &Metrics, listener: &str) -> Gauge {
    let open = metrics.gauge(Metric::Connections, &[("listener", listener)]);
    open.increment(0.0);
    open
}

fn build_routes(
    service: &Arc<Service>,
    phase: &watch::Receiver<ServerPhase>,
    refusals: &RefusalCounters,
) -> Routes {
    let max = service.config().message_bytes_max;
    let streams = StreamState::new(service.metrics(), phase.clone(), refusals.clone());
    let grpc = GrpcService { service: service.clone(), streams };
    let health = HealthOf { service: service.clone(), phase: phase.clone() };
    let kvd = KvdServer::new(grpc)
        .max_decoding_message_size(max)
        .max_encoding_message_size(max)
        .accept_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Gzip);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(kvd_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    Routes::new(kvd)
        .add_service(HealthServer::new(health))
        .add_service(reflection().build_v1().expect("the descriptor set is well-formed"))
        // Older clients still ask the alpha version.
        .add_service(reflection().build_v1alpha().expect("the descriptor set is well-formed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_taken_says_what_to_do_and_our_own_words_stand_alone() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let error = |source| ListenError { address: address.to_string(), key: "k", source };
        let said = error(std::net::TcpListener::bind(address).unwrap_err()).to_string();
        assert!(said.ends_with("end it, or set another address"), "{said}");
        let denied = || std::io::Error::from_raw_os_error(rustix::io::Errno::ACCESS.raw_os_error());
        let said = error(denied()).to_string();
        assert!(said.contains("a port from 1024 on"), "{said}");
        let path = "/nowhere/kvd.sock".to_owned();
        let said = ListenError { address: path, key: "k", source: denied() }.to_string();
        assert!(said.contains("a folder of its own") && !said.contains("port"), "{said}");
        let own = std::io::Error::new(ErrorKind::AddrInUse, "another process serves this socket");
        assert!(error(own).to_string().ends_with("serves this socket"));
    }
}
