//! The gRPC service: proto to domain, one span and one metric per rpc, domain to proto.

use super::cache;
use super::call::{find_meter, read_call};
use super::convert;
use super::discovery;
use super::load::{OpenedPieces, piece_stream};
use super::measure::{measure_answer, refuse_call};
use super::session::{hold_stream, peer_name, read_hint, sequence_page, session_list};
use super::step;
use super::stream::{self, OpenedStream, ReplyStream, StreamAnswer, StreamKind, StreamState};
use super::watch::{open_watch, watch_stream};
use crate::metrics::OpenCount;
use crate::service::{CallContext, Service, ServiceError};
use kvd_core::{Coded, LayerIndex, ModelId, SequenceId, SessionId};
use kvd_proto::domain::{AnswerForm, AttendBatch, LoadRange, ModelSpec, SequenceFork, StoreChunk};
use kvd_proto::v1::{self, kvd_server::Kvd};
use std::sync::Arc;
use tonic::{Request, Response, Status, Streaming};

/// The generated trait over a [`Service`].
pub(super) struct GrpcService {
    pub(super) service: Arc<Service>,
    pub(super) streams: StreamState,
}

impl GrpcService {
    /// One rpc: span, namespace and deadline, metric, and the error's wire form.
    async fn answer_rpc<T>(
        &self,
        name: &'static str,
        call: Result<CallContext, ServiceError>,
        work: impl AsyncFnOnce(&CallContext) -> Result<T, ServiceError>,
    ) -> Result<Response<T>, Status> {
        let call = self.check_caller(name, call)?;
        let result = measure_answer(self.service.metrics(), name, &call, work(&call)).await;
        result.map(Response::new)
    }

    /// The caller and its deadline. A request that does not tell them is refused and counted.
    fn check_caller<T>(
        &self,
        name: &'static str,
        call: Result<T, ServiceError>,
    ) -> Result<T, Status> {
        call.map_err(|error| refuse_call(self.service.metrics(), name, &error))
    }
}

/// A message of the wire as the domain sees it.
fn to_domain<T, U>(message: T) -> Result<U, ServiceError>
where
    U: TryFrom<T>,
    U::Error: Coded,
{
    U::try_from(message).map_err(ServiceError::from)
}

#[tonic::async_trait]
impl Kvd for GrpcService {
    async fn get_server_info(
        &self,
        request: Request<v1::GetServerInfoRequest>,
    ) -> Result<Response<v1::GetServerInfoResponse>, Status> {
        self.answer_rpc("GetServerInfo", read_call(&request), async |call| {
            discovery::server_info(&self.service, call)
        })
        .await
    }

    async fn register_model(
        &self,
        request: Request<v1::RegisterModelRequest>,
    ) -> Result<Response<v1::RegisterModelResponse>, Status> {
        let (caller, message) = (read_call(&request), request.into_inner());
        self.answer_rpc("RegisterModel", caller, async |call| {
            let block_tokens = self.service.config().block_tokens_default;
            let identity = to_domain(message.identity.clone().unwrap_or_default())?;
            let spec = ModelSpec::from_wire(message, block_tokens)?;
            let model = self.service.register_identified(call, spec, &identity).await?;
            Ok(convert::register_response(&model))
        })
        .await
    }

    async fn describe_model(
        &self,
        request: Request<v1::DescribeModelRequest>,
    ) -> Result<Response<v1::DescribeModelResponse>, Status> {
        let id = ModelId(request.get_ref().model_id);
        self.answer_rpc("DescribeModel", read_call(&request), async |call| {
            let model = self.service.find_model(call, id)?;
            Ok(convert::model_description(&self.service.model_stats(call, model)?))
        })
        .await
    }

    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        self.answer_rpc("ListModels", read_call(&request), async |call| {
            discovery::model_list(&self.service, call)
        })
        .await
    }

    async fn unregister_model(
        &self,
        request: Request<v1::UnregisterModelRequest>,
    ) -> Result<Response<v1::UnregisterModelResponse>, Status> {
        let id = ModelId(request.get_ref().model_id);
        self.answer_rpc("UnregisterModel", read_call(&request), async |call| {
            self.service.unregister_model(call, id).await?;
            Ok(v1::UnregisterModelResponse {})
        })
        .await
    }

    async fn open_sequence(
        &self,
        request: Request<v1::OpenSequenceRequest>,
    ) -> Result<Response<v1::OpenSequenceResponse>, Status> {
        let (caller, message) = (read_call(&request), request.into_inner());
        self.answer_rpc("OpenSequence", caller, async |call| {
            cache::open_sequence(&self.service, call, message).await
        })
        .await
    }

    async fn fork_sequence(
        &self,
        request: Request<v1::ForkSequenceRequest>,
    ) -> Result<Response<v1::ForkSequenceResponse>, Status> {
        let fork = SequenceFork::from(*request.get_ref());
        self.answer_rpc("ForkSequence", read_call(&request), async |call| {
            self.service.wait_for_prefix(call, fork.sequence).await;
            let forked = self.service.fork_sequence_in(call, fork)?;
            Ok(v1::ForkSequenceResponse { sequence_id: forked.id.0, length: forked.length })
        })
        .await
    }

    async fn truncate_sequence(
        &self,
        request: Request<v1::TruncateSequenceRequest>,
    ) -> Result<Response<v1::TruncateSequenceResponse>, Status> {
        let v1::TruncateSequenceRequest { sequence_id, length } = *request.get_ref();
        self.answer_rpc("TruncateSequence", read_call(&request), async |call| {
            self.service.wait_for_prefix(call, SequenceId(sequence_id)).await;
            self.service.truncate_sequence(call, SequenceId(sequence_id), length)?;
            Ok(v1::TruncateSequenceResponse {})
        })
        .await
    }

    async fn hint_sequence(
        &self,
        request: Request<v1::HintSequenceRequest>,
    ) -> Result<Response<v1::HintSequenceResponse>, Status> {
        let message = *request.get_ref();
        self.answer_rpc("HintSequence", read_call(&request), async |call| {
            let hint = read_hint(message)?;
            self.service.hint_sequence(call, SequenceId(message.sequence_id), hint)?;
            Ok(v1::HintSequenceResponse {})
        })
        .await
    }

    async fn close_sequence(
        &self,
        request: Request<v1::CloseSequenceRequest>,
    ) -> Result<Response<v1::CloseSequenceResponse>, Status> {
        let message = *request.get_ref();
        self.answer_rpc("CloseSequence", read_call(&request), async |call| {
            cache::close_sequence(&self.service, call, message)?;
            Ok(v1::CloseSequenceResponse {})
        })
        .await
    }

    async fn describe_sequence(
        &self,
        request: Request<v1::DescribeSequenceRequest>,
    ) -> Result<Response<v1::DescribeSequenceResponse>, Status> {
        let id = SequenceId(request.get_ref().sequence_id);
        self.answer_rpc("DescribeSequence", read_call(&request), async |call| {
            Ok(convert::sequence_description(self.service.describe_sequence(call, id)?))
        })
        .await
    }

    async fn list_sequences(
        &self,
        request: Request<v1::ListSequencesRequest>,
    ) -> Result<Response<v1::ListSequencesResponse>, Status> {
        let message = *request.get_ref();
        self.answer_rpc("ListSequences", read_call(&request), async |call| {
            Ok(sequence_page(self.service.list_sequences(call, to_domain(message)?).await?))
        })
        .await
    }

    type HoldSessionStream = ReplyStream<v1::HoldSessionResponse>;

    async fn hold_session(
        &self,
        request: Request<v1::HoldSessionRequest>,
    ) -> Result<Response<Self::HoldSessionStream>, Status> {
        let (caller, peer) = (read_call(&request), peer_name(request.extensions()));
        let message = request.into_inner();
        let lease = self.answer_rpc("HoldSession", caller, async |call| {
            self.service.hold_session(call, to_domain(message)?, peer).await
        });
        Ok(lease.await?.map(|lease| hold_stream(lease, &self.streams)))
    }

    async fn close_session(
        &self,
        request: Request<v1::CloseSessionRequest>,
    ) -> Result<Response<v1::CloseSessionResponse>, Status> {
        let id = SessionId(request.get_ref().session_id);
        self.answer_rpc("CloseSession", read_call(&request), async |call| {
            let sequences_closed = self.service.close_session(call, id).await?;
            Ok(v1::CloseSessionResponse { sequences_closed })
        })
        .await
    }

    async fn list_sessions(
        &self,
        request: Request<v1::ListSessionsRequest>,
    ) -> Result<Response<v1::ListSessionsResponse>, Status> {
        self.answer_rpc("ListSessions", read_call(&request), async |call| {
            Ok(session_list(self.service.list_sessions(call)?))
        })
        .await
    }

    type StoreBlocksStream = ReplyStream<v1::StoreBlocksResponse>;

    async fn store_blocks(
        &self,
        request: Request<Streaming<v1::StoreBlocksRequest>>,
    ) -> Result<Response<Self::StoreBlocksStream>, Status> {
        let OpenedStream { call, errors, meter } =
            self.check_caller("StoreBlocks", OpenedStream::from_request(&request))?;
        let messages = request.into_inner();
        let (service, streams) = (self.service.clone(), &self.streams);
        let kind = StreamKind { streams, open: &streams.stores, meter };
        let stream = stream::serve_stream(service, kind, messages, move |service, message| {
            let call = call.clone();
            async move {
                let layer = LayerIndex(message.layer);
                let work = async {
                    let chunk: StoreChunk = to_domain(message)?;
                    Ok(convert::store_response(layer, service.store_chunk(&call, chunk).await?))
                };
                let reply = measure_answer(service.metrics(), "StoreBlocks", &call, work).await;
                stream::with_error(reply, errors, |error| convert::not_stored(layer, error)).into()
            }
        });
        Ok(Response::new(stream))
    }

    async fn attend(
        &self,
        request: Request<v1::AttendRequest>,
    ) -> Result<Response<v1::AttendResponse>, Status> {
        let (caller, meter) = (read_call(&request), find_meter(&request));
        let message = request.into_inner();
        self.answer_rpc("Attend", caller, async |call| {
            let form = AnswerForm::from_request(&message)?;
            let batch: AttendBatch = to_domain(message)?;
            let mut reply = self.service.attend_formed(call, batch, form).await?;
            meter.hold_answer(reply.held.take());
            Ok(convert::attend_response(reply))
        })
        .await
    }

    type AttendStreamStream = ReplyStream<v1::AttendResponse>;

    async fn attend_stream(
        &self,
        request: Request<Streaming<v1::AttendRequest>>,
    ) -> Result<Response<Self::AttendStreamStream>, Status> {
        let OpenedStream { call, errors, meter } =
            self.check_caller("AttendStream", OpenedStream::from_request(&request))?;
        let messages = request.into_inner();
        let (service, streams) = (self.service.clone(), &self.streams);
        let kind = StreamKind { streams, open: &streams.attends, meter };
        let stream = stream::serve_stream(service, kind, messages, move |service, message| {
            let call = call.clone();
            async move {
                let mut held = None;
                let work = async {
                    let form = AnswerForm::from_request(&message)?;
                    let batch: AttendBatch = to_domain(message)?;
                    let mut reply = service.attend_formed(&call, batch, form).await?;
                    held = reply.held.take();
                    Ok(convert::attend_response(reply))
                };
                let reply = measure_answer(service.metrics(), "AttendStream", &call, work).await;
                StreamAnswer {
                    reply: stream::with_error(reply, errors, convert::not_attended),
                    held,
                }
            }
        });
        Ok(Response::new(stream))
    }

    type LoadBlocksStream = ReplyStream<v1::LoadBlocksResponse>;

    async fn load_blocks(
        &self,
        request: Request<v1::LoadBlocksRequest>,
    ) -> Result<Response<Self::LoadBlocksStream>, Status> {
        let call = stream::wait_for_queue(self.check_caller("LoadBlocks", read_call(&request))?);
        let meter = find_meter(&request);
        let message = request.into_inner();
        let pieces = measure_answer(self.service.metrics(), "LoadBlocks", &call, async {
            let range: LoadRange = to_domain(message)?;
            self.service.wait_for_layer(&call, range.sequence, range.layer).await;
            self.service.load_pieces(&call, &range)
        })
        .await?;
        let open = OpenCount::new(&self.streams.loads);
        Ok(Response::new(piece_stream(&self.service, OpenedPieces { call, pieces, open }, meter)))
    }

    async fn sample_queries(
        &self,
        request: Request<v1::SampleQueriesRequest>,
    ) -> Result<Response<v1::SampleQueriesResponse>, Status> {
        let message = *request.get_ref();
        let (model, layer) = (ModelId(message.model_id), LayerIndex(message.layer));
        self.answer_rpc("SampleQueries", read_call(&request), async |call| {
            Ok(self.service.sampled_queries(call, model, layer)?.into())
        })
        .await
    }

    async fn calibrate_model(
        &self,
        request: Request<v1::CalibrateModelRequest>,
    ) -> Result<Response<v1::CalibrateModelResponse>, Status> {
        let (caller, message) = (read_call(&request), request.into_inner());
        self.answer_rpc("CalibrateModel", caller, async |call| {
            let made = self.service.calibrate_model(call, to_domain(message)?).await?;
            Ok(convert::calibrate_response(made))
        })
        .await
    }

    async fn match_prefix(
        &self,
        request: Request<v1::MatchPrefixRequest>,
    ) -> Result<Response<v1::MatchPrefixResponse>, Status> {
        let (caller, message) = (read_call(&request), request.into_inner());
        self.answer_rpc("MatchPrefix", caller, async |call| {
            cache::match_prefix(&self.service, call, message).await
        })
        .await
    }

    async fn release_lease(
        &self,
        request: Request<v1::ReleaseLeaseRequest>,
    ) -> Result<Response<v1::ReleaseLeaseResponse>, Status> {
        let (caller, message) = (read_call(&request), request.into_inner());
        self.answer_rpc("ReleaseLease", caller, async |call| {
            cache::release_lease(&self.service, call, message)
        })
        .await
    }

    async fn publish_blocks(
        &self,
        request: Request<v1::PublishBlocksRequest>,
    ) -> Result<Response<v1::PublishBlocksResponse>, Status> {
        self.answer_rpc("PublishBlocks", read_call(&request), async |call| {
            cache::publish_blocks(&self.service, call, request.into_inner()).await
        })
        .await
    }

    async fn pin_blocks(
        &self,
        request: Request<v1::PinBlocksRequest>,
    ) -> Result<Response<v1::PinBlocksResponse>, Status> {
        self.answer_rpc("PinBlocks", read_call(&request), async |call| {
            cache::pin_blocks(&self.service, call, request.into_inner())
        })
        .await
    }

    async fn unpin_blocks(
        &self,
        request: Request<v1::UnpinBlocksRequest>,
    ) -> Result<Response<v1::UnpinBlocksResponse>, Status> {
        let (caller, message) = (read_call(&request), request.into_inner());
        self.answer_rpc("UnpinBlocks", caller, async |call| {
            cache::unpin_blocks(&self.service, call, message)
        })
        .await
    }

    async fn drop_blocks(
        &self,
        request: Request<v1::DropBlocksRequest>,
    ) -> Result<Response<v1::DropBlocksResponse>, Status> {
        let (caller, message) = (read_call(&request), request.into_inner());
        self.answer_rpc("DropBlocks", caller, async |call| {
            cache::drop_blocks(&self.service, call, message)
        })
        .await
    }

    type WatchBlocksStream = ReplyStream<v1::WatchBlocksResponse>;

    async fn watch_blocks(
        &self,
        request: Request<v1::WatchBlocksRequest>,
    ) -> Result<Response<Self::WatchBlocksStream>, Status> {
        let (caller, meter) = (read_call(&request), find_meter(&request));
        let watch = self.answer_rpc("WatchBlocks", caller, async |call| {
            open_watch(&self.service, call, request.into_inner())
        });
        Ok(watch.await?.map(|watch| watch_stream(watch, &self.streams, meter)))
    }

    async fn get_stats(
        &self,
        request: Request<v1::GetStatsRequest>,
    ) -> Result<Response<v1::GetStatsResponse>, Status> {
        self.answer_rpc("GetStats", read_call(&request), async |call| {
            discovery::daemon_stats(&self.service, call)
        })
        .await
    }

    async fn list_namespaces(
        &self,
        request: Request<v1::ListNamespacesRequest>,
    ) -> Result<Response<v1::ListNamespacesResponse>, Status> {
        self.answer_rpc("ListNamespaces", read_call(&request), async |call| {
            discovery::namespace_list(&self.service, call)
        })
        .await
    }

    async fn set_namespace_quotas(
        &self,
        request: Request<v1::SetNamespaceQuotasRequest>,
    ) -> Result<Response<v1::SetNamespaceQuotasResponse>, Status> {
        self.answer_rpc("SetNamespaceQuotas", read_call(&request), async |call| {
            discovery::set_quotas(&self.service, call, request.into_inner()).await
        })
        .await
    }

    async fn store_step(
        &self,
        request: Request<v1::StoreStepRequest>,
    ) -> Result<Response<v1::StoreStepResponse>, Status> {
        let (caller, region) = (read_call(&request), step::region_of(request.extensions()));
        let message = request.into_inner();
        self.answer_rpc("StoreStep", caller, async |call| {
            let stored = self.service.store_step(call, to_domain(message)?, region).await?;
            Ok(step::stored_response(stored))
        })
        .await
    }

    async fn load_step(
        &self,
        request: Request<v1::LoadStepRequest>,
    ) -> Result<Response<v1::LoadStepResponse>, Status> {
        let (caller, region) = (read_call(&request), step::region_of(request.extensions()));
        let (meter, message) = (find_meter(&request), request.into_inner());
        self.answer_rpc("LoadStep", caller, async |call| {
            let mut loaded = self.service.load_step(call, to_domain(message)?, region).await?;
            meter.hold_answer(loaded.held.take());
            Ok(step::loaded_response(self.service.metrics(), loaded))
        })
        .await
    }

    async fn list_codecs(
        &self,
        request: Request<v1::ListCodecsRequest>,
    ) -> Result<Response<v1::ListCodecsResponse>, Status> {
        self.answer_rpc("ListCodecs", read_call(&request), async |call| {
            discovery::codec_list(&self.service, call)
        })
        .await
    }
}
