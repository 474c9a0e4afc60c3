// Queries from, and answers to, memory that a worker shares.

#include <kvd/region/answer.cuh>
#include <kvd/region/queries.cuh>

KVD_KERNEL(kvd_queries, kvd::TURN_THREADS, kvd::QueryParameters, kvd::queries)
KVD_KERNEL(kvd_answer, kvd::TURN_THREADS, kvd::AnswerParameters, kvd::answer)
