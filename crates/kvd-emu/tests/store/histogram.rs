//! Codes that kernels count are those that the host would count, so that a layer's first Huffman
//! tables, and the pages that are written with them, are the same bytes.

use super::{Blocks, LAYER, Rows, SHARED, TAILS};
use crate::common::store_run::StoreRun;
use crate::common::{Layout, Stored, geometry};
use kvd_codec::{BlockRows, CodeCounts, ModelCodec};
use kvd_core::{DType, Side};
use kvd_cuda::{CodeHistogram, LayerShapes, SharedMemory};
use kvd_emu::{EmulatorMemory, ThreadOrder, is_available};

/// A codec as it is before its first tables.
fn untrained(blocks: &Blocks, text: &str) -> ModelCodec {
    let none = Layout { pages: Vec::new(), window: 0 };
    Stored::new(blocks.stored.codec.geometry(), text, &none, |_, _, _, _| 0.0).codec
}

/// The kernels' counts of some of the blocks, launch by launch; none where rows are no numbers.
fn counted(
    blocks: &Blocks,
    codec: &ModelCodec,
    shared: SharedMemory,
    order: ThreadOrder,
) -> Option<Vec<CodeCounts>> {
    let shapes = LayerShapes::new(codec, LAYER, [0; 2]);
    let histogram = CodeHistogram::new(codec, LAYER, &shapes).expect("kernels count");
    let counters = EmulatorMemory::copy_from(&vec![0; 8 * histogram.len()]);
    // In two parts, as where scratch memory has no room for all at once.
    let (first, second) = blocks.sources.split_at(blocks.sources.len() / 2);
    for sources in [first, second] {
        let plan = histogram.plan_launches(codec, sources, shared);
        let run = StoreRun {
            arena: &blocks.arena,
            tables: &shapes.tables,
            steps: &histogram.steps,
            page_bytes: plan.page_bytes,
            words: plan.words,
            headers: &counters,
            header_bytes: 0,
        };
        run.run(&plan.launches, order);
    }
    histogram.read_counts(bytemuck::cast_slice(counters.bytes()))
}

/// Compares counts, and pages that are made with the tables of either.
fn check(blocks: &Blocks, text: &str, shared: SharedMemory, order: ThreadOrder) {
    let mut of_kernels = untrained(blocks, text);
    let mut of_host = of_kernels.clone();
    let rows = blocks.sources.iter().zip(&blocks.rows);
    let rows: Vec<_> =
        rows.map(|(of, [k, v])| BlockRows { tokens: of.rows as usize, k, v }).collect();
    let wanted = of_host.count_blocks(LAYER, &rows).unwrap();
    let got = counted(blocks, &of_kernels, shared, order).expect("all rows are numbers");
    assert_eq!(got, wanted, "{text}, {order:?}");
    let sum: u64 = got.iter().flat_map(|of| &of.counts).sum();
    assert!(sum > 0, "{text}");
    of_host.train_tables(LAYER, &rows).unwrap();
    of_kernels.train_tables_from(LAYER, &got).unwrap();
    let mut pages = [Vec::new(), Vec::new()];
    for block in &rows {
        of_host.encode_block(LAYER, block, &mut pages[0]).unwrap();
        of_kernels.encode_block(LAYER, block, &mut pages[1]).unwrap();
    }
    assert!(pages[0] == pages[1], "{text}: pages differ");
}

#[test]
fn counts_tables_and_pages_are_those_of_the_host() {
    if !is_available() {
        return;
    }
    let mut orders = ThreadOrder::EACH.into_iter().cycle();
    for text in [
        "kvcomp",
        "kvcomp-channel",
        // Every quantizer that counts, transforms, gains, heads that share counters.
        "k=rotate/uniform(b=3,g=20,axis=token,mode=sym)/huffman; \
         v=uniform(b=4,axis=channel,mode=hybrid)/huffman",
        "k=polar(a=3,r=2)/huffman; v=rotate(seed=9)/lloyd(b=6)/huffman",
        "k=mean+qpca/uniform(b=4,axis=channel)/huffman; v=gain/vq(d=4,b=4,stages=2)/huffman",
        // Counters of 512 codes: fewer than threads for each.
        "k=vq(d=2,b=9)/huffman; v=fp8/huffman",
        // One side has no codes to count, or tables that come with the calibration.
        "k=uniform(b=8,axis=block)/huffman; v=raw",
        "k=grid(rate=3)/huffman; v=polar(a=6,r=6,g=9)/huffman",
    ] {
        let blocks = Blocks::new([96, 80], DType::F16, text, &TAILS);
        check(&blocks, text, SHARED, orders.next().unwrap());
    }
}

#[test]
fn pages_without_codes_count_nothing() {
    if !is_available() {
        return;
    }
    let blocks = [(Rows::Huge, 40), (Rows::Noise, 40), (Rows::Tiny, 64), (Rows::Vast, 64)];
    for text in ["kvcomp", "k=vq(d=4,b=4)/huffman; v=polar(a=4,r=4)/huffman"] {
        let blocks = Blocks::new([64, 64], DType::F32, text, &blocks);
        check(&blocks, text, SHARED, ThreadOrder::Random(3));
    }
}

#[test]
fn coefficients_beside_shared_memory_are_counted_too() {
    if !is_available() {
        return;
    }
    let little = SharedMemory { block: 24 << 10, multiprocessor: 64 << 10, under_way: 0 };
    let blocks = Blocks::new([64, 128], DType::BF16, "kvcomp", &TAILS);
    let codec = untrained(&blocks, "kvcomp");
    let shapes = LayerShapes::new(&codec, LAYER, [0; 2]);
    let histogram = CodeHistogram::new(&codec, LAYER, &shapes).unwrap();
    assert!(histogram.plan_launches(&codec, &blocks.sources, little).words > 0);
    check(&blocks, "kvcomp", little, ThreadOrder::Descending);
}

#[test]
fn rows_that_are_no_numbers_leave_counting_to_the_host() {
    if !is_available() {
        return;
    }
    // With one counted side and one uncounted side the host leaves out the whole block.
    let text = "k=uniform(b=4,axis=channel)/huffman; v=raw";
    for side in Side::BOTH {
        let mut blocks = Blocks::new([64, 64], DType::F16, text, &[(Rows::Noise, 40); 3]);
        let codec = untrained(&blocks, text);
        assert!(counted(&blocks, &codec, SHARED, ThreadOrder::Ascending).is_some());
        let of = blocks.sources[1];
        let layout = geometry(64, 64, DType::F16).raw_layout(of.capacity_rows);
        let row = layout.row_offset(side, 1, u64::from(of.first_row) + 39);
        let at = (of.extent.offset + row) as usize + 2 * 63;
        // Infinity.
        blocks.arena[at..at + 2].copy_from_slice(&[0, 0x7C]);
        assert_eq!(counted(&blocks, &codec, SHARED, ThreadOrder::Descending), None, "{side}");
    }
}
