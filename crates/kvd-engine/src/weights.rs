//! The weights of a model folder: one safetensors file, or several with an index.

use crate::error::{ModelError, Result};
use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

const ONE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Where the weights are.
#[derive(Clone, Debug)]
pub enum WeightFiles {
    /// One safetensors file in memory.
    Embedded(&'static [u8]),
    /// A model folder.
    Folder(PathBuf),
}

impl WeightFiles {
    /// Checks that a folder has weights that can be read: `model.safetensors`, else what
    /// `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// [`ModelError::File`] when it has none.
    pub fn find_files(folder: &Path) -> Result<Self> {
        if folder.join(ONE_FILE).exists() || folder.join(INDEX).exists() {
            return Ok(Self::Folder(folder.to_owned()));
        }
        let hint = other_weights(folder).map_or_else(String::new, |hint| format!("; {hint}"));
        Err(ModelError::file_error(folder, format!("has neither {ONE_FILE} nor {INDEX}{hint}")))
    }

    /// Every tensor, as it is stored.
    pub(crate) fn read_tensors(&self) -> Result<UnusedTensors> {
        let mut tensors = UnusedTensors::default();
        match self {
            Self::Embedded(bytes) => tensors.add_file(Path::new(ONE_FILE), bytes, None)?,
            Self::Folder(folder) if folder.join(ONE_FILE).exists() => {
                let path = folder.join(ONE_FILE);
                tensors.add_file(&path, &read_file(&path)?, None)?;
            }
            Self::Folder(folder) => {
                for (file, names) in read_shards(&folder.join(INDEX))? {
                    let path = folder.join(file);
                    tensors.add_file(&path, &read_file(&path)?, Some(&names))?;
                }
            }
        }
        Ok(tensors)
    }
}

/// Advice where weights are there that are not read.
fn other_weights(folder: &Path) -> Option<String> {
    let entries = folder.read_dir().ok()?.flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let ends = |end: &str| names.iter().find(|name| name.ends_with(end));
    if let Some(file) = ends(".safetensors") {
        return Some(format!(
            "{file} is a part that only {INDEX} makes readable, or of another layout: fetch the \
             folder again, whole, in the layout of transformers"
        ));
    }
    if let Some(file) = ends(".gguf") {
        return Some(format!("{file} is read by docs/python/gguf_model.py, which makes a folder"));
    }
    let old = |name: &&String| {
        name.starts_with("pytorch_model") || name.ends_with(".h5") || name.ends_with(".pth")
    };
    let file = names.iter().find(old)?;
    Some(format!("{file} is not read: write the folder anew with safe_serialization"))
}

/// Reads a file of a model. A pipe or a device has no end that could be waited for.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>> {
    if path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return Err(ModelError::file_error(path, "is a pipe, socket or device, and no file"));
    }
    std::fs::read(path)
        .map_err(|error| ModelError::file_error(path, format!("cannot be read: {error}")))
}

#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// The files of an index and the tensors that each must have.
fn read_shards(path: &Path) -> Result<BTreeMap<String, HashSet<String>>> {
    let index: ShardIndex = serde_json::from_slice(&read_file(path)?).map_err(|error| {
        ModelError::file_error(path, format!("is not an index of weights: {error}"))
    })?;
    let mut shards: BTreeMap<String, HashSet<String>> = BTreeMap::new();
    for (name, file) in index.weight_map {
        let plain = !file.contains(['/', '\\', '\0']) && !["", ".", ".."].contains(&&*file);
        if !plain {
            let reason = format!("{name} is in {file:?}, which is not a file of this folder");
            return Err(ModelError::file_error(path, reason));
        }
        shards.entry(file).or_default().insert(name);
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    if let Some((file, names)) = shards.iter().find(|(file, _)| !folder.join(file).is_file()) {
        let reason = format!("lists {} tensors of {file}, which is missing", names.len());
        return Err(ModelError::file_error(path, reason));
    }
    if shards.is_empty() {
        return Err(ModelError::file_error(path, "lists no tensors"));
    }
    Ok(shards)
}

/// Tensors that nothing has taken yet.
#[derive(Default)]
pub(crate) struct UnusedTensors {
    map: HashMap<String, Tensor>,
    numbers: u64,
}

impl UnusedTensors {
    /// Adds a file's tensors; `listed` is what an index says that it has.
    fn add_file(
        &mut self,
        path: &Path,
        bytes: &[u8],
        listed: Option<&HashSet<String>>,
    ) -> Result<()> {
        let wrong = |error| {
            let pointer = bytes.starts_with(b"version https://git-lfs");
            let hint = if pointer { " (it is a pointer of Git LFS: run git lfs pull)" } else { "" };
            ModelError::file_error(path, format!("is not a safetensors file: {error}{hint}"))
        };
        let file = SafeTensors::deserialize(bytes).map_err(wrong)?;
        for (name, view) in file.tensors() {
            if listed.is_some_and(|listed| !listed.contains(&name)) {
                let reason = format!("has {name}, which the index does not list there");
                return Err(ModelError::file_error(path, reason));
            }
            if !["F32", "F16", "BF16"].contains(&&*format!("{:?}", view.dtype())) {
                let reason = format!("is {:?}; f32, f16 and bf16 are read", view.dtype());
                return Err(ModelError::tensor_error(name, reason));
            }
            let loaded = view.load(&Device::Cpu);
            let tensor =
                loaded.map_err(|error| ModelError::tensor_error(&name, error.to_string()))?;
            self.numbers += tensor.elem_count() as u64;
            self.map.insert(name, tensor);
        }
        let missing = listed.and_then(|l| l.iter().filter(|n| !self.has_tensor(n)).min());
        match missing {
            Some(name) => Err(ModelError::file_error(
                path,
                format!("has no {name}, which the index lists there"),
            )),
            None => Ok(()),
        }
    }

    /// Numbers in all tensors that were read.
    pub(crate) fn number_count(&self) -> u64 {
        self.numbers
    }

    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    pub(crate) fn tensor_shape(&self, name: &str) -> Option<&[usize]> {
        self.map.get(name).map(Tensor::dims)
    }

    /// Takes a tensor of `expected` shape out, in f32. `keys` are those of `config.json` that the
    /// shape follows from.
    pub(crate) fn take_tensor(
        &mut self,
        name: &str,
        expected: &[usize],
        keys: &str,
    ) -> Result<Tensor> {
        let missing = || ModelError::tensor_error(name, "the weights have no tensor of this name");
        let tensor = self.map.remove(name).ok_or_else(missing)?;
        if tensor.dims() != expected {
            return Err(ModelError::Shape {
                name: name.to_owned(),
                found: tensor.dims().to_vec(),
                expected: expected.to_vec(),
                keys: keys.to_owned(),
            });
        }
        let unread = |error: candle_core::Error| ModelError::tensor_error(name, error.to_string());
        let tensor = tensor.to_dtype(DType::F32).map_err(unread)?;
        let numbers = tensor.flatten_all().and_then(|all| all.to_vec1::<f32>()).map_err(unread)?;
        match numbers.iter().position(|number| !number.is_finite()) {
            Some(at) => {
                let reason = format!(
                    "number {at} is {}; weights must be finite: was the file damaged, or a run \
                     saved that had diverged?",
                    numbers[at]
                );
                Err(ModelError::tensor_error(name, reason))
            }
            None => Ok(tensor),
        }
    }

    /// Refuses what nothing took: a model with more tensors computes something else.
    pub(crate) fn refuse_unused(self) -> Result<()> {
        // Old writers stored the frequencies of the default embedding, which no reader uses.
        let unused = |name: &&String| !name.ends_with("rotary_emb.inv_freq");
        let mut left: Vec<_> = self.map.keys().filter(unused).collect();
        left.sort();
        let Some(first) = left.first() else { return Ok(()) };
        let hint = if first.ends_with(".bias") {
            "a bias that attention_bias and mlp_bias of config.json do not announce"
        } else if first.contains("_norm.") {
            "a norm that this model_type does not have"
        } else if first.contains("expert") {
            "mixtures of experts are not supported"
        } else {
            "a tensor that this model_type does not have"
        };
        let reason = format!("{hint}; {} such tensors are in the weights", left.len());
        Err(ModelError::tensor_error(first.as_str(), reason))
    }
}
