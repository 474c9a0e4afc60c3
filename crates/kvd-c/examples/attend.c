/* Stores some tokens in a daemon and asks for attention over them, in place.
 *
 *     cc attend.c -I.. -lkvd_c -o attend && ./attend /run/kvd/region.sock
 *
 * Prints the answer: all outputs, then all log-sum-exps, one number a line.
 */
#include <stdio.h>
#include <stdlib.h>

#include "kvd.h"

enum { TOKENS = 100, KV_HEADS = 2, Q_HEADS = 4, DIM = 64, PADDED = DIM + 16 };

static kvd_error why;

static void check(int32_t code, const char *step) {
    if (code != KVD_OK) {
        fprintf(stderr, "%s: code %d: %s\n", step, code, why.message);
        exit(1);
    }
}

/* Any numbers that both sides of a test can make. */
static void fill(float *rows, uint32_t count, uint32_t seed) {
    for (uint32_t i = 0; i < count; i++) {
        rows[i] = (float)((int)((i * 7 + seed) % 61) - 30) / 16.0f;
    }
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: attend REGION_SOCKET\n");
        return 2;
    }
    kvd_options options = {
        .struct_bytes = sizeof options, .region_path = argv[1], .timeout_us = 60 * 1000 * 1000};
    kvd_connection *connection;
    check(kvd_connect(&options, &connection, &why), "connect");
    uint64_t bytes;
    char *memory = kvd_memory(connection, &bytes);

    kvd_model model = {.struct_bytes = sizeof model,
                       .layers = 1,
                       .kv_heads = KV_HEADS,
                       .head_dim_k = DIM,
                       .head_dim_v = DIM,
                       .dtype = KVD_F32,
                       .rope = KVD_ROPE_HALF,
                       .name = "attend-c",
                       .codec = "kivi-4; recent=0"};
    uint64_t model_id, sequence;
    check(kvd_register_model(connection, &model, &model_id, &why), "register");
    check(kvd_open_sequence(connection, model_id, &sequence, &why), "open");

    uint32_t values = TOKENS * KV_HEADS * DIM;
    kvd_store_rows rows = {.struct_bytes = sizeof rows,
                           .sequence = sequence,
                           .tokens = TOKENS,
                           .k = 0,
                           .k_bytes = values * sizeof(float),
                           .v = values * sizeof(float),
                           .v_bytes = values * sizeof(float)};
    fill((float *)(memory + rows.k), values, 1);
    fill((float *)(memory + rows.v), values, 2);
    uint32_t length;
    check(kvd_store(connection, &rows, &length, &why), "store");

    /* One query token. Each head's row is padded, as an engine's own rows may be. */
    kvd_query query = {.sequence = sequence,
                       .n_q = 1,
                       .kv_length = KVD_ABSENT,
                       .position = KVD_ABSENT,
                       .start = KVD_ABSENT,
                       .end = KVD_ABSENT,
                       .sliding_window = KVD_ABSENT};
    uint64_t row = PADDED * sizeof(float);
    kvd_attend_batch batch = {.struct_bytes = sizeof batch,
                              .model = model_id,
                              .q_heads = Q_HEADS,
                              .dtype = KVD_F32,
                              .queries = &query,
                              .query_count = 1,
                              .q = {.offset = 1 << 20, .head_stride = row},
                              .out = {.offset = 2 << 20, .head_stride = row},
                              .lse = 3 << 20};
    for (uint32_t head = 0; head < Q_HEADS; head++) {
        fill((float *)(memory + batch.q.offset + head * row), DIM, 3 + head);
    }
    check(kvd_submit_attend(connection, &batch, 42, &why), "submit");
    uint64_t tag;
    check(kvd_wait_attend(connection, &tag, NULL, &why), "wait");
    if (tag != 42 || length != TOKENS) {
        fprintf(stderr, "tag %d, length %u\n", (int)tag, length);
        return 1;
    }
    for (uint32_t head = 0; head < Q_HEADS; head++) {
        const float *out = (const float *)(memory + batch.out.offset + head * row);
        for (uint32_t channel = 0; channel < DIM; channel++) {
            printf("%.9g\n", out[channel]);
        }
    }
    for (uint32_t head = 0; head < Q_HEADS; head++) {
        printf("%.9g\n", ((const float *)(memory + batch.lse))[head]);
    }
    check(kvd_close_sequence(connection, sequence, &why), "close");
    kvd_disconnect(connection);
    return 0;
}
