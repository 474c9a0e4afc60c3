//! Bytes that are no page, or were one: a typed error or finished rows, never a panic.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{SPECS, codec, geometry, page, rows};
use kvd_codec::{BlockRows, EncodedBlock, HEADER_BYTES, ModelCodec, Page, PageError, PageReader};
use kvd_core::{DType, LayerIndex, Side};
use proptest::prelude::*;
use std::sync::LazyLock;

const LAYER: LayerIndex = LayerIndex(0);
const TOKENS: usize = 19;

/// A codec, its encoded block and the block's layout.
type Example = (ModelCodec, Vec<u8>, EncodedBlock);

static EXAMPLES: LazyLock<Vec<Example>> = LazyLock::new(|| {
    let geometry = geometry(32, DType::F16);
    let k = rows(&geometry, TOKENS, 9);
    let block = BlockRows { tokens: TOKENS, k: &k, v: &k };
    let example = |text: &&str| {
        let codec = codec(&geometry, text, &block);
        let mut bytes = Vec::new();
        let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        (codec, bytes, encoded)
    };
    SPECS.iter().map(example).collect()
});

/// Opens and reads whatever opens, skipping the checksum on purpose.
fn read(codec: &ModelCodec, side: Side, bytes: &[u8]) -> Result<(), PageError> {
    let reader = PageReader::open_page(codec, LAYER, side, 0, bytes)?;
    let verified = reader.verify_checksum();
    let tokens = reader.tokens();
    let mut out = vec![0f32; tokens * 32];
    reader.decode_rows(0, tokens, &mut out)?;
    reader.decode_rows(tokens - 1, 1, &mut out[..32])?;
    verified
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_pages_are_errors(
        which in 0..SPECS.len(),
        value in any::<bool>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4),
        in_header in any::<bool>(),
    ) {
        let (codec, bytes, encoded) = &EXAMPLES[which];
        let side = if value { Side::Value } else { Side::Key };
        let original = page(bytes, encoded, 2 * side.index());
        let mut mutated = original.to_vec();
        for (at, change) in changes {
            let span = if in_header { HEADER_BYTES } else { mutated.len() };
            mutated[at.index(span)] ^= change;
        }
        if mutated != original {
            prop_assert!(read(codec, side, &mutated).is_err());
        }
    }

    #[test]
    fn resized_pages_are_errors(which in 0..SPECS.len(), cut in any::<prop::sample::Index>()) {
        let (codec, bytes, encoded) = &EXAMPLES[which];
        let original = page(bytes, encoded, 0);
        prop_assert!(read(codec, Side::Key, &original[..cut.index(original.len())]).is_err());
        let mut longer = original.to_vec();
        longer.resize(original.len() + 1 + cut.index(40), 0);
        prop_assert!(read(codec, Side::Key, &longer).is_err());
    }

    #[test]
    fn random_bytes_behind_a_good_header_never_panic(
        which in 0..SPECS.len(),
        noise in proptest::collection::vec(any::<u8>(), 1..400),
    ) {
        let (codec, bytes, encoded) = &EXAMPLES[which];
        let mut page = page(bytes, encoded, 0).to_vec();
        for (byte, noise) in page[HEADER_BYTES..].iter_mut().zip(noise.iter().cycle()) {
            *byte = *noise;
        }
        let _ = read(codec, Side::Key, &page);
    }

    #[test]
    fn random_bytes_are_no_page(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Page::parse_page(&bytes).is_err());
    }
}

#[test]
fn a_page_of_another_place_or_codec_is_refused() {
    let (codec, bytes, encoded) = &EXAMPLES[0];
    let field = |result: Result<PageReader<'_>, PageError>| match result {
        Err(PageError::Field { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    let key = page(bytes, encoded, 0);
    assert_eq!(field(PageReader::open_page(codec, LAYER, Side::Value, 0, key)), "side");
    assert_eq!(field(PageReader::open_page(codec, LAYER, Side::Key, 1, key)), "head");
    assert_eq!(field(PageReader::open_page(codec, LayerIndex(1), Side::Key, 0, key)), "layer");
    for (other, ..) in &EXAMPLES[1..] {
        assert_eq!(field(PageReader::open_page(other, LAYER, Side::Key, 0, key)), "codec_tag");
    }
}
