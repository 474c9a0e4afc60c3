// How an attention kernel is declared: `kvd_attend_<keys>_<values>_<rows>`, for one, four and eight
// query rows at a time, and `kvd_attend_huffman_...` where a side may hold Huffman codes. The host
// names them so (crates/kvd-cuda/src/kernel_choice.rs).
#pragma once

#include "attend.cuh"
#include "specialized.cuh"

#define KVD_ATTEND(name, Key, Value, rows)                                                       \
    KVD_KERNEL(kvd_attend_##name##_##rows, kvd::ATTEND_THREADS, kvd::AttendParameters,           \
               (kvd::attend<Key, Value, rows, false>))
#define KVD_ATTEND_ROWS(name, Key, Value)                                                        \
    KVD_ATTEND(name, Key, Value, 1)                                                              \
    KVD_ATTEND(name, Key, Value, 4)                                                              \
    KVD_ATTEND(name, Key, Value, 8)

// With products on tensor cores: any shape takes more registers than four thread blocks on a multiprocessor
// leave, and with those of one codec as constants, for as many rows as most models have query heads to a KV
// head, `kvd_attend_<codec>_<rows>`.
#define KVD_MIXED(name, Key, Value, rows)                                                        \
    KVD_KERNEL_OF(kvd_attend_##name##_##rows, kvd::ATTEND_THREADS, 3, kvd::AttendParameters,     \
                  (kvd::attend<Key, Value, rows, false>))
#define KVD_TENSOR(name, Key, Value, rows)                                                       \
    KVD_MIXED(name, kvd::Tensor<Key>, kvd::Tensor<Value>, rows)
#define KVD_TENSOR_ROWS(name, Key, Value)                                                        \
    KVD_TENSOR(name, Key, Value, 1)                                                              \
    KVD_TENSOR(name, Key, Value, 4)                                                              \
    KVD_TENSOR(name, Key, Value, 8)
// Pairs with a side of halves, which are compiled late (kvd-cuda/src/jit).
#define KVD_MIXED_ROWS(name, Key, Value)                                                         \
    KVD_MIXED(name, Key, Value, 1)                                                               \
    KVD_MIXED(name, Key, Value, 4)                                                               \
    KVD_MIXED(name, Key, Value, 8)
#define KVD_FIXED(codec, Key, Value, KeyShape, ValueShape)                                       \
    KVD_KERNEL(kvd_attend_##codec##_4, kvd::ATTEND_THREADS, kvd::AttendParameters,               \
               (kvd::attend<kvd::Tensor<Key>, kvd::Tensor<Value>, 4, false,                      \
                            kvd::Fixed<KeyShape, ValueShape>>))

// Decoded chunks leave room for three thread blocks on a multiprocessor at most, which may have more
// registers each.
#define KVD_HUFFMAN(name, Key, Value, rows)                                                      \
    KVD_KERNEL_OF(kvd_attend_huffman_##name##_##rows, kvd::ATTEND_THREADS, 3,                    \
                  kvd::AttendParameters, (kvd::attend<Key, Value, rows, true>))
#define KVD_HUFFMAN_ROWS(name, Key, Value)                                                       \
    KVD_HUFFMAN(name, Key, Value, 1)                                                             \
    KVD_HUFFMAN(name, Key, Value, 4)                                                             \
    KVD_HUFFMAN(name, Key, Value, 8)
