// Operators of generation on a CPU, each in one call: a pass over single tokens is short, and the dispatch of torch's
// operators takes as long as what they compute. Numbers are float32 or bfloat16 in memory and float32 in registers.
//
// Addresses are those of contiguous tensors whose sizes megatron/parallel/operators/token_kernels.py has checked.

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
// compiled for several processors; the loader takes the best one that this processor runs
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE inline __attribute__((always_inline))

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef std::int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(LANES * 2)));

struct BFloat16 {
    std::uint16_t bits;
};

INLINE float widened(float x) { return x; }

INLINE float widened(BFloat16 x) {
    const std::uint32_t word = std::uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &word, sizeof result);
    return result;
}

INLINE void narrow(float x, float& result) { result = x; }

// to nearest, ties to even
INLINE void narrow(float x, BFloat16& result) {
    std::uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    result.bits = x != x ? 0x7fc0 : std::uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

INLINE Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

INLINE Floats load(const BFloat16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

INLINE void store(Floats x, float* to) { std::memcpy(to, &x, sizeof x); }

INLINE void store(Floats x, BFloat16* to) {
    const Words words = (Words)x;
    const Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    const Halves bits = __builtin_convertvector(x != x ? Words{} + 0x7fc0 : rounded, Halves);
    std::memcpy(to, &bits, sizeof bits);
}

INLINE float total(Floats x) {
    typedef float Half __attribute__((vector_size(LANES * 2)));
    typedef float Quarter __attribute__((vector_size(LANES)));
    Half halves[2];
    std::memcpy(halves, &x, sizeof halves);
    halves[0] += halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    const Quarter sums = quarters[0];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

template <typename A, typename B>
INLINE float dot(const A* a, const B* b, std::int64_t size) {
    Floats sums{};
    std::int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += load(a + i) * load(b + i);
    float rest = 0;
    for (; i < size; ++i) rest += widened(a[i]) * widened(b[i]);
    return total(sums) + rest;
}

// e^x to two units in the last place; outside of [-87, 88] that of the nearer bound. Source: Cephes, expf.
INLINE Floats exponential(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;
    x = x > 88.0f ? Floats{} + 88.0f : x;
    const Floats power = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to an integer
    x -= power * 0.693359375f;
    x -= power * -2.12194440e-4f;
    Floats y = x * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return y * (Floats)((__builtin_convertvector(power, Ints) + 127) << 23);
}

// ---------------------------------------------------------------------------------------------------------------------

template <typename T>
INLINE void rms_norm_of(const T* x, const T* weight, T* result, std::int64_t rows, std::int64_t width, float epsilon) {
    for (; rows--; x += width, result += width) {
        const float scale = 1.0f / std::sqrt(dot(x, x, width) / float(width) + epsilon);
        std::int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(load(x + i) * scale * load(weight + i), result + i);
        for (; i < width; ++i) narrow(widened(x[i]) * scale * widened(weight[i]), result[i]);
    }
}

FOR_EACH_PROCESSOR
void rms_norm(Address x, Address weight, Address result, std::int64_t rows, std::int64_t width, float epsilon,
              bool is_bfloat16) {
    if (is_bfloat16)
        rms_norm_of((const BFloat16*)x, (const BFloat16*)weight, (BFloat16*)result, rows, width, epsilon);
    else
        rms_norm_of((const float*)x, (const float*)weight, (float*)result, rows, width, epsilon);
}

// silu(gate) is rounded before the product, as in torch's two operators
template <typename T>
INLINE void swiglu_of(const T* gate_up, T* result, std::int64_t rows, std::int64_t width) {
    T gated[LANES], padded[LANES];
    for (; rows--; gate_up += 2 * width, result += width) {
        for (std::int64_t i = 0; i < width; i += LANES) {
            const std::int64_t count = width - i < LANES ? width - i : LANES;
            const T* from = gate_up + i;
            if (count < LANES) {
                std::memset(padded, 0, sizeof padded);
                std::memcpy(padded, from, count * sizeof(T));
                from = padded;
            }
            const Floats gate = load(from);
            store(gate / (exponential(-gate) + 1.0f), gated);
            if (count == LANES)
                store(load(gated) * load(gate_up + width + i), result + i);
            else
                for (std::int64_t j = 0; j < count; ++j)
                    narrow(widened(gated[j]) * widened(gate_up[width + i + j]), result[i + j]);
        }
    }
}

FOR_EACH_PROCESSOR
void swiglu(Address gate_up, Address result, std::int64_t rows, std::int64_t width, bool is_bfloat16) {
    if (is_bfloat16)
        swiglu_of((const BFloat16*)gate_up, (BFloat16*)result, rows, width);
    else
        swiglu_of((const float*)gate_up, (float*)result, rows, width);
}

// Copies a head, its channel pairs (i, i + d/2) turned by the angles if these are given.
template <typename T, typename Result>
INLINE void turn(const T* x, const float* cos, const float* sin, Result* result, std::int64_t size) {
    std::int64_t i = 0;
    if (!cos) {
        for (; i < size; ++i) narrow(widened(x[i]), result[i]);
        return;
    }
    const std::int64_t half = size / 2;
    for (; i + LANES <= half; i += LANES) {
        const Floats first = load(x + i), second = load(x + i + half), own_cos = load(cos + i), own_sin = load(sin + i);
        store(first * own_cos - second * own_sin, result + i);
        store(second * own_cos + first * own_sin, result + i + half);
    }
    for (; i < half; ++i) {
        const float first = widened(x[i]), second = widened(x[i + half]);
        narrow(first * cos[i] - second * sin[i], result[i]);
        narrow(second * cos[i] + first * sin[i], result[i + half]);
    }
}

template <typename T>
INLINE void rotate_of(const T* x, const float* cos, const float* sin, T* result, std::int64_t rows, std::int64_t stride,
                      std::int64_t heads, std::int64_t size) {
    for (; rows--; x += stride, cos += size / 2, sin += size / 2)
        for (std::int64_t head = 0; head < heads; ++head, result += size) turn(x + head * size, cos, sin, result, size);
}

FOR_EACH_PROCESSOR
void rotate(Address x, Address cos, Address sin, Address result, std::int64_t rows, std::int64_t stride,
            std::int64_t heads, std::int64_t size, bool is_bfloat16) {
    if (is_bfloat16)
        rotate_of((const BFloat16*)x, (const float*)cos, (const float*)sin, (BFloat16*)result, rows, stride, heads,
                  size);
    else
        rotate_of((const float*)x, (const float*)cos, (const float*)sin, (float*)result, rows, stride, heads, size);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention of one token of each row over a cache. Sizes: B rows, k key/value heads, g query heads of each, d head size,
// T places of a row in the cache.

struct Sizes {
    std::int64_t rows, kv_heads, group, head_size, places;
};

// Keys and values of one head of a row: [T, d], of which this token's is at `position`.
template <typename T>
INLINE void attend_head(const float* queries, const T* keys, const T* values, T* context, const float* slopes,
                        std::int64_t position, const Sizes& sizes, std::vector<float>& scores,
                        std::vector<float>& sums) {
    const std::int64_t size = sizes.head_size, group = sizes.group, count = position + 1;
    const std::int64_t stride = (count + LANES - 1) / LANES * LANES;
    scores.assign(group * stride, -std::numeric_limits<float>::infinity());
    sums.assign(group * size, 0.0f);
    const float scale = 1.0f / std::sqrt(float(size));
    for (std::int64_t place = 0; place < count; ++place)
        for (std::int64_t g = 0; g < group; ++g) {
            const float bias = slopes ? slopes[g] * float(place - position) : 0.0f;
            scores[g * stride + place] = dot(queries + g * size, keys + place * size, size) * scale + bias;
        }
    std::int64_t i;
    for (std::int64_t g = 0; g < group; ++g) {
        float* const own = scores.data() + g * stride;
        float largest = own[0];
        for (i = 1; i < count; ++i) largest = own[i] > largest ? own[i] : largest;
        Floats all{};
        for (i = 0; i < stride; i += LANES) {
            const Floats weights = exponential(load(own + i) - largest);
            store(weights, own + i);
            all += weights;
        }
        const float inverse = 1.0f / total(all);
        for (i = 0; i < stride; ++i) own[i] *= inverse;
    }
    for (std::int64_t place = 0; place < count; ++place)
        for (std::int64_t g = 0; g < group; ++g) {
            const T* const value = values + place * size;
            float* const sum = sums.data() + g * size;
            const float weight = scores[g * stride + place];
            for (i = 0; i + LANES <= size; i += LANES) store(load(sum + i) + load(value + i) * weight, sum + i);
            for (; i < size; ++i) sum[i] += widened(value[i]) * weight;
        }
    for (i = 0; i < group * size; ++i) narrow(sums[i], context[i]);
}

template <typename T>
INLINE void attend_of(const T* qkv, const float* cos, const float* sin, const float* slopes,
                      const std::int64_t* positions, T* keys, T* values, T* context, const Sizes& sizes) {
    const std::int64_t size = sizes.head_size, heads = sizes.kv_heads * sizes.group;
    const std::int64_t width = (heads + 2 * sizes.kv_heads) * size, of_head = sizes.places * size;
    std::vector<float> queries(sizes.group * size), scores, sums;
    std::vector<T> turned(size);
    for (std::int64_t row = 0; row < sizes.rows; ++row) {
        for (std::int64_t head = 0; head < sizes.kv_heads; ++head) {
            T* const own_keys = keys + (row * sizes.kv_heads + head) * of_head;
            T* const own_values = values + (row * sizes.kv_heads + head) * of_head;
            const T* const key = qkv + (heads + head) * size;
            turn(key, cos, sin, own_keys + positions[row] * size, size);
            std::memcpy(own_values + positions[row] * size, key + sizes.kv_heads * size, size * sizeof(T));
            for (std::int64_t g = 0; g < sizes.group; ++g) {
                // a query is rounded as a key is
                turn(qkv + (head * sizes.group + g) * size, cos, sin, turned.data(), size);
                turn(turned.data(), nullptr, nullptr, queries.data() + g * size, size);
            }
            attend_head(queries.data(), own_keys, own_values, context + head * sizes.group * size,
                        slopes ? slopes + head * sizes.group : nullptr, positions[row], sizes, scores, sums);
        }
        qkv += width;
        context += heads * size;
        if (cos) cos += size / 2, sin += size / 2;
    }
}

FOR_EACH_PROCESSOR
void attend_all(Address qkv, Address cos, Address sin, Address slopes, Address positions, Address keys, Address values,
                Address context, const Sizes& sizes, bool is_bfloat16) {
    const auto *own_cos = (const float*)cos, *own_sin = (const float*)sin, *own_slopes = (const float*)slopes;
    const auto* own_positions = (const std::int64_t*)positions;
    if (is_bfloat16)
        attend_of((const BFloat16*)qkv, own_cos, own_sin, own_slopes, own_positions, (BFloat16*)keys,
                  (BFloat16*)values, (BFloat16*)context, sizes);
    else
        attend_of((const float*)qkv, own_cos, own_sin, own_slopes, own_positions, (float*)keys, (float*)values,
                  (float*)context, sizes);
}

void attend(Address qkv, Address cos, Address sin, Address slopes, Address positions, Address keys, Address values,
            Address context, std::int64_t rows, std::int64_t kv_heads, std::int64_t group, std::int64_t head_size,
            std::int64_t places, bool is_bfloat16) {
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t position = ((const std::int64_t*)positions)[row];
        if (position < 0 || position >= places)
            throw std::out_of_range("row " + std::to_string(row) + " is at position " + std::to_string(position) +
                                    " of a cache with " + std::to_string(places) + " places");
    }
    attend_all(qkv, cos, sin, slopes, positions, keys, values, context, {rows, kv_heads, group, head_size, places},
               is_bfloat16);
}

}  // namespace

PYBIND11_MODULE(token_operators, module) {
    module.doc() = "Operators of a pass over single tokens on a CPU.";
    module.def("rms_norm", &rms_norm);
    module.def("swiglu", &swiglu);
    module.def("rotate", &rotate);
    module.def("attend", &attend, py::arg("qkv"), py::arg("cos"), py::arg("sin"), py::arg("slopes"),
               py::arg("positions"), py::arg("keys"), py::arg("values"), py::arg("context"), py::arg("rows"),
               py::arg("kv_heads"), py::arg("group"), py::arg("head_size"), py::arg("places"), py::arg("is_bfloat16"));
}
