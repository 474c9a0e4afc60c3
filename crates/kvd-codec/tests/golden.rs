//! Pages as they are on disk today. A change here is a change of the format: raise its version.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{SPECS, codec, geometry, rows};
use kvd_codec::{BlockRows, ModelCodec, Page};
use kvd_core::{DType, LayerIndex};
use std::fmt::Write;

const LAYER: LayerIndex = LayerIndex(0);
const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/pages.txt");

fn encode(codec: &ModelCodec, block: &BlockRows<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec.encode_block(LAYER, block, &mut bytes).unwrap();
    bytes
}

/// One line per codec: its text, the length of a block of layer 0, and its pages in hex.
fn render() -> String {
    let geometry = geometry(32, DType::F16);
    let k = rows(&geometry, 9, 11);
    let v = rows(&geometry, 9, 12);
    let mut text = String::new();
    for spec in SPECS {
        let block = BlockRows { tokens: 9, k: &k, v: &v };
        let codec = codec(&geometry, spec, &block);
        let bytes = encode(&codec, &block);
        write!(text, "{spec}\t{}\t", bytes.len()).unwrap();
        for byte in &bytes {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
    }
    text
}

#[test]
fn pages_are_golden() {
    let rendered = render();
    if std::env::var_os("KVD_BLESS").is_some() {
        std::fs::write(PATH, &rendered).unwrap();
    }
    let golden = std::fs::read_to_string(PATH).unwrap();
    for (now, then) in rendered.lines().zip(golden.lines()) {
        assert_eq!(now, then, "KVD_BLESS=1 rewrites {PATH}");
    }
    assert_eq!(rendered.lines().count(), golden.lines().count());
}

#[test]
fn golden_pages_parse() {
    let golden = std::fs::read_to_string(PATH).unwrap();
    for line in golden.lines() {
        let hex = line.rsplit('\t').next().unwrap();
        let bytes: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
            .collect();
        let length = 32 + u32::from_le_bytes(bytes[20..24].try_into().unwrap()) as usize;
        let page = Page::parse_page(&bytes[..length.next_multiple_of(16)]).unwrap();
        page.verify_checksum().unwrap();
        assert_eq!((page.header().tokens, page.header().dim), (9, 32));
    }
}
