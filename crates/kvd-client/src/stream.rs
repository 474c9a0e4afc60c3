//! Streaming calls: many requests without a call set-up each, answered in order. A request that the
//! daemon refuses fails alone: its error stands in place of its answer, and the stream goes on.

use crate::error::ClientError;
use kvd_core::ErrorCode;
use kvd_proto::domain::{AttendBatch, Attended, CallError, LoadPiece, StoreAck, StoreChunk};
use kvd_proto::v1;
use prost::Message;
use tokio::sync::mpsc;
use tonic::Streaming;

/// Most requests of one stream that may wait for their answers.
pub const PIPELINE_DEPTH_MAX: usize = 256;

/// The two halves of a bidirectional call, and how many answers are owed.
///
/// The queue holds as many requests as may be unanswered, so sending never waits for the network;
/// what waits is reading the oldest answer once `depth` are owed.
struct DuplexCall<Request, Response> {
    requests: mpsc::Sender<Request>,
    responses: Streaming<Response>,
    depth: usize,
    owed: usize,
    message_bytes_max: usize,
    open: bool,
}

/// An answer that may be a refusal.
trait RefusableResponse {
    /// Why the request was refused, if it was.
    fn take_error(&mut self) -> Option<v1::CallError>;
}

impl RefusableResponse for v1::StoreBlocksResponse {
    fn take_error(&mut self) -> Option<v1::CallError> {
        self.error.take()
    }
}

impl RefusableResponse for v1::AttendResponse {
    fn take_error(&mut self) -> Option<v1::CallError> {
        self.error.take()
    }
}

fn check_answer<Response: RefusableResponse>(
    mut response: Response,
) -> Result<Response, ClientError> {
    match response.take_error() {
        Some(error) => Err(CallError::from(error).into()),
        None => Ok(response),
    }
}

impl<Request: Message, Response: RefusableResponse> DuplexCall<Request, Response> {
    /// Sends `request`; returns the oldest answer when it had to be read to make room. Where that
    /// is a refusal `request` has been sent all the same.
    async fn send_request(&mut self, request: Request) -> Result<Option<Response>, ClientError> {
        ClientError::check_size(&request, self.message_bytes_max)?;
        let oldest = if self.owed == self.depth { self.next().await? } else { None };
        if self.requests.send(request).await.is_err() {
            // The daemon ended the stream; its status is behind the answers still owed.
            return Err(self.stream_error().await);
        }
        self.owed += 1;
        oldest.map(check_answer).transpose()
    }

    /// The next answer, or `None` when none is owed.
    async fn receive_answer(&mut self) -> Result<Option<Response>, ClientError> {
        self.next().await?.map(check_answer).transpose()
    }

    /// The next answer as it came; an error is the stream's end.
    async fn next(&mut self) -> Result<Option<Response>, ClientError> {
        if self.owed == 0 {
            return Ok(None);
        }
        let next = self.responses.message().await;
        self.open &= matches!(next, Ok(Some(_)));
        let response = next?.ok_or_else(ended_error)?;
        self.owed -= 1;
        Ok(Some(response))
    }

    /// The error that ended the stream.
    async fn stream_error(&mut self) -> ClientError {
        self.open = false;
        loop {
            match self.responses.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return ended_error(),
                Err(status) => return status.into(),
            }
        }
    }

    /// Ends the requests, and reads the outstanding answers.
    async fn finish_stream(self) -> Result<Vec<Response>, ClientError> {
        let Self { requests, mut responses, owed, .. } = self;
        drop(requests);
        let mut rest = Vec::with_capacity(owed);
        // Reading to the end, not only outstanding answers, closes the stream without a reset.
        while let Some(response) = responses.message().await? {
            rest.push(response);
        }
        if rest.len() != owed {
            return Err(ended_error());
        }
        rest.into_iter().map(check_answer).collect()
    }
}

fn ended_error() -> ClientError {
    ClientError::new(ErrorCode::Internal, "the stream ended without the answers it owes")
}

/// The request side of a duplex call, and its queue.
pub(crate) struct RequestQueue<Request> {
    sender: mpsc::Sender<Request>,
    depth: usize,
    message_bytes_max: usize,
}

impl<Request: Message> RequestQueue<Request> {
    /// A queue for `depth` unanswered requests, within 1 and [`PIPELINE_DEPTH_MAX`].
    pub(crate) fn new(depth: usize, message_bytes_max: usize) -> (Self, mpsc::Receiver<Request>) {
        let depth = depth.clamp(1, PIPELINE_DEPTH_MAX);
        let (sender, receiver) = mpsc::channel(depth);
        (Self { sender, depth, message_bytes_max }, receiver)
    }

    fn join_responses<Response>(
        self,
        responses: Streaming<Response>,
    ) -> DuplexCall<Request, Response> {
        let Self { sender: requests, depth, message_bytes_max } = self;
        DuplexCall { requests, responses, depth, owed: 0, message_bytes_max, open: true }
    }
}

/// Chunks to store, each acknowledged in order once its range can be read.
///
/// A chunk that is refused fails alone, and nothing of it is stored; those behind it are judged by
/// themselves, so that one which continues it is `RANGE_GAP`.
pub struct StoreStream(DuplexCall<v1::StoreBlocksRequest, v1::StoreBlocksResponse>);

impl StoreStream {
    pub(crate) fn new(
        requests: RequestQueue<v1::StoreBlocksRequest>,
        responses: Streaming<v1::StoreBlocksResponse>,
    ) -> Self {
        Self(requests.join_responses(responses))
    }

    /// Sends a chunk. Waits only when as many chunks as the stream is deep are unacknowledged, and
    /// then returns the oldest acknowledgement.
    ///
    /// # Errors
    /// Why the oldest unacknowledged chunk was refused, after `chunk` was sent; or what ended the
    /// stream, which [`StoreStream::is_open`] then says.
    pub async fn send_chunk(&mut self, chunk: StoreChunk) -> Result<Option<StoreAck>, ClientError> {
        Ok(self.0.send_request(chunk.into()).await?.map(Into::into))
    }

    /// Waits for the oldest acknowledgement; `None` when every chunk is acknowledged.
    ///
    /// # Errors
    /// Why the oldest unacknowledged chunk was refused, or what ended the stream.
    pub async fn receive_ack(&mut self) -> Result<Option<StoreAck>, ClientError> {
        Ok(self.0.receive_answer().await?.map(Into::into))
    }

    /// Chunks that are not acknowledged yet.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.0.owed
    }

    /// Whether the stream takes further chunks.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.open
    }

    /// Ends the stream and waits for the remaining acknowledgements.
    ///
    /// # Errors
    /// The first refusal of a chunk that was unacknowledged, or what ended the stream.
    pub async fn finish_stream(self) -> Result<Vec<StoreAck>, ClientError> {
        Ok(self.0.finish_stream().await?.into_iter().map(Into::into).collect())
    }
}

/// Batches of queries, each answered in order: an engine's decode loop keeps one open.
pub struct AttendStream(DuplexCall<v1::AttendRequest, v1::AttendResponse>);

impl AttendStream {
    pub(crate) fn new(
        requests: RequestQueue<v1::AttendRequest>,
        responses: Streaming<v1::AttendResponse>,
    ) -> Self {
        Self(requests.join_responses(responses))
    }

    /// Sends a batch. Waits only when as many batches as the stream is deep are unanswered, and
    /// then returns the oldest answer.
    ///
    /// # Errors
    /// Why the oldest unanswered batch was refused, after `batch` was sent; or what ended the
    /// stream, which [`AttendStream::is_open`] then says.
    pub async fn send_batch(
        &mut self,
        batch: AttendBatch,
    ) -> Result<Option<Attended>, ClientError> {
        self.0.send_request(batch.into()).await?.map(parse_answer).transpose()
    }

    /// Waits for the oldest answer; `None` when every batch is answered.
    ///
    /// # Errors
    /// Why the oldest unanswered batch was refused, or what ended the stream.
    pub async fn receive_answer(&mut self) -> Result<Option<Attended>, ClientError> {
        self.0.receive_answer().await?.map(parse_answer).transpose()
    }

    /// Batches that are not answered yet.
    #[must_use]
    pub fn unanswered(&self) -> usize {
        self.0.owed
    }

    /// Whether the stream takes further batches.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.open
    }

    /// Sends one batch and waits for its answer.
    ///
    /// # Errors
    /// Why the batch was refused, or what ended the stream; `INVALID_ARGUMENT` when earlier batches
    /// are unanswered.
    pub async fn attend_batch(&mut self, batch: AttendBatch) -> Result<Attended, ClientError> {
        if self.0.owed > 0 {
            let message = "earlier batches of this stream are unanswered";
            return Err(ClientError::new(ErrorCode::InvalidArgument, message));
        }
        self.send_batch(batch).await?;
        self.receive_answer().await?.ok_or_else(ended_error)
    }

    /// Ends the stream and waits for the remaining answers.
    ///
    /// # Errors
    /// The first refusal of a batch that was unanswered, or what ended the stream.
    pub async fn finish_stream(self) -> Result<Vec<Attended>, ClientError> {
        self.0.finish_stream().await?.into_iter().map(parse_answer).collect()
    }
}

fn parse_answer(response: v1::AttendResponse) -> Result<Attended, ClientError> {
    Attended::try_from(response).map_err(|error| ClientError::invalid_reply(&error))
}

/// Stored rows in pieces, in token order without gaps.
pub struct LoadStream {
    pieces: Streaming<v1::LoadBlocksResponse>,
    next: u32,
    end: u32,
}

impl LoadStream {
    pub(crate) fn new(pieces: Streaming<v1::LoadBlocksResponse>, start: u32, end: u32) -> Self {
        Self { pieces, next: start, end }
    }

    /// The next piece; `None` after the last token of the range.
    ///
    /// # Errors
    /// The error that ended the load early.
    pub async fn receive_piece(&mut self) -> Result<Option<LoadPiece>, ClientError> {
        let Some(response) = self.pieces.message().await? else {
            return if self.next == self.end { Ok(None) } else { Err(ended_error()) };
        };
        let piece =
            LoadPiece::try_from(response).map_err(|error| ClientError::invalid_reply(&error))?;
        if piece.start != self.next || piece.tokens > self.end - self.next {
            let message = format!(
                "load sent tokens {}+{} where {}..{} were next",
                piece.start, piece.tokens, self.next, self.end
            );
            return Err(ClientError::new(ErrorCode::Internal, message));
        }
        self.next += piece.tokens;
        Ok(Some(piece))
    }
}
