// Which tiles of a unit's pages its query rows see, one after another.
#pragma once

#include "page.cuh"

namespace kvd {

// A tile that some row of the unit sees.
struct Place {
    const PageEntry* page;
    unsigned tile;
    // Rows of the tile that hold seen tokens.
    unsigned from;
    unsigned to;
};

// Finds the first tile at or after `index` (a page of the unit) and `tile` with a seen token.
KVD_DEVICE bool seek(const AttendParameters& parameters, const Unit& unit, Range seen,
                     unsigned& index, unsigned& tile, Place& place) {
    for (; index < unit.pages; index++, tile = 0) {
        const PageEntry& page = parameters.pages[unit.first_page + index];
        const unsigned skipped = seen.from > page.first_token ? seen.from - page.first_token : 0;
        const unsigned taken = seen.to > page.first_token ? seen.to - page.first_token : 0;
        const unsigned from = page.first_row + least(skipped, page.rows);
        const unsigned to = page.first_row + least(taken, page.rows);
        tile = most(tile, from / TILE_TOKENS);
        const unsigned start = tile * TILE_TOKENS;
        if (from < to && start < to) {
            place = {&page, tile, most(from, start) - start, least(to, start + TILE_TOKENS) - start};
            return true;
        }
    }
    return false;
}

}  // namespace kvd
