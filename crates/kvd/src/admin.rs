//! The operator's port: Prometheus metrics, liveness and readiness. Plain HTTP, no tenants.

use crate::service::Service;
use crate::transport::{Connection, Phase, connections};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use metrics::Gauge;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;

/// Prometheus' text format.
const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";

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
        let routes = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(readyz))
            .layer(CompressionLayer::new().quality(CompressionLevel::Fastest))
            .with_state(service.clone());
        let open = connections(service.metrics(), "admin");
        let listener = AdminListener { listener: self.listener, phase: phase.clone(), open };
        axum::serve(listener, routes).with_graceful_shutdown(Phase::Draining.reached(phase)).await
    }
}

/// Connections that end with the daemon, whatever the scraper does.
struct AdminListener {
    listener: TcpListener,
    phase: watch::Receiver<Phase>,
    open: Gauge,
}

impl Listener for AdminListener {
    type Io = Connection<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (socket, peer) = Listener::accept(&mut self.listener).await;
        (Connection::new(socket, self.phase.clone(), &self.open), peer)
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

async fn metrics(State(service): State<Arc<Service>>) -> Response {
    let render = move || {
        service.refresh_gauges();
        service.metrics().render()
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

async fn readyz(State(service): State<Arc<Service>>) -> (StatusCode, String) {
    if service.ready() {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, service.why_unready())
    }
}
