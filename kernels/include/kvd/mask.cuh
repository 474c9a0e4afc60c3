// Which tiles of a unit's pages its query rows see, one after another.
#pragma once

#include "page.cuh"

namespace kvd {

// Tokens that query row `row` of a unit sees: the causal rule and the sliding window.
KVD_DEVICE Range visible(const AttendUnit& unit, unsigned row) {
    const unsigned token = (unit.first_row + row) / unit.heads;
    const unsigned position = unit.position > ~0u - 1 - token ? ~0u - 1 : unit.position + token;
    const unsigned to = position + 1;
    return {unit.window && to > unit.window ? to - unit.window : 0, to};
}

// A tile that some row of the unit sees.
struct Place {
    const PageEntry* page;
    unsigned tile;
    // Rows of the tile that hold seen tokens.
    unsigned from;
    unsigned to;
};

// Rows of a page that hold seen tokens.
KVD_DEVICE Range seen_rows(const PageEntry& page, Range seen) {
    const unsigned skipped = seen.from > page.first_token ? seen.from - page.first_token : 0;
    const unsigned taken = seen.to > page.first_token ? seen.to - page.first_token : 0;
    return {page.first_row + least(skipped, page.rows), page.first_row + least(taken, page.rows)};
}

// Finds the first tile at or after `index` (a page of the unit) and `tile` with a seen token.
KVD_DEVICE bool seek(const AttendParameters& parameters, const AttendUnit& unit, Range seen,
                     unsigned& index, unsigned& tile, Place& place) {
    for (; index < unit.pages; index++, tile = 0) {
        const PageEntry& page = parameters.pages[unit.first_page + index];
        const Range rows = seen_rows(page, seen);
        tile = most(tile, rows.from / TILE_TOKENS);
        const unsigned start = tile * TILE_TOKENS;
        if (rows.from < rows.to && start < rows.to) {
            place = {&page, tile, most(rows.from, start) - start,
                     least(rows.to, start + TILE_TOKENS) - start};
            return true;
        }
    }
    return false;
}

}  // namespace kvd
