/* Does what a program must not do, and tests that each is refused with its code. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvd.h"

enum { TOKENS = 8, DIM = 64, ROW = DIM * sizeof(float), ENTRIES = 4, QUERIES = 2 };

static kvd_error why;

static void expect(int line, int32_t wanted, int32_t code, const char *part) {
    if (code != wanted || (code != KVD_OK && (why.code != code || !strstr(why.message, part)))) {
        fprintf(stderr, "line %d: code %d in place of %d: %s\n", line, code, wanted, why.message);
        exit(1);
    }
}

#define EXPECT(wanted, part, call) expect(__LINE__, wanted, call, part)

static kvd_connection *connection;
static uint64_t model_id, sequence;

static kvd_query one_query(void) {
    kvd_query query = {sequence, 1, KVD_ABSENT, KVD_ABSENT, KVD_ABSENT, KVD_ABSENT, KVD_ABSENT};
    return query;
}

static kvd_attend_batch batch_of(const kvd_query *queries, uint64_t count) {
    kvd_attend_batch batch = {.struct_bytes = sizeof batch,
                              .model = model_id,
                              .q_heads = 1,
                              .dtype = KVD_F32,
                              .queries = queries,
                              .query_count = count,
                              .q = {.offset = 1 << 16},
                              .out = {.offset = 2 << 16},
                              .lse = 3 << 16};
    return batch;
}

static void refuse_arguments(void) {
    kvd_query query = one_query();
    kvd_attend_batch batch = batch_of(&query, 1);
    EXPECT(KVD_OK, "", kvd_attend(connection, &batch, &why));
    EXPECT(KVD_INVALID_ARGUMENT, "kvd_attend_batch is NULL", kvd_attend(connection, NULL, &why));
    batch.struct_bytes = 8;
    EXPECT(KVD_INVALID_ARGUMENT, "struct_bytes is 8", kvd_attend(connection, &batch, &why));
    batch = batch_of(NULL, 1);
    EXPECT(KVD_INVALID_ARGUMENT, "queries is NULL", kvd_attend(connection, &batch, &why));
    batch = batch_of(&query, UINT64_MAX);
    EXPECT(KVD_INVALID_ARGUMENT, "query_count", kvd_attend(connection, &batch, &why));
    kvd_query many[QUERIES + 1] = {query, query, query};
    batch = batch_of(many, QUERIES + 1);
    EXPECT(KVD_LIMIT_EXCEEDED, "queries_max = 2", kvd_attend(connection, &batch, &why));
    batch = batch_of(&query, 0);
    EXPECT(KVD_INVALID_ARGUMENT, "quer", kvd_attend(connection, &batch, &why));
    batch = batch_of(&query, 1);
    batch.dtype = 9;
    EXPECT(KVD_INVALID_ARGUMENT, "dtype is 9", kvd_attend(connection, &batch, &why));
    batch = batch_of(&query, 1);
    batch.out.offset = 1u << 30;
    EXPECT(KVD_INVALID_ARGUMENT, "out", kvd_attend(connection, &batch, &why));
    batch.out.offset = UINT64_MAX;
    EXPECT(KVD_INVALID_ARGUMENT, "beyond 64 bits", kvd_attend(connection, &batch, &why));
    batch = batch_of(&query, 1);
    batch.q.token_stride = UINT64_MAX;
    kvd_query two = query;
    two.n_q = 2;
    batch.queries = &two;
    EXPECT(KVD_INVALID_ARGUMENT, "q", kvd_attend(connection, &batch, &why));
}

static void refuse_ids_and_ranges(void) {
    kvd_query query = one_query();
    query.sequence = sequence + (1ull << 40);
    kvd_attend_batch batch = batch_of(&query, 1);
    EXPECT(KVD_RESTARTED, "", kvd_attend(connection, &batch, &why));
    query.sequence = sequence + 1000;
    EXPECT(KVD_UNKNOWN_SEQUENCE, "", kvd_attend(connection, &batch, &why));
    batch = batch_of(&query, 1);
    batch.model = model_id + 1000;
    EXPECT(KVD_UNKNOWN_MODEL, "", kvd_attend(connection, &batch, &why));
    EXPECT(KVD_UNKNOWN_SEQUENCE, "", kvd_close_sequence(connection, sequence + 1000, &why));
    kvd_store_rows rows = {.struct_bytes = sizeof rows, .sequence = sequence, .start = 100,
                           .tokens = 1, .k_bytes = ROW, .v_bytes = ROW};
    EXPECT(KVD_RANGE_GAP, "", kvd_store(connection, &rows, NULL, &why));
    rows.start = TOKENS;
    rows.k_bytes = 1;
    EXPECT(KVD_SHAPE_MISMATCH, "", kvd_store(connection, &rows, NULL, &why));
    rows.k_bytes = UINT64_MAX;
    EXPECT(KVD_INVALID_ARGUMENT, "", kvd_store(connection, &rows, NULL, &why));
    uint32_t length = 0;
    EXPECT(KVD_OK, "", kvd_sequence_length(connection, sequence, &length, &why));
    uint64_t fork;
    EXPECT(KVD_OK, "", kvd_fork_sequence(connection, sequence, 4, &fork, &why));
    EXPECT(KVD_OK, "", kvd_truncate_sequence(connection, fork, 3, &why));
    uint32_t forked = 0;
    EXPECT(KVD_OK, "", kvd_sequence_length(connection, fork, &forked, &why));
    if (length != TOKENS || forked != 3) {
        fprintf(stderr, "lengths %u and %u\n", length, forked);
        exit(1);
    }
    EXPECT(KVD_OK, "", kvd_close_sequence(connection, fork, &why));
}

static void fill_the_ring(void) {
    uint64_t tag = 5;
    uint32_t ended = 9;
    EXPECT(KVD_INVALID_ARGUMENT, "no attend is under way",
           kvd_wait_attend(connection, &tag, &ended, &why));
    if (ended != 0) exit(1);
    kvd_query query = one_query(), bad = one_query();
    bad.sequence = sequence + 1000;
    kvd_attend_batch batch = batch_of(&query, 1), refused = batch_of(&bad, 1);
    for (uint64_t i = 0; i < ENTRIES; i++) {
        EXPECT(KVD_OK, "", kvd_submit_attend(connection, i == 2 ? &refused : &batch, i, &why));
    }
    EXPECT(KVD_QUEUE_FULL, "4", kvd_submit_attend(connection, &batch, 9, &why));
    unsigned seen = 0;
    for (uint64_t i = 0; i < ENTRIES; i++) {
        int32_t code = kvd_wait_attend(connection, &tag, &ended, &why);
        expect(__LINE__, tag == 2 ? KVD_UNKNOWN_SEQUENCE : KVD_OK, code, "");
        if (ended != 1) exit(1);
        seen |= 1u << tag;
    }
    if (seen != 15) exit(1);
    /* One from end to end, while another's end is not read. */
    EXPECT(KVD_OK, "", kvd_submit_attend(connection, &batch, 77, &why));
    EXPECT(KVD_OK, "", kvd_attend(connection, &batch, &why));
    EXPECT(KVD_OK, "", kvd_wait_attend(connection, &tag, NULL, &why));
    if (tag != 77) exit(1);
}

static atomic_int refusals;

static void *call_until_refused(void *unused) {
    kvd_error error;
    (void)unused;
    while (atomic_load(&refusals) == 0) {
        uint32_t length;
        int32_t code = kvd_sequence_length(connection, sequence, &length, &error);
        if (code == KVD_INVALID_ARGUMENT && strstr(error.message, "another thread")) {
            atomic_fetch_add(&refusals, 1);
        } else if (code != KVD_OK) {
            fprintf(stderr, "code %d: %s\n", code, error.message);
            exit(1);
        }
    }
    return NULL;
}

static void share_between_threads(void) {
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        if (pthread_create(&threads[i], NULL, call_until_refused, NULL)) exit(1);
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    kvd_options options = {.struct_bytes = sizeof options, .region_path = argv[1],
                           .ring_entries = ENTRIES, .queries_max = QUERIES,
                           .memory_bytes = 1 << 20, .timeout_us = 60 * 1000 * 1000,
                           .spin_us = KVD_ABSENT};
    EXPECT(KVD_OK, "", kvd_connect(&options, &connection, &why));
    kvd_model model = {.struct_bytes = sizeof model, .layers = 1, .kv_heads = 1, .head_dim_k = DIM,
                       .head_dim_v = DIM, .dtype = KVD_F32, .rope = KVD_ROPE_HALF,
                       .name = "misuse", .codec = "no such codec"};
    EXPECT(KVD_INVALID_CODEC, "", kvd_register_model(connection, &model, &model_id, &why));
    model.codec = "raw";
    model.rope = 5;
    EXPECT(KVD_INVALID_ARGUMENT, "rope is 5",
           kvd_register_model(connection, &model, &model_id, &why));
    model.rope = KVD_ROPE_HALF;
    EXPECT(KVD_OK, "", kvd_register_model(connection, &model, &model_id, &why));
    EXPECT(KVD_UNKNOWN_MODEL, "", kvd_open_sequence(connection, model_id + 1000, &sequence, &why));
    EXPECT(KVD_OK, "", kvd_open_sequence(connection, model_id, &sequence, &why));
    kvd_store_rows rows = {.struct_bytes = sizeof rows, .sequence = sequence, .tokens = TOKENS,
                           .k_bytes = TOKENS * ROW, .v_bytes = TOKENS * ROW};
    EXPECT(KVD_OK, "", kvd_store(connection, &rows, NULL, &why));
    refuse_arguments();
    refuse_ids_and_ranges();
    fill_the_ring();
    share_between_threads();
    kvd_disconnect(connection);
    return 0;
}
