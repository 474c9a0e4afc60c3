//! The decoder of Huffman codes against another one, chunk by chunk: a walk through the tree of the
//! code, bit by bit, without tables (`kernels/emu/walk.cu`); and both against the reference. Chunks
//! that are damaged too, whose codes mean nothing and are the same all the same.

use super::{layout, value};
use crate::common::{Stored, geometry};
use kvd_codec::{PageReader, StreamCodes, StreamTable};
use kvd_compute::Source;
use kvd_core::{DType, LayerIndex, Side};
use kvd_cuda::{LayerShapes, SideShape};
use kvd_emu::{EmulatorMemory, LaunchGrid, ThreadOrder, is_available, launch_kernel};

const LAYER: LayerIndex = LayerIndex(0);
/// Bytes of two rings: `RING_BYTES` of `huffman.cuh`.
const RINGS: usize = 2 * 1024;

/// A page of Huffman codes, and how the device reads it.
struct Coded {
    side: Side,
    head: usize,
    bytes: Vec<u8>,
    shape: SideShape,
}

impl Coded {
    /// It, or one in its place.
    fn open<'a>(&self, stored: &'a Stored, bytes: &'a [u8]) -> PageReader<'a> {
        PageReader::open_page(&stored.codec, LAYER, self.side, self.head, bytes).unwrap()
    }
}

/// All pages of Huffman codes.
fn pages(stored: &Stored, shapes: &LayerShapes) -> Vec<Coded> {
    let heads = stored.codec.geometry().kv_heads as usize;
    let mut pages = Vec::new();
    for part in &stored.parts {
        let Source::Pages { extent, ends, .. } = &part.source else { continue };
        let mut start = 0;
        for (index, end) in ends.iter().map(|end| *end as usize).enumerate() {
            let (side, head) = (Side::BOTH[index / heads], index % heads);
            let bytes = stored.arena[extent.offset as usize..][start..end].to_vec();
            let version = stored.headers[&(extent.offset + start as u64)].table_version;
            start = end;
            let page = PageReader::open_page(&stored.codec, LAYER, side, head, &bytes).unwrap();
            if page.stream_codes().is_some() {
                let shape = shapes.side_shape(head, side, version).unwrap();
                pages.push(Coded { side, head, bytes, shape });
            }
        }
    }
    pages
}

/// Appends a table's codes as a tree: both children, symbol, whether it is one. Gives its root.
fn plant(table: &StreamTable, nodes: &mut Vec<[u32; 4]>) -> u32 {
    const NONE: u32 = u32::MAX;
    let (root, raw) = (nodes.len() as u32, table.raw_bits());
    nodes.push([NONE, NONE, 0, 0]);
    for (symbol, unit) in table.symbol_units().iter().step_by(1 << raw).enumerate() {
        if unit >> 31 != 0 {
            // It has no code: another's is in its place.
            continue;
        }
        let length = (unit >> 16 & 0xFF) - raw;
        let mut at = root as usize;
        for bit in (0..length).map(|bit| (unit >> bit & 1) as usize) {
            assert_eq!(nodes[at][3], 0, "a code begins with another");
            if nodes[at][bit] == NONE {
                nodes[at][bit] = nodes.len() as u32;
                nodes.push([NONE, NONE, 0, 0]);
            }
            at = nodes[at][bit] as usize;
        }
        nodes[at] = [at as u32, at as u32, symbol as u32, 1];
    }
    let whole = nodes[root as usize..].iter().all(|node| !node[..2].contains(&NONE));
    assert!(whole, "bits that are no code");
    root
}

/// Runs of a page as the walk reads them, and their trees.
fn trees(lanes: &StreamCodes<'_>) -> (Vec<u32>, Vec<[u32; 4]>) {
    let mut nodes = Vec::new();
    let roots: Vec<u32> = lanes.tables().iter().map(|table| plant(table, &mut nodes)).collect();
    let run = |run: &kvd_codec::StreamRun| {
        let table = &lanes.tables()[run.table];
        let (batch, need) = table.batch_size();
        let [first, len, group, per_word] =
            [run.first, run.len, table.codes_per_symbol(), batch * table.codes_per_symbol()]
                .map(|x| x as u32);
        let levels = u32::from(table.level_count());
        let (root, longest, raw) = (roots[run.table], table.longest_symbol(), table.raw_bits());
        [first, len, root, longest, raw, group, levels, per_word, need]
    };
    (lanes.runs().iter().flat_map(run).collect(), nodes)
}

/// How a chunk is decoded.
#[derive(Clone, Copy, Debug)]
enum Decoder {
    Walk,
    Tables,
    /// By both halves of a warp.
    TablesTwice,
}

/// Device memory that all chunks of a page share.
struct Setup<'a> {
    page: &'a Coded,
    tables: &'a EmulatorMemory,
    runs: EmulatorMemory,
    nodes: EmulatorMemory,
    run_count: usize,
    per_row: usize,
}

impl Setup<'_> {
    /// The codes of words, `[tokens, per_row]`; those of positions without a run all ones.
    fn decode(
        &self,
        decoder: Decoder,
        words: &[u8],
        tokens: usize,
        order: ThreadOrder,
    ) -> Vec<u16> {
        // Half of them at odd addresses.
        let pad = tokens % 2;
        let memory = EmulatorMemory::copy_from(&[&vec![0; pad][..], words].concat());
        let codes = EmulatorMemory::new(2 * tokens * self.per_row);
        let shape = &self.page.shape;
        let addresses = [
            self.tables.address() + shape.lanes,
            self.runs.address(),
            self.nodes.address(),
            memory.address() + pad as u64,
            codes.address(),
        ];
        let twice = usize::from(matches!(decoder, Decoder::TablesTwice));
        let is_value = usize::from(self.page.side == Side::Value);
        let numbers = [words.len() / 2, tokens, self.per_row, self.run_count, is_value, twice];
        let parameters = [
            bytemuck::bytes_of(shape),
            bytemuck::bytes_of(&addresses),
            bytemuck::bytes_of(&numbers.map(|number| number as u32)),
        ]
        .concat();
        let (kernel, shared_bytes) = match decoder {
            Decoder::Walk => ("emu_decode_walk", 0),
            _ => ("emu_decode_tables", RINGS + 2 * shape.chunk_bytes as usize),
        };
        let grid = LaunchGrid { kernel, blocks: 1, shared_bytes, order };
        // SAFETY: every address is of memory that lives on, of the size of chunk, trees and tables.
        unsafe { launch_kernel(grid, &parameters) }.unwrap();
        bytemuck::cast_slice(codes.bytes()).to_vec()
    }

    /// Compares the decoders over one chunk; gives its codes.
    fn agree(&self, words: &[u8], tokens: usize, order: ThreadOrder, what: &str) -> Vec<u16> {
        let walked = self.decode(Decoder::Walk, words, tokens, order);
        for decoder in [Decoder::Tables, Decoder::TablesTwice] {
            let got = self.decode(decoder, words, tokens, order);
            let off = got.iter().zip(&walked).position(|(got, walked)| got != walked);
            assert_eq!(off, None, "{what}, {tokens} tokens, {decoder:?}: codes differ");
        }
        walked
    }
}

/// Changes a byte, a word to zeros, or all of them.
fn damage(words: &mut [u8], kind: usize) {
    let at = words.len() * (3 + kind) / 11;
    match kind {
        0 | 1 => words[at] ^= 0x10 << kind,
        2 => words[at / 2 * 2..][..2].fill(0),
        _ => words.iter_mut().enumerate().for_each(|(i, byte)| *byte ^= ((i * 151) >> 2) as u8),
    }
}

/// Compares all chunks of a codec's pages, whole and damaged. Gives how many there were, and how
/// many damages changed a code.
fn compare(codec: &str, dims: [u32; 2]) -> [usize; 2] {
    let geometry = geometry(dims[0], dims[1], DType::F16);
    let stored = Stored::new(&geometry, codec, &layout(&[64, 45, 96, 17, 2], 0), value);
    let shapes = LayerShapes::new(&stored.codec, LAYER, [0; 2]);
    let tables = EmulatorMemory::copy_from(&shapes.tables);
    let mut orders = ThreadOrder::EACH.into_iter().cycle();
    let [mut chunks, mut changed] = [0; 2];
    for page in pages(&stored, &shapes) {
        let reader = page.open(&stored, &page.bytes);
        let (lanes, _) = reader.stream_codes().unwrap();
        let (runs, nodes) = trees(&lanes);
        let setup = Setup {
            page: &page,
            tables: &tables,
            run_count: lanes.runs().len(),
            runs: EmulatorMemory::copy_from(bytemuck::cast_slice(&runs)),
            nodes: EmulatorMemory::copy_from(bytemuck::cast_slice(&nodes)),
            per_row: lanes.per_row(),
        };
        for index in 0..lanes.chunk_count() {
            let chunk = lanes.chunk(index);
            let order = orders.next().unwrap();
            let reference = |bytes: &[u8]| {
                let mut rows = vec![u16::MAX; chunk.tokens * lanes.per_row()];
                let reader = page.open(&stored, bytes);
                // Words that are left are an error of the page; codes are there nonetheless.
                let _ = reader.stream_codes().unwrap().0.decode_chunk(index, &mut rows);
                rows
            };
            let what = format!("{codec}: {} {}, chunk {index}", page.side, page.head);
            let codes = setup.agree(chunk.words, chunk.tokens, order, &what);
            assert_eq!(codes, reference(&page.bytes), "{what}");
            chunks += 1;
            let start = chunk.words.as_ptr() as usize - page.bytes.as_ptr() as usize;
            for kind in 0..4 {
                let mut bytes = page.bytes.clone();
                damage(&mut bytes[start..][..chunk.words.len()], kind);
                let words = &bytes[start..][..chunk.words.len()];
                let damaged = setup.agree(words, chunk.tokens, order, &what);
                assert_eq!(damaged, reference(&bytes), "{what}, damage {kind}");
                changed += usize::from(damaged != codes);
            }
            // Words that are missing are zeros.
            let half = &chunk.words[..chunk.words.len() / 4 * 2];
            setup.agree(half, chunk.tokens, order, &what);
        }
    }
    [chunks, changed]
}

#[test]
fn a_walk_through_the_tree_finds_the_codes_that_tables_find() {
    if !is_available() {
        return;
    }
    for (codec, dims) in [
        // One code per symbol: several short symbols of a look-up, eight bits, nine.
        ("k=uniform(b=1,axis=channel)/huffman; v=uniform(b=2,axis=token,g=10)/huffman", [80, 36]),
        ("k=uniform(b=4,axis=channel,g=7,mode=sym)/huffman; v=fp8/huffman", [48, 48]),
        ("k=vq(d=2,b=9)/huffman; v=uniform(rel=0.004,axis=block,mode=sym)/huffman", [48, 36]),
        ("kvcomp", [64, 64]),
        // Several runs, codes of a symbol, symbols with low bits, symbols without a code.
        ("k=mean+qpca/grid(rate=6)/huffman; v=pca/grid(rate=0.7)/huffman", [36, 80]),
        ("kvd-2", [64, 64]),
        ("k=grid(rate=3)/huffman; v=smooth/grid(rate=1.6)/huffman", [64, 36]),
    ] {
        let [chunks, changed] = compare(codec, dims);
        // Pages of two sides and heads, one of them of two chunks.
        assert_eq!(chunks, 2 * 2 * 6, "{codec}");
        assert!(changed > 2 * chunks, "{codec}: {changed} of {} damages show", 4 * chunks);
    }
}

#[test]
fn a_decoder_that_is_given_other_words_does_not_agree() {
    if !is_available() {
        return;
    }
    let stored = Stored::new(&geometry(64, 64, DType::F16), "kvcomp", &layout(&[64], 0), value);
    let shapes = LayerShapes::new(&stored.codec, LAYER, [0; 2]);
    let tables = EmulatorMemory::copy_from(&shapes.tables);
    for page in pages(&stored, &shapes) {
        let reader = page.open(&stored, &page.bytes);
        let (lanes, _) = reader.stream_codes().unwrap();
        let (runs, nodes) = trees(&lanes);
        let mut setup = Setup {
            page: &page,
            tables: &tables,
            run_count: 1,
            runs: EmulatorMemory::copy_from(bytemuck::cast_slice(&runs)),
            nodes: EmulatorMemory::copy_from(bytemuck::cast_slice(&nodes)),
            per_row: lanes.per_row(),
        };
        let words = lanes.chunk(0).words;
        let decode =
            |setup: &Setup<'_>, decoder| setup.decode(decoder, words, 64, ThreadOrder::Ascending);
        let codes = decode(&setup, Decoder::Tables);
        assert_eq!(decode(&setup, Decoder::Walk), codes);
        // Swapping two symbols changes the codes.
        let mut nodes = nodes;
        let symbols: Vec<usize> = (0..nodes.len()).filter(|at| nodes[*at][3] == 1).collect();
        let often = |at: &usize| codes.iter().filter(|code| **code == nodes[*at][2] as u16).count();
        let most = symbols.iter().copied().max_by_key(often).unwrap();
        let other = symbols.iter().copied().find(|at| *at != most).unwrap();
        let (a, b) = (nodes[most][2], nodes[other][2]);
        (nodes[most][2], nodes[other][2]) = (b, a);
        setup.nodes = EmulatorMemory::copy_from(bytemuck::cast_slice(&nodes));
        assert_ne!(decode(&setup, Decoder::Walk), codes);
    }
}
