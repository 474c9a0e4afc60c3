//! A TCP socket of a door, with TLS or without. The handshake is part of the first read or write,
//! so that a peer who takes its time holds its own connection and no other.

use super::DoorTls;
use crate::access::{CertificateNames, ConnectionPeer};
use rustls::pki_types::CertificateDer;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// An accepted socket.
pub(crate) struct DoorStream {
    state: DoorState,
    peer: Arc<ConnectionPeer>,
    info: TcpConnectInfo,
}

enum DoorState {
    Plain(TcpStream),
    /// The handshake.
    Greeting(Box<Accept<TcpStream>>),
    Secured(Box<TlsStream<TcpStream>>),
    /// The handshake failed.
    Broken,
}

impl DoorStream {
    /// Takes a socket; with `tls`, its peer has to begin a handshake.
    pub(crate) fn new(socket: TcpStream, tls: Option<&DoorTls>) -> Self {
        let info = socket.connect_info();
        let peer = Arc::new(ConnectionPeer::of_address(info.remote_addr()));
        let state = match tls {
            None => DoorState::Plain(socket),
            Some(tls) => {
                let accept = TlsAcceptor::from(tls.current_config()).accept(socket);
                DoorState::Greeting(Box::new(accept))
            }
        };
        Self { state, peer, info }
    }

    /// Its other end.
    pub(crate) fn socket_peer(&self) -> &Arc<ConnectionPeer> {
        &self.peer
    }

    /// Goes on with the handshake until it is done.
    fn poll_handshake(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let DoorState::Greeting(accept) = &mut self.state else { return Poll::Ready(Ok(())) };
        match ready!(Pin::new(&mut **accept).poll(context)) {
            Ok(stream) => {
                let shown = stream.get_ref().1.peer_certificates();
                if let Some(certificate) = shown.and_then(<[_]>::first) {
                    self.peer.name_certificate(read_names(certificate));
                }
                self.state = DoorState::Secured(Box::new(stream));
                Poll::Ready(Ok(()))
            }
            Err(error) => {
                tracing::debug!(peer = %self.peer, %error, "a TLS handshake failed");
                self.state = DoorState::Broken;
                Poll::Ready(Err(error))
            }
        }
    }

    fn failed_handshake() -> io::Error {
        io::Error::new(io::ErrorKind::ConnectionAborted, "the TLS handshake failed")
    }
}

/// The alternative names of a certificate.
fn read_names(certificate: &CertificateDer<'_>) -> CertificateNames {
    // One that does not parse was not verified either.
    let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) else {
        return CertificateNames::default();
    };
    let dns = parsed.valid_dns_names().map(|name| format!("dns:{name}"));
    let uri = parsed.valid_uri_names().map(|name| format!("uri:{name}"));
    CertificateNames { names: dns.chain(uri).collect() }
}

/// Calls a method of whichever stream there is, once the handshake is done.
macro_rules! poll_inner {
    ($self:ident, $context:ident, $method:ident $(, $argument:expr)*) => {{
        let this = $self.get_mut();
        ready!(this.poll_handshake($context))?;
        match &mut this.state {
            DoorState::Plain(socket) => Pin::new(socket).$method($context $(, $argument)*),
            DoorState::Secured(stream) => {
                Pin::new(&mut **stream).$method($context $(, $argument)*)
            }
            DoorState::Greeting(_) | DoorState::Broken => {
                Poll::Ready(Err(Self::failed_handshake()))
            }
        }
    }};
}

impl AsyncRead for DoorStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        poll_inner!(self, context, poll_read, buffer)
    }
}

impl AsyncWrite for DoorStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        poll_inner!(self, context, poll_write, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        poll_inner!(self, context, poll_flush)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        poll_inner!(self, context, poll_shutdown)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        poll_inner!(self, context, poll_write_vectored, slices)
    }

    fn is_write_vectored(&self) -> bool {
        // A TLS stream gathers slices as well as a socket does.
        true
    }
}

impl Connected for DoorStream {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.info.clone()
    }
}
