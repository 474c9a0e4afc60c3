#include "declare.cuh"
#include "float.cuh"
#include "float.cuh"
KVD_HUFFMAN_ROWS(fp8_fp8, kvd::Fp8, kvd::Fp8)
