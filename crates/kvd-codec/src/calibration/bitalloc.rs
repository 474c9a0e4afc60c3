//! The tensors of a bit allocation.

use super::malformed_error;
use super::tensors::{SideTensors, TensorBuffer, f16_bytes, f32_bytes};
use crate::CalibrationError;
use crate::quantizer::bit_levels::{BitLevels, LEVELS, WIDTH_MAX, levels_at};
use half::f16;
use safetensors::tensor::Dtype;

/// Tensors that `bitalloc` fits to samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BitAllocTensors {
    /// `[layers, kv_heads, head_dim]`: root mean square of each coefficient.
    pub scales: Vec<f32>,
    /// `[layers, kv_heads, head_dim]`: bits of each coefficient.
    pub widths: Vec<u8>,
    /// `[layers, LEVELS]`: levels of all widths from 1, ascending within a width.
    pub levels: Vec<f16>,
    /// `[layers, kv_heads]`: largest error of a coefficient that is no outlier.
    pub bounds: Vec<f32>,
}

impl BitAllocTensors {
    /// The levels of a layer.
    pub(crate) fn layer_levels(&self, layer: usize) -> Option<BitLevels> {
        let values = self.levels.get(layer * LEVELS..(layer + 1) * LEVELS)?;
        Some(BitLevels::new(&values.iter().map(|x| x.to_f32()).collect::<Vec<_>>()))
    }

    pub(super) fn size_bytes(&self) -> usize {
        4 * (self.scales.len() + self.bounds.len()) + self.widths.len() + 2 * self.levels.len()
    }

    /// The tensors as they are written to the file.
    pub(super) fn to_buffers(&self, index: usize, shape: [usize; 3]) -> Vec<TensorBuffer> {
        let [layers, heads, dim] = shape;
        let buffer = |kind: &str, dtype, shape: &[usize], bytes| {
            let name = format!("{index}.{kind}");
            TensorBuffer { name, dtype, shape: shape.to_vec(), bytes }
        };
        vec![
            buffer("scale", Dtype::F32, &[layers, heads, dim], f32_bytes(&self.scales)),
            buffer("width", Dtype::U8, &[layers, heads, dim], self.widths.clone()),
            buffer("levels", Dtype::F16, &[layers, LEVELS], f16_bytes(&self.levels)),
            buffer("bound", Dtype::F32, &[layers, heads], f32_bytes(&self.bounds)),
        ]
    }

    /// All four tensors or none.
    pub(super) fn read_tensors(
        file: &SideTensors<'_>,
        shape: [usize; 3],
    ) -> Result<Option<Self>, CalibrationError> {
        let [layers, heads, dim] = shape;
        let positive = |x: f32| x > 0.0 && x.recip().is_finite();
        let scales = file.read_f32("scale", &[dim], positive)?;
        let bounds = file.read_f32("bound", &[], |x| x > 0.0)?;
        let widths = file.tensor_bytes("width", Dtype::U8, &[layers, heads, dim])?;
        let levels = file.tensor_bytes("levels", Dtype::F16, &[layers, LEVELS])?;
        let (widths, levels) = match (scales.is_empty(), bounds.is_empty(), widths, levels) {
            (true, true, None, None) => return Ok(None),
            (false, false, Some(widths), Some(levels)) => (widths.to_vec(), levels),
            _ => {
                return Err(malformed_error(format!(
                    "{}: bitalloc tensors are incomplete (need scale, width, levels and bound); fit it again",
                    file.side
                )));
            }
        };
        if widths.iter().any(|width| usize::from(*width) > WIDTH_MAX) {
            return Err(malformed_error(format!("{}.width: a width is above 8 bits", file.side)));
        }
        let levels: Vec<f16> =
            levels.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)).collect();
        let ascending = |table: &[f16]| table.windows(2).all(|pair| pair[0] <= pair[1]);
        let valid = levels.iter().all(|x| x.is_finite())
            && levels.chunks(LEVELS).all(|layer| {
                (1..=WIDTH_MAX).all(|width| ascending(&layer[levels_at(width)..][..1 << width]))
            });
        if !valid {
            return Err(malformed_error(format!(
                "{}.levels: the levels of a width must ascend",
                file.side
            )));
        }
        Ok(Some(Self { scales, widths, levels, bounds }))
    }
}
