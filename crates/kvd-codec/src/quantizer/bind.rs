//! From a spec, a geometry and a calibration to a [`HeadCodec`].

use super::bit_levels::BitLevels;
use super::bitalloc::BitAlloc;
use super::grid::{CLASSES, CodeClass, Grid, GridTables};
use super::hybrid::Hybrid;
use super::lloyd::LloydMax;
use super::polar::Polar;
use super::symmetric::Symmetric;
use super::uniform::Uniform;
use super::vq::VectorQuantizer;
use super::{HeadCodec, HeadQuantizer};
use crate::calibration::SideCalibration;
use crate::huffman::streams::{StreamRun, StreamTable};
use crate::rotation::RandomRotation;
use crate::row_block::LayerSide;
use crate::transform::TransformStep;
use crate::{
    Calibration, CodecError, CodecSpec, FloatFormat, Quantizer, SideSpec, Transform, UniformMode,
    VqSpec,
};
use kvd_core::{Geometry, LayerIndex, RopePairing, Side};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Which head is bound.
#[derive(Clone, Copy)]
pub(crate) struct HeadPlace {
    pub(crate) layer: LayerIndex,
    pub(crate) side: Side,
    pub(crate) head: usize,
}

/// One variant of a side of one layer on its way to its heads.
struct SideBinder<'a> {
    geometry: &'a Geometry,
    spec: &'a SideSpec,
    variant: usize,
    side: Side,
    layer: LayerIndex,
    /// The calibration's part, where the side takes anything from it.
    part: Option<&'a SideCalibration>,
    /// Tables of a grid.
    tables: Option<GridTables>,
    /// Levels of `lloyd`.
    levels: Option<Arc<LloydMax>>,
    /// Levels of a bit allocation.
    allocated: Option<Arc<BitLevels>>,
}

impl HeadCodec {
    /// Binds the heads of one side of one layer; every side's spec is valid.
    pub(crate) fn bind_heads(
        geometry: &Geometry,
        spec: &CodecSpec,
        calibration: Option<&Calibration>,
        place: LayerSide,
    ) -> Result<Vec<Self>, CodecError> {
        let LayerSide { layer, side } = place;
        let variants = spec.side_specs(side);
        let binders = variants.iter().enumerate().map(|(variant, side_spec)| {
            let of_head = |head| spec.side_at(side, layer, head) == *side_spec;
            if !(0..geometry.kv_heads as usize).any(of_head) {
                return Ok(None);
            }
            let part = match calibration {
                _ if !side_spec.needs_calibration() => None,
                None => return Err(CodecError::CalibrationMissing { spec: spec.to_string() }),
                Some(calibration) => {
                    check_shape(geometry, calibration.geometry())?;
                    check_pairing(geometry, calibration.geometry(), side_spec)?;
                    Some(fitted_side(calibration, side_spec, side)?)
                }
            };
            let tables = match part.and_then(|part| part.grid.as_ref()) {
                Some(grid) => {
                    let tables = grid.layer_tables(layer.0 as usize);
                    let tables =
                        tables.ok_or_else(|| mismatch_error(format!("{side} has no tables")))?;
                    let table = |(table, class): (_, &CodeClass)| {
                        StreamTable::new(table, class.symbol_grouping())
                    };
                    Some(tables.into_iter().zip(&CLASSES[1..]).map(table).collect())
                }
                None => None,
            };
            let bitalloc = part.and_then(|part| part.bitalloc.as_ref());
            let allocated = bitalloc.and_then(|part| part.layer_levels(layer.0 as usize));
            let allocated = allocated.map(Arc::new);
            let levels = match side_spec.quantizer {
                Quantizer::Lloyd { bits } => {
                    Some(Arc::new(LloydMax::new(bits, geometry.head_dim(side))))
                }
                _ => None,
            };
            let spec = side_spec;
            Ok(Some(SideBinder {
                geometry,
                spec,
                variant,
                side,
                layer,
                part,
                tables,
                levels,
                allocated,
            }))
        });
        let binders: Vec<Option<SideBinder<'_>>> = binders.collect::<Result<_, _>>()?;
        let bind = |head: usize| {
            let wanted = spec.side_at(side, layer, head);
            let binder = binders.iter().flatten().find(|binder| binder.spec == wanted);
            binder.expect("every variant of the layer has a binder").bind_head(head)
        };
        (0..geometry.kv_heads as usize).map(bind).collect()
    }
}

impl SideBinder<'_> {
    fn bind_head(&self, head: usize) -> Result<HeadCodec, CodecError> {
        let dim = self.geometry.head_dim(self.side);
        let index = self.layer.0 as usize * self.geometry.kv_heads as usize + head;
        let mut hash = Xxh3::new();
        hash.update(self.spec.to_string().as_bytes());
        let steps = self.spec.transforms.iter().filter(|transform| **transform != Transform::Gain);
        let steps = steps.map(|transform| self.bind_step(*transform, index, dim, &mut hash));
        let steps = steps.collect::<Result<_, _>>()?;
        let gain = self.bind_gain(index, &mut hash)?;
        let quantizer = self.bind_quantizer(index, dim, &mut hash)?;
        let (variant, trained_tables) = (self.variant, self.spec.has_trained_tables());
        let tag = hash.digest() as u16;
        let trained_run = StreamRun { table: 0, first: 0, len: quantizer.symbols_per_row(dim) };
        Ok(HeadCodec {
            dim,
            steps,
            gain,
            query_metric: self.spec.transforms.contains(&Transform::QueryPca),
            quantizer,
            variant,
            trained_tables,
            trained_run,
            rung: false,
            tag,
        })
    }

    /// The median length of the head's rows, under `gain`.
    fn bind_gain(&self, index: usize, hash: &mut Xxh3) -> Result<Option<f32>, CodecError> {
        if !self.spec.transforms.contains(&Transform::Gain) {
            return Ok(None);
        }
        let median = self.head_tensor(|part| &part.gain, index, 1, "median lengths")?[0];
        hash.update(&median.to_le_bytes());
        Ok(Some(median))
    }

    fn bind_step(
        &self,
        transform: Transform,
        index: usize,
        dim: usize,
        hash: &mut Xxh3,
    ) -> Result<TransformStep, CodecError> {
        match transform {
            Transform::Smooth => {
                let factors =
                    self.head_tensor(|part| &part.smooth, index, dim, "smoothing factors")?;
                factors.iter().for_each(|f| hash.update(&f.to_le_bytes()));
                Ok(TransformStep::scale_channels(factors.to_vec()))
            }
            Transform::Norm => {
                let factors = self.head_tensor(|part| &part.norm, index, dim, "norms")?;
                factors.iter().for_each(|f| hash.update(&f.to_le_bytes()));
                Ok(TransformStep::scale_channels(factors.to_vec()))
            }
            Transform::Gain => unreachable!("gain is no step"),
            Transform::Hadamard => Ok(TransformStep::hadamard_blocks(dim)),
            Transform::Rotate { seed } => {
                Ok(TransformStep::Rotation(RandomRotation::new(dim, seed)))
            }
            Transform::Mean => {
                let mean = self.head_tensor(|part| &part.mean, index, dim, "means")?;
                mean.iter().for_each(|m| hash.update(&m.to_le_bytes()));
                Ok(TransformStep::Offset { mean: mean.to_vec() })
            }
            Transform::Pca | Transform::QueryPca => {
                let matrix = self.head_tensor(|part| &part.matrix, index, dim * dim, "matrices")?;
                matrix.iter().for_each(|m| hash.update(&m.to_le_bytes()));
                let step =
                    TransformStep::from_matrix(dim, matrix.iter().map(|m| m.to_f32()).collect());
                step.ok_or_else(|| {
                    mismatch_error(format!("a matrix of {} has no inverse", self.side))
                })
            }
        }
    }

    fn bind_quantizer(
        &self,
        index: usize,
        dim: usize,
        hash: &mut Xxh3,
    ) -> Result<HeadQuantizer, CodecError> {
        let side = self.side;
        Ok(match self.spec.quantizer {
            Quantizer::Float(FloatFormat::E4M3) => HeadQuantizer::E4m3,
            Quantizer::Float(format) => {
                let dtype = format.stored_dtype(self.geometry.dtype);
                HeadQuantizer::Float(dtype.expect("only fp8 has no dtype"))
            }
            Quantizer::Uniform { step, axis, group, mode } => {
                let base = Uniform::new(step, axis, group, (step.level_count() - 1) as u16);
                match mode {
                    UniformMode::Asym => HeadQuantizer::Uniform(base),
                    UniformMode::Sym => HeadQuantizer::Symmetric(Symmetric { base }),
                    UniformMode::Hybrid => HeadQuantizer::Hybrid(Hybrid { base }),
                }
            }
            Quantizer::Polar { angle, radius, group } => {
                let (pairing, bits) = (self.geometry.rope_pairing, [angle, radius]);
                hash.update(&[u8::from(pairing == RopePairing::Interleaved)]);
                HeadQuantizer::Polar(Box::new(match group {
                    Some(group) => Polar::with_groups(pairing, bits, group),
                    None => {
                        let radii =
                            self.head_tensor(|part| &part.radius, index, dim / 2, "radii")?;
                        radii.iter().for_each(|r| hash.update(&r.to_le_bytes()));
                        let polar = Polar::with_radii(pairing, bits, radii);
                        polar.ok_or_else(|| {
                            mismatch_error(format!("a radius of {side} is negative"))
                        })?
                    }
                }))
            }
            Quantizer::Lloyd { .. } => {
                HeadQuantizer::Lloyd(Arc::clone(self.levels.as_ref().expect("made for the side")))
            }
            Quantizer::Vq(spec) => {
                let vq = self.bind_codebooks(spec, index)?;
                vq.books().for_each(|book| book.update_hash(hash));
                HeadQuantizer::Vq(vq)
            }
            Quantizer::Grid { .. } => {
                let grid = self.part.and_then(|part| part.grid.as_ref());
                let (Some(grid), Some(tables)) = (grid, &self.tables) else {
                    return Err(mismatch_error(format!("{side} has no grid")));
                };
                let (step, classes) = (grid.steps[index], &grid.classes[index * dim..][..dim]);
                hash.update(&step.to_le_bytes());
                hash.update(classes);
                tables.iter().for_each(|table| hash.update(table.huffman.code_lengths()));
                HeadQuantizer::Grid(Box::new(Grid::new(side, step, classes, Arc::clone(tables))))
            }
            Quantizer::BitAlloc { .. } => self.bind_bitalloc(index, dim, hash)?,
        })
    }

    /// The codebooks of a head.
    fn bind_codebooks(&self, spec: VqSpec, index: usize) -> Result<VectorQuantizer, CodecError> {
        let side = self.side;
        let Some(books) = self.part.and_then(|part| part.codebooks.as_ref()) else {
            return Err(mismatch_error(format!("{side} has no codebooks")));
        };
        let want = spec.tensor_shape(self.geometry, side);
        if books.shape() != want {
            let text = format!(
                "{side} has codebooks of shape [layers, kv_heads, positions, stages, entries, \
                 channels] = {:?}, {spec} wants {want:?}",
                books.shape()
            );
            return Err(mismatch_error(text));
        }
        let (layer, head) = (self.layer.0 as usize, index % self.geometry.kv_heads as usize);
        Ok(VectorQuantizer::new(self.geometry.head_dim(side), &spec, books.of_head(layer, head)))
    }

    fn bind_bitalloc(
        &self,
        index: usize,
        dim: usize,
        hash: &mut Xxh3,
    ) -> Result<HeadQuantizer, CodecError> {
        let part = self.part.and_then(|part| part.bitalloc.as_ref());
        let (Some(part), Some(levels)) = (part, &self.allocated) else {
            return Err(mismatch_error(format!("{} has no bit allocation", self.side)));
        };
        let (widths, bound) = (&part.widths[index * dim..][..dim], part.bounds[index]);
        let scales = &part.scales[index * dim..][..dim];
        hash.update(widths);
        scales.iter().chain([&bound]).for_each(|x| hash.update(&x.to_le_bytes()));
        levels.values().iter().for_each(|x| hash.update(&x.to_le_bytes()));
        let bitalloc = BitAlloc::new(self.side, widths, (scales, bound), Arc::clone(levels));
        Ok(HeadQuantizer::BitAlloc(Box::new(bitalloc)))
    }

    /// The head's part of a tensor, `len` values.
    fn head_tensor<T>(
        &self,
        tensor: impl Fn(&SideCalibration) -> &Vec<T>,
        index: usize,
        len: usize,
        what: &str,
    ) -> Result<&[T], CodecError> {
        let part = self.part.and_then(|part| tensor(part).get(index * len..(index + 1) * len));
        part.ok_or_else(|| mismatch_error(format!("{} has no {what}", self.side)))
    }
}

fn mismatch_error(reason: String) -> CodecError {
    CodecError::CalibrationMismatch { reason }
}

/// Layers, heads and head sizes must agree; block size and dtype may differ.
fn check_shape(geometry: &Geometry, fitted: &Geometry) -> Result<(), CodecError> {
    if geometry.same_rows(fitted) {
        return Ok(());
    }
    let shape = |g: &Geometry| [g.layers, g.kv_heads, g.head_dim_k, g.head_dim_v];
    Err(mismatch_error(format!(
        "it was fitted for [layers, kv_heads, head_dim_k, head_dim_v] = {:?}, the model has {:?}",
        shape(fitted),
        shape(geometry)
    )))
}

/// Radii belong to pairs of channels.
fn check_pairing(
    geometry: &Geometry,
    fitted: &Geometry,
    spec: &SideSpec,
) -> Result<(), CodecError> {
    let by_pairs = matches!(spec.quantizer, Quantizer::Polar { .. });
    if !by_pairs || geometry.rope_pairing == fitted.rope_pairing {
        return Ok(());
    }
    let (was, is) = (fitted.rope_pairing, geometry.rope_pairing);
    Err(mismatch_error(format!("its radii are of {was:?} rope pairs, the model's are {is:?}")))
}

/// The part that was fitted for this side.
fn fitted_side<'a>(
    calibration: &'a Calibration,
    spec: &SideSpec,
    side: Side,
) -> Result<&'a SideCalibration, CodecError> {
    let wanted = spec.fitted_text();
    calibration.part(side, &wanted).ok_or_else(|| {
        let held: Vec<String> =
            calibration.parts().map(|(side, fitted)| format!("{side}={fitted}")).collect();
        mismatch_error(format!("it was fitted for {}, not for {side}={wanted}", held.join("; ")))
    })
}
