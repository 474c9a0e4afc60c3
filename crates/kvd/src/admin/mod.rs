//! The operator's port: Prometheus metrics, liveness, readiness, and a web page. HTTP.

mod connections;
mod page;

use crate::access::{AccessPrincipal, AccessRequest, ConnectionPeer};
use crate::config::MetricsReaders;
use crate::metrics::OpenCount;
use crate::service::{Service, ServiceError};
use crate::tls::{DoorStream, DoorTls};
use crate::transport::{ServerPhase, connections_gauge};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use connections::{AdmittedConnection, OpenConnection, OpenConnections};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use kvd_core::{ErrorCode, Namespace};
use metrics::Gauge;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;

/// Prometheus' text format.
const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A bound admin socket, not yet serving.
pub struct AdminServer {
    listener: TcpListener,
    tls: Option<Arc<DoorTls>>,
    address: SocketAddr,
}

impl AdminServer {
    /// Opens the socket, which speaks TLS where that is given.
    ///
    /// # Errors
    /// What the operating system answers.
    pub(crate) async fn bind_address(
        address: SocketAddr,
        tls: Option<Arc<DoorTls>>,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self { listener, tls, address })
    }

    /// Where it is.
    #[must_use]
    pub fn bound_address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `phase` says otherwise.
    ///
    /// # Errors
    /// When the listener breaks.
    pub async fn serve_until(
        self,
        service: Arc<Service>,
        phase: watch::Receiver<ServerPhase>,
    ) -> std::io::Result<()> {
        let pages = AdminPages::of_service(service);
        let mut connections = JoinSet::new();
        let drain = ServerPhase::Draining.wait_until(phase.clone());
        tokio::pin!(drain);
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((socket, _)) => {
                        let socket = DoorStream::new(socket, self.tls.as_deref());
                        let peer = socket.socket_peer().clone();
                        if let Some(peer) = pages.admit_peer(socket, peer).await {
                            connections.spawn(peer.serve_requests(phase.clone()));
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "an admin connection could not be accepted");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = connections.join_next() => {}
                () = &mut drain => break,
            }
        }
        drop(self.listener);
        while connections.join_next().await.is_some() {}
        Ok(())
    }
}

/// The port's pages, for connections of any kind.
pub struct AdminPages {
    routes: Router,
    open: Arc<OpenConnections>,
    /// Time to send the head of each request.
    head_time: Duration,
    /// Counts connections.
    gauge: Gauge,
}

impl AdminPages {
    pub(crate) fn of_service(service: Arc<Service>) -> Self {
        let open = OpenConnections::new(service.config().admin_connections_max);
        let head_time = service.config().admin_head_timeout;
        let gauge = connections_gauge(service.metrics(), "admin");
        let routes = Router::new()
            .route("/", get(page::answer_page))
            .route("/overview.json", get(page::answer_overview))
            .route("/metrics", get(answer_metrics))
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(answer_ready))
            .layer(CompressionLayer::new().quality(CompressionLevel::Fastest))
            .with_state(service);
        Self { routes, open, head_time, gauge }
    }

    /// Answers the requests of a stream that is no socket of the port, until it ends or its time is
    /// up.
    pub async fn serve_stream<S>(&self, stream: S)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let peer = Arc::new(ConnectionPeer::of_address(None));
        let (_phase, serving) = watch::channel(ServerPhase::Serving);
        if let Some(peer) = self.admit_peer(stream, peer).await {
            peer.serve_requests(serving).await;
        }
    }

    /// Lets a connection in; none, and it is closed, where as many are being answered as may be.
    async fn admit_peer<S>(&self, stream: S, peer: Arc<ConnectionPeer>) -> Option<AdminPeer<S>> {
        let Some(admitted) = self.open.admit_socket().await else {
            tracing::warn!("admin.connections_max requests are being answered; one more is closed");
            return None;
        };
        let (head_time, count) = (self.head_time, OpenCount::new(&self.gauge));
        let routes = self.routes.clone().layer(Extension(peer));
        Some(AdminPeer { stream, routes, admitted, head_time, count })
    }
}

/// How long to wait when the system gives no socket, which is when it has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// An accepted connection.
struct AdminPeer<S> {
    stream: S,
    routes: Router,
    admitted: AdmittedConnection,
    /// Time to send the head of each request.
    head_time: Duration,
    /// Counts it while it is open.
    count: OpenCount,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> AdminPeer<S> {
    /// Answers until the peer leaves or takes too long, the connection gives way to another, or
    /// the daemon ends.
    async fn serve_requests(self, phase: watch::Receiver<ServerPhase>) {
        let Self { stream, routes, admitted, head_time, count: _count } = self;
        let mark = middleware::from_fn_with_state(admitted.open_connection().clone(), mark_answer);
        let mut builder = Builder::new(TokioExecutor::new()).http1_only();
        builder.http1().timer(TokioTimer::new()).header_read_timeout(head_time);
        let routes = TowerToHyperService::new(routes.layer(mark));
        let serving = builder.serve_connection(TokioIo::new(stream), routes);
        let drain = ServerPhase::Draining.wait_until(phase.clone());
        let cut = ServerPhase::Cut.wait_until(phase);
        tokio::pin!(serving, drain, cut);
        let mut draining = false;
        loop {
            tokio::select! {
                // What went wrong is the peer's to know.
                _ = &mut serving => return,
                () = &mut drain, if !draining => {
                    draining = true;
                    serving.as_mut().graceful_shutdown();
                }
                () = &mut cut => return,
                () = admitted.gives_way() => return,
            }
        }
    }
}

/// Tells that a request is under way, so that its connection does not give way meanwhile.
async fn mark_answer(
    State(connection): State<Arc<OpenConnection>>,
    request: Request,
    next: Next,
) -> Response {
    connection.begin_answer();
    let response = next.run(request).await;
    connection.end_answer();
    response
}

/// Lets a reader of a page pass; who it is, where principals are configured.
fn check_reader(
    service: &Service,
    peer: &ConnectionPeer,
    headers: &HeaderMap,
    rpc: &str,
) -> Result<Option<Arc<AccessPrincipal>>, ServiceError> {
    let authorization = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let namespace = Namespace::new("default").expect("a well-formed name");
    let request = AccessRequest { peer, authorization, rpc, namespace: &namespace };
    service.access_control().check_call(&request)
}

/// The answer to who may not read a page.
fn refusal_response(error: &ServiceError) -> Response {
    let body = format!("{}: {error}\n", error.code());
    match error.code() {
        ErrorCode::Unauthenticated => {
            let scheme = [(header::WWW_AUTHENTICATE, "Bearer")];
            (StatusCode::UNAUTHORIZED, scheme, body).into_response()
        }
        _ => (StatusCode::FORBIDDEN, body).into_response(),
    }
}

async fn answer_metrics(
    State(service): State<Arc<Service>>,
    Extension(peer): Extension<Arc<ConnectionPeer>>,
    headers: HeaderMap,
) -> Response {
    if service.config().access.metrics != MetricsReaders::All
        && let Err(error) = check_reader(&service, &peer, &headers, "Metrics")
    {
        return refusal_response(&error);
    }
    let render = move || {
        service.refresh_gauges();
        service.metrics().render_page()
    };
    // Thousands of models take milliseconds, which calls need not wait for.
    match tokio::task::spawn_blocking(render).await {
        Ok(page) => ([(header::CONTENT_TYPE, EXPOSITION)], page).into_response(),
        Err(error) => {
            tracing::error!(%error, "the page of metrics could not be made");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn answer_ready(State(service): State<Arc<Service>>) -> (StatusCode, String) {
    if service.is_ready() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, service.why_unready())
    }
}
