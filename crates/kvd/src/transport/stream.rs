//! Streams of requests: answered one by one, in order, until the client's end, the daemon's, or the
//! first error of a stream that did not ask to be told of errors in its answers.

use super::call::{call, status};
use super::connection::Phase;
use super::refusal::Refusals;
use crate::metrics::{Metric, Metrics, OpenCount};
use crate::service::{Call, Service, ServiceError};
use futures_core::Stream;
use kvd_core::ErrorCode;
use kvd_proto::StreamErrors;
use kvd_proto::domain::CallError;
use metrics::Gauge;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming};
use tracing::Instrument;

/// What every streaming rpc answers with.
pub(super) type ReplyStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Answers computed ahead of a slow reader; past that the stream waits for it.
const REPLIES_AHEAD_MAX: usize = 4;

/// What all streams have in common.
#[derive(Clone)]
pub(super) struct Streams {
    /// Idle ones end when the daemon drains.
    pub(super) phase: watch::Receiver<Phase>,
    refusals: Refusals,
    /// How many are open, by rpc.
    pub(super) stores: Gauge,
    pub(super) attends: Gauge,
    pub(super) loads: Gauge,
}

impl Streams {
    /// The streams of a daemon, none open.
    pub(super) fn new(
        metrics: &Metrics,
        phase: watch::Receiver<Phase>,
        refusals: Refusals,
    ) -> Self {
        let open = |rpc| {
            let open = metrics.gauge(Metric::OpenStreams, &[("rpc", rpc)]);
            open.increment(0.0);
            open
        };
        let (stores, attends, loads) =
            (open("StoreBlocks"), open("AttendStream"), open("LoadBlocks"));
        Self { phase, refusals, stores, attends, loads }
    }
}

/// Pauses between the attempts of a message that finds the device's queue or the budget of bytes in
/// flight full.
const QUEUE_PAUSE_MIN: Duration = Duration::from_millis(1);
const QUEUE_PAUSE_MAX: Duration = Duration::from_millis(50);

/// Who opened a stream, and how it is to be told of errors.
pub(super) fn opened<T>(request: &Request<T>) -> Result<(Call, StreamErrors), ServiceError> {
    Ok((call(request)?, kvd_proto::stream_errors_of(request.metadata())?))
}

/// Tries until it is not for a full queue: a stream sends one message at a time to the device, so
/// its wait is the back-pressure that a refusal would ask of it. The stream's deadline and a drain
/// end the wait.
pub(super) async fn patiently<T, Attempt>(attempt: impl Fn() -> Attempt) -> Result<T, ServiceError>
where
    Attempt: Future<Output = Result<T, ServiceError>>,
{
    let mut pause = QUEUE_PAUSE_MIN;
    loop {
        match attempt().await {
            Err(error) if error.code() == ErrorCode::QueueFull => {
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(QUEUE_PAUSE_MAX);
            }
            result => return result,
        }
    }
}

/// Puts the refusal of a message into its answer, where the stream asked for that.
pub(super) fn with_error<T>(
    reply: Result<T, Status>,
    errors: StreamErrors,
    refused: impl FnOnce(CallError) -> T,
) -> Result<T, Status> {
    match (reply, errors) {
        (Err(status), StreamErrors::PerMessage) => Ok(refused(CallError::from(&status))),
        (reply, _) => reply,
    }
}

/// Runs `answer` for each request. The task ends by itself when the client goes away.
pub(super) fn serve<Message, Reply, Answer, Future>(
    service: Arc<Service>,
    (streams, open): (&Streams, &Gauge),
    mut requests: Streaming<Message>,
    answer: Answer,
) -> ReplyStream<Reply>
where
    Message: Send + 'static,
    Reply: Send + 'static,
    Answer: Fn(Arc<Service>, Message) -> Future + Send + 'static,
    Future: std::future::Future<Output = Result<Reply, Status>> + Send,
{
    let (replies, receiver) = mpsc::channel(REPLIES_AHEAD_MAX);
    let (mut phase, refusals) = (streams.phase.clone(), streams.refusals.clone());
    let open = OpenCount::new(open);
    let answers = async move {
        let _open = open;
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
                Err(status) => {
                    refusals.count(&status);
                    Err(status)
                }
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
