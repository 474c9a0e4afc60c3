//! The kernel for any shape of uniform levels, with the shapes of presets: what launches take where
//! no kernel has the shape as constants, as with one and eight query rows.

use super::codecs::{FOUR_BITS, NONE, Row, TWO_BITS, of_tiles};
use super::marks::Rules;

/// As of every kernel, where keys' scales go into the queries of every tile: what only the first
/// tile does shares its end with that, and what codes do that are not plain with what others do.
const FOLDS: Rules = Rules {
    never: &[
        "const float largest = largest_of(order, side, tile, query);",
        "return number < by ? 0 : number / by;",
        "any_words(codes, step, token, words);",
    ],
    always: &[
        "if (codes.words())",
        "if (stop.place.to != 0)",
        "if (tile < count)",
        "if (folds && tile < count)",
    ],
    ..NONE
};

/// Keys of 128 positions, and a scale of each channel, of which a lane has four, and none of the
/// four that longer rows would have.
const BY_CHANNEL: Rules = Rules {
    always: &["if (scales_channels(side))"],
    skipped: &[
        ("index < KEPT; index++", "LDG", &[true, false]),
        ("index < KEPT; index++", "STS", &[true, false]),
    ],
    ..NONE
};
/// Columns of values that are dealt to lanes, as up to four query rows have them.
const DEALT: Rules = Rules { always: &["if (FEW && deals() &&"], ..NONE };

/// Steps of 128 positions, in codes of four or two bits. Of up to four rows the compiler makes one
/// of what codes of several widths do, and the longest of them is counted.
const FOUR_STEPS: Rules = Rules {
    never: &[
        "case 0: return each_plain_of<0>(mine, use);",
        "default: return each_plain_of<3>(mine, use);",
    ],
    always: &["if (count == 4)"],
    ..NONE
};

const fn of_uniform(codec: &'static str, kernel: &'static str, rules: &'static [Rules]) -> Row {
    of_tiles(codec, "attend_uniform", kernel, 2, rules)
}

pub(super) const ROWS: &[Row] = &[
    of_uniform(
        "kivi-4-any-1",
        "kvd_attend_uniform_uniform_1",
        &[FOUR_BITS, BY_CHANNEL, DEALT, FOLDS],
    ),
    of_uniform(
        "kivi-4-any-4",
        "kvd_attend_uniform_uniform_4",
        &[FOUR_BITS, BY_CHANNEL, DEALT, FOLDS],
    ),
    of_uniform(
        "kivi-4-any-8",
        "kvd_attend_uniform_uniform_8",
        &[FOUR_BITS, BY_CHANNEL, FOUR_STEPS, FOLDS],
    ),
    of_uniform(
        "kivi-2-any-1",
        "kvd_attend_uniform_uniform_1",
        &[TWO_BITS, BY_CHANNEL, DEALT, FOLDS],
    ),
    of_uniform(
        "kivi-2-any-4",
        "kvd_attend_uniform_uniform_4",
        &[TWO_BITS, BY_CHANNEL, DEALT, FOLDS],
    ),
    of_uniform(
        "kivi-2-any-8",
        "kvd_attend_uniform_uniform_8",
        &[TWO_BITS, BY_CHANNEL, FOUR_STEPS, FOLDS],
    ),
];
