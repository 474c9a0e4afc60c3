//! A daemon that stores nothing: it answers so that a test can see what arrived.

use bytes::Bytes;
use kvd_core::{DType, ErrorCode, LayerIndex};
use kvd_proto::domain::{
    AttendBatch, Attended, LoadPiece, LoadRange, SampledQueries, StoreAck, StoreChunk,
};
use kvd_proto::{namespace_of, to_status, v1};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// A store that begins here is answered with `RANGE_GAP`.
pub(crate) const GAP: u32 = 666;
/// An attend on this layer is never answered.
pub(crate) const SILENT: LayerIndex = LayerIndex(99);
/// An attend on this layer finds the queue full, and a retry hint.
pub(crate) const BUSY: LayerIndex = LayerIndex(98);
/// The hint.
pub(crate) const BUSY_HINT: Duration = Duration::from_millis(321);

pub(crate) struct Fake;

type Replies<T> = ReceiverStream<Result<T, Status>>;

fn unimplemented<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not part of the fake"))
}

/// `out` is `q`, and `lse` is the number of queries.
async fn attend(request: v1::AttendRequest) -> Result<v1::AttendResponse, Status> {
    let batch = AttendBatch::try_from(request)
        .map_err(|error| to_status(ErrorCode::InvalidArgument, &error.to_string(), None))?;
    match batch.layer {
        SILENT => std::future::pending().await,
        BUSY => Err(to_status(ErrorCode::QueueFull, "lane", Some(BUSY_HINT))),
        _ => {
            let lse = vec![batch.queries.len() as f32];
            Ok(Attended { out: batch.q, lse, query_errors: Vec::new() }.into())
        }
    }
}

fn store(request: v1::StoreBlocksRequest) -> Result<v1::StoreBlocksResponse, Status> {
    let chunk = StoreChunk::try_from(request)
        .map_err(|error| to_status(ErrorCode::InvalidArgument, &error.to_string(), None))?;
    if chunk.start == GAP {
        return Err(to_status(ErrorCode::RangeGap, "a gap", None));
    }
    let length = chunk.end();
    Ok(StoreAck { layer: chunk.layer, length, replayed: false, packed_blocks: 0 }.into())
}

/// Answers each request of a stream in order, until the first error.
fn answer_each<Q, A, F>(
    mut requests: Streaming<Q>,
    answer: impl Fn(Q) -> F + Send + 'static,
) -> Response<Replies<A>>
where
    Q: Send + 'static,
    A: Send + 'static,
    F: Future<Output = Result<A, Status>> + Send,
{
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Ok(Some(request)) = requests.message().await {
            let reply = answer(request).await;
            let failed = reply.is_err();
            if sender.send(reply).await.is_err() || failed {
                return;
            }
        }
    });
    Response::new(ReceiverStream::new(receiver))
}

#[tonic::async_trait]
impl v1::kvd_server::Kvd for Fake {
    type StoreBlocksStream = Replies<v1::StoreBlocksResponse>;
    type AttendStreamStream = Replies<v1::AttendResponse>;
    type LoadBlocksStream = Replies<v1::LoadBlocksResponse>;
    type HoldSessionStream = Replies<v1::HoldSessionResponse>;
    type WatchBlocksStream = Replies<v1::WatchBlocksResponse>;

    /// The boot id is the namespace that arrived; the version is the deadline that arrived.
    async fn get_server_info(
        &self,
        request: Request<v1::GetServerInfoRequest>,
    ) -> Result<Response<v1::GetServerInfoResponse>, Status> {
        let namespace = namespace_of(request.metadata())
            .map_err(|error| to_status(ErrorCode::InvalidArgument, &error.to_string(), None))?;
        let timeout = request.metadata().get("grpc-timeout");
        Ok(Response::new(v1::GetServerInfoResponse {
            boot_id: namespace.to_string(),
            version: timeout.map_or("", |value| value.to_str().unwrap_or("not text")).to_owned(),
            ..Default::default()
        }))
    }

    async fn register_model(
        &self,
        request: Request<v1::RegisterModelRequest>,
    ) -> Result<Response<v1::RegisterModelResponse>, Status> {
        let request = request.into_inner();
        Ok(Response::new(v1::RegisterModelResponse {
            model_id: 5,
            codec_spec: request.codec,
            fingerprint: request.name,
            geometry: request.geometry,
        }))
    }

    async fn open_sequence(
        &self,
        request: Request<v1::OpenSequenceRequest>,
    ) -> Result<Response<v1::OpenSequenceResponse>, Status> {
        let sequence_id = request.into_inner().model_id + 1;
        Ok(Response::new(v1::OpenSequenceResponse { sequence_id, ..Default::default() }))
    }

    async fn fork_sequence(
        &self,
        request: Request<v1::ForkSequenceRequest>,
    ) -> Result<Response<v1::ForkSequenceResponse>, Status> {
        let request = request.into_inner();
        let (sequence_id, length) = (request.sequence_id + 1, request.length.unwrap_or(77));
        Ok(Response::new(v1::ForkSequenceResponse { sequence_id, length }))
    }

    async fn store_blocks(
        &self,
        request: Request<Streaming<v1::StoreBlocksRequest>>,
    ) -> Result<Response<Self::StoreBlocksStream>, Status> {
        Ok(answer_each(request.into_inner(), async |request| store(request)))
    }

    async fn attend(
        &self,
        request: Request<v1::AttendRequest>,
    ) -> Result<Response<v1::AttendResponse>, Status> {
        attend(request.into_inner()).await.map(Response::new)
    }

    async fn attend_stream(
        &self,
        request: Request<Streaming<v1::AttendRequest>>,
    ) -> Result<Response<Self::AttendStreamStream>, Status> {
        Ok(answer_each(request.into_inner(), attend))
    }

    /// Pieces of three tokens of one byte; layer 1 forgets its last piece.
    async fn load_blocks(
        &self,
        request: Request<v1::LoadBlocksRequest>,
    ) -> Result<Response<Self::LoadBlocksStream>, Status> {
        let range = LoadRange::try_from(request.into_inner())
            .map_err(|error| to_status(ErrorCode::InvalidArgument, &error.to_string(), None))?;
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            let end = range.end - 3 * range.layer.0;
            for start in (range.start..end).step_by(3) {
                let stop = end.min(start + 3);
                let k: Bytes = (start..stop).map(|token| token as u8).collect();
                let v = k.iter().map(|token| 255 - token).collect();
                let piece = LoadPiece { start, tokens: stop - start, k, v };
                if sender.send(Ok(piece.into())).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    /// The codecs' names as the artefact, and the seed as its tokens.
    async fn calibrate_model(
        &self,
        request: Request<v1::CalibrateModelRequest>,
    ) -> Result<Response<v1::CalibrateModelResponse>, Status> {
        let order = request.into_inner();
        let calibration = order.codecs.concat().into();
        let tokens = order.seed;
        let queries_per_head = order.sequence_ids.len() as u64;
        let made = v1::CalibrateModelResponse { calibration, tokens, queries_per_head };
        Ok(Response::new(made))
    }

    /// As many query heads as the layer's number, of one value each.
    async fn sample_queries(
        &self,
        request: Request<v1::SampleQueriesRequest>,
    ) -> Result<Response<v1::SampleQueriesResponse>, Status> {
        let q_heads = request.into_inner().layer;
        let q = vec![7; 2 * q_heads as usize].into();
        Ok(Response::new(SampledQueries { q_heads, dtype: DType::F16, q }.into()))
    }

    async fn describe_model(
        &self,
        _: Request<v1::DescribeModelRequest>,
    ) -> Result<Response<v1::DescribeModelResponse>, Status> {
        Err(to_status(ErrorCode::UnknownModel, "model 5", None))
    }

    async fn list_namespaces(
        &self,
        _: Request<v1::ListNamespacesRequest>,
    ) -> Result<Response<v1::ListNamespacesResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn set_namespace_quotas(
        &self,
        _: Request<v1::SetNamespaceQuotasRequest>,
    ) -> Result<Response<v1::SetNamespaceQuotasResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn list_models(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        Ok(Response::new(v1::ListModelsResponse { models: vec![Default::default(); 2] }))
    }

    async fn unregister_model(
        &self,
        _: Request<v1::UnregisterModelRequest>,
    ) -> Result<Response<v1::UnregisterModelResponse>, Status> {
        unimplemented()
    }

    async fn truncate_sequence(
        &self,
        _: Request<v1::TruncateSequenceRequest>,
    ) -> Result<Response<v1::TruncateSequenceResponse>, Status> {
        unimplemented()
    }

    async fn hint_sequence(
        &self,
        _: Request<v1::HintSequenceRequest>,
    ) -> Result<Response<v1::HintSequenceResponse>, Status> {
        unimplemented()
    }

    async fn close_sequence(
        &self,
        _: Request<v1::CloseSequenceRequest>,
    ) -> Result<Response<v1::CloseSequenceResponse>, Status> {
        unimplemented()
    }

    async fn describe_sequence(
        &self,
        _: Request<v1::DescribeSequenceRequest>,
    ) -> Result<Response<v1::DescribeSequenceResponse>, Status> {
        unimplemented()
    }

    async fn store_step(
        &self,
        _: Request<v1::StoreStepRequest>,
    ) -> Result<Response<v1::StoreStepResponse>, Status> {
        unimplemented()
    }

    async fn load_step(
        &self,
        _: Request<v1::LoadStepRequest>,
    ) -> Result<Response<v1::LoadStepResponse>, Status> {
        unimplemented()
    }

    async fn list_codecs(
        &self,
        _: Request<v1::ListCodecsRequest>,
    ) -> Result<Response<v1::ListCodecsResponse>, Status> {
        unimplemented()
    }

    async fn get_stats(
        &self,
        _: Request<v1::GetStatsRequest>,
    ) -> Result<Response<v1::GetStatsResponse>, Status> {
        unimplemented()
    }

    async fn hold_session(
        &self,
        _: Request<v1::HoldSessionRequest>,
    ) -> Result<Response<Self::HoldSessionStream>, Status> {
        unimplemented()
    }

    async fn close_session(
        &self,
        _: Request<v1::CloseSessionRequest>,
    ) -> Result<Response<v1::CloseSessionResponse>, Status> {
        unimplemented()
    }

    async fn list_sessions(
        &self,
        _: Request<v1::ListSessionsRequest>,
    ) -> Result<Response<v1::ListSessionsResponse>, Status> {
        unimplemented()
    }

    async fn match_prefix(
        &self,
        _: Request<v1::MatchPrefixRequest>,
    ) -> Result<Response<v1::MatchPrefixResponse>, Status> {
        unimplemented()
    }

    async fn release_lease(
        &self,
        _: Request<v1::ReleaseLeaseRequest>,
    ) -> Result<Response<v1::ReleaseLeaseResponse>, Status> {
        unimplemented()
    }

    async fn publish_blocks(
        &self,
        _: Request<v1::PublishBlocksRequest>,
    ) -> Result<Response<v1::PublishBlocksResponse>, Status> {
        unimplemented()
    }

    async fn pin_blocks(
        &self,
        _: Request<v1::PinBlocksRequest>,
    ) -> Result<Response<v1::PinBlocksResponse>, Status> {
        unimplemented()
    }

    async fn unpin_blocks(
        &self,
        _: Request<v1::UnpinBlocksRequest>,
    ) -> Result<Response<v1::UnpinBlocksResponse>, Status> {
        unimplemented()
    }

    async fn drop_blocks(
        &self,
        _: Request<v1::DropBlocksRequest>,
    ) -> Result<Response<v1::DropBlocksResponse>, Status> {
        unimplemented()
    }

    async fn watch_blocks(
        &self,
        _: Request<v1::WatchBlocksRequest>,
    ) -> Result<Response<Self::WatchBlocksStream>, Status> {
        unimplemented()
    }

    async fn list_sequences(
        &self,
        _: Request<v1::ListSequencesRequest>,
    ) -> Result<Response<v1::ListSequencesResponse>, Status> {
        unimplemented()
    }
}
