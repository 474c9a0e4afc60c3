//! The shape of a model's KV cache and of one raw slot.

use crate::DType;
use std::fmt;

/// Which half of the cache: keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// Keys (post-RoPE).
    Key,
    /// Values.
    Value,
}

impl Side {
    /// Both sides, in storage order.
    pub const BOTH: [Self; 2] = [Self::Key, Self::Value];

    /// Name as in metric labels and calibration artefacts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Key => "k",
            Self::Value => "v",
        }
    }

    /// 0 for keys, 1 for values.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Key => 0,
            Self::Value => 1,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which two channels RoPE rotates together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopePairing {
    /// Channels `i` and `i + d/2` (Llama, Qwen; "rotate half").
    Half,
    /// Channels `2i` and `2i + 1` (GPT-J, original RoFormer).
    Interleaved,
}

/// The KV geometry of a registered model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Transformer layers.
    pub layers: u32,
    /// KV heads per layer.
    pub kv_heads: u32,
    /// Channels of one key.
    pub head_dim_k: u32,
    /// Channels of one value.
    pub head_dim_v: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Precision in which K and V arrive and in which windows are kept.
    pub dtype: DType,
    /// Channel pairing of the rotary embedding.
    pub rope_pairing: RopePairing,
}

/// A geometry outside the supported range; says which field and the range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("geometry.{field} is {value}; it must be {min} to {max}{also}")]
pub struct GeometryError {
    /// Field name, or the product of fields that is bounded.
    pub field: &'static str,
    /// Given value.
    pub value: u64,
    /// Smallest allowed value.
    pub min: u64,
    /// Largest allowed value.
    pub max: u64,
    /// A further condition, or empty.
    pub also: &'static str,
}

impl Geometry {
    /// Largest `layers`.
    pub const LAYERS_MAX: u32 = 1024;
    /// Largest `kv_heads`.
    pub const KV_HEADS_MAX: u32 = 1024;
    /// Largest `head_dim_k` and `head_dim_v`.
    pub const HEAD_DIM_MAX: u32 = 1024;
    /// Largest `block_tokens`.
    pub const BLOCK_TOKENS_MAX: u32 = 1024;
    /// Most KV heads over all layers: what a codec keeps per head is bounded with them.
    pub const HEADS_MAX: u64 = 1 << 16;
    /// Largest block of one layer in the stored precision, K and V of all heads: what a device
    /// takes in hand at once, and far below what a page's offsets can address.
    pub const BLOCK_BYTES_MAX: u64 = 64 << 20;

    /// Checks every field against its range, then what they come to together.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate_fields(&self) -> Result<(), GeometryError> {
        let check = |field, value: u64, min, max: u64, even: bool| {
            if value < min || value > max || (even && !value.is_multiple_of(2)) {
                let also = if even { " and even" } else { "" };
                return Err(GeometryError { field, value, min, max, also });
            }
            Ok(())
        };
        let small = |field, value: u32, min, max: u32, even| {
            check(field, u64::from(value), min, u64::from(max), even)
        };
        small("layers", self.layers, 1, Self::LAYERS_MAX, false)?;
        small("kv_heads", self.kv_heads, 1, Self::KV_HEADS_MAX, false)?;
        small("head_dim_k", self.head_dim_k, 2, Self::HEAD_DIM_MAX, true)?;
        small("head_dim_v", self.head_dim_v, 2, Self::HEAD_DIM_MAX, true)?;
        small("block_tokens", self.block_tokens, 1, Self::BLOCK_TOKENS_MAX, false)?;
        let heads = u64::from(self.layers) * u64::from(self.kv_heads);
        check("layers * kv_heads", heads, 1, Self::HEADS_MAX, false)?;
        let field = "block_tokens * kv_heads * (head_dim_k + head_dim_v) * bytes of dtype";
        let block_bytes = u64::from(self.block_tokens) * self.token_bytes();
        check(field, block_bytes, 1, Self::BLOCK_BYTES_MAX, false)
    }

    /// Channels of one head on `side`.
    #[must_use]
    pub fn head_dim(&self, side: Side) -> usize {
        match side {
            Side::Key => self.head_dim_k as usize,
            Side::Value => self.head_dim_v as usize,
        }
    }

    /// Whether both have the same layers, heads and head sizes: what was learned of rows of one
    /// holds for the other, whatever its blocks and dtype.
    #[must_use]
    pub fn same_rows(&self, other: &Self) -> bool {
        let shape = |g: &Self| [g.layers, g.kv_heads, g.head_dim_k, g.head_dim_v];
        shape(self) == shape(other)
    }

    /// Values of K and V together, of one token in one layer.
    #[must_use]
    pub fn values_per_token(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.head_dim_k + self.head_dim_v)
    }

    /// Bytes of K and V of one token in one layer, in the stored precision.
    #[must_use]
    pub fn token_bytes(&self) -> u64 {
        self.values_per_token() * self.dtype.size_bytes() as u64
    }

    /// Layout of a raw slot that holds `rows` tokens.
    #[must_use]
    pub fn raw_layout(&self, rows: u32) -> RawLayout {
        RawLayout {
            rows: u64::from(rows),
            kv_heads: u64::from(self.kv_heads),
            row_bytes: Side::BOTH
                .map(|side| (self.head_dim(side) * self.dtype.size_bytes()) as u64),
        }
    }
}

/// Where each row of a raw slot lies: `[side][head][row][channel]`, so that one head's rows of
/// one side are contiguous, as attention reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawLayout {
    rows: u64,
    kv_heads: u64,
    row_bytes: [u64; 2],
}

impl RawLayout {
    /// Bytes of the whole slot.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.rows * self.kv_heads * (self.row_bytes[0] + self.row_bytes[1])
    }

    /// Rows the slot can hold.
    #[must_use]
    pub fn row_capacity(&self) -> u64 {
        self.rows
    }

    /// Bytes of one row of one head on `side`.
    #[must_use]
    pub fn row_bytes(&self, side: Side) -> u64 {
        self.row_bytes[side.index()]
    }

    /// Offset of `row` of `head` on `side`, from the start of the slot.
    #[must_use]
    pub fn row_offset(&self, side: Side, head: u64, row: u64) -> u64 {
        debug_assert!(head < self.kv_heads && row <= self.rows);
        let side_start = side.index() as u64 * self.rows * self.kv_heads * self.row_bytes[0];
        side_start + (head * self.rows + row) * self.row_bytes[side.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            layers: 3,
            kv_heads: 2,
            head_dim_k: 128,
            head_dim_v: 64,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        }
    }

    #[test]
    fn validate_names_the_field() {
        let mut g = geometry();
        g.head_dim_v = 33;
        let error = g.validate_fields().unwrap_err();
        assert_eq!(error.field, "head_dim_v");
        assert!(error.to_string().contains("2 to 1024 and even"), "{error}");
        g.head_dim_v = 64;
        g.block_tokens = 0;
        assert_eq!(g.validate_fields().unwrap_err().field, "block_tokens");
    }

    #[test]
    fn validate_bounds_a_block_and_the_heads() {
        let mut g = geometry();
        // 1024 tokens of 128 heads with 128 + 128 channels in f16 are the limit exactly.
        (g.block_tokens, g.kv_heads, g.head_dim_v) = (1024, 128, 128);
        assert_eq!(u64::from(g.block_tokens) * g.token_bytes(), Geometry::BLOCK_BYTES_MAX);
        g.validate_fields().unwrap();
        g.head_dim_v += 2;
        let text = g.validate_fields().unwrap_err().to_string();
        assert!(text.starts_with("geometry.block_tokens * kv_heads * (head_dim_k"), "{text}");
        assert!(text.ends_with("1 to 67108864"), "{text}");

        let mut g = Geometry { layers: 64, kv_heads: 1024, block_tokens: 16, ..geometry() };
        g.validate_fields().unwrap();
        g.layers = 65;
        let error = g.validate_fields().unwrap_err();
        assert_eq!((error.field, error.max), ("layers * kv_heads", Geometry::HEADS_MAX));
    }

    #[test]
    fn raw_layout_tiles_the_slot_without_gaps_or_overlaps() {
        let layout = geometry().raw_layout(5);
        let mut next = 0;
        for side in Side::BOTH {
            for head in 0..2 {
                for row in 0..5 {
                    assert_eq!(layout.row_offset(side, head, row), next);
                    next += layout.row_bytes(side);
                }
            }
        }
        assert_eq!(next, layout.size_bytes());
        assert_eq!(layout.size_bytes(), 5 * 2 * (128 + 64) * 2);
    }
}
