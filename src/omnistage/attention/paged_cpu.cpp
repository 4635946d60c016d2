// Attention of decode rows over a paged cache: one query a row, online softmax, sums in float32.
// Pairs of a row and a kv head are spread over threads; a pair's arithmetic depends on nothing else.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;     // keys of a tile, and floats of a vector
constexpr int kMaxGroup = 32;  // query heads that share a kv head; the caller keeps within it
constexpr float kLowest = -1e30f;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct BFloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) {
    Floats result;
    std::memcpy(&result, from, sizeof(result));
    return result;
}

inline Floats load(const BFloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    return reinterpret_cast<Floats>(__builtin_convertvector(halves, Ints) << 16);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

inline void store(BFloat16* to, Floats value) {  // to the nearest, ties to even; NaN stays NaN
    const Ints bits = reinterpret_cast<Ints>(value);
    const Ints rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const Ints kept = (value == value) ? rounded : ((bits >> 16) | 0x40);
    const Halves halves = __builtin_convertvector(kept, Halves);
    std::memcpy(to, &halves, sizeof(halves));
}

inline Floats all(float value) { return value - Floats{}; }

// Lanes of the result: sums of adjacent lanes, first of a, then of b.
inline Floats add_pairs(Floats a, Floats b) {
    const Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

// Lane i of the result: the sum of parts[i]'s lanes.
inline Floats add_lanes(Floats* parts) {
    for (int left = kLanes / 2; left >= 1; left /= 2)
        for (int i = 0; i < left; ++i) parts[i] = add_pairs(parts[2 * i], parts[2 * i + 1]);
    return parts[0];
}

// e to the power of x <= 0 with the coefficients of Cephes' expf, whose error is about 1 ulp.
inline Floats exponential(Floats x) {
    x = (x < -87.0f) ? all(-87.0f) : x;
    const Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to an integer
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * reinterpret_cast<Floats>((__builtin_convertvector(n, Ints) + 127) << 23);
}

struct Shape {
    int64_t rows, heads, kv_heads, block_size, table_width, query_row_stride, query_head_stride;
    int64_t window;        // 0: none
    float scale, softcap;  // softcap 0: none
};

template <typename T, int kVectors>  // of a head
void attend(const T* query, const T* keys, const T* values, const int32_t* table, int64_t context,
            T* out, int64_t kv_head, const Shape& s) {
    constexpr int dim = kVectors * kLanes;
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int group = static_cast<int>(s.heads / s.kv_heads);
    const int64_t stride = s.kv_heads * dim;
    Floats q[kMaxGroup][kVectors], sum[kMaxGroup][kVectors], weights[kMaxGroup];
    float highest[kMaxGroup];
    Floats total[kMaxGroup];
    for (int g = 0; g < group; ++g) {
        const T* row = query + (kv_head * group + g) * s.query_head_stride;
        for (int n = 0; n < kVectors; ++n) q[g][n] = load(row + n * kLanes) * s.scale;
        for (int n = 0; n < kVectors; ++n) sum[g][n] = Floats{};
        highest[g] = kLowest;
        total[g] = Floats{};
    }
    int64_t position = s.window && context > s.window ? context - s.window : 0;
    while (position < context) {
        const int64_t offset = position % s.block_size;
        int64_t left = s.block_size - offset;
        if (left > context - position) left = context - position;
        const int count = static_cast<int>(left < kLanes ? left : kLanes);
        const int64_t slot = table[position / s.block_size] * s.block_size + offset;
        const T* k = keys + slot * stride + kv_head * dim;
        const T* v = values + slot * stride + kv_head * dim;
        for (int t = 0; t < count; ++t)
            for (int n = 0; n < dim; n += 64 / static_cast<int>(sizeof(T)))
                __builtin_prefetch(v + t * stride + n);
        for (int g = 0; g < group; ++g) {
            Floats parts[kLanes];
            for (int t = 0; t < count; ++t) {
                Floats dot = q[g][0] * load(k + t * stride);
                for (int n = 1; n < kVectors; ++n) dot += q[g][n] * load(k + t * stride + n * kLanes);
                parts[t] = dot;
            }
            for (int t = count; t < kLanes; ++t) parts[t] = Floats{};
            Floats scores = add_lanes(parts);
            if (s.softcap > 0)
                for (int t = 0; t < kLanes; ++t)
                    scores[t] = s.softcap * std::tanh(scores[t] / s.softcap);
            const Ints real = lane < count;
            scores = real ? scores : all(kLowest);
            float top = highest[g];
            for (int t = 0; t < kLanes; ++t) top = scores[t] > top ? scores[t] : top;
            const Floats weight = exponential(scores - top);
            weights[g] = real ? weight : Floats{};
            const float keep = exponential(all(highest[g] - top))[0];
            highest[g] = top;
            total[g] = total[g] * keep + weights[g];
            for (int n = 0; n < kVectors; ++n) sum[g][n] *= keep;
        }
        if (position + count < context) {
            const int64_t next = position + count;
            const int64_t at = table[next / s.block_size] * s.block_size + next % s.block_size;
            const T* following = keys + at * stride + kv_head * dim;
            for (int t = 0; t < count; ++t)
                for (int n = 0; n < dim; n += 64 / static_cast<int>(sizeof(T)))
                    __builtin_prefetch(following + t * stride + n);
        }
        for (int g = 0; g < group; ++g) {
            Floats acc[kVectors];
            for (int n = 0; n < kVectors; ++n) acc[n] = sum[g][n];
            float w[kLanes];
            std::memcpy(w, &weights[g], sizeof(w));
            for (int t = 0; t < count; ++t)
                for (int n = 0; n < kVectors; ++n) acc[n] += w[t] * load(v + t * stride + n * kLanes);
            for (int n = 0; n < kVectors; ++n) sum[g][n] = acc[n];
        }
        position += count;
    }
    for (int g = 0; g < group; ++g) {
        float whole = 0.0f;
        for (int t = 0; t < kLanes; ++t) whole += total[g][t];
        T* target = out + (kv_head * group + g) * dim;
        for (int n = 0; n < kVectors; ++n) store(target + n * kLanes, sum[g][n] / whole);
    }
}

template <typename T, int kVectors>
void decode(const void* query, const void* keys, const void* values, const int32_t* tables,
            const int32_t* contexts, void* out, const Shape& s, int threads) {
    const int64_t pairs = s.rows * s.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t row = pair / s.kv_heads;
        attend<T, kVectors>(static_cast<const T*>(query) + row * s.query_row_stride,
                            static_cast<const T*>(keys), static_cast<const T*>(values),
                            tables + row * s.table_width, contexts[row],
                            static_cast<T*>(out) + row * s.heads * kVectors * kLanes,
                            pair % s.kv_heads, s);
    }
}

using Decode = void (*)(const void*, const void*, const void*, const int32_t*, const int32_t*, void*,
                        const Shape&, int);

template <typename T>
Decode decode_of(int64_t dim) {
    switch (dim) {
        case 16: return decode<T, 1>;
        case 32: return decode<T, 2>;
        case 64: return decode<T, 4>;
        case 80: return decode<T, 5>;
        case 96: return decode<T, 6>;
        case 128: return decode<T, 8>;
        case 256: return decode<T, 16>;
        default: return nullptr;
    }
}

}  // namespace

// `sizes`: dim, then the integers of Shape in their order. out is (rows, heads, dim), contiguous.
// Returns 0, or 1 for a dim that there is no code for.
extern "C" int omnistage_paged_decode(const void* query, const void* keys, const void* values,
                                      const int32_t* tables, const int32_t* contexts, void* out,
                                      const int64_t* sizes, float scale, float softcap,
                                      int bfloat16, int threads) {
    const Shape shape{sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                      sizes[6], sizes[7], sizes[8], scale,    softcap};
    const Decode run = bfloat16 ? decode_of<BFloat16>(sizes[0]) : decode_of<float>(sizes[0]);
    if (run == nullptr) return 1;
    run(query, keys, values, tables, contexts, out, shape, threads);
    return 0;
}
