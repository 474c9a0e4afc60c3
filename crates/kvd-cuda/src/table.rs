//! What the kernels look values up in: codebooks, levels, directions, as bytes in the layout of the
//! side's header in `kernels/include/kvd`.

use crate::abi::SideShape;
use crate::side::{COPY_BYTES, RUNS_MAX};
use kvd_codec::Vq;
use kvd_core::DType;

/// One side's table, appended to those of its layer. Its place and size are kept in the shape.
pub(crate) struct Table<'a> {
    tables: &'a mut Vec<u8>,
    shape: &'a mut SideShape,
}

impl<'a> Table<'a> {
    pub(crate) fn new(tables: &'a mut Vec<u8>, shape: &'a mut SideShape) -> Self {
        tables.resize(tables.len().next_multiple_of(COPY_BYTES), 0);
        shape.table = tables.len() as u64;
        Self { tables, shape }
    }

    /// f32 values, all of them for shared memory.
    pub(crate) fn floats(self, values: &[f32]) -> Self {
        self.tables.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.end()
    }

    /// The head of a bit allocation: the number of runs and of levels, then the runs.
    pub(crate) fn runs(self, runs: &[[usize; 3]], levels: usize) -> Self {
        let head = [runs.len() as u32, levels as u32, 0, 0];
        let missing = std::iter::repeat_n([0; 4], RUNS_MAX - runs.len());
        let runs = runs.iter().map(|[first, len, width]| [*first, *len, *width, 0]);
        let runs = runs.map(|run| run.map(|x| x as u32)).chain(missing);
        let words = head.into_iter().chain(runs.flatten());
        self.tables.extend(words.flat_map(u32::to_le_bytes));
        self.end()
    }

    /// Codebooks, f16, `[sets, stages, entries, channels]`; in shared memory as many of the most
    /// used entries of each as fit `table_bytes`.
    pub(crate) fn codebooks(self, vq: &Vq, table_bytes: usize) {
        for set in 0..self.shape.sets as usize {
            for stage in 0..vq.stages() {
                let entries = vq.codebook(stage, set).entries();
                let start = self.tables.len();
                self.tables.resize(start + 2 * entries.len(), 0);
                DType::F16.narrow(entries, &mut self.tables[start..]);
            }
        }
        let entry_bytes = 2 * vq.dim() * vq.stages() * self.shape.sets as usize;
        let cached = (table_bytes / entry_bytes).min(1 << self.shape.bits);
        self.shape.cached = cached as u32;
        self.shape.table_bytes = (cached * entry_bytes) as u32;
    }

    fn end(self) -> Self {
        self.shape.table_bytes = (self.tables.len() as u64 - self.shape.table) as u32;
        self
    }
}
