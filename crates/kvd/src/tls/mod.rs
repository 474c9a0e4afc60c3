//! TLS of a door: certificates from files, which are read anew while the daemon serves. Handshakes
//! that have begun keep the configuration that they began with.

mod stream;

pub(crate) use stream::DoorStream;

use parking_lot::RwLock;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Names of the settings of a door, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TlsKeys {
    /// The certificate chain.
    pub(crate) certificate: &'static str,
    /// Its private key.
    pub(crate) key: &'static str,
    /// The authorities of clients.
    pub(crate) client_ca: &'static str,
}

/// Whether clients must show a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientCertificates {
    /// A client without one is cut off in the handshake.
    Required,
    /// One that is shown is verified.
    Optional,
}

/// The files of a door.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// Its certificate, and those between it and the authority, in PEM form.
    pub(crate) certificate: PathBuf,
    /// The private key, in PEM form.
    pub(crate) key: PathBuf,
    /// Authorities that sign the certificates of clients; none: clients show none.
    pub(crate) client_ca: Option<PathBuf>,
    /// Whether they must.
    pub(crate) clients: ClientCertificates,
    /// Names of the settings.
    pub(crate) keys: TlsKeys,
}

impl TlsFiles {
    /// All files.
    pub(crate) fn list_paths(&self) -> Vec<PathBuf> {
        let own = [&self.certificate, &self.key].into_iter();
        own.chain(self.client_ca.as_ref()).cloned().collect()
    }
}

/// Files that make no TLS.
#[derive(Debug, thiserror::Error)]
#[error("{key} = {path:?}: {reason}")]
pub(crate) struct TlsError {
    /// The setting.
    pub(crate) key: &'static str,
    /// Its file.
    pub(crate) path: PathBuf,
    /// Says what is wrong, and what would be right.
    pub(crate) reason: String,
}

/// The TLS side of a door.
pub(crate) struct DoorTls {
    files: TlsFiles,
    protocol: &'static [u8],
    current: RwLock<Arc<ServerConfig>>,
}

impl DoorTls {
    /// Reads the files of a door that speaks a protocol, by its ALPN name.
    ///
    /// # Errors
    /// The file that cannot be used.
    pub(crate) fn read_files(
        files: TlsFiles,
        protocol: &'static [u8],
    ) -> Result<Arc<Self>, TlsError> {
        let current = RwLock::new(read_config(&files, protocol)?);
        Ok(Arc::new(Self { files, protocol, current }))
    }

    /// Files that it reads.
    pub(crate) fn list_paths(&self) -> Vec<PathBuf> {
        self.files.list_paths()
    }

    /// Reads the files anew; handshakes from now on use them.
    ///
    /// # Errors
    /// The file that cannot be used: what was read before stays.
    pub(crate) fn read_anew(&self) -> Result<(), TlsError> {
        let config = read_config(&self.files, self.protocol)?;
        *self.current.write() = config;
        Ok(())
    }

    /// The configuration of the next handshake.
    fn current_config(&self) -> Arc<ServerConfig> {
        self.current.read().clone()
    }
}

fn read_config(files: &TlsFiles, protocol: &[u8]) -> Result<Arc<ServerConfig>, TlsError> {
    let keys = files.keys;
    let chain = read_certificates(keys.certificate, &files.certificate)?;
    let failed = |key, path: &Path, reason: String| TlsError { key, path: path.into(), reason };
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| {
        failed(keys.key, &files.key, format!("no private key in PEM form: {error}"))
    })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(keys.certificate, &files.certificate, error.to_string()))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for authority in read_certificates(keys.client_ca, path)? {
                roots
                    .add(authority)
                    .map_err(|error| failed(keys.client_ca, path, error.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            let verifier = match files.clients {
                ClientCertificates::Required => verifier,
                ClientCertificates::Optional => verifier.allow_unauthenticated(),
            };
            let verifier = verifier
                .build()
                .map_err(|error| failed(keys.client_ca, path, error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| {
        let reason = format!("does not go with {} = {:?}: {error}", keys.key, files.key);
        failed(keys.certificate, &files.certificate, reason)
    })?;
    config.alpn_protocols = vec![protocol.to_vec()];
    Ok(Arc::new(config))
}

fn read_certificates(
    key: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |reason: String| TlsError { key, path: path.to_owned(), reason };
    let unreadable = |error: rustls::pki_types::pem::Error| failed(error.to_string());
    let found: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(unreadable)?
        .collect::<Result<_, _>>()
        .map_err(unreadable)?;
    if found.is_empty() {
        return Err(failed("no certificate in PEM form (-----BEGIN CERTIFICATE-----)".to_owned()));
    }
    Ok(found)
}
