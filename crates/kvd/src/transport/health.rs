//! `grpc.health.v1`: the daemon as a whole and its one service are healthy together.

use super::connection::ServerPhase;
use crate::service::Service;
use kvd_proto::v1::kvd_server;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// The generated trait over [`Service::is_ready`]. The one that tonic brings would leave watches
/// open for the whole of a drain.
pub(super) struct HealthOf {
    pub(super) service: Arc<Service>,
    pub(super) phase: watch::Receiver<ServerPhase>,
}

impl HealthOf {
    fn check_name(request: &HealthCheckRequest) -> Result<(), Status> {
        match request.service.as_str() {
            "" | kvd_server::SERVICE_NAME => Ok(()),
            _ => Err(Status::not_found("service not registered")),
        }
    }
}

fn health_response(ready: bool) -> HealthCheckResponse {
    let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for HealthOf {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        Self::check_name(request.get_ref())?;
        Ok(Response::new(health_response(self.service.is_ready())))
    }

    type WatchStream = ReceiverStream<Result<HealthCheckResponse, Status>>;

    /// Says when the daemon begins to drain, and ends then: a watcher has nothing more to learn,
    /// and must not hold the drain.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Self::check_name(request.get_ref())?;
        // Room for both answers, so that sending never waits for the reader.
        let (answers, receiver) = mpsc::channel(2);
        let (ready, phase) = (self.service.is_ready(), self.phase.clone());
        tokio::spawn(async move {
            if ready {
                let _ = answers.send(Ok(health_response(true))).await;
                tokio::select! {
                    () = answers.closed() => return,
                    () = ServerPhase::Draining.wait_until(phase) => {}
                }
            }
            let _ = answers.send(Ok(health_response(false))).await;
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}
