//! What is counted: a row per codec and kernel, and what its full tiles of 128 channels do that the
//! source does not say. Texts are the source's, whatever line they stand on.

use super::marks::Rules;

/// A codec, and the kernel that serves four query rows of it.
pub(super) struct Row {
    pub(super) codec: &'static str,
    /// A file in `kernels/`, without its end.
    pub(super) file: &'static str,
    pub(super) kernel: &'static str,
    /// Tiles of a turn.
    pub(super) tiles: u32,
    /// Whether all of the kernel is counted, which stores a page, and not a turn of its loop over
    /// tiles.
    pub(super) whole: bool,
    /// Verbs of which the longest path has those of one of two tiles: the compiler made a branch of
    /// whether there is a second one. They are counted twice.
    pub(super) again: &'static [&'static str],
    /// The first that names a loop says how often it turns.
    pub(super) rules: &'static [Rules],
}

impl Row {
    /// Query rows of the kernel, which its name ends with; four where it does not.
    pub(super) fn query_rows(&self) -> usize {
        self.kernel.rsplit('_').next().and_then(|rows| rows.parse().ok()).unwrap_or(4)
    }
}

/// Of every kernel.
pub(super) const ALWAYS: Rules = Rules {
    never: &[
        // No power of two.
        "return number < by ? 0 : number / by;",
        // The unit's first tile.
        "fold_first(shared, side, tile);",
        // Codes that are not plain, or no whole words.
        "for (unsigned step = 0; step < steps(); step++)",
        "return each_of_any(codes, token, use);",
        "return any_values(codes, quad, to);",
    ],
    always: &[
        "if (is_plain(codes))",
        "if (codes.words())",
        // Full tiles, two together, of which all is seen.
        "if (stop.place.to != 0)",
        "if (tile < count)",
        "if (folds && tile < count)",
    ],
    turns: &[],
    unrolled: &[],
    skipped: &[],
};

/// No rules.
pub(super) const NONE: Rules =
    Rules { never: &[], always: &[], turns: &[], unrolled: &[], skipped: &[] };

/// So many copies of a warp for 64 tokens, in pieces that the warps share, of which the last,
/// gains, is nothing.
pub(super) const fn copies(pieces: f64, copies: f64) -> [(&'static str, f64); 2] {
    [
        ("for (unsigned part = FIRST + warp_index(); part < PIECES;", pieces / 4.0),
        ("for (; left > 1; left -= 2)", copies / 2.0 / pieces),
    ]
}

/// Four bits with scales, of 1 KiB a side and stop: 10 KiB.
pub(super) const FOUR_BITS: Rules = Rules { turns: &copies(5.0, 20.0), ..NONE };
/// Two bits with scales: 6 KiB.
pub(super) const TWO_BITS: Rules = Rules { turns: &copies(5.0, 12.0), ..NONE };
/// Two bits without: 4 KiB.
pub(super) const TWO_BITS_ALONE: Rules = Rules { turns: &copies(3.0, 8.0), ..NONE };
/// Four bits without: 8 KiB.
const FOUR_BITS_ALONE: Rules = Rules { turns: &copies(3.0, 16.0), ..NONE };
/// Four bits, of values with scales: 9 KiB.
pub(super) const POLAR: Rules = Rules { turns: &copies(5.0, 18.0), ..NONE };
/// Keys of 128 positions, a lane's sixteen codes of a tile, four at once.
const IN_FOUR: Rules = Rules { turns: &[("chunk < chunks; chunk++", 4.0)], ..NONE };
/// The same where registers hold the levels: the compiler put two turns into one, products say.
const TWO_IN_FOUR: Rules = Rules { turns: &[("chunk < chunks; chunk++", 2.0)], ..NONE };
/// Four bits and a scale of each token: 8.4 KiB.
pub(super) const TURNED: Rules = Rules { turns: &copies(5.0, 17.0), ..NONE };

/// Of rows of two bytes: four copies of a thread and side, and gains, which there are none of.
const HALVES: Rules = Rules {
    turns: &[
        ("for (unsigned part = FIRST + warp_index(); part < PIECES;", 0.25),
        ("for (; left > 1; left -= 2)", 0.0),
        ("at + (TURNS - 1) * TURN < bytes; at += TURNS * TURN", 1.0),
        ("for (; at < bytes; at += TURN)", 0.0),
        ("for (unsigned group = 0; group < count; group++)", 2.0),
    ],
    unrolled: &[("unit < UNITS; unit++", "HMMA", 8)],
    ..NONE
};

/// Of fp8: two copies.
const FP8: Rules = Rules {
    never: &["for (unsigned mine = 0; mine < units; mine++)"],
    turns: &[
        ("for (unsigned part = FIRST + warp_index(); part < PIECES;", 0.25),
        ("for (; left > 1; left -= 2)", 0.0),
        ("at + (TURNS - 1) * TURN < bytes; at += TURNS * TURN", 1.0),
        ("for (; at < bytes; at += TURN)", 0.0),
        // All eight steps at once.
        ("step + 1 < count; step += 2", 1.0),
    ],
    unrolled: &[("unit < UNITS; unit++", "HMMA", 8)],
    ..NONE
};

/// Two tiles whose chunk is decoded, to bytes: decoding is not counted.
const DECODED: Rules = Rules {
    never: &[
        "sums.settle(parameters, value);",
        "decode(seen, unsigned(place.page",
        "case 1: return each_plain_of<1>(mine, use);",
        "case 2: return each_plain_of<2>(mine, use);",
        "default: return each_plain_of<3>(mine, use);",
    ],
    always: &["if (count == 4)"],
    turns: &[
        ("for (unsigned part = FIRST + warp_index(); part < PIECES;", 0.75),
        ("for (; left > 1; left -= 2)", 0.5),
        ("for (unsigned step = 0; step < count; step += STEPS)", 4.0),
        ("at < list.length; at += parts", 0.0),
        ("part == 0 && at < list.count; at++", 0.0),
        ("low < high;", 2.0),
    ],
    unrolled: &[("block < BLOCKS; block++", "IMMA", 4)],
    ..NONE
};

/// Of groups that choose their mode: of each side a mask, 1.5 KiB of scales and 2 KiB of codes.
const CHOSEN: Rules = Rules {
    turns: &[
        ("for (unsigned part = FIRST + warp_index(); part < PIECES;", 7.0 / 4.0),
        ("for (; left > 1; left -= 2)", 6.0 / 7.0),
    ],
    ..NONE
};

/// Of a bit allocation in groups, levels of one byte: eight groups of keys, in runs of which two
/// have an odd number, and of values two of each warp; 4 KiB of codes; in every other page one
/// outlier of a side.
const GROUPS: Rules = Rules {
    turns: &[
        ("for (unsigned part = FIRST + warp_index(); part < PIECES;", 0.75),
        ("for (; left > 1; left -= 2)", 8.0 / 2.0 / 3.0),
        ("for (unsigned step = 0; step < end; step++)", 5.0),
        ("at < all.count; at++", 0.5),
    ],
    ..NONE
};

/// All of its codes have one, two, three or four bits. Others' ways that are shorter, and share
/// something, may stay: the longest is counted.
const OF_BITS: [Rules; 4] = [
    Rules {
        never: &[
            "return nibbles.of<2>(at[of], half);",
            "return nibbles.of<3>(at[of], half);",
            "all[0] = nibbles.of<3>(both[0]);",
            "all[1] = nibbles.of<3>(both[1]);",
            "return levels.of_four(nibbles.of<4>(at[of], half));",
            "all[0] = nibbles.of<4>(both[0]);",
            "all[1] = nibbles.of<4>(both[1]);",
            "return levels.of_four(nibbles); });",
        ],
        ..NONE
    },
    Rules {
        never: &[
            "return nibbles.of<1>(at[of], half);",
            "all[0] = nibbles.of<1>(both[0]);",
            "all[1] = nibbles.of<1>(both[1]);",
            "return nibbles.of<3>(at[of], half);",
            "all[0] = nibbles.of<3>(both[0]);",
            "all[1] = nibbles.of<3>(both[1]);",
            "return levels.of_four(nibbles.of<4>(at[of], half));",
            "all[0] = nibbles.of<4>(both[0]);",
            "all[1] = nibbles.of<4>(both[1]);",
            "return levels.of_four(nibbles); });",
        ],
        ..NONE
    },
    Rules {
        never: &[
            "return nibbles.of<1>(at[of], half);",
            "return nibbles.of<2>(at[of], half);",
            "return levels.of_four(nibbles.of<4>(at[of], half));",
            "all[0] = nibbles.of<4>(both[0]);",
            "all[1] = nibbles.of<4>(both[1]);",
            "return levels.of_four(nibbles); });",
        ],
        ..NONE
    },
    Rules {
        never: &[
            "return nibbles.of<1>(at[of], half);",
            "all[0] = nibbles.of<1>(both[0]);",
            "all[1] = nibbles.of<1>(both[1]);",
            "return nibbles.of<2>(at[of], half);",
            "all[0] = nibbles.of<2>(both[0]);",
            "all[1] = nibbles.of<2>(both[1]);",
            "return nibbles.of<3>(at[of], half);",
            "all[0] = nibbles.of<3>(both[0]);",
            "all[1] = nibbles.of<3>(both[1]);",
            "return levels.of_few(words[of][half]);",
            "return levels.of_few(nibbles); });",
        ],
        ..NONE
    },
];

const fn of_groups(codec: &'static str, rules: &'static [Rules]) -> Row {
    of_tiles(codec, "attend_table_fixed", "kvd_attend_kvd2fast_4", 2, rules)
}

/// Of a page of 64 rows of 128 channels in f16, without transforms; all of it has codes.
const STORED: Rules = Rules {
    never: &[
        "return NO_CODES;",
        "if (work.unit.median != 0)",
        "append_gains(work, work.payload",
        "if (!plane.has_words(IS_VALUE))",
    ],
    always: &["if (work.unit.median == 0)", "if (work.unit.dtype != 0 && in_fours"],
    turns: &[
        // Eight loads a turn.
        ("token < work.tokens; token += ROW_LOADS * step", 16.0),
        ("token < tokens; token += STORE_WARPS", 16.0),
        ("token += STORE_WARPS * WARP_ROWS", 4.0),
        ("Step(step[0]) != Step::End", 0.0),
        // Gains are added to the rows of a warp only where there are some.
        ("for (unsigned row = 0; row < count; row++) @ transform", 0.0),
        ("at < bytes; at += STORE_THREADS", 0.0),
        ("token < work.tokens; token += STORE_THREADS", 0.0),
        ("first < work.tokens; first += TILE_TOKENS", 2.0),
    ],
    ..NONE
};

/// Four bits, a scale for each channel and 32 tokens.
const STORED_BY_CHANNEL: Rules = Rules {
    never: &[
        "if (groups < FEW_GROUPS)",
        "of.add(work, group);",
        "group.each([&](unsigned token",
        "load_fours(values);",
        "store_fours(codes);",
        "case word_stride(64):",
        "default: return use(stride);",
        "return pack_side<true>(",
        "return pack_words<IS_VALUE, 1>(plane, walk, code);",
        "return pack_words<IS_VALUE, 2>(plane, walk, code);",
        "return pack_words<IS_VALUE, 8>(plane, walk, code);",
    ],
    turns: &[
        ("index < groups; index += STORE_THREADS", 2.0),
        ("at < groups; at += STORE_THREADS", 4.0),
        // Of five blocks, and a sixth that is begun.
        ("stripe < count; stripe += parts", 8.0),
    ],
    ..NONE
};

/// Four bits, a scale for each token and 32 channels.
const STORED_BY_TOKEN: Rules = Rules {
    never: &[
        "if (groups < FEW_GROUPS)",
        "of.add(work, group);",
        "group.each([&](unsigned token",
        "load_column(values, apart);",
        "store_column(codes, apart);",
        "return pack_side<false>(",
        "return pack_words<IS_VALUE, 1>(plane, walk, code);",
        "return pack_words<IS_VALUE, 2>(plane, walk, code);",
        "return pack_words<IS_VALUE, 8>(plane, walk, code);",
    ],
    turns: &[
        ("index < groups; index += STORE_THREADS", 2.0),
        ("at < plane.size; at += BYTES * STORE_THREADS", 1.0),
        ("stripe < count; stripe += parts", 8.0),
    ],
    ..NONE
};

/// One codebook of 256 entries of four channels.
const STORED_BOOK: Rules = Rules {
    never: &[
        "case 2: return nearest_entry",
        "case 8: return nearest_entry",
        "default: return nearest_entry",
        "return pack_side<true>(",
        "return pack_words<IS_VALUE, 1>(plane, walk, code);",
        "return pack_words<IS_VALUE, 2>(plane, walk, code);",
        "return pack_words<IS_VALUE, 4>(plane, walk, code);",
    ],
    turns: &[
        ("at < subs * work.tokens; at += STORE_THREADS", 16.0),
        // Unrolled for each of three stages, of which there is one.
        ("entry < count; entry++", 256.0 / 3.0),
        ("at < groups; at += STORE_THREADS", 2.0),
        // Two kilobytes and a page's head.
        ("stripe < count; stripe += parts", 4.0),
    ],
    ..NONE
};

/// Keys, codes looked up one by one and two to a word, as most of `kvd-2`; all symbols have codes.
const STORED_GRID: Rules = Rules {
    never: &["if ((batch & UNIT_SUBSTITUTED) != 0)"],
    turns: &[
        ("chunk < chunks; chunk++", 1.0),
        ("while (quad >= plan.run(run).quads)", 2.0),
        ("index < range.to; index++, step.next()", 16.0),
        ("first < count; first += run.per_word", 2.0),
        ("at < end; at += run.group", 2.0),
        ("next > 0; next--", 0.0),
        ("at < thread_index(); at += CODE_LANES", 3.5),
        ("index < steps; index++", 16.0),
        ("batch < all; batch++", 2.0),
        ("writer.open > 0 && step.index < plan.steps", 1.0),
        ("first < count && writer.open > 0", 1.0),
        ("while (writer.open > 0)", 0.5),
        // No outliers.
        ("from < places.to; from += WARP_LANES", 64.0),
        ("stripe < count; stripe += parts", 4.0),
    ],
    always: &["if (found == 0)"],
    ..NONE
};

pub(super) const fn of_tiles(
    codec: &'static str,
    file: &'static str,
    kernel: &'static str,
    tiles: u32,
    rules: &'static [Rules],
) -> Row {
    Row { codec, file, kernel, tiles, whole: false, again: &[], rules }
}

const fn decoded(codec: &'static str, kernel: &'static str) -> Row {
    let rules: &[Rules] = &[DECODED, ALWAYS];
    Row { again: &["scores"], ..of_tiles(codec, "attend_huffman", kernel, 2, rules) }
}

const fn of_page(codec: &'static str, kernel: &'static str, rules: &'static [Rules]) -> Row {
    Row { codec, file: "store", kernel, tiles: 1, whole: true, again: &[], rules }
}

pub(super) const ROWS: &[Row] = &[
    of_tiles("raw", "attend_float", "kvd_attend_f16_f16_4", 1, &[HALVES, ALWAYS]),
    of_tiles("fp8", "attend_float", "kvd_attend_fp8_fp8_4", 1, &[FP8, ALWAYS]),
    of_tiles("kivi-4", "attend_uniform_fixed", "kvd_attend_kivi4_4", 2, &[FOUR_BITS, ALWAYS]),
    of_tiles("kivi-2", "attend_uniform_fixed", "kvd_attend_kivi2_4", 2, &[TWO_BITS, ALWAYS]),
    of_tiles("innerq-2", "attend_uniform_fixed", "kvd_attend_innerq2_4", 2, &[CHOSEN, ALWAYS]),
    of_tiles(
        "vecinfer-4",
        "attend_vq_fixed",
        "kvd_attend_vecinfer4_4",
        2,
        &[FOUR_BITS_ALONE, ALWAYS],
    ),
    of_tiles(
        "vecinfer-2",
        "attend_vq_fixed",
        "kvd_attend_vecinfer2_4",
        2,
        &[TWO_BITS_ALONE, ALWAYS],
    ),
    of_tiles(
        "vecinfer-2-reg",
        "attend_vq_fixed",
        "kvd_attend_vecinfer2reg_4",
        2,
        &[TWO_BITS_ALONE, ALWAYS],
    ),
    of_tiles(
        "polar-4+4",
        "attend_table_fixed",
        "kvd_attend_polar44_4",
        2,
        &[POLAR, IN_FOUR, ALWAYS],
    ),
    of_tiles(
        "turbo-4",
        "attend_table_fixed",
        "kvd_attend_turbo4_4",
        2,
        &[TURNED, TWO_IN_FOUR, ALWAYS],
    ),
    of_groups("kvd-2-fast", &[GROUPS, OF_BITS[1], ALWAYS]),
    of_groups("kvd-2-fast-1-bit", &[GROUPS, OF_BITS[0], ALWAYS]),
    of_groups("kvd-2-fast-3-bit", &[GROUPS, OF_BITS[2], ALWAYS]),
    of_groups("kvd-2-fast-4-bit", &[GROUPS, OF_BITS[3], ALWAYS]),
    // What they take beside decoding; presets that share a kernel differ by their tables alone.
    decoded("kvcomp", "kvd_attend_huffman_uniform_uniform_4"),
    decoded("kvcomp-channel", "kvd_attend_huffman_uniform_uniform_4"),
    decoded("kvd-4", "kvd_attend_huffman_grid_grid_4"),
    decoded("kvd-3", "kvd_attend_huffman_grid_grid_4"),
    decoded("kvd-2", "kvd_attend_huffman_grid_grid_4"),
    decoded("kvd-1.5", "kvd_attend_huffman_grid_grid_4"),
    of_page("store-kivi-4", "kvd_store_uniform", &[STORED_BY_CHANNEL, STORED, ALWAYS]),
    of_page("store-kivi-4-values", "kvd_store_uniform", &[STORED_BY_TOKEN, STORED, ALWAYS]),
    of_page("store-vecinfer-2", "kvd_store_vq", &[STORED_BOOK, STORED, ALWAYS]),
    of_page("store-kvd-2", "kvd_store_huffman_grid", &[STORED_GRID, STORED, ALWAYS]),
];
