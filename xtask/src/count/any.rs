//! Kernels for any shape with the shapes of presets: of uniform levels what launches take where no
//! kernel has the shape as constants, as with one and eight query rows; of codebooks of floats all.

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

/// Codebooks of floats, one set for a head, whose first entries registers hold: sub-vectors and
/// positions are powers of two, so that nothing is divided.
const FLOATS: Rules = Rules {
    never: &[
        "return number < by ? 0 : number / by;",
        "default: return Scores<Vq, ROWS>::tile(shared, side, tile);",
        "default: return Base::absorb(side, tile, shared);",
        "for (unsigned left = bits; left > 0;) {",
        "if (bits == 16) {",
        "if (stride != 0) {",
    ],
    always: &["if (bits >= 8) {", "if (stop.place.to != 0)"],
    turns: &[("for (unsigned part = FIRST + warp_index(); part < PIECES;", 0.75)],
    ..NONE
};
/// Entries of four channels.
const FOURS: Rules =
    Rules { never: &["case 1: return this->template", "case 4: return this->template"], ..NONE };
/// Entries of eight.
const EIGHTS: Rules =
    Rules { never: &["case 1: return this->template", "case 2: return this->template"], ..NONE };
/// 12 bits for four channels: 3 KiB of a tile, 32 positions of a token. What a turn over tokens
/// does for its four codes stands there twice each, and is taken for two turns: so they are twice
/// as many.
const IN_THREES: Rules = Rules {
    turns: &[
        ("for (; left > 1; left -= 2)", 1.0),
        ("first < end; first += warps * CODE_GROUP", 2.0),
        ("at < least(end, first + CODE_GROUP); at++", 4.0),
        ("start < codes.tokens; start += step", 4.0),
        ("stage < side.stages; stage++", 1.0),
    ],
    skipped: &[("width > 0; width /= 2", "LDS", &[true, false, false])],
    ..NONE
};
/// 12 bits for eight: 1.5 KiB, 16 positions.
const IN_ONE_AND_A_HALF: Rules = Rules {
    turns: &[
        ("for (; left > 1; left -= 2)", 0.5),
        ("first < end; first += warps * CODE_GROUP", 1.0),
        ("at < least(end, first + CODE_GROUP); at++", 4.0),
        ("start < codes.tokens; start += step", 2.0),
        ("stage < side.stages; stage++", 1.0),
    ],
    skipped: &[("width > 0; width /= 2", "LDS", &[true, false, false])],
    ..NONE
};
/// Two stages of 8 bits for four: 4 KiB, 64 positions.
const IN_STAGES: Rules = Rules {
    turns: &[
        ("for (; left > 1; left -= 2)", 8.0 / 2.0 / 3.0),
        ("first < end; first += warps * CODE_GROUP", 4.0),
        ("at < least(end, first + CODE_GROUP); at++", 4.0),
        ("start < codes.tokens; start += step", 4.0),
        ("stage < side.stages; stage++", 2.0),
    ],
    skipped: &[("width > 0; width /= 2", "LDS", &[false, false, false])],
    ..NONE
};

const fn of_uniform(codec: &'static str, kernel: &'static str, rules: &'static [Rules]) -> Row {
    of_tiles(codec, "attend_uniform", kernel, 2, rules)
}

const fn of_floats(codec: &'static str, rules: &'static [Rules]) -> Row {
    of_tiles(codec, "attend_vq", "kvd_attend_vqfloat_vqfloat_4", 1, rules)
}

pub(super) const ROWS: &[Row] = &[
    of_floats("vecinfer-3", &[IN_THREES, FOURS, FLOATS]),
    of_floats("vecinfer-1.5", &[IN_ONE_AND_A_HALF, EIGHTS, FLOATS]),
    of_floats("vq-residual-4", &[IN_STAGES, FOURS, FLOATS]),
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
