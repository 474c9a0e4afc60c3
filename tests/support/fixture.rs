//! K, V and queries that a trained model made of held-out text (`fixtures/kv-tiny-b/MODEL.md`).

use crate::rows::{LayerRows, ModelShape, from_bytes};
use kvd_client::DType;
use safetensors::SafeTensors;
use std::path::PathBuf;

/// A passage of 2048 tokens.
pub struct FixturePassage {
    /// Rows by layer.
    pub layers: Vec<LayerRows>,
    /// Queries by layer, `[1024, q_heads, head_dim_k]`.
    pub queries: Vec<Vec<f32>>,
    /// Position of the first query.
    pub q_start: u32,
}

/// The model's shape, in blocks of 64 tokens.
#[must_use]
pub fn fixture_shape() -> ModelShape {
    ModelShape {
        layers: 3,
        kv_heads: 2,
        group: 2,
        head_dim_k: 128,
        head_dim_v: 128,
        block_tokens: 64,
        dtype: DType::F16,
    }
}

/// Passage 0 or 1.
///
/// # Panics
/// When the fixture is not there.
#[must_use]
pub fn load_passage(index: u32) -> FixturePassage {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/kv-tiny-b");
    let bytes = std::fs::read(folder.join(format!("kv_passage{index}.safetensors")));
    let bytes = bytes.expect("the fixture");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let shape = fixture_shape();
    let tensor = |layer: u32, name: &str, tokens: usize, width: usize| {
        let tensor = tensors.tensor(&format!("layer.{layer}.{name}")).expect("a tensor");
        assert_eq!(tensor.shape().iter().product::<usize>(), tokens * width, "{name}");
        from_bytes(DType::F16, tensor.data())
    };
    let rows = |layer| LayerRows {
        tokens: 2048,
        k: tensor(layer, "k", 2048, shape.k_width()),
        v: tensor(layer, "v", 2048, shape.v_width()),
    };
    FixturePassage {
        layers: (0..shape.layers).map(rows).collect(),
        queries: (0..shape.layers).map(|l| tensor(l, "q", 1024, shape.q_width())).collect(),
        q_start: 1024,
    }
}
