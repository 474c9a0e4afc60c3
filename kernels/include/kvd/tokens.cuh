// Attention over uniform codes of 2 and 4 bits in heads of 64 and 128 channels: a warp owns tokens.
// It copies its own pages, multiplies keys, takes the softmax and multiplies values, and meets the
// others only when all are through (ADR 52). Codes are the first factor of products of halves:
// masked where they stand they are f16 numbers below 2^-14, `code * 2^-24` times the power of two
// of their place. Steps go into the other factor, of which every query row has two columns: what
// f16 holds of a number, and what that leaves (22 bits). So four rows, a band, fill a product; a
// second band's products have the same first factors. Tokens and channels are summed in the order
// in which a page's tile has them, so nothing is permuted but scales. Meaning: attend.cuh.
#pragma once

#include "token_sums.cuh"

namespace kvd {

// The work of one warp, over pages of a kind: `TokenPages`.
template <class Pages>
struct TokenWarp {
    const AttendParameters& parameters;
    Pages pages;
    TokenStops<Pages> stops;
    TokenSums<Pages> sums;

    KVD_DEVICE TokenWarp(const AttendParameters& parameters, uint8_t* memory, unsigned warp)
        : parameters(parameters),
          pages(memory, warp),
          stops(parameters, memory + warp + 2 * Pages::SIDE_BYTES + Pages::STEP_BYTES) {}

    KVD_DEVICE uint8_t* mine() const {
        return pages.memory + pages.places.copies - lane_index() * 16;
    }

    // The largest of a step, and of a query times one.
    struct Largest {
        float query;
        float product;
        float step;
    };

    // Goes through the warp's tokens. `again`: after factors were chosen by the scales of the first stop, and
    // one was beyond f16 further on.
    KVD_DEVICE void run(bool again) {
        // Behind what is left of an earlier turn.
        KVD_WARP_BARRIER();
        Largest largest = {0, 0, 0};
        if (again) {
            find_largest(largest);
        }
#pragma unroll
        for (unsigned band = 0; band < Pages::BANDS; band++) {
            sums.bands[band].kept = mine() + Pages::KEPT + band * Pages::KEPT_BYTES;
            sums.bands[band].begin();
        }
        TokenStop stop = stops.first();
        pages.start_keys(stops, stop);
        copy_async_commit();
        pages.start_values(stops, stop);
        copy_async_commit();
        copy_async_wait<0>();
        KVD_WARP_BARRIER();
        if (!again) {
            look_at_first(largest);
        }
        begin(largest, again ? 0 : HALF_LOG2 - FACTOR_LOG2);
        while (!stop.is_end()) {
            copy_async_wait<1>();
            KVD_WARP_BARRIER();
            pages.order_key_scales();
            float weight[Pages::BANDS][8];
#pragma unroll
            for (unsigned tile = 0; tile < 2; tile++) {
                if (Pages::CODE_BITS == 2 && tile == 1) {
                    // Nothing of the second tile is loaded before, or registers are too few.
                    KVD_WARP_BARRIER();
                }
                sums.multiply_keys(pages, tile, weight);
            }
            float base[Pages::BANDS][2];
            sums.bases(pages, base);
#pragma unroll
            for (unsigned band = 0; band < Pages::BANDS; band++) {
                if (KVD_RARELY(stop.rare != 0)) {
                    sums.bands[band].weigh_rarely(parameters, stops.last(), band * BAND_ROWS,
                                                  base[band], weight[band]);
                } else {
                    sums.bands[band].weigh(base[band], weight[band]);
                }
            }
            copy_async_wait<0>();
            KVD_WARP_BARRIER();
            if (KVD_RARELY(stops.at % KEPT_TOGETHER == 0)) {
                keep();
                if (stops.is_through()) {
                    stops.find();
                }
            }
            stop = stops.next();
            pages.start_keys(stops, stop);
            copy_async_commit();
            pages.order_value_steps();
            KVD_WARP_BARRIER();
#pragma unroll
            for (unsigned tile = 0; tile < 2; tile++) {
                sums.add_values(pages, tile, weight);
            }
            KVD_WARP_BARRIER();
            pages.start_values(stops, stop);
            copy_async_commit();
        }
        copy_async_wait<0>();
        keep();
    }

    KVD_DEVICE void keep() {
#pragma unroll
        for (TokenBand<Pages>& band : sums.bands) {
            band.keep(1);
        }
    }

    static constexpr unsigned DIM = Pages::DIM;
    static constexpr unsigned SETS = Pages::SETS;

    KVD_DEVICE const float* queries(const AttendUnit& unit) const {
        return parameters.queries + uint64_t(unit.query) * DIM;
    }

    // Looks at the scales of the first stop, where they were copied to.
    KVD_DEVICE void look_at_first(Largest& largest) const {
        const AttendUnit& unit = unit_anew(parameters);
        for (unsigned at = lane_index(); at < unit.rows * DIM; at += WARP_LANES) {
            const float query = fabsf(queries(unit)[at]);
            const float step = Pages::key_step(mine(), at % DIM);
            largest.query = fmaxf(largest.query, query);
            largest.product = fmaxf(largest.product, query * step);
        }
        largest.step = Pages::value_step(mine() + Pages::SIDE_BYTES);
    }

    // Looks at the scales of all stops, where they are.
    KVD_DEVICE void find_largest(Largest& largest) {
        const AttendUnit& unit = unit_anew(parameters);
        TokenStop stop = stops.first();
        while (!stop.is_end()) {
            const unsigned left = parameters.pages[stop.page].tokens - stop.first_row;
            const unsigned tokens = least(left, STOP_TOKENS);
            const unsigned tiles = (tokens + TILE_TOKENS - 1) / TILE_TOKENS;
            for (unsigned at = lane_index(); at < unit.rows * DIM; at += WARP_LANES) {
                const float query = fabsf(queries(unit)[at]);
                largest.query = fmaxf(largest.query, query);
                for (unsigned tile = 0; tile < tiles; tile++) {
                    const uint8_t* steps = stop.key + tile * Pages::TILE_SCALES + 2 * DIM;
                    const float step = f16_value(load16(steps + 2 * (at % DIM)));
                    largest.product = fmaxf(largest.product, query * step);
                }
            }
            for (unsigned at = lane_index(); at < tokens * SETS; at += WARP_LANES) {
                const uint8_t* steps = stop.value + at / SETS * Pages::ROW_BYTES + 2 * SETS;
                const float step = f16_value(load16(steps + 2 * (at % SETS)));
                largest.step = fmaxf(largest.step, step);
            }
            KVD_WARP_BARRIER();
            if (stops.is_through()) {
                stops.find();
            }
            stop = stops.next();
        }
        KVD_WARP_BARRIER();
    }

    // Chooses the powers of two that queries and weights are multiplied by. `room`: how much larger products
    // may become, as a logarithm.
    KVD_DEVICE void begin(const Largest& of_lane, int room) {
        const AttendUnit& unit = unit_anew(parameters);
        const unsigned column = lane_index() / 4;
        const unsigned row = lane_index() % 4;
        const float query = warp_max(of_lane.query);
        const float product = warp_max(of_lane.product);
        const float step = warp_max(of_lane.step);
        // Weights are below 2.
        const float weights = power_of_two(factor_log2(1, step, room) - 1);
#pragma unroll
        for (unsigned at = 0; at < Pages::BANDS; at++) {
            TokenBand<Pages>& band = sums.bands[at];
            const unsigned cut = at * BAND_ROWS + column / 2;
            const unsigned own = at * BAND_ROWS + row;
            band.cut_query(queries(unit) + least(cut, unit.rows - 1) * DIM, cut < unit.rows,
                           factor_log2(query, product, room));
            band.constants().by[0] = weights * Pages::token_back(0, lane_index() / 16);
            band.constants().by[1] = weights * Pages::token_back(1, lane_index() / 16);
            band.constants().offset = own < unit.rows ? parameters.offsets[unit.query + own] : 0;
        }
    }

    // The power of two for numbers up to `largest`, whose products with steps are up to `product`: it leaves
    // both below 2^15, and products room for larger ones unless factors were small then.
    KVD_DEVICE static int factor_log2(float largest, float product, int room) {
        const int of_number = largest > 0 ? log2_within(HALF_LOG2 - log2_above(largest)) : 0;
        const int of_product = product > 0 ? log2_within(HALF_LOG2 - log2_above(product)) : of_number;
        const int with_room = of_product - room;
        const int small = of_number - FACTOR_LOG2;
        const int wanted = with_room > small ? with_room : small < of_product ? small : of_product;
        return wanted < of_number ? wanted : of_number;
    }
};

// One unit: its warps' partial results become one in the thread block.
template <class Pages>
KVD_DEVICE void attend_tokens(const AttendParameters& parameters, uint8_t* memory) {
    constexpr unsigned DIM = Pages::DIM;
    constexpr unsigned ROWS = Pages::BANDS * BAND_ROWS;
    const AttendUnit& unit = parameters.units[block_index()];
    KVD_EXPECT(unit.rows <= ROWS && unit.key.dim == DIM);
    TokenWarp<Pages> warp(parameters, memory, warp_index() * Pages::WARP_BYTES);
#pragma unroll 1
    for (unsigned turn = 0; turn < 2; turn++) {
        warp.run(turn > 0);
        if (!warp.sums.is_beyond()) {
            break;
        }
    }
    KVD_WARP_BARRIER();
#pragma unroll
    for (unsigned band = 0; band < Pages::BANDS; band++) {
        float* to = reinterpret_cast<float*>(warp.mine());
        const unsigned row = band * BAND_ROWS;
        warp.sums.bands[band].put(to + row * DIM, to + ROWS * DIM + 2 * row);
    }
    KVD_BARRIER();
    for (unsigned place = thread_index(); place < unit.rows * DIM; place += ATTEND_THREADS) {
        const unsigned row = place / DIM;
        const auto of_warp = [&](unsigned at) {
            return reinterpret_cast<const float*>(memory + at * Pages::WARP_BYTES);
        };
        float high = -INFINITY;
        for (unsigned at = 0; at < ATTEND_WARPS; at++) {
            high = fmaxf(high, of_warp(at)[ROWS * DIM + 2 * row]);
        }
        float out = 0;
        float all = 0;
        for (unsigned at = 0; at < ATTEND_WARPS; at++) {
            const float* stats = of_warp(at) + ROWS * DIM + 2 * row;
            const float factor = stats[1] > 0 ? expf(stats[0] - high) : 0;
            all += factor * stats[1];
            out += factor * of_warp(at)[place];
        }
        parameters.out[uint64_t(unit.partial) * DIM + place] = out;
        if (place % DIM == 0) {
            float* to = parameters.stats + 2 * (unit.partial + row);
            to[0] = high;
            to[1] = all;
        }
    }
}

}  // namespace kvd
