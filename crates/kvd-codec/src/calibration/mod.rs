//! The calibration artefact: what a codec learned from samples, as one safetensors file.
//!
//! It is a list of **parts**. A part is one side fitted for one [`SideSpec::fitted_text`], over
//! all layers and heads; codecs and policies pick the parts that they name. The tensors of part
//! `n` have names that begin with `n.`:
//!
//! | tensor | shape | kind |
//! |---|---|---|
//! | `n.smooth` | f32 `[layers, kv_heads, head_dim]` | factors of `smooth` |
//! | `n.norm` | f32 `[layers, kv_heads, head_dim]` | factors of `norm` |
//! | `n.radius` | f16 `[layers, kv_heads, head_dim / 2]` | largest radii of `polar` |
//! | `n.mean` | f32 `[layers, kv_heads, head_dim]` | what `mean` takes away |
//! | `n.gain` | f32 `[layers, kv_heads]` | median length of a row, of `gain` |
//! | `n.matrix` | f16 `[layers, kv_heads, head_dim, head_dim]` | axes of `pca` and the like |
//! | `n.codebook` | f16 `[layers, kv_heads, positions, stages, 2^b, d]` | VQ entries, see below |
//! | `n.step` | f32 `[layers, kv_heads]` | step of `grid` |
//! | `n.class` | u8 `[layers, kv_heads, head_dim]` | class of each coefficient |
//! | `n.table` | u8 `[layers, symbols]` | Huffman code lengths, class after class |
//! | `n.split` | f32 `[layers, kv_heads]` | step over that of an even split, see below |
//! | `n.scale` | f32 `[layers, kv_heads, head_dim]` | scales of `bitalloc` |
//! | `n.width` | u8 `[layers, kv_heads, head_dim]` | bits of each coefficient |
//! | `n.levels` | f16 `[layers, 510]` | levels of widths 1 to 8 |
//! | `n.bound` | f32 `[layers, kv_heads]` | largest error that is no outlier |
//!
//! `n.split` is absent for an even split; of a bit allocation it is two to the bits of a
//! coefficient that a head has fewer than there. VQ entries stand in the order of their use; the
//! shape has 1 for an axis along which codebooks are shared.
//!
//! The metadata key `kvd.calibration` holds one JSON object: version, geometry, seed, and side and
//! fitted text of each part. One key, because several would be written in an arbitrary order.

mod bitalloc;
mod codebooks;
mod tensors;

pub use bitalloc::BitAllocTensors;
pub use codebooks::SideCodebooks;
pub(crate) use tensors::LAYER_TABLE_BYTES;
pub use tensors::{GridTensors, SideCalibration};

use crate::CalibrationError;
use kvd_core::{Geometry, RopePairing, Side};
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::HashMap;

const VERSION: u64 = 3;
/// More parts than any search tries.
const PARTS_MAX: usize = 256;
const METADATA_KEY: &str = "kvd.calibration";

/// A versioned artefact of one model: factors, means, matrices, codebooks, grids.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    pub(crate) geometry: Geometry,
    pub(crate) seed: u64,
    pub(crate) parts: Vec<SideCalibration>,
}

impl Calibration {
    /// The calibration of a model with that geometry, of sides fitted from that seed.
    #[must_use]
    pub fn from_parts(geometry: &Geometry, seed: u64, parts: Vec<SideCalibration>) -> Self {
        Self { geometry: geometry.clone(), seed, parts }
    }

    /// Geometry of the model it was fitted for.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Side and [`SideSpec::fitted_text`] of each part.
    pub fn parts(&self) -> impl Iterator<Item = (Side, &str)> {
        self.parts.iter().map(|part| (part.side, part.fitted.as_str()))
    }

    /// Adds the parts of `other` that this one has not, so that one artefact serves several
    /// codecs, or a policy that mixes them.
    ///
    /// # Errors
    /// When `other` was fitted for another geometry.
    pub fn merge_parts(&mut self, other: Self) -> Result<(), CalibrationError> {
        if !self.geometry.same_rows(&other.geometry) {
            return Err(CalibrationError::Shape(
                "the artefacts have different geometries; fit both to one model".to_owned(),
            ));
        }
        for part in other.parts {
            if self.find_side(part.side, &part.fitted).is_none() {
                self.parts.push(part);
            }
        }
        Ok(())
    }

    /// Seed of the fit.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The part fitted for that side and text.
    #[must_use]
    pub fn find_side(&self, side: Side, fitted: &str) -> Option<&SideCalibration> {
        self.parts.iter().find(|part| part.side == side && part.fitted == fitted)
    }

    /// Bytes of every tensor.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.parts.iter().map(SideCalibration::size_bytes).sum()
    }

    /// Serializes to safetensors; equal calibrations give equal bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let parts = self.parts.iter().enumerate();
        let buffers: Vec<_> =
            parts.flat_map(|(index, part)| part.to_buffers(&self.geometry, index)).collect();
        let views = buffers.iter().map(|buffer| {
            let view = TensorView::new(buffer.dtype, buffer.shape.clone(), &buffer.bytes);
            (buffer.name.as_str(), view.expect("the shape was made for these bytes"))
        });
        let metadata = HashMap::from([(METADATA_KEY.to_owned(), self.to_metadata().to_string())]);
        safetensors::serialize(views, Some(metadata)).expect("names, shapes and metadata are plain")
    }

    fn to_metadata(&self) -> Value {
        let g = &self.geometry;
        let part =
            |part: &SideCalibration| json!({ "side": part.side.name(), "fitted": part.fitted });
        json!({
            "version": VERSION,
            "kvd": env!("CARGO_PKG_VERSION"),
            "seed": self.seed.to_string(),
            "parts": self.parts.iter().map(part).collect::<Vec<_>>(),
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
            SafeTensors::read_metadata(bytes).map_err(|e| malformed_error(e.to_string()))?;
        let text = header.metadata().as_ref().and_then(|m| m.get(METADATA_KEY));
        let text = text.ok_or_else(|| {
            malformed_error(format!(
                "metadata key {METADATA_KEY} is missing; the file was not written by kvd calibrate"
            ))
        })?;
        let meta: Value = serde_json::from_str(text).map_err(|e| malformed_error(e.to_string()))?;
        let version = &meta["version"];
        if version.as_u64() != Some(VERSION) {
            return Err(malformed_error(format!(
                "version is {version}; this kvd reads version {VERSION}"
            )));
        }
        let geometry = read_geometry(&meta["geometry"])?;
        let tensors =
            SafeTensors::deserialize(bytes).map_err(|e| malformed_error(e.to_string()))?;
        let parts = meta["parts"].as_array().filter(|parts| parts.len() <= PARTS_MAX);
        let parts = parts.ok_or_else(|| {
            malformed_error(format!(
                "metadata field parts must be a list of at most {PARTS_MAX} parts"
            ))
        })?;
        let part = |(index, part): (usize, &Value)| {
            let (name, fitted) = (read_string(part, "side")?, read_string(part, "fitted")?);
            let side = Side::BOTH.into_iter().find(|side| side.name() == name);
            let side = side.ok_or_else(|| {
                malformed_error(format!("part {index}: side is {name:?}; must be k or v"))
            })?;
            SideCalibration::read_tensors(&tensors, index, (side, fitted), &geometry)
        };
        let parts = parts.iter().enumerate().map(part).collect::<Result<_, _>>()?;
        let seed = read_string(&meta, "seed")?
            .parse()
            .map_err(|_| malformed_error("metadata field seed must be a number"))?;
        Ok(Self { geometry, seed, parts })
    }
}

fn malformed_error(text: impl Into<String>) -> CalibrationError {
    CalibrationError::Malformed(text.into())
}

fn read_string(object: &Value, name: &str) -> Result<String, CalibrationError> {
    object[name]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| malformed_error(format!("metadata field {name} must be a text")))
}

fn read_geometry(object: &Value) -> Result<Geometry, CalibrationError> {
    let number = |name: &str| {
        let value = object[name].as_u64().and_then(|n| u32::try_from(n).ok());
        value.ok_or_else(|| {
            malformed_error(format!("metadata field geometry.{name} must be a number"))
        })
    };
    let geometry = Geometry {
        layers: number("layers")?,
        kv_heads: number("kv_heads")?,
        head_dim_k: number("head_dim_k")?,
        head_dim_v: number("head_dim_v")?,
        block_tokens: number("block_tokens")?,
        dtype: read_string(object, "dtype")?
            .parse()
            .map_err(|e: kvd_core::DTypeError| malformed_error(e.to_string()))?,
        rope_pairing: match read_string(object, "rope_pairing")?.as_str() {
            "half" => RopePairing::Half,
            "interleaved" => RopePairing::Interleaved,
            other => {
                return Err(malformed_error(format!(
                    "metadata field geometry.rope_pairing is {other:?}; must be half or interleaved"
                )));
            }
        },
    };
    geometry.validate_fields().map_err(|e| malformed_error(e.to_string()))?;
    Ok(geometry)
}
