// Shuffles as NumPy's legacy generator draws them.

#include "helpers.h"

#include <algorithm>
#include <array>
#include <utility>

namespace {

// MT19937, the generator of numpy.random.RandomState, as defined by Matsumoto and Nishimura. std::mt19937 gives the
// same numbers; this one makes whole blocks in vectorised loops, in a quarter of the time.
class MersenneTwister {
  public:
    explicit MersenneTwister(uint32_t seed) {
        state_[0] = seed;
        for (uint32_t i = 1; i < kSize; ++i) {
            state_[i] = 1812433253U * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
        }
    }

    uint32_t operator()() {
        if (next_ == kSize) {
            refill();
        }
        return numbers_[next_++];
    }

  private:
    static constexpr uint32_t kSize = 624, kMiddle = 397;

    static uint32_t twist(uint32_t upper, uint32_t lower, uint32_t middle) {
        const uint32_t joined = (upper & 0x80000000U) | (lower & 0x7fffffffU);
        return middle ^ (joined >> 1) ^ ((0U - (joined & 1U)) & 0x9908b0dfU);
    }

    void refill() {
        for (uint32_t i = 0; i < kSize - kMiddle; ++i) {
            state_[i] = twist(state_[i], state_[i + 1], state_[i + kMiddle]);
        }
        for (uint32_t i = kSize - kMiddle; i < kSize - 1; ++i) {
            state_[i] = twist(state_[i], state_[i + 1], state_[i + kMiddle - kSize]);
        }
        state_[kSize - 1] = twist(state_[kSize - 1], state_[0], state_[kMiddle - 1]);
        for (uint32_t i = 0; i < kSize; ++i) {
            uint32_t number = state_[i];
            number ^= number >> 11;
            number ^= (number << 7) & 0x9d2c5680U;
            number ^= (number << 15) & 0xefc60000U;
            numbers_[i] = number ^ (number >> 18);
        }
        next_ = 0;
    }

    std::array<uint32_t, kSize> state_;
    std::array<uint32_t, kSize> numbers_{};
    uint32_t next_ = kSize;
};

// numpy.random.RandomState(seed).shuffle for flat arrays, draw for draw. Not thread-safe.
class Shuffler {
  public:
    explicit Shuffler(int64_t seed) : generator_(checked(seed)) {}

    void shuffle(py::array array) {
        if (array.ndim() != 1 || !(array.flags() & py::array::c_style) || !(array.flags() & kAligned)) {
            throw std::invalid_argument("only a flat, contiguous, aligned array can be shuffled in place");
        }
        void* data = array.mutable_data();  // throws if the array is read-only
        const auto size = static_cast<uint64_t>(array.size());
        const char kind = array.dtype().kind();
        if ((kind != 'i' && kind != 'u') || (array.itemsize() != 4 && array.itemsize() != 8)) {
            throw std::invalid_argument("only integers of 4 or 8 bytes can be shuffled");
        }
        const bool narrow = array.itemsize() == 4;
        py::gil_scoped_release unlocked;
        if (narrow) {
            permute(static_cast<uint32_t*>(data), size);
        } else {
            permute(static_cast<uint64_t*>(data), size);
        }
    }

  private:
    static uint32_t checked(int64_t seed) {
        if (seed < 0 || seed > static_cast<int64_t>(std::numeric_limits<uint32_t>::max())) {
            throw std::invalid_argument("seed=" + std::to_string(seed) + " must be between 0 and 2**32 - 1");
        }
        return static_cast<uint32_t>(seed);
    }

    // Mask of the bits of numbers up to `limit` >= 1.
    static uint64_t mask_of(uint64_t limit) { return ~uint64_t{0} >> __builtin_clzll(limit); }

    // Draws `count` numbers, uniform over 0..limit, 0..limit - 1, ..., rejecting masked draws that are too large. All
    // the limits have this mask. As in NumPy, Word has 32 bits if the mask has.
    template <typename Word>
    void draw(uint64_t limit, uint64_t mask, uint64_t count, uint64_t* out) {
        for (uint64_t k = 0; k < count;) {
            uint64_t value = generator_();
            if (sizeof(Word) == 8) {
                value = value << 32 | generator_();
            }
            value &= mask;
            // acceptance is unpredictable, so there is no branch on it
            out[k] = value;
            k += value <= limit - k;
        }
    }

    template <typename T>
    void permute(T* data, uint64_t size) {
        // draws do not depend on the data: drawing a block before its swaps gives the prefetches time
        std::array<uint64_t, 64> partner;
        for (uint64_t left = size; left > 1;) {
            const uint64_t limit = left - 1, mask = mask_of(limit);
            const uint64_t count = std::min<uint64_t>(partner.size(), limit - (mask >> 1));
            if (mask > std::numeric_limits<uint32_t>::max()) {
                draw<uint64_t>(limit, mask, count, partner.data());
            } else {
                draw<uint32_t>(limit, mask, count, partner.data());
            }
            for (uint64_t k = 0; k < count; ++k) {
                __builtin_prefetch(data + partner[k], 1);
            }
            for (uint64_t k = 0; k < count; ++k) {
                std::swap(data[limit - k], data[partner[k]]);
            }
            left -= count;
        }
    }

    MersenneTwister generator_;
};

}  // namespace

void register_shuffler(py::module_& module) {
    py::class_<Shuffler>(module, "Shuffler")
        .def(py::init<int64_t>(), py::arg("seed"))
        .def("shuffle", &Shuffler::shuffle, py::arg("array").noconvert());
}
