//! Artefacts of all codecs: fitted once and shared by every text and all windows, or read.

use crate::input_file::read_input;
use crate::split::{CodecFits, SplitReport};
use anyhow::{Context, Result};
use bytes::Bytes;
use kvd_codec::{Calibration, CodecSpec};
use std::path::Path;

/// Where codecs take their artefacts from.
pub(crate) enum CalibrationSource {
    /// Fitted here.
    Fitted(CodecFits),
    /// One file for all.
    File(Bytes),
}

impl CalibrationSource {
    /// One artefact for every codec that needs one.
    pub(crate) fn read_artefact(path: &Path) -> Result<Self> {
        let bytes = read_input(path);
        let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
        Calibration::from_bytes(&bytes).with_context(|| path.display().to_string())?;
        Ok(Self::File(bytes.into()))
    }

    /// How bits of those fitted here are shared.
    pub(crate) fn split_reports(&self) -> Vec<SplitReport> {
        match self {
            Self::Fitted(fitted) => fitted.splits.clone(),
            Self::File(_) => Vec::new(),
        }
    }

    /// The artefact of `spec`, empty when it needs none, and the seconds its fit took.
    pub(crate) fn codec_artefact(&self, spec: &CodecSpec) -> Result<(Bytes, f64)> {
        match self {
            Self::Fitted(fitted) => {
                let artefact = fitted.fits.codec_artefact(spec)?;
                Ok(artefact.map_or_else(Default::default, |(c, s)| (c.to_bytes().into(), s)))
            }
            Self::File(bytes) if spec.needs_calibration() => Ok((bytes.clone(), 0.0)),
            Self::File(_) => Ok(Default::default()),
        }
    }
}
