//! Stored size of the passages, counted by the daemon.

use serde::Serialize;

/// Bytes held, by part, as the daemon reports them; summed over sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoredParts {
    /// K and V values in packed blocks.
    pub packed_values: u64,
    /// Bytes of the packed blocks: the four parts below.
    pub packed_bytes: u64,
    /// Codes, entropy-coded where the codec does so.
    pub code_bytes: u64,
    /// Scales, minima and norms.
    pub scale_bytes: u64,
    /// Where rows begin inside an entropy-coded page.
    pub offset_bytes: u64,
    /// Page headers and padding.
    pub header_bytes: u64,
    /// K and V values in windows and open blocks.
    pub raw_values: u64,
    /// Bytes reserved for them.
    pub raw_bytes: u64,
    /// `packed_bytes` of keys.
    pub packed_key_bytes: u64,
    /// `packed_bytes` of values.
    pub packed_value_bytes: u64,
}

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
    pub parts: StoredParts,
}

impl StoredParts {
    /// Adds another sequence.
    pub(crate) fn add_sequence(&mut self, other: &Self) {
        self.packed_values += other.packed_values;
        self.packed_bytes += other.packed_bytes;
        self.code_bytes += other.code_bytes;
        self.scale_bytes += other.scale_bytes;
        self.offset_bytes += other.offset_bytes;
        self.header_bytes += other.header_bytes;
        self.raw_values += other.raw_values;
        self.raw_bytes += other.raw_bytes;
        self.packed_key_bytes += other.packed_key_bytes;
        self.packed_value_bytes += other.packed_value_bytes;
    }

    /// Bits per value of the key and the value pages that came on top of `before`, for a model
    /// whose K and V rows have the same length.
    pub(crate) fn side_bits_since(&self, before: &Self) -> [f64; 2] {
        let values = (self.packed_values - before.packed_values) / 2;
        let bits = |bytes: u64| 8.0 * bytes as f64 / values.max(1) as f64;
        [
            bits(self.packed_key_bytes - before.packed_key_bytes),
            bits(self.packed_value_bytes - before.packed_value_bytes),
        ]
    }

    /// Ratios for a model whose K and V rows have the same length.
    pub(crate) fn storage_ratios(&self, model_bytes: u64) -> StorageRatios {
        let bits = |bytes: u64, values: u64| 8.0 * bytes as f64 / values.max(1) as f64;
        let (packed, values) = (self.packed_values, self.packed_values + self.raw_values);
        StorageRatios {
            bits_per_value: bits(self.packed_bytes, packed),
            bits_per_key_value: bits(self.packed_key_bytes, packed / 2),
            bits_per_value_value: bits(self.packed_value_bytes, packed / 2),
            code_bits: bits(self.code_bytes, packed),
            scale_bits: bits(self.scale_bytes, packed),
            offset_bits: bits(self.offset_bytes, packed),
            header_bits: bits(self.header_bytes, packed),
            raw_values_percent: 100.0 * self.raw_values as f64 / values.max(1) as f64,
            ratio: 2.0 * values as f64 / (self.packed_bytes + self.raw_bytes).max(1) as f64,
            model_bytes,
            model_bits_amortised: bits(model_bytes, values),
            fallback_pages: 0,
            over_bound_pages: 0,
            parts: *self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_in_the_ratio_but_not_in_the_bits_of_packed_blocks() {
        let one = StoredParts {
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
        both.add_sequence(&one);
        let storage = both.storage_ratios(1100);
        assert_eq!(storage.bits_per_value, 2.0);
        assert_eq!((storage.bits_per_key_value, storage.bits_per_value_value), (2.4, 1.6));
        let parts = [storage.code_bits, storage.scale_bits, storage.offset_bits];
        assert_eq!(parts.iter().sum::<f64>() + storage.header_bits, storage.bits_per_value);
        assert_eq!(storage.ratio, 4.0);
        assert_eq!(storage.model_bits_amortised, 4.0);
    }

    #[test]
    fn nothing_stored_gives_no_nan() {
        let storage = StoredParts::default().storage_ratios(0);
        assert_eq!((storage.bits_per_value, storage.ratio), (0.0, 0.0));
    }
}
