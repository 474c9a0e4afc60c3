//! Sockets: bind first, serve after, drain on request.

use super::grpc::Grpc;
use super::socket::{self, SocketFile};
use crate::config::Config;
use crate::service::Service;
use kvd_proto::v1::kvd_server::KvdServer;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

/// A socket that could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("listen on {address} ({key}): {source}")]
pub struct ListenError {
    /// Where.
    pub address: String,
    /// The configuration key that says so.
    pub key: &'static str,
    /// Why not.
    pub source: std::io::Error,
}

/// Where the daemon can be reached; ports are the real ones even when 0 was asked for.
#[derive(Clone, Debug, Default)]
pub struct BoundAddresses {
    /// gRPC over TCP.
    pub tcp: Option<SocketAddr>,
    /// gRPC over a Unix socket.
    pub unix: Option<PathBuf>,
}

/// Bound sockets, not yet serving.
pub struct GrpcServer {
    tcp: Option<TcpListener>,
    unix: Option<(UnixListener, SocketFile)>,
    addresses: BoundAddresses,
}

impl GrpcServer {
    /// Opens the configured sockets.
    ///
    /// # Errors
    /// The socket that could not be opened.
    pub async fn bind(config: &Config) -> Result<Self, ListenError> {
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
            let bound = socket::bind(path).await.map_err(|source| ListenError {
                address: path.display().to_string(),
                key: "server.listen_unix",
                source,
            })?;
            addresses.unix = Some(path.clone());
            unix = Some(bound);
        }
        Ok(Self { tcp, unix, addresses })
    }

    /// Where the sockets are.
    #[must_use]
    pub fn addresses(&self) -> &BoundAddresses {
        &self.addresses
    }

    /// Serves until `stopping` turns true and the requests in flight are answered.
    ///
    /// # Errors
    /// When a listener breaks.
    pub async fn serve(
        self,
        service: Arc<Service>,
        stopping: watch::Receiver<bool>,
    ) -> Result<(), tonic::transport::Error> {
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<KvdServer<Grpc>>().await;
        let mut stopped = stopping.clone();
        let report = tokio::spawn(async move {
            if stopped.wait_for(|stop| *stop).await.is_ok() {
                health.set_not_serving::<KvdServer<Grpc>>().await;
            }
        });
        let routes = routes(&service, &stopping, health_service);
        let mut serving = JoinSet::new();
        if let Some(listener) = self.tcp {
            // The builder's TCP settings do not reach sockets that were bound elsewhere.
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            let router = builder(service.config()).add_routes(routes.clone());
            let stop = until(stopping.clone());
            serving.spawn(router.serve_with_incoming_shutdown(incoming, stop));
        }
        // Removes the file when this function ends, however it does.
        let mut _file = None;
        if let Some((listener, file)) = self.unix {
            _file = Some(file);
            let incoming = UnixListenerStream::new(listener);
            let router = builder(service.config()).add_routes(routes);
            let stop = until(stopping.clone());
            serving.spawn(router.serve_with_incoming_shutdown(incoming, stop));
        }
        let mut result = Ok(());
        while let Some(ended) = serving.join_next().await {
            result = result
                .and(ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())));
        }
        report.abort();
        result
    }
}

fn builder(config: &Config) -> Server {
    Server::builder()
        .initial_stream_window_size(config.stream_window_bytes)
        .initial_connection_window_size(config.connection_window_bytes)
}

fn routes(
    service: &Arc<Service>,
    stopping: &watch::Receiver<bool>,
    health: impl tonic::codegen::Service<
        http::Request<tonic::body::Body>,
        Response = http::Response<tonic::body::Body>,
        Error = std::convert::Infallible,
        Future: Send + 'static,
    > + tonic::server::NamedService
    + Clone
    + Send
    + Sync
    + 'static,
) -> Routes {
    let max = service.config().message_bytes_max;
    let grpc = Grpc { service: service.clone(), stopping: stopping.clone() };
    let kvd = KvdServer::new(grpc).max_decoding_message_size(max).max_encoding_message_size(max);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(kvd_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    Routes::new(kvd)
        .add_service(health)
        .add_service(reflection().build_v1().expect("the descriptor set is well-formed"))
        // Older clients still ask the alpha version.
        .add_service(reflection().build_v1alpha().expect("the descriptor set is well-formed"))
}

async fn until(mut stopping: watch::Receiver<bool>) {
    // A dropped sender means the daemon is gone: stop as well.
    let _ = stopping.wait_for(|stop| *stop).await;
}
