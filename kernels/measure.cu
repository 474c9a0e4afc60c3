// What a GPU's memory gives a kernel that only reads: beside the others it says what they reach.

#include <kvd/measure/read.cuh>

KVD_KERNEL(kvd_read, kvd::READ_THREADS, kvd::ReadParameters, kvd::read)
