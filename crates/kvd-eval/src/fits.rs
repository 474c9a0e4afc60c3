//! Fits of side specs to samples, each made once and put together to artefacts of codecs.

use crate::progress::RunProgress;
use anyhow::{Context, Result};
use kvd_codec::{Calibration, CodecSpec, FloatFormat, Quantizer, SideSpec};
use kvd_core::Side;
use kvd_fit::Samples;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::time::Instant;

/// The key of a fit: the side, and the fitted part of its spec.
type FitKey = (usize, String);

/// Both sides of a codec, fitted together.
pub(crate) struct FittedCodec {
    pub(crate) calibration: Calibration,
    /// Time that it took.
    pub(crate) seconds: f64,
}

/// Fitted sides of any number of codecs.
#[derive(Clone, Debug, Default)]
pub(crate) struct FittedSides(BTreeMap<FitKey, (Calibration, f64)>);

impl FittedSides {
    /// Fits every side of every codec once, several at a time: one fit runs on one thread.
    pub(crate) fn new<'a>(
        specs: impl Iterator<Item = &'a CodecSpec>,
        samples: &Samples,
        seed: u64,
        progress: &RunProgress,
    ) -> Result<Self> {
        let parts: BTreeMap<FitKey, SideSpec> =
            specs.flat_map(fitted_parts).map(|(part, side)| (part, side.clone())).collect();
        let geometry = samples.geometry();
        let heads = (geometry.layers * geometry.kv_heads) as usize;
        progress.begin_steps("calibration", heads * parts.len());
        let fit = |(part, side): (FitKey, SideSpec)| {
            let begin = Instant::now();
            let text = side.to_string();
            let spec = one_side_codec(Side::BOTH[part.0], side);
            let fitted = kvd_fit::fit_calibration(geometry, &spec, samples, seed, &mut |_| {
                progress.add_steps(1)
            });
            let fitted = fitted.with_context(|| format!("calibration of {text}"))?;
            Ok((part, (fitted, begin.elapsed().as_secs_f64())))
        };
        Ok(Self(parts.into_par_iter().map(fit).collect::<Result<_>>()?))
    }

    /// Adds the parts of a codec that was fitted elsewhere.
    pub(crate) fn insert_codec(&mut self, spec: &CodecSpec, fitted: &FittedCodec) {
        for (key, _) in fitted_parts(spec) {
            self.0.insert(key, (fitted.calibration.clone(), fitted.seconds / 2.0));
        }
    }

    /// The artefact of one codec and the seconds its parts took; none when it needs none.
    pub(crate) fn codec_artefact(&self, spec: &CodecSpec) -> Result<Option<(Calibration, f64)>> {
        let mut parts: Vec<FitKey> = fitted_parts(spec).map(|(part, _)| part).collect();
        parts.dedup();
        let missing = || format!("codec {spec} was not fitted");
        let parts = parts.iter().map(|part| self.0.get(part).with_context(missing));
        merge_parts(parts.collect::<Result<Vec<_>>>()?.into_iter())
    }

    /// One artefact for all codecs; none when none needs one.
    pub(crate) fn merge_all(&self) -> Result<Option<Calibration>> {
        Ok(merge_parts(self.0.values())?.map(|(calibration, _)| calibration))
    }
}

fn merge_parts<'a>(
    parts: impl Iterator<Item = &'a (Calibration, f64)>,
) -> Result<Option<(Calibration, f64)>> {
    let mut all: Option<(Calibration, f64)> = None;
    for (part, seconds) in parts {
        match &mut all {
            None => all = Some((part.clone(), *seconds)),
            Some((calibration, total)) => {
                calibration.merge_parts(part.clone())?;
                *total += seconds;
            }
        }
    }
    Ok(all)
}

/// The parts of a codec that need a fit, overrides included.
fn fitted_parts(spec: &CodecSpec) -> impl Iterator<Item = (FitKey, &SideSpec)> {
    Side::BOTH.into_iter().flat_map(move |side| {
        let variants = spec.side_specs(side).into_iter();
        let fitted = variants.filter(|variant| variant.needs_calibration());
        fitted.map(move |variant| ((side.index(), variant.fitted_text()), variant))
    })
}

/// The codec that has `spec` on one side and keeps the other as it arrives.
pub(crate) fn one_side_codec(side: Side, spec: SideSpec) -> CodecSpec {
    let raw = raw_side();
    if side == Side::Key { two_side_codec(spec, raw) } else { two_side_codec(raw, spec) }
}

/// The codec of two sides and nothing else.
pub(crate) fn two_side_codec(key: SideSpec, value: SideSpec) -> CodecSpec {
    CodecSpec { key, value, sink: 0, recent: 0, overrides: Vec::new(), bounds: [None; 2] }
}

/// The side that keeps values as they arrive.
pub(crate) fn raw_side() -> SideSpec {
    SideSpec {
        transforms: Vec::new(),
        quantizer: Quantizer::Float(FloatFormat::Native),
        entropy: kvd_codec::EntropyCoding::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{DType, Geometry, LayerIndex, RopePairing};

    fn samples() -> Samples {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 32,
            head_dim_v: 32,
            block_tokens: 16,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let mut samples = Samples::new(&geometry);
        let rows: Vec<f32> = (0..32 * 64).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
        for side in Side::BOTH {
            samples.push(LayerIndex(0), side, 0, &rows).unwrap();
        }
        samples
    }

    #[test]
    fn codecs_share_equal_parts_and_get_their_own() {
        let specs = ["k=smooth/vq(d=4,b=3); v=vq(d=4,b=3)", "k=raw; v=vq(d=4,b=3)", "fp8"]
            .map(|text| kvd_codec::resolve_spec(text).unwrap());
        let samples = samples();
        let fits = FittedSides::new(specs.iter(), &samples, 3, &RunProgress::new(0)).unwrap();
        assert_eq!(fits.0.len(), 2);
        let parts = |spec| {
            let (artefact, _) = fits.codec_artefact(spec).unwrap().unwrap();
            artefact.parts().map(|(side, text)| format!("{side} {text}")).collect::<Vec<_>>()
        };
        assert_eq!(parts(&specs[0]), ["k smooth/vq(d=4,b=3)", "v /vq(d=4,b=3)"]);
        assert_eq!(parts(&specs[1]), ["v /vq(d=4,b=3)"]);
        assert!(fits.codec_artefact(&specs[2]).unwrap().is_none());
        assert_eq!(fits.merge_all().unwrap().unwrap().parts().count(), 2);
        let whole =
            kvd_fit::fit_calibration(samples.geometry(), &specs[0], &samples, 3, &mut |_| {});
        assert_eq!(fits.codec_artefact(&specs[0]).unwrap().unwrap().0, whole.unwrap());
        let other = kvd_codec::resolve_spec("k=smooth/raw; v=raw").unwrap();
        assert!(fits.codec_artefact(&other).is_err());
    }
}
