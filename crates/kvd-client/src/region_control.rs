//! Rpcs through a region: a worker that has one needs no connection beside it.

use crate::error::ClientError;
use crate::region::{RegionClient, RegionSlice, in_region, region_error};
use crate::session::SessionOptions;
use crate::{SequenceDescription, ServerInfo};
use kvd_core::{ErrorCode, ModelId, SequenceId, SessionId};
use kvd_proto::domain::{
    CallError, ForkedSequence, HoldTarget, LoadStep, LoadedStep, ModelSpec, PartError,
    RegisteredModel, SequenceFork, SequenceTruncation, SessionHold, StoreStep, StoredPart,
    inline_payload,
};
use kvd_proto::v1;
use kvd_shm::CallOutcome;
use prost::Message;
use std::time::Duration;

/// Largest request that goes in the message itself; larger ones go through the room of the answer.
const INLINE_BYTES_MAX: usize = 256 << 10;

/// Calls of any rpc with places of their own: one of them may be under way at a time.
#[derive(Clone, Copy, Debug)]
pub struct ControlCalls<'a> {
    region: &'a RegionClient,
    done: u64,
    room: RegionSlice,
}

/// A session that the region holds until its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSession {
    /// The session.
    pub id: SessionId,
    /// How long it goes on without a holder, as granted.
    pub ttl: Duration,
}

impl RegionClient {
    /// Calls whose completion record is at `done`, and whose answers go to `room`, at least
    /// [`ControlCalls::ROOM_BYTES_MIN`] bytes.
    #[must_use]
    pub fn control_calls(&self, done: u64, room: RegionSlice) -> ControlCalls<'_> {
        ControlCalls { region: self, done, room }
    }

    /// Sends a control call as it stands; [`RegionClient::wait_call`] with its completion record
    /// answers first how many bytes the answer takes.
    ///
    /// # Errors
    /// When the record is not inside the region, or the daemon is gone.
    pub fn send_control(&self, done: u64, call: v1::RegionControl) -> Result<(), ClientError> {
        self.send_call(done, v1::region_call::Call::Control(call))
    }
}

impl ControlCalls<'_> {
    /// Room that every answer fits but those of lists and descriptions of much.
    pub const ROOM_BYTES_MIN: u64 = 4096;

    /// Any unary rpc of the service, or `HoldSession`, by its name.
    ///
    /// # Errors
    /// As the rpc; `MESSAGE_TOO_LARGE` where the request or the answer does not fit its place.
    pub fn call_rpc<Answer: Message + Default>(
        &self,
        method: &str,
        request: &impl Message,
    ) -> Result<Answer, ClientError> {
        let Self { region, done, room } = *self;
        // An answer that comes late would spoil a request in the same room.
        region.settle_record(done)?;
        let encoded = request.encode_to_vec();
        let request = if encoded.len() <= INLINE_BYTES_MAX {
            inline_payload(encoded.into())
        } else {
            // The daemon has copied it before it answers.
            let bytes = encoded.len() as u64;
            ClientError::check_room(bytes, room.bytes)?;
            let memory = region.memory();
            memory.write_bytes(room.offset, &encoded).map_err(|error| region_error(&error))?;
            in_region(RegionSlice { bytes, ..room })
        };
        let (method, request, answer) = (method.to_owned(), Some(request), Some(room));
        let call = v1::RegionControl { method, request, answer };
        region.send_control(done, call)?;
        match region.wait_outcome(done)? {
            CallOutcome::Done([bytes, ..]) => self.read_answer(bytes),
            CallOutcome::Refused(refusal) if refusal.error_bytes > 0 => {
                let whole: v1::CallError = self.read_answer(refusal.error_bytes)?;
                Err(CallError::from(whole).into())
            }
            CallOutcome::Refused(refusal) => Err(region.explain_refusal(&refusal)),
        }
    }

    fn read_answer<Answer: Message + Default>(&self, bytes: u32) -> Result<Answer, ClientError> {
        ClientError::check_room(bytes.into(), self.room.bytes)?;
        let mut encoded = vec![0; bytes as usize];
        let memory = self.region.memory();
        memory.read_bytes(self.room.offset, &mut encoded).map_err(|error| region_error(&error))?;
        Answer::decode(&encoded[..]).map_err(|error| {
            ClientError::new(ErrorCode::Internal, format!("malformed reply: {error}"))
        })
    }

    /// Version, boot id, device and limits of the daemon.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn server_info(&self) -> Result<ServerInfo, ClientError> {
        self.call_rpc("GetServerInfo", &v1::GetServerInfoRequest {})
    }

    /// Registers a model; the same content again gives the same id.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn register_model(&self, spec: ModelSpec) -> Result<RegisteredModel, ClientError> {
        let request = v1::RegisterModelRequest::from(spec);
        let response: v1::RegisterModelResponse = self.call_rpc("RegisterModel", &request)?;
        RegisteredModel::try_from(response).map_err(|error| ClientError::invalid_reply(&error))
    }

    /// Opens an empty sequence, of a session if one is given.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn open_sequence(
        &self,
        model: ModelId,
        session: Option<SessionId>,
    ) -> Result<SequenceId, ClientError> {
        let session_id = session.map_or(0, |session| session.0);
        let opened = v1::OpenSequenceRequest::default();
        let request = v1::OpenSequenceRequest { model_id: model.0, session_id, ..opened };
        let response: v1::OpenSequenceResponse = self.call_rpc("OpenSequence", &request)?;
        Ok(SequenceId(response.sequence_id))
    }

    /// A new sequence that shares the first tokens of another.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn fork_sequence(&self, fork: SequenceFork) -> Result<ForkedSequence, ClientError> {
        let request = v1::ForkSequenceRequest::from(fork);
        Ok(self.call_rpc::<v1::ForkSequenceResponse>("ForkSequence", &request)?.into())
    }

    /// Forgets the tokens from `length` on.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn truncate_sequence(&self, sequence: SequenceId, length: u32) -> Result<(), ClientError> {
        let request = v1::TruncateSequenceRequest::from(SequenceTruncation { sequence, length });
        self.call_rpc::<v1::TruncateSequenceResponse>("TruncateSequence", &request).map(drop)
    }

    /// Closes a sequence and frees what only it held.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn close_sequence(&self, sequence: SequenceId) -> Result<(), ClientError> {
        let request = v1::CloseSequenceRequest { sequence_id: sequence.0, ..Default::default() };
        self.call_rpc::<v1::CloseSequenceResponse>("CloseSequence", &request).map(drop)
    }

    /// Lengths and stored bytes of a sequence.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn describe_sequence(
        &self,
        sequence: SequenceId,
    ) -> Result<SequenceDescription, ClientError> {
        let request = v1::DescribeSequenceRequest { sequence_id: sequence.0 };
        self.call_rpc("DescribeSequence", &request)
    }

    /// Stores many layers at once, all or nothing, from rows in the region's memory.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn store_step(&self, step: StoreStep) -> Result<Vec<StoredPart>, ClientError> {
        let request = v1::StoreStepRequest::from(step);
        let response: v1::StoreStepResponse = self.call_rpc("StoreStep", &request)?;
        Ok(response.parts.into_iter().map(StoredPart::from).collect())
    }

    /// Decodes many layers at once to the region's memory; which parts were not there.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn load_step(&self, step: LoadStep) -> Result<Vec<PartError>, ClientError> {
        let request = v1::LoadStepRequest::from(step);
        let response: v1::LoadStepResponse = self.call_rpc("LoadStep", &request)?;
        Ok(LoadedStep::from(response).errors)
    }

    /// Holds a new session until the region's end.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn hold_session(&self, options: SessionOptions) -> Result<RegionSession, ClientError> {
        let SessionOptions { name, ttl, take_over } = options;
        let hold = SessionHold { target: HoldTarget::New { name, take_over }, ttl };
        let request = v1::HoldSessionRequest::from(hold);
        let held: v1::HoldSessionResponse = self.call_rpc("HoldSession", &request)?;
        let ttl = Duration::from_millis(held.ttl_ms.into());
        Ok(RegionSession { id: SessionId(held.session_id), ttl })
    }

    /// Ends a session, whoever holds it; how many sequences it owned.
    ///
    /// # Errors
    /// As [`ControlCalls::call_rpc`].
    pub fn close_session(&self, session: SessionId) -> Result<u64, ClientError> {
        let request = v1::CloseSessionRequest { session_id: session.0 };
        let closed: v1::CloseSessionResponse = self.call_rpc("CloseSession", &request)?;
        Ok(closed.sequences_closed)
    }
}

impl ClientError {
    /// Refuses a message that its place is too small for.
    fn check_room(bytes: u64, room: u64) -> Result<(), Self> {
        if bytes <= room {
            return Ok(());
        }
        let message = format!("a message of {bytes} bytes in a room of {room}; give it more");
        Err(Self::new(ErrorCode::MessageTooLarge, message))
    }
}
