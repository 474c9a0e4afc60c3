//! Huffman coding by itself, apart from the quantizer: for benchmarks.

use crate::encode;
use crate::huffman::streams::{self, CHUNK_TOKENS, CodeRows, CodeTables, StreamTable};
use crate::{HeadCodec, ModelCodec};
use kvd_core::{LayerIndex, Side};

/// Makes words of the codes of a head whose tables are trained.
#[derive(Clone, Copy, Debug)]
pub struct CodeEncoder<'a> {
    of: Side,
    side: &'a HeadCodec,
    table: &'a StreamTable,
}

impl ModelCodec {
    /// None where codes have a fixed width, or tables come with the calibration.
    #[must_use]
    pub fn code_encoder(
        &self,
        layer: LayerIndex,
        of: Side,
        head: usize,
    ) -> Option<CodeEncoder<'_>> {
        let side = self.head_codec(layer, of, head);
        let table = self.written_table(layer, of, side)?;
        side.trained_tables.then_some(CodeEncoder { of, side, table })
    }
}

impl CodeEncoder<'_> {
    /// The codes of rows (`[tokens, dim]`); none for rows that cannot be quantized.
    #[must_use]
    pub fn quantize_rows(&self, rows: &[f32]) -> Option<Vec<u16>> {
        encode::quantize_rows(self.side, rows)
    }

    /// Codes that a symbol of the head's table stands for.
    #[must_use]
    pub fn codes_per_symbol(&self) -> usize {
        self.table.codes_per_symbol()
    }

    /// Appends the words of codes (`[tokens, dim]`) and returns how many.
    pub fn append_words(&self, codes: &[u16], out: &mut Vec<u8>) -> usize {
        let (runs, tables) = ([self.side.trained_run], std::slice::from_ref(self.table));
        let per_row = self.side.dim();
        let mut rest = |_, _| debug_assert!(false, "a symbol without a code");
        let chunks = codes.chunks(per_row * CHUNK_TOKENS);
        let words = chunks.map(|chunk| {
            streams::encode_chunk(
                self.of,
                CodeTables { runs: &runs, tables },
                CodeRows { rows: chunk, per_row },
                out,
                &mut rest,
            )
        });
        words.sum()
    }
}
