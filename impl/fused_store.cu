// Fused compressor store of DeepSeek-V4's indexer: RMSNorm, rotary, Hadamard and the quantised or bf16 store of pooled
// keys into a paged cache, one launch, nothing in between in memory. Also compiled, unchanged, for a CPU.
//
// LANES lanes share a token of 128 channels. A lane owns 32 / LANES chunks of four channels; chunk number
// c * LANES + lane, so that every access of a group of lanes is one contiguous run. Compile without contraction to FMA:
// then the bytes do not depend on the machine, and the order of every sum below is part of the contract.

#if !defined(PARITY_HOST)
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#endif

namespace indexer {

enum Format { FP8 = 0, FP8_POW2 = 1, BF16 = 2, FP4 = 3 };

constexpr int DIM = 128;
constexpr int PAGE = 64;                  // slots a page
constexpr int THREADS = 128;              // threads a block
constexpr float HADAMARD = 0.08838834764831845f;  // 128^-1/2, as the published code narrows it
constexpr float E4M3_MAX = 448.f;
constexpr float FP8_FLOOR = 1e-4f;        // least amax of an fp8 row
constexpr float FP4_FLOOR = 6.f * 1.17549435082228750797e-38f;  // least amax of an fp4 block, 6 * 2^-126

struct alignas(16) Four { float v[4]; };
struct alignas(8) Half4 { unsigned short v[4]; };

__device__ inline unsigned short to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ inline float from_bf16(unsigned short x) { return __bfloat162float(__ushort_as_bfloat16(x)); }

// A stage's result: rounded to bf16 where the published code rounds, float32 otherwise.
template <bool PUBLISHED> __device__ inline float stage(float x) { return PUBLISHED ? from_bf16(to_bf16(x)) : x; }

__device__ inline Four load4(const float* p) { return *reinterpret_cast<const Four*>(p); }
__device__ inline Four load4(const __nv_bfloat16* p) {
    const Half4 h = *reinterpret_cast<const Half4*>(p);
    return {from_bf16(h.v[0]), from_bf16(h.v[1]), from_bf16(h.v[2]), from_bf16(h.v[3])};
}

// 2^e for -126 <= e <= 127, and the smallest e with 2^e >= x for positive normal x; from exponent bits, never by log2.
__device__ inline float power_of_two(int e) { return __uint_as_float((unsigned)(e + 127) << 23); }
__device__ inline int ceil_log2(float x) {
    const unsigned bits = __float_as_uint(x);
    return (int)(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0u);
}

// The multiple of `step` nearest to y, y >= 0, ties to the even multiple.
__device__ inline float to_step(float y, float step, float inverse) { return rintf(y * inverse) * step; }

// Magnitude of the e2m1 value nearest to y >= 0, ties to the even code: within a binade codes are multiples of a step.
__device__ inline float e2m1(float y) {
    y = fminf(y, 6.f);
    return y < 2.f ? to_step(y, 0.5f, 2.f) : y < 4.f ? to_step(y, 1.f, 1.f) : to_step(y, 2.f, 0.5f);
}
__device__ inline unsigned e2m1_code(float q) {
    return q < 2.f ? (unsigned)(q * 2.f) : q < 4.f ? 2u + (unsigned)q : 4u + (unsigned)(q * 0.5f);
}

// Sum and maximum over the lanes of one token, every lane getting the result. Adding is commutative, so all lanes and
// all values of LANES see the same tree: chunks 16 apart first, then 8, 4, 2 and 1.
template <int LANES> __device__ inline float lane_sum(float x) {
#pragma unroll
    for (int m = LANES / 2; m; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
    return x;
}
// For x >= 0, never NaN: over a whole warp then one instruction on the bits, which order like the values.
template <int LANES> __device__ inline float lane_max(float x) {
    if constexpr (LANES == 32) return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
#pragma unroll
    for (int m = LANES / 2; m; m >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
    return x;
}

// Butterflies at channel strides 1, 2 (inside a chunk), then 4 and up across lanes, then across a lane's chunks. Across
// lanes one half adds and the other subtracts; a product with 1 or -1 is exact, so the fused form has the same bits.
template <int LANES, int CHUNKS> __device__ inline void hadamard(Four (&x)[CHUNKS], int lane) {
#pragma unroll
    for (int s = 1; s < 4; s <<= 1)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(i & s)) {
                    const float u = x[c].v[i], v = x[c].v[i | s];
                    x[c].v[i] = u + v;
                    x[c].v[i | s] = u - v;
                }
#pragma unroll
    for (int m = 1; m < LANES; m <<= 1) {
        const float sign = lane & m ? -1.f : 1.f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[c].v[i] = fmaf(x[c].v[i], sign, __shfl_xor_sync(0xffffffffu, x[c].v[i], m));
    }
#pragma unroll
    for (int s = 1; s < CHUNKS; s <<= 1)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(c & s)) {
                    const float u = x[c].v[i], v = x[c | s].v[i];
                    x[c].v[i] = u + v;
                    x[c | s].v[i] = u - v;
                }
}

// Mean of squares: a chunk in order of its channels, then chunks pairwise, those farthest apart first.
template <int LANES, int CHUNKS> __device__ inline float mean_square(const Four (&x)[CHUNKS]) {
    float part[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        part[c] = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) part[c] += x[c].v[i] * x[c].v[i];
    }
#pragma unroll
    for (int s = CHUNKS / 2; s; s >>= 1)
#pragma unroll
        for (int c = 0; c < s; ++c) part[c] += part[c + s];
    return lane_sum<LANES>(part[0]) * (1.f / DIM);
}

// Largest magnitude of a chunk, and the published exponent of a block of 32 channels, which is eight lanes' chunks.
__device__ inline float chunk_amax(const Four& x) {
    return fmaxf(fmaxf(fabsf(x.v[0]), fabsf(x.v[1])), fmaxf(fabsf(x.v[2]), fabsf(x.v[3])));
}
__device__ inline int fp4_exponent(const Four& x) {
    const float amax = fmaxf(lane_max<8>(chunk_amax(x)), FP4_FLOOR);
    return ceil_log2(amax * (1.f / 6.f));
}

// The e4m3 bytes of a chunk, lowest channel in the lowest byte.
__device__ inline unsigned e4m3x4(const Four& x, float inverse) {
    const unsigned low = __nv_cvt_float2_to_fp8x2({x.v[0] * inverse, x.v[1] * inverse}, __NV_SATFINITE, __NV_E4M3);
    const unsigned high = __nv_cvt_float2_to_fp8x2({x.v[2] * inverse, x.v[3] * inverse}, __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

template <int FORMAT, bool PUBLISHED, bool FAKE_FP4, class Pooled, class Weight, int LANES>
__device__ inline void store_token(const Pooled* pooled, const Weight* norm_weight, float eps, const float* cos_sin,
                                   unsigned char* kv_cache, long long page_at, int row, bool present, bool active,
                                   int lane) {
    constexpr int CHUNKS = 32 / LANES;
    unsigned char* page = kv_cache + page_at;
    Four x[CHUNKS], w[CHUNKS], turn[CHUNKS];
    // All loads first, and none behind another but the rotary row behind its position: a small call is nothing but this
    // latency. Lanes of a token that is left out, or past the last one, take part in the shuffles all the same.
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        x[c] = present ? load4(pooled + 4 * (c * LANES + lane)) : Four{0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) w[c] = load4(norm_weight + 4 * (c * LANES + lane));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if ((c + 1) * LANES > 16)
            turn[c] = active && c * LANES + lane >= 16 ? load4(cos_sin + 4 * (c * LANES + lane - 16))
                                                       : Four{1.f, 0.f, 1.f, 0.f};

#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[c].v[i] = stage<PUBLISHED>(x[c].v[i]);
    const float r = 1.f / sqrtf(mean_square<LANES>(x) + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[c].v[i] = stage<PUBLISHED>(x[c].v[i] * r * w[c].v[i]);

    // Rotary on channels 64 .. 127, adjacent pairs.
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if ((c + 1) * LANES > 16 && c * LANES + lane >= 16) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                float &re = x[c].v[i], &im = x[c].v[i + 1], co = turn[c].v[i], si = turn[c].v[i + 1];
                const float turned = stage<PUBLISHED>(re * co - im * si);
                im = stage<PUBLISHED>(re * si + im * co);
                re = turned;
            }
        }

    hadamard<LANES>(x, lane);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[c].v[i] = stage<PUBLISHED>(x[c].v[i] * HADAMARD);

    if constexpr (FORMAT == FP4 || FAKE_FP4) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int chunk = c * LANES + lane;
            const int e = fp4_exponent(x[c]);
            const float scale = power_of_two(e), inverse = power_of_two(-e);
            unsigned codes = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float q = e2m1(fabsf(x[c].v[i]) * inverse);
                codes |= (e2m1_code(q) | __float_as_uint(x[c].v[i]) >> 31 << 3) << (4 * i);
                x[c].v[i] = copysignf(q * scale, x[c].v[i]);
            }
            if constexpr (FORMAT == FP4) {
                if (active) reinterpret_cast<unsigned short*>(page + row * (DIM / 2))[chunk] = (unsigned short)codes;
                unsigned char* scales = page + PAGE * (DIM / 2) + row * 4;
                if (active && (lane & 7) == 0) scales[chunk >> 3] = (unsigned char)(e + 127);
            }
        }
    }
    if constexpr (FORMAT == FP8 || FORMAT == FP8_POW2) {
        float amax = 0.f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) amax = fmaxf(amax, chunk_amax(x[c]));
        amax = fmaxf(lane_max<LANES>(amax), FP8_FLOOR);
        const float scale = FORMAT == FP8 ? amax / E4M3_MAX : power_of_two(ceil_log2(amax * (1.f / E4M3_MAX)));
        const float inverse = 1.f / scale;
        unsigned* payload = reinterpret_cast<unsigned*>(page + row * DIM);
        float* scales = reinterpret_cast<float*>(page + PAGE * DIM);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const unsigned bytes = e4m3x4(x[c], inverse);
            if (active) payload[c * LANES + lane] = bytes;
        }
        if (active && lane == 0) scales[row] = scale;
    }
    if constexpr (FORMAT == BF16) {
        Half4* payload = reinterpret_cast<Half4*>(page + row * (2 * DIM));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const Half4 bits{to_bf16(x[c].v[0]), to_bf16(x[c].v[1]), to_bf16(x[c].v[2]), to_bf16(x[c].v[3])};
            if (active) payload[c * LANES + lane] = bits;
        }
    }
}

// Grid: ceil(n * LANES / THREADS) blocks of THREADS. `page_stride` in bytes. A token is left out when its slot is -1;
// a slot or position outside its range is left out too, since nothing may be read or written there.
template <int FORMAT, bool PUBLISHED, bool FAKE_FP4, class Pooled, class Weight, int LANES>
__global__ void __launch_bounds__(THREADS)
    fused_store(const Pooled* __restrict__ pooled, const Weight* __restrict__ norm_weight, float eps,
                const int* __restrict__ positions, const float* __restrict__ rope_table,
                const long long* __restrict__ out_loc, unsigned char* __restrict__ kv_cache, long long page_stride,
                long long slots, int max_position, int n) {
    const int token = (int)((blockIdx.x * THREADS + threadIdx.x) / LANES);
    const int lane = (int)(threadIdx.x % LANES);
    const long long slot = token < n ? out_loc[token] : -1;
    const int position = token < n ? positions[token] : 0;
    const bool active = slot >= 0 && slot < slots && position >= 0 && position < max_position;
    store_token<FORMAT, PUBLISHED, FAKE_FP4, Pooled, Weight, LANES>(
        pooled + (long long)token * DIM, norm_weight, eps, rope_table + (long long)position * 64,
        kv_cache, (slot >> 6) * page_stride, (int)(slot & 63), token < n, active, lane);
}

}  // namespace indexer
