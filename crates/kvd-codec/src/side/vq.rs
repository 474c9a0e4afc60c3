//! Vector quantization: a row is cut into sub-vectors, each replaced by the index of its nearest
//! codebook entry (VecInfer §2.2, eq. 2). One codebook per head and side serves all positions.
//!
//! Entries are f16; distances and decoded rows use the rounded values.

use super::Unquantizable;

/// Entries examined together: scores, best scores and their places of eight fit SSE registers.
const LANES: usize = 8;

/// Coefficients this many times larger than any entry mean that the codebook was fitted on
/// something else.
const REACH: f32 = 16.0;

/// Codebook entries, laid out for decoding and for the nearest-entry search.
#[derive(Clone, Debug)]
pub struct Codebook {
    dim: usize,
    entries: Vec<f32>,
    /// `[entries / LANES][dim][LANES]`.
    lanes: Vec<f32>,
    /// `|entry|^2`, infinite for the lanes past the last entry.
    norms: Vec<f32>,
    reach: f32,
}

impl Codebook {
    /// Takes `[entries, dim]`, row-major, every value finite.
    pub(crate) fn new(dim: usize, entries: Vec<f32>) -> Self {
        let count = entries.len() / dim;
        let blocks = count.div_ceil(LANES);
        let mut lanes = vec![0f32; blocks * dim * LANES];
        let mut norms = vec![f32::INFINITY; blocks * LANES];
        for (index, entry) in entries.chunks_exact(dim).enumerate() {
            for (channel, value) in entry.iter().enumerate() {
                lanes[((index / LANES) * dim + channel) * LANES + index % LANES] = *value;
            }
            norms[index] = entry.iter().map(|v| v * v).sum();
        }
        let reach = entries.iter().fold(0f32, |m, v| m.max(v.abs())) * REACH;
        Self { dim, entries, lanes, norms, reach }
    }

    /// Channels of an entry.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// `[2^b, dim]`, row-major, most used first; every value is an f16.
    #[must_use]
    pub fn entries(&self) -> &[f32] {
        &self.entries
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() / self.dim
    }

    pub(crate) fn code_bits(&self) -> u32 {
        self.len().ilog2()
    }

    /// Index of the entry nearest to `x` and `|entry|^2 - 2 x·entry`; ties go to the lower index.
    pub(crate) fn nearest(&self, x: &[f32]) -> (usize, f32) {
        match *x {
            [a, b] => self.nearest_of([a, b]),
            [a, b, c, d] => self.nearest_of([a, b, c, d]),
            [a, b, c, d, e, f, g, h] => self.nearest_of([a, b, c, d, e, f, g, h]),
            _ => self.search(x.iter().copied()),
        }
    }

    /// As `search`, with a length that the compiler knows.
    fn nearest_of<const D: usize>(&self, x: [f32; D]) -> (usize, f32) {
        self.search(x.into_iter())
    }

    #[inline(always)]
    fn search(&self, x: impl Iterator<Item = f32> + Clone) -> (usize, f32) {
        let mut best = [f32::INFINITY; LANES];
        let mut at = [0u32; LANES];
        let blocks = self.lanes.chunks_exact(self.dim * LANES);
        let norms = self.norms.as_chunks::<LANES>().0;
        for (index, (block, norms)) in (0u32..).zip(blocks.zip(norms)) {
            let mut score = *norms;
            for (x, entry) in x.clone().zip(block.as_chunks::<LANES>().0) {
                let twice = -2.0 * x;
                for (score, value) in score.iter_mut().zip(entry) {
                    *score += twice * value;
                }
            }
            for lane in 0..LANES {
                let closer = score[lane] < best[lane];
                best[lane] = if closer { score[lane] } else { best[lane] };
                at[lane] = if closer { index } else { at[lane] };
            }
        }
        let mut winner = (0, f32::INFINITY);
        for lane in 0..LANES {
            let index = at[lane] as usize * LANES + lane;
            let closer = best[lane] < winner.1 || (best[lane] == winner.1 && index < winner.0);
            if closer && index < self.len() {
                winner = (index, best[lane]);
            }
        }
        winner
    }

    pub(crate) fn quantize(
        &self,
        rows: &[f32],
        symbols: &mut Vec<u16>,
    ) -> Result<(), Unquantizable> {
        // Written so that NaN fails too.
        if !rows.iter().all(|x| x.abs() <= self.reach) {
            return Err(Unquantizable);
        }
        symbols.extend(rows.chunks_exact(self.dim).map(|x| self.nearest(x).0 as u16));
        Ok(())
    }

    /// Writes the entries of one row's codes; a code has `b` bits, so each names an entry.
    pub(crate) fn dequantize_row(&self, symbols: &[u16], out: &mut [f32]) {
        match self.dim {
            2 => copy_entries::<2>(&self.entries, symbols, out),
            4 => copy_entries::<4>(&self.entries, symbols, out),
            8 => copy_entries::<8>(&self.entries, symbols, out),
            dim => {
                for (out, symbol) in out.chunks_exact_mut(dim).zip(symbols) {
                    out.copy_from_slice(&self.entries[usize::from(*symbol) * dim..][..dim]);
                }
            }
        }
    }
}

fn copy_entries<const D: usize>(entries: &[f32], symbols: &[u16], out: &mut [f32]) {
    let entries = entries.as_chunks::<D>().0;
    for (out, symbol) in out.as_chunks_mut::<D>().0.iter_mut().zip(symbols) {
        *out = entries[usize::from(*symbol)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_matches_a_plain_search() {
        for (dim, count) in [(1usize, 2usize), (2, 16), (3, 32), (4, 256), (8, 64)] {
            let wave = |i: usize| ((i * 7919 % 1009) as f32 / 1009.0 - 0.5) * 4.0;
            let entries: Vec<f32> = (0..count * dim).map(wave).collect();
            let book = Codebook::new(dim, entries.clone());
            for i in 0..200 {
                let x: Vec<f32> = (0..dim).map(|c| wave(31 * i + 17 * c + 5)).collect();
                let distance = |entry: &[f32]| -> f32 {
                    entry.iter().zip(&x).map(|(e, x)| (e - x).powi(2)).sum()
                };
                let found = distance(&entries[book.nearest(&x).0 * dim..][..dim]);
                let least = entries.chunks(dim).map(distance).fold(f32::INFINITY, f32::min);
                assert!(found <= least + 1e-4, "dim {dim}: {found} against {least}");
            }
        }
    }

    #[test]
    fn data_far_outside_the_codebook_is_refused() {
        let book = Codebook::new(2, vec![1.0, 0.0, -1.0, 0.5]);
        assert!(book.quantize(&[16.0, -16.0], &mut Vec::new()).is_ok());
        assert!(book.quantize(&[16.1, 0.0], &mut Vec::new()).is_err());
        assert_eq!(book.nearest(&[f32::NAN, f32::MAX]).0, 0);
    }
}
