/* Decode attention of ggml (llama.cpp) or of ik_llama.cpp's fork of it, as `peers.py` runs it beside
   kvd. Nothing of theirs is here: it links against either one's library. To build it (KVD is this
   repository):

     git clone https://github.com/ggml-org/ggml && cd ggml
     cmake -G Ninja -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=OFF \
         -DBUILD_SHARED_LIBS=OFF -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF
     cmake --build build
     g++ -O3 -march=native -std=c++17 -I include KVD/docs/peers/ggml.cpp -o ggml-peer \
         build/src/libggml.a build/src/libggml-cpu.a build/src/libggml-base.a -lpthread -ldl

   and for ik_llama.cpp, whose attention kernels alone take tens of minutes:

     git clone https://github.com/ikawrakow/ik_llama.cpp && cd ik_llama.cpp
     cmake -G Ninja -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=OFF \
         -DBUILD_SHARED_LIBS=OFF -DGGML_IQK_FA_ALL_QUANTS=ON -DLLAMA_BUILD_TESTS=OFF \
         -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF
     cmake --build build --target ggml
     g++ -O3 -march=native -std=c++17 -I ggml/include KVD/docs/peers/ggml.cpp -o ik-peer \
         build/ggml/src/libggml.a -lpthread -ldl

   It runs as

     ggml-peer NAME CONTEXT BUFFER_BYTES TURNS

   One query token, 32 query and 8 KV heads of 128 channels, one thread on the core it is started on.
   K and V lie by head, every head's rows one after the other, which is faster for both libraries
   than the layout they use themselves (heads side by side in every token, "native" below). Caches
   rotate over BUFFER_BYTES. Prints JSON: nanoseconds of processor time per token and KV head of
   every call, and the relative error of the output against f64 over the rows as dequantized. */

#include "ggml.h"
#if __has_include("ggml-cpu.h")
#include "ggml-cpu.h"
#endif

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t DIM = 128, KV_HEADS = 8, GROUP = 4, HEADS = KV_HEADS * GROUP;
// A softmax that is neither flat nor a single token, as in `kvd bench attend`.
constexpr float SCORE_DEVIATION = 1.3F;

struct Case {
    const char *label;
    ggml_type type;
    bool native;
};

struct Rows {
    std::vector<float> k, v; // [KV_HEADS, context, DIM], dequantized
};

double seconds() {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// What the two libraries call differently.
#if __has_include("ggml-cpu.h")
void quantize(ggml_type type, const float *from, void *to, int64_t count) {
    ggml_quantize_chunk(type, from, to, 0, 1, count, nullptr);
}
void dequantize(ggml_type type, const void *from, float *to, int64_t count) {
    ggml_get_type_traits(type)->to_float(from, to, count);
}
ggml_cplan planned(ggml_cgraph *graph) { return ggml_graph_plan(graph, 1, nullptr); }
#else
void quantize(ggml_type type, const float *from, void *to, int64_t count) {
    ggml_quantize_chunk(type, from, to, 0, 1, count, nullptr, nullptr);
}
void dequantize(ggml_type type, const void *from, float *to, int64_t count) {
    ggml_internal_get_type_traits(type).to_float(from, to, count);
}
ggml_cplan planned(ggml_cgraph *graph) { return ggml_graph_plan(graph, 1); }
#endif

// Normal rows, quantized into `to` in either layout; what they then stand for goes to `kept`.
void fill(ggml_tensor *to, std::mt19937 &random, std::vector<float> &kept) {
    const int64_t context = to->ne[1];
    std::normal_distribution<float> normal;
    std::vector<float> row(DIM);
    kept.resize(KV_HEADS * context * DIM);
    for (int64_t head = 0; head < KV_HEADS; head++) {
        for (int64_t token = 0; token < context; token++) {
            for (float &x : row) x = normal(random);
            char *at = static_cast<char *>(to->data) + token * to->nb[1] + head * to->nb[2];
            quantize(to->type, row.data(), at, DIM);
            dequantize(to->type, at, &kept[(head * context + token) * DIM], DIM);
        }
    }
}

ggml_tensor *cache(ggml_context *ctx, const Case &of, int64_t context) {
    if (!of.native) return ggml_new_tensor_3d(ctx, of.type, DIM, context, KV_HEADS);
    ggml_tensor *rows = ggml_new_tensor_3d(ctx, of.type, DIM, KV_HEADS, context);
    return ggml_permute(ctx, rows, 0, 2, 1, 3);
}

double error_of(const float *q, const Rows &rows, const float *out, int64_t context) {
    double difference = 0, norm = 0;
    std::vector<double> weights(context);
    for (int64_t head = 0; head < HEADS; head++) {
        const float *query = q + head * DIM;
        const int64_t first = head / GROUP * context;
        double largest = -INFINITY, sum = 0;
        for (int64_t t = 0; t < context; t++) {
            double dot = 0;
            for (int64_t c = 0; c < DIM; c++) dot += double(query[c]) * rows.k[(first + t) * DIM + c];
            weights[t] = dot / std::sqrt(double(DIM));
            largest = std::max(largest, weights[t]);
        }
        for (double &weight : weights) sum += weight = std::exp(weight - largest);
        for (int64_t c = 0; c < DIM; c++) {
            double exact = 0;
            for (int64_t t = 0; t < context; t++) exact += weights[t] / sum * rows.v[(first + t) * DIM + c];
            const double off = out[head * DIM + c] - exact;
            difference += off * off;
            norm += exact * exact;
        }
    }
    return std::sqrt(difference / norm);
}

void run(const char *name, const Case &of, int64_t context, double buffer, int turns, bool first) {
    const double bytes = 2.0 * KV_HEADS * context * ggml_row_size(of.type, DIM);
    const int copies = std::max(2, int(buffer / bytes));
    const size_t work = size_t(64) << 20;
    ggml_init_params params{size_t(copies * (bytes + (1 << 20))) + work, nullptr, false};
    ggml_context *ctx = ggml_init(params);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    ggml_tensor *q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, DIM, 1, HEADS);
    float *query = static_cast<float *>(q->data);
    for (int64_t i = 0; i < DIM * HEADS; i++) query[i] = SCORE_DEVIATION * normal(random);
    ggml_tensor *mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, context, 64);
    for (int64_t i = 0; i < context * 64; i++) static_cast<ggml_fp16_t *>(mask->data)[i] = 0;
    std::vector<ggml_cgraph *> graphs;
    Rows rows;
    ggml_tensor *out = nullptr, *first_k = nullptr, *first_v = nullptr;
    for (int copy = 0; copy < copies; copy++) {
        ggml_tensor *k = cache(ctx, of, context), *v = cache(ctx, of, context);
        if (copy == 0) {
            fill(first_k = k, random, rows.k);
            fill(first_v = v, random, rows.v);
        } else {
            memcpy(k->data, first_k->data, size_t(bytes / 2));
            memcpy(v->data, first_v->data, size_t(bytes / 2));
        }
        const float scale = 1.0F / std::sqrt(float(DIM));
        ggml_tensor *node = ggml_flash_attn_ext(ctx, q, k, v, mask, scale, 0.0F, 0.0F);
        ggml_cgraph *graph = ggml_new_graph_custom(ctx, 16, false);
        ggml_build_forward_expand(graph, node);
        graphs.push_back(graph);
        if (!copy) out = node;
    }
    ggml_cplan plan = planned(graphs[0]);
    std::vector<uint8_t> space(plan.work_size + 1);
    plan.work_data = space.data();
    ggml_graph_compute(graphs[0], &plan);
    const double error = error_of(query, rows, static_cast<float *>(out->data), context);
    printf("%s{\"name\": \"%s %s\", \"error\": %.2e, \"ns\": [", first ? "" : ",\n", name, of.label, error);
    const int calls = std::max(1, int(4e5 / double(context * KV_HEADS)));
    for (int call = 0; call < calls * turns; call++) {
        const double start = seconds();
        ggml_graph_compute(graphs[call % copies], &plan);
        const double ns = 1e9 * (seconds() - start) / double(context * KV_HEADS);
        printf("%s%.2f", call ? ", " : "", ns);
    }
    printf("]}");
    ggml_free(ctx);
}

} // namespace

int main(int count, char **arguments) {
    if (count != 5) {
        fprintf(stderr, "usage: %s NAME CONTEXT BUFFER_BYTES TURNS\n", arguments[0]);
        return 2;
    }
    const Case cases[] = {
        {"f16 by head", GGML_TYPE_F16, false},   {"q8_0 by head", GGML_TYPE_Q8_0, false},
        {"q4_0 by head", GGML_TYPE_Q4_0, false}, {"q4_0 native", GGML_TYPE_Q4_0, true},
    };
    bool first = true;
    printf("[");
    for (const Case &of : cases) {
        run(arguments[1], of, atoll(arguments[2]), atof(arguments[3]), atoi(arguments[4]), first);
        first = false;
    }
    printf("]\n");
}
