//! Certificates of tests: an authority, and what it signs.

use kvd_client::{ClientIdentity, TlsOptions};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType, date_time_ymd};
use std::path::Path;

/// An authority.
pub(crate) struct Authority {
    pub(crate) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM form.
pub(crate) struct Signed {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// Whether a certificate's time has come and not gone.
#[derive(Clone, Copy)]
pub(crate) enum Validity {
    Current,
    Expired,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// A certificate for names, each `dns:NAME` or `uri:URI`.
    pub(crate) fn sign(&self, names: &[&str], validity: Validity) -> Signed {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.split_once(':').unwrap() {
                ("dns", name) => SanType::DnsName(name.try_into().unwrap()),
                (_, uri) => SanType::URI(uri.try_into().unwrap()),
            })
            .collect();
        if matches!(validity, Validity::Expired) {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Signed { certificate, key: key.serialize_pem() }
    }

    /// TLS of a client that trusts this authority, and shows a certificate.
    pub(crate) fn client_tls(&self, shown: Option<&Signed>) -> TlsOptions {
        let tls = TlsOptions::default().with_ca(self.pem.as_bytes());
        match shown {
            None => tls,
            Some(signed) => tls.with_identity(ClientIdentity {
                certificate_pem: signed.certificate.clone().into_bytes(),
                key_pem: signed.key.clone().into_bytes(),
            }),
        }
    }
}

impl Signed {
    /// Writes both to `server.pem` and `server.key` of a folder.
    pub(crate) fn write_server(&self, folder: &Path) {
        std::fs::write(folder.join("server.key"), &self.key).unwrap();
        std::fs::write(folder.join("server.pem"), &self.certificate).unwrap();
    }
}
