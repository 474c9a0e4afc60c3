//! Calibrations of all codecs, fitted once and shared by every text and all windows.

use crate::progress::Progress;
use crate::samples;
use anyhow::{Context, Result};
use bytes::Bytes;
use kvd_codec::{CodecSpec, Samples};
use kvd_core::Geometry;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// An artefact and the time it took.
#[derive(Clone, Default)]
pub(crate) struct Fitted {
    /// Empty for a codec that needs none.
    pub(crate) bytes: Bytes,
    pub(crate) seconds: f64,
}

/// Artefacts by what they depend on: the codec without its windows.
pub(crate) struct Calibrations(BTreeMap<String, Fitted>);

impl Calibrations {
    /// Fits every codec that needs it, several at a time: one fit runs on one thread.
    pub(crate) fn fit<'a>(
        geometry: &Geometry,
        specs: impl Iterator<Item = &'a CodecSpec>,
        samples: &Samples,
        seed: u64,
        progress: &Progress,
    ) -> Result<Self> {
        let specs: BTreeMap<String, &CodecSpec> = specs.map(|spec| (key(spec), spec)).collect();
        let heads = (geometry.layers * geometry.kv_heads) as usize;
        let fit = |(key, spec): (String, &CodecSpec)| {
            let begin = Instant::now();
            let tick = &mut |_| progress.add(1);
            let fitted = samples::fit(geometry, spec, samples, seed, tick);
            let fitted = fitted.with_context(|| format!("codec {key}"))?;
            let seconds = begin.elapsed().as_secs_f64();
            Ok((key, Fitted { bytes: fitted.to_bytes().into(), seconds }))
        };
        progress.begin("calibration", 2 * heads * specs.len());
        let fitted: Result<BTreeMap<_, _>> = specs.into_par_iter().map(fit).collect();
        progress.finish();
        Ok(Self(fitted?))
    }

    /// One artefact for every codec that needs one.
    pub(crate) fn read<'a>(
        path: &Path,
        specs: impl Iterator<Item = &'a CodecSpec>,
    ) -> Result<Self> {
        let bytes = std::fs::read(path);
        let bytes: Bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?.into();
        let entry = |spec| (key(spec), Fitted { bytes: bytes.clone(), seconds: 0.0 });
        Ok(Self(specs.map(entry).collect()))
    }

    /// The artefact of `spec`; empty when none was asked for.
    pub(crate) fn of(&self, spec: &CodecSpec) -> Fitted {
        self.0.get(&key(spec)).cloned().unwrap_or_default()
    }
}

fn key(spec: &CodecSpec) -> String {
    CodecSpec { sink: 0, recent: 0, ..spec.clone() }.to_string()
}
