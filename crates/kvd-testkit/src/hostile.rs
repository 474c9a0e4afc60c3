//! The operations that fuzzing applies to bytes, shared by `fuzz/` and by `tests/hostile.rs` of
//! `kvd-codec`, which replays the corpus and mutations of it without a fuzzer.
//!
//! Nothing here may panic on any input, and rows come out only where they were asked for.

use kvd_codec::{
    BlockRows, Calibration, CodecSpec, HEADER_BYTES, ModelCodec, PAGE_ALIGN, PageReader,
    resolve_spec,
};
use kvd_core::{DType, Geometry, LayerIndex, RopePairing, Side};
use kvd_fit::{Samples, fit_calibration};

/// Every quantizer, with and without Huffman, and every way of finding a codebook.
pub const SPECS: [&str; 12] = [
    "k=raw; v=fp8/huffman",
    "k=uniform(b=3,g=4,axis=channel); v=uniform(b=2,g=8,axis=token)",
    "k=hadamard/uniform(rel=0.05,axis=block)/huffman; v=uniform(rel=0.2,axis=token)/huffman",
    "k=smooth+hadamard/vq(d=4,b=4); v=vq(d=2,b=3)/huffman",
    "k=vq(d=4,b=3,stages=3,scope=group); v=vq(d=8,b=5,stages=2,scope=model)/huffman",
    "k=vq(d=2,b=9); v=mean/vq(d=16,b=2,scope=layer)",
    "k=mean+qpca/grid(rate=3)/huffman; v=mean+gain+pca/grid(rate=1)/huffman",
    "k=f32; v=bf16",
    "k=mean+qpca/bitalloc(b=2); v=gain+hadamard/bitalloc(b=3.3)",
    "k=polar(a=4,r=4); v=polar(a=3,r=2,g=5)/huffman",
    "k=rotate/lloyd(b=3); v=hadamard/lloyd(b=5)/huffman",
    "k=norm/uniform(b=2,g=8,axis=token,mode=hybrid); v=uniform(b=3,g=4,axis=channel,mode=sym)/huffman",
];

const LAYER: LayerIndex = LayerIndex(0);
const DIM: usize = 16;
const TOKENS: usize = 19;

/// Bit of the first byte: write a header that the reader expects over the one in the data.
const REPAIR: u8 = 1 << 7;
/// Bit of the first byte: the value side.
const VALUE: u8 = 1 << 6;

/// One layer with one KV head of 16 channels.
#[must_use]
pub fn small_geometry() -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: 1,
        head_dim_k: DIM as u32,
        head_dim_v: DIM as u32,
        block_tokens: 64,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    }
}

/// Values between -2 and 2 from a linear congruence.
fn make_rows(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut value = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 53) as f32 / 512.0 - 2.0
    };
    (0..count * DIM).map(|_| value()).collect()
}

/// A codec, one sound page of each side, and the calibration it came with.
pub struct HostileSubject {
    /// The codec.
    pub codec: ModelCodec,
    /// A sound page of keys and one of values.
    pub pages: [Vec<u8>; 2],
    /// Its calibration, where it needs one.
    pub calibration: Option<Calibration>,
}

impl HostileSubject {
    fn new(text: &str) -> Self {
        let (geometry, spec) = (small_geometry(), resolve_spec(text).expect("a spec"));
        let calibration = spec.needs_calibration().then(|| {
            let mut samples = Samples::new(&geometry);
            samples.push_queries(LAYER, 0, &make_rows(64, 3)).expect("rows of the geometry");
            for side in Side::BOTH {
                let rows = make_rows(64, 1 + side.index() as u64);
                samples.push(LAYER, side, 0, &rows).expect("rows of the geometry");
            }
            fit_calibration(&geometry, &spec, &samples, 1, &mut |_| {}).expect("enough samples")
        });
        let codec = ModelCodec::new(geometry, spec, calibration.as_ref());
        let mut codec = codec.expect("the calibration fits");
        let (k, v) = (make_rows(TOKENS, 11), make_rows(TOKENS, 12));
        let block = BlockRows { tokens: TOKENS, k: &k, v: &v };
        codec.train_tables(LAYER, &[block]).expect("rows of the geometry");
        let mut bytes = Vec::new();
        let encoded = codec.encode_block(LAYER, &block, &mut bytes).expect("encodes");
        let value = bytes.split_off(encoded.page_ends[0] as usize);
        Self { codec, pages: [bytes, value], calibration }
    }
}

/// All of [`SPECS`].
#[must_use]
pub fn make_subjects() -> Vec<HostileSubject> {
    SPECS.into_iter().map(HostileSubject::new).collect()
}

/// The input that makes [`page_decode`] read a page of that subject as it is.
pub fn page_input(subject: usize, side: Side, page: &[u8]) -> Vec<u8> {
    let side = if side == Side::Value { VALUE } else { 0 };
    [&[subject as u8 | side], page].concat()
}

/// Reads bytes as a page: the first byte names codec and side. Whether they opened as one.
pub fn page_decode(subjects: &[HostileSubject], data: &[u8]) -> bool {
    let Some((&first, page)) = data.split_first() else { return false };
    let subject = &subjects[usize::from(first & 0x3F) % subjects.len()];
    let side = if first & VALUE == 0 { Side::Key } else { Side::Value };
    let mut page = page.to_vec();
    if first & REPAIR != 0 {
        repair_header(&mut page, &subject.pages[side.index()]);
    }
    let Ok(reader) = PageReader::open_page(&subject.codec, LAYER, side, 0, &page) else {
        return false;
    };
    // The checksum is tested but not believed: decoding must hold without it.
    let _ = reader.verify_checksum();
    let tokens = reader.tokens();
    let mut out = vec![0f32; (tokens + 2) * DIM];
    // Rows outside the window stay as they are.
    out[..DIM].fill(7.0);
    out[(tokens + 1) * DIM..].fill(7.0);
    let window = &mut out[DIM..(tokens + 1) * DIM];
    let _ = reader.decode_rows(0, tokens, window);
    assert!(out[..DIM].iter().chain(&out[(tokens + 1) * DIM..]).all(|x| *x == 7.0));
    let mut row = [0f32; DIM];
    for first in [0, tokens / 2, tokens - 1] {
        let _ = reader.decode_rows(first, 1, &mut row);
    }
    assert!(reader.decode_rows(tokens, 1, &mut row).is_err());
    true
}

/// Makes the header one that opens, but for tokens, flags and table version; pads the page.
fn repair_header(page: &mut Vec<u8>, sound: &[u8]) {
    page.resize(page.len().max(HEADER_BYTES), 0);
    let kept = [7, 8, 9, 16, 17].map(|at| (at, page[at]));
    let payload = page.len() - HEADER_BYTES;
    page[..HEADER_BYTES].copy_from_slice(&sound[..HEADER_BYTES]);
    for (at, byte) in kept {
        // A flag changes what the payload is; most inputs leave them as they are in a sound page.
        if at != 7 || byte & 0xF0 == 0xF0 {
            page[at] = byte & if at == 7 { 3 } else { 0xFF };
        }
    }
    page[20..24].copy_from_slice(&(payload as u32).to_le_bytes());
    page.resize(page.len().next_multiple_of(PAGE_ALIGN), 0);
}

/// Parses a text as a codec; what parses is canonical after one round.
pub fn spec_parse(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let Ok(spec) = resolve_spec(&text) else { return false };
    let canonical = spec.to_string();
    assert_eq!(canonical.parse::<CodecSpec>().as_ref(), Ok(&spec), "{canonical}");
    // A codec without what it needs is an error, not a panic.
    let _ = ModelCodec::new(small_geometry(), spec, None);
    true
}

/// Reads bytes as a calibration; what reads is written back the same, and binds or is refused.
pub fn calibration_read(data: &[u8]) -> bool {
    let Ok(calibration) = Calibration::from_bytes(data) else { return false };
    let again = Calibration::from_bytes(&calibration.to_bytes());
    assert_eq!(again.as_ref(), Ok(&calibration));
    for text in SPECS {
        let spec = resolve_spec(text).expect("a spec");
        let Ok(codec) = ModelCodec::new(small_geometry(), spec, Some(&calibration)) else {
            continue;
        };
        let (k, v) = (make_rows(1, 21), make_rows(1, 22));
        let block = BlockRows { tokens: 1, k: &k, v: &v };
        // Huffman sides have no tables yet and say so.
        let _ = codec.encode_block(LAYER, &block, &mut Vec::new());
    }
    true
}
