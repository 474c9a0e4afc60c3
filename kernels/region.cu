// Queries from, answers to, and rows to store from memory that a worker shares.

#include <kvd/region/answer.cuh>
#include <kvd/region/queries.cuh>
#include <kvd/region/rows.cuh>
#include <kvd/region/copy.cuh>

KVD_KERNEL(kvd_queries, kvd::REGION_THREADS, kvd::QueryParameters, kvd::queries)
KVD_KERNEL(kvd_answer, kvd::REGION_THREADS, kvd::AnswerParameters, kvd::answer)
KVD_KERNEL(kvd_stage, kvd::REGION_THREADS, kvd::StageParameters, kvd::stage)
KVD_KERNEL(kvd_rows, kvd::REGION_THREADS, kvd::RowsParameters, kvd::rows)
