//! Messages on a region's socket: each behind its length, a little-endian u32.

use kvd_shm::{receive_files, send_files};
use prost::Message;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::time::Duration;
use tokio::io::{AsyncWrite, Interest};
use tokio::net::UnixStream;

/// Largest message: 4096 queries take less than half of it. Payloads are not in messages.
const FRAME_BYTES_MAX: usize = 1 << 20;
/// Bytes of the length.
const LENGTH_BYTES: usize = 4;
/// Bytes of one read.
const READ_BYTES: usize = 16 << 10;

/// A message, and the descriptors that came with it.
pub(super) struct ReceivedFrame<M> {
    pub(super) message: M,
    pub(super) files: Vec<OwnedFd>,
}

/// A socket and what was read of the next message.
pub(super) struct FrameSocket {
    stream: UnixStream,
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

impl FrameSocket {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, bytes: Vec::new(), files: Vec::new() }
    }

    /// The next message with the descriptors that came with it; `None` at the peer's end. May be
    /// given up and asked again.
    pub(super) async fn next<M: Message + Default>(
        &mut self,
    ) -> io::Result<Option<ReceivedFrame<M>>> {
        loop {
            if let Some(length) = self.bytes.first_chunk::<LENGTH_BYTES>() {
                let end = LENGTH_BYTES + u32::from_le_bytes(*length) as usize;
                if end > LENGTH_BYTES + FRAME_BYTES_MAX {
                    let message = format!("{end} bytes are over the most of {FRAME_BYTES_MAX}");
                    return Err(io::Error::new(ErrorKind::InvalidData, message));
                }
                if self.bytes.len() >= end {
                    let message = M::decode(&self.bytes[LENGTH_BYTES..end]);
                    self.bytes.drain(..end);
                    let files = std::mem::take(&mut self.files);
                    let message =
                        message.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
                    return Ok(Some(ReceivedFrame { message, files }));
                }
            }
            let mut piece = [0; READ_BYTES];
            let stream = &self.stream;
            let read = || receive_files(stream, &mut piece);
            let (got, files) = stream.async_io(Interest::READABLE, read).await?;
            if got == 0 {
                return if self.bytes.is_empty() {
                    Ok(None)
                } else {
                    Err(ErrorKind::UnexpectedEof.into())
                };
            }
            self.bytes.extend_from_slice(&piece[..got]);
            self.files.extend(files);
            if self.files.len() > kvd_shm::DESCRIPTORS_MAX {
                let message = "more descriptors than a message may carry";
                return Err(io::Error::new(ErrorKind::InvalidData, message));
            }
        }
    }

    /// Says that nothing more comes, and passes over what does until the peer leaves, or the time
    /// is over: a peer whose last message was not read may lose what was said to it.
    pub(super) async fn pass_over_rest(mut self, time: Duration) {
        let passed_over = async {
            let stream = &mut self.stream;
            poll_fn(|context| Pin::new(&mut *stream).poll_shutdown(context)).await?;
            let mut waste = [0; READ_BYTES];
            loop {
                stream.readable().await?;
                match stream.try_read(&mut waste) {
                    Ok(0) => return io::Result::Ok(()),
                    Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                    _ => {}
                }
            }
        };
        // However it ends, the connection does.
        let _ = tokio::time::timeout(time, passed_over).await;
    }

    /// Sends a message.
    pub(super) async fn send_message(&self, message: &impl Message) -> io::Result<()> {
        let body = message.encode_to_vec();
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend(body);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let write = || send_files(&self.stream, rest, &[]);
            let sent = self.stream.async_io(Interest::WRITABLE, write).await?;
            rest = &rest[sent..];
        }
        Ok(())
    }
}
