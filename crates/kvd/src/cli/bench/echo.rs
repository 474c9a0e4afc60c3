//! The least that gRPC costs: a server that answers with so many zeros, and one call after another
//! to it.

use crate::transport::encoded_codec::EncodedCodec;
use bytes::Bytes;
use http::uri::PathAndQuery;
use kvd_bench::{BenchError, EchoCaller, EchoPlan};
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::server::{NamedService, UnaryService};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tower::Service;

/// Answers every call with the same bytes.
#[derive(Clone)]
struct EchoService {
    answer: Bytes,
}

impl NamedService for EchoService {
    const NAME: &'static str = "kvd.bench.Echo";
}

impl UnaryService<Bytes> for EchoService {
    type Response = Bytes;
    type Future = Ready<Result<Response<Bytes>, Status>>;

    fn call(&mut self, _: Request<Bytes>) -> Self::Future {
        ready(Ok(Response::new(self.answer.clone())))
    }
}

/// An answer in the making.
type EchoFuture = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl Service<http::Request<Body>> for EchoService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = EchoFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> EchoFuture {
        let service = self.clone();
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(EncodedCodec);
            Ok(grpc.unary(service, request).await)
        })
    }
}

/// A connection to the server, which ends with it.
struct EchoClient {
    grpc: Grpc<Channel>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Drop for EchoClient {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl EchoCaller for EchoClient {
    fn call_echo(&mut self, runtime: &Runtime, message: Bytes) -> Result<Bytes, BenchError> {
        let path = PathAndQuery::from_static("/kvd.bench.Echo/Ask");
        let answer = runtime.block_on(async {
            let ready = self.grpc.ready().await;
            ready.map_err(|error| Status::unavailable(error.to_string()))?;
            self.grpc.unary(Request::new(message), path, EncodedCodec).await
        });
        Ok(answer.map_err(BenchError::failed_step("echo"))?.into_inner())
    }
}

/// Starts the server on a socket, and connects to it.
pub(super) fn open_echo(
    runtime: &Runtime,
    plan: &EchoPlan<'_>,
) -> Result<Box<dyn EchoCaller>, BenchError> {
    let failed = BenchError::failed_step::<std::io::Error>("echo");
    let service = EchoService { answer: vec![0; plan.answer_bytes].into() };
    let _inside = runtime.enter();
    let listener = UnixListener::bind(plan.socket).map_err(failed)?;
    let serving = Server::builder()
        .add_service(service)
        .serve_with_incoming(UnixListenerStream::new(listener));
    let server = runtime.spawn(serving);
    let endpoint = Endpoint::try_from(format!("unix:{}", plan.socket.display()));
    let endpoint = endpoint.map_err(BenchError::failed_step("echo"))?;
    let channel = runtime.block_on(endpoint.connect()).map_err(BenchError::failed_step("echo"))?;
    Ok(Box::new(EchoClient { grpc: Grpc::new(channel), server }))
}
