//! Any bytes as a record: an error, or exactly a record that was written.

use super::model::{block_draft, block_name};
use crate::record::{FramePlace, probe_bytes, probe_unchecked};
use proptest::prelude::*;
use std::fs;
use std::path::Path;

fn record_bytes(chain: u64) -> Vec<u8> {
    let mut record = block_draft(&block_name(chain, 1)).seal_record();
    record.frame_at(&FramePlace::default()).to_vec()
}

/// Bytes of the header, directory and payload that a checksum covers.
fn covered_bytes(chain: u64) -> usize {
    let record = block_draft(&block_name(chain, 1)).seal_record();
    record.header.head_bytes as usize
}

/// `KVD_BLESS=1` writes them, after a change of the format.
#[test]
fn seeds_of_the_fuzzer_are_records() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/record_read");
    for chain in [2, 3] {
        let path = corpus.join(chain.to_string());
        if std::env::var_os("KVD_BLESS").is_some() {
            fs::create_dir_all(&corpus).unwrap();
            fs::write(&path, record_bytes(chain)).unwrap();
        }
        assert!(probe_bytes(&fs::read(&path).unwrap()), "{}", path.display());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn random_bytes_are_no_record(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
        prop_assert!(!probe_bytes(&bytes));
        probe_unchecked(&bytes);
    }

    #[test]
    fn mutated_record_is_refused(
        chain in 0_u64..20,
        changes in prop::collection::vec((any::<prop::sample::Index>(), 1_u8..), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = record_bytes(chain);
        prop_assert!(probe_bytes(&bytes));
        let covered = covered_bytes(chain);
        let mut touched = std::collections::BTreeMap::new();
        for (index, change) in &changes {
            let at = index.index(covered);
            bytes[at] ^= change;
            *touched.entry(at).or_insert(0) ^= change;
        }
        // Fields of the directory, under checksums that fit: parsed, not believed.
        probe_unchecked(&bytes);
        if touched.values().any(|change| *change != 0) {
            prop_assert!(!probe_bytes(&bytes));
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
            prop_assert!(!probe_bytes(&bytes));
            probe_unchecked(&bytes);
        }
    }
}
