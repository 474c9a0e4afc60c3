//! The operator's port: Prometheus metrics, liveness and readiness. Plain HTTP, no tenants.

use crate::service::Service;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;

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

    /// Serves until `stopping` turns true.
    ///
    /// # Errors
    /// When the listener breaks.
    pub async fn serve(
        self,
        service: Arc<Service>,
        mut stopping: watch::Receiver<bool>,
    ) -> std::io::Result<()> {
        let routes = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(readyz))
            .with_state(service);
        axum::serve(self.listener, routes)
            .with_graceful_shutdown(async move {
                let _ = stopping.wait_for(|stop| *stop).await;
            })
            .await
    }
}

async fn metrics(State(service): State<Arc<Service>>) -> impl IntoResponse {
    service.refresh_gauges().await;
    (
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
        service.metrics().render(),
    )
}

async fn readyz(State(service): State<Arc<Service>>) -> (StatusCode, &'static str) {
    if service.ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "draining or failed\n")
    }
}
