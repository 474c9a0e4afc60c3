//! Stored size of the passages, counted by the daemon.

use kvd_core::StoredBytes;
use serde::{Serialize, Serializer};

/// Stored size, per value (one number of K or V) and relative to f16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StorageRatios {
    /// Bits per value of packed blocks, all their bytes counted.
    pub bits_per_value: f64,
    /// Bits per value of keys alone.
    pub bits_per_key_value: f64,
    /// Bits per value of values alone.
    pub bits_per_value_value: f64,
    /// Share of `bits_per_value` that is codes.
    pub code_bits: f64,
    /// Share of `bits_per_value` that is scales.
    pub scale_bits: f64,
    /// Share of `bits_per_value` that is row offsets.
    pub offset_bits: f64,
    /// Share of `bits_per_value` that is headers and padding.
    pub header_bits: f64,
    /// Share of the values that lie in windows and open blocks, in percent.
    pub raw_values_percent: f64,
    /// f16 bytes of everything stored over the bytes held, windows and open blocks included.
    pub ratio: f64,
    /// Calibration and Huffman tables of the model: held once, not per token.
    pub model_bytes: u64,
    /// `model_bytes` spread over the values stored here, in bits; not part of `bits_per_value`.
    pub model_bits_amortised: f64,
    /// Pages that could not be quantized and were kept raw, of all that the model has stored.
    pub fallback_pages: u64,
    /// Measured pages over the bound that the codec declares, kept with a safer side.
    pub over_bound_pages: u64,
    /// The counts behind these numbers.
    #[serde(serialize_with = "serialize_parts")]
    pub parts: StoredBytes,
}

/// The parts by name.
fn serialize_parts<S: Serializer>(parts: &StoredBytes, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(StoredBytes::PARTS.into_iter().zip(parts.to_array()))
}

/// Bits per value of the key and the value pages that came on top of `before`, for a model
/// whose K and V rows have the same length.
pub(crate) fn side_bits_since(stored: &StoredBytes, before: &StoredBytes) -> [f64; 2] {
    let values = (stored.packed_values - before.packed_values) / 2;
    let bits = |bytes: u64| 8.0 * bytes as f64 / values.max(1) as f64;
    [
        bits(stored.packed_key_bytes - before.packed_key_bytes),
        bits(stored.packed_value_bytes - before.packed_value_bytes),
    ]
}

/// Ratios for a model whose K and V rows have the same length.
pub(crate) fn storage_ratios(stored: &StoredBytes, model_bytes: u64) -> StorageRatios {
    let bits = |bytes: u64, values: u64| 8.0 * bytes as f64 / values.max(1) as f64;
    let (packed, values) = (stored.packed_values, stored.packed_values + stored.raw_values);
    StorageRatios {
        bits_per_value: bits(stored.packed_bytes, packed),
        bits_per_key_value: bits(stored.packed_key_bytes, packed / 2),
        bits_per_value_value: bits(stored.packed_value_bytes, packed / 2),
        code_bits: bits(stored.code_bytes, packed),
        scale_bits: bits(stored.scale_bytes, packed),
        offset_bits: bits(stored.offset_bytes, packed),
        header_bits: bits(stored.header_bytes, packed),
        raw_values_percent: 100.0 * stored.raw_values as f64 / values.max(1) as f64,
        ratio: 2.0 * values as f64 / (stored.packed_bytes + stored.raw_bytes).max(1) as f64,
        model_bytes,
        model_bits_amortised: bits(model_bytes, values),
        fallback_pages: 0,
        over_bound_pages: 0,
        parts: *stored,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_in_the_ratio_but_not_in_the_bits_of_packed_blocks() {
        let one = StoredBytes {
            packed_values: 1000,
            packed_bytes: 250,
            code_bytes: 200,
            scale_bytes: 25,
            offset_bytes: 15,
            header_bytes: 10,
            raw_values: 100,
            raw_bytes: 300,
            packed_key_bytes: 150,
            packed_value_bytes: 100,
        };
        let mut both = one;
        both += one;
        let storage = storage_ratios(&both, 1100);
        assert_eq!(storage.bits_per_value, 2.0);
        assert_eq!((storage.bits_per_key_value, storage.bits_per_value_value), (2.4, 1.6));
        let parts = [storage.code_bits, storage.scale_bits, storage.offset_bits];
        assert_eq!(parts.iter().sum::<f64>() + storage.header_bits, storage.bits_per_value);
        assert_eq!(storage.ratio, 4.0);
        assert_eq!(storage.model_bits_amortised, 4.0);
    }

    #[test]
    fn the_counts_are_written_by_name() {
        let parts = StoredBytes { packed_values: 3, raw_bytes: 4, ..StoredBytes::default() };
        let ratios = StorageRatios { parts, ..StorageRatios::default() };
        let json = serde_json::to_value(ratios).unwrap();
        assert_eq!(
            (&json["parts"]["packed_values"], &json["parts"]["raw_bytes"]),
            (&3.into(), &4.into())
        );
        assert_eq!(json["parts"].as_object().unwrap().len(), StoredBytes::PARTS.len());
    }

    #[test]
    fn nothing_stored_gives_no_nan() {
        let storage = storage_ratios(&StoredBytes::default(), 0);
        assert_eq!((storage.bits_per_value, storage.ratio), (0.0, 0.0));
    }
}
