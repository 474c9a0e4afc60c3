//! What is counted: a row per codec and kernel, and what its full tiles of 128 channels do that the
//! source does not say. Texts are the source's, whatever line they stand on.

use super::marks::Rules;

/// A codec, and the kernel that serves four query rows of it.
pub(super) struct Row {
    pub(super) codec: &'static str,
    /// A file in `kernels/`, without its end.
    pub(super) file: &'static str,
    pub(super) kernel: &'static str,
    /// Whether all of the kernel is counted, which stores a page, and not a turn of its loop over
    /// tiles.
    pub(super) whole: bool,
    /// The first that names a loop says how often it turns.
    pub(super) rules: &'static [Rules],
}

/// Of every kernel.
const ALWAYS: Rules = Rules {
    never: &[
        // No power of two.
        "return number < by ? 0 : number / by;",
        // The unit's first tile.
        "if (!folded)",
        // A soft cap.
        "if (parameters.soft_cap > 0)",
        // Codes that are not plain.
        "for (unsigned step = 0; step < steps(); step++)",
        "for (unsigned mine = 0; mine < blocks; mine++)",
        // The softmax has found a larger score.
        "if (KVD_BALLOT(factor != 1 || beyond || tiles == TILES_MAX) != 0)",
        // Tokens that are not seen.
        "if (row >= unit.rows || lane < place.from || lane >= place.to)",
        "if (token < seen.from || token >= seen.to)",
    ],
    always: &["if (is_plain(codes))", "if (codes.words())"],
    turns: &[
        ("for (; index < unit.pages;", 0.5),
        ("at += ATTEND_THREADS * COPY_BYTES", 1.0),
        ("channel += WARP_LANES", 4.0),
        ("quad += WARP_LANES", 1.0),
        // Codes of one plane.
        ("left -= plane_width(left)", 1.0),
        ("while (parts_log2 > 0 && quad >= part)", 1.0),
    ],
    // Eight channels each, a quarter of 128 for a warp.
    unrolled: &[("block < BLOCKS; block++", "IMMA", 4)],
};

/// No rules.
const NONE: Rules = Rules { never: &[], always: &[], turns: &[], unrolled: &[] };

const FOUR_BITS: Rules = Rules {
    never: &[
        "case 0: return each_plain_of",
        "case 2: return each_plain_of",
        "default: return each_plain_of",
    ],
    turns: &[("step += STEPS", 4.0)],
    ..NONE
};

const TWO_BITS: Rules = Rules {
    never: &[
        "case 0: return each_plain_of",
        "case 1: return each_plain_of",
        "default: return each_plain_of",
    ],
    turns: &[("step += STEPS", 2.0)],
    ..NONE
};

/// Of rows of two bytes.
const HALVES: Rules = Rules {
    turns: &[
        ("at += ATTEND_THREADS * COPY_BYTES @ stage", 4.0),
        ("for (unsigned step = 0; step < count; step++)", 32.0),
        ("for (unsigned token = tile.from + slice; token < tile.to;", 32.0),
    ],
    // A channel of each thread, four rows.
    unrolled: &[("at < CHANNELS_PER_THREAD; at++", "FFMA", 4)],
    ..NONE
};

/// One codebook of 256 entries of four channels, all in shared memory.
const WORDS_OF_BYTES: Rules = Rules {
    never: &[
        "return each_of_any(codes, token, use);",
        "? each_of_registers<true>",
        ": each_of_registers<false>",
        "? each_of<12, true, 4>",
        ": each_of<12, false, 4>",
        "? each_of<12, true, 8>",
        ": each_of<12, false, 8>",
        "return each_of<0, false, 0>",
        "return each_of<8, false, 0>",
        "return each_of<8, true, 2>",
        ": each_of<8, true, 0>",
        "return any_values(codes, quad, to);",
        "return register_values(codes, quad, to);",
        ": looked_up_values<false>",
        "if (bytes == 2)",
        "return codes.four(codes.value_element(token, position));",
    ],
    turns: &[("for (unsigned chunk = 0; chunk < chunks; chunk++)", 2.0)],
    ..NONE
};

/// Of a bit allocation whose codes have up to four bits, of two bytes a level: about as many runs,
/// jobs and bytes of a row as `kvd-2-fast` has; no outliers in the tile, eight in the page.
const ALLOCATED: Rules = Rules {
    never: &[
        "case 5: return spread_words",
        "case 6: return spread_words",
        "case 7: return spread_words",
        "default: return spread_words",
        "spread_any(out,",
        "for (unsigned of_word = 0; of_word < CODE_GROUP; of_word++)",
        "start += plane_bytes(left",
        "codes += plane_bytes(left",
    ],
    turns: &[
        ("index < table.runs; index += ATTEND_WARPS", 1.0),
        ("at += WARP_LANES * COPY_BYTES", 1.0),
        ("index < jobs; index += ATTEND_WARPS", 1.5),
        ("item += WARP_LANES", 2.0),
        ("part < out.parts", 2.0),
        ("for (unsigned step = 0; step < count; step++)", 8.0),
        ("low < high;", 3.0),
        ("at < all.count; at++", 0.0),
    ],
    ..NONE
};

/// Of a page of 64 rows of 128 channels in f16, without transforms; all of it has codes.
const STORED: Rules = Rules {
    never: &[
        "return NO_CODES;",
        "if (work.unit.median != 0)",
        "append_gains(work, work.payload",
        "if (!whole)",
    ],
    always: &["if (work.unit.median == 0)"],
    turns: &[
        ("channel < dim; channel += WARP_LANES @ load_rows", 2.0),
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
    never: &["if (of > 1)", "low = first_zero(work, group);", "if (together)"],
    turns: &[
        ("index += together ? 1 : STORE_THREADS", 2.0),
        ("for (unsigned token = tokens.from; token < tokens.to; token++)", 32.0),
        ("for (unsigned step = 0; step < width; step++)", 1.0),
        ("at += CODE_GROUP * STORE_THREADS", 4.0),
        ("shift < 8; element += size", 2.0),
    ],
    ..NONE
};

/// One codebook of 256 entries of four channels.
const STORED_BOOK: Rules = Rules {
    never: &[
        "case 2: return nearest_entry",
        "case 8: return nearest_entry",
        "default: return nearest_entry",
    ],
    turns: &[
        ("at < subs * work.tokens; at += STORE_THREADS", 16.0),
        // Unrolled for each of three stages, of which there is one.
        ("entry < count; entry++", 256.0 / 3.0),
        ("at += CODE_GROUP * STORE_THREADS", 2.0),
        ("shift < 8; element += size", 1.0),
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
    ],
    always: &["if (found == 0)"],
    ..NONE
};

const fn of_tiles(
    codec: &'static str,
    file: &'static str,
    kernel: &'static str,
    rules: &'static [Rules],
) -> Row {
    Row { codec, file, kernel, whole: false, rules }
}

const fn of_page(codec: &'static str, kernel: &'static str, rules: &'static [Rules]) -> Row {
    Row { codec, file: "store", kernel, whole: true, rules }
}

pub(super) const ROWS: &[Row] = &[
    of_tiles("raw", "attend_float", "kvd_attend_f16_f16_4", &[HALVES, ALWAYS]),
    of_tiles("kivi-4", "attend_uniform", "kvd_attend_uniform_uniform_4", &[FOUR_BITS, ALWAYS]),
    of_tiles("kivi-2", "attend_uniform", "kvd_attend_uniform_uniform_4", &[TWO_BITS, ALWAYS]),
    of_tiles("vecinfer-2", "attend_vq", "kvd_attend_vq_vq_4", &[WORDS_OF_BYTES, ALWAYS]),
    of_tiles("kvd-2-fast", "attend_table", "kvd_attend_bitalloc_bitalloc_4", &[ALLOCATED, ALWAYS]),
    of_page("store-kivi-4", "kvd_store_uniform", &[STORED_BY_CHANNEL, STORED, ALWAYS]),
    of_page("store-vecinfer-2", "kvd_store_vq", &[STORED_BOOK, STORED, ALWAYS]),
    of_page("store-kvd-2", "kvd_store_huffman_grid", &[STORED_GRID, STORED, ALWAYS]),
];
