//! Streams of requests: answered one by one, in order, until the first error, the client's end,
//! or the daemon's.

use super::call::status;
use super::connection::Phase;
use crate::service::{Service, ServiceError};
use futures_core::Stream;
use kvd_core::ErrorCode;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use tracing::Instrument;

/// What every streaming rpc answers with.
pub(super) type ReplyStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Answers computed ahead of a slow reader; past that the stream waits for it.
const REPLIES_AHEAD_MAX: usize = 4;

/// Runs `answer` for each request. The task ends by itself when the client goes away.
pub(super) fn serve<Request, Reply, Answer, Future>(
    service: Arc<Service>,
    mut phase: watch::Receiver<Phase>,
    mut requests: Streaming<Request>,
    answer: Answer,
) -> ReplyStream<Reply>
where
    Request: Send + 'static,
    Reply: Send + 'static,
    Answer: Fn(Arc<Service>, Request) -> Future + Send + 'static,
    Future: std::future::Future<Output = Result<Reply, Status>> + Send,
{
    let (replies, receiver) = mpsc::channel(REPLIES_AHEAD_MAX);
    let answers = async move {
        loop {
            let request = tokio::select! {
                // Requests that have arrived are answered (if only with SHUTTING_DOWN).
                biased;
                request = requests.message() => request,
                () = replies.closed() => return,
                _ = phase.wait_for(|now| *now >= Phase::Draining) => Err(shutting_down()),
            };
            let reply = match request {
                Ok(None) => return,
                Ok(Some(request)) => answer(service.clone(), request).await,
                Err(status) => Err(status),
            };
            let ended = reply.is_err();
            if replies.send(reply).await.is_err() || ended {
                return;
            }
        }
    };
    // Lines of the log say whose stream it is.
    tokio::spawn(answers.in_current_span());
    Box::pin(ReceiverStream::new(receiver))
}

fn shutting_down() -> Status {
    status(&ServiceError::new(ErrorCode::ShuttingDown, "the daemon drains; reconnect elsewhere"))
}
