//! How a client says who it is, and whom it trusts: TLS and tokens. Nothing here is printed.

use std::fmt;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// TLS of an `https` endpoint.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlsOptions {
    /// Authorities that may sign the daemon's certificate, in PEM form; the system's when absent.
    pub ca_pem: Option<Vec<u8>>,
    /// The client's certificate and its key.
    pub identity: Option<ClientIdentity>,
    /// The name that the daemon's certificate must have; the endpoint's host when absent.
    pub server_name: Option<String>,
}

/// A certificate that a client shows.
#[derive(Clone, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The chain, in PEM form.
    pub certificate_pem: Vec<u8>,
    /// The private key, in PEM form.
    pub key_pem: Vec<u8>,
}

impl TlsOptions {
    /// With these authorities, in PEM form, and no others.
    #[must_use]
    pub fn with_ca(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca_pem = Some(pem.into());
        self
    }

    /// With a certificate to show.
    #[must_use]
    pub fn with_identity(mut self, identity: ClientIdentity) -> Self {
        self.identity = Some(identity);
        self
    }

    /// With another name than the endpoint's host.
    #[must_use]
    pub fn with_server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    pub(crate) fn client_config(&self) -> ClientTlsConfig {
        let config = ClientTlsConfig::new();
        let config = match &self.ca_pem {
            Some(pem) => config.ca_certificate(Certificate::from_pem(pem)),
            None => config.with_native_roots(),
        };
        let config = match &self.server_name {
            Some(name) => config.domain_name(name),
            None => config,
        };
        match &self.identity {
            Some(ClientIdentity { certificate_pem, key_pem }) => {
                config.identity(Identity::from_pem(certificate_pem, key_pem))
            }
            None => config,
        }
    }
}

impl fmt::Debug for TlsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_identity = self.identity.is_some();
        f.debug_struct("TlsOptions")
            .field("server_name", &self.server_name)
            .field("has_ca", &self.ca_pem.is_some())
            .field("has_identity", &has_identity)
            .finish()
    }
}

impl fmt::Debug for ClientIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientIdentity(..)")
    }
}

/// A token that a daemon's operator has given out.
#[derive(Clone, PartialEq, Eq)]
pub struct BearerToken(MetadataValue<Ascii>);

impl BearerToken {
    /// Takes a token; `None` where it is empty or holds what no header may.
    #[must_use]
    pub fn new(token: &str) -> Option<Self> {
        let token = token.trim();
        if token.is_empty() {
            return None;
        }
        let mut value = MetadataValue::try_from(format!("Bearer {token}")).ok()?;
        value.set_sensitive(true);
        Some(Self(value))
    }

    pub(crate) fn header_value(&self) -> &MetadataValue<Ascii> {
        &self.0
    }
}

impl fmt::Debug for BearerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BearerToken(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_printed() {
        let identity = ClientIdentity { certificate_pem: vec![1], key_pem: b"key".to_vec() };
        let tls = TlsOptions::default().with_ca("ca").with_identity(identity.clone());
        let token = BearerToken::new(" secret\n").unwrap();
        let printed = format!("{tls:?} {identity:?} {token:?} {:?}", token.header_value());
        assert!(!printed.contains("secret") && !printed.contains("key\""), "{printed}");
        assert!(BearerToken::new("\n").is_none() && BearerToken::new("a\nb").is_none());
    }
}
