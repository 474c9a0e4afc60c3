//! Who is at the other end of a connection, as far as the system and TLS vouch for it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::OnceLock;

/// The way that a peer came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerDoor {
    /// This process.
    InProcess,
    /// TCP, with or without TLS.
    Tcp,
    /// The Unix socket of gRPC.
    Unix,
    /// The Unix socket of regions.
    Region,
}

/// The other end of a connection.
#[derive(Debug)]
pub(crate) struct ConnectionPeer {
    door: PeerDoor,
    address: Option<SocketAddr>,
    /// User and process, by `SO_PEERCRED`.
    uid: Option<u32>,
    process: Option<i32>,
    /// Set when the handshake has verified a certificate.
    certificate: OnceLock<CertificateNames>,
}

/// The names that a verified certificate has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CertificateNames {
    /// `dns:NAME` and `uri:URI` of its subject alternative names.
    pub(crate) names: Vec<String>,
}

impl ConnectionPeer {
    /// Calls of this process.
    pub(crate) fn in_process() -> Self {
        Self::new(PeerDoor::InProcess)
    }

    fn new(door: PeerDoor) -> Self {
        let certificate = OnceLock::new();
        Self { door, address: None, uid: None, process: None, certificate }
    }

    /// One that came by TCP.
    pub(crate) fn of_address(address: Option<SocketAddr>) -> Self {
        Self { address, ..Self::new(PeerDoor::Tcp) }
    }

    /// One that came by a Unix socket.
    pub(crate) fn of_socket(door: PeerDoor, socket: &tokio::net::UnixStream) -> Self {
        let Ok(credentials) = socket.peer_cred() else { return Self::new(door) };
        let (uid, process) = (Some(credentials.uid()), credentials.pid());
        Self { uid, process, ..Self::new(door) }
    }

    /// Notes the certificate that the handshake has verified.
    pub(crate) fn name_certificate(&self, names: CertificateNames) {
        // A connection has one handshake.
        let _ = self.certificate.set(names);
    }

    /// Its user, where it came by a Unix socket.
    pub(crate) fn peer_uid(&self) -> Option<u32> {
        self.uid
    }

    /// Names of its certificate, where it showed one.
    pub(crate) fn certificate_names(&self) -> Option<&CertificateNames> {
        self.certificate.get()
    }
}

impl fmt::Display for ConnectionPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let door = match self.door {
            PeerDoor::InProcess => return f.write_str("this process"),
            PeerDoor::Tcp => {
                return match self.address {
                    Some(address) => write!(f, "{address}"),
                    None => f.write_str("tcp"),
                };
            }
            PeerDoor::Unix => "unix",
            PeerDoor::Region => "region",
        };
        // One of another PID namespace has no number here.
        match self.process {
            Some(process) if process > 0 => write!(f, "{door}, process {process}"),
            _ => f.write_str(door),
        }
    }
}
