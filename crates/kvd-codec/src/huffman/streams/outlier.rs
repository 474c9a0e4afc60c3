//! Outliers: places in a chunk whose stored codes are cut off, and the missing rest.
//!
//! A word of 16 bits says by how many places the next outlier lies further (low 12 bits, places
//! counted row after row), and what is added there, -7 to 7 (high 4 bits). 0 adds nothing and only
//! moves on; -8 takes the next word for the rest.

use super::WORD_BITS;

/// Largest step from one outlier to the next.
const GAP_MAX: usize = (1 << GAP_BITS) - 1;
const GAP_BITS: u32 = 12;
/// Largest rest that lies in the word itself.
const SHORT_MAX: u32 = 7;
/// Rests that are looked at together.
const PASSED: usize = 32;
/// The rest is in the next word.
const LONG: i16 = -8;

/// Bytes of a word.
pub(crate) const OUTLIER_BYTES: usize = 2;

/// A code that the streams hold cut off, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeOutlier {
    /// Row, counted in the chunk.
    pub token: usize,
    /// Position in the row.
    pub position: usize,
    /// Difference between the true code and the stored one.
    pub rest: i32,
}

/// Bits of an outlier that lies near the one before.
pub fn outlier_bits(rest: i32) -> u64 {
    match rest.unsigned_abs() {
        0 => 0,
        1..=SHORT_MAX => u64::from(WORD_BITS),
        _ => u64::from(2 * WORD_BITS),
    }
}

/// Appends the outliers of the rests of all places; returns their words.
pub(crate) fn append_outliers(rests: &[i32], out: &mut Vec<u8>) -> usize {
    let start = out.len();
    let mut last = 0;
    let mut word = |word: i16| out.extend(word.to_le_bytes());
    // Most rests are none: many are passed over together.
    let parts = rests.chunks(PASSED).zip((0..).step_by(PASSED));
    let parts = parts.filter(|(part, _)| part.iter().fold(0, |any, rest| any | rest) != 0);
    let all = parts.flat_map(|(part, first)| (first..).zip(part));
    for (place, rest) in all.filter(|(_, rest)| **rest != 0) {
        let mut gap = place - last;
        last = place;
        while gap > GAP_MAX {
            word(GAP_MAX as i16);
            gap -= GAP_MAX;
        }
        if rest.unsigned_abs() <= SHORT_MAX {
            word((rest << GAP_BITS) as i16 | gap as i16);
            continue;
        }
        let mut left = *rest;
        while left != 0 {
            let part = left.clamp(-i32::from(i16::MAX), i32::from(i16::MAX));
            word(LONG << GAP_BITS | gap as i16);
            word(part as i16);
            left -= part;
            gap = 0;
        }
    }
    (out.len() - start) / OUTLIER_BYTES
}

/// Place and rest of each outlier; no rest where its word is missing.
pub(crate) fn read_outliers(bytes: &[u8]) -> impl Iterator<Item = (usize, Option<i32>)> + use<'_> {
    let mut words =
        bytes.as_chunks::<OUTLIER_BYTES>().0.iter().map(|word| i16::from_le_bytes(*word));
    let mut place = 0;
    std::iter::from_fn(move || {
        loop {
            let word = words.next()?;
            place += usize::from(word as u16 & GAP_MAX as u16);
            match word >> GAP_BITS {
                0 => {}
                LONG => return Some((place, words.next().map(i32::from))),
                rest => return Some((place, Some(i32::from(rest)))),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rests_come_back_and_take_the_bits_that_are_counted(
            picks in proptest::collection::vec(
                (0usize..30_000, prop_oneof![-7i32..=7, -70_000i32..=70_000]), 0..40),
        ) {
            let mut rests = vec![0; 30_000];
            picks.iter().for_each(|(place, rest)| rests[*place] = *rest);
            let mut bytes = Vec::new();
            let words = append_outliers(&rests, &mut bytes);
            prop_assert_eq!(bytes.len(), OUTLIER_BYTES * words);
            let mut back = vec![0; rests.len()];
            read_outliers(&bytes).for_each(|(place, rest)| back[place] += rest.unwrap());
            prop_assert_eq!(&back, &rests);
            // Long ways and rests beyond a word take more.
            let counted: u64 = rests.iter().map(|rest| outlier_bits(*rest)).sum();
            prop_assert!(8 * bytes.len() as u64 >= counted);
            if rests.iter().all(|rest| rest.abs() < 32_768) {
                prop_assert!(8 * bytes.len() as u64 <= counted + 16 * (30_000 / 4095 + 1));
            }
        }
    }

    #[test]
    fn a_rest_without_its_word_is_told() {
        let mut bytes = Vec::new();
        append_outliers(&[0, 100], &mut bytes);
        assert_eq!(read_outliers(&bytes[..2]).collect::<Vec<_>>(), [(1, None)]);
    }
}
