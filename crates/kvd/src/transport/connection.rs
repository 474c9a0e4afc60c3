//! Accepted connections: counted, given up when the peer stays silent, and cut off when the
//! daemon ends. The servers run each connection on a task of its own that nobody can abort; its
//! socket failing is what ends it.

use crate::access::{ConnectionPeer, PeerDoor};
use crate::metrics::OpenCount;
use crate::service::CallOwner;
use crate::tls::DoorStream;
use metrics::Gauge;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Sleep;
use tokio_stream::Stream;
use tonic::transport::server::{Connected, TcpConnectInfo, UdsConnectInfo};

/// How far the daemon's end has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServerPhase {
    /// Not begun.
    Serving,
    /// No new work; requests in flight are answered.
    Draining,
    /// Connections fail.
    Cut,
}

impl ServerPhase {
    /// Returns once `phase` has come this far, or the daemon is gone.
    pub(crate) async fn wait_until(self, mut phase: watch::Receiver<Self>) {
        // A dropped sender means the daemon is gone, which is as far as it goes.
        let _ = phase.wait_for(|now| *now >= self).await;
    }
}

/// Bytes that an HTTP/2 client sends before anything else (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = 24;

/// How long a connection that has ended is still read. A socket that closes with unread bytes
/// resets its peer, who may then lose the answer that it was sent last.
const LINGER_TIME: Duration = Duration::from_secs(2);

/// Bytes of one read of what is passed over.
const WASTE_BYTES: usize = 16 << 10;

/// A socket that fails from [`ServerPhase::Cut`] on, and that ends when its peer has read all of
/// it.
pub(crate) struct ClientConnection<IO> {
    io: IO,
    phase: watch::Receiver<ServerPhase>,
    /// Ends when the connection is to be cut off; `None` once it is.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Bytes still to come until the peer is known to speak.
    silent_bytes: usize,
    /// When an ended connection is read no longer; `None` until it has ended.
    linger: Option<Pin<Box<Sleep>>>,
    owner: CallOwner,
    _permit: OwnedSemaphorePermit,
    _count: OpenCount,
}

/// Who is at the other end, as an extension of each request.
#[derive(Clone)]
pub(crate) struct PeerInfo<I> {
    pub(super) info: I,
    owner: CallOwner,
}

/// The connection that a request came over.
pub(super) fn owner_of(extensions: &http::Extensions) -> Option<&CallOwner> {
    let tcp = extensions.get::<PeerInfo<TcpConnectInfo>>().map(|peer| &peer.owner);
    let unix = || extensions.get::<PeerInfo<UdsConnectInfo>>().map(|peer| &peer.owner);
    // Calls of regions name their connection themselves.
    tcp.or_else(unix).or_else(|| extensions.get::<CallOwner>())
}

/// A socket that knows who is at its other end.
pub(super) trait PeerSocket {
    /// As far as it is known when the socket is accepted.
    fn find_peer(&self) -> Arc<ConnectionPeer>;
}

impl PeerSocket for DoorStream {
    fn find_peer(&self) -> Arc<ConnectionPeer> {
        self.socket_peer().clone()
    }
}

impl PeerSocket for UnixStream {
    fn find_peer(&self) -> Arc<ConnectionPeer> {
        Arc::new(ConnectionPeer::of_socket(PeerDoor::Unix, self))
    }
}

impl<IO: PeerSocket> ClientConnection<IO> {
    /// One that keeps `permit` while it lasts, and has a time to send the HTTP/2 preface: until
    /// then keepalive does not watch it, and a silent peer would hold its place for ever.
    fn new_limited(io: IO, permit: OwnedSemaphorePermit, limits: &ConnectionLimits) -> Self {
        let (phase, time, peer) = (limits.phase.clone(), limits.silence_max, io.find_peer());
        let cut = wait_cut(&phase);
        let end: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
            let _ = tokio::time::timeout(time, cut).await;
        });
        Self {
            io,
            phase,
            end: Some(end),
            silent_bytes: PREFACE_BYTES,
            linger: None,
            owner: CallOwner::of_peer(limits.bytes_max, peer),
            _permit: permit,
            _count: OpenCount::new(&limits.open),
        }
    }
}

impl<IO> ClientConnection<IO> {
    /// Lets `result` through unless the connection is cut off.
    fn unless_cut<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let cut_off = match &mut self.end {
            None => true,
            // One that always has bytes to move never waits, and is cut off all the same.
            Some(end) => {
                *self.phase.borrow() >= ServerPhase::Cut
                    || (result.is_pending() && end.as_mut().poll(context).is_ready())
            }
        };
        if cut_off {
            self.end = None;
            let message = "cut off by the daemon";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, message)));
        }
        result
    }

    fn count_heard(&mut self, bytes: usize) {
        if self.silent_bytes > 0 {
            self.silent_bytes = self.silent_bytes.saturating_sub(bytes);
            if self.silent_bytes == 0 && self.end.is_some() {
                self.end = Some(wait_cut(&self.phase));
            }
        }
    }
}

impl<IO: AsyncRead + Unpin> ClientConnection<IO> {
    /// Passes over what the peer still sends, until it leaves.
    fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let time = || Box::pin(tokio::time::sleep(LINGER_TIME));
        let over = self.linger.get_or_insert_with(time).as_mut().poll(context);
        let mut waste = [0; WASTE_BYTES];
        loop {
            let mut buffer = ReadBuf::new(&mut waste);
            let read = Pin::new(&mut self.io).poll_read(context, &mut buffer);
            match self.unless_cut(context, read) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() && over.is_pending() => {}
                Poll::Pending if over.is_pending() => return Poll::Pending,
                _ => return Poll::Ready(()),
            }
        }
    }
}

fn wait_cut(phase: &watch::Receiver<ServerPhase>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(ServerPhase::Cut.wait_until(phase.clone()))
}

impl<IO: AsyncRead + Unpin> AsyncRead for ClientConnection<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let result = Pin::new(&mut this.io).poll_read(context, buffer);
        this.count_heard(buffer.filled().len() - before);
        this.unless_cut(context, result)
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ClientConnection<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.io).poll_write(context, bytes);
        this.unless_cut(context, result)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.io).poll_flush(context);
        this.unless_cut(context, result)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.io).poll_shutdown(context))?;
        }
        this.poll_linger(context).map(Ok)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.io).poll_write_vectored(context, slices);
        this.unless_cut(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

impl<IO: Connected> Connected for ClientConnection<IO> {
    type ConnectInfo = PeerInfo<IO::ConnectInfo>;

    fn connect_info(&self) -> Self::ConnectInfo {
        PeerInfo { info: self.io.connect_info(), owner: self.owner.clone() }
    }
}

/// Limits that all listeners of a server share.
#[derive(Clone)]
pub(super) struct ConnectionLimits {
    /// One permit per connection.
    pub(super) permits: Arc<Semaphore>,
    /// How long a peer may take to speak.
    pub(super) silence_max: Duration,
    pub(super) phase: watch::Receiver<ServerPhase>,
    /// Bytes of requests and answers of one connection.
    pub(super) bytes_max: u64,
    /// How many are open.
    pub(super) open: Gauge,
}

/// How long to wait when the system gives no socket, which is when it has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The sockets of a listener as connections; those beyond the limit are closed at once.
pub(super) struct IncomingConnections<S> {
    sockets: S,
    limits: ConnectionLimits,
    pause: Option<Pin<Box<Sleep>>>,
    /// Whether the last one was closed, so that the log tells of a flood once.
    full: bool,
}

impl<S> IncomingConnections<S> {
    pub(super) fn new(sockets: S, limits: ConnectionLimits) -> Self {
        Self { sockets, limits, pause: None, full: false }
    }

    fn admit_socket<IO: PeerSocket>(&mut self, io: IO) -> Option<ClientConnection<IO>> {
        let Ok(permit) = self.limits.permits.clone().try_acquire_owned() else {
            if !self.full {
                tracing::warn!("server.connections_max is reached; new connections are closed");
            }
            self.full = true;
            return None;
        };
        self.full = false;
        Some(ClientConnection::new_limited(io, permit, &self.limits))
    }
}

impl<S, IO> Stream for IncomingConnections<S>
where
    S: Stream<Item = io::Result<IO>> + Unpin,
    IO: Unpin + PeerSocket,
{
    type Item = io::Result<ClientConnection<IO>>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(pause) = &mut this.pause {
                ready!(pause.as_mut().poll(context));
                this.pause = None;
            }
            match ready!(Pin::new(&mut this.sockets).poll_next(context)) {
                None => return Poll::Ready(None),
                Some(Ok(io)) => {
                    if let Some(connection) = this.admit_socket(io) {
                        return Poll::Ready(Some(Ok(connection)));
                    }
                }
                // The peer left before it was accepted; the next one may be waiting.
                Some(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Some(Err(error)) => {
                    // The server would ask again at once, and get the same answer.
                    tracing::warn!(%error, "a connection could not be accepted");
                    this.pause = Some(Box::pin(tokio::time::sleep(ACCEPT_PAUSE)));
                }
            }
        }
    }
}
