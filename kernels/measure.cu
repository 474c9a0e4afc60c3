// Read bandwidth of a kernel that only reads; other kernels are compared with it.

#include <kvd/measure/read.cuh>

KVD_KERNEL(kvd_read, kvd::READ_THREADS, kvd::ReadParameters, kvd::read)
