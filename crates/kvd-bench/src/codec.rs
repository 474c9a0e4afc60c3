//! Encoding and decoding of one side at a time, on one thread and held to one instruction set.

use crate::data::{LAYER, NormalValues, bind_codec};
use crate::measure::{BenchResult, MachineInfo, MeasuredFigure, measure_time};
use crate::{BenchError, HeadShape, each_set, limits};
use bytes::Bytes;
use kvd_codec::{
    BlockRows, CodeEncoder, CodecError, CodecSpec, EncodedBlock, ModelCodec, PageError, PageReader,
    RegisterWidth, limit_width, widen_values,
};
use kvd_compute::{BackendError, CodeDecoder, InstructionSet, Simd};
use kvd_core::{DType, Geometry, ProgressLines, Side};
use serde::Serialize;
use std::collections::HashMap;
use std::hint::black_box;

/// Fewest codes of a side, a byte each, between two passes over the same page: no page is read from
/// the first-level cache, where attention would never find it.
const CODES_MIN: usize = 1 << 20;

/// Options of `kvd bench codec`.
#[derive(Clone, Debug)]
pub struct CodecBench {
    /// Heads.
    pub shape: HeadShape,
    /// Codecs, as presets or specs.
    pub codecs: Vec<String>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Turns of each side.
    pub rounds: usize,
    /// Instruction sets to compare; empty is the machine's best.
    pub instruction_sets: Vec<InstructionSet>,
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct CodecRow {
    /// The side's spec.
    pub side_spec: String,
    /// `k` or `v`.
    pub side: &'static str,
    /// Instruction set in use.
    pub instruction_set: &'static str,
    /// Threads: each side is encoded and decoded on one.
    pub threads: usize,
    /// Stored bits per value, headers and scales included.
    pub bits_per_value: f64,
    /// Processor time to encode a value of rows that are f32 already, in nanoseconds.
    pub encode_ns: MeasuredFigure,
    /// Such values in GB per second (median), counted as two bytes each. Rows of f16, which are
    /// that long, are widened first: `encode_f16_gb_per_s`.
    pub encode_gb_per_s: f64,
    /// Processor time to widen a value of f16 rows and encode it, block by block as a store does,
    /// in nanoseconds.
    pub encode_f16_ns: MeasuredFigure,
    /// Encoded f16 input, in GB per second (median).
    pub encode_f16_gb_per_s: f64,
    /// Processor time to make a code's bits, the quantizer apart, in nanoseconds; none where codes
    /// are not entropy-coded by trained tables.
    pub coding_ns: Option<MeasuredFigure>,
    /// Processor time of the reference decoder for a value, in nanoseconds.
    pub decode_ns: MeasuredFigure,
    /// Processor time of the attention kernels' Huffman decoder for a code, in nanoseconds; none
    /// where codes are not entropy-coded.
    pub codes_ns: Option<MeasuredFigure>,
    /// Huffman coding of the codes, where its tables are trained.
    pub huffman: Option<HuffmanRow>,
}

/// Bits of codes beside what Shannon asks for.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct HuffmanRow {
    /// Codes that a symbol of the table stands for.
    pub codes_per_symbol: usize,
    /// Entropy of single codes, bits.
    pub entropy: f64,
    /// Bits of a code's words; lengths, scales and headers, which `bits_per_value` counts, apart.
    pub bits_per_code: f64,
}

/// Buffers that turns write to. They grow once: new memory is no part of the cost of encoding.
#[derive(Default)]
struct TurnBuffers {
    /// A block's rows, widened.
    rows: [Vec<f32>; 2],
    /// By block.
    pages: Vec<Vec<u8>>,
}

/// An encoded block: its pages one after another, and where each ends.
#[derive(Clone, Copy)]
struct BlockPages<'a> {
    bytes: &'a [u8],
    encoded: &'a EncodedBlock,
}

/// Codes of a head's pages, and the encoder that makes words of them.
struct HeadCodes<'a> {
    encoder: CodeEncoder<'a>,
    pages: Vec<Vec<u16>>,
}

/// One side of a codec, and an instruction set.
struct CodecCase {
    row: CodecRow,
    side: Side,
    simd: Simd,
    /// None where no instruction set was named: encoders may have wider registers than kernels.
    width: Option<RegisterWidth>,
    codec: ModelCodec,
    blocks: Vec<[Vec<f32>; 2]>,
    /// `blocks` as f16.
    halves: Vec<[Bytes; 2]>,
    room: TurnBuffers,
    values: f64,
    encode: Vec<f64>,
    encode_f16: Vec<f64>,
    coding: Vec<f64>,
    decode: Vec<f64>,
    codes: Vec<f64>,
}

impl CodecBench {
    /// Measures both sides of every codec.
    ///
    /// # Errors
    /// When a codec does not fit the shape.
    pub fn measure_all(&self) -> Result<BenchResult<CodecRow>, BenchError> {
        let progress = ProgressLines::on_stderr();
        progress.begin_task("bench codec, making rows", 0);
        let machine = MachineInfo::inspect_machine(1);
        let mut cases = Vec::new();
        for name in &self.codecs {
            let spec = kvd_codec::resolve_spec(name).map_err(BenchError::failed_step(name))?;
            for side in Side::BOTH {
                for set in each_set(&self.instruction_sets) {
                    cases.push(self.prepare_case(&spec, side, set, name)?);
                }
            }
        }
        progress.begin_task("bench codec", ((self.rounds + 1) * cases.len()) as u64);
        for round in 0..=self.rounds {
            for case in &mut cases {
                case.take_turn(round > 0)?;
                progress.add_steps(1);
            }
        }
        let rows = cases.into_iter().map(CodecCase::finish_row).collect();
        Ok(BenchResult { machine, rows })
    }

    /// The other side has the fewest channels there can be, stored as they are.
    fn prepare_case(
        &self,
        spec: &CodecSpec,
        side: Side,
        set: Option<InstructionSet>,
        name: &str,
    ) -> Result<CodecCase, BenchError> {
        let simd = Simd::named(set).map_err(BenchError::failed_step(name))?;
        let raw = kvd_codec::find_preset("raw").expect("a preset of that name");
        let mut geometry = self.shape.layer_geometry(self.block_tokens);
        let mut spec = spec.clone();
        match side {
            Side::Key => (geometry.head_dim_v, spec.value) = (2, raw.value),
            Side::Value => (geometry.head_dim_k, spec.key) = (2, raw.key),
        }
        let mut codec = bind_codec(&geometry, spec.clone(), name)?;
        let per_row = geometry.head_dim(side) * geometry.kv_heads as usize;
        let per_block = per_row * geometry.block_tokens as usize;
        // All different, and in whole groups of those that are decoded together.
        let count = CODES_MIN.div_ceil(per_block).next_multiple_of(CodeDecoder::PAGES);
        // Rows of f32 and of f16, and pages.
        limits::check_memory(name, count as u64, 12 * per_block as u64)?;
        let halves: Vec<_> =
            (0..count as u64).map(|seed| draw_rows(&geometry, 200 + seed)).collect();
        let blocks: Vec<_> = halves.iter().map(|block| block.each_ref().map(widen_rows)).collect();
        if codec.needs_tables(LAYER) {
            let blocks: Vec<_> = blocks.iter().map(|block| view_block(&geometry, block)).collect();
            codec.train_tables(LAYER, &blocks).map_err(BenchError::failed_step(name))?;
        }
        let row = CodecRow {
            side_spec: spec.side(side).to_string(),
            side: side.name(),
            instruction_set: simd.level().name(),
            threads: 1,
            bits_per_value: 0.0,
            encode_ns: MeasuredFigure::from_runs(vec![0.0]),
            encode_gb_per_s: 0.0,
            encode_f16_ns: MeasuredFigure::from_runs(vec![0.0]),
            encode_f16_gb_per_s: 0.0,
            coding_ns: None,
            decode_ns: MeasuredFigure::from_runs(vec![0.0]),
            codes_ns: None,
            huffman: None,
        };
        let values = (per_block * count) as f64;
        let [encode, encode_f16, coding, decode, codes] = [const { Vec::new() }; 5];
        let width = set.map(|_| simd.width());
        Ok(CodecCase {
            row,
            side,
            simd,
            width,
            codec,
            blocks,
            halves,
            room: TurnBuffers::default(),
            values,
            encode,
            encode_f16,
            coding,
            decode,
            codes,
        })
    }
}

/// A block's rows as f16.
fn draw_rows(geometry: &Geometry, seed: u64) -> [Bytes; 2] {
    let mut normal = NormalValues::new(seed);
    Side::BOTH.map(|side| {
        let dim = geometry.head_dim(side);
        let count = geometry.block_tokens as usize * geometry.kv_heads as usize * dim;
        normal.draw_bytes(count, 1.0)
    })
}

fn widen_rows(rows: &Bytes) -> Vec<f32> {
    let mut values = vec![0f32; rows.len() / DType::F16.size_bytes()];
    widen_values(DType::F16, rows, &mut values);
    values
}

fn view_block<'a>(geometry: &Geometry, block: &'a [Vec<f32>; 2]) -> BlockRows<'a> {
    BlockRows { tokens: geometry.block_tokens as usize, k: &block[0], v: &block[1] }
}

impl CodecCase {
    /// A turn on its instruction set.
    fn take_turn(&mut self, counts: bool) -> Result<(), BenchError> {
        let before = limit_width(self.width);
        let done = self.measure_turn(counts);
        limit_width(before);
        done
    }

    fn measure_turn(&mut self, counts: bool) -> Result<(), BenchError> {
        debug_assert_eq!(limit_width(self.width), self.width, "held to something else");
        let mut room = std::mem::take(&mut self.room);
        let failed = BenchError::failed_step::<CodecError>;
        let halves = measure_time(|| self.encode_halves(&mut room));
        halves.value.map_err(failed(&self.row.side_spec))?;
        let blocks = measure_time(|| self.encode_blocks(&mut room));
        let encoded = blocks.value.map_err(failed(&self.row.side_spec))?;
        let pages = room.pages.iter().zip(&encoded);
        let pages: Vec<_> = pages.map(|(bytes, encoded)| BlockPages { bytes, encoded }).collect();
        let decoded = measure_time(|| self.decode_all(&pages));
        decoded.value.map_err(BenchError::failed_step(&self.row.side_spec))?;
        let bytes = |e: &EncodedBlock| match self.side {
            Side::Key => e.key_bytes,
            Side::Value => e.value_bytes,
        };
        let stored: u64 = pages.iter().map(|block| bytes(block.encoded)).sum();
        self.row.bits_per_value = stored as f64 * 8.0 / self.values;
        let coding_ns = self.coding_ns();
        let codes_ns =
            self.codes_ns(&pages).map_err(BenchError::failed_step(&self.row.side_spec))?;
        if counts {
            self.encode.push(blocks.cpu_ns / self.values);
            self.encode_f16.push(halves.cpu_ns / self.values);
            self.decode.push(decoded.cpu_ns / self.values);
            self.coding.extend(coding_ns);
            self.codes.extend(codes_ns);
        }
        self.room = room;
        Ok(())
    }

    /// Encodes every block.
    fn encode_blocks(&self, room: &mut TurnBuffers) -> Result<Vec<EncodedBlock>, CodecError> {
        let geometry = self.codec.geometry();
        room.pages.resize_with(self.blocks.len(), Vec::new);
        let blocks = self.blocks.iter().zip(&mut room.pages);
        let one = |(block, bytes): (_, &mut Vec<u8>)| {
            bytes.clear();
            self.codec.encode_block(LAYER, &view_block(geometry, block), bytes)
        };
        blocks.map(one).collect()
    }

    /// Encodes every block from f16 rows, which are widened just before.
    fn encode_halves(&self, room: &mut TurnBuffers) -> Result<(), CodecError> {
        let geometry = self.codec.geometry();
        room.pages.resize_with(self.halves.len(), Vec::new);
        for (halves, bytes) in self.halves.iter().zip(&mut room.pages) {
            for (rows, values) in halves.iter().zip(&mut room.rows) {
                values.resize(rows.len() / DType::F16.size_bytes(), 0.0);
                widen_values(DType::F16, rows, values);
            }
            bytes.clear();
            self.codec.encode_block(LAYER, &view_block(geometry, &room.rows), bytes)?;
        }
        Ok(())
    }

    /// One head's page of each block.
    fn open_pages<'a>(
        &'a self,
        blocks: &[BlockPages<'a>],
        head: usize,
    ) -> Result<Vec<PageReader<'a>>, PageError> {
        let index = self.side.index() * self.codec.geometry().kv_heads as usize + head;
        let page = |block: &BlockPages<'a>| {
            let BlockPages { bytes, encoded } = *block;
            let start = if index == 0 { 0 } else { encoded.page_ends[index - 1] };
            let page = &bytes[start as usize..encoded.page_ends[index] as usize];
            PageReader::open_page(&self.codec, LAYER, self.side, head, page)
        };
        blocks.iter().map(page).collect()
    }

    fn decode_all(&self, blocks: &[BlockPages<'_>]) -> Result<(), PageError> {
        let geometry = self.codec.geometry();
        let tokens = geometry.block_tokens as usize;
        let mut out = vec![0f32; tokens * geometry.head_dim(self.side)];
        for head in 0..geometry.kv_heads as usize {
            for page in self.open_pages(blocks, head)? {
                page.decode_rows(0, tokens, &mut out)?;
                black_box(&mut out);
            }
        }
        Ok(())
    }

    /// Quantizes each head's pages; none where no tables are trained.
    fn quantize_heads(&self) -> Vec<HeadCodes<'_>> {
        let geometry = self.codec.geometry();
        let per_head = geometry.block_tokens as usize * geometry.head_dim(self.side);
        let of_head = |head: usize| {
            let encoder = self.codec.code_encoder(LAYER, self.side, head)?;
            let rows = self.blocks.iter().map(|block| &block[self.side.index()]);
            let rows = rows.map(|rows| &rows[head * per_head..][..per_head]);
            let pages = rows.filter_map(|rows| encoder.quantize_rows(rows)).collect();
            Some(HeadCodes { encoder, pages })
        };
        (0..geometry.kv_heads as usize).filter_map(of_head).collect()
    }

    /// Time per code from codes to words, where tables are trained: page after page.
    fn coding_ns(&self) -> Option<f64> {
        let heads = self.quantize_heads();
        let codes: usize = heads.iter().flat_map(|head| &head.pages).map(Vec::len).sum();
        let mut words = Vec::new();
        let mut run = || -> usize {
            let of_head = |head: &HeadCodes<'_>| -> usize {
                words.clear();
                let codes = head.pages.iter();
                codes.map(|codes| head.encoder.append_words(codes, &mut words)).sum()
            };
            heads.iter().map(of_head).sum()
        };
        // Its buffer grows once, as that of a worker does.
        black_box(run());
        let ns = measure_time(|| black_box(run())).cpu_ns;
        (codes > 0).then_some(ns / codes as f64)
    }

    /// Bits of codes and of their words, where tables are trained.
    fn measure_huffman(&self) -> Option<HuffmanRow> {
        let heads = self.quantize_heads();
        let codes_per_symbol = heads.first()?.encoder.codes_per_symbol();
        let (mut codes, mut words, mut entropy) = (0, 0, 0.0);
        for HeadCodes { encoder, pages } in &heads {
            let mut counts: HashMap<u16, f64> = HashMap::new();
            pages.iter().flatten().for_each(|code| *counts.entry(*code).or_default() += 1.0);
            let total: f64 = counts.values().sum();
            entropy += counts.values().map(|count| count * (total / count).log2()).sum::<f64>();
            codes += pages.iter().map(Vec::len).sum::<usize>();
            let mut out = Vec::new();
            words += pages.iter().map(|codes| encoder.append_words(codes, &mut out)).sum::<usize>();
        }
        let per_code = |bits: f64| bits / codes as f64;
        let (entropy, bits_per_code) = (per_code(entropy), per_code(16.0 * words as f64));
        (codes > 0).then_some(HuffmanRow { codes_per_symbol, entropy, bits_per_code })
    }

    /// Time per code of the attention kernels' decoder, where there are codes for it.
    fn codes_ns(&self, blocks: &[BlockPages<'_>]) -> Result<Option<f64>, BackendError> {
        let mut heads = Vec::new();
        for head in 0..self.codec.geometry().kv_heads as usize {
            let side = self.codec.head_codec(LAYER, self.side, head);
            if let Some(decoder) = CodeDecoder::new(self.simd, side, self.side) {
                heads.push((decoder, self.open_pages(blocks, head)?));
            }
        }
        let mut run = || -> Result<usize, BackendError> {
            let mut codes = 0;
            for (decoder, pages) in &mut heads {
                for pages in pages.chunks(CodeDecoder::PAGES) {
                    codes += decoder.decode(pages)?;
                }
            }
            Ok(codes)
        };
        // Buffers grow once, as those of a worker do.
        run()?;
        let timed = measure_time(run);
        let codes = timed.value?;
        Ok((codes > 0).then_some(timed.cpu_ns / codes as f64))
    }

    fn finish_row(mut self) -> CodecRow {
        self.row.huffman = self.measure_huffman();
        self.row.encode_ns = MeasuredFigure::from_runs(self.encode);
        self.row.decode_ns = MeasuredFigure::from_runs(self.decode);
        self.row.coding_ns =
            (!self.coding.is_empty()).then(|| MeasuredFigure::from_runs(self.coding));
        self.row.codes_ns = (!self.codes.is_empty()).then(|| MeasuredFigure::from_runs(self.codes));
        self.row.encode_gb_per_s = 2.0 / self.row.encode_ns.median;
        self.row.encode_f16_ns = MeasuredFigure::from_runs(self.encode_f16);
        self.row.encode_f16_gb_per_s = 2.0 / self.row.encode_f16_ns.median;
        self.row
    }
}
