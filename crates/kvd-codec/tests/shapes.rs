//! Every codec over every shape and every finite input: nothing panics, every byte is counted,
//! and rows come back the same however they are cut.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{SPECS, codec, decode, geometry, page, rows};
use kvd_codec::{BlockRows, CodecError, HEADER_BYTES, PAGE_ALIGN, PageReader};
use kvd_core::{Coded, DType, ErrorCode, LayerIndex, Side};

const LAYER: LayerIndex = LayerIndex(0);

/// Encodes, decodes whole and in pieces; returns the decoded pages and how many fell back.
fn round_trip(
    text: &str,
    dim: u32,
    dtype: DType,
    tokens: usize,
    k: &[f32],
) -> (Vec<Vec<f32>>, u32) {
    let geometry = geometry(dim, dtype);
    let block = BlockRows { tokens, k, v: k };
    let codec = codec(&geometry, text, &block);
    let mut bytes = vec![0xAB; 3];
    let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
    let bytes = &bytes[3..];
    assert_eq!(encoded.page_ends.len(), 4);
    assert_eq!(*encoded.page_ends.last().unwrap() as usize, bytes.len());
    assert_eq!(encoded.parts.total_bytes(), bytes.len() as u64);
    assert_eq!(encoded.key_bytes + encoded.value_bytes, bytes.len() as u64);
    assert!(encoded.page_ends.iter().all(|end| (*end as usize).is_multiple_of(PAGE_ALIGN)));
    let mut pages = Vec::new();
    for (index, (side, head)) in
        [(Side::Key, 0), (Side::Key, 1), (Side::Value, 0), (Side::Value, 1)].into_iter().enumerate()
    {
        let page = page(bytes, &encoded, index);
        pages.push(decode(&codec, side, head, page));
        let reader = PageReader::open_page(&codec, LAYER, side, head, page).unwrap();
        let dim = dim as usize;
        let mut whole = vec![0f32; tokens * dim];
        reader.decode_rows(0, tokens, &mut whole).unwrap();
        for (first, count) in [(0, 1), (tokens / 2, tokens - tokens / 2), (tokens - 1, 1), (0, 0)] {
            let mut part = vec![0f32; count * dim];
            reader.decode_rows(first, count, &mut part).unwrap();
            let wanted = &whole[first * dim..][..count * dim];
            assert!(part.iter().zip(wanted).all(|(a, b)| a.to_bits() == b.to_bits()), "{text}");
        }
        assert!(reader.decode_rows(tokens, 1, &mut vec![0.0; dim]).is_err());
        assert!(reader.decode_rows(0, 1, &mut vec![0.0; dim + 1]).is_err());
        assert!(reader.decode_rows(usize::MAX, 2, &mut []).is_err());
    }
    (pages, encoded.fallback_pages)
}

#[test]
fn every_shape_round_trips() {
    for text in SPECS {
        for dim in [32, 64, 80, 96, 128, 256] {
            for tokens in [1, 2, 8, 9, 33, 64] {
                let k = rows(&geometry(dim, DType::F16), tokens, 1);
                let (pages, fallback) = round_trip(text, dim, DType::F16, tokens, &k);
                assert_eq!(fallback, 0, "{text} dim {dim} tokens {tokens}");
                let half = k.len() / 2;
                for (page, original) in pages.iter().zip([&k[..half], &k[half..]].repeat(2)) {
                    let energy: f32 = original.iter().map(|x| x * x).sum();
                    let error: f32 =
                        original.iter().zip(page).map(|(a, b)| (a - b) * (a - b)).sum();
                    // Zeros would err as much as that; the coarsest codebooks hardly err less.
                    let coarse = ["d=16,b=2", "d=8,b=5"].iter().any(|book| text.contains(book));
                    let most = if coarse { 1.5 } else { 0.9 };
                    assert!(error < most * energy, "{text} dim {dim}: {error} of {energy}");
                }
            }
        }
    }
}

#[test]
fn every_finite_input_is_stored() {
    let dim = 32usize;
    let plain = rows(&geometry(32, DType::F16), 9, 2);
    let mut spike = plain.clone();
    spike[40] = 60000.0;
    let sign = |i: usize| if i.is_multiple_of(3) { -1.0 } else { 1.0 };
    let fill = |value: f32| (0..plain.len()).map(|i| value * sign(i)).collect::<Vec<_>>();
    let inputs = [
        ("zeros", DType::F16, vec![0.0; plain.len()]),
        ("constant", DType::F16, vec![0.5; plain.len()]),
        ("largest f16", DType::F16, fill(65504.0)),
        ("1e30", DType::F32, fill(1e30)),
        ("largest f32", DType::F32, fill(f32::MAX)),
        ("largest bf16", DType::BF16, fill(half::bf16::MAX.to_f32())),
        ("denormal f16", DType::F16, fill(2f32.powi(-24))),
        ("denormal f32", DType::F32, fill(f32::from_bits(1))),
        ("tiny constant", DType::F32, vec![1e-10; plain.len()]),
        ("not an f16", DType::F32, vec![0.1; plain.len()]),
        ("spike", DType::F16, spike),
    ];
    for text in SPECS {
        for (name, dtype, k) in &inputs {
            let (pages, _) = round_trip(text, 32, *dtype, 9, k);
            for page in pages {
                assert!(page.iter().all(|x| x.is_finite()), "{text}: {name}");
            }
        }
    }
    assert_eq!(plain.len(), 2 * 9 * dim);
}

#[test]
fn what_a_quantizer_cannot_hold_falls_back_to_raw_exactly() {
    let k = vec![1e30; 2 * 4 * 32];
    for text in [
        "kivi-4",
        "kvcomp",
        "vecinfer-2",
        "k=f16; v=hadamard/f16",
        "polar-4+4",
        "polar-4+2",
        "turbo-4",
        "k=lloyd(b=8); v=uniform(b=2,axis=token,mode=sym)",
    ] {
        let (pages, fallback) = round_trip(text, 32, DType::F32, 4, &k);
        assert_eq!(fallback, 4, "{text}");
        assert!(pages.iter().flatten().all(|x| *x == 1e30), "{text}");
    }
    // A hybrid group has an f32 zero point: a constant group is stored exactly.
    let constant = "k=uniform(b=2,axis=token,mode=hybrid); v=uniform(b=2,axis=channel,mode=hybrid)";
    let (pages, fallback) = round_trip(constant, 32, DType::F32, 4, &k);
    assert_eq!(fallback, 0);
    assert!(pages.iter().flatten().all(|x| *x == 1e30));
    let tiny = vec![3e-9; 2 * 4 * 32];
    for text in ["kivi-2", "turbo-3", "k=polar(a=4,r=4,g=64); v=uniform(b=2,axis=token,mode=sym)"] {
        let (pages, fallback) = round_trip(text, 32, DType::F32, 4, &tiny);
        assert_eq!((fallback, pages[0][0]), (4, 3e-9), "{text}");
    }
}

#[test]
fn nan_infinity_and_overflow_name_their_place() {
    let geometry = geometry(32, DType::F16);
    let good = rows(&geometry, 9, 3);
    for text in SPECS {
        let codec = codec(&geometry, text, &BlockRows { tokens: 9, k: &good, v: &good });
        for (bad, finite) in [(f32::NAN, false), (f32::NEG_INFINITY, false), (1e6, true)] {
            let mut v = good.clone();
            v[(9 + 5) * 32 + 7] = bad;
            let mut out = vec![1, 2, 3];
            let block = BlockRows { tokens: 9, k: &good, v: &v };
            let error = codec.encode_block(LAYER, &block, &mut out).unwrap_err();
            let (side, head, token, channel) = (Side::Value, 1, 5, 7);
            let wanted = if finite {
                CodecError::OutOfRange { side, head, token, channel, dtype: DType::F16 }
            } else {
                CodecError::NonFinite { side, head, token, channel }
            };
            assert_eq!(error, wanted);
            assert_eq!(error.code(), ErrorCode::NonFinite);
            assert_eq!(out, [1, 2, 3]);
        }
    }
}

#[test]
fn blocks_that_do_not_fit_are_refused() {
    let geometry = geometry(32, DType::F16);
    let k = rows(&geometry, 4, 4);
    let codec = codec(&geometry, "raw", &BlockRows { tokens: 4, k: &k, v: &k });
    let encode = |layer, tokens, k: &[f32], v: &[f32]| {
        let block = BlockRows { tokens, k, v };
        codec.encode_block(LayerIndex(layer), &block, &mut Vec::new()).unwrap_err().code()
    };
    assert_eq!(encode(2, 4, &k, &k), ErrorCode::ShapeMismatch);
    assert_eq!(encode(0, 0, &[], &[]), ErrorCode::ShapeMismatch);
    assert_eq!(encode(0, 5, &k, &k), ErrorCode::ShapeMismatch);
    assert_eq!(encode(0, 4, &k, &k[1..]), ErrorCode::ShapeMismatch);
    assert_eq!(encode(0, 65, &k, &k), ErrorCode::ShapeMismatch);
}

#[test]
fn a_reader_turns_to_pages_like_its_own_and_to_no_others() {
    let geometry = geometry(64, DType::F16);
    let mut turned = 0;
    for text in SPECS {
        let k = [1, 2].map(|seed| rows(&geometry, 40, seed));
        let codec = codec(&geometry, text, &BlockRows { tokens: 40, k: &k[0], v: &k[0] });
        let encode = |k: &[f32], tokens: usize| {
            let (k, mut bytes) = (&k[..k.len() / 40 * tokens], Vec::new());
            let block = BlockRows { tokens, k, v: k };
            let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
            (0..4).map(|index| page(&bytes, &encoded, index).to_vec()).collect::<Vec<_>>()
        };
        let (one, other, short) = (encode(&k[0], 40), encode(&k[1], 40), encode(&k[1], 39));
        for (index, side) in [(0, Side::Key), (2, Side::Value)] {
            let decode = |reader: &PageReader<'_>| {
                let mut out = vec![0f32; 40 * 64];
                reader.decode_rows(0, 40, &mut out).unwrap();
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let open = |page| PageReader::open_page(&codec, LAYER, side, 0, page).unwrap();
            let (mut reader, fresh) = (open(&one[index]), open(&other[index]));
            // Lengths of streams that do not add up, or an outlier of a row that there is not.
            let mut broken = other[index].clone();
            let place = match (fresh.stream_codes(), fresh.allocated_codes()) {
                (Some((_, scales)), _) => Some(scales.len()),
                (_, Some(codes)) if !codes.scales.is_empty() => Some(codes.codes.len() + 1),
                _ => None,
            };
            if let Some(place) = place {
                broken[HEADER_BYTES + place] ^= 0xFF;
                assert!(!reader.turn_to(&broken), "{text}");
            }
            // Another head, another side, other rows, half a page.
            let others = [&one[index + 1], &one[2 - index], &short[index]];
            for page in others.into_iter().map(|page| &page[..]).chain([&one[index][..40]]) {
                assert!(!reader.turn_to(page), "{text}");
            }
            // It is what it was.
            let before = open(&one[index]);
            assert_eq!((reader.header(), decode(&reader)), (before.header(), decode(&before)));
            // Gains, a fallback or another version of a table may be in the way.
            if !reader.turn_to(&other[index]) {
                continue;
            }
            turned += 1;
            reader.verify_checksum().unwrap();
            assert_eq!((reader.header(), decode(&reader)), (fresh.header(), decode(&fresh)));
        }
    }
    assert!(turned >= SPECS.len() * 3 / 2, "{turned} of {}", 2 * SPECS.len());
}
