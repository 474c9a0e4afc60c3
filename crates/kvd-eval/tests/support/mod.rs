//! A daemon that keeps f16 rows and answers attention as the textbook writes it.
//!
//! The codec `fp8` keeps only the leading bits of each value, so that a run sees a codec that
//! loses something; every other codec keeps f16.

use bytes::Bytes;
use kvd_core::{DType, ErrorCode, Geometry, ModelId};
use kvd_proto::domain::{
    AttendBatch, Attended, LoadPiece, LoadRange, ModelSpec, RegisteredModel, StoreAck, StoreChunk,
};
use kvd_proto::{RequestError, to_status, v1};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// The registered models and stored tokens, for tests to inspect.
#[derive(Default)]
pub(crate) struct State {
    next: u64,
    pub(crate) models: HashMap<u64, (ModelSpec, Geometry)>,
    pub(crate) sequences: HashMap<u64, Sequence>,
}

pub(crate) struct Sequence {
    model: u64,
    /// K and V of each layer, `[token, head, channel]`.
    pub(crate) layers: Vec<[Vec<f32>; 2]>,
}

#[derive(Clone, Default)]
pub(crate) struct StandIn(pub(crate) Arc<Mutex<State>>);

impl StandIn {
    /// Serves on a free port of this host.
    pub(crate) async fn serve(&self) -> kvd_client::Endpoint {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind a free port");
        let address = listener.local_addr().expect("local address");
        let service = v1::kvd_server::KvdServer::new(self.clone());
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        format!("http://{address}").parse().expect("an endpoint")
    }

    fn store(&self, request: v1::StoreBlocksRequest) -> Result<v1::StoreBlocksResponse, Status> {
        let chunk = StoreChunk::try_from(request).map_err(refused)?;
        let mut state = self.0.lock();
        let State { models, sequences, .. } = &mut *state;
        let sequence = sequences.get_mut(&chunk.sequence.0).ok_or_else(unknown)?;
        let (spec, geometry) = models.get(&sequence.model).ok_or_else(unknown)?;
        chunk.check_shape(geometry).map_err(refused)?;
        let layer = &mut sequence.layers[chunk.layer.0 as usize];
        let width = (geometry.kv_heads * geometry.head_dim_k) as usize;
        if layer[0].len() != chunk.start as usize * width {
            return Err(to_status(ErrorCode::RangeGap, "not the next token", None));
        }
        for (kept, bytes) in layer.iter_mut().zip([&chunk.k, &chunk.v]) {
            let mut values = vec![0.0; bytes.len() / 2];
            DType::F16.widen_values(bytes, &mut values);
            let lossy = spec.codec.starts_with("fp8");
            kept.extend(values.iter().map(|&x| if lossy { leading_bits(x) } else { x }));
        }
        let length = chunk.end();
        Ok(StoreAck { layer: chunk.layer, length, replayed: false, packed_blocks: 0 }.into())
    }

    fn attend(&self, request: v1::AttendRequest) -> Result<v1::AttendResponse, Status> {
        let batch = AttendBatch::try_from(request).map_err(refused)?;
        let state = self.0.lock();
        let query = batch.queries[0];
        let sequence = state.sequences.get(&query.sequence.0).ok_or_else(unknown)?;
        let (_, geometry) = state.models.get(&batch.model.0).ok_or_else(unknown)?;
        batch.check_shape(geometry).map_err(refused)?;
        let mut q = vec![0.0; batch.q.len() / 4];
        DType::F32.widen_values(&batch.q, &mut q);
        let (heads, dim) = (batch.q_heads as usize, geometry.head_dim_k as usize);
        let group = heads / geometry.kv_heads as usize;
        let mut out = Vec::new();
        for (i, q) in q.chunks(dim).enumerate() {
            let last = query.position.unwrap_or_default() as usize + i / heads;
            let head = i % heads / group;
            let rows = |side: usize| {
                let tokens = sequence.layers[batch.layer.0 as usize][side]
                    .chunks(geometry.kv_heads as usize * dim);
                tokens.take(last + 1).map(move |token| &token[head * dim..(head + 1) * dim])
            };
            out.extend(softmax_attention(q, rows(0), rows(1)));
        }
        let mut bytes = vec![0; out.len() * 4];
        DType::F32.narrow_values(&out, &mut bytes);
        let lse = vec![0.0; out.len() / dim];
        Ok(Attended { out: bytes.into(), lse, query_errors: Vec::new() }.into())
    }
}

fn softmax_attention<'a>(
    q: &[f32],
    keys: impl Iterator<Item = &'a [f32]>,
    values: impl Iterator<Item = &'a [f32]>,
) -> Vec<f32> {
    let scale = (q.len() as f64).sqrt();
    let score = |k: &[f32]| {
        q.iter().zip(k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() / scale
    };
    let scores: Vec<f64> = keys.map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let mut out = vec![0.0; q.len()];
    for (score, row) in scores.iter().zip(values) {
        for (o, &value) in out.iter_mut().zip(row) {
            *o += (score - max).exp() / sum * f64::from(value);
        }
    }
    out.into_iter().map(|value| value as f32).collect()
}

/// The value with 3 of its mantissa bits.
fn leading_bits(value: f32) -> f32 {
    f32::from_bits((value.to_bits() + 0x0008_0000) & 0xfff0_0000)
}

fn refused(error: RequestError) -> Status {
    to_status(ErrorCode::InvalidArgument, &error.to_string(), None)
}

fn unknown() -> Status {
    to_status(ErrorCode::UnknownSequence, "no such model or sequence", None)
}

type Replies<T> = ReceiverStream<Result<T, Status>>;

fn answer_each<Q: Send + 'static, A: Send + 'static>(
    mut requests: Streaming<Q>,
    answer: impl Fn(Q) -> Result<A, Status> + Send + 'static,
) -> Response<Replies<A>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Ok(Some(request)) = requests.message().await {
            let reply = answer(request);
            let failed = reply.is_err();
            if sender.send(reply).await.is_err() || failed {
                return;
            }
        }
    });
    Response::new(ReceiverStream::new(receiver))
}

#[tonic::async_trait]
impl v1::kvd_server::Kvd for StandIn {
    type StoreBlocksStream = Replies<v1::StoreBlocksResponse>;
    type AttendStreamStream = Replies<v1::AttendResponse>;
    type LoadBlocksStream = Replies<v1::LoadBlocksResponse>;
    type HoldSessionStream = Replies<v1::HoldSessionResponse>;
    type WatchBlocksStream = Replies<v1::WatchBlocksResponse>;

    async fn get_server_info(
        &self,
        _: Request<v1::GetServerInfoRequest>,
    ) -> Result<Response<v1::GetServerInfoResponse>, Status> {
        Ok(Response::new(v1::GetServerInfoResponse {
            version: "stand-in".to_owned(),
            block_tokens_default: 16,
            ..Default::default()
        }))
    }

    async fn register_model(
        &self,
        request: Request<v1::RegisterModelRequest>,
    ) -> Result<Response<v1::RegisterModelResponse>, Status> {
        let spec = ModelSpec::from_wire(request.into_inner(), 16).map_err(refused)?;
        let mut state = self.0.lock();
        state.next += 1;
        let (id, geometry) = (state.next, spec.geometry.clone());
        let registered = RegisteredModel {
            model: ModelId(id),
            codec_spec: spec.codec.clone(),
            fingerprint: String::new(),
            geometry: geometry.clone(),
        };
        state.models.insert(id, (spec, geometry));
        Ok(Response::new(registered.into()))
    }

    async fn describe_model(
        &self,
        request: Request<v1::DescribeModelRequest>,
    ) -> Result<Response<v1::DescribeModelResponse>, Status> {
        let model = v1::ModelStats {
            model_id: request.into_inner().model_id,
            calibration_bytes: 3,
            table_bytes: 4,
            ..Default::default()
        };
        Ok(Response::new(v1::DescribeModelResponse { model: Some(model), ..Default::default() }))
    }

    async fn unregister_model(
        &self,
        request: Request<v1::UnregisterModelRequest>,
    ) -> Result<Response<v1::UnregisterModelResponse>, Status> {
        let id = request.into_inner().model_id;
        let mut state = self.0.lock();
        if state.sequences.values().any(|sequence| sequence.model == id) {
            return Err(to_status(ErrorCode::ModelInUse, "sequences are open", None));
        }
        state.models.remove(&id).ok_or_else(unknown)?;
        Ok(Response::new(v1::UnregisterModelResponse {}))
    }

    async fn open_sequence(
        &self,
        request: Request<v1::OpenSequenceRequest>,
    ) -> Result<Response<v1::OpenSequenceResponse>, Status> {
        let model = request.into_inner().model_id;
        let mut state = self.0.lock();
        state.next += 1;
        let id = state.next;
        let layers = state.models.get(&model).ok_or_else(unknown)?.1.layers as usize;
        let layers = vec![Default::default(); layers];
        state.sequences.insert(id, Sequence { model, layers });
        Ok(Response::new(v1::OpenSequenceResponse { sequence_id: id, ..Default::default() }))
    }

    async fn close_sequence(
        &self,
        request: Request<v1::CloseSequenceRequest>,
    ) -> Result<Response<v1::CloseSequenceResponse>, Status> {
        let id = request.into_inner().sequence_id;
        self.0.lock().sequences.remove(&id).ok_or_else(unknown)?;
        Ok(Response::new(v1::CloseSequenceResponse {}))
    }

    /// Every value as one byte in packed blocks, whatever the codec.
    async fn describe_sequence(
        &self,
        request: Request<v1::DescribeSequenceRequest>,
    ) -> Result<Response<v1::DescribeSequenceResponse>, Status> {
        let state = self.0.lock();
        let id = request.into_inner().sequence_id;
        let layers = &state.sequences.get(&id).ok_or_else(unknown)?.layers;
        let values = layers.iter().flatten().map(|side| side.len() as u64).sum();
        let stored = v1::StoredBytes {
            packed_values: values,
            packed_bytes: values,
            code_bytes: values,
            packed_key_bytes: values / 2,
            packed_value_bytes: values / 2,
            ..Default::default()
        };
        let stored = Some(stored);
        Ok(Response::new(v1::DescribeSequenceResponse { stored, ..Default::default() }))
    }

    async fn store_blocks(
        &self,
        request: Request<Streaming<v1::StoreBlocksRequest>>,
    ) -> Result<Response<Self::StoreBlocksStream>, Status> {
        let this = self.clone();
        Ok(answer_each(request.into_inner(), move |request| this.store(request)))
    }

    async fn attend_stream(
        &self,
        request: Request<Streaming<v1::AttendRequest>>,
    ) -> Result<Response<Self::AttendStreamStream>, Status> {
        let this = self.clone();
        Ok(answer_each(request.into_inner(), move |request| this.attend(request)))
    }

    async fn load_blocks(
        &self,
        request: Request<v1::LoadBlocksRequest>,
    ) -> Result<Response<Self::LoadBlocksStream>, Status> {
        let range = LoadRange::try_from(request.into_inner()).map_err(refused)?;
        let state = self.0.lock();
        let sequence = state.sequences.get(&range.sequence.0).ok_or_else(unknown)?;
        let (_, geometry) = state.models.get(&sequence.model).ok_or_else(unknown)?;
        let width = (geometry.kv_heads * geometry.head_dim_k) as usize;
        let (start, end) = (range.start as usize, range.end as usize);
        let rows = |side: usize| -> Bytes {
            let rows = &sequence.layers[range.layer.0 as usize][side][start * width..end * width];
            let mut bytes = vec![0; rows.len() * 4];
            DType::F32.narrow_values(rows, &mut bytes);
            bytes.into()
        };
        let tokens = range.end - range.start;
        let piece = LoadPiece { start: range.start, tokens, k: rows(0), v: rows(1) };
        let (sender, receiver) = mpsc::channel(1);
        sender.try_send(Ok(piece.into())).map_err(|_| Status::internal("queue"))?;
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn calibrate_model(
        &self,
        _: Request<v1::CalibrateModelRequest>,
    ) -> Result<Response<v1::CalibrateModelResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn sample_queries(
        &self,
        _: Request<v1::SampleQueriesRequest>,
    ) -> Result<Response<v1::SampleQueriesResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
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
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn fork_sequence(
        &self,
        _: Request<v1::ForkSequenceRequest>,
    ) -> Result<Response<v1::ForkSequenceResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn hint_sequence(
        &self,
        _: Request<v1::HintSequenceRequest>,
    ) -> Result<Response<v1::HintSequenceResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn truncate_sequence(
        &self,
        _: Request<v1::TruncateSequenceRequest>,
    ) -> Result<Response<v1::TruncateSequenceResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn attend(
        &self,
        request: Request<v1::AttendRequest>,
    ) -> Result<Response<v1::AttendResponse>, Status> {
        Ok(Response::new(self.attend(request.into_inner())?))
    }

    async fn hold_session(
        &self,
        _: Request<v1::HoldSessionRequest>,
    ) -> Result<Response<Self::HoldSessionStream>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn close_session(
        &self,
        _: Request<v1::CloseSessionRequest>,
    ) -> Result<Response<v1::CloseSessionResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn list_sessions(
        &self,
        _: Request<v1::ListSessionsRequest>,
    ) -> Result<Response<v1::ListSessionsResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn list_sequences(
        &self,
        _: Request<v1::ListSequencesRequest>,
    ) -> Result<Response<v1::ListSequencesResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn store_step(
        &self,
        _: Request<v1::StoreStepRequest>,
    ) -> Result<Response<v1::StoreStepResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn load_step(
        &self,
        _: Request<v1::LoadStepRequest>,
    ) -> Result<Response<v1::LoadStepResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn list_codecs(
        &self,
        _: Request<v1::ListCodecsRequest>,
    ) -> Result<Response<v1::ListCodecsResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn match_prefix(
        &self,
        _: Request<v1::MatchPrefixRequest>,
    ) -> Result<Response<v1::MatchPrefixResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn release_lease(
        &self,
        _: Request<v1::ReleaseLeaseRequest>,
    ) -> Result<Response<v1::ReleaseLeaseResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn publish_blocks(
        &self,
        _: Request<v1::PublishBlocksRequest>,
    ) -> Result<Response<v1::PublishBlocksResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn pin_blocks(
        &self,
        _: Request<v1::PinBlocksRequest>,
    ) -> Result<Response<v1::PinBlocksResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn unpin_blocks(
        &self,
        _: Request<v1::UnpinBlocksRequest>,
    ) -> Result<Response<v1::UnpinBlocksResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn watch_blocks(
        &self,
        _: Request<v1::WatchBlocksRequest>,
    ) -> Result<Response<Self::WatchBlocksStream>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn drop_blocks(
        &self,
        _: Request<v1::DropBlocksRequest>,
    ) -> Result<Response<v1::DropBlocksResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }

    async fn get_stats(
        &self,
        _: Request<v1::GetStatsRequest>,
    ) -> Result<Response<v1::GetStatsResponse>, Status> {
        Err(Status::unimplemented("not part of the stand-in"))
    }
}
