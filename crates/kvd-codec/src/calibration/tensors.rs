//! The tensors of one side of a calibration.

use super::bitalloc::BitAllocTensors;
use super::codebooks::SideCodebooks;
use super::malformed_error;
use crate::CalibrationError;
use crate::huffman::HuffmanTable;
use crate::quantizer::grid::{CLASSES, CodeClass};
use half::f16;
use kvd_core::{DType, Geometry, Side};
use safetensors::tensor::{Dtype, SafeTensors};

/// Bytes of the tables of one layer and side: a code length per symbol of each class.
pub(crate) const LAYER_TABLE_BYTES: usize = {
    let (mut bytes, mut class) = (0, 1);
    while class < CLASSES.len() {
        bytes += CLASSES[class].symbol_count();
        class += 1;
    }
    bytes
};

/// The fitted tensors of one side, row-major over `[layers, kv_heads, ..]`.
#[derive(Clone, Debug, PartialEq)]
pub struct SideCalibration {
    /// Keys or values.
    pub side: Side,
    /// The part of the spec that it was fitted for: [`crate::SideSpec::fitted_text`].
    pub fitted: String,
    /// `[layers, kv_heads, head_dim]`, empty without `smooth`.
    pub smooth: Vec<f32>,
    /// `[layers, kv_heads, head_dim]`, empty without `norm`.
    pub norm: Vec<f32>,
    /// `[layers, kv_heads, head_dim / 2]`: largest radius of each pair, empty without `polar`.
    pub radius: Vec<f16>,
    /// `[layers, kv_heads, head_dim]`, empty without `mean`.
    pub mean: Vec<f32>,
    /// `[layers, kv_heads]`: median length of a row, empty without `gain`.
    pub gain: Vec<f32>,
    /// `[layers, kv_heads, head_dim, head_dim]`, empty without `pca` and `qpca`.
    pub matrix: Vec<f16>,
    /// Codebooks of `vq`.
    pub codebooks: Option<SideCodebooks>,
    /// Steps, classes and tables of a grid.
    pub grid: Option<GridTensors>,
    /// `[layers, kv_heads]`: each step over that of an even split, or two to the bits of a
    /// coefficient that a head has fewer; empty for an even split. Nothing but reports reads it.
    pub split: Vec<f32>,
    /// Widths, levels, scales and bounds of a bit allocation.
    pub bitalloc: Option<BitAllocTensors>,
}

/// Tensors that the grid quantizer fits to samples.
#[derive(Clone, Debug, PartialEq)]
pub struct GridTensors {
    /// `[layers, kv_heads]`.
    pub steps: Vec<f32>,
    /// `[layers, kv_heads, head_dim]`, indices into [`CLASSES`].
    pub classes: Vec<u8>,
    /// `[layers, LAYER_TABLE_BYTES]`: code lengths of the classes after the zero class.
    pub tables: Vec<u8>,
}

impl GridTensors {
    /// The tables of a layer, by class from the first after the zero class, which has none. `None`
    /// when the lengths of a class are no complete code.
    pub fn layer_tables(&self, layer: usize) -> Option<Vec<HuffmanTable>> {
        let tables = layer * LAYER_TABLE_BYTES..(layer + 1) * LAYER_TABLE_BYTES;
        let mut lengths = self.tables.get(tables)?;
        let table = |class: &CodeClass| {
            let (of_class, rest) = lengths.split_at_checked(class.symbol_count())?;
            lengths = rest;
            HuffmanTable::try_partial(of_class)
        };
        CLASSES[1..].iter().map(table).collect()
    }
}

/// A tensor on its way into a file.
pub(super) struct TensorBuffer {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

impl SideCalibration {
    /// Nothing learned yet.
    #[must_use]
    pub fn new(side: Side, fitted: String) -> Self {
        Self {
            side,
            fitted,
            smooth: Vec::new(),
            norm: Vec::new(),
            radius: Vec::new(),
            mean: Vec::new(),
            gain: Vec::new(),
            matrix: Vec::new(),
            codebooks: None,
            grid: None,
            split: Vec::new(),
            bitalloc: None,
        }
    }

    /// Bytes of all tensors.
    pub(super) fn size_bytes(&self) -> u64 {
        let halves = self.codebooks.as_ref().map_or(0, SideCodebooks::value_count);
        let grid = self.grid.as_ref();
        let grid = grid.map_or(0, |g| 4 * g.steps.len() + g.classes.len() + g.tables.len());
        let floats = self.smooth.len() + self.norm.len() + self.mean.len() + self.gain.len();
        let floats = floats + self.split.len();
        let halves = self.matrix.len() + self.radius.len() + halves;
        let bitalloc = self.bitalloc.as_ref().map_or(0, BitAllocTensors::size_bytes);
        (4 * floats + 2 * halves + grid + bitalloc) as u64
    }

    /// The tensors as they are written to the file.
    pub(super) fn to_buffers(&self, geometry: &Geometry, index: usize) -> Vec<TensorBuffer> {
        let (layers, heads) = (geometry.layers as usize, geometry.kv_heads as usize);
        let dim = geometry.head_dim(self.side);
        let mut buffers = Vec::new();
        let mut add = |kind: &str, dtype, shape: &[usize], bytes: Vec<u8>| {
            if !bytes.is_empty() {
                let name = format!("{index}.{kind}");
                buffers.push(TensorBuffer { name, dtype, shape: shape.to_vec(), bytes });
            }
        };
        add("smooth", Dtype::F32, &[layers, heads, dim], f32_bytes(&self.smooth));
        add("norm", Dtype::F32, &[layers, heads, dim], f32_bytes(&self.norm));
        add("radius", Dtype::F16, &[layers, heads, dim / 2], f16_bytes(&self.radius));
        add("mean", Dtype::F32, &[layers, heads, dim], f32_bytes(&self.mean));
        add("gain", Dtype::F32, &[layers, heads], f32_bytes(&self.gain));
        add("matrix", Dtype::F16, &[layers, heads, dim, dim], f16_bytes(&self.matrix));
        if let Some(books) = &self.codebooks {
            add("codebook", Dtype::F16, &books.shape(), books.to_bytes());
        }
        if let Some(grid) = &self.grid {
            add("step", Dtype::F32, &[layers, heads], f32_bytes(&grid.steps));
            add("class", Dtype::U8, &[layers, heads, dim], grid.classes.clone());
            add("table", Dtype::U8, &[layers, LAYER_TABLE_BYTES], grid.tables.clone());
        }
        add("split", Dtype::F32, &[layers, heads], f32_bytes(&self.split));
        if let Some(bitalloc) = &self.bitalloc {
            buffers.extend(bitalloc.to_buffers(index, [layers, heads, dim]));
        }
        buffers
    }

    /// Reads and checks the tensors of part `index`.
    pub(super) fn read_tensors(
        tensors: &SafeTensors<'_>,
        index: usize,
        (side, fitted): (Side, String),
        geometry: &Geometry,
    ) -> Result<Self, CalibrationError> {
        let file = SideTensors { tensors, index, side, geometry };
        let dim = geometry.head_dim(side);
        Ok(Self {
            side,
            fitted,
            smooth: file.read_factors("smooth")?,
            norm: file.read_factors("norm")?,
            radius: file.read_f16("radius", &[dim / 2])?,
            mean: file.read_f32("mean", &[dim], |_| true)?,
            gain: file.read_f32("gain", &[], |median| median > 0.0)?,
            matrix: file.read_f16("matrix", &[dim, dim])?,
            codebooks: file.read_codebooks()?,
            grid: file.read_grid()?,
            split: file.read_f32("split", &[], |factor| factor > 0.0)?,
            bitalloc: BitAllocTensors::read_tensors(
                &file,
                [file.head_shape()[0], file.head_shape()[1], dim],
            )?,
        })
    }
}

pub(super) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(super) fn f16_bytes(values: &[f16]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// One part of a file that is being read.
pub(super) struct SideTensors<'a> {
    tensors: &'a SafeTensors<'a>,
    index: usize,
    pub(super) side: Side,
    geometry: &'a Geometry,
}

impl<'a> SideTensors<'a> {
    fn head_shape(&self) -> [usize; 2] {
        [self.geometry.layers as usize, self.geometry.kv_heads as usize]
    }

    /// Bytes of a tensor of exactly this type and shape; none when it is absent.
    pub(super) fn tensor_bytes(
        &self,
        kind: &str,
        dtype: Dtype,
        want: &[usize],
    ) -> Result<Option<&'a [u8]>, CalibrationError> {
        let name = format!("{}.{kind}", self.index);
        let Ok(tensor) = self.tensors.tensor(&name) else { return Ok(None) };
        if tensor.dtype() != dtype || tensor.shape() != want {
            return Err(malformed_error(format!(
                "tensor {name} must be {dtype:?} of shape {want:?}"
            )));
        }
        Ok(Some(tensor.data()))
    }

    /// An f32 tensor `[layers, kv_heads, ..rest]` of finite values that are all `valid`; empty
    /// when it is absent.
    pub(super) fn read_f32(
        &self,
        kind: &str,
        rest: &[usize],
        valid: impl Fn(f32) -> bool,
    ) -> Result<Vec<f32>, CalibrationError> {
        let want = [&self.head_shape(), rest].concat();
        let Some(bytes) = self.tensor_bytes(kind, Dtype::F32, &want)? else {
            return Ok(Vec::new());
        };
        let mut values = vec![0f32; bytes.len() / 4];
        DType::F32.widen_values(bytes, &mut values);
        if values.iter().all(|x| x.is_finite() && valid(*x)) {
            return Ok(values);
        }
        Err(malformed_error(format!("tensor {}.{kind} has a value outside its range", self.index)))
    }

    /// An f16 tensor `[layers, kv_heads, ..rest]` of finite values; empty when it is absent.
    fn read_f16(&self, kind: &str, rest: &[usize]) -> Result<Vec<f16>, CalibrationError> {
        let want = [&self.head_shape(), rest].concat();
        let Some(bytes) = self.tensor_bytes(kind, Dtype::F16, &want)? else {
            return Ok(Vec::new());
        };
        let values: Vec<f16> =
            bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)).collect();
        if values.iter().all(|x| x.is_finite()) {
            return Ok(values);
        }
        Err(malformed_error(format!(
            "tensor {}.{kind} has a value that is NaN or infinite",
            self.index
        )))
    }

    fn read_factors(&self, kind: &str) -> Result<Vec<f32>, CalibrationError> {
        // A factor and its reciprocal both multiply: neither may be zero or infinite.
        let valid = |factor: f32| factor > 0.0 && factor.recip().is_finite();
        self.read_f32(kind, &[self.geometry.head_dim(self.side)], valid)
    }

    fn read_codebooks(&self) -> Result<Option<SideCodebooks>, CalibrationError> {
        let name = format!("{}.codebook", self.index);
        let Ok(tensor) = self.tensors.tensor(&name) else { return Ok(None) };
        let is_f16 = tensor.dtype() == Dtype::F16;
        let shape = SideCodebooks::check_shape(tensor.shape(), self.geometry, self.side);
        let Some(shape) = shape.filter(|_| is_f16) else {
            let (dtype, shape) = (tensor.dtype(), tensor.shape());
            return Err(malformed_error(format!(
                "tensor {name} is {dtype:?} of shape {shape:?}; codebooks are F16 of six axes"
            )));
        };
        let books = SideCodebooks::from_bytes(shape, tensor.data());
        books.map(Some).ok_or_else(|| {
            malformed_error(format!("tensor {name} has a value that is NaN or infinite"))
        })
    }

    /// All three tensors or none.
    fn read_grid(&self) -> Result<Option<GridTensors>, CalibrationError> {
        let steps = self.read_f32("step", &[], |step| step > 0.0)?;
        let [layers, heads] = self.head_shape();
        let dim = self.geometry.head_dim(self.side);
        let classes = self.tensor_bytes("class", Dtype::U8, &[layers, heads, dim])?;
        let tables = self.tensor_bytes("table", Dtype::U8, &[layers, LAYER_TABLE_BYTES])?;
        let (classes, tables) = match (steps.is_empty(), classes, tables) {
            (true, None, None) => return Ok(None),
            (false, Some(classes), Some(tables)) => (classes.to_vec(), tables.to_vec()),
            _ => {
                return Err(malformed_error(format!(
                    "part {}: grid tensors are incomplete (need step, class and table); fit it again",
                    self.index
                )));
            }
        };
        if !classes.iter().all(|class| usize::from(*class) < CLASSES.len()) {
            return Err(malformed_error(format!(
                "tensor {}.class: unknown class id (largest is {})",
                self.index,
                CLASSES.len() - 1
            )));
        }
        let grid = GridTensors { steps, classes, tables };
        if (0..layers).all(|layer| grid.layer_tables(layer).is_some()) {
            return Ok(Some(grid));
        }
        Err(malformed_error(format!(
            "tensor {}.table: Huffman code lengths are not a complete code; fit it again",
            self.index
        )))
    }
}
