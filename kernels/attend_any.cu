// Every other pair.

#include <kvd/declare.cuh>
#include <kvd/any.cuh>

KVD_ATTEND(any_any, kvd::Any, kvd::Any, 8)
