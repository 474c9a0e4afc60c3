//! Vector quantization: a row is cut into sub-vectors, each replaced by the index of its nearest
//! codebook entry (VecInfer §2.2, eq. 2); further stages do the same to what is left over
//! (VQ-LLM §II-A). The search is in `nearest.rs`.
//!
//! Entries are f16; distances and decoded rows use the rounded values.

use super::float::all_within;
use super::nearest::{BATCH_MAX, SubVectors};
use super::regions::CandidateRegions;
use super::stored::StoredLayout;
use super::uniform::ScaleRow;
use super::{CodeShape, HeadQuantizer, PageScales, Unquantizable};
use crate::page::id;
use crate::row_block::RowBlock;
use crate::{CodebookScope, HeadCodec, VqSpec};
use kvd_core::Geometry;
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::Xxh3;

/// Codes of one row at most: residual stages come with sub-vectors of two channels or more.
pub(crate) const CODES_PER_ROW_MAX: usize =
    Geometry::HEAD_DIM_MAX as usize / 2 * VqSpec::STAGES_MAX as usize;

/// Coefficients this many times larger than any entry mean that the codebook was fitted on
/// something else.
const REACH: f32 = 16.0;

/// Codebook entries, and what the nearest-entry search wants to know of them.
#[derive(Clone, Debug)]
pub struct Codebook {
    pub(super) dim: usize,
    pub(super) entries: Vec<f32>,
    /// `|entry|^2 / 2`.
    pub(super) half_norms: Vec<f32>,
    /// Made when first encoded with, where they help.
    regions: OnceLock<Option<CandidateRegions>>,
}

impl PartialEq for Codebook {
    /// All else follows from the entries.
    fn eq(&self, other: &Self) -> bool {
        self.dim == other.dim && self.entries == other.entries
    }
}

impl Codebook {
    /// Takes `[entries, dim]`, row-major, at least one entry, every value finite.
    pub fn new(dim: usize, entries: Vec<f32>) -> Self {
        let half_norm = |entry: &[f32]| 0.5 * entry.iter().map(|v| v * v).sum::<f32>();
        let half_norms = entries.chunks_exact(dim).map(half_norm).collect();
        Self { dim, entries, half_norms, regions: OnceLock::new() }
    }

    /// Channels of an entry.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// `[2^b, dim]`, row-major, most used first (on the calibration samples); every value is an
    /// f16.
    #[must_use]
    pub fn entries(&self) -> &[f32] {
        &self.entries
    }

    /// The entries nearest to consecutive points.
    fn find_entries(&self, points: &[f32], codes: &mut [u16]) {
        if let Some(regions) = self.regions.get_or_init(|| CandidateRegions::new(self)) {
            return regions.find_nearest(points, codes);
        }
        self.nearest_batches(SubVectors::consecutive(points, self.dim), |start, found, _| {
            let codes = &mut codes[start..];
            let batch = (codes.first_chunk_mut::<BATCH_MAX>(), found.first_chunk::<BATCH_MAX>());
            if let (Some(codes), Some(found)) = batch {
                // As many as the compiler knows.
                codes.iter_mut().zip(found).for_each(|(code, entry)| *code = *entry as u16);
                return;
            }
            for (code, entry) in codes.iter_mut().zip(found) {
                *code = *entry as u16;
            }
        });
    }

    /// Half the squared length of each entry: what the search for the nearest begins with.
    #[must_use]
    pub fn half_norms(&self) -> &[f32] {
        &self.half_norms
    }

    fn largest_magnitude(&self) -> f32 {
        self.entries.iter().fold(0f32, |m, v| m.max(v.abs()))
    }

    /// Adds the entries to a hash.
    pub(crate) fn update_hash(&self, hash: &mut Xxh3) {
        self.entries.iter().for_each(|v| hash.update(&v.to_le_bytes()));
    }
}

/// The quantizer of one head: its sub-vectors and the codebooks that serve them.
///
/// The codes of a row are those of the first stage for all sub-vectors, then those of the second.
#[derive(Clone, Debug)]
pub struct VectorQuantizer {
    dim: usize,
    positions: usize,
    stages: usize,
    code_bits: u32,
    /// `[positions or 1, stages]`.
    books: Vec<Arc<Codebook>>,
    reach: f32,
}

impl VectorQuantizer {
    /// Binds the books of one head, `[positions or 1, stages]`, for rows of `row_dim` channels.
    pub fn new(row_dim: usize, spec: &VqSpec, books: &[Arc<Codebook>]) -> Self {
        let (dim, stages) = (usize::from(spec.dim), usize::from(spec.stages));
        let positions = row_dim / dim;
        let sets = if spec.scope == CodebookScope::Group { positions } else { 1 };
        assert_eq!(books.len(), sets * stages, "codebooks of a head");
        let first = books.iter().step_by(stages);
        let reach = first.fold(0f32, |m, book| m.max(book.largest_magnitude())) * REACH;
        let code_bits = u32::from(spec.bits);
        Self { dim, positions, stages, code_bits, books: books.to_vec(), reach }
    }

    /// Channels of a sub-vector.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Sub-vectors of a row.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Codes per sub-vector; the entries they name are added up.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// The largest magnitude of a coefficient that has a code.
    #[must_use]
    pub fn reach(&self) -> f32 {
        self.reach
    }

    /// Whether every position has codebooks of its own.
    #[must_use]
    pub fn is_grouped(&self) -> bool {
        self.books.len() > self.stages
    }

    /// The codebook of a stage (from 0) at a position.
    ///
    /// # Panics
    /// When there is no such stage or position.
    #[must_use]
    pub fn stage_codebook(&self, stage: usize, position: usize) -> &Codebook {
        assert!(stage < self.stages && position < self.positions, "stage {stage}, {position}");
        let set = if self.is_grouped() { position } else { 0 };
        &self.books[set * self.stages + stage]
    }

    /// All of the head's codebooks, `[positions or 1, stages]`.
    pub(crate) fn books(&self) -> impl Iterator<Item = &Arc<Codebook>> {
        self.books.iter()
    }

    fn codes_per_row(&self) -> usize {
        self.positions * self.stages
    }

    /// Appends the codes of `rows` (`[tokens, positions * dim]`): each stage takes the entry
    /// nearest to what the stages before it left.
    fn append_entries(&self, rows: &[f32], symbols: &mut Vec<u16>) -> Result<(), Unquantizable> {
        if !all_within(rows, self.reach) {
            return Err(Unquantizable);
        }
        let tokens = rows.len() / (self.positions * self.dim);
        let start = symbols.len();
        symbols.resize(start + tokens * self.codes_per_row(), 0);
        let codes = &mut symbols[start..];
        self.fill_stage_codes(0, rows, codes);
        if self.stages > 1 {
            let mut left = rows.to_vec();
            for stage in 1..self.stages {
                self.subtract_entries(stage - 1, codes, &mut left);
                self.fill_stage_codes(stage, &left, codes);
            }
        }
        Ok(())
    }

    /// Fills in the codes of one stage.
    fn fill_stage_codes(&self, stage: usize, rows: &[f32], codes: &mut [u16]) {
        let (positions, per_row) = (self.positions, self.codes_per_row());
        let first = stage * positions;
        if !self.is_grouped() {
            let book = &self.books[stage];
            if per_row == positions {
                return book.find_entries(rows, codes);
            }
            book.find_nearest(SubVectors::consecutive(rows, self.dim), |index, entry, _| {
                codes[index / positions * per_row + first + index % positions] = entry as u16;
            });
            return;
        }
        for position in 0..positions {
            let points = SubVectors::position_column(rows, self.dim, position, positions);
            self.stage_codebook(stage, position).find_nearest(points, |token, entry, _| {
                codes[token * per_row + first + position] = entry as u16;
            });
        }
    }

    /// Takes the entries of one stage away from `rows`.
    fn subtract_entries(&self, stage: usize, codes: &[u16], rows: &mut [f32]) {
        let row_dim = self.positions * self.dim;
        let codes = codes.chunks_exact(self.codes_per_row());
        for (row, codes) in rows.chunks_exact_mut(row_dim).zip(codes) {
            let codes = &codes[stage * self.positions..][..self.positions];
            let subs = row.chunks_exact_mut(self.dim).zip(codes);
            for (position, (sub, code)) in subs.enumerate() {
                let entry = self.code_entry(stage, position, *code);
                sub.iter_mut().zip(entry).for_each(|(x, e)| *x -= e);
            }
        }
    }

    fn code_entry(&self, stage: usize, position: usize, code: u16) -> &[f32] {
        &self.stage_codebook(stage, position).entries[usize::from(code) * self.dim..][..self.dim]
    }

    /// Writes the entries of one row's codes; a code has `b` bits, so each names an entry.
    fn copy_row(&self, symbols: &[u16], out: &mut [f32]) {
        let (first, rest) = symbols.split_at(self.positions);
        if self.is_grouped() {
            for (position, (out, code)) in out.chunks_exact_mut(self.dim).zip(first).enumerate() {
                out.copy_from_slice(self.code_entry(0, position, *code));
            }
        } else {
            let entries = &self.books[0].entries;
            match self.dim {
                2 => copy_entries::<2>(entries, first, out),
                4 => copy_entries::<4>(entries, first, out),
                8 => copy_entries::<8>(entries, first, out),
                dim => {
                    for (out, symbol) in out.chunks_exact_mut(dim).zip(first) {
                        out.copy_from_slice(&entries[usize::from(*symbol) * dim..][..dim]);
                    }
                }
            }
        }
        for (stage, codes) in rest.chunks_exact(self.positions).enumerate() {
            for (position, (out, code)) in out.chunks_exact_mut(self.dim).zip(codes).enumerate() {
                let entry = self.code_entry(stage + 1, position, *code);
                out.iter_mut().zip(entry).for_each(|(x, e)| *x += e);
            }
        }
    }
}

impl HeadQuantizer for VectorQuantizer {
    fn page_id(&self) -> u8 {
        id::VQ
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::Codebooks(self)
    }

    fn code_shape(&self, _dim: usize) -> CodeShape {
        CodeShape { per_row: self.codes_per_row(), bits: self.code_bits }
    }

    fn quantize_rows(
        &self,
        block: RowBlock<'_>,
        symbols: &mut Vec<u16>,
        _scales: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        self.append_entries(block.rows, symbols)
    }

    fn dequantize_row(
        &self,
        _scales: PageScales<'_>,
        _row: usize,
        symbols: &[u16],
        _loaded: &mut ScaleRow,
        out: &mut [f32],
    ) {
        self.copy_row(symbols, out);
    }
}

fn copy_entries<const D: usize>(entries: &[f32], symbols: &[u16], out: &mut [f32]) {
    let entries = entries.as_chunks::<D>().0;
    for (out, symbol) in out.as_chunks_mut::<D>().0.iter_mut().zip(symbols) {
        *out = entries[usize::from(*symbol)];
    }
}

/// Bytes of the codebooks of `heads` as f16; a codebook that heads share counts once.
pub(crate) fn codebook_bytes(heads: &[HeadCodec]) -> u64 {
    let books = heads.iter().filter_map(HeadCodec::vq).flat_map(VectorQuantizer::books);
    let mut seen = HashSet::new();
    let fresh = books.filter(|book| seen.insert(Arc::as_ptr(book)));
    fresh.map(|book| 2 * book.entries.len() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(scope: CodebookScope, stages: u8) -> VqSpec {
        VqSpec { dim: 2, bits: 1, stages, scope }
    }

    fn book(entries: [f32; 4]) -> Arc<Codebook> {
        Arc::new(Codebook::new(2, entries.to_vec()))
    }

    #[test]
    fn data_far_outside_the_codebook_is_refused() {
        let books = [book([1.0, 0.0, -1.0, 0.5])];
        let vq = VectorQuantizer::new(2, &spec(CodebookScope::Head, 1), &books);
        assert!(vq.append_entries(&[16.0, -16.0], &mut Vec::new()).is_ok());
        assert!(vq.append_entries(&[16.1, 0.0], &mut Vec::new()).is_err());
        assert!(vq.append_entries(&[f32::NAN, 0.0], &mut Vec::new()).is_err());
    }

    #[test]
    fn stages_come_one_after_another_and_add_up() {
        let books = [book([4.0, 0.0, -4.0, 0.0]), book([0.0, 1.0, 0.0, -1.0])];
        let vq = VectorQuantizer::new(4, &spec(CodebookScope::Head, 2), &books);
        let mut codes = vec![9];
        vq.append_entries(&[4.5, -1.0, -4.0, 0.9], &mut codes).unwrap();
        assert_eq!(codes, [9, 0, 1, 1, 0]);
        let mut out = [0f32; 4];
        vq.copy_row(&codes[1..], &mut out);
        assert_eq!(out, [4.0, -1.0, -4.0, 1.0]);
        assert_eq!(vq.stage_codebook(1, 1).entries(), [0.0, 1.0, 0.0, -1.0]);
    }

    #[test]
    fn groups_have_codebooks_of_their_own_and_one_reach() {
        let books = [book([1.0, 1.0, 2.0, 2.0]), book([2.0, 2.0, 1.0, 1.0])];
        let vq = VectorQuantizer::new(4, &spec(CodebookScope::Group, 1), &books);
        assert!(vq.is_grouped());
        let mut codes = Vec::new();
        vq.append_entries(&[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 32.0, 2.0], &mut codes).unwrap();
        assert_eq!(codes, [0, 1, 1, 0]);
        let mut out = [0f32; 4];
        vq.copy_row(&codes[2..], &mut out);
        assert_eq!(out, [2.0; 4]);
    }
}
