//! Why a model folder is refused.

use std::path::Path;

/// A model folder that this engine does not compute; each message names the file, key or tensor
/// and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A file is missing, unreadable or not of its format.
    #[error("{file}: {reason}")]
    File {
        /// The path, or the file's name.
        file: String,
        /// The problem, and what to do.
        reason: String,
    },
    /// A key of `config.json` has a value that is not computed, or none.
    #[error("config.json: {key}: {reason}")]
    Key {
        /// The key; inner keys after a dot.
        key: String,
        /// The problem, and what to do.
        reason: String,
    },
    /// A tensor is missing, unknown or of a type that is not read.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// Its name in the weights.
        name: String,
        /// The problem, and what to do.
        reason: String,
    },
    /// A tensor's shape is not the one that `config.json` describes.
    #[error("tensor {name} has shape {found:?} where config.json describes {expected:?} ({keys})")]
    Shape {
        /// Its name in the weights.
        name: String,
        /// Shape in the weights.
        found: Vec<usize>,
        /// Shape after `config.json`.
        expected: Vec<usize>,
        /// The keys that the expected shape follows from.
        keys: String,
    },
}

impl ModelError {
    pub(crate) fn key_error(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Key { key: key.into(), reason: reason.into() }
    }

    pub(crate) fn tensor_error(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Tensor { name: name.into(), reason: reason.into() }
    }

    pub(crate) fn file_error(path: &Path, reason: impl ToString) -> Self {
        Self::File { file: path.display().to_string(), reason: reason.to_string() }
    }
}

/// Results of reading a model folder.
pub(crate) type Result<T, E = ModelError> = std::result::Result<T, E>;
