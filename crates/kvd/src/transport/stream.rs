//! Streams of requests: answered one by one, in order, until the client's end, the daemon's, or the
//! first error of a stream that did not ask to be told of errors in its answers.

use super::bytes::ByteMeter;
use super::call::{find_meter, read_call, wire_status};
use super::connection::ServerPhase;
use super::refusal::RefusalCounters;
use crate::metrics::{Metric, Metrics, OpenCount};
use crate::service::{CallContext, InFlight, Service, ServiceError};
use futures_core::Stream;
use kvd_core::ErrorCode;
use kvd_proto::StreamErrors;
use kvd_proto::domain::CallError;
use metrics::Gauge;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{mpsc, watch};
use tonic::{Request, Status, Streaming};
use tracing::Instrument;

/// The answers of a streaming rpc.
pub(super) type ReplyStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Answers computed ahead of a slow reader; past that the stream waits for it.
const REPLIES_AHEAD_MAX: usize = 4;

/// State that all streams share.
#[derive(Clone)]
pub(super) struct StreamState {
    /// Idle ones end when the daemon drains.
    pub(super) phase: watch::Receiver<ServerPhase>,
    refusals: RefusalCounters,
    /// How many are open, by rpc.
    pub(super) stores: Gauge,
    pub(super) attends: Gauge,
    pub(super) loads: Gauge,
    pub(super) holds: Gauge,
    pub(super) watches: Gauge,
}

impl StreamState {
    /// The streams of a daemon, none open.
    pub(super) fn new(
        metrics: &Metrics,
        phase: watch::Receiver<ServerPhase>,
        refusals: RefusalCounters,
    ) -> Self {
        let open = |rpc| {
            let open = metrics.gauge(Metric::OpenStreams, &[("rpc", rpc)]);
            open.increment(0.0);
            open
        };
        let (stores, attends) = (open("StoreBlocks"), open("AttendStream"));
        let (loads, holds) = (open("LoadBlocks"), open("HoldSession"));
        let watches = open("WatchBlocks");
        Self { phase, refusals, stores, attends, loads, holds, watches }
    }
}

/// A stream that was opened: by whom, and how it is to be told of errors.
pub(super) struct OpenedStream {
    pub(super) call: CallContext,
    pub(super) errors: StreamErrors,
    /// Meter of its bytes.
    pub(super) meter: ByteMeter,
}

impl OpenedStream {
    /// Reads a stream's request.
    pub(super) fn from_request<T>(request: &Request<T>) -> Result<Self, ServiceError> {
        let errors = kvd_proto::stream_errors_of(request.metadata())?;
        Ok(Self { call: wait_for_queue(read_call(request)?), errors, meter: find_meter(request) })
    }
}

/// Kind of a stream of requests.
pub(super) struct StreamKind<'a> {
    pub(super) streams: &'a StreamState,
    /// How many of its rpc are open.
    pub(super) open: &'a Gauge,
    pub(super) meter: ByteMeter,
}

/// An answer on its way, and its share of the budgets, which it keeps until it is sent.
pub(super) struct StreamAnswer<T> {
    pub(super) reply: Result<T, Status>,
    pub(super) held: Option<InFlight>,
}

impl<T> From<Result<T, Status>> for StreamAnswer<T> {
    fn from(reply: Result<T, Status>) -> Self {
        Self { reply, held: None }
    }
}

/// Answers in the order they are sent.
pub(super) struct AnswerStream<T> {
    pub(super) receiver: mpsc::Receiver<StreamAnswer<T>>,
    pub(super) meter: ByteMeter,
}

impl<T> Stream for AnswerStream<T> {
    type Item = Result<T, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        this.receiver.poll_recv(context).map(|answer| {
            let StreamAnswer { reply, held } = answer?;
            // It is encoded next.
            this.meter.hold_answer(held);
            Some(reply)
        })
    }
}

/// The call of a stream: one message at a time goes to the device, so its wait in the queue is the
/// back-pressure that a refusal would ask of it.
pub(super) fn wait_for_queue(call: CallContext) -> CallContext {
    CallContext { waits_for_queue: true, ..call }
}

/// Puts the refusal of a message into its answer, where the stream asked for that. A drain and the
/// deadline end the stream all the same.
pub(super) fn with_error<T>(
    reply: Result<T, Status>,
    errors: StreamErrors,
    refused: impl FnOnce(CallError) -> T,
) -> Result<T, Status> {
    match (reply, errors) {
        (Err(status), StreamErrors::PerMessage) => {
            let error = CallError::from(&status);
            match error.code {
                ErrorCode::ShuttingDown | ErrorCode::DeadlineExceeded => Err(status),
                _ => Ok(refused(error)),
            }
        }
        (reply, _) => reply,
    }
}

/// Runs `answer` for each request. The task ends by itself when the client goes away.
pub(super) fn serve_stream<Message, Reply, Work, Future>(
    service: Arc<Service>,
    to: StreamKind<'_>,
    mut requests: Streaming<Message>,
    answer: Work,
) -> ReplyStream<Reply>
where
    Message: Send + 'static,
    Reply: Send + 'static,
    Work: Fn(Arc<Service>, Message) -> Future + Send + 'static,
    Future: std::future::Future<Output = StreamAnswer<Reply>> + Send,
{
    let (replies, receiver) = mpsc::channel(REPLIES_AHEAD_MAX);
    let StreamKind { streams, open, meter } = to;
    let (mut phase, refusals) = (streams.phase.clone(), streams.refusals.clone());
    let (open, messages) = (OpenCount::new(open), meter.clone());
    let answers = async move {
        let _open = open;
        loop {
            let request = tokio::select! {
                // Requests that have arrived are answered (if only with SHUTTING_DOWN).
                biased;
                request = requests.message() => request,
                () = replies.closed() => return,
                _ = phase.wait_for(|now| *now >= ServerPhase::Draining) => Err(shutting_down()),
            };
            let reply = match request {
                Ok(None) => return,
                Ok(Some(request)) => tokio::select! {
                    // What has not begun when the client goes away is dropped.
                    reply = answer(service.clone(), request) => reply,
                    () = replies.closed() => return,
                },
                Err(status) => {
                    refusals.count_status(&status);
                    Err(status).into()
                }
            };
            messages.end_message();
            let ended = reply.reply.is_err();
            if replies.send(reply).await.is_err() || ended {
                return;
            }
        }
    };
    // Lines of the log say whose stream it is.
    tokio::spawn(answers.in_current_span());
    Box::pin(AnswerStream { receiver, meter })
}

/// The end of a stream that a drain ends.
pub(super) fn shutting_down() -> Status {
    wire_status(&ServiceError::new(
        ErrorCode::ShuttingDown,
        "the daemon drains; reconnect elsewhere",
    ))
}
