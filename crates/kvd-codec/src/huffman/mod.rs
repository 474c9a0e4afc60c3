//! Huffman codes: canonical tables ([`canonical`]) and the interleaved streams of codes that a
//! chunk of a page holds ([`streams`]).

mod canonical;
pub(crate) mod streams;

pub(crate) use canonical::ALPHABET_MAX;
pub use canonical::HuffmanTable;
