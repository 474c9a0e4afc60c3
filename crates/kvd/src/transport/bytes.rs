//! Bytes of messages at both ends of a request: those of a message are taken from the budgets as
//! soon as its length is known, before any of it is kept, and those of an answer are given back
//! when the last of it has been written.

use super::call::wire_status;
use crate::access::PrincipalCall;
use crate::service::{ByteBudgets, InFlight, ServiceError};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use kvd_core::ErrorCode;
use metrics::Counter;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::time::Sleep;
use tonic::Status;

/// Bytes before each message of gRPC: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// Messages of so many bytes take nothing: health checks and closing are never refused for want of
/// room, and how many there are is bounded by the streams that are open.
const FREE_BYTES: u64 = 1024;

/// Most that gzip makes of a byte.
const GZIP_RATIO_MAX: u64 = 1032;

/// Shares of one request.
#[derive(Clone, Default)]
pub(super) struct ByteMeter(Arc<Mutex<MeterShares>>);

#[derive(Default)]
struct MeterShares {
    /// Share of the message at work.
    message: Option<InFlight>,
    /// Shares of answers that are encoded and not handed on.
    answers: AnswerShares,
}

/// Shares of the answers in some bytes: of a unary call there is one.
type AnswerShares = SmallVec<[InFlight; 1]>;

impl ByteMeter {
    /// Gives back what the message took: it is answered.
    pub(super) fn end_message(&self) {
        let message = self.0.lock().message.take();
        drop(message);
    }

    /// Keeps the share of an answer, which is encoded next, until it is written.
    pub(super) fn hold_answer(&self, answer: Option<InFlight>) {
        self.0.lock().answers.extend(answer);
    }

    /// A message has come: it has taken this, and the one before is done with.
    fn admit_message(&self, share: InFlight) {
        let before = self.0.lock().message.replace(share);
        drop(before);
    }
}

/// Limits of a request's messages.
#[derive(Clone)]
pub(super) struct MessageLimits {
    pub(super) budgets: ByteBudgets,
    /// Larger ones are refused by gRPC itself.
    pub(super) message_bytes_max: u64,
    /// Time for a message to arrive once its length is known.
    pub(super) message_time: Duration,
    /// Whether a message waits where there is no room for it, as those of streams do.
    pub(super) waits: bool,
    pub(super) refused: Counter,
}

/// Whether a message has room.
enum MessageAdmission {
    /// None once it was said.
    Decided(Option<Result<InFlight, ServiceError>>),
    Waits(Pin<Box<dyn Future<Output = Result<InFlight, ServiceError>> + Send>>),
}

impl Future for MessageAdmission {
    type Output = Result<InFlight, ServiceError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Waits(share) => share.as_mut().poll(context),
            Self::Decided(share) => share.take().map_or(Poll::Pending, Poll::Ready),
        }
    }
}

/// A request's body, whose messages take their bytes from the budgets.
pub(super) struct MeteredBody {
    inner: tonic::body::Body,
    limits: MessageLimits,
    meter: ByteMeter,
    /// Rest of a frame that is not passed on yet.
    pending: Bytes,
    prefix: Bytes,
    /// Bytes of the message that are still to come.
    left: u64,
    admission: Option<MessageAdmission>,
    /// When the message must be there.
    deadline: Option<Instant>,
    /// Wakes at the deadline, once the message is waited for.
    timer: Option<Pin<Box<Sleep>>>,
    failed: bool,
}

impl MeteredBody {
    pub(super) fn new(inner: tonic::body::Body, limits: MessageLimits, meter: ByteMeter) -> Self {
        Self {
            inner,
            limits,
            meter,
            pending: Bytes::new(),
            prefix: Bytes::new(),
            left: 0,
            admission: None,
            deadline: None,
            timer: None,
            failed: false,
        }
    }

    fn fail_body(&mut self, error: &ServiceError) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.failed = true;
        self.limits.refused.increment(1);
        self.meter.end_message();
        Poll::Ready(Some(Err(wire_status(error))))
    }

    /// Passes the prefix on: the message may come.
    fn pass_prefix(&mut self) -> Frame<Bytes> {
        Frame::data(std::mem::take(&mut self.prefix))
    }

    /// Looks at a prefix that is whole. A message that gRPC refuses for its length takes nothing.
    fn begin_message(&mut self) {
        let (flag, length) = (self.prefix[0], &self.prefix[1..]);
        let length = length.iter().fold(0, |length, byte| length << 8 | u64::from(*byte));
        self.left = length;
        let max = self.limits.message_bytes_max;
        let bytes = match flag {
            0 => length,
            // The message and what it is decompressed to.
            _ => length.saturating_add(length.saturating_mul(GZIP_RATIO_MAX).min(max)),
        };
        let bytes = if length > max || bytes <= FREE_BYTES { 0 } else { bytes };
        let budgets = self.limits.budgets.clone();
        self.admission = Some(if self.limits.waits {
            // The message before is answered by now, unless it is none of kvd's.
            self.meter.end_message();
            MessageAdmission::Waits(Box::pin(async move { budgets.wait_share(bytes).await }))
        } else {
            MessageAdmission::Decided(Some(budgets.take_share(bytes)))
        });
    }

    /// The next piece of what has arrived, if it may be passed on.
    fn next_piece(&mut self) -> Option<Frame<Bytes>> {
        if self.left > 0 {
            let most = usize::try_from(self.left).unwrap_or(usize::MAX);
            let piece = self.pending.split_to(most.min(self.pending.len()));
            self.left -= piece.len() as u64;
            if self.left == 0 {
                (self.deadline, self.timer) = (None, None);
            }
            return Some(Frame::data(piece));
        }
        let wanted = PREFIX_BYTES - self.prefix.len();
        let piece = self.pending.split_to(wanted.min(self.pending.len()));
        self.prefix = match piece.len() == PREFIX_BYTES {
            true => piece,
            // A copy: a few bytes that wait for the others must not keep a frame.
            false => [&self.prefix[..], &piece].concat().into(),
        };
        if self.prefix.len() == PREFIX_BYTES {
            self.begin_message();
        }
        None
    }
}

impl Body for MeteredBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        loop {
            if this.failed {
                return Poll::Ready(None);
            }
            if let Some(admission) = &mut this.admission {
                let admitted = ready!(Pin::new(admission).poll(context));
                this.admission = None;
                match admitted {
                    Err(error) => return this.fail_body(&error),
                    Ok(share) => this.meter.admit_message(share),
                }
                if this.left > 0 {
                    this.deadline = Instant::now().checked_add(this.limits.message_time);
                }
                return Poll::Ready(Some(Ok(this.pass_prefix())));
            }
            if !this.pending.is_empty() {
                match this.next_piece() {
                    Some(piece) => return Poll::Ready(Some(Ok(piece))),
                    None => continue,
                }
            }
            match Pin::new(&mut this.inner).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => this.pending = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                // What came of a prefix goes on, so that gRPC says that the rest is missing.
                Poll::Ready(None) if !this.prefix.is_empty() => {
                    return Poll::Ready(Some(Ok(this.pass_prefix())));
                }
                Poll::Ready(end) => return Poll::Ready(end),
                Poll::Pending => {
                    let Some(deadline) = this.deadline else { return Poll::Pending };
                    let timer = || Box::pin(tokio::time::sleep_until(deadline.into()));
                    ready!(this.timer.get_or_insert_with(timer).as_mut().poll(context));
                    let time = this.limits.message_time.as_millis();
                    let message = format!(
                        "the message did not arrive within {time} ms of its length \
                         (server.message_timeout_ms)"
                    );
                    return this
                        .fail_body(&ServiceError::new(ErrorCode::DeadlineExceeded, message));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let idle = self.pending.is_empty() && self.prefix.is_empty() && self.admission.is_none();
        self.failed || (idle && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// A response's body. What an answer has taken from the budgets goes with its bytes: it comes back
/// when the connection has written them, or has ended.
pub(super) struct HeldBody {
    inner: tonic::body::Body,
    meter: ByteMeter,
    /// Its call counts until all is sent.
    _call: Option<PrincipalCall>,
}

impl HeldBody {
    pub(super) fn new(
        inner: tonic::body::Body,
        meter: ByteMeter,
        call: Option<PrincipalCall>,
    ) -> Self {
        Self { inner, meter, _call: call }
    }
}

/// Bytes and the shares of the answers that are in them.
struct HeldBytes {
    bytes: Bytes,
    _shares: AnswerShares,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Body for HeldBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(context));
        // All answers that were pulled for this frame are in it.
        let held = |bytes: Bytes| {
            let shares = std::mem::take(&mut this.meter.0.lock().answers);
            if shares.is_empty() {
                return bytes;
            }
            Bytes::from_owner(HeldBytes { bytes, _shares: shares })
        };
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(held))))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
