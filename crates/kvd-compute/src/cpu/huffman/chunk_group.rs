//! Which chunks go through the registers of AVX2 and AVX-512 together, and what is left of their
//! words.

use crate::cpu::huffman::{HuffmanChunk, STREAMS};

/// Words of chunks that are not there: none, then zeros.
static NONE: [u32; STREAMS] = [0; STREAMS];

/// The words of a chunk that are yet to be read.
#[derive(Clone, Copy)]
pub(super) struct ChunkWords<'b> {
    pub(super) words: &'b [u32],
    pub(super) next: usize,
    pub(super) end: usize,
}

impl<'b> ChunkWords<'b> {
    /// The words of a chunk, which a zero for each stream follows.
    pub(super) fn of_chunk(words: &'b [u32]) -> Self {
        assert!(words.len() >= STREAMS, "huffman: zeros after the words");
        Self { words, next: 0, end: words.len() - STREAMS }
    }

    /// The words of a chunk that is not there.
    pub(super) fn of_no_chunk() -> Self {
        Self::of_chunk(&NONE)
    }
}

/// Keys and values, in groups of up to `most` that have the same steps and tables.
pub(super) fn group_alike<'a, 'b>(
    chunks: Vec<&'a mut HuffmanChunk<'b>>,
    most: usize,
) -> [Vec<Vec<&'a mut HuffmanChunk<'b>>>; 2] {
    let mut groups: [Vec<Vec<&mut HuffmanChunk<'_>>>; 2] = Default::default();
    for chunk in chunks {
        let of_side = &mut groups[chunk.side.index()];
        // Pages of one head have the same steps, and the same tables unless those were retrained.
        let fits = |group: &&mut Vec<&mut HuffmanChunk<'_>>| {
            group.len() < most && std::ptr::eq(group[0].tables, chunk.tables)
        };
        match of_side.iter_mut().find(fits) {
            Some(group) => {
                debug_assert_eq!(group[0].steps, chunk.steps, "one head's pages have one layout");
                group.push(chunk);
            }
            None => of_side.push(vec![chunk]),
        }
    }
    groups
}
