// Codebooks on CUDA cores, with VQ-LLM's engine (2503.02236 sections V and VI; what was chosen of it
// and why: docs/adr/0012). The first, most used entries of each codebook are in registers: lane `l`
// of every warp holds entry `l`, and a shuffle per pair of channels brings those of all lanes' codes.
// Entries behind them are in shared memory, the others where they are. Of values lanes decode whole
// entries, each of other tokens, and exchange them by shuffles until each has the channels that it
// sums; where that would take five shuffles or more, or entries are not two, four or eight channels,
// every lane reads its channel from where the entry is. Which of these the host says in `SideShape`
// (kvd-cuda/src/plan/codebook_cache.rs).
#pragma once

#include "scores.cuh"
#include "sums.cuh"
#include "vq.cuh"

namespace kvd {

// Vq whose first entries lanes may hold.
struct HeldVq : Vq {};

// Codebooks, and pairs of channels of an entry, for which a lane has registers.
constexpr unsigned HELD_BOOKS = 2;
constexpr unsigned HELD_PAIRS = 4;

// So many pairs of channels, of f16, of an entry, as one load.
template <unsigned PAIRS>
struct alignas(4 * PAIRS) Pairs {
    uint32_t word[PAIRS];
};

// Entries of a head's codebooks that this lane holds: one of each stage.
struct Held {
    uint32_t word[HELD_BOOKS][HELD_PAIRS];

    KVD_DEVICE Held(const SideShape& side, const uint8_t* tables) {
        const bool has = lane_index() < side.held;
#pragma unroll
        for (unsigned stage = 0; stage < HELD_BOOKS; stage++) {
            const uint64_t entry = (uint64_t(stage) << side.bits) + lane_index();
            const uint8_t* from = tables + side.table + 4 * entry * side.entry_pairs;
#pragma unroll
            for (unsigned pair = 0; pair < HELD_PAIRS; pair++) {
                const bool is = has && stage < side.stages && pair < side.entry_pairs;
                word[stage][pair] = is ? load32(from + 4 * pair) : 0;
            }
        }
    }

    // The entry of this lane's code. All lanes of a warp ask, of one stage; those whose code is held
    // read no memory.
    template <unsigned PAIRS>
    KVD_DEVICE Pairs<PAIRS> entry(const SideShape& side, const Tile& tile, unsigned stage,
                                  unsigned sub, unsigned code) const {
        Pairs<PAIRS> found = {};
        if (side.held > 0) {
            KVD_EXPECT(side.sets == 1 && side.stages <= HELD_BOOKS);
#pragma unroll
            for (unsigned pair = 0; pair < PAIRS; pair++) {
                const uint32_t own = stage == 0 ? word[0][pair] : word[1][pair];
                found.word[pair] = KVD_SHUFFLE(own, code % WARP_LANES);
            }
        }
        if (code >= side.held) {
            const uint16_t* from = Vq::entry(side, tile, stage, sub, code);
            found = *reinterpret_cast<const Pairs<PAIRS>*>(from);
        }
        return found;
    }
};

// The two channels of a pair.
KVD_DEVICE float low_value(uint32_t pair) { return f16_value(uint16_t(pair)); }
KVD_DEVICE float high_value(uint32_t pair) { return f16_value(uint16_t(pair >> 16)); }

// A lane per token takes whole entries: the product needs no exchange.
template <int ROWS>
struct Scores<HeldVq, ROWS> : Scores<Vq, ROWS> {
    Held held;

    KVD_DEVICE Scores(const AttendShared<ROWS>& shared, const AttendParameters& parameters,
                      const SideShape& side)
        : Scores<Vq, ROWS>(shared, parameters, side), held(side, parameters.tables) {}

    KVD_DEVICE void tile(const AttendShared<ROWS>& shared, const SideShape& side,
                         const Tile& tile) const {
        switch (side.entry_pairs) {
            case 1: return this->template of_entries<1>(shared, side, tile);
            case 2: return this->template of_entries<2>(shared, side, tile);
            case 4: return this->template of_entries<4>(shared, side, tile);
            default: return Scores<Vq, ROWS>::tile(shared, side, tile);
        }
    }

    template <unsigned PAIRS>
    KVD_DEVICE void of_entries(const AttendShared<ROWS>& shared, const SideShape& side,
                               const Tile& tile) const {
        float scores[ROWS] = {};
        const Codes codes = Vq::codes(side, tile);
        const unsigned count = Vq::subs(side);
        // Lanes without a token take part with the last one's: nothing reads their scores.
        const unsigned token = least(lane_index(), codes.tokens - 1);
        each_code_of(codes, token, ATTEND_WARPS, [&](unsigned position, unsigned code) {
            const unsigned stage = quotient(position, count);
            const unsigned sub = position - stage * count;
            const auto entry = held.template entry<PAIRS>(side, tile, stage, sub, code);
            const unsigned channel = sub * 2 * PAIRS;
#pragma unroll
            for (unsigned pair = 0; pair < PAIRS; pair++) {
                const uint32_t word = entry.word[pair];
                add_score(shared.query, side.dim, channel + 2 * pair, low_value(word), scores);
                add_score(shared.query, side.dim, channel + 2 * pair + 1, high_value(word), scores);
            }
        });
        for (int row = 0; row < ROWS; row++) {
            shared.sums[(warp_index() * ROWS + row) * TILE_TOKENS + lane_index()] = scores[row];
        }
    }
};

// Lane `within` of each `PAIRS` neighbours has an entry of its own, and gets pair `within` of that of
// lane `within ^ i` in place `i`: one shuffle for each but its own (VQ-LLM, algorithm 1).
template <unsigned PAIRS>
KVD_DEVICE void exchange(Pairs<PAIRS>& entry) {
    const unsigned within = lane_index() % PAIRS;
#pragma unroll
    for (unsigned bit = 1; bit < PAIRS; bit *= 2) {
#pragma unroll
        for (unsigned at = 0; at < PAIRS; at++) {
            if ((at & bit) == 0) {
                const uint32_t low = entry.word[at];
                const uint32_t high = entry.word[at | bit];
                entry.word[at] = within & bit ? high : low;
                entry.word[at | bit] = within & bit ? low : high;
            }
        }
    }
#pragma unroll
    for (unsigned at = 1; at < PAIRS; at++) {
        entry.word[at] = KVD_SHUFFLE(entry.word[at], lane_index() ^ at);
    }
}

template <int ROWS>
struct Sums<HeldVq, ROWS> : Sums<Vq, ROWS> {
    using Base = Sums<Vq, ROWS>;
    Held held;

    KVD_DEVICE Sums(const AttendShared<ROWS>& shared, const AttendParameters& parameters,
                    const SideShape& side)
        : Base(shared, parameters, side, side.entry_pairs > 0),
          held(side, parameters.tables) {}

    KVD_DEVICE void absorb(const SideShape& side, const Tile& tile,
                           const AttendShared<ROWS>& shared) {
        switch (side.entry_pairs) {
            case 1: return this->template exchanged<1>(side, tile, shared);
            case 2: return this->template exchanged<2>(side, tile, shared);
            case 4: return this->template exchanged<4>(side, tile, shared);
            default: return Base::absorb(side, tile, shared);
        }
    }

    // `PAIRS` neighbours take the codes of one sub-vector, four tokens each, and afterwards have a
    // pair of its channels each, of all these tokens.
    template <unsigned PAIRS>
    KVD_DEVICE void exchanged(const SideShape& side, const Tile& tile,
                              const AttendShared<ROWS>& shared) {
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            for (unsigned at = 0; at < CHANNELS_PER_THREAD; at++) {
                this->out[at][row] *= shared.factors[row];
            }
        }
        const Codes codes = Vq::codes(side, tile);
        // Lanes behind the last channel take part with it: nothing reads their sums.
        const unsigned channel = this->first + least(this->channel(0), this->channels - 2);
        const unsigned sub = channel / (2 * PAIRS);
        const unsigned within = lane_index() % PAIRS;
        const unsigned slice = thread_index() / this->width;
        const unsigned step = this->slices * PAIRS * CODE_GROUP;
        for (unsigned start = 0; start < codes.tokens; start += step) {
            const unsigned block = start + slice * PAIRS * CODE_GROUP;
            for (unsigned stage = 0; stage < side.stages; stage++) {
                const unsigned position = stage * Vq::subs(side) + sub;
                const Four four = four_of(codes, block + within * CODE_GROUP, position);
#pragma unroll
                for (unsigned at = 0; at < CODE_GROUP; at++) {
                    const unsigned code = four.code(at);
                    auto entry = held.template entry<PAIRS>(side, tile, stage, sub, code);
                    exchange(entry);
#pragma unroll
                    for (unsigned place = 0; place < PAIRS; place++) {
                        const unsigned token = block + (within ^ place) * CODE_GROUP + at;
                        if (token < codes.tokens) {
                            add_value(shared.weights, token, low_value(entry.word[place]),
                                      this->out[0]);
                            add_value(shared.weights, token, high_value(entry.word[place]),
                                      this->out[1]);
                        }
                    }
                }
            }
        }
    }

    // Codes of four tokens from `token` on, a multiple of four; 0 for those that the tile has not.
    KVD_DEVICE static Four four_of(const Codes& codes, unsigned token, unsigned position) {
        if (token >= codes.tokens) {
            return {0, 0};
        }
        if (codes.words()) {
            return codes.four(codes.value_element(token, position));
        }
        Four four = {0, 0};
        for (unsigned at = 0; at < least(CODE_GROUP, codes.tokens - token); at++) {
            const unsigned code = codes.one(codes.value_element(token + at, position));
            four.low |= (code & 0xFF) << 8 * at;
            four.high |= code >> 8 << 8 * at;
        }
        return four;
    }
};

}  // namespace kvd
