//! Newtypes for ids, so that a layer can never be passed where a sequence is meant.

use std::fmt;
use std::sync::Arc;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A registered model; never reused while the daemon runs.
    ModelId(u64)
);
id!(
    /// A server-side handle on an ordered list of blocks; never reused while the daemon runs.
    SequenceId(u64)
);
id!(
    /// An owner of sequences that a client holds; never reused while the daemon runs.
    SessionId(u64)
);
id!(
    /// A hold on cached blocks for a time; never reused while the daemon runs.
    LeaseId(u64)
);
id!(
    /// A transformer layer, counted from 0.
    LayerIndex(u32)
);

/// A tenant's key: part of every look-up, so no data crosses it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(Arc<str>);

/// Why a string is no [`Namespace`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "namespace {given:?} is not 1 to {} characters of a-z A-Z 0-9 . _ -",
    Namespace::LENGTH_MAX
)]
pub struct NamespaceError {
    /// The refused text, shortened.
    pub given: String,
}

impl Namespace {
    /// Longest namespace, in bytes: it is a metric label and part of every log line.
    pub const LENGTH_MAX: usize = 64;

    /// Checks length and alphabet.
    ///
    /// # Errors
    /// When the text is empty, too long, or has a character that would need escaping in a label.
    pub fn new(text: &str) -> Result<Self, NamespaceError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if text.is_empty() || text.len() > Self::LENGTH_MAX || !text.bytes().all(allowed) {
            let given = text.chars().take(Self::LENGTH_MAX).collect();
            return Err(NamespaceError { given });
        }
        Ok(Self(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_refuses_what_would_break_a_label() {
        for bad in ["", "a b", "a\"b", "ü", "x\n", &"n".repeat(65)] {
            assert!(Namespace::new(bad).is_err(), "{bad:?} was accepted");
        }
        assert_eq!(Namespace::new("team-a.prod_1").unwrap().as_str(), "team-a.prod_1");
    }
}
