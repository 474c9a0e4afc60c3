//! Pages that the store kernels write are those of the reference encoder, byte for byte: every side
//! that has a kernel, transforms, tails, and rows that have no codes.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;
#[path = "store/histogram.rs"]
mod histogram;

use common::store_run::StoreRun;
use common::{Layout, Stored, geometry, noise};
use kvd_codec::{BlockRows, HEADER_BYTES, Page, presets};
use kvd_compute::EncodeSource;
use kvd_core::{DType, Extent, Geometry, LayerIndex, RopePairing, Side};
use kvd_cuda::{LayerShapes, SharedMemory, StorePlan, StoreShapes, StoredPage};
use kvd_emu::{EmulatorMemory, ThreadOrder, is_available};

const LAYER: LayerIndex = LayerIndex(0);
/// Where a page's payload begins, behind the checksum.
const CHECKSUM_END: usize = 32;
const SHARED: SharedMemory =
    SharedMemory { block: 227 << 10, multiprocessor: 228 << 10, under_way: 0 };

/// Numbers from head to head: none has more values.
const HEAD_VALUES: usize = 10_000;

/// The rows of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    Noise,
    Zeros,
    /// Zeros of both signs, few other values.
    Signs,
    Tiny,
    /// Beyond what some quantizers can scale.
    Huge,
    /// Beyond what an f16 holds, all of them.
    Vast,
    /// Some rows far shorter than others.
    Uneven,
    /// Some values far larger than others.
    Spikes,
    /// One value among zeros, far from the first.
    Lone,
    /// Nearly half of the values of the first 64 rows far larger than the others.
    Dense,
}

impl Rows {
    fn value(self, at: usize, dim: usize) -> f32 {
        let sign = if at.is_multiple_of(3) { -0.0 } else { 0.0 };
        match self {
            Self::Noise => noise(at),
            Self::Lone if at % HEAD_VALUES == 5000 => 300.0,
            Self::Zeros | Self::Lone => 0.0,
            Self::Signs if at.is_multiple_of(7) => noise(at).abs(),
            Self::Signs => sign,
            Self::Tiny => noise(at) * 1e-7,
            Self::Huge => noise(at) * 40_000.0,
            Self::Vast => (1.0 + noise(at).abs()) * 1e30,
            Self::Uneven if at / dim % 3 == 1 => noise(at) / 40.0,
            Self::Spikes if at.is_multiple_of(29) => noise(at) * 30.0,
            Self::Dense if at % HEAD_VALUES / dim < 64 && at % 20 < 9 => noise(at) * 60.0,
            Self::Uneven | Self::Spikes | Self::Dense => noise(at),
        }
    }
}

/// Blocks of raw rows in an arena, and the codec that encodes them.
struct Blocks {
    stored: Stored,
    arena: Vec<u8>,
    sources: Vec<EncodeSource>,
    /// Keys and values of each as the arena holds them.
    rows: Vec<[Vec<f32>; 2]>,
}

impl Blocks {
    fn new(dims: [u32; 2], dtype: DType, codec: &str, blocks: &[(Rows, usize)]) -> Self {
        Self::of(geometry(dims[0], dims[1], dtype), codec, blocks)
    }

    fn of(geometry: Geometry, codec: &str, blocks: &[(Rows, usize)]) -> Self {
        let dtype = geometry.dtype;
        let none = Layout { pages: Vec::new(), window: 0 };
        let mut stored = Stored::new(&geometry, codec, &none, |_, _, _, _| 0.0);
        // Pages are written with the newest of several tables, or their prior.
        for version in 1..=if stored.codec.needs_tables(LAYER) { 2 } else { 0 } {
            stored.train(48, |side, head, token, channel| {
                noise(side.index() + 2 * (head + 2 * (token + 48 * (channel + 1024 * version))))
            });
        }
        let (mut arena, mut sources, mut rows) = (vec![0xFF; 320], Vec::new(), Vec::new());
        for (index, (kind, tokens)) in blocks.iter().enumerate() {
            let (first_row, capacity_rows) = (index as u32 % 3, *tokens as u32 + 3);
            let layout = geometry.raw_layout(capacity_rows);
            let offset = arena.len();
            arena.resize((offset + layout.size_bytes() as usize).next_multiple_of(64), 0xFF);
            rows.push(Side::BOTH.map(|side| {
                let dim = geometry.head_dim(side);
                let seed = 100_000 * (2 * index + side.index());
                let mut all = Vec::new();
                for head in 0..geometry.kv_heads as usize {
                    let at = seed + HEAD_VALUES * head;
                    let values: Vec<f32> =
                        (0..tokens * dim).map(|i| kind.value(at + i, dim)).collect();
                    let row = layout.row_offset(side, head as u64, first_row.into());
                    let bytes =
                        &mut arena[offset + row as usize..][..values.len() * dtype.size_bytes()];
                    dtype.narrow_values(&values, bytes);
                    let mut stored = vec![0f32; values.len()];
                    dtype.widen_values(bytes, &mut stored);
                    all.extend(stored);
                }
                all
            }));
            let extent = Extent { offset: offset as u64, len: layout.size_bytes() };
            sources.push(EncodeSource { extent, capacity_rows, first_row, rows: *tokens as u32 });
        }
        Self { stored, arena, sources, rows }
    }

    /// The pages that the reference encoder makes of a block.
    fn wanted(&self, index: usize) -> Vec<Vec<u8>> {
        let [k, v] = &self.rows[index];
        let tokens = self.sources[index].rows as usize;
        let mut bytes = Vec::new();
        let block = BlockRows { tokens, k, v };
        let encoded = self.stored.codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        let mut start = 0;
        let page = |end: &u32| {
            let page = bytes[start..*end as usize].to_vec();
            start = *end as usize;
            page
        };
        encoded.page_ends.iter().map(page).collect()
    }

    /// Runs a plan; gives its output and each page.
    fn run(
        &self,
        (shapes, store): (&LayerShapes, &StoreShapes),
        plan: &StorePlan,
        order: ThreadOrder,
    ) -> (EmulatorMemory, Vec<Option<StoredPage>>) {
        let headers = EmulatorMemory::new(plan.header_bytes());
        let run = StoreRun {
            arena: &self.arena,
            tables: &shapes.tables,
            steps: &store.steps,
            page_bytes: plan.page_bytes,
            words: plan.words,
            headers: &headers,
            header_bytes: HEADER_BYTES,
        };
        let pages = run.run(&plan.launches, order);
        let read = plan.read_pages(headers.bytes());
        (pages, read)
    }

    /// Compares what kernels write with the reference. Gives the pages that had no codes.
    fn check(&self, text: &str, shared: SharedMemory, order: ThreadOrder) -> usize {
        let codec = &self.stored.codec;
        let shapes = LayerShapes::new(codec, LAYER, [0; 2]);
        let store = StoreShapes::new(codec, LAYER, &shapes).expect("the codec has store kernels");
        let plan = store.plan_pages(codec, &self.sources, shared);
        let (pages, read) = self.run((&shapes, &store), &plan, order);
        // As the backend does it: pages that take too much once more, with their priors.
        let long = |index: usize| read[index].is_some_and(|page| plan.takes_too_much(index, &page));
        let priors = store.plan_priors(codec, &self.sources, shared, long);
        let (with_priors, read_priors) = self.run((&shapes, &store), &priors, order);
        let prior = |index: usize| {
            let page: &StoredPage = read[index].as_ref()?;
            read_priors[index].filter(|of| of.header.payload_len < page.header.payload_len)
        };
        let missing = |index: usize| read[index].is_none();
        let plan = store.plan_fallback(codec, &self.sources, shared, missing);
        let (as_rows, read_rows) = self.run((&shapes, &store), &plan, order);
        let per_block = read.len() / self.sources.len();
        let mut fallbacks = 0;
        for index in 0..self.sources.len() {
            for (at, wanted) in self.wanted(index).iter().enumerate() {
                let at = index * per_block + at;
                let (memory, page) = match read[at] {
                    Some(page) => prior(at).map_or((&pages, page), |page| (&with_priors, page)),
                    None => (&as_rows, read_rows[at].expect("rows as they came have a page")),
                };
                let got = &memory.bytes()[page.offset as usize..][..page.header.page_bytes()];
                // The checksum says only that something differs.
                let differs = |at: &usize| got.get(*at) != wanted.get(*at);
                let last = (CHECKSUM_END..wanted.len()).chain(0..CHECKSUM_END);
                let off = last.into_iter().find(differs);
                let tokens = self.sources[index].rows;
                assert!(
                    got.len() == wanted.len() && off.is_none(),
                    "{text}, {order:?}: page {at} of {tokens} tokens has {} bytes, not {}; \
                     byte {off:?} differs",
                    got.len(),
                    wanted.len()
                );
                let reference = Page::parse_page(wanted).unwrap();
                assert_eq!(*reference.header(), page.header);
                assert_eq!(page.parts.total_bytes(), got.len() as u64);
                assert_eq!(reference.header().fallback, read[at].is_none(), "{text}: page {at}");
                fallbacks += usize::from(read[at].is_none());
            }
        }
        fallbacks
    }
}

/// Full blocks, and blocks that end inside a tile, a group, four tokens.
const TAILS: [(Rows, usize); 9] = [
    (Rows::Noise, 64),
    (Rows::Noise, 1),
    (Rows::Uneven, 35),
    (Rows::Signs, 33),
    (Rows::Noise, 96),
    (Rows::Tiny, 6),
    (Rows::Spikes, 37),
    (Rows::Lone, 78),
    (Rows::Dense, 96),
];

/// Presets whose layers have store kernels throughout. Codebooks of 4096 entries take minutes to
/// fit and to search here, and are read like those of 256.
fn stored_presets() -> impl Iterator<Item = &'static str> {
    let on_device = |text: &&str| {
        let spec = kvd_codec::resolve_spec(text).unwrap();
        let mut sides = Side::BOTH.into_iter().flat_map(|side| spec.side_specs(side));
        sides.all(|side| kvd_cuda::encoded_on_host(side).is_none())
    };
    let small = presets().iter().filter(|preset| !preset.spec_text.contains("b=12"));
    small.map(|preset| preset.name).filter(on_device)
}

#[test]
fn pages_of_every_preset_that_kernels_encode_are_the_reference_encoders() {
    if !is_available() {
        return;
    }
    let mut orders = ThreadOrder::EACH.into_iter().cycle();
    let mut dtypes = [DType::F16, DType::BF16, DType::F32].into_iter().cycle();
    let mut count = 0;
    for text in stored_presets() {
        let order = orders.next().unwrap();
        let blocks = Blocks::new([64, 128], dtypes.next().unwrap(), text, &TAILS);
        blocks.check(text, SHARED, order);
        count += 1;
    }
    assert!(count >= 20, "{count} presets");
}

#[test]
fn sides_that_no_preset_has_are_the_reference_encoders_too() {
    if !is_available() {
        return;
    }
    let composed = [
        "k=uniform(b=3,axis=channel); v=uniform(b=8,axis=block)",
        "k=uniform(rel=0.13,axis=token,g=20); v=uniform(rel=0.01,axis=block)",
        "k=uniform(b=1,g=5,axis=channel,mode=sym); v=uniform(b=4,axis=block,mode=sym)",
        "k=rotate(seed=3)/uniform(b=5,g=16,axis=token,mode=sym); v=rotate/fp8",
        "k=uniform(b=2,g=20,axis=channel,mode=hybrid); v=uniform(rel=0.2,axis=block,mode=hybrid)",
        "k=mean+qpca/uniform(b=4,axis=channel); v=mean+gain+pca/uniform(b=4,g=32,axis=token)",
        "k=mean+pca/lloyd(b=1); v=mean+gain/fp8",
        "k=smooth+hadamard/lloyd(b=8); v=gain/vq(d=4,b=4)",
        "k=f32; v=bf16",
        "k=hadamard/f16; v=mean/f32",
        "k=vq(d=1,b=3); v=vq(d=16,b=2,stages=3)",
        "k=mean+qpca/bitalloc(b=3.5); v=mean+gain+pca/bitalloc(b=1)",
        "k=hadamard/bitalloc(b=2); v=bitalloc(b=8)",
        "k=polar(a=3,r=2,g=20); v=polar(a=8,r=8,g=5)",
        "k=polar(a=1,r=5); v=gain/polar(a=4,r=4)",
        "k=rotate/uniform(b=3,g=20,axis=token,mode=sym)/huffman; \
         v=uniform(b=4,axis=channel,mode=hybrid)/huffman",
        "k=polar(a=3,r=2)/huffman; v=rotate(seed=9)/lloyd(b=6)/huffman",
        "k=uniform(b=3,axis=block,mode=hybrid)/huffman; v=fp8/huffman",
        "k=fp8/huffman; v=gain/vq(d=4,b=4,stages=2)/huffman",
        "k=uniform(b=8,axis=block)/huffman; v=polar(a=6,r=6,g=9)/huffman",
        "k=grid(rate=7)/huffman; v=mean+gain+pca/grid(rate=0.4)/huffman",
        "k=uniform(b=1,axis=channel)/huffman; v=hadamard/grid(rate=1.7)/huffman",
    ];
    let mut orders = ThreadOrder::EACH.into_iter().cycle();
    for text in composed {
        let order = orders.next().unwrap();
        // 96 channels are three Hadamard blocks, 80 five.
        let blocks = Blocks::new([96, 80], DType::F16, text, &TAILS);
        blocks.check(text, SHARED, order);
    }
}

#[test]
fn neighbouring_channels_are_a_pair_as_well() {
    if !is_available() {
        return;
    }
    for text in ["polar-4+4", "k=polar(a=2,r=3); v=raw"] {
        let geometry = geometry(64, 64, DType::F32);
        let geometry = Geometry { rope_pairing: RopePairing::Interleaved, ..geometry };
        Blocks::of(geometry, text, &TAILS).check(text, SHARED, ThreadOrder::Random(5));
    }
}

#[test]
fn pages_of_any_length_have_the_formats_checksum() {
    if !is_available() {
        return;
    }
    let blocks: Vec<_> = (1..=30).map(|tokens| (Rows::Noise, tokens)).collect();
    // From 48 bytes on, in steps of one row: each way in which short pages are hashed.
    Blocks::new([2, 8], DType::F32, "k=fp8; v=f32", &blocks).check(
        "short",
        SHARED,
        ThreadOrder::Ascending,
    );
}

#[test]
fn rows_without_codes_become_pages_of_rows() {
    if !is_available() {
        return;
    }
    let blocks = [(Rows::Huge, 40), (Rows::Noise, 40), (Rows::Zeros, 64), (Rows::Tiny, 64)];
    for (text, wanted) in [
        ("k=uniform(b=4,axis=channel); v=uniform(b=4,axis=block,mode=sym)", 4..=8),
        ("k=uniform(b=4,g=8,axis=token,mode=hybrid); v=f16", 2..=8),
        ("k=hadamard/lloyd(b=4); v=fp8", 0..=4),
        ("k=vq(d=4,b=4); v=vq(d=2,b=4,stages=2)", 4..=4),
        ("k=polar(a=4,r=4,g=16); v=polar(a=4,r=4)", 4..=4),
        ("k=mean+pca/bitalloc(b=2); v=bitalloc(b=2)", 4..=4),
        ("k=mean+pca/grid(rate=2)/huffman; v=vq(d=4,b=4)/huffman", 4..=4),
    ] {
        let blocks = Blocks::new([64, 64], DType::F32, text, &blocks);
        let fallbacks = blocks.check(text, SHARED, ThreadOrder::Random(3));
        assert!(wanted.contains(&fallbacks), "{text}: {fallbacks} pages without codes");
    }
}

#[test]
fn rows_that_lack_more_than_an_f16_everywhere_become_pages_of_rows() {
    if !is_available() {
        return;
    }
    // As many values as would bring a count that is too large back to none.
    let blocks = [(Rows::Vast, 64)];
    for text in ["k=bitalloc(b=2); v=mean+pca/bitalloc(b=2)", "k=bitalloc(b=2); v=polar(a=4,r=4)"] {
        let blocks = Blocks::new([64, 64], DType::F32, text, &blocks);
        let fallbacks = blocks.check(text, SHARED, ThreadOrder::Random(4));
        assert!(fallbacks > 0, "{text}: {fallbacks} pages without codes");
    }
}

#[test]
fn codes_that_find_no_room_are_none() {
    if !is_available() {
        return;
    }
    for text in ["kvcomp", "kvcomp-channel", "kvd-2"] {
        let blocks = Blocks::new([64, 64], DType::F16, text, &[(Rows::Noise, 96)]);
        let codec = &blocks.stored.codec;
        let shapes = LayerShapes::new(codec, LAYER, [0; 2]);
        let store = StoreShapes::new(codec, LAYER, &shapes).unwrap();
        let mut plan = store.plan_pages(codec, &blocks.sources, SHARED);
        let (_, read) = blocks.run((&shapes, &store), &plan, ThreadOrder::Ascending);
        assert!(read.iter().all(Option::is_some), "{text}");
        // None at all, and too little for the second chunk.
        let sizes: Vec<u32> = read.iter().flatten().map(|page| page.header.payload_len).collect();
        for cut in [|_: u32| 0, |size: u32| size / 4 * 3] {
            let units = plan.launches.iter_mut().flat_map(|launch| &mut launch.units);
            units.zip(&sizes).for_each(|(unit, size)| unit.room = cut(*size));
            let (_, read) = blocks.run((&shapes, &store), &plan, ThreadOrder::Descending);
            assert!(read.iter().all(Option::is_none), "{text}");
        }
    }
}

#[test]
fn pages_over_the_shared_memory_are_encoded_beside_it() {
    if !is_available() {
        return;
    }
    let little = SharedMemory { block: 24 << 10, multiprocessor: 64 << 10, under_way: 0 };
    for text in ["kivi-4", "vecinfer-2", "k=mean+pca/lloyd(b=4); v=gain/fp8", "kvd-2-fast", "kvd-3"]
    {
        let blocks = Blocks::new([64, 128], DType::F16, text, &TAILS);
        let codec = &blocks.stored.codec;
        let shapes = LayerShapes::new(codec, LAYER, [0; 2]);
        let store = StoreShapes::new(codec, LAYER, &shapes).unwrap();
        assert!(store.plan_pages(codec, &blocks.sources, little).words > 0);
        assert_eq!(store.plan_pages(codec, &blocks.sources, SHARED).words, 0);
        blocks.check(text, little, ThreadOrder::Descending);
    }
}
