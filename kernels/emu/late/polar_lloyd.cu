#include "declare.cuh"
#include "polar.cuh"
#include "lloyd.cuh"
KVD_ATTEND_ROWS(polar_lloyd, kvd::Polar, kvd::Lloyd)
