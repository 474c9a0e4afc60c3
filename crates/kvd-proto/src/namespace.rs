//! The namespace of a call travels in its metadata, so that every message may do without it.

use crate::RequestError;
use kvd_core::Namespace;
use std::sync::LazyLock;
use tonic::codegen::http::HeaderMap;
use tonic::metadata::MetadataMap;

/// Metadata key of the caller's namespace.
pub const NAMESPACE_KEY: &str = "kvd-namespace";

/// The namespace of calls that name none: most do not, and share it.
static DEFAULT: LazyLock<Namespace> =
    LazyLock::new(|| Namespace::new("default").expect("a well-formed name"));

/// The namespace that `metadata` names; `default` when it names none.
///
/// # Errors
/// When the value is no [`Namespace`], or there are several that differ: which one was meant must
/// never depend on the order a proxy left them in.
pub fn namespace_of(metadata: &MetadataMap) -> Result<Namespace, RequestError> {
    namespace_of_headers(metadata.as_ref())
}

/// [`namespace_of`] of headers that are not yet metadata.
///
/// # Errors
/// As that.
pub fn namespace_of_headers(headers: &HeaderMap) -> Result<Namespace, RequestError> {
    let mut values = headers.get_all(NAMESPACE_KEY).iter();
    let Some(value) = values.next() else {
        return Ok(DEFAULT.clone());
    };
    if values.any(|other| other != value) {
        return Err(RequestError::invalid_field(NAMESPACE_KEY, "given more than once"));
    }
    let text = value
        .to_str()
        .map_err(|_| RequestError::invalid_field(NAMESPACE_KEY, "holds non-ASCII characters"))?;
    parse_namespace(text)
}

fn parse_namespace(text: &str) -> Result<Namespace, RequestError> {
    Namespace::new(text)
        .map_err(|error| RequestError::invalid_field(NAMESPACE_KEY, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(values: &[&'static str]) -> Result<Namespace, RequestError> {
        let mut metadata = MetadataMap::new();
        for value in values {
            metadata.append(NAMESPACE_KEY, value.parse().unwrap());
        }
        namespace_of(&metadata)
    }

    #[test]
    fn absent_namespace_is_default() {
        assert_eq!(namespace(&[]).unwrap().as_str(), "default");
    }

    #[test]
    fn namespace_is_taken_from_metadata() {
        assert_eq!(namespace(&["team-a"]).unwrap().as_str(), "team-a");
        assert_eq!(namespace(&["team-a", "team-a"]).unwrap().as_str(), "team-a");
    }

    #[test]
    fn malformed_or_ambiguous_namespace_is_refused() {
        for bad in [&["a b"][..], &[""], &["a", "b"]] {
            let error = namespace(bad).unwrap_err();
            assert!(error.to_string().starts_with("kvd-namespace: "), "{error}");
        }
    }
}
