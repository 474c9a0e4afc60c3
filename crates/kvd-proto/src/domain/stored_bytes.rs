//! Stored bytes, which have no value that cannot be meant.

use crate::v1;
use kvd_core::StoredBytes;

/// Maps each part to the field of the same name, both ways.
macro_rules! map_parts {
    ($($field:ident),* $(,)?) => {
        impl From<StoredBytes> for v1::StoredBytes {
            fn from(stored: StoredBytes) -> Self {
                let StoredBytes { $($field),* } = stored;
                Self { $($field),* }
            }
        }

        impl From<v1::StoredBytes> for StoredBytes {
            fn from(stored: v1::StoredBytes) -> Self {
                let v1::StoredBytes { $($field),* } = stored;
                Self { $($field),* }
            }
        }
    };
}

map_parts!(
    packed_values,
    packed_bytes,
    code_bytes,
    scale_bytes,
    offset_bytes,
    header_bytes,
    raw_values,
    raw_bytes,
    packed_key_bytes,
    packed_value_bytes,
);
