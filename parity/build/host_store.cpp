// The store's CUDA source compiled for a CPU through host_shim.h: a C function for ctypes, and, with PARITY_MAIN, a
// program that serves one request from a file, for sanitizers. PARITY_SOURCE names the .cu; PARITY_MODE and
// PARITY_LANES choose what is built.
#include "host_shim.h"

#define PARITY_HOST 1
#include PARITY_SOURCE

#ifndef PARITY_LANES  // lanes a token: one width, or 0 for all
#define PARITY_LANES 8
#endif
#ifndef PARITY_MODE
#define PARITY_MODE -1
#endif

namespace {

struct Request {
    int mode, pooled_bf16, weight_bf16, lanes;  // mode = 4 * format + 2 * published + fake_fp4
    const void *pooled, *norm_weight;
    float eps;
    const int* positions;
    const float* rope_table;
    const long long* out_loc;
    unsigned char* kv_cache;
    long long page_stride, slots;
    int max_position, n;
};

template <int MODE, class Pooled, class Weight, int LANES> std::string run(const Request& r) {
    const unsigned blocks = (unsigned)(((long long)r.n * LANES + indexer::THREADS - 1) / indexer::THREADS);
    return host::launch(blocks, indexer::THREADS, [&r] {
        indexer::fused_store<MODE / 4, (MODE & 2) != 0, (MODE & 1) != 0, Pooled, Weight, LANES>(
            static_cast<const Pooled*>(r.pooled), static_cast<const Weight*>(r.norm_weight), r.eps, r.positions,
            r.rope_table, r.out_loc, r.kv_cache, r.page_stride, r.slots, r.max_position, r.n);
    });
}

template <int MODE, class Pooled, class Weight> std::string by_lanes(const Request& r) {
    if constexpr (PARITY_LANES == 0 || PARITY_LANES == 8)
        if (r.lanes == 8) return run<MODE, Pooled, Weight, 8>(r);
    if constexpr (PARITY_LANES == 0 || PARITY_LANES == 16)
        if (r.lanes == 16) return run<MODE, Pooled, Weight, 16>(r);
    if constexpr (PARITY_LANES == 0 || PARITY_LANES == 32)
        if (r.lanes == 32) return run<MODE, Pooled, Weight, 32>(r);
    return "lanes: not among those built";
}

template <int MODE> std::string by_types(const Request& r) {
    if (r.pooled_bf16 && r.weight_bf16) return by_lanes<MODE, __nv_bfloat16, __nv_bfloat16>(r);
    if (!r.pooled_bf16 && !r.weight_bf16) return by_lanes<MODE, float, float>(r);
#ifndef PARITY_EQUAL_TYPES  // half the building time, for sanitizers
    if (r.pooled_bf16) return by_lanes<MODE, __nv_bfloat16, float>(r);
    return by_lanes<MODE, float, __nv_bfloat16>(r);
#else
    return "dtypes: not among those built";
#endif
}

template <int MODE = 0> std::string by_mode(const Request& r) {
    if constexpr (MODE > 14) {
        return "mode: not among those built";
    } else {
        if constexpr (PARITY_MODE < 0 || PARITY_MODE == MODE)
            if (r.mode == MODE) return by_types<MODE>(r);
        return by_mode<MODE + 1>(r);
    }
}

std::string last_error;

}  // namespace

// "" on success, else what went wrong (valid until the next call).
extern "C" const char* parity_store(int mode, int pooled_bf16, int weight_bf16, int lanes, const void* pooled,
                                    const void* norm_weight, float eps, const int* positions, const float* rope_table,
                                    const long long* out_loc, unsigned char* kv_cache, long long page_stride,
                                    long long slots, int max_position, int n) {
    last_error = by_mode(Request{mode, pooled_bf16, weight_bf16, lanes, pooled, norm_weight, eps, positions, rope_table,
                                 out_loc, kv_cache, page_stride, slots, max_position, n});
    return last_error.c_str();
}

#ifdef PARITY_MAIN
#include <cstdlib>
#include <vector>
#include <sanitizer/asan_interface.h>

namespace {

// Every operand in an allocation of its own, of exactly its size, so that one byte too far is seen.
std::unique_ptr<char[]> read(std::FILE* file, std::size_t bytes) {
    std::unique_ptr<char[]> data(new char[bytes]);  // operator new aligns to 16 bytes
    if (std::fread(data.get(), 1, bytes, file) != bytes) { std::fprintf(stderr, "request: too short\n"); std::exit(3); }
    return data;
}

}  // namespace

// program REQUEST RESULT. REQUEST: 9 int64 (mode, pooled_bf16, weight_bf16, lanes, n, max_position, pages, page_bytes,
// page_stride), a float64 eps, then the arrays and the pool; RESULT: the pool. Bytes between pages may not be touched.
int main(int argc, char** argv) {
    if (argc != 3) return 3;
    std::FILE* file = std::fopen(argv[1], "rb");
    if (!file) return 3;
    long long head[9];
    double eps;
    if (std::fread(head, 8, 9, file) != 9 || std::fread(&eps, 8, 1, file) != 1) return 3;
    const long long n = head[4], max_position = head[5], pages = head[6], page_bytes = head[7], stride = head[8];
    auto pooled = read(file, n * 128 * (head[1] ? 2 : 4));
    auto weight = read(file, 128 * (head[2] ? 2 : 4));
    auto positions = read(file, n * 4);
    auto table = read(file, max_position * 256);
    auto out_loc = read(file, n * 8);
    const std::size_t size = pages ? (pages - 1) * stride + page_bytes : 0;
    auto pool = read(file, size);
    std::fclose(file);
    for (long long p = 0; p + 1 < pages; ++p)
        ASAN_POISON_MEMORY_REGION(pool.get() + p * stride + page_bytes, stride - page_bytes);
    const char* wrong = parity_store((int)head[0], (int)head[1], (int)head[2], (int)head[3], pooled.get(), weight.get(),
                                     (float)eps, (const int*)positions.get(), (const float*)table.get(),
                                     (const long long*)out_loc.get(), (unsigned char*)pool.get(), stride, pages * 64,
                                     (int)max_position, (int)n);
    if (*wrong) { std::fprintf(stderr, "%s\n", wrong); return 2; }
    ASAN_UNPOISON_MEMORY_REGION(pool.get(), size);
    std::FILE* result = std::fopen(argv[2], "wb");
    if (!result || std::fwrite(pool.get(), 1, size, result) != size || std::fclose(result)) return 3;
    return 0;
}
#endif
