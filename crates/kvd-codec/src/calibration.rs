//! The calibration artefact: what a codec learned from samples, as one safetensors file.
//!
//! | tensor | shape | kind |
//! |---|---|---|
//! | `k.smooth`, `v.smooth` | f32 `[layers, kv_heads, head_dim]` | factors of `smooth` |
//! | `k.codebook`, `v.codebook` | f16 `[layers, kv_heads, 2^b, d]` | VQ entries, most used first |
//!
//! The metadata key `kvd.calibration` holds one JSON object: version, geometry, seed, codec and
//! the transforms in whose space each side's tensors live. One key, because several would be
//! written in an arbitrary order.

use crate::CalibrationError;
use half::f16;
use kvd_core::{DType, Geometry, RopePairing, Side};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::HashMap;

const VERSION: u64 = 1;
const METADATA_KEY: &str = "kvd.calibration";

/// What one side learned; tensors are row-major over `[layers, kv_heads, ..]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SideCalibration {
    /// The side's transforms as in a spec text: the space the tensors live in.
    pub(crate) transforms: String,
    /// `[layers, kv_heads, head_dim]`, empty without `smooth`.
    pub(crate) smooth: Vec<f32>,
    /// `[layers, kv_heads, entries, dim]`.
    pub(crate) codebooks: Option<Codebooks>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Codebooks {
    pub(crate) dim: usize,
    pub(crate) entries: usize,
    pub(crate) values: Vec<f16>,
}

/// A versioned artefact of one model: smoothing factors and codebooks.
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

    /// Bytes that a codec keeps of it: f32 factors and f16 codebook entries.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        let side_bytes = |side: &SideCalibration| {
            let entries = side.codebooks.as_ref().map_or(0, |books| books.values.len());
            (side.smooth.len() * 4 + entries * 2) as u64
        };
        self.sides.iter().map(side_bytes).sum()
    }

    /// Serializes to safetensors; equal calibrations give equal bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let heads = [self.geometry.layers as usize, self.geometry.kv_heads as usize];
        let mut buffers = Vec::new();
        for side in Side::BOTH {
            let part = self.side(side);
            if !part.smooth.is_empty() {
                let bytes: Vec<u8> = part.smooth.iter().flat_map(|x| x.to_le_bytes()).collect();
                let shape = vec![heads[0], heads[1], self.geometry.head_dim(side)];
                buffers.push((format!("{side}.smooth"), Dtype::F32, shape, bytes));
            }
            if let Some(books) = &part.codebooks {
                let bytes: Vec<u8> = books.values.iter().flat_map(|x| x.to_le_bytes()).collect();
                let shape = vec![heads[0], heads[1], books.entries, books.dim];
                buffers.push((format!("{side}.codebook"), Dtype::F16, shape, bytes));
            }
        }
        let views = buffers.iter().map(|(name, dtype, shape, bytes)| {
            let view = TensorView::new(*dtype, shape.clone(), bytes);
            (name.as_str(), view.expect("the shape was made for these bytes"))
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
            Ok(SideCalibration {
                transforms: string(&meta["transforms"], side.name())?,
                smooth: smooth(&tensors, side, &geometry)?,
                codebooks: codebooks(&tensors, side, &geometry)?,
            })
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

fn smooth(
    tensors: &SafeTensors<'_>,
    side: Side,
    geometry: &Geometry,
) -> Result<Vec<f32>, CalibrationError> {
    let name = format!("{side}.smooth");
    let Ok(tensor) = tensors.tensor(&name) else { return Ok(Vec::new()) };
    let want = [geometry.layers as usize, geometry.kv_heads as usize, geometry.head_dim(side)];
    if tensor.dtype() != Dtype::F32 || tensor.shape() != want {
        return Err(malformed(format!("{name} is no f32 {want:?}")));
    }
    let mut factors = vec![0f32; want.iter().product()];
    DType::F32.widen(tensor.data(), &mut factors);
    // A factor and its reciprocal both multiply: neither may be zero or infinite.
    if !factors.iter().all(|f| *f > 0.0 && f.is_finite() && f.recip().is_finite()) {
        return Err(malformed(format!("{name} holds a factor that is not positive and finite")));
    }
    Ok(factors)
}

fn codebooks(
    tensors: &SafeTensors<'_>,
    side: Side,
    geometry: &Geometry,
) -> Result<Option<Codebooks>, CalibrationError> {
    let name = format!("{side}.codebook");
    let Ok(tensor) = tensors.tensor(&name) else { return Ok(None) };
    let heads = [geometry.layers as usize, geometry.kv_heads as usize];
    let (entries, dim) = match tensor.shape() {
        [l, h, entries, dim] if [*l, *h] == heads && *dim > 0 && *entries > 0 => (*entries, *dim),
        shape => return Err(malformed(format!("{name} has shape {shape:?}"))),
    };
    if tensor.dtype() != Dtype::F16 {
        return Err(malformed(format!("{name} is not f16")));
    }
    let chunks = tensor.data().as_chunks::<2>().0;
    let values: Vec<f16> = chunks.iter().map(|b| f16::from_le_bytes(*b)).collect();
    if !values.iter().all(|v| v.is_finite()) {
        return Err(malformed(format!("{name} holds NaN or infinity")));
    }
    Ok(Some(Codebooks { dim, entries, values }))
}
