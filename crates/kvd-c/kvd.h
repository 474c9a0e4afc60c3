/* kvd.h: keep KV caches in a kvd daemon of this machine, and have attention over them answered.
 *
 * Payloads lie in memory that the process shares with the daemon; attends go through a ring in it,
 * without a system call while both sides are awake. docs/contract.md says what each call promises.
 *
 * Every function but the three that answer a number or a pointer returns KVD_OK or one of the other
 * codes, and then says why in `error`, which may be NULL. No function unwinds, aborts or keeps a
 * pointer of its caller.
 *
 * Threads: a connection is used by one thread at a time, and by any in turn. A second one at the
 * same time is refused with KVD_INVALID_ARGUMENT. kvd_disconnect comes after every other call.
 * Different connections have nothing to do with each other.
 *
 * Versions: `struct_bytes` is sizeof of the struct as the program was compiled. Later libraries
 * take shorter structs of earlier headers; what is absent is as if it were 0.
 */
#ifndef KVD_H
#define KVD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes where a program that was compiled with an earlier header would no longer work. */
#define KVD_ABI_VERSION 1

/* Of a number in kvd_query: not given. */
#define KVD_ABSENT UINT32_MAX

enum kvd_code {
    KVD_OK = 0,
    KVD_INVALID_ARGUMENT = 1,
    KVD_SHAPE_MISMATCH = 2,
    KVD_NON_FINITE = 3,
    KVD_INVALID_CODEC = 4,
    KVD_INVALID_CALIBRATION = 5,
    KVD_UNKNOWN_MODEL = 6,
    KVD_UNKNOWN_SEQUENCE = 7,
    KVD_UNKNOWN_SESSION = 8,
    KVD_UNKNOWN_LEASE = 9,
    KVD_NAMESPACE_DENIED = 10,
    KVD_UNAUTHENTICATED = 11,
    KVD_PERMISSION_DENIED = 12,
    KVD_RANGE_GAP = 13,
    KVD_RANGE_OVERLAP = 14,
    KVD_RANGE_CONFLICT = 15,
    KVD_RANGE_NOT_STORED = 16,
    KVD_SEQUENCE_BUSY = 17,
    KVD_MODEL_IN_USE = 18,
    KVD_POOL_FULL = 19,
    KVD_QUEUE_FULL = 20,
    KVD_LIMIT_EXCEEDED = 21,
    KVD_QUOTA_EXCEEDED = 22,
    KVD_MESSAGE_TOO_LARGE = 23,
    KVD_DEADLINE_EXCEEDED = 24,
    KVD_CANCELLED = 25,
    KVD_SHUTTING_DOWN = 26,
    KVD_CORRUPT_PAGE = 27,
    KVD_DEVICE_FAILED = 28,
    KVD_INTERNAL = 29,
    /* The daemon cannot be reached, or has gone: connect again. */
    KVD_DISCONNECTED = 100,
    /* The daemon is another than the one that gave the ids: register, open and store again. */
    KVD_RESTARTED = 101
};

enum kvd_dtype { KVD_F32 = 1, KVD_F16 = 2, KVD_BF16 = 3 };

enum kvd_rope { KVD_ROPE_HALF = 1, KVD_ROPE_INTERLEAVED = 2 };

/* Why a call failed. */
typedef struct kvd_error {
    int32_t code;
    /* Milliseconds after which the same call may succeed; 0: it will not by itself. */
    uint32_t retry_after_ms;
    /* UTF-8, ends with 0; cut where it is longer. */
    char message[504];
} kvd_error;

/* How to connect. */
typedef struct kvd_options {
    uint32_t struct_bytes;
    /* Attends under way at most, a power of two; 0: 64. */
    uint32_t ring_entries;
    /* The daemon's server.listen_region. */
    const char *region_path;
    /* Namespace; NULL: default. */
    const char *name_space;
    /* Name of the session that owns all sequences of the connection; NULL: one of its own. */
    const char *session;
    /* Shared memory for payloads; 0: 16 MiB. */
    uint64_t memory_bytes;
    /* Deadline of each call; 0: none. */
    uint64_t timeout_us;
    /* Queries of an attend at most; 0: 64. */
    uint32_t queries_max;
    /* Looks for an end so long before it sleeps, at most; 0: 100, KVD_ABSENT: not at all. */
    uint32_t spin_us;
} kvd_options;

/* A model. */
typedef struct kvd_model {
    uint32_t struct_bytes;
    uint32_t layers;
    uint32_t kv_heads;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    /* Tokens of a page; 0: the daemon's default. */
    uint32_t block_tokens;
    /* Of K and V: enum kvd_dtype. */
    uint32_t dtype;
    /* enum kvd_rope. */
    uint32_t rope;
    const char *name;
    /* Preset or codec spec; NULL: kivi-4. */
    const char *codec;
    /* Calibration artefact; NULL where the codec needs none. */
    const void *calibration;
    uint64_t calibration_bytes;
} kvd_model;

/* K and V of some tokens in one layer. */
typedef struct kvd_store_rows {
    uint32_t struct_bytes;
    uint32_t layer;
    uint64_t sequence;
    /* Position of the first token, and tokens. */
    uint32_t start;
    uint32_t tokens;
    /* Offsets in kvd_memory of [tokens, kv_heads, head_dim], and bytes. */
    uint64_t k;
    uint64_t k_bytes;
    uint64_t v;
    uint64_t v_bytes;
} kvd_store_rows;

/* Rows of heads and tokens in kvd_memory. */
typedef struct kvd_rows {
    uint64_t offset;
    /* Bytes from token to token and from head to head; 0: dense. */
    uint64_t token_stride;
    uint64_t head_stride;
} kvd_rows;

/* Query tokens of one sequence. KVD_ABSENT stands for what is not given. */
typedef struct kvd_query {
    uint64_t sequence;
    uint32_t n_q;
    uint32_t kv_length;
    uint32_t position;
    uint32_t start;
    uint32_t end;
    uint32_t sliding_window;
} kvd_query;

/* An attend. Until its end is read, what it names in kvd_memory belongs to the daemon. */
typedef struct kvd_attend_batch {
    uint32_t struct_bytes;
    uint32_t layer;
    uint64_t model;
    uint32_t q_heads;
    /* Of queries and outputs. */
    uint32_t dtype;
    /* 0: 1 / sqrt(head_dim_k). */
    float scale;
    /* 0: none. */
    float soft_cap;
    /* Copied before the call returns. */
    const kvd_query *queries;
    uint64_t query_count;
    /* [sum of n_q, q_heads, head_dim_k], read. */
    kvd_rows q;
    /* [sum of n_q, q_heads, head_dim_v], written. */
    kvd_rows out;
    /* Offset of [sum of n_q, q_heads], f32, written. */
    uint64_t lse;
} kvd_attend_batch;

typedef struct kvd_connection kvd_connection;

/* KVD_ABI_VERSION of the library. */
uint32_t kvd_abi_version(void);

/* Connects, and holds a session that is closed soon after the connection, however it ends.
 * `*connection` is NULL after a failure. */
int32_t kvd_connect(const kvd_options *options, kvd_connection **connection, kvd_error *error);

/* Ends a connection and unmaps its memory; of NULL nothing. */
void kvd_disconnect(kvd_connection *connection);

/* The memory that offsets count in, and its bytes; NULL where the arguments are. It begins on a
 * page and stays where it is until kvd_disconnect. */
void *kvd_memory(const kvd_connection *connection, uint64_t *bytes);

/* Registers a model; the same content again gives the same id. A calibration of more than 128 KiB
 * goes through a second region for as long as the call takes (`limits.regions_max`); it may be as
 * large as the daemon takes it by gRPC (`server.message_bytes_max`, `limits.calibration_bytes_max`). */
int32_t kvd_register_model(kvd_connection *connection, const kvd_model *model, uint64_t *id,
                           kvd_error *error);

/* Opens an empty sequence. */
int32_t kvd_open_sequence(kvd_connection *connection, uint64_t model, uint64_t *sequence,
                          kvd_error *error);

/* A new sequence that shares the first `length` tokens of another; KVD_ABSENT: all. */
int32_t kvd_fork_sequence(kvd_connection *connection, uint64_t sequence, uint32_t length,
                          uint64_t *fork, kvd_error *error);

/* Forgets the tokens from `length` on. */
int32_t kvd_truncate_sequence(kvd_connection *connection, uint64_t sequence, uint32_t length,
                              kvd_error *error);

/* Tokens that are stored on every layer. */
int32_t kvd_sequence_length(kvd_connection *connection, uint64_t sequence, uint32_t *length,
                            kvd_error *error);

/* Closes a sequence and frees what only it held. */
int32_t kvd_close_sequence(kvd_connection *connection, uint64_t sequence, kvd_error *error);

/* Stores rows; `length`, which may be NULL, is that of the layer then. After
 * KVD_DEADLINE_EXCEEDED the daemon may go on: leave the rows as they are until the next call that
 * is not about attends has been answered; it waits for this one first. */
int32_t kvd_store(kvd_connection *connection, const kvd_store_rows *rows, uint32_t *length,
                  kvd_error *error);

/* One attend from end to end. After KVD_DEADLINE_EXCEEDED the daemon may still write `out` and
 * `lse`: give them to nothing else on this connection. */
int32_t kvd_attend(kvd_connection *connection, const kvd_attend_batch *batch, kvd_error *error);

/* Begins an attend; `tag` comes back with its end. KVD_QUEUE_FULL while ring_entries of them have
 * ends that were not read. */
int32_t kvd_submit_attend(kvd_connection *connection, const kvd_attend_batch *batch, uint64_t tag,
                          kvd_error *error);

/* Waits for the end of any attend that kvd_submit_attend has begun; in `tag`, whose it is, also
 * where that was refused. `ended`, which may be NULL, is 1 where an attend has ended and 0 where
 * the wait has failed: by its deadline, or because none is under way. */
int32_t kvd_wait_attend(kvd_connection *connection, uint64_t *tag, uint32_t *ended,
                        kvd_error *error);

#ifdef __cplusplus
}
#endif

#endif
