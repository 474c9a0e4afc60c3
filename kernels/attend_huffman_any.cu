// Every other pair with Huffman codes.

#include <kvd/declare.cuh>
#include <kvd/any.cuh>

KVD_HUFFMAN(any_any, kvd::Any, kvd::Any, 8)
