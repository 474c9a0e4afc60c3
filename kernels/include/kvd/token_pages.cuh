// Pages of uniform codes of 2 and 4 bits as products of tokens.cuh take them: stops of two tiles that a warp
// copies, where lanes find codes and scales of them, and which tokens and channels those are of.
#pragma once

#include "codes.cuh"
#include "mask.cuh"

namespace kvd {

// Rows and columns that one product of halves sums over.
constexpr unsigned HALF_TERMS_OF_STEP = 16;
// Tokens of a stop, and room for the scales of a side.
constexpr unsigned STOP_TOKENS = 2 * TILE_TOKENS;
constexpr unsigned SCALE_BYTES = 1024;
// Query rows of a band: their columns fill a product.
constexpr unsigned BAND_ROWS = 4;
// A line of shared memory; sixteens change places within it, so that no two lanes need one bank.
constexpr unsigned BANK_LINE = 128;

KVD_DEVICE float power_of_two(int log2) { return f32_value(uint32_t(127 + log2) << 23); }
// The power of two above a number that is normal, and positive.
KVD_DEVICE int log2_above(float number) { return int(f32_bits(number) >> 23) - 126; }
// Leaves room for powers beside it.
KVD_DEVICE int log2_within(int log2) { return log2 < -90 ? -90 : log2 > 90 ? 90 : log2; }

// Two tiles of a page; none behind the last.
struct alignas(16) TokenStop {
    const uint8_t* key;
    const uint8_t* value;
    // Where codes begin behind the scales.
    uint32_t codes;
    uint32_t page;
    // The page's row that is its first one.
    uint32_t first_row;
    // What it needs beside others.
    uint32_t rare;

    // It has less than two whole tiles, is not seen whole by all rows, or has gains; scores are capped.
    static constexpr uint32_t PARTLY = 1;
    static constexpr uint32_t CAPPED = 2;
    // There is none.
    static constexpr uint32_t END = 4;

    KVD_DEVICE bool is_end() const { return (rare & END) != 0; }

    // Rows of it that hold tokens within a range.
    KVD_DEVICE Range rows(const PageEntry& of, Range seen) const {
        const Range of_page = seen_rows(of, seen);
        return {most(of_page.from, first_row) - first_row, most(of_page.to, first_row) - first_row};
    }
};

// The thread block's unit, found anew: where it is hardly ever needed its address takes no registers.
KVD_DEVICE const AttendUnit& unit_anew(const AttendParameters& parameters) {
    unsigned number = block_index();
    KVD_KEEP(number);
    return parameters.units[number];
}

template <unsigned BITS, unsigned CHANNELS = 128, unsigned MOST_BANDS = 1>
struct TokenPages {
    static constexpr unsigned CODE_BITS = BITS;
    static constexpr unsigned FIELDS = 8 / BITS;
    static constexpr unsigned DIM = CHANNELS;
    static constexpr unsigned BANDS = MOST_BANDS;
    // Channels that share the scale of a token's values; bytes of a token's scales, and of a tile's.
    static constexpr unsigned SETS = DIM / 32;
    static constexpr unsigned ROW_BYTES = 4 * SETS;
    static constexpr unsigned TILE_SCALES = TILE_TOKENS * ROW_BYTES;
    static constexpr uint32_t MASK = 0x00010001u * ((1u << BITS) - 1);
    static constexpr unsigned TILE_BYTES = TILE_TOKENS * DIM * BITS / 8;
    static constexpr unsigned SIDE_BYTES = SCALE_BYTES + 2 * TILE_BYTES;
    // Sixteens of codes of a stop that a lane copies.
    static constexpr unsigned COPIES = 2 * TILE_BYTES / 512;
    // Steps of values, ordered: by tile, set and lane.
    static constexpr unsigned STEP_BYTES = 512;
    static constexpr unsigned STOPS = 16;
    // Of each lane and band: four sums of each set, what it multiplies by, and one sum more.
    static constexpr unsigned KEPT_BYTES = 4 * 32 * (DIM / 8 + 4 + 1);
    static constexpr unsigned KEPT =
        2 * SIDE_BYTES + STEP_BYTES + STOPS * unsigned(sizeof(TokenStop));
    static constexpr unsigned WARP_BYTES = KEPT + BANDS * KEPT_BYTES;
    // Lines of four channels' codes of a tile of keys, of four tokens' codes of one of values.
    static constexpr unsigned KEY_LINES = DIM / 4 / FIELDS;
    static constexpr unsigned VALUE_LINES = TILE_TOKENS / 4 / FIELDS;
    static constexpr unsigned VALUE_LINE = 4 * DIM;
    // Of those a copy has one, or two.
    static constexpr unsigned LINES_OF_COPY = 512 / VALUE_LINE;

    // Channels of a lane's four codes of a step of keys: the first of these, and every one behind it.
    KVD_DEVICE static unsigned key_channel(unsigned step, unsigned word) {
        return 4 * (step * 4 + word);
    }
    // The tile's token of this lane's score `at`; neighbouring lanes have what pairs of codes of values do.
    KVD_DEVICE static unsigned key_token(unsigned at) {
        const unsigned group = lane_index() / 4;
        return first_token(group) + at / 2 * HALF_TOKENS + at % 2;
    }
    static constexpr unsigned HALF_TOKENS = BITS == 4 ? 16 : 8;
    KVD_DEVICE static unsigned first_token(unsigned group) {
        return BITS == 4 ? 2 * group : group / 4 * 16 + group % 4 * 2;
    }
    // What takes back the field in which codes of values of a token stand, of the first or second half of
    // a tile's products: of two bits lanes differ, `upper` is whether theirs is an upper half.
    KVD_DEVICE static float token_back(unsigned half, unsigned upper) {
        return power_of_two(-int(BITS == 4 ? 4 * half : 2 * half + 4 * upper));
    }
    // What the second half of a tile's products of minima is a multiple of, less than it was by its field.
    static constexpr float SECOND_HALF = float(1u << BITS);
    // Two factors of minima, which have no field: of two bits lanes differ by one more.
    KVD_DEVICE static uint32_t without_field(uint32_t factors) {
        const unsigned upper = lane_index() % 4 / 2;
        return BITS == 4 ? factors : half_products(factors, 0x00010001u * ((15 + 4 * upper) << 10));
    }
    KVD_DEVICE static uint32_t value_mask(unsigned half) {
        return BITS == 4 ? MASK << 4 * half : MASK << 4 * (lane_index() % 4 / 2) << 2 * half;
    }

    // Where a lane finds its own, from the start of shared memory.
    struct Places {
        // Lines of scales of keys; those of values' steps stand as far behind both sides.
        unsigned scales;
        // Codes, of keys of the first and second half of a tile's tokens.
        unsigned key_codes[2];
        unsigned value_codes;
        // The row of scales of values that it names.
        unsigned value_row;
        // Scales of keys that it brings into order: where they are, and where steps go.
        unsigned to_order;
        unsigned ordered;
        // Sixteens that it copies: in order, and as codes change places.
        unsigned copies;
        unsigned key_copies;
        unsigned value_copies;

        KVD_DEVICE explicit Places(unsigned warp) {
            const unsigned word = lane_index() % 4;
            const unsigned group = lane_index() / 4;
            scales = warp + word * 16;
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                const unsigned token = first_token(group) + half * HALF_TOKENS;
                key_codes[half] = warp + SCALE_BYTES + word * BANK_LINE +
                                  (token / 4 ^ 2 * word) * 16 + token % 4 * 4;
                KVD_KEEP(key_codes[half]);
            }
            const unsigned line = word % VALUE_LINES;
            value_codes = warp + SIDE_BYTES + SCALE_BYTES + line * VALUE_LINE + (group ^ 2 * line) * 16;
            const unsigned matrix = lane_index() / 8;
            const unsigned row =
                first_token(lane_index() % 8) + matrix % 2 * HALF_TOKENS + matrix / 2;
            value_row = warp + SIDE_BYTES + row * 16;
            to_order = warp + lane_index() * 8;
            const unsigned fours = lane_index() % (DIM / 4);
            ordered = warp + 4 * DIM + fours / 8 * 64 + word * 16 + fours / 4 % 2 * 8;
            if (DIM == 64 && lane_index() < 16) {
                ordered = warp + lane_index() * 16;
            }
            copies = warp + lane_index() * 16;
            key_copies = warp + SCALE_BYTES + lane_index() / 8 * BANK_LINE +
                         (lane_index() % 8 ^ 2 * (lane_index() / 8)) * 16;
            KVD_KEEP(scales);
            KVD_KEEP(value_codes);
            KVD_KEEP(value_row);
            KVD_KEEP(ordered);
            KVD_KEEP(copies);
            KVD_KEEP(key_copies);
            value_copies = copies + SIDE_BYTES;
            if constexpr (LINES_OF_COPY > 1) {
                value_copies ^= lane_index() / 16 * 32;
                KVD_KEEP(value_copies);
            }
        }
    };

    uint8_t* memory;
    Places places;

    KVD_DEVICE TokenPages(uint8_t* memory, unsigned warp) : memory(memory), places(warp) {}

    KVD_DEVICE const FourWords& four_at(unsigned at) const {
        return *reinterpret_cast<const FourWords*>(memory + at);
    }

    // Minima of both tiles for a step of keys.
    KVD_DEVICE FourWords key_minima(unsigned step) const {
        return four_at(places.scales + step * 64);
    }
    // Steps of a tile for two steps of its keys.
    KVD_DEVICE FourWords key_steps(unsigned tile, unsigned step) const {
        return four_at(places.scales + 4 * DIM + tile * 2 * DIM + step / 2 * 64);
    }
    // Codes of two tokens of four channels, and of those that share their bytes.
    KVD_DEVICE TwoWords key_codes(unsigned tile, unsigned line, unsigned half) const {
        const unsigned at = places.key_codes[half] + tile * TILE_BYTES + 4 * line * BANK_LINE;
        return *reinterpret_cast<const TwoWords*>(memory + at);
    }
    KVD_DEVICE FourWords value_steps(unsigned tile, unsigned set) const {
        return four_at(places.scales + 2 * SIDE_BYTES + tile * 256 + set * 64);
    }
    // Codes of four channels of a set, of tokens that share their bytes.
    KVD_DEVICE FourWords value_codes(unsigned tile, unsigned set) const {
        return four_at(places.value_codes + tile * TILE_BYTES + set * BANK_LINE);
    }

    // The step of a channel of the keys' first tile as it came, and the largest one of a lane's tokens.
    KVD_DEVICE static float key_step(const uint8_t* keys, unsigned channel) {
        const uint8_t* steps = keys + 2 * (DIM + channel);
        return fmaxf(f16_value(load16(steps)), f16_value(load16(steps + TILE_SCALES)));
    }
    KVD_DEVICE static float value_step(const uint8_t* values) {
        float most = 0;
        for (unsigned at = 0; at < 2 * SETS; at++) {
            const unsigned token = lane_index() + at / SETS * TILE_TOKENS;
            const unsigned step = SETS + at % SETS;
            most = fmaxf(most, f16_value(load16(values + 16 * token + 2 * step)));
        }
        return most;
    }

    // Two pairs of neighbours as the codes pair channels: the first and the third, the others.
    KVD_DEVICE static TwoWords paired(const TwoWords& two) {
        return {{bytes_at(two.word[0], two.word[1], 0x5410), bytes_at(two.word[0], two.word[1], 0x7632)}};
    }
    // Brings the scales of keys, of four channels by each lane, into the order of products. In heads of 64
    // channels the first half of the lanes has minima, the other one steps.
    KVD_DEVICE void order_key_scales() const {
        const TwoWords* two = reinterpret_cast<const TwoWords*>(memory + places.to_order);
        constexpr unsigned TILE = TILE_SCALES / 8;
        if constexpr (DIM == 64) {
            const TwoWords of[2] = {paired(two[0]), paired(two[TILE])};
            const bool is_step = lane_index() >= 16;
            const uint32_t second = is_step ? of[0].word[1] : of[1].word[0];
            const uint32_t third = is_step ? of[1].word[0] : of[0].word[1];
            KVD_WARP_BARRIER();
            *reinterpret_cast<TwoWords*>(memory + places.ordered) = {{of[0].word[0], second}};
            uint8_t* other = memory + places.ordered + (is_step ? 2 * DIM : 8);
            *reinterpret_cast<TwoWords*>(other) = {{third, of[1].word[1]}};
        } else {
            const TwoWords minima[2] = {paired(two[0]), paired(two[TILE])};
            const TwoWords steps[2] = {paired(two[TILE / 2]), paired(two[TILE / 2 + TILE])};
            KVD_WARP_BARRIER();
            *reinterpret_cast<FourWords*>(memory + places.copies) = {
                {minima[0].word[0], minima[1].word[0], minima[0].word[1], minima[1].word[1]}};
#pragma unroll
            for (unsigned tile = 0; tile < 2; tile++) {
                *reinterpret_cast<TwoWords*>(memory + places.ordered + tile * 256) = steps[tile];
            }
        }
        KVD_WARP_BARRIER();
    }

    // Scales of a tile of values, a column by each four lanes: minima, as many steps; words by pair of
    // codes and by half of the products. Of 64 channels behind them is nothing that counts.
    KVD_DEVICE void value_minima(unsigned tile, uint32_t (&rows)[4]) const {
        KVD_LOAD_MATRICES(rows, memory + places.value_row + tile * TILE_TOKENS * 16);
    }
    // Leaves the steps of values where every lane finds its own.
    KVD_DEVICE void order_value_steps() const {
#pragma unroll
        for (unsigned tile = 0; tile < 2; tile++) {
            uint32_t rows[4];
            value_minima(tile, rows);
            if (lane_index() / ROW_BYTES == 1) {
                const unsigned at = places.copies + 2 * SIDE_BYTES + tile * 256 - 16 * ROW_BYTES;
                *reinterpret_cast<FourWords*>(memory + at) = {{rows[0], rows[1], rows[2], rows[3]}};
            }
        }
    }

    // Starts copying a stop's keys, or values.
    template <class Stops>
    KVD_DEVICE void start_keys(const Stops& stops, const TokenStop& stop) const {
        if (KVD_RARELY((stop.rare & TokenStop::PARTLY) != 0)) {
            return start_rarely<true>(stops.parameters, stops.last(),
                                      memory + places.copies - lane_index() * 16);
        }
        const uint8_t* from = stop.key + lane_index() * 16;
#pragma unroll
        for (unsigned at = 0; at < 2 * TILE_SCALES / 512; at++) {
            copy_async16(memory + places.copies + at * 512, from + at * 512);
        }
#pragma unroll
        for (unsigned at = 0; at < COPIES; at++) {
            copy_async16(memory + places.key_copies + at * 512, from + stop.codes + at * 512);
        }
    }
    template <class Stops>
    KVD_DEVICE void start_values(const Stops& stops, const TokenStop& stop) const {
        uint8_t* to = memory + places.copies + SIDE_BYTES;
        if (KVD_RARELY((stop.rare & TokenStop::PARTLY) != 0)) {
            return start_rarely<false>(stops.parameters, stops.last(), to - lane_index() * 16);
        }
        const uint8_t* from = stop.value + lane_index() * ROW_BYTES;
        copy_row(to, from);
        copy_row(to + 512, from + TILE_SCALES);
        // Lines are longer than those of keys; what changes places is by line.
        from = stop.value + lane_index() * 16 + stop.codes;
#pragma unroll
        for (unsigned at = 0; at < COPIES; at++) {
            const unsigned line = at * LINES_OF_COPY % VALUE_LINES;
            const unsigned place = (places.value_copies ^ line * 32) + SCALE_BYTES;
            copy_async16(memory + place + at * 512, from + at * 512);
        }
    }
    // The scales of a token's values: a sixteen, or half of one.
    KVD_DEVICE static void copy_row(uint8_t* to, const uint8_t* from) {
        if constexpr (ROW_BYTES == 16) {
            copy_async16(to, from);
        } else {
            copy_async8(to, from);
        }
    }

    // The same for one that has less than two tiles, or that not all see: what it has not is zeros, and
    // codes of a tile of fewer tokens, which are in another order, are brought into that of a whole one.
    template <bool IS_KEY>
    KVD_DEVICE static void start_rarely(const AttendParameters& parameters, const TokenStop& stop,
                                        uint8_t* to) {
        if (stop.is_end()) {
            return;
        }
        const PageEntry& page = parameters.pages[stop.page];
        const uint8_t* payload = parameters.arena + (IS_KEY ? page.key : page.value);
        const unsigned tiles = (page.tokens + TILE_TOKENS - 1) / TILE_TOKENS;
        const uint8_t* codes = payload + (IS_KEY ? tiles * TILE_TOKENS : page.tokens) * ROW_BYTES;
        constexpr unsigned PIECES = IS_KEY ? TILE_SCALES / 16 : TILE_TOKENS;
#pragma unroll 1
        for (unsigned tile = 0; tile < 2; tile++) {
            const unsigned first = stop.first_row + tile * TILE_TOKENS;
            const unsigned tokens = first < page.tokens ? least(page.tokens - first, TILE_TOKENS) : 0;
            const uint8_t* scales = payload + first * ROW_BYTES;
            uint8_t* place = to + (tile * PIECES + lane_index()) * 16;
            if (lane_index() < (IS_KEY && tokens > 0 ? PIECES : tokens)) {
                if constexpr (IS_KEY) {
                    copy_async16(place, scales + lane_index() * 16);
                } else {
                    copy_row(place, scales + lane_index() * ROW_BYTES);
                }
            } else if (lane_index() < PIECES) {
                *reinterpret_cast<FourWords*>(place) = {{0, 0, 0, 0}};
            }
            const uint8_t* from = codes + first / TILE_TOKENS * TILE_BYTES;
            const Codes of_tile = {from, BITS, tokens, DIM, 0};
            uint8_t* words = to + SCALE_BYTES + tile * TILE_BYTES;
            for (unsigned at = lane_index(); at < TILE_BYTES / 4; at += WARP_LANES) {
                *reinterpret_cast<uint32_t*>(words + place_of<IS_KEY>(at)) =
                    word_of<IS_KEY>(of_tile, at);
            }
        }
    }
    // Where a word of a whole tile goes, and what a tile of fewer tokens has of it.
    template <bool IS_KEY>
    KVD_DEVICE static unsigned place_of(unsigned word) {
        const unsigned turn = (IS_KEY ? word / 32 : word / DIM) % 4;
        return word / 32 * BANK_LINE + (word / 4 % 8 ^ 2 * turn) * 16 + word % 4 * 4;
    }
    template <bool IS_KEY>
    KVD_DEVICE static uint32_t word_of(const Codes& codes, unsigned word) {
        uint32_t all = 0;
#pragma unroll 1
        for (unsigned at = 0; at < 4 * FIELDS; at++) {
            const unsigned field = at / 4;
            const unsigned summed = IS_KEY ? 4 * (field * KEY_LINES + word / 32) + at % 4
                                           : 4 * (field * VALUE_LINES + word / DIM) + at % 4;
            const unsigned token = IS_KEY ? word % 32 : summed;
            const unsigned channel = IS_KEY ? summed : word % DIM;
            if (token < codes.tokens) {
                const unsigned element = IS_KEY ? codes.key_element(token, channel)
                                                : codes.value_element(token, channel);
                all |= codes.one(element) << (8 * (at % 4) + BITS * field);
            }
        }
        return all;
    }
};

// The stops of a warp: of all that the unit's pages have every fourth one that a row of the unit sees. A
// lane looks at one, some batches ahead.
template <class Pages>
struct TokenStops {
    static constexpr unsigned BATCH = Pages::STOPS;

    const AttendParameters& parameters;
    TokenStop* batch;
    // Of those found the one that comes next; where more are looked for.
    unsigned at;
    unsigned number;

    KVD_DEVICE TokenStops(const AttendParameters& parameters, uint8_t* shared)
        : parameters(parameters),
          batch(reinterpret_cast<TokenStop*>(shared)),
          at(0),
          number(0) {}

    KVD_DEVICE TokenStop first() {
        number = warp_index();
        find();
        return next();
    }

    // Where more have to be found for it, `find` must have been asked.
    KVD_DEVICE bool is_through() const { return at == BATCH; }
    KVD_DEVICE TokenStop next() { return batch[at++]; }
    // The one that `next` gave; until it is asked again.
    KVD_DEVICE TokenStop last() const { return batch[at - 1]; }

    // Those behind the last have no keys.
    KVD_DEVICE void find() {
        const AttendUnit& unit = unit_anew(parameters);
        const unsigned all = unit.pages * unit.page_stops;
        const TokenStop none = {nullptr, nullptr, 0, 0, 0, TokenStop::PARTLY + TokenStop::END};
        unsigned count = 0;
        while (count < BATCH && number < all) {
            const unsigned mine = number + lane_index() * ATTEND_WARPS;
            TokenStop stop = none;
            if (mine < all) {
                describe(unit, mine, stop);
            }
            const uint32_t found = KVD_BALLOT(stop.key != nullptr);
            const unsigned place = count + ones(found & ((1u << lane_index()) - 1));
            if (stop.key != nullptr && place < BATCH) {
                batch[place] = stop;
            }
            // Where it is full the next one found is looked for again.
            const uint32_t beyond = KVD_BALLOT(stop.key != nullptr && place == BATCH);
            number += ATTEND_WARPS * (beyond == 0 ? WARP_LANES : ones((beyond & (0u - beyond)) - 1));
            count = least(count + ones(found), BATCH);
        }
        if (lane_index() >= count && lane_index() < BATCH) {
            batch[lane_index()] = none;
        }
        at = 0;
        KVD_WARP_BARRIER();
    }

    KVD_DEVICE void describe(const AttendUnit& unit, unsigned mine, TokenStop& stop) const {
        const unsigned of_unit = quotient(mine, unit.page_stops);
        const unsigned first = (mine - of_unit * unit.page_stops) * STOP_TOKENS;
        const PageEntry& page = parameters.pages[unit.first_page + of_unit];
        const Range any = {visible(unit, 0).from, visible(unit, unit.rows - 1).to};
        const Range every = {visible(unit, unit.rows - 1).from, visible(unit, 0).to};
        const Range rows = seen_rows(page, any);
        if (rows.from >= rows.to || rows.from >= first + STOP_TOKENS || rows.to <= first) {
            return;
        }
        const Range whole = seen_rows(page, every);
        // Codes of all pages that are plain begin behind as many bytes of scales on both sides.
        const uint64_t scales = uint64_t(first) * Pages::ROW_BYTES;
        const uint64_t codes = uint64_t(page.tokens) * Pages::ROW_BYTES +
                               uint64_t(first) * Pages::TILE_BYTES / TILE_TOKENS;
        stop.key = parameters.arena + page.key + scales;
        stop.value = parameters.arena + page.value + scales;
        stop.codes = uint32_t(codes - scales);
        stop.page = unit.first_page + of_unit;
        stop.first_row = first;
        const bool is_whole = whole.from <= first && whole.to >= first + STOP_TOKENS &&
                              page.tokens % TILE_TOKENS == 0 && page.gain_bytes == 0;
        stop.rare = (is_whole ? 0 : TokenStop::PARTLY) +
                    (parameters.soft_cap > 0 ? TokenStop::CAPPED : 0);
    }
};

}  // namespace kvd
