/* Huffman coding by huff0 (Zstandard's, in the FiniteStateEntropy library), as `peers.py` runs it
   beside kvd's. Nothing of theirs is here: it links against their sources. To build it (KVD is this
   repository):

     git clone https://github.com/Cyan4973/FiniteStateEntropy && cd FiniteStateEntropy/lib
     gcc -O3 -march=native -I . KVD/docs/peers/huff0.c -o huff0-peer -lm huf_compress.c \
         huf_decompress.c hist.c fse_compress.c fse_decompress.c entropy_common.c

   It runs as

     huff0-peer TURNS

   Symbols of a normal source over 16 levels, at about 2.2 and 2.9 bits of entropy, two of them to a
   byte: huff0's best form for such symbols. One table serves all blocks, as in kvd. Prints JSON:
   nanoseconds of processor time per symbol of every turn, and bits per symbol. */

#define HUF_STATIC_LINKING_ONLY
#include "mem.h"

#include "huf.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BYTES = 1 << 20, LEVELS = 16 };

static uint8_t source[BYTES], decoded[BYTES], coded[2 * BYTES];
static size_t lengths[BYTES / 512];

static double nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

static uint32_t draw(void) {
    static uint64_t state = 42;
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (uint32_t)(state >> 40);
}

static unsigned symbol(double deviation) {
    const double u = (draw() + 0.5) / (1 << 24), v = (draw() + 0.5) / (1 << 24);
    const double normal = sqrt(-2 * log(u)) * cos(2 * M_PI * v);
    const double level = floor(normal * deviation + LEVELS / 2.0);
    return (unsigned)fmin(fmax(level, 0), LEVELS - 1);
}

// Fills the source; returns the entropy of its symbols in bits.
static double fill(double deviation) {
    double count[LEVELS] = {0}, bits = 0;
    for (size_t i = 0; i < BYTES; i++) {
        const unsigned low = symbol(deviation), high = symbol(deviation);
        count[low]++, count[high]++;
        source[i] = (uint8_t)(low | high << 4);
    }
    for (int s = 0; s < LEVELS; s++) {
        const double part = count[s] / (2.0 * BYTES);
        if (part > 0) bits -= part * log2(part);
    }
    return bits;
}

static size_t checked(size_t code) {
    if (HUF_isError(code)) {
        fprintf(stderr, "huff0: %s\n", HUF_getErrorName(code));
        exit(1);
    }
    return code;
}

static size_t encode(const HUF_CElt *table, size_t block) {
    size_t at = 0;
    for (size_t i = 0; i < BYTES / block; i++) {
        const size_t room = sizeof coded - at;
        lengths[i] = checked(HUF_compress4X_usingCTable(coded + at, room, source + i * block, block, table));
        at += lengths[i];
    }
    return at;
}

static void decode(const HUF_DTable *table, size_t block) {
    size_t at = 0;
    for (size_t i = 0; i < BYTES / block; i++) {
        checked(HUF_decompress4X2_usingDTable(decoded + i * block, block, coded + at, lengths[i], table));
        at += lengths[i];
    }
}

static void row(const char *what, size_t block, double entropy, double bits, const double *ns, int turns) {
    static int rows;
    printf("%s{\"name\": \"huff0 %s, pairs, %zu symbols at %.2f bits\", \"bits\": %.3f, \"ns\": [",
           rows++ ? ",\n" : "", what, 2 * block, entropy, bits);
    for (int turn = 0; turn < turns; turn++) printf("%s%.4f", turn ? ", " : "", ns[turn]);
    printf("]}");
}

static void run(double deviation, size_t block, int turns) {
    const double entropy = fill(deviation);
    unsigned count[256] = {0};
    for (size_t i = 0; i < BYTES; i++) count[source[i]]++;
    // A table's last symbol must occur: the header leaves its length out.
    unsigned last = 255;
    while (!count[last]) last--;
    HUF_CREATE_STATIC_CTABLE(codes, 255);
    // 12 bits are the longest codes that its two-symbol decoder takes.
    const size_t longest = checked(HUF_buildCTable(codes, count, last, 12));
    uint8_t header[512];
    const size_t written = checked(HUF_writeCTable(header, sizeof header, codes, last, (unsigned)longest));
    HUF_CREATE_STATIC_DTABLEX2(table, 12);
    checked(HUF_readDTableX2(table, header, written));
    double *encoding = malloc(sizeof(double) * (size_t)turns), *decoding = malloc(sizeof(double) * (size_t)turns);
    size_t total = 0;
    for (int turn = -1; turn < turns; turn++) { // the first one warms up
        const double start = nanoseconds();
        total = encode(codes, block);
        const double middle = nanoseconds();
        decode(table, block);
        const double end = nanoseconds();
        if (turn >= 0) encoding[turn] = (middle - start) / (2.0 * BYTES), decoding[turn] = (end - middle) / (2.0 * BYTES);
    }
    if (memcmp(source, decoded, BYTES)) {
        fprintf(stderr, "huff0: decoded bytes differ\n");
        exit(1);
    }
    const double bits = 8.0 * (double)total / (2.0 * BYTES);
    row("decode 4X2", block, entropy, bits, decoding, turns);
    row("encode", block, entropy, bits, encoding, turns);
    free(encoding), free(decoding);
}

int main(int count, char **arguments) {
    const int turns = count == 2 ? atoi(arguments[1]) : 0;
    if (turns < 1) {
        fprintf(stderr, "usage: %s TURNS\n", arguments[0]);
        return 2;
    }
    printf("[");
    for (int which = 0; which < 2; which++) {
        const double deviation = which ? 1.806 : 1.112;
        run(deviation, 1024, turns);
        run(deviation, 4096, turns);
        run(deviation, 65536, turns);
    }
    printf("]\n");
    return 0;
}
