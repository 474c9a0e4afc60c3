//! Where a daemon listens.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use tonic::transport::Uri;

/// A daemon's address: `http://127.0.0.1:7070`, `https://kvd.example:7070` or `unix:/run/kvd.sock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(pub(crate) EndpointAddress);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EndpointAddress {
    Tcp(Uri),
    Unix(PathBuf),
}

/// Why a text is no [`Endpoint`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {given:?}: {reason}")]
pub struct EndpointError {
    /// The refused text.
    pub given: String,
    /// The problem with the text.
    pub reason: &'static str,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let refuse = |reason| EndpointError { given: text.to_owned(), reason };
        if let Some(path) = text.strip_prefix("unix:") {
            // gRPC's own spelling of an absolute path is `unix:///run/kvd.sock`.
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(refuse("no path after unix:"));
            }
            return Ok(Self(EndpointAddress::Unix(path.into())));
        }
        let uri: Uri = text.parse().map_err(|_| refuse("not a URI"))?;
        match uri.scheme_str() {
            Some("http" | "https") => {}
            _ => return Err(refuse("must begin with http://, https:// or unix:")),
        }
        if uri.port_u16().is_none() {
            return Err(refuse("no port"));
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(refuse("a path or query has no meaning here"));
        }
        Ok(Self(EndpointAddress::Tcp(uri)))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            EndpointAddress::Tcp(uri) => write!(f, "{}", uri.to_string().trim_end_matches('/')),
            EndpointAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_address_round_trip() {
        for text in ["http://127.0.0.1:7070", "http://[::1]:80", "https://kvd.svc:1"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for text in ["unix:/run/kvd.sock", "unix:///run/kvd.sock"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), "unix:/run/kvd.sock");
        }
        assert_eq!("unix:kvd.sock".parse::<Endpoint>().unwrap().to_string(), "unix:kvd.sock");
    }

    #[test]
    fn what_cannot_be_dialled_is_refused_with_its_reason() {
        for (text, reason) in [
            ("unix:", "no path"),
            ("127.0.0.1:7070", "http://"),
            ("tcp://host:1", "must begin with http://"),
            ("https://host", "no port"),
            ("http://host", "no port"),
            ("http://host:1/v1", "path"),
            ("http://a b:1", "not a URI"),
            ("", "not a URI"),
        ] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}
