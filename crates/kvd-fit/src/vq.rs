//! Fits a side's codebooks: which sub-vectors each is made from, and its residual stages.

use crate::calibration::{HeadFit, HeadIndex};
use crate::kmeans;
use crate::quantizer::{FitTarget, QuantizerFit};
use half::f16;
use kvd_codec::fitting::{SideCalibration, SideCodebooks, SplitMix64, snap_to_levels};
use kvd_codec::{CalibrationError, Codebook, CodebookScope, VqSpec};
use std::sync::Arc;

/// Sub-vectors that k-means looks at for a codebook,
const POINTS_MAX: usize = 1 << 16;
/// or this many per entry where that is more.
const POINTS_PER_ENTRY: usize = 8;

/// The codebooks of one side on their way.
pub(crate) struct VqFit {
    spec: VqSpec,
    seed: u64,
    layers: u32,
    kv_heads: usize,
    shape: [usize; 6],
    books: Vec<Arc<Codebook>>,
    /// Sub-vectors of heads that share a codebook, so far.
    pool: Vec<f32>,
}

impl VqFit {
    pub(crate) fn new(spec: VqSpec, target: FitTarget<'_>) -> Self {
        let FitTarget { geometry, side, seed, .. } = target;
        let (layers, kv_heads) = (geometry.layers, geometry.kv_heads as usize);
        let shape = spec.tensor_shape(geometry, side);
        Self { spec, seed, layers, kv_heads, shape, books: Vec::new(), pool: Vec::new() }
    }

    /// Takes the rows of the next head, `[n, head_dim]`. Fits the codebooks whose last head this
    /// is.
    fn add_rows(&mut self, place: HeadIndex, rows: &[f32]) -> Result<(), CalibrationError> {
        let dim = usize::from(self.spec.dim);
        let last_head = place.head + 1 == self.kv_heads;
        let sharers = match self.spec.scope {
            CodebookScope::Head => {
                let mut rng = position_rng(self.seed, place, 0);
                let points = subsample_points(rows, dim, self.points_max(), &mut rng);
                return self.fit_codebook(place, points, &mut rng);
            }
            CodebookScope::Group => return self.fit_positions(place, rows),
            CodebookScope::Layer => self.kv_heads,
            CodebookScope::Model => self.layers as usize * self.kv_heads,
        };
        let mut rng = position_rng(self.seed, place, 0);
        let quota = self.points_max().div_ceil(sharers);
        self.pool.extend(subsample_points(rows, dim, quota, &mut rng));
        let complete = match self.spec.scope {
            CodebookScope::Model => last_head && place.layer + 1 == self.layers,
            _ => last_head,
        };
        if complete {
            let pool = std::mem::take(&mut self.pool);
            self.fit_codebook(place, pool, &mut rng)?;
        }
        Ok(())
    }

    fn points_max(&self) -> usize {
        POINTS_MAX.max(POINTS_PER_ENTRY * self.spec.entry_count())
    }

    /// One codebook per position.
    fn fit_positions(&mut self, place: HeadIndex, rows: &[f32]) -> Result<(), CalibrationError> {
        let (dim, positions) = (usize::from(self.spec.dim), self.shape[2]);
        for position in 0..positions {
            let mut rng = position_rng(self.seed, place, position as u64 + 1);
            let column = rows.chunks_exact(dim).skip(position).step_by(positions);
            let column: Vec<f32> = column.flatten().copied().collect();
            let points = subsample_points(&column, dim, self.points_max(), &mut rng);
            self.fit_codebook(place, points, &mut rng)?;
        }
        Ok(())
    }

    /// Appends the stages of one codebook, fitted to `points` and what stages leave of them.
    fn fit_codebook(
        &mut self,
        place: HeadIndex,
        mut points: Vec<f32>,
        rng: &mut SplitMix64,
    ) -> Result<(), CalibrationError> {
        let (dim, entries) = (usize::from(self.spec.dim), self.spec.entry_count());
        let found = points.len() / dim;
        if found < entries {
            return Err(place.too_few_samples(&self.spec, found));
        }
        let limit = f16::MAX.to_f32();
        for _ in 0..self.spec.stages {
            let mut fitted = kmeans::fit_clusters(&points, dim, entries, rng);
            if self.spec.is_on_levels() {
                snap_to_levels(&mut fitted.entries);
            }
            if !fitted.entries.iter().all(|v| v.abs() <= limit) {
                return Err(place.out_of_range());
            }
            let entries = fitted.entries.iter().map(|v| f16::from_f32(*v).to_f32()).collect();
            let book = Codebook::new(dim, entries);
            for (point, entry) in points.chunks_exact_mut(dim).zip(&fitted.assigned) {
                let entry = &book.entries()[*entry as usize * dim..][..dim];
                point.iter_mut().zip(entry).for_each(|(x, e)| *x -= e);
            }
            self.books.push(Arc::new(book));
        }
        Ok(())
    }
}

impl QuantizerFit for VqFit {
    fn add_head(&mut self, head: HeadFit<'_>) -> Result<(), CalibrationError> {
        self.add_rows(head.place, &head.rows)
    }

    fn store_tensors(
        self: Box<Self>,
        fitted: &mut SideCalibration,
    ) -> Result<(), CalibrationError> {
        fitted.codebooks = Some(SideCodebooks::new(self.shape, self.books));
        Ok(())
    }
}

/// Hashed through the generator, so that neighbouring heads and positions do not share draws.
fn position_rng(seed: u64, place: HeadIndex, position: u64) -> SplitMix64 {
    let head = u64::from(place.layer) << 32 | (place.head as u64) << 1 | place.side.index() as u64;
    let position = position.wrapping_mul(0xD1B5_4A32_D192_ED03);
    SplitMix64(SplitMix64(seed).next_bits() ^ head.wrapping_mul(0xA24B_AED4_963E_E407) ^ position)
}

/// At most `most` sub-vectors, one drawn from each of as many equal stretches.
fn subsample_points(rows: &[f32], dim: usize, most: usize, rng: &mut SplitMix64) -> Vec<f32> {
    let n = rows.len() / dim;
    if n <= most {
        return rows.to_vec();
    }
    let stretch = n as f64 / most as f64;
    let pick = |i: usize| (((i as f64 + rng.next_unit()) * stretch) as usize).min(n - 1);
    let picks = (0..most).map(pick);
    picks.flat_map(|i| &rows[i * dim..][..dim]).copied().collect()
}
