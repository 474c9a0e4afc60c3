//! The hash that tells a range that is stored again from other content under the same range, made
//! so that a device computes it over its own memory as the host does over a message
//! (`kernels/include/kvd/region/copy.cuh`). It is here because a device's answer to
//! [`crate::RegionBackend::stage_rows`] holds it.
//!
//! Each word of eight bytes is mixed with its place by itself, one to one, and the results are
//! added up: in any order, so blocks of threads need not wait for each other. It keeps nobody out
//! who looks for two contents with one hash; a range is one tenant's own.

use crate::cpu::simd::{Simd, per_level};
use kvd_core::Side;
use std::sync::LazyLock;

/// From one place to the next.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
/// Factors of words and, at the end, of sums; odd, so that nothing is lost.
const MIX: [u64; 2] = [0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB];

/// The hash of K and V as they arrive.
#[must_use]
pub fn content_hash(k: &[u8], v: &[u8]) -> u64 {
    let sum = sum_of(Side::Key, k).wrapping_add(sum_of(Side::Value, v));
    content_hash_of(sum, [k, v].map(|bytes| bytes.len() as u64))
}

/// The hash from the sum over all words, and the lengths of K and V in bytes.
#[must_use]
pub fn content_hash_of(sum: u64, lengths: [u64; 2]) -> u64 {
    lengths.into_iter().fold(sum, |sum, length| mix_word(sum, length.wrapping_mul(STEP)))
}

/// The sum over the words of a payload; the last is filled up with zeros.
fn sum_of(side: Side, bytes: &[u8]) -> u64 {
    static WIDEST: LazyLock<Simd> = LazyLock::new(Simd::detect_widest);
    sum_with(*WIDEST, side, bytes)
}

fn sum_with(simd: Simd, side: Side, bytes: &[u8]) -> u64 {
    let (words, tail) = bytes.as_chunks::<8>();
    // Words of both sides have places of their own: K the odd ones, V the even ones.
    let place = |at: usize| STEP.wrapping_mul(2 * at as u64 + side.index() as u64 + 1);
    let sum = sum_words(simd, words, place(0));
    if tail.is_empty() {
        return sum;
    }
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    sum.wrapping_add(mix_word(u64::from_le_bytes(last), place(words.len())))
}

per_level!(fn sum_words(words: &[[u8; 8]], place: u64) -> u64 = sum_words_any);

#[inline(always)]
fn sum_words_any(words: &[[u8; 8]], mut place: u64) -> u64 {
    let mut sum = 0u64;
    for word in words {
        sum = sum.wrapping_add(mix_word(u64::from_le_bytes(*word), place));
        place = place.wrapping_add(STEP.wrapping_mul(2));
    }
    sum
}

/// SplitMix64's last steps. Without the first and the last shift a bit on top, the sign of every
/// fourth value, moves few others, and words that change places may go unseen.
#[inline(always)]
fn mix_word(word: u64, place: u64) -> u64 {
    let mixed = word ^ place;
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(MIX[0]);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(MIX[1]);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn what_is_remembered_is_the_same_in_every_build() {
        let bytes: Vec<u8> = (0..1001).map(|i| (i * 7 % 251) as u8).collect();
        let found = [content_hash(&[], &[]), content_hash(&bytes, &bytes[3..500])];
        assert_eq!(found.map(|hash| format!("{hash:016x}")), EXPECTED);
    }

    /// By Python, from the words of the definition above.
    const EXPECTED: [&str; 2] = ["0000000000000000", "4c71a57feade402b"];

    #[test]
    fn every_instruction_set_sums_the_same() {
        let bytes: Vec<u8> = (0..5003u32).map(|i| (i * i % 253) as u8).collect();
        for length in (0..70).chain([4096, 5003]) {
            for side in Side::BOTH {
                let sums = Simd::available_levels().into_iter();
                let mut sums = sums.map(|simd| sum_with(simd, side, &bytes[..length]));
                let first = sums.next().unwrap();
                assert!(sums.all(|sum| sum == first), "{length} bytes");
            }
        }
    }

    #[test]
    fn words_have_places_sides_and_lengths() {
        // What a sum of words alone, or of words times their places, takes for the same.
        let words: [u64; 6] = [0, 1, 1 << 63, 3, 3, u64::MAX];
        let bytes = |order: &[usize]| -> Vec<u8> {
            order.iter().flat_map(|at| words[*at].to_le_bytes()).collect()
        };
        let orders = [
            [0, 1, 2, 3, 4, 5],
            [1, 0, 2, 3, 4, 5],
            [5, 0, 1, 2, 3, 4],
            [2, 1, 0, 3, 4, 5],
            [0, 0, 2, 3, 4, 5],
            [3, 4, 5, 0, 1, 2],
        ];
        let all: HashSet<u64> =
            orders.iter().map(|order| content_hash(&bytes(order), &bytes(order))).collect();
        assert_eq!(all.len(), orders.len());
        let [a, b] = [bytes(&orders[0]), bytes(&orders[1])];
        assert_ne!(content_hash(&a, &b), content_hash(&b, &a), "K and V change sides");
        let both = [&a[..], &b[..]].concat();
        assert_ne!(content_hash(&a, &b), content_hash(&both, &[]), "V goes on where K ends");
        assert_ne!(content_hash(&a, &[0; 8]), content_hash(&a, &[0; 7]), "zeros are content");
        assert_ne!(content_hash(&[], &[0; 2]), content_hash(&[0; 2], &[]));
    }

    #[test]
    fn no_two_places_take_a_bit_for_the_same() {
        // Else words that differ in it might change places.
        for word in [0, 0x3C00_3C01_BC02_3C03, u64::MAX] {
            for bit in 0..64 {
                let moved = |at: u64| {
                    let place = STEP.wrapping_mul(2 * at + 1);
                    mix_word(word ^ 1 << bit, place).wrapping_sub(mix_word(word, place))
                };
                let all: HashSet<u64> = (0..2000).map(moved).collect();
                assert_eq!(all.len(), 2000, "bit {bit} of {word:x}");
            }
        }
    }

    #[test]
    fn each_bit_of_the_content_turns_about_half_of_the_hash() {
        let content: Vec<u8> = (0..96u32).map(|i| (i * 37 % 256) as u8).collect();
        let (k, v) = content.split_at(61);
        let hash = content_hash(k, v);
        let mut turned = 0;
        for bit in 0..8 * content.len() {
            let mut other = content.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            let difference = (content_hash(&other[..61], &other[61..]) ^ hash).count_ones();
            assert!(difference > 8, "bit {bit} turns {difference}");
            turned += difference;
        }
        let mean = f64::from(turned) / content.len() as f64 / 8.0;
        assert!((30.0..34.0).contains(&mean), "{mean} bits of 64");
    }

    proptest! {
        #[test]
        fn one_word_that_differs_is_always_seen(
            mut bytes in prop::collection::vec(any::<u8>(), 8..200),
            at in any::<prop::sample::Index>(),
            to in any::<u8>(),
        ) {
            let hash = content_hash(&[], &bytes);
            let at = at.index(bytes.len());
            prop_assume!(bytes[at] != to);
            bytes[at] = to;
            prop_assert_ne!(content_hash(&[], &bytes), hash);
        }

        #[test]
        fn rows_that_change_places_are_seen(
            rows in prop::collection::vec(prop::array::uniform16(0u16..4), 2..20),
            first in any::<prop::sample::Index>(),
            second in any::<prop::sample::Index>(),
        ) {
            let [first, second] = [first, second].map(|index| index.index(rows.len()));
            prop_assume!(rows[first] != rows[second]);
            let bytes = |rows: &[[u16; 16]]| -> Vec<u8> {
                rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect()
            };
            let hash = content_hash(&bytes(&rows), &[]);
            let mut other = rows;
            other.swap(first, second);
            prop_assert_ne!(content_hash(&bytes(&other), &[]), hash);
        }
    }
}
