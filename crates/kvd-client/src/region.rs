//! Memory shared with a daemon on the same machine: queries are written there, outputs are found
//! there, and no payload travels through a socket.
//!
//! Blocking, unlike [`Client`](crate::Client): a worker's thread sends a small message and sleeps
//! on a word of the region until the answer is there. Several calls may be under way, each with
//! places of its own.

use crate::error::{ClientError, DaemonRestart};
use crate::region_layout::{ALIGN, AttendLayout, QUERY_ERROR_BYTES};
pub use crate::region_options::{RegionDevice, RegionOptions};
use kvd_core::{ErrorCode, Namespace};
use kvd_proto::domain::{
    AnswerForm, AttendBatch, Attended, CallError, QueryError, StoreAck, StoreChunk,
};
use kvd_proto::v1;
use kvd_shm::{
    CallOutcome, CallRefusal, CompletionRecord, RegionMemory, receive_files, send_files,
};
use parking_lot::Mutex;
use prost::Message;
use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use kvd_proto::v1::{RegionKind, RegionSlice};

/// How often a sleeper looks whether the daemon still lives.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Time for the daemon to answer the first message.
const OPEN_TIME: Duration = Duration::from_secs(5);
/// Time of the peer to read what fills its socket.
const SEND_PAUSE: Duration = Duration::from_micros(100);
/// Largest message that a daemon sends.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// A region that a daemon has mapped. It ends when this is dropped.
#[derive(Debug)]
pub struct RegionClient {
    stream: UnixStream,
    memory: Arc<RegionMemory>,
    opened: v1::OpenRegionResponse,
    timeout: Option<Duration>,
    say_launched: bool,
    /// Completion records of calls that were given up and have not ended: the daemon's still.
    given_up: Mutex<BTreeSet<u64>>,
}

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallProgress {
    /// The device has all of it: once [`RegionClient::event`] has happened the answer is there,
    /// unless [`RegionClient::wait`] says that it was refused.
    Launched,
    /// It has ended; [`RegionClient::wait`] says how.
    Ended,
}

impl RegionClient {
    /// Makes memory and hands it over at the daemon's `server.listen_region`.
    ///
    /// # Errors
    /// When the daemon cannot be reached or refuses it: `LIMIT_EXCEEDED`, `NAMESPACE_DENIED`,
    /// `SHUTTING_DOWN`; [`ClientError::restarted`] where it is of another boot than
    /// [`RegionOptions::boot_id`].
    pub fn open_region(
        path: impl AsRef<Path>,
        options: &RegionOptions,
    ) -> Result<Self, ClientError> {
        let memory = RegionMemory::create_memory(options.bytes);
        let memory = Arc::new(memory.map_err(|error| region_error(&error))?);
        let stream = UnixStream::connect(path).map_err(|error| lost_connection(&error))?;
        stream.set_nonblocking(true).map_err(|error| lost_connection(&error))?;
        let name = options.namespace.as_ref().map_or("", Namespace::as_str);
        use v1::open_region_request::Device;
        let (device, file) = match &options.device {
            None => (None, None),
            Some((RegionDevice::CudaIpc(handle), _)) => {
                (Some(Device::CudaIpc(handle.to_vec().into())), None)
            }
            Some((RegionDevice::CudaFd(file), _)) => (Some(Device::CudaFd(true)), Some(file)),
        };
        let request = v1::OpenRegionRequest {
            namespace: name.to_owned(),
            bytes: options.bytes,
            device_bytes: options.device.as_ref().map_or(0, |(_, bytes)| *bytes),
            device,
            device_uuid: options.device_uuid.clone().unwrap_or_default(),
        };
        let (timeout, say_launched) = (options.timeout, options.say_launched);
        let opened = v1::OpenRegionResponse::default();
        let mut region =
            Self { stream, memory, opened, timeout, say_launched, given_up: Mutex::default() };
        let files = [Some(region.memory.file()), file.map(|file| file.as_fd())];
        region.send_message(&request, files.into_iter().flatten().collect())?;
        let end = Instant::now() + OPEN_TIME;
        let response = loop {
            match region.read_notice() {
                Ok(Some(response)) => break response,
                Ok(None) if Instant::now() < end => std::thread::sleep(SEND_PAUSE),
                Ok(None) => return Err(ClientError::deadline_exceeded(OPEN_TIME)),
                Err(error) => return Err(error),
            }
        };
        if let Some(old) = options.boot_id.as_ref().filter(|old| **old != response.boot_id) {
            return Err(ClientError::other_boot(old, &response.boot_id));
        }
        region.opened = response;
        Ok(region)
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &RegionMemory {
        &self.memory
    }

    /// The memory, for what outlives a borrow of the region.
    pub(crate) fn shared_memory(&self) -> Arc<RegionMemory> {
        self.memory.clone()
    }

    /// Deadline of each call.
    pub(crate) fn call_timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// The daemon's boot id when the region was opened.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.opened.boot_id
    }

    /// Where the daemon reads and writes payloads.
    #[must_use]
    pub fn kind(&self) -> RegionKind {
        self.opened.kind()
    }

    /// Why that is not the device memory that was offered; empty when it is.
    #[must_use]
    pub fn fallback_reason(&self) -> &str {
        &self.opened.reason
    }

    /// A `cudaIpcEventHandle_t` of the event that the daemon records behind each answer that its
    /// kernels write in place; none where there is none. Not to be used once the region is dropped.
    #[must_use]
    pub fn event_handle(&self) -> Option<[u8; 64]> {
        self.opened.cuda_event[..].try_into().ok()
    }

    /// Why there is no [event](Self::event), where answers are written in place nonetheless; else
    /// empty.
    #[must_use]
    pub fn no_event(&self) -> &str {
        &self.opened.no_event
    }

    /// Why payloads in device memory are copied through the host; empty where kernels read queries
    /// and rows and write outputs where they are.
    #[must_use]
    pub fn copy_reason(&self) -> &str {
        &self.opened.copied
    }

    /// Refuses to look for payloads in this memory when they are in a device's.
    fn check_kind(&self) -> Result<(), ClientError> {
        match self.kind() {
            RegionKind::Memfd => Ok(()),
            kind => {
                let message = format!("payloads of this region are in device memory ({kind:?})");
                Err(ClientError::new(ErrorCode::InvalidArgument, message))
            }
        }
    }

    /// Sends an attend whose queries are in the region; the batch's own are ignored.
    /// [`RegionClient::wait`] with its completion record tells when the answer is there.
    ///
    /// # Errors
    /// When a place is not inside the region, or the daemon is gone.
    pub fn send_attend(&self, batch: AttendBatch, at: AttendLayout) -> Result<(), ClientError> {
        self.send_attend_with(batch, AnswerForm::default(), at, None)
    }

    /// Sends a batch with [`AttendBatch::per_query_errors`], whose errors go to
    /// the region's own memory, [`QUERY_ERROR_BYTES`] for each query. The first number that
    /// [`RegionClient::wait`] answers is how many queries failed; [`RegionClient::query_errors`]
    /// says which.
    ///
    /// # Errors
    /// As [`RegionClient::send_attend`].
    pub fn send_attend_with_errors(
        &self,
        batch: AttendBatch,
        at: AttendLayout,
        query_errors: RegionSlice,
    ) -> Result<(), ClientError> {
        self.send_attend_with(batch, AnswerForm::default(), at, Some(query_errors))
    }

    /// [`RegionClient::send_attend`], answered in a form of the caller's; `out` of
    /// [`AttendLayout::pack_formed`] has room for it.
    ///
    /// # Errors
    /// As [`RegionClient::send_attend`].
    pub fn send_attend_formed(
        &self,
        batch: AttendBatch,
        form: AnswerForm,
        at: AttendLayout,
    ) -> Result<(), ClientError> {
        self.send_attend_with(batch, form, at, None)
    }

    fn send_attend_with(
        &self,
        batch: AttendBatch,
        form: AnswerForm,
        at: AttendLayout,
        query_errors: Option<RegionSlice>,
    ) -> Result<(), ClientError> {
        let mut request = v1::AttendRequest::from(batch);
        form.write_request(&mut request);
        request.q = Some(in_region(at.q));
        let (out, lse) = (Some(at.out), Some(at.lse));
        let call = v1::RegionAttend { request: Some(request), out, lse, query_errors };
        self.send_call(at.done, v1::region_call::Call::Attend(call))
    }

    /// Sends K and V that are in the region; the chunk's own are ignored.
    ///
    /// # Errors
    /// As [`RegionClient::send_attend`].
    pub fn send_store(
        &self,
        chunk: StoreChunk,
        done: u64,
        [k, v]: [RegionSlice; 2],
    ) -> Result<(), ClientError> {
        let mut request = v1::StoreBlocksRequest::from(chunk);
        request.k = Some(in_region(k));
        request.v = Some(in_region(v));
        self.send_call(done, v1::region_call::Call::Store(request))
    }

    /// Sleeps until the device has all of a call, or its end; for workers that order their own work
    /// behind [`RegionClient::event`]. Without [`RegionOptions::with_launches`], and where answers
    /// are not written in place, that is the call's end.
    ///
    /// # Errors
    /// `DEADLINE_EXCEEDED`; a lost connection.
    pub fn wait_launched(&self, done: u64) -> Result<CallProgress, ClientError> {
        let record = CompletionRecord::from_offset(&self.memory, done)
            .map_err(|error| region_error(&error))?;
        let end = self.timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let time = left.map_or(LOOK_INTERVAL, |left| left.min(LOOK_INTERVAL));
            if let Some(launch) =
                record.wait_launched(time).map_err(|error| region_error(&error))?
            {
                return Ok(if launch { CallProgress::Launched } else { CallProgress::Ended });
            }
            if let (Some(timeout), Some(Duration::ZERO)) = (self.timeout, left) {
                self.given_up.lock().insert(done);
                return Err(ClientError::deadline_exceeded(timeout));
            }
            self.read_notice()?;
        }
    }

    /// Sleeps until a call has ended.
    ///
    /// # Errors
    /// The daemon's refusal; `DEADLINE_EXCEEDED`, after which the daemon may still write to the
    /// call's places; a lost connection.
    pub fn wait_call(&self, done: u64) -> Result<[u32; 3], ClientError> {
        match self.wait_outcome(done)? {
            CallOutcome::Done(values) => Ok(values),
            CallOutcome::Refused(refusal) => Err(self.explain_refusal(&refusal)),
        }
    }

    /// Sleeps until a call has ended, whichever way.
    pub(crate) fn wait_outcome(&self, done: u64) -> Result<CallOutcome, ClientError> {
        let record = CompletionRecord::from_offset(&self.memory, done)
            .map_err(|error| region_error(&error))?;
        let end = self.timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let time = left.map_or(LOOK_INTERVAL, |left| left.min(LOOK_INTERVAL));
            if let Some(outcome) = record.wait_end(time).map_err(|error| region_error(&error))? {
                self.given_up.lock().remove(&done);
                return Ok(outcome);
            }
            if let (Some(timeout), Some(Duration::ZERO)) = (self.timeout, left) {
                self.given_up.lock().insert(done);
                return Err(ClientError::deadline_exceeded(timeout));
            }
            // A daemon that is gone wakes no one. What it said before may be in the record by now.
            if let Err(error) = self.read_notice() {
                return match record
                    .wait_end(Duration::ZERO)
                    .map_err(|error| region_error(&error))?
                {
                    Some(CallOutcome::Done(values)) => Ok(CallOutcome::Done(values)),
                    _ => Err(error),
                };
            }
        }
    }

    /// Waits for the end of a call that was given up with this record. The end is the old call's,
    /// and would be taken for that of the next one.
    ///
    /// # Errors
    /// `DEADLINE_EXCEEDED` where it does not end in time; a lost connection.
    pub(crate) fn settle_record(&self, done: u64) -> Result<(), ClientError> {
        if self.given_up.lock().contains(&done) {
            self.wait_outcome(done)?;
        }
        Ok(())
    }

    /// The error of a call that was refused.
    pub(crate) fn explain_refusal(&self, refusal: &CallRefusal) -> ClientError {
        let CallRefusal { text, retry_after_ms, id_boot, .. } = refusal;
        let retry_after = Some(*retry_after_ms).filter(|ms| *ms != 0);
        let restarted = (*id_boot != 0).then(|| DaemonRestart {
            old: format!("{id_boot:08x}"),
            new: self.boot_id().to_owned(),
        });
        let retry_after = retry_after.map(|ms| Duration::from_millis(ms.into()));
        ClientError { retry_after, restarted, ..of_text(text) }
    }

    /// Errors of single queries, after [`RegionClient::wait`] said that there are some.
    ///
    /// # Errors
    /// When the place is not inside the region.
    pub fn query_errors(&self, at: RegionSlice) -> Result<Vec<QueryError>, ClientError> {
        let mut bytes = vec![0; at.bytes as usize];
        self.memory.read_bytes(at.offset, &mut bytes).map_err(|error| region_error(&error))?;
        let said = (0..).zip(bytes.chunks_exact(QUERY_ERROR_BYTES as usize));
        let refusal = |(query, text): (u32, &[u8])| {
            let text = text.split(|byte| *byte == 0).next().filter(|text| !text.is_empty())?;
            let ClientError { code, message, .. } = of_text(&String::from_utf8_lossy(text));
            let error = CallError::new(code.unwrap_or(ErrorCode::Internal), message);
            Some(QueryError { query, error })
        };
        Ok(said.filter_map(refusal).collect())
    }

    /// One attend from end to end, at the region's begin.
    ///
    /// # Errors
    /// As [`RegionClient::send_attend`] and [`RegionClient::wait`].
    pub fn attend_once(
        &self,
        batch: AttendBatch,
        head_dims: [u32; 2],
    ) -> Result<Attended, ClientError> {
        self.check_kind()?;
        let at = AttendLayout::pack_from(0, &batch, head_dims);
        self.memory.write_bytes(at.q.offset, &batch.q).map_err(|error| region_error(&error))?;
        let bytes = batch.queries.len() as u64 * QUERY_ERROR_BYTES;
        let errors = RegionSlice { offset: at.end().next_multiple_of(ALIGN), bytes };
        let failed = if batch.per_query_errors {
            self.send_attend_with_errors(batch, at, errors)?;
            self.wait_call(at.done)?[0]
        } else {
            self.send_attend(batch, at)?;
            self.wait_call(at.done)?;
            0
        };
        let query_errors = if failed > 0 { self.query_errors(errors)? } else { Vec::new() };
        let mut out = vec![0; at.out.bytes as usize];
        self.memory.read_bytes(at.out.offset, &mut out).map_err(|error| region_error(&error))?;
        let mut lse = vec![0; at.lse.bytes as usize];
        self.memory.read_bytes(at.lse.offset, &mut lse).map_err(|error| region_error(&error))?;
        let lse = lse.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        Ok(Attended { out: out.into(), lse, query_errors })
    }

    /// One store from end to end, at the region's begin.
    ///
    /// # Errors
    /// As [`RegionClient::send_store`] and [`RegionClient::wait`].
    pub fn store_once(&self, chunk: StoreChunk) -> Result<StoreAck, ClientError> {
        self.check_kind()?;
        let mut end = CompletionRecord::BYTES;
        let mut places = [RegionSlice::default(); 2];
        for (place, rows) in places.iter_mut().zip([&chunk.k, &chunk.v]) {
            self.memory.write_bytes(end, rows).map_err(|error| region_error(&error))?;
            *place = RegionSlice { offset: end, bytes: rows.len() as u64 };
            end = (end + place.bytes).next_multiple_of(ALIGN);
        }
        let layer = chunk.layer;
        self.send_store(chunk, 0, places)?;
        let [length, replayed, packed_blocks] = self.wait_call(0)?;
        Ok(StoreAck { layer, length, replayed: replayed != 0, packed_blocks })
    }

    pub(crate) fn send_call(
        &self,
        done: u64,
        call: v1::region_call::Call,
    ) -> Result<(), ClientError> {
        self.settle_record(done)?;
        let record = CompletionRecord::from_offset(&self.memory, done)
            .map_err(|error| region_error(&error))?;
        record.clear().map_err(|error| region_error(&error))?;
        let timeout_us = self.timeout.map_or(0, |timeout| timeout.as_micros() as u64);
        let say_launched = self.say_launched;
        let call = v1::RegionCall { done, timeout_us, call: Some(call), say_launched };
        self.send_message(&call, Vec::new())
    }

    /// Sends a message, and descriptors with its first byte.
    fn send_message(
        &self,
        message: &impl Message,
        mut files: Vec<BorrowedFd<'_>>,
    ) -> Result<(), ClientError> {
        let mut bytes = (message.encoded_len() as u32).to_le_bytes().to_vec();
        bytes.extend(message.encode_to_vec());
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match send_files(&self.stream, rest, &files) {
                Ok(sent) => {
                    rest = &rest[sent..];
                    files.clear();
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(SEND_PAUSE);
                }
                // Why it hung up may still be there to read.
                Err(error) => {
                    return Err(self
                        .read_notice()
                        .err()
                        .unwrap_or_else(|| lost_connection(&error)));
                }
            }
        }
        Ok(())
    }

    /// Reads an unasked message of the daemon: none, or why it ends the connection. Its messages
    /// are small, so each is there at once.
    pub(crate) fn read_notice(&self) -> Result<Option<v1::OpenRegionResponse>, ClientError> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let got = match receive_files(&self.stream, &mut bytes) {
            Ok((0, _)) => return Err(lost_connection(&ErrorKind::UnexpectedEof.into())),
            Ok((got, _)) => got,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(lost_connection(&error)),
        };
        let message = v1::OpenRegionResponse::decode(bytes[..got].get(4..).unwrap_or_default());
        let message = message.map_err(|error| {
            ClientError::new(ErrorCode::Internal, format!("malformed reply: {error}"))
        })?;
        if message.refused.is_empty() { Ok(Some(message)) } else { Err(of_text(&message.refused)) }
    }
}

pub(crate) fn in_region(slice: RegionSlice) -> v1::Payload {
    v1::Payload { source: Some(v1::payload::Source::Region(slice)) }
}

/// An error of the region on this side.
pub(crate) fn region_error(error: &kvd_shm::RegionError) -> ClientError {
    ClientError::new(kvd_core::Coded::code(error), error.to_string())
}

/// `CODE: message`.
fn of_text(text: &str) -> ClientError {
    let (code, message) = text.split_once(": ").unwrap_or(("INTERNAL", text));
    let code = ErrorCode::from_name(code).unwrap_or(ErrorCode::Internal);
    let retry_after = code.is_retryable().then_some(kvd_proto::RETRY_AFTER_DEFAULT);
    ClientError { retry_after, ..ClientError::new(code, message) }
}

fn lost_connection(error: &io::Error) -> ClientError {
    ClientError::lost_connection(format!("region: {error}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail")]
mod tests {
    use super::*;
    use std::io::Read;

    fn begin_store(region: &RegionClient) -> Result<(), ClientError> {
        region.send_call(0, v1::region_call::Call::Store(v1::StoreBlocksRequest::default()))
    }

    #[test]
    fn the_late_end_of_a_call_is_not_taken_for_that_of_the_next() {
        let (stream, daemon) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        daemon.set_nonblocking(true).unwrap();
        let region = RegionClient {
            stream,
            memory: Arc::new(RegionMemory::create_memory(4096).unwrap()),
            opened: v1::OpenRegionResponse::default(),
            timeout: Some(Duration::from_millis(5)),
            say_launched: false,
            given_up: Mutex::default(),
        };
        let is_late = |error: ClientError| error.code == Some(ErrorCode::DeadlineExceeded);
        let mut sent = [0; 4096];
        begin_store(&region).unwrap();
        assert!(is_late(region.wait_call(0).unwrap_err()));
        let first = (&daemon).read(&mut sent).unwrap();
        // The record is the old call's: the next one is not sent.
        assert!(is_late(begin_store(&region).unwrap_err()));
        assert!((&daemon).read(&mut sent).is_err());
        let record = CompletionRecord::from_offset(&region.memory, 0).unwrap();
        record.end_call(&CallOutcome::Done([7, 0, 0])).unwrap();
        begin_store(&region).unwrap();
        assert_eq!((&daemon).read(&mut sent).unwrap(), first);
        assert!(is_late(region.wait_call(0).unwrap_err()));
        record.end_call(&CallOutcome::Done([8, 0, 0])).unwrap();
        assert_eq!(region.wait_call(0).unwrap(), [8, 0, 0]);
    }
}
