//! Settings of doors: TLS files, principals, and what may be open to all.

use super::raw::{AccessSettings, AdminSettings, ServerSettings};
use super::{AllowedNamespaces, ConfigError, to_millis};
use crate::tls::{ClientCertificates, TlsFiles, TlsKeys};
use kvd_core::Namespace;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Who may come in, and how that is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AccessConfig {
    /// TLS of gRPC over TCP.
    pub(crate) server_tls: Option<TlsFiles>,
    /// TLS of the admin port.
    pub(crate) admin_tls: Option<TlsFiles>,
    /// The file of principals; without one everyone who reaches a socket may use it.
    pub(crate) principals: Option<PathBuf>,
    /// Whether the page of metrics needs a role.
    pub(crate) metrics: MetricsReaders,
    /// How often files are looked at.
    pub(crate) check_interval: Duration,
    /// Lines of the audit log a second.
    pub(crate) audit_lines_max: u32,
    /// Serves beyond the loopback without authentication.
    pub(crate) insecure: bool,
}

/// Who reads the page of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetricsReaders {
    /// Whoever reaches the port.
    All,
    /// Principals with the role `read_metrics`.
    OfRole,
}

const SERVER_KEYS: TlsKeys = TlsKeys {
    certificate: "server.tls_certificate",
    key: "server.tls_key",
    client_ca: "server.tls_client_ca",
};
const ADMIN_KEYS: TlsKeys = TlsKeys {
    certificate: "admin.tls_certificate",
    key: "admin.tls_key",
    client_ca: "admin.tls_client_ca",
};

impl AccessConfig {
    pub(super) fn validate_raw(
        server: &ServerSettings,
        admin: &AdminSettings,
        access: &AccessSettings,
    ) -> Result<Self, ConfigError> {
        let required = match server.tls_client_required {
            true => ClientCertificates::Required,
            false => ClientCertificates::Optional,
        };
        let of_server = [&server.tls_certificate, &server.tls_key, &server.tls_client_ca];
        let of_admin = [&admin.tls_certificate, &admin.tls_key, &admin.tls_client_ca];
        let config = Self {
            server_tls: tls_files(SERVER_KEYS, of_server, required)?,
            admin_tls: tls_files(ADMIN_KEYS, of_admin, ClientCertificates::Optional)?,
            principals: super::socket_path(&access.principals),
            metrics: metrics_readers(&admin.metrics)?,
            check_interval: to_millis("access.check_files_ms", access.check_files_ms)?,
            audit_lines_max: access.audit_lines_max,
            insecure: server.insecure,
        };
        if config.metrics == MetricsReaders::OfRole && config.principals.is_none() {
            let reason = "\"role\" needs access.principals, which says who has it";
            return Err(ConfigError::new("admin.metrics", reason));
        }
        Ok(config)
    }

    /// Whether gRPC over TCP asks who comes.
    #[must_use]
    pub(crate) fn authenticates_tcp(&self) -> bool {
        let verifies = |files: &TlsFiles| {
            files.client_ca.is_some() && files.clients == ClientCertificates::Required
        };
        self.principals.is_some() || self.server_tls.as_ref().is_some_and(verifies)
    }

    /// Refuses doors that would be open to a network.
    pub(super) fn check_doors(
        &self,
        tcp: Option<SocketAddr>,
        admin: Option<SocketAddr>,
    ) -> Result<(), ConfigError> {
        if self.insecure {
            return Ok(());
        }
        let beyond = |door: Option<SocketAddr>| door.filter(|door| is_beyond_loopback(*door));
        match (beyond(tcp), beyond(admin)) {
            (Some(address), _) if !self.authenticates_tcp() => Err(refuse_open_tcp(address)),
            (_, Some(address)) if self.principals.is_none() && !self.authenticates_tcp() => {
                Err(refuse_open_admin(address))
            }
            _ => Ok(()),
        }
    }
}

fn refuse_open_tcp(address: SocketAddr) -> ConfigError {
    let reason = format!(
        "{address} is beyond the loopback, and whoever reaches it could read and close all \
         sequences: name principals (access.principals) or ask for client certificates \
         (server.tls_client_ca), listen on 127.0.0.1 or a Unix socket, or, on a network that \
         you trust, set server.insecure = true"
    );
    ConfigError::new("server.listen_tcp", reason)
}

/// No certificate is required at the admin port, as probes show none. Where gRPC requires some, a
/// warning tells that the port is open.
fn refuse_open_admin(address: SocketAddr) -> ConfigError {
    let reason = format!(
        "{address} is beyond the loopback, and whoever reaches it could read the names and \
         figures of models and namespaces: name principals (access.principals) or ask for \
         client certificates at gRPC (server.tls_client_ca), listen on 127.0.0.1, or, on a \
         network that you trust, set server.insecure = true"
    );
    ConfigError::new("admin.listen", reason)
}

/// Whether others than this machine reach it.
#[must_use]
pub(crate) fn is_beyond_loopback(address: SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}

fn tls_files(
    keys: TlsKeys,
    texts: [&String; 3],
    clients: ClientCertificates,
) -> Result<Option<TlsFiles>, ConfigError> {
    let [certificate, key, client_ca] = texts.map(|text| super::socket_path(text));
    match (certificate, key) {
        (Some(certificate), Some(key)) => {
            Ok(Some(TlsFiles { certificate, key, client_ca, clients, keys }))
        }
        (None, None) if client_ca.is_none() => Ok(None),
        (None, _) => Err(ConfigError::new(keys.certificate, missing_file(keys))),
        (_, None) => Err(ConfigError::new(keys.key, missing_file(keys))),
    }
}

fn missing_file(keys: TlsKeys) -> String {
    format!("is missing: TLS needs {} and {}, PEM files both", keys.certificate, keys.key)
}

fn metrics_readers(text: &str) -> Result<MetricsReaders, ConfigError> {
    match text {
        "open" => Ok(MetricsReaders::All),
        "role" => Ok(MetricsReaders::OfRole),
        _ => Err(ConfigError::new("admin.metrics", format!("{text:?} is not open or role"))),
    }
}

impl AllowedNamespaces {
    /// Reads names, of which `*` stands for all.
    ///
    /// # Errors
    /// A name that is none, or no name at all.
    pub(crate) fn parse_names(names: &[String]) -> Result<Self, String> {
        if names.iter().any(|name| name == "*") {
            return Ok(Self::Any);
        }
        let names =
            names.iter().map(|name| Namespace::new(name)).collect::<Result<BTreeSet<_>, _>>();
        let names = names.map_err(|error| error.to_string())?;
        if names.is_empty() {
            return Err("is empty: nobody could use the daemon".to_owned());
        }
        Ok(Self::Only(names))
    }
}
