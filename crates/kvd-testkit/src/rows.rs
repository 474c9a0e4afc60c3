//! K and V as an engine has them, and the shape of the model they belong to.

use crate::rng::TestRng;
use bytes::Bytes;
use kvd_core::{DType, Geometry, RopePairing};
use std::ops::Range;

/// A model's attention, as its engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Transformer layers.
    pub layers: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Query heads that share one KV head.
    pub group: u32,
    /// Channels of a key.
    pub head_dim_k: u32,
    /// Channels of a value.
    pub head_dim_v: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Precision of K and V on the wire.
    pub dtype: DType,
}

impl ModelShape {
    /// One layer, two KV heads of 64 channels, one query head each, blocks of 16, f32.
    #[must_use]
    pub fn small_shape() -> Self {
        Self {
            layers: 1,
            kv_heads: 2,
            group: 1,
            head_dim_k: 64,
            head_dim_v: 64,
            block_tokens: 16,
            dtype: DType::F32,
        }
    }

    /// The part that kvd is told.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dim_k: self.head_dim_k,
            head_dim_v: self.head_dim_v,
            block_tokens: self.block_tokens,
            dtype: self.dtype,
            rope_pairing: RopePairing::Half,
        }
    }

    /// Query heads of a layer.
    #[must_use]
    pub fn q_heads(&self) -> u32 {
        self.kv_heads * self.group
    }

    /// Values of one token's keys in one layer.
    #[must_use]
    pub fn k_width(&self) -> usize {
        (self.kv_heads * self.head_dim_k) as usize
    }

    /// Values of one token's values in one layer.
    #[must_use]
    pub fn v_width(&self) -> usize {
        (self.kv_heads * self.head_dim_v) as usize
    }

    /// Values of one token's queries in one layer.
    #[must_use]
    pub fn q_width(&self) -> usize {
        (self.q_heads() * self.head_dim_k) as usize
    }
}

/// Rows of one layer, exactly representable in the model's dtype.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerRows {
    /// Tokens.
    pub tokens: u32,
    /// `[tokens, kv_heads, head_dim_k]`.
    pub k: Vec<f32>,
    /// `[tokens, kv_heads, head_dim_v]`.
    pub v: Vec<f32>,
}

impl LayerRows {
    /// Normal values; as in real models, some key channels are several times larger than the rest
    /// and sit beside zero.
    #[must_use]
    pub fn random_rows(shape: &ModelShape, tokens: u32, rng: &mut TestRng) -> Self {
        let mut k = rng.next_normals(tokens as usize * shape.k_width());
        for (index, value) in k.iter_mut().enumerate() {
            if index % 16 == 5 {
                *value = *value * 3.0 + 2.0;
            }
        }
        let v = rng.next_normals(tokens as usize * shape.v_width());
        Self { tokens, k: round_values(shape.dtype, &k), v: round_values(shape.dtype, &v) }
    }

    /// Some of the tokens.
    #[must_use]
    pub fn token_range(&self, shape: &ModelShape, range: Range<u32>) -> Self {
        let (start, end) = (range.start as usize, range.end as usize);
        Self {
            tokens: range.end - range.start,
            k: self.k[start * shape.k_width()..end * shape.k_width()].to_vec(),
            v: self.v[start * shape.v_width()..end * shape.v_width()].to_vec(),
        }
    }

    /// These tokens and then those of `more`.
    pub fn extend_rows(&mut self, more: &Self) {
        self.tokens += more.tokens;
        self.k.extend_from_slice(&more.k);
        self.v.extend_from_slice(&more.v);
    }

    /// Only the first `tokens`.
    pub fn truncate_rows(&mut self, shape: &ModelShape, tokens: u32) {
        self.tokens = tokens;
        self.k.truncate(tokens as usize * shape.k_width());
        self.v.truncate(tokens as usize * shape.v_width());
    }
}

/// `values` as bytes of `dtype`.
#[must_use]
pub fn to_bytes(dtype: DType, values: &[f32]) -> Bytes {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    dtype.narrow_values(values, &mut bytes);
    bytes.into()
}

/// Bytes of `dtype` as values.
#[must_use]
pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.size_bytes()];
    dtype.widen_values(bytes, &mut values);
    values
}

/// `values` as they are after a trip through `dtype`.
#[must_use]
pub fn round_values(dtype: DType, values: &[f32]) -> Vec<f32> {
    from_bytes(dtype, &to_bytes(dtype, values))
}
