//! One method per rpc.

use crate::boot::KnownBoot;
use crate::connect::{self, ClientOptions};
use crate::endpoint::Endpoint;
use crate::error::ClientError;
use crate::secrets::BearerToken;
use crate::stream::{AttendStream, LoadStream, RequestQueue, StoreStream};
use crate::{ChangedQuotas, ModelDescription, NamespaceInfo, QuotaOrder};
use crate::{SequenceDescription, ServerInfo, Stats};
use bytes::{Bytes, BytesMut};
use kvd_core::{ErrorCode, LayerIndex, ModelId, Namespace, SequenceId};
use kvd_proto::domain::{
    AnswerForm, AttendBatch, Attended, CalibrationOrder, ForkedSequence, LoadRange, LoadStep,
    LoadedStep, MadeCalibration, ModelSpec, RegisteredModel, SampledQueries, SequenceFork,
    SequenceTruncation, StoreAck, StoreChunk, StoreStep, StoredPart,
};
use kvd_proto::{NAMESPACE_KEY, STREAM_ERRORS_KEY, STREAM_ERRORS_PER_MESSAGE, v1};
use prost::Message;
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

type RpcClient = v1::kvd_client::KvdClient<Channel>;

/// A handle on a daemon. Clones share the connection and are cheap; each has its own namespace
/// and timeout.
#[derive(Clone, Debug)]
pub struct Client {
    pub(crate) rpc: RpcClient,
    channel: Channel,
    namespace: Option<MetadataValue<Ascii>>,
    token: Option<BearerToken>,
    timeout: Option<Duration>,
    message_bytes_max: usize,
    boot: Arc<KnownBoot>,
}

/// Rows that [`Client::load_rows`] read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedRows {
    /// `[tokens, kv_heads, head_dim_k]` in the asked dtype.
    pub k: Bytes,
    /// `[tokens, kv_heads, head_dim_v]` in the asked dtype.
    pub v: Bytes,
}

impl Client {
    /// Connects with [`ClientOptions::default`].
    ///
    /// # Errors
    /// When the daemon cannot be reached.
    pub async fn connect(endpoint: Endpoint) -> Result<Self, ClientError> {
        Self::connect_with(endpoint, &ClientOptions::default()).await
    }

    /// Connects. A connection lost later is made anew by the next call.
    ///
    /// # Errors
    /// When the daemon cannot be reached.
    pub async fn connect_with(
        endpoint: Endpoint,
        options: &ClientOptions,
    ) -> Result<Self, ClientError> {
        let channel = connect::connect_channel(&endpoint, options).await?;
        let rpc = RpcClient::new(channel.clone())
            .max_decoding_message_size(options.message_bytes_max)
            .max_encoding_message_size(options.message_bytes_max);
        let ClientOptions { timeout, message_bytes_max, .. } = *options;
        let (namespace, token) = (None, options.token.clone());
        let boot = Arc::default();
        Ok(Self { rpc, channel, namespace, token, timeout, message_bytes_max, boot })
    }

    /// This client in another namespace; `default` until set. It has no ids there yet, and so
    /// knows no boot.
    #[must_use]
    pub fn with_namespace(mut self, namespace: &Namespace) -> Self {
        self.boot = Arc::default();
        // The alphabet of a namespace is a subset of what metadata may hold.
        self.namespace = MetadataValue::try_from(namespace.as_str()).ok();
        self
    }

    /// This client with a deadline for each call that is not a stream.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The boot id of the daemon, as an answer last told it; none before [`Client::server_info`],
    /// [`Client::stats`] or an error about ids of another boot.
    #[must_use]
    pub fn boot_id(&self) -> Option<String> {
        self.boot.get()
    }

    /// Version, boot id, device and limits of the daemon.
    ///
    /// # Errors
    /// As every call: [`ClientError`]; [`ClientError::restarted`] when the boot id is another than
    /// the one that this client knew, once for each restart.
    pub async fn server_info(&self) -> Result<ServerInfo, ClientError> {
        let request = self.unary_request(v1::GetServerInfoRequest {});
        let info = self.call_rpc(self.rpc.clone().get_server_info(request)).await?;
        self.boot.compare_boot(&info.boot_id)?;
        Ok(info)
    }

    /// Registers a model; the same content again gives the same id.
    ///
    /// # Errors
    /// `INVALID_CODEC`, `INVALID_CALIBRATION`, `LIMIT_EXCEEDED`, or as every call.
    pub async fn register_model(&self, spec: ModelSpec) -> Result<RegisteredModel, ClientError> {
        let request = self.sized_request(spec.into())?;
        let response = self.call_rpc(self.rpc.clone().register_model(request)).await?;
        RegisteredModel::try_from(response).map_err(|error| ClientError::invalid_reply(&error))
    }

    /// A model's geometry, codec and stored bytes.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, or as every call.
    pub async fn describe_model(&self, model: ModelId) -> Result<ModelDescription, ClientError> {
        let request = self.unary_request(v1::DescribeModelRequest { model_id: model.0 });
        self.call_rpc(self.rpc.clone().describe_model(request)).await
    }

    /// The models of this namespace.
    ///
    /// # Errors
    /// As every call.
    pub async fn list_models(&self) -> Result<Vec<ModelDescription>, ClientError> {
        let request = self.unary_request(v1::ListModelsRequest {});
        Ok(self.call_rpc(self.rpc.clone().list_models(request)).await?.models)
    }

    /// Forgets a model without sequences.
    ///
    /// # Errors
    /// `MODEL_IN_USE`, `UNKNOWN_MODEL`, or as every call.
    pub async fn unregister_model(&self, model: ModelId) -> Result<(), ClientError> {
        let request = self.unary_request(v1::UnregisterModelRequest { model_id: model.0 });
        self.call_rpc(self.rpc.clone().unregister_model(request)).await.map(drop)
    }

    /// Opens an empty sequence, which lives until it is closed.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, `LIMIT_EXCEEDED`, or as every call.
    pub async fn open_sequence(&self, model: ModelId) -> Result<SequenceId, ClientError> {
        let request =
            self.unary_request(v1::OpenSequenceRequest { model_id: model.0, ..Default::default() });
        let response = self.call_rpc(self.rpc.clone().open_sequence(request)).await?;
        Ok(SequenceId(response.sequence_id))
    }

    /// A new sequence that shares the first `length` tokens; `None` shares all that are stored on
    /// every layer. A session that owns the parent owns it too.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_NOT_STORED`, `LIMIT_EXCEEDED`, or as every call.
    pub async fn fork_sequence(
        &self,
        sequence: SequenceId,
        length: Option<u32>,
    ) -> Result<ForkedSequence, ClientError> {
        let request = self.unary_request(SequenceFork { sequence, length, session: None }.into());
        Ok(self.call_rpc(self.rpc.clone().fork_sequence(request)).await?.into())
    }

    /// Forgets the tokens from `length` on.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_NOT_STORED`, `SEQUENCE_BUSY`, or as every call.
    pub async fn truncate_sequence(
        &self,
        sequence: SequenceId,
        length: u32,
    ) -> Result<(), ClientError> {
        let request = self.unary_request(SequenceTruncation { sequence, length }.into());
        self.call_rpc(self.rpc.clone().truncate_sequence(request)).await.map(drop)
    }

    /// Closes a sequence and frees what only it held.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, or as every call.
    pub async fn close_sequence(&self, sequence: SequenceId) -> Result<(), ClientError> {
        let request = self.unary_request(v1::CloseSequenceRequest {
            sequence_id: sequence.0,
            ..Default::default()
        });
        self.call_rpc(self.rpc.clone().close_sequence(request)).await.map(drop)
    }

    /// Lengths and stored bytes of a sequence.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, or as every call.
    pub async fn describe_sequence(
        &self,
        sequence: SequenceId,
    ) -> Result<SequenceDescription, ClientError> {
        let request = self.unary_request(v1::DescribeSequenceRequest { sequence_id: sequence.0 });
        self.call_rpc(self.rpc.clone().describe_sequence(request)).await
    }

    /// Stores one chunk and waits until it can be read. For more than a few, use
    /// [`Client::store_stream`].
    ///
    /// # Errors
    /// `RANGE_*`, `SHAPE_MISMATCH`, `NON_FINITE`, `POOL_FULL`, `SEQUENCE_BUSY`, or as every call.
    pub async fn store_chunk(&self, chunk: StoreChunk) -> Result<StoreAck, ClientError> {
        let chunk = v1::StoreBlocksRequest::from(chunk);
        ClientError::check_size(&chunk, self.message_bytes_max)?;
        let request = self.unary_request(tokio_stream::once(chunk));
        let mut rpc = self.rpc.clone();
        let exchange = async move {
            let mut acks = rpc.store_blocks(request).await?.into_inner();
            let first = acks.message().await?;
            // Reading to the end closes the stream without a reset.
            while acks.message().await?.is_some() {}
            Ok(Response::new(first))
        };
        match self.call_rpc(exchange).await? {
            Some(ack) => Ok(ack.into()),
            None => Err(ClientError::new(ErrorCode::Internal, "store ended unacknowledged")),
        }
    }

    /// Opens a stream of chunks of which `depth` (1 to
    /// [`PIPELINE_DEPTH_MAX`](crate::PIPELINE_DEPTH_MAX)) may be unacknowledged.
    ///
    /// # Errors
    /// As every call.
    pub async fn store_stream(&self, depth: usize) -> Result<StoreStream, ClientError> {
        let (requests, queue) = RequestQueue::new(depth, self.message_bytes_max);
        let request = self.stream_request(ReceiverStream::new(queue));
        let responses = self.call_rpc(self.rpc.clone().store_blocks(request)).await?;
        Ok(StoreStream::new(requests, responses))
    }

    /// Attention of a batch of queries over stored tokens of one layer.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_NOT_STORED`, `SHAPE_MISMATCH`, `NON_FINITE`, `QUEUE_FULL`, or
    /// as every call.
    pub async fn attend_batch(&self, batch: AttendBatch) -> Result<Attended, ClientError> {
        let request = self.sized_request(batch.into())?;
        let response = self.call_rpc(self.rpc.clone().attend(request)).await?;
        Attended::try_from(response).map_err(|error| ClientError::invalid_reply(&error))
    }

    /// [`Client::attend_batch`], answered in a form of the caller's: log-sum-exps are in its base
    /// and order.
    ///
    /// # Errors
    /// As [`Client::attend_batch`].
    pub async fn attend_formed(
        &self,
        batch: AttendBatch,
        form: AnswerForm,
    ) -> Result<Attended, ClientError> {
        let mut request = v1::AttendRequest::from(batch);
        form.write_request(&mut request);
        let request = self.sized_request(request)?;
        let response = self.call_rpc(self.rpc.clone().attend(request)).await?;
        Attended::try_from(response).map_err(|error| ClientError::invalid_reply(&error))
    }

    /// The presets that a registration may name, and what each needs.
    ///
    /// # Errors
    /// As every call.
    pub async fn list_codecs(&self) -> Result<Vec<v1::CodecInfo>, ClientError> {
        let request = self.unary_request(v1::ListCodecsRequest {});
        Ok(self.call_rpc(self.rpc.clone().list_codecs(request)).await?.codecs)
    }

    /// Opens a stream of batches of which `depth` (1 to
    /// [`PIPELINE_DEPTH_MAX`](crate::PIPELINE_DEPTH_MAX)) may be unanswered.
    ///
    /// # Errors
    /// As every call.
    pub async fn attend_stream(&self, depth: usize) -> Result<AttendStream, ClientError> {
        let (requests, queue) = RequestQueue::new(depth, self.message_bytes_max);
        let request = self.stream_request(ReceiverStream::new(queue));
        let responses = self.call_rpc(self.rpc.clone().attend_stream(request)).await?;
        Ok(AttendStream::new(requests, responses))
    }

    /// Decodes stored tokens back to rows, all at once.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_NOT_STORED`, or as every call.
    pub async fn load_rows(&self, range: LoadRange) -> Result<LoadedRows, ClientError> {
        let request = self.unary_request(v1::LoadBlocksRequest::from(range));
        let mut rpc = self.rpc.clone();
        let exchange = async move {
            let pieces = rpc.load_blocks(request).await?.into_inner();
            let mut pieces = LoadStream::new(pieces, range.start, range.end);
            let (mut k, mut v) = (BytesMut::new(), BytesMut::new());
            while let Some(piece) = pieces.receive_piece().await? {
                k.extend_from_slice(&piece.k);
                v.extend_from_slice(&piece.v);
            }
            Ok(LoadedRows { k: k.freeze(), v: v.freeze() })
        };
        self.within_deadline(exchange).await
    }

    /// Decodes stored tokens back to rows, piece by piece.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_NOT_STORED`, or as every call.
    pub async fn load_stream(&self, range: LoadRange) -> Result<LoadStream, ClientError> {
        let request = self.namespaced_request(v1::LoadBlocksRequest::from(range));
        let pieces = self.call_rpc(self.rpc.clone().load_blocks(request)).await?;
        Ok(LoadStream::new(pieces, range.start, range.end))
    }

    /// A sample of the queries that attends of a layer have asked; without rows where the model's
    /// keys are not kept exactly.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, or as every call.
    pub async fn sample_queries(
        &self,
        model: ModelId,
        layer: LayerIndex,
    ) -> Result<SampledQueries, ClientError> {
        let request =
            self.unary_request(v1::SampleQueriesRequest { model_id: model.0, layer: layer.0 });
        let response = self.call_rpc(self.rpc.clone().sample_queries(request)).await?;
        SampledQueries::try_from(response).map_err(|error| ClientError::invalid_reply(&error))
    }

    /// Fits codecs to what sequences hold of a model that keeps rows exactly. It takes seconds to
    /// minutes: give it a deadline to match.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` where the rows do not serve the codecs, `QUEUE_FULL` while another
    /// calibration is being made, or as every call.
    pub async fn calibrate_model(
        &self,
        order: CalibrationOrder,
    ) -> Result<MadeCalibration, ClientError> {
        let request = self.unary_request(v1::CalibrateModelRequest::from(order));
        Ok(self.call_rpc(self.rpc.clone().calibrate_model(request)).await?.into())
    }

    /// Stores many layers at once, all or nothing; rows are in the step's memory.
    ///
    /// # Errors
    /// As [`Client::store_chunk`], with the part and the layer.
    pub async fn store_step(&self, step: StoreStep) -> Result<Vec<StoredPart>, ClientError> {
        let request = self.sized_request(step.into())?;
        let response = self.call_rpc(self.rpc.clone().store_step(request)).await?;
        Ok(response.parts.into_iter().map(StoredPart::from).collect())
    }

    /// Decodes many layers at once, into memory that the answer carries.
    ///
    /// # Errors
    /// Layouts that do not fit, or as every call; parts fail alone in [`LoadedStep::errors`].
    pub async fn load_step(&self, step: LoadStep) -> Result<LoadedStep, ClientError> {
        let request = self.sized_request(step.into())?;
        Ok(self.call_rpc(self.rpc.clone().load_step(request)).await?.into())
    }

    /// Counts and bytes that the daemon holds.
    ///
    /// # Errors
    /// As [`Client::server_info`].
    pub async fn stats(&self) -> Result<Stats, ClientError> {
        let request = self.unary_request(v1::GetStatsRequest {});
        let stats = self.call_rpc(self.rpc.clone().get_stats(request)).await?;
        self.boot.compare_boot(&stats.boot_id)?;
        Ok(stats)
    }

    /// Namespaces that this client may use and that hold something.
    ///
    /// # Errors
    /// As every call.
    pub async fn list_namespaces(&self) -> Result<Vec<NamespaceInfo>, ClientError> {
        let request = self.unary_request(v1::ListNamespacesRequest {});
        Ok(self.call_rpc(self.rpc.clone().list_namespaces(request)).await?.namespaces)
    }

    /// Changes what a namespace may have; its quotas after that.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, `NAMESPACE_DENIED`, `LIMIT_EXCEEDED`, or as every call.
    pub async fn set_quotas(&self, order: QuotaOrder) -> Result<ChangedQuotas, ClientError> {
        let request = self.unary_request(order);
        self.call_rpc(self.rpc.clone().set_namespace_quotas(request)).await
    }

    /// Whether the daemon serves; it answers `false` while it drains and after a device failed.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn is_serving(&self) -> Result<bool, ClientError> {
        let request = self.unary_request(HealthCheckRequest { service: String::new() });
        let mut health = HealthClient::new(self.channel.clone());
        let answer = self.call_rpc(health.check(request)).await?;
        Ok(answer.status() == ServingStatus::Serving)
    }

    /// A request in this client's namespace.
    pub(crate) fn namespaced_request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(namespace) = &self.namespace {
            request.metadata_mut().insert(NAMESPACE_KEY, namespace.clone());
        }
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.header_value().clone());
        }
        request
    }

    /// A stream whose answers carry the refusals of single messages, so that it goes on after them.
    fn stream_request<T>(&self, messages: T) -> Request<T> {
        let mut request = self.namespaced_request(messages);
        let per_message = MetadataValue::from_static(STREAM_ERRORS_PER_MESSAGE);
        request.metadata_mut().insert(STREAM_ERRORS_KEY, per_message);
        request
    }

    /// A request that also tells the daemon the deadline, so that it need not work in vain.
    pub(crate) fn unary_request<T>(&self, message: T) -> Request<T> {
        let mut request = self.namespaced_request(message);
        if let Some(timeout) = self.timeout {
            request.set_timeout(timeout);
        }
        request
    }

    /// [`Client::unary_request`] of a message that carries a payload.
    pub(crate) fn sized_request<T: Message>(&self, message: T) -> Result<Request<T>, ClientError> {
        ClientError::check_size(&message, self.message_bytes_max)?;
        Ok(self.unary_request(message))
    }

    /// Waits for an answer, at most until the deadline. tonic enforces the same deadline only up
    /// to the first bytes of the answer.
    pub(crate) async fn within_deadline<T>(
        &self,
        exchange: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let result = match self.timeout {
            None => exchange.await,
            Some(timeout) => tokio::time::timeout(timeout, exchange)
                .await
                .unwrap_or_else(|_| Err(ClientError::deadline_exceeded(timeout))),
        };
        result.map_err(|mut error| {
            self.boot.complete_error(&mut error);
            error
        })
    }

    /// Makes a call; of a stream, its opening.
    pub(crate) async fn call_rpc<T>(
        &self,
        exchange: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ClientError> {
        self.within_deadline(async { Ok(exchange.await?.into_inner()) }).await
    }
}
