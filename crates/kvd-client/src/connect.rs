//! Dialling: TCP or a Unix socket, with windows wide enough for tensors.

use crate::endpoint::{Endpoint, EndpointAddress};
use crate::error::ClientError;
use crate::secrets::{BearerToken, TlsOptions};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint as Dialer, Uri};

/// One stream may have this much in flight, so that one layer of a prompt never waits for a
/// window update. Frames stay at their default: larger ones cost more CPU than they save.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;

/// While calls or streams are open, a daemon that sends nothing is asked for a sign of life this
/// often: else a stream that holds a session would not see that the network has gone.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// How a [`Client`](crate::Client) connects and what it accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientOptions {
    /// Largest message in either direction, in bytes; 64 MiB. The daemon has its own limit,
    /// `message_bytes_max` of [`ServerInfo`](crate::ServerInfo).
    pub message_bytes_max: usize,
    /// How long connecting may take; 5 s.
    pub connect_timeout: Duration,
    /// Deadline of each call that is not a stream; none.
    pub timeout: Option<Duration>,
    /// TLS of an `https` endpoint; the system's authorities and no certificate when absent.
    pub tls: TlsOptions,
    /// Says whose calls these are, in `authorization`; none.
    pub token: Option<BearerToken>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            message_bytes_max: 64 << 20,
            connect_timeout: Duration::from_secs(5),
            timeout: None,
            tls: TlsOptions::default(),
            token: None,
        }
    }
}

impl ClientOptions {
    /// With another largest message.
    #[must_use]
    pub fn with_message_bytes_max(mut self, bytes: usize) -> Self {
        self.message_bytes_max = bytes;
        self
    }

    /// With another limit on connecting.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// With other authorities, or a certificate of its own.
    #[must_use]
    pub fn with_tls(mut self, tls: TlsOptions) -> Self {
        self.tls = tls;
        self
    }

    /// With a token that says whose calls these are.
    #[must_use]
    pub fn with_token(mut self, token: BearerToken) -> Self {
        self.token = Some(token);
        self
    }

    /// With a deadline for each call.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// Connects once; the channel reconnects by itself when the connection is lost later.
pub(crate) async fn connect_channel(
    endpoint: &Endpoint,
    options: &ClientOptions,
) -> Result<Channel, ClientError> {
    let dialer = |uri: Uri| {
        Dialer::from(uri)
            .connect_timeout(options.connect_timeout)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
    };
    let connected = match &endpoint.0 {
        EndpointAddress::Tcp(uri) if uri.scheme_str() == Some("https") => {
            match dialer(uri.clone()).tls_config(options.tls.client_config()) {
                Ok(dialer) => dialer.connect().await,
                Err(error) => Err(error),
            }
        }
        EndpointAddress::Tcp(uri) => dialer(uri.clone()).connect().await,
        EndpointAddress::Unix(path) => {
            // HTTP/2 wants an authority; nothing resolves this one.
            let dialer = dialer(Uri::from_static("http://localhost"));
            let path = path.clone();
            let connect = move |_| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            };
            dialer.connect_with_connector(tower::service_fn(connect)).await
        }
    };
    connected.map_err(|error| {
        let mut error = ClientError::from_transport(&error);
        error.message = format!("{endpoint}: {}", error.message);
        error
    })
}
