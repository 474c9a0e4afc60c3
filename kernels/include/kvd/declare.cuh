// How an attention kernel is declared: `kvd_attend_<keys>_<values>_<rows>`, for one, four and eight
// query rows at a time. The host names them so (crates/kvd-cuda/src/side.rs).
#pragma once

#include "attend.cuh"

#define KVD_ATTEND(name, Key, Value, rows)                                                       \
    KVD_KERNEL(kvd_attend_##name##_##rows, kvd::ATTEND_THREADS, kvd::AttendParameters,           \
               (kvd::attend<Key, Value, rows>))
#define KVD_ATTEND_ROWS(name, Key, Value)                                                        \
    KVD_ATTEND(name, Key, Value, 1)                                                              \
    KVD_ATTEND(name, Key, Value, 4)                                                              \
    KVD_ATTEND(name, Key, Value, 8)
