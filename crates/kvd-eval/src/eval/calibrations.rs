//! Artefacts of all codecs: fitted once and shared by every text and all windows, or read.

use crate::fits::FittedSides;
use anyhow::{Context, Result};
use bytes::Bytes;
use kvd_codec::CodecSpec;
use std::path::Path;

/// Where codecs take their artefacts from.
pub(crate) enum CalibrationSource {
    /// Fitted here.
    Fitted(FittedSides),
    /// One file for all.
    File(Bytes),
}

impl CalibrationSource {
    /// One artefact for every codec that needs one.
    pub(crate) fn read_artefact(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path);
        let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self::File(bytes.into()))
    }

    /// The artefact of `spec`, empty when it needs none, and the seconds its fit took.
    pub(crate) fn codec_artefact(&self, spec: &CodecSpec) -> Result<(Bytes, f64)> {
        match self {
            Self::Fitted(fits) => {
                let artefact = fits.codec_artefact(spec)?;
                Ok(artefact.map_or_else(Default::default, |(c, s)| (c.to_bytes().into(), s)))
            }
            Self::File(bytes) if spec.needs_calibration() => Ok((bytes.clone(), 0.0)),
            Self::File(_) => Ok(Default::default()),
        }
    }
}
