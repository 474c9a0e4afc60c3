//! Rows of K, V and queries as a safetensors file.
//!
//! | tensor | shape |
//! |---|---|
//! | `layer.N.k` | `[tokens, kv_heads, head_dim_k]`, after RoPE |
//! | `layer.N.v` | `[tokens, kv_heads, head_dim_v]` |
//! | `layer.N.q` | `[queries, query heads, head_dim_k]`, after RoPE; in all layers or none |
//!
//! N counts from 0 without gaps; each tensor is f16, bf16 or f32. The metadata key `rope` says
//! `rotate_half` or `interleaved`; absent means the former. Other tensors and keys are passed over,
//! so that the fixture's own dumps are read as they are.

use super::CalibrateError;
use crate::input_file::read_input;
use anyhow::{Context, Result, ensure};
use kvd_core::{DType, Geometry, RopePairing};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::path::PathBuf;

/// Rows of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerRows {
    /// `[tokens, kv_heads, head_dim_k]`.
    pub k: Vec<f32>,
    /// `[tokens, kv_heads, head_dim_v]`.
    pub v: Vec<f32>,
    /// `[queries, query heads, head_dim_k]`; empty when unknown.
    pub q: Vec<f32>,
}

/// Rows of every layer of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct KvDump {
    /// Geometry of the model.
    pub geometry: Geometry,
    /// Query heads; 0 when no layer has queries.
    pub query_heads: usize,
    /// By layer.
    pub layers: Vec<LayerRows>,
}

/// Files to read.
#[derive(Clone, Debug)]
pub struct DumpSource {
    /// Files of one model; their rows are taken together, in this order.
    pub files: Vec<PathBuf>,
    /// Tokens per block of the model that will use the artefact.
    pub block_tokens: u32,
    /// Tokens of each file to take at most, from its front.
    pub tokens: Option<usize>,
}

impl DumpSource {
    /// The rows of all files.
    pub(super) fn read_files(&self) -> Result<KvDump> {
        let mut all: Option<KvDump> = None;
        for path in &self.files {
            let file = path.display().to_string();
            let bytes = read_input(path).with_context(|| format!("cannot read {file}"))?;
            let dump = KvDump::from_bytes(&bytes, self.block_tokens);
            let mut dump =
                dump.map_err(|problem| CalibrateError::Dump { file: file.clone(), problem })?;
            if let Some(tokens) = self.tokens {
                dump.truncate_tokens(tokens);
            }
            match &mut all {
                None => all = Some(dump),
                Some(all) => all.append_dump(dump).map_err(|()| CalibrateError::Mixed { file })?,
            }
        }
        all.context("no file of samples")
    }
}

impl KvDump {
    /// Tokens of each layer.
    #[must_use]
    pub fn token_count(&self) -> usize {
        let width = (self.geometry.kv_heads * self.geometry.head_dim_k) as usize;
        self.layers.first().map_or(0, |layer| layer.k.len() / width)
    }

    /// Keeps the first `tokens` tokens, and as many queries.
    fn truncate_tokens(&mut self, tokens: usize) {
        let [k, v, q] = self.token_widths();
        for layer in &mut self.layers {
            layer.k.truncate(tokens * k);
            layer.v.truncate(tokens * v);
            layer.q.truncate(tokens * q);
        }
    }

    /// Values of one token: keys, values, queries.
    pub(crate) fn token_widths(&self) -> [usize; 3] {
        let g = &self.geometry;
        let [heads, k, v] = [g.kv_heads, g.head_dim_k, g.head_dim_v].map(|n| n as usize);
        [heads * k, heads * v, self.query_heads * k]
    }

    /// Adds the rows of another dump of the same model.
    pub(super) fn append_dump(&mut self, other: Self) -> Result<(), ()> {
        if (&self.geometry, self.query_heads) != (&other.geometry, other.query_heads) {
            return Err(());
        }
        for (layer, rows) in self.layers.iter_mut().zip(other.layers) {
            layer.k.extend(rows.k);
            layer.v.extend(rows.v);
            layer.q.extend(rows.q);
        }
        Ok(())
    }

    /// The file, in f16. The same rows give the same bytes.
    ///
    /// # Errors
    /// When a value does not fit f16.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let g = &self.geometry;
        let [heads, k, v] = [g.kv_heads, g.head_dim_k, g.head_dim_v].map(|n| n as usize);
        let mut buffers = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let tensors = [
                ("k", &layer.k, heads, k),
                ("v", &layer.v, heads, v),
                ("q", &layer.q, self.query_heads, k),
            ];
            for (name, values, heads, dim) in tensors {
                if values.is_empty() {
                    continue;
                }
                let name = format!("layer.{index}.{name}");
                let largest = f32::from(half::f16::MAX);
                ensure!(values.iter().all(|x| x.abs() <= largest), "{name} does not fit f16");
                let mut bytes = vec![0; values.len() * DType::F16.size_bytes()];
                DType::F16.narrow_values(values, &mut bytes);
                buffers.push((name, vec![values.len() / (heads * dim), heads, dim], bytes));
            }
        }
        let views = buffers.iter().map(|(name, shape, bytes)| {
            Ok((name.as_str(), TensorView::new(Dtype::F16, shape.clone(), bytes)?))
        });
        let views: Vec<_> = views.collect::<Result<_>>()?;
        // One key: several would be written in an arbitrary order.
        let rope = match g.rope_pairing {
            RopePairing::Half => "rotate_half",
            RopePairing::Interleaved => "interleaved",
        };
        let metadata = HashMap::from([("rope".to_owned(), rope.to_owned())]);
        Ok(safetensors::serialize(views, Some(metadata))?)
    }

    /// Reads a file; the problem names the tensor.
    ///
    /// # Errors
    /// When the bytes are no safetensors file, or a tensor is missing or has another shape than
    /// its layer and model ask for.
    pub fn from_bytes(bytes: &[u8], block_tokens: u32) -> Result<Self, String> {
        let (_, header) = SafeTensors::read_metadata(bytes)
            .map_err(|error| format!("is not a safetensors file: {error}"))?;
        let rope = header.metadata().as_ref().and_then(|keys| keys.get("rope"));
        let rope_pairing = match rope.map(String::as_str) {
            None | Some("rotate_half") => RopePairing::Half,
            Some("interleaved") => RopePairing::Interleaved,
            Some(other) => {
                return Err(format!("rope {other:?}: expected rotate_half or interleaved"));
            }
        };
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let has = |layer: usize, part: &str| tensors.tensor(&format!("layer.{layer}.{part}")).ok();
        let layers = (0..).take_while(|&layer| has(layer, "k").is_some()).count();
        let first = has(0, "k").ok_or("no tensor layer.0.k [tokens, kv_heads, head_dim]")?;
        let [tokens, heads, dim_k] = view_shape(&first, "layer.0.k")?;
        let value = has(0, "v").ok_or("no tensor layer.0.v [tokens, kv_heads, head_dim]")?;
        let [_, _, dim_v] = view_shape(&value, "layer.0.v")?;
        let queries = match has(0, "q") {
            Some(view) => Some(view_shape(&view, "layer.0.q")?),
            None => None,
        };
        let small = |n: usize| u32::try_from(n).map_err(|_| format!("a dimension of {n}"));
        let geometry = Geometry {
            layers: small(layers)?,
            kv_heads: small(heads)?,
            head_dim_k: small(dim_k)?,
            head_dim_v: small(dim_v)?,
            block_tokens,
            dtype: view_dtype(&first, "layer.0.k")?,
            rope_pairing,
        };
        geometry.validate_fields().map_err(|e| e.to_string())?;
        let query_heads = queries.map_or(0, |[_, heads, _]| heads);
        if !query_heads.is_multiple_of(heads) {
            return Err(format!("{query_heads} query heads over {heads} KV heads"));
        }
        let layers = (0..layers).map(|layer| {
            let rows = |part: &str, want: [usize; 3]| read_rows(&tensors, layer, part, want);
            let k = rows("k", [tokens, heads, dim_k])?;
            let v = rows("v", [tokens, heads, dim_v])?;
            let q =
                queries.map(|[count, heads, _]| rows("q", [count, heads, dim_k])).transpose()?;
            Ok(LayerRows { k, v, q: q.unwrap_or_default() })
        });
        Ok(Self { geometry, query_heads, layers: layers.collect::<Result<_, String>>()? })
    }
}

fn view_shape(view: &TensorView<'_>, name: &str) -> Result<[usize; 3], String> {
    let shape: Result<[usize; 3], _> = view.shape().try_into();
    match shape {
        Ok(shape) if shape.iter().all(|&n| n > 0) => Ok(shape),
        _ => Err(format!("{name} is {:?}, expected [tokens, heads, head_dim]", view.shape())),
    }
}

fn view_dtype(view: &TensorView<'_>, name: &str) -> Result<DType, String> {
    match view.dtype() {
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        Dtype::F32 => Ok(DType::F32),
        other => Err(format!("{name} is {other:?}, expected F16, BF16 or F32")),
    }
}

fn read_rows(
    tensors: &SafeTensors<'_>,
    layer: usize,
    part: &str,
    want: [usize; 3],
) -> Result<Vec<f32>, String> {
    let name = format!("layer.{layer}.{part}");
    let view = tensors.tensor(&name).map_err(|_| format!("no tensor {name} {want:?}"))?;
    if view.shape() != want {
        return Err(format!("{name} is {:?}, expected {want:?}", view.shape()));
    }
    let dtype = view_dtype(&view, &name)?;
    let mut values = vec![0.0; view.data().len() / dtype.size_bytes()];
    dtype.widen_values(view.data(), &mut values);
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump() -> KvDump {
        let geometry = Geometry {
            layers: 2,
            kv_heads: 2,
            head_dim_k: 8,
            head_dim_v: 4,
            block_tokens: 16,
            dtype: DType::F16,
            rope_pairing: RopePairing::Interleaved,
        };
        let values = |n: usize, seed: usize| (0..n).map(|i| ((i * 7 + seed) % 64) as f32).collect();
        let layer = |i| LayerRows {
            k: values(5 * 2 * 8, i),
            v: values(5 * 2 * 4, i + 1),
            q: values(5 * 4 * 8, i + 2),
        };
        KvDump { geometry, query_heads: 4, layers: vec![layer(0), layer(10)] }
    }

    #[test]
    fn a_dump_is_read_as_written_and_written_alike() {
        let dump = dump();
        let bytes = dump.to_bytes().unwrap();
        assert_eq!(bytes, dump.to_bytes().unwrap());
        assert_eq!(KvDump::from_bytes(&bytes, 16).unwrap(), dump);
        let mut none = dump.clone();
        none.query_heads = 0;
        none.layers.iter_mut().for_each(|layer| layer.q.clear());
        assert_eq!(KvDump::from_bytes(&none.to_bytes().unwrap(), 16).unwrap(), none);
        assert!(none.to_samples().unwrap().queries(kvd_core::LayerIndex(0), 0).is_empty());
        // Query heads 2 and 3 share KV head 1.
        let samples = dump.to_samples().unwrap();
        let queries = samples.queries(kvd_core::LayerIndex(0), 1);
        assert_eq!((queries.len(), &queries[..8]), (2 * 5 * 8, &dump.layers[0].q[16..24]));
    }

    #[test]
    fn the_fixtures_own_dump_is_read_as_it_is() {
        let path = "../../tests/fixtures/kv-tiny-b/kv_passage0.safetensors";
        let dump = KvDump::from_bytes(&std::fs::read(path).unwrap(), 64).unwrap();
        assert_eq!((dump.token_count(), dump.query_heads, dump.layers.len()), (2048, 4, 3));
        assert_eq!(dump.layers[2].q.len(), 1024 * 4 * 128);
        assert_eq!(dump.geometry.rope_pairing, RopePairing::Half);
    }

    #[test]
    fn what_is_missing_or_misshapen_is_named() {
        let view = |shape: &[usize], bytes: &'static [u8]| {
            TensorView::new(Dtype::F16, shape.to_vec(), bytes).unwrap()
        };
        static ZEROS: [u8; 1024] = [0; 1024];
        let problem = |tensors: &[(&str, &[usize])]| {
            let views = tensors.iter().map(|(name, shape)| {
                let bytes = 2 * shape.iter().product::<usize>();
                (*name, view(shape, &ZEROS[..bytes]))
            });
            KvDump::from_bytes(&safetensors::serialize(views, None).unwrap(), 16).unwrap_err()
        };
        for (tensors, part) in [
            (&[("k", &[2, 2, 8][..])][..], "no tensor layer.0.k"),
            (&[("layer.0.k", &[2, 2, 8])], "no tensor layer.0.v"),
            (&[("layer.0.k", &[2, 16]), ("layer.0.v", &[2, 2, 8])], "layer.0.k is [2, 16]"),
            (&[("layer.0.k", &[2, 2, 8]), ("layer.0.v", &[3, 2, 8])], "expected [2, 2, 8]"),
            (
                &[("layer.0.k", &[2, 2, 8]), ("layer.0.v", &[2, 2, 8]), ("layer.0.q", &[2, 3, 8])],
                "3 query heads",
            ),
            (
                &[("layer.0.k", &[2, 2, 8]), ("layer.0.v", &[2, 2, 8]), ("layer.1.k", &[2, 2, 8])],
                "no tensor layer.1.v",
            ),
        ] {
            let problem = problem(tensors);
            assert!(problem.contains(part), "{tensors:?}: {problem}");
        }
        assert!(KvDump::from_bytes(b"not a file", 16).is_err());
    }

    #[test]
    fn files_of_one_model_add_up_and_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("a"), dump().to_bytes().unwrap()).unwrap();
        let mut other = dump();
        other.geometry.layers = 1;
        other.layers.truncate(1);
        std::fs::write(path("b"), other.to_bytes().unwrap()).unwrap();
        let source = |files: &[&str], tokens| {
            let files = files.iter().map(|name| path(name)).collect();
            DumpSource { files, block_tokens: 16, tokens }.read_files()
        };
        assert_eq!(source(&["a", "a"], None).unwrap().token_count(), 10);
        assert_eq!(source(&["a", "a"], Some(2)).unwrap().token_count(), 4);
        let error = source(&["a", "b"], None).unwrap_err().downcast::<CalibrateError>().unwrap();
        assert!(matches!(error, CalibrateError::Mixed { .. }), "{error}");
        let error = format!("{:#}", source(&["none"], None).unwrap_err());
        assert!(error.contains("none"), "{error}");
    }
}
