//! The fuzz corpus and deterministic mutations of it, without a fuzzer: `fuzz/` runs the same
//! code on bytes of its own choosing.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

use kvd_codec::HEADER_BYTES;
use kvd_core::Side;
use kvd_testkit::hostile::{
    HostileSubject, SPECS, calibration_read, make_subjects, page_decode, page_input, spec_parse,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use xxhash_rust::xxh3::Xxh3;

static SUBJECTS: LazyLock<Vec<HostileSubject>> = LazyLock::new(make_subjects);

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

/// The seeds as they should be: name and bytes.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let subjects = SUBJECTS.iter().enumerate();
    match target {
        "page_decode" => subjects
            .flat_map(|(index, subject)| {
                Side::BOTH.map(|side| {
                    let page = &subject.pages[side.index()];
                    (format!("{index}-{side}"), page_input(index, side, page))
                })
            })
            .collect(),
        "spec_parse" => {
            let policy = "k=raw; v=raw; k[layer=0-1,head=2]=fp8; sink=4; recent=9";
            let texts = SPECS.into_iter().chain([policy, "kivi-4", "vecinfer-2", "kvd-2"]);
            texts.enumerate().map(|(i, text)| (i.to_string(), text.into())).collect()
        }
        _ => subjects
            .filter_map(|(index, subject)| {
                Some((index.to_string(), subject.calibration.as_ref()?.to_bytes()))
            })
            .collect(),
    }
}

/// Every file of a target's corpus: seeds, and what a fuzzer has found.
fn inputs(target: &str) -> Vec<Vec<u8>> {
    let mut paths: Vec<_> =
        fs::read_dir(corpus(target)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// A page with a valid checksum.
fn with_checksum(mut page: Vec<u8>) -> Vec<u8> {
    let mut hash = Xxh3::new();
    hash.update(&page[..24]);
    hash.update(&[0; 8]);
    hash.update(&page[HEADER_BYTES..]);
    page[24..HEADER_BYTES].copy_from_slice(&hash.digest().to_le_bytes());
    page
}

#[test]
fn the_corpus_holds_todays_seeds() {
    for target in ["page_decode", "spec_parse", "calibration_read"] {
        for (name, bytes) in seeds(target) {
            let path = corpus(target).join(&name);
            if std::env::var_os("KVD_BLESS").is_some() {
                fs::create_dir_all(corpus(target)).unwrap();
                fs::write(&path, &bytes).unwrap();
            }
            let held = fs::read(&path).unwrap_or_default();
            assert!(held == bytes, "KVD_BLESS=1 rewrites {}", path.display());
            let opens = match target {
                "page_decode" => page_decode(&SUBJECTS, &bytes),
                "spec_parse" => spec_parse(&bytes),
                _ => calibration_read(&bytes),
            };
            assert!(opens, "{target} {name}");
        }
    }
}

#[test]
fn mutated_pages_never_panic() {
    for input in inputs("page_decode") {
        page_decode(&SUBJECTS, &input);
        for bit in 0..8 * input.len() {
            let mut bent = input.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            page_decode(&SUBJECTS, &bent);
        }
        for length in 0..input.len() {
            page_decode(&SUBJECTS, &input[..length]);
        }
    }
}

/// Every header byte set to every value, under a checksum that is right: only the fields
/// themselves can give such a page away.
#[test]
fn edited_headers_under_a_right_checksum_never_panic() {
    for (index, subject) in SUBJECTS.iter().enumerate() {
        for side in Side::BOTH {
            let page = &subject.pages[side.index()];
            for at in 0..24 {
                for value in 0..=255u8 {
                    let mut edited = page.clone();
                    edited[at] = value;
                    let edited = with_checksum(edited);
                    let opened = page_decode(&SUBJECTS, &page_input(index, side, &edited));
                    // A reader knows every bit of most fields. But another count of tokens or
                    // length within the padding may pass until rows are read, any of several tables
                    // is valid, and a page may call itself a fallback.
                    let free = matches!(at, 7 | 8 | 9 | 16 | 17 | 20);
                    let changed = value != page[at];
                    assert!(!opened || free || !changed, "{} {at} {value}", SPECS[index]);
                }
            }
        }
    }
}

/// Payload bytes replaced under a header that opens: every stream and code gets to be read.
#[test]
fn foreign_payloads_never_panic() {
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize
    };
    for _ in 0..20_000 {
        let length = random() % 300;
        let mut input: Vec<u8> = (0..1 + length).map(|_| random() as u8).collect();
        input[0] |= 1 << 7;
        page_decode(&SUBJECTS, &input);
    }
    let mut opened = 0;
    for (index, subject) in SUBJECTS.iter().enumerate() {
        for side in Side::BOTH {
            for _ in 0..200 {
                let mut page = subject.pages[side.index()].clone();
                for _ in 0..1 + random() % 8 {
                    let at = HEADER_BYTES + random() % (page.len() - HEADER_BYTES);
                    page[at] = random() as u8;
                }
                opened += usize::from(page_decode(&SUBJECTS, &page_input(index, side, &page)));
            }
        }
    }
    assert!(opened > 1000, "{opened}: mutated pages must reach the decoders");
}

#[test]
fn bent_specs_and_calibrations_never_panic() {
    for input in inputs("spec_parse") {
        for at in 0..input.len() {
            for byte in [0, b' ', b'0', b'9', b'=', b'(', b')', b',', b'/', b'+', b';', 0xFF] {
                let mut bent = input.clone();
                bent[at] = byte;
                spec_parse(&bent);
            }
            spec_parse(&input[..at]);
        }
    }
    for input in inputs("calibration_read") {
        // The length and the JSON header at every byte, the values after it here and there.
        let header = 8 + u64::from_le_bytes(input[..8].try_into().unwrap()) as usize;
        let places = (0..header).chain((header..input.len()).step_by(97));
        for at in places {
            for change in [1u8, 0x80, 0xFF] {
                let mut bent = input.clone();
                bent[at] ^= change;
                calibration_read(&bent);
            }
        }
        for length in (0..input.len()).step_by(13) {
            calibration_read(&input[..length]);
        }
    }
}
