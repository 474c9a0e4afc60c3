//! The operator's port: Prometheus metrics, liveness and readiness. Plain HTTP, no tenants.

mod connections;

use crate::service::Service;
use crate::transport::Phase;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use connections::{Admitted, OpenConnection, OpenConnections};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A bound admin socket, not yet serving.
pub struct AdminServer {
    listener: TcpListener,
    address: SocketAddr,
}

impl AdminServer {
    /// Opens the socket.
    ///
    /// # Errors
    /// What the operating system answers.
    pub async fn bind(address: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `phase` says otherwise.
    ///
    /// # Errors
    /// When the listener breaks.
    pub async fn serve(
        self,
        service: Arc<Service>,
        phase: watch::Receiver<Phase>,
    ) -> std::io::Result<()> {
        let open = OpenConnections::new(service.config().admin_connections_max);
        let head_time = service.config().admin_head_timeout;
        let routes = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(readyz))
            .with_state(service);
        let mut connections = JoinSet::new();
        let drain = Phase::Draining.reached(phase.clone());
        tokio::pin!(drain);
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((socket, _)) => match open.admit().await {
                        Some(admitted) => {
                            let routes = routes.clone();
                            let peer = Peer { socket, admitted, head_time };
                            connections.spawn(peer.serve(routes, phase.clone()));
                        }
                        None => tracing::warn!(
                            "admin.connections_max requests are being answered; one more is closed"
                        ),
                    },
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

/// How long to wait when the system gives no socket, which is when it has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// An accepted connection.
struct Peer {
    socket: TcpStream,
    admitted: Admitted,
    /// Time to send the head of each request.
    head_time: Duration,
}

impl Peer {
    /// Answers until the peer leaves or takes too long, the connection gives way to another, or
    /// the daemon ends.
    async fn serve(self, routes: Router, phase: watch::Receiver<Phase>) {
        let Self { socket, admitted, head_time } = self;
        let mark = middleware::from_fn_with_state(admitted.connection().clone(), mark_answer);
        let mut builder = Builder::new(TokioExecutor::new()).http1_only();
        builder.http1().timer(TokioTimer::new()).header_read_timeout(head_time);
        let routes = TowerToHyperService::new(routes.layer(mark));
        let serving = builder.serve_connection(TokioIo::new(socket), routes);
        let drain = Phase::Draining.reached(phase.clone());
        let cut = Phase::Cut.reached(phase);
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

async fn metrics(State(service): State<Arc<Service>>) -> impl IntoResponse {
    service.refresh_gauges();
    (
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
        service.metrics().render(),
    )
}

async fn readyz(State(service): State<Arc<Service>>) -> (StatusCode, String) {
    if service.ready() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, service.why_unready())
    }
}
