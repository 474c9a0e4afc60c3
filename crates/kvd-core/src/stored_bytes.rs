//! Bytes that are stored, by what they are: of pages, of a packed block, and of all that is held.

use std::ops::{AddAssign, SubAssign};

/// Bytes of pages by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageBytes {
    /// Page headers, checksums and padding.
    pub header: u64,
    /// Codes, or their entropy-coded form, or raw floats.
    pub codes: u64,
    /// Scales, minima and norms, and outliers kept apart.
    pub scales: u64,
    /// Lengths of rows or of entropy-coded streams.
    pub offsets: u64,
}

impl PageBytes {
    /// All of them.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.header + self.codes + self.scales + self.offsets
    }
}

impl AddAssign for PageBytes {
    fn add_assign(&mut self, other: Self) {
        self.header += other.header;
        self.codes += other.codes;
        self.scales += other.scales;
        self.offsets += other.offsets;
    }
}

/// Bytes of the pages of one packed block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedBytes {
    /// By kind.
    pub parts: PageBytes,
    /// By side: keys, values.
    pub sides: [u64; 2],
    /// K and V values that the pages stand for, in number.
    pub values: u64,
}

/// Declares [`StoredBytes`] with its fields in one list.
macro_rules! stored_bytes {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// All that is held, by part; bytes unless said otherwise.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct StoredBytes {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl StoredBytes {
            /// Names of the parts.
            pub const PARTS: [&'static str; [$(stringify!($field)),*].len()] =
                [$(stringify!($field)),*];

            /// The parts, in the order of [`StoredBytes::PARTS`].
            #[must_use]
            pub const fn to_array(self) -> [u64; Self::PARTS.len()] {
                [$(self.$field),*]
            }

            /// From [`StoredBytes::to_array`].
            #[must_use]
            pub const fn from_array(array: [u64; Self::PARTS.len()]) -> Self {
                let [$($field),*] = array;
                Self { $($field),* }
            }
        }
    };
}

stored_bytes! {
    /// K and V values in packed blocks, in number.
    packed_values,
    /// Memory of packed blocks: the four parts below and the rounding to granules.
    packed_bytes,
    /// Codes of packed blocks.
    code_bytes,
    /// Scales of packed blocks.
    scale_bytes,
    /// Offsets of packed blocks.
    offset_bytes,
    /// Headers of packed blocks.
    header_bytes,
    /// K and V values held in the stored precision, in number.
    raw_values,
    /// Memory of raw slots, with the rows that are still free and the rounding to granules.
    raw_bytes,
    /// K pages of packed blocks.
    packed_key_bytes,
    /// V pages of packed blocks.
    packed_value_bytes,
}

impl StoredBytes {
    /// A packed block that takes `reserved_bytes` of memory.
    #[must_use]
    pub fn count_packed(packed: &PackedBytes, reserved_bytes: u64) -> Self {
        let PackedBytes { parts, sides: [packed_key_bytes, packed_value_bytes], values } = *packed;
        Self {
            packed_values: values,
            packed_bytes: reserved_bytes,
            code_bytes: parts.codes,
            scale_bytes: parts.scales,
            offset_bytes: parts.offsets,
            header_bytes: parts.header,
            packed_key_bytes,
            packed_value_bytes,
            ..Self::default()
        }
    }

    /// A raw slot that takes `reserved_bytes` and holds `values` values.
    #[must_use]
    pub fn count_raw(values: u64, reserved_bytes: u64) -> Self {
        Self { raw_values: values, raw_bytes: reserved_bytes, ..Self::default() }
    }
}

impl AddAssign for StoredBytes {
    fn add_assign(&mut self, other: Self) {
        let mut sum = self.to_array();
        sum.iter_mut().zip(other.to_array()).for_each(|(sum, part)| *sum += part);
        *self = Self::from_array(sum);
    }
}

impl SubAssign for StoredBytes {
    fn sub_assign(&mut self, other: Self) {
        let mut rest = self.to_array();
        rest.iter_mut().zip(other.to_array()).for_each(|(rest, part)| *rest -= part);
        *self = Self::from_array(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_added_and_taken_off() {
        let one = StoredBytes::from_array(std::array::from_fn(|part| 1 << part));
        let mut sum = one;
        sum += one;
        assert_eq!(sum.to_array(), one.to_array().map(|part| 2 * part));
        sum -= one;
        assert_eq!(sum, one);
        assert_eq!((StoredBytes::PARTS[0], one.packed_values), ("packed_values", 1));
    }
}
