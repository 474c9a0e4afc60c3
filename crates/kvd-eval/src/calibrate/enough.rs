//! Whether samples are enough for a codec.

use super::CalibrateError;
use kvd_codec::{CodecSpec, SampleKind, Samples, Transform};
use kvd_core::{LayerIndex, Side};

/// Rows for each channel that a matrix is fitted on at least.
const ROWS_PER_CHANNEL: usize = 4;

/// Fewest queries of a KV head, of all layers: where, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FewestQueries {
    layer: u32,
    found: usize,
}

fn fewest_queries(samples: &Samples) -> Option<FewestQueries> {
    let geometry = samples.geometry();
    let dim = geometry.head_dim(Side::Key);
    let heads = (0..geometry.layers).flat_map(|layer| {
        (0..geometry.kv_heads as usize).map(move |head| {
            let found = samples.queries(LayerIndex(layer), head).len() / dim;
            FewestQueries { layer, found }
        })
    });
    heads.min_by_key(|of| of.found)
}

/// Queries of the KV head that has the fewest.
pub(super) fn queries_per_head(samples: &Samples) -> usize {
    fewest_queries(samples).map_or(0, |fewest| fewest.found)
}

/// Tests that there are as many rows as the matrices of a codec need.
///
/// # Errors
/// [`CalibrateError::TooFewQueries`] and [`CalibrateError::TooFewTokens`].
pub(super) fn check_counts(
    spec: &CodecSpec,
    label: &str,
    samples: &Samples,
) -> Result<(), CalibrateError> {
    let geometry = samples.geometry();
    for side in Side::BOTH {
        let channels = geometry.head_dim(side);
        let (needed, codec) = (ROWS_PER_CHANNEL * channels, || label.to_owned());
        let variants = spec.side_specs(side);
        let has = |wanted: fn(&Transform) -> bool| {
            variants.iter().any(|variant| variant.transforms.iter().any(wanted))
        };
        if has(Transform::reads_queries)
            && let Some(FewestQueries { layer, found }) = fewest_queries(samples)
            && found < needed
        {
            let codec = codec();
            return Err(CalibrateError::TooFewQueries { codec, layer, found, needed, channels });
        }
        let found = samples.rows(LayerIndex(0), side, 0).len() / channels;
        // Factors and entries follow single rows where there are fewer rows than channels.
        let fits = variants.iter().any(|variant| variant.needs_calibration());
        let needed = match (has(Transform::is_matrix), fits) {
            (true, _) => needed,
            (false, true) => channels,
            (false, false) => 0,
        };
        if found < needed {
            return Err(CalibrateError::TooFewTokens { codec: codec(), found, needed, channels });
        }
    }
    Ok(())
}

/// Tests that no head has nothing but zeros; queries only where there are any.
///
/// # Errors
/// [`CalibrateError::OnlyZeros`].
pub(super) fn check_zeros(samples: &Samples) -> Result<(), CalibrateError> {
    let geometry = samples.geometry();
    for layer in 0..geometry.layers {
        for head in 0..geometry.kv_heads as usize {
            let index = LayerIndex(layer);
            for (kind, rows) in [
                (SampleKind::Keys, samples.rows(index, Side::Key, head)),
                (SampleKind::Values, samples.rows(index, Side::Value, head)),
                (SampleKind::Queries, samples.queries(index, head)),
            ] {
                if !rows.is_empty() && rows.iter().all(|x| *x == 0.0) {
                    return Err(CalibrateError::OnlyZeros { kind, layer, head });
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{DType, Geometry, RopePairing};

    fn samples(tokens: usize, queries: usize, value: f32) -> Samples {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 8,
            head_dim_v: 8,
            block_tokens: 16,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let mut samples = Samples::new(&geometry);
        for side in Side::BOTH {
            samples.push(LayerIndex(0), side, 0, &vec![1.0; 8 * tokens]).unwrap();
        }
        samples.push_queries(LayerIndex(0), 0, &vec![value; 8 * queries]).unwrap();
        samples
    }

    #[test]
    fn a_matrix_needs_four_rows_for_each_channel_and_factors_one() {
        let check = |codec: &str, tokens, queries| {
            let spec = kvd_codec::resolve_spec(codec).unwrap();
            check_counts(&spec, codec, &samples(tokens, queries, 1.0))
        };
        assert_eq!(check("kvd-2", 32, 32), Ok(()));
        let error = check("kvd-2", 32, 31).unwrap_err();
        assert!(matches!(error, CalibrateError::TooFewQueries { found: 31, needed: 32, .. }));
        assert!(error.to_string().contains("at least 32"), "{error}");
        let error = check("kvd-2", 31, 32).unwrap_err();
        assert!(matches!(error, CalibrateError::TooFewTokens { found: 31, needed: 32, .. }));
        let factors = "k=smooth/vq(d=4,b=2); v=raw";
        assert_eq!(check(factors, 8, 0), Ok(()));
        let error = check(factors, 7, 0).unwrap_err();
        assert!(matches!(error, CalibrateError::TooFewTokens { found: 7, needed: 8, .. }));
        assert_eq!(check("kivi-4", 1, 0), Ok(()));
    }

    #[test]
    fn heads_of_zeros_are_named() {
        let error = check_zeros(&samples(4, 4, 0.0)).unwrap_err();
        let kind = SampleKind::Queries;
        assert_eq!(error, CalibrateError::OnlyZeros { kind, layer: 0, head: 0 });
        assert_eq!(check_zeros(&samples(4, 0, 0.0)), Ok(()));
        assert_eq!(queries_per_head(&samples(4, 9, 1.0)), 9);
    }
}
