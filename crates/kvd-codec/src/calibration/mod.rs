//! The calibration artefact: what a codec learned from samples, as one safetensors file.
//!
//! | tensor | shape | kind |
//! |---|---|---|
//! | `k.smooth`, `v.smooth` | f32 `[layers, kv_heads, head_dim]` | factors of `smooth` |
//! | `k.mean`, `v.mean` | f32 `[layers, kv_heads, head_dim]` | what `mean` takes away |
//! | `k.matrix`, `v.matrix` | f16 `[layers, kv_heads, head_dim, head_dim]` | `pca`, `qpca` |
//! | `k.codebook`, `v.codebook` | f16 `[layers, kv_heads, positions, stages, 2^b, d]` | VQ entries, \
//! most used first; 1 for an axis along which codebooks are shared |
//! | `k.step`, `v.step` | f32 `[layers, kv_heads]` | step of `grid` |
//! | `k.class`, `v.class` | u8 `[layers, kv_heads, head_dim]` | class of each coefficient |
//! | `k.table`, `v.table` | u8 `[layers, classes, 128]` | Huffman code lengths, zeros after them |
//!
//! The metadata key `kvd.calibration` holds one JSON object: version, geometry, seed, codec and
//! the transforms in whose space each side's tensors live. One key, because several would be
//! written in an arbitrary order.

mod codebooks;
mod tensors;

pub(crate) use codebooks::Codebooks;
pub(crate) use tensors::{GridTensors, LAYER_TABLE_BYTES, SideCalibration, TABLE_WIDTH};

use crate::CalibrationError;
use kvd_core::{Geometry, RopePairing, Side};
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::HashMap;

const VERSION: u64 = 1;
const METADATA_KEY: &str = "kvd.calibration";

/// A versioned artefact of one model: factors, means, matrices, codebooks, grids.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    pub(crate) geometry: Geometry,
    pub(crate) spec: String,
    pub(crate) seed: u64,
    pub(crate) sides: [SideCalibration; 2],
}

impl Calibration {
    /// Geometry of the model it was fitted for.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Canonical text of the codec it was fitted for.
    #[must_use]
    pub fn spec_text(&self) -> &str {
        &self.spec
    }

    /// Seed of the fit.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub(crate) fn side(&self, side: Side) -> &SideCalibration {
        &self.sides[side.index()]
    }

    /// Bytes that a codec keeps of it: every tensor.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.sides.iter().map(SideCalibration::size_bytes).sum()
    }

    /// Serializes to safetensors; equal calibrations give equal bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let sides = Side::BOTH.into_iter();
        let buffers: Vec<_> =
            sides.flat_map(|side| self.side(side).buffers(&self.geometry, side)).collect();
        let views = buffers.iter().map(|buffer| {
            let view = TensorView::new(buffer.dtype, buffer.shape.clone(), &buffer.bytes);
            (buffer.name.as_str(), view.expect("the shape was made for these bytes"))
        });
        let metadata = HashMap::from([(METADATA_KEY.to_owned(), self.metadata().to_string())]);
        safetensors::serialize(views, Some(metadata)).expect("names, shapes and metadata are plain")
    }

    fn metadata(&self) -> Value {
        let g = &self.geometry;
        json!({
            "version": VERSION,
            "kvd": env!("CARGO_PKG_VERSION"),
            "spec": self.spec,
            "seed": self.seed.to_string(),
            "transforms": { "k": self.sides[0].transforms, "v": self.sides[1].transforms },
            "geometry": {
                "layers": g.layers,
                "kv_heads": g.kv_heads,
                "head_dim_k": g.head_dim_k,
                "head_dim_v": g.head_dim_v,
                "block_tokens": g.block_tokens,
                "dtype": g.dtype.name(),
                "rope_pairing": match g.rope_pairing {
                    RopePairing::Half => "half",
                    RopePairing::Interleaved => "interleaved",
                },
            },
        })
    }

    /// Reads what [`Calibration::to_bytes`] wrote.
    ///
    /// # Errors
    /// When the bytes are no safetensors file, the version is unknown, or a tensor does not have
    /// the shape its geometry asks for.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CalibrationError> {
        let (_, header) =
            SafeTensors::read_metadata(bytes).map_err(|e| malformed(e.to_string()))?;
        let text = header.metadata().as_ref().and_then(|m| m.get(METADATA_KEY));
        let text = text.ok_or_else(|| malformed(format!("no metadata key {METADATA_KEY}")))?;
        let meta: Value = serde_json::from_str(text).map_err(|e| malformed(e.to_string()))?;
        let version = &meta["version"];
        if version.as_u64() != Some(VERSION) {
            return Err(malformed(format!("version {version} is not {VERSION}")));
        }
        let geometry = geometry(&meta["geometry"])?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| malformed(e.to_string()))?;
        let side = |side: Side| -> Result<SideCalibration, CalibrationError> {
            let transforms = string(&meta["transforms"], side.name())?;
            SideCalibration::read(&tensors, side, &geometry, transforms)
        };
        let sides = [side(Side::Key)?, side(Side::Value)?];
        let seed = string(&meta, "seed")?.parse().map_err(|_| malformed("seed"))?;
        Ok(Self { spec: string(&meta, "spec")?, seed, sides, geometry })
    }
}

fn malformed(text: impl Into<String>) -> CalibrationError {
    CalibrationError::Malformed(text.into())
}

fn string(object: &Value, name: &str) -> Result<String, CalibrationError> {
    object[name].as_str().map(str::to_owned).ok_or_else(|| malformed(format!("no text {name}")))
}

fn geometry(object: &Value) -> Result<Geometry, CalibrationError> {
    let number = |name: &str| {
        let value = object[name].as_u64().and_then(|n| u32::try_from(n).ok());
        value.ok_or_else(|| malformed(format!("no number geometry.{name}")))
    };
    let geometry = Geometry {
        layers: number("layers")?,
        kv_heads: number("kv_heads")?,
        head_dim_k: number("head_dim_k")?,
        head_dim_v: number("head_dim_v")?,
        block_tokens: number("block_tokens")?,
        dtype: string(object, "dtype")?
            .parse()
            .map_err(|e: kvd_core::DTypeError| malformed(e.to_string()))?,
        rope_pairing: match string(object, "rope_pairing")?.as_str() {
            "half" => RopePairing::Half,
            "interleaved" => RopePairing::Interleaved,
            other => return Err(malformed(format!("rope pairing {other:?}"))),
        },
    };
    geometry.validate().map_err(|e| malformed(e.to_string()))?;
    Ok(geometry)
}
