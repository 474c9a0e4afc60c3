//! The pieces of a `LoadBlocks` stream, read and sent one after another.

use super::bytes::ByteMeter;
use super::convert;
use super::measure::measure_answer;
use super::stream::{AnswerStream, ReplyStream, StreamAnswer};
use crate::metrics::OpenCount;
use crate::service::{CallContext, Service};
use kvd_proto::domain::LoadRange;
use kvd_proto::v1;
use std::sync::Arc;
use tokio::sync::mpsc;
use tracing::Instrument;

/// A stream whose pieces are known.
pub(super) struct OpenedPieces {
    pub(super) call: CallContext,
    pub(super) pieces: Vec<LoadRange>,
    pub(super) open: OpenCount,
}

/// The stream of these pieces.
pub(super) fn piece_stream(
    service: &Arc<Service>,
    opened: OpenedPieces,
    meter: ByteMeter,
) -> ReplyStream<v1::LoadBlocksResponse> {
    // One piece ahead: decoding overlaps sending without piling up.
    let (replies, receiver) = mpsc::channel(1);
    let send = send_pieces(Arc::clone(service), opened, replies);
    tokio::spawn(send.in_current_span());
    Box::pin(AnswerStream { receiver, meter })
}

/// Sends pieces until the last, the first error, or the client's end.
async fn send_pieces(
    service: Arc<Service>,
    opened: OpenedPieces,
    replies: mpsc::Sender<StreamAnswer<v1::LoadBlocksResponse>>,
) {
    let OpenedPieces { call, pieces, open: _open } = opened;
    for piece in pieces {
        let mut held = None;
        let work = async {
            let mut piece = service.load_piece(&call, &piece).await?;
            held = piece.held.take();
            Ok(convert::load_response(piece))
        };
        let reply = tokio::select! {
            reply = measure_answer(service.metrics(), "LoadBlocks", &call, work) => reply,
            // What waits for the device when the client goes away is taken back.
            () = replies.closed() => return,
        };
        let ended = reply.is_err();
        if replies.send(StreamAnswer { reply, held }).await.is_err() || ended {
            return;
        }
    }
}
