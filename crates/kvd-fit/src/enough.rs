//! Whether samples are enough to fit a codec to.

use crate::outliers::count_full_rows;
use crate::{SampleKind, Samples};
use kvd_codec::{CodecSpec, Transform};
use kvd_core::{LayerIndex, Side};

/// Rows for each channel that a matrix is fitted on at least.
const ROWS_PER_CHANNEL: usize = 4;

/// Something that samples lack for a codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleShortage {
    /// A transform that looks at queries, and samples without them.
    #[error("it looks at queries, and the samples have none")]
    NoQueries,
    /// Fewer queries than matrices need that look at them.
    #[error(
        "it looks at queries and needs at least {needed} for each KV head, four for each of \
         {channels} channels; layer {layer} has {found}"
    )]
    TooFewQueries {
        /// The layer with the fewest.
        layer: u32,
        /// Queries of one of its KV heads.
        found: usize,
        /// How many there must be.
        needed: usize,
        /// Channels of a key.
        channels: usize,
    },
    /// Fewer tokens than the statistics of a codec need.
    #[error(
        "it needs at least {needed} tokens for rows of {channels} channels; the samples have \
         {found}"
    )]
    TooFewTokens {
        /// Tokens of the samples.
        found: usize,
        /// How many there must be.
        needed: usize,
        /// Channels of a row.
        channels: usize,
    },
    /// A head whose rows are all zeros.
    #[error("{kind} of layer {layer}, KV head {head}, are all zeros")]
    OnlyZeros {
        /// Keys, values or queries.
        kind: SampleKind,
        /// The layer.
        layer: u32,
        /// The KV head.
        head: usize,
    },
}

/// Fewest queries of a KV head, of all layers: where, and how many, zeros and copies left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FewestQueries {
    layer: u32,
    found: usize,
}

impl Samples {
    fn fewest_queries(&self) -> Option<FewestQueries> {
        let geometry = self.geometry();
        let dim = geometry.head_dim(Side::Key);
        let heads = (0..geometry.layers).flat_map(|layer| {
            (0..geometry.kv_heads as usize).map(move |head| {
                let queries = self.varied_rows(LayerIndex(layer), SampleKind::Queries, head);
                let found = count_full_rows(&queries.rows, dim);
                FewestQueries { layer, found }
            })
        });
        heads.min_by_key(|of| of.found)
    }

    /// Queries of the KV head that has the fewest, zeros and copies left out.
    #[must_use]
    pub fn queries_per_head(&self) -> usize {
        self.fewest_queries().map_or(0, |fewest| fewest.found)
    }

    /// Tests that there are as many rows as a codec needs.
    ///
    /// # Errors
    /// Any [`SampleShortage`] but `OnlyZeros`.
    pub fn check_counts(&self, spec: &CodecSpec) -> Result<(), SampleShortage> {
        for side in Side::BOTH {
            let channels = self.geometry().head_dim(side);
            let needed = ROWS_PER_CHANNEL * channels;
            let variants = spec.side_specs(side);
            let has = |wanted: fn(&Transform) -> bool| {
                variants.iter().any(|variant| variant.transforms.iter().any(wanted))
            };
            if has(Transform::reads_queries)
                && let Some(FewestQueries { layer, found }) = self.fewest_queries()
                && found < needed
            {
                let missing = SampleShortage::TooFewQueries { layer, found, needed, channels };
                return Err(if found == 0 { SampleShortage::NoQueries } else { missing });
            }
            let kind = SampleKind::of_side(side);
            let found = count_full_rows(&self.varied_rows(LayerIndex(0), kind, 0).rows, channels);
            // Factors and entries follow single rows where there are fewer rows than channels.
            let fits = variants.iter().any(|variant| variant.needs_calibration());
            let needed = match (has(Transform::is_matrix), fits) {
                (true, _) => needed,
                (false, true) => channels,
                (false, false) => 0,
            };
            if found < needed {
                return Err(SampleShortage::TooFewTokens { found, needed, channels });
            }
        }
        Ok(())
    }

    /// Tests that no head has nothing but zeros; queries only where there are any.
    ///
    /// # Errors
    /// [`SampleShortage::OnlyZeros`].
    pub fn check_zeros(&self) -> Result<(), SampleShortage> {
        let geometry = self.geometry();
        for layer in 0..geometry.layers {
            for head in 0..geometry.kv_heads as usize {
                let index = LayerIndex(layer);
                for (kind, rows) in [
                    (SampleKind::Keys, self.rows(index, Side::Key, head)),
                    (SampleKind::Values, self.rows(index, Side::Value, head)),
                    (SampleKind::Queries, self.queries(index, head)),
                ] {
                    if !rows.is_empty() && rows.iter().all(|x| *x == 0.0) {
                        return Err(SampleShortage::OnlyZeros { kind, layer, head });
                    }
                }
            }
        }
        Ok(())
    }
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
        // No row is a copy of another: copies count once.
        let rows = |count: usize, value: f32| -> Vec<f32> {
            (0..8 * count).map(|i| value * (1.0 + (i / 8) as f32 / 64.0)).collect()
        };
        for side in Side::BOTH {
            samples.push(LayerIndex(0), side, 0, &rows(tokens, 1.0)).unwrap();
        }
        samples.push_queries(LayerIndex(0), 0, &rows(queries, value)).unwrap();
        samples
    }

    #[test]
    fn a_matrix_needs_four_rows_for_each_channel_and_factors_one() {
        let check = |codec: &str, tokens, queries| {
            let spec = kvd_codec::resolve_spec(codec).unwrap();
            samples(tokens, queries, 1.0).check_counts(&spec)
        };
        assert_eq!(check("kvd-2", 32, 32), Ok(()));
        let error = check("kvd-2", 32, 31).unwrap_err();
        assert!(matches!(error, SampleShortage::TooFewQueries { found: 31, needed: 32, .. }));
        assert!(error.to_string().contains("at least 32"), "{error}");
        assert_eq!(check("kvd-2", 32, 0), Err(SampleShortage::NoQueries));
        let error = check("kvd-2", 31, 32).unwrap_err();
        assert!(matches!(error, SampleShortage::TooFewTokens { found: 31, needed: 32, .. }));
        let factors = "k=smooth/vq(d=4,b=2); v=raw";
        assert_eq!(check(factors, 8, 0), Ok(()));
        let error = check(factors, 7, 0).unwrap_err();
        assert!(matches!(error, SampleShortage::TooFewTokens { found: 7, needed: 8, .. }));
        assert_eq!(check("kivi-4", 1, 0), Ok(()));
    }

    #[test]
    fn heads_of_zeros_are_named() {
        let kind = SampleKind::Queries;
        let zeros = SampleShortage::OnlyZeros { kind, layer: 0, head: 0 };
        assert_eq!(samples(4, 4, 0.0).check_zeros(), Err(zeros));
        assert_eq!(samples(4, 0, 0.0).check_zeros(), Ok(()));
        assert_eq!(samples(4, 9, 1.0).queries_per_head(), 9);
        let mut copied = samples(4, 9, 1.0);
        copied.push_queries(LayerIndex(0), 0, &[1.0; 8 * 9]).unwrap();
        assert_eq!(copied.queries_per_head(), 9, "copies count once");
    }
}
