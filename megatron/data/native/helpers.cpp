// The index arrays of gpt.py and blend.py, and the samples they describe: the loops that are too slow in Python.
//
// Every function has a NumPy twin in tests/data/ that is its oracle. Arithmetic is 64-bit throughout, every index read
// from an array is checked before use, faults are exceptions (ValueError in Python), and the interpreter's lock is free
// while a loop runs.

#include "packing.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();
constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMax16 = std::numeric_limits<int16_t>::max();
constexpr int64_t kCachedAhead = 32;  // elements between the one in use and the one the caches are told to fetch

// A flat array of one type. The arrays of an .idx file start 34 bytes into the map, so they are not aligned: reading
// through a T pointer would be undefined.
template <typename T>
class View {
  public:
    View(const py::array& array, const char* name)
        : bytes_(static_cast<const char*>(array.data())), size_(array.size()) {
        if (array.ndim() != 1 || !(array.flags() & py::array::c_style)) {
            throw std::invalid_argument(std::string(name) + " must be a flat, contiguous array");
        }
    }
    int64_t size() const { return size_; }
    T operator[](int64_t i) const {
        T value;
        std::memcpy(&value, bytes_ + i * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    }
    void prefetch(int64_t i) const { __builtin_prefetch(bytes_ + i * static_cast<int64_t>(sizeof(T))); }

  private:
    const char* bytes_;
    int64_t size_;
};
using Int32View = View<int32_t>;

template <typename Index>
void fill_sample_index(const Int32View& lengths, const Int32View& documents, int64_t seq_length, int64_t num_samples,
                       Index* out) {
    out[0] = out[1] = 0;
    int64_t row = 1;
    int64_t document_begin = 0;       // tokens ahead of this document in the stream
    int64_t boundary = seq_length;    // token at which sample `row` begins
    for (int64_t position = 0; position < documents.size() && row <= num_samples; ++position) {
        // documents come in random order, so each length is a cache miss unless it was asked for in time
        if (position + kCachedAhead < documents.size()) {
            const int64_t ahead = documents[position + kCachedAhead];
            if (ahead >= 0 && ahead < lengths.size()) {
                lengths.prefetch(ahead);
            }
        }
        const int64_t document = documents[position];
        if (document < 0 || document >= lengths.size()) {
            throw std::invalid_argument("document_index[" + std::to_string(position) + "] = " +
                                        std::to_string(document) + " is outside the " +
                                        std::to_string(lengths.size()) + " documents");
        }
        const int64_t length = lengths[document];
        if (length < 0 || length > kMax64 - document_begin) {
            throw std::invalid_argument("document " + std::to_string(document) + " has the impossible length " +
                                        std::to_string(length));
        }
        const int64_t document_end = document_begin + length;
        for (; boundary < document_end && row <= num_samples; ++row, boundary += seq_length) {
            out[2 * row] = static_cast<Index>(position);
            out[2 * row + 1] = static_cast<Index>(boundary - document_begin);
        }
        document_begin = document_end;
    }
    if (row <= num_samples) {
        throw std::invalid_argument("the documents hold " + std::to_string(document_begin) + " tokens, too few for " +
                                    std::to_string(num_samples) + " samples of " + std::to_string(seq_length) + " + 1");
    }
}

template <typename Index>
py::array make_sample_index(const Int32View& lengths, const Int32View& documents, int64_t seq_length,
                            int64_t num_samples) {
    py::array_t<Index> out({static_cast<py::ssize_t>(num_samples + 1), static_cast<py::ssize_t>(2)});
    Index* rows = out.mutable_data();
    {
        py::gil_scoped_release unlocked;
        fill_sample_index(lengths, documents, seq_length, num_samples, rows);
    }
    return std::move(out);
}

py::array build_sample_index(const Array<int32_t>& lengths_array, const Array<int32_t>& documents_array,
                             int64_t seq_length, int64_t num_samples) {
    const Int32View lengths(lengths_array, "lengths");
    const Int32View documents(documents_array, "document_index");
    if (seq_length < 1) {
        throw std::invalid_argument("seq_length=" + std::to_string(seq_length) + " must be at least 1");
    }
    // boundary may run one sample past the last: keep that inside 64 bits too
    if (num_samples < 0 || num_samples > kMax64 / seq_length - 2 || num_samples > kMax64 / 32) {
        throw std::invalid_argument("num_samples=" + std::to_string(num_samples) + " is negative or beyond 64 bits");
    }
    if (num_samples > 0 && documents.size() == 0) {
        throw std::invalid_argument("document_index is empty, but num_samples=" + std::to_string(num_samples));
    }
    // offsets are below an int32 length, so the number of documents alone decides, as in megatron-core
    return documents.size() <= kMax32 ? make_sample_index<int32_t>(lengths, documents, seq_length, num_samples)
                                      : make_sample_index<int64_t>(lengths, documents, seq_length, num_samples);
}

void check_number_of_datasets(int64_t count) {
    if (count < 1 || count > kMax16) {
        throw std::invalid_argument(std::to_string(count) + " datasets cannot be blended; give 1 to " +
                                    std::to_string(kMax16));
    }
}

// Gives sample after sample to the dataset furthest behind its weight, the first of equals: `size` times, writing the
// dataset and its drawn samples so far. Where `sizes` are given, a dataset that has drawn its size takes no further
// part; they add up to `size` or more.
void deal(const std::vector<double>& weights, const std::vector<int64_t>& sizes, int64_t size, int16_t* dataset_out,
          int64_t* sample_out) {
    std::vector<int64_t> drawn(weights.size(), 0);
    std::vector<size_t> open;  // the datasets that take part, in order
    for (size_t d = 0; d < weights.size(); ++d) {
        open.push_back(d);
    }
    for (int64_t i = 0; i < size; ++i) {
        const double due = std::max(static_cast<double>(i), 1.0);
        size_t neediest = open[0];
        double largest_error = weights[neediest] * due - static_cast<double>(drawn[neediest]);
        for (size_t k = 1; k < open.size(); ++k) {
            const double error = weights[open[k]] * due - static_cast<double>(drawn[open[k]]);
            if (error > largest_error) {
                largest_error = error;
                neediest = open[k];
            }
        }
        dataset_out[i] = static_cast<int16_t>(neediest);
        sample_out[i] = drawn[neediest]++;
        if (!sizes.empty() && drawn[neediest] == sizes[neediest]) {
            open.erase(std::find(open.begin(), open.end(), neediest));
        }
    }
}

std::pair<py::array, py::array> make_blend(const std::vector<double>& weights, const std::vector<int64_t>& sizes,
                                           int64_t size) {
    if (size < 0 || size > kMax64 / 16) {
        throw std::invalid_argument("a blend of " + std::to_string(size) + " samples: negative, or beyond 64 bits");
    }
    py::array_t<int16_t> dataset_index(static_cast<py::ssize_t>(size));
    py::array_t<int64_t> sample_index(static_cast<py::ssize_t>(size));
    int16_t* dataset_out = dataset_index.mutable_data();
    int64_t* sample_out = sample_index.mutable_data();
    {
        py::gil_scoped_release unlocked;
        deal(weights, sizes, size, dataset_out, sample_out);
    }
    return {std::move(dataset_index), std::move(sample_index)};
}

std::pair<py::array, py::array> build_blend_index(const Array<double>& weights_array, int64_t size) {
    const View<double> given(weights_array, "weights");
    check_number_of_datasets(given.size());
    std::vector<double> weights;
    for (int64_t d = 0; d < given.size(); ++d) {
        weights.push_back(given[d]);
        if (!std::isfinite(weights.back()) || weights.back() < 0) {
            throw std::invalid_argument("weight " + std::to_string(weights.back()) +
                                        " must be finite and not negative");
        }
    }
    return make_blend(weights, {}, size);
}

std::pair<py::array, py::array> build_exhaustive_blend_index(const Array<int64_t>& sizes_array, int64_t size) {
    const View<int64_t> given(sizes_array, "sizes");
    check_number_of_datasets(given.size());
    std::vector<int64_t> sizes;
    int64_t total = 0;
    for (int64_t d = 0; d < given.size(); ++d) {
        sizes.push_back(given[d]);
        if (sizes.back() < 1 || sizes.back() > kMax64 - total) {
            throw std::invalid_argument("dataset " + std::to_string(d) + " has " + std::to_string(sizes.back()) +
                                        " samples; each must have 1 or more, and all a sum within 64 bits");
        }
        total += sizes.back();
    }
    if (size > total) {
        throw std::invalid_argument("a blend of " + std::to_string(size) + " samples out of " +
                                    std::to_string(total));
    }
    std::vector<double> weights;
    for (const int64_t each : sizes) {
        weights.push_back(static_cast<double>(each) / static_cast<double>(total));
    }
    return make_blend(weights, sizes, size);
}

// MT19937, the generator of numpy.random.RandomState, as Matsumoto and Nishimura define it. std::mt19937 gives the same
// numbers; here whole blocks are made by loops that become vector code, which takes a quarter of the time.
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

// numpy.random.RandomState(seed).shuffle for flat arrays, draw for draw. One instance must not be used by two threads
// at once.
class Shuffler {
  public:
    explicit Shuffler(int64_t seed) : generator_(checked(seed)) {}

    void shuffle(py::array array) {
        constexpr int kAligned = py::detail::npy_api::NPY_ARRAY_ALIGNED_;
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

    // The bits that numbers up to `limit` need: limit >= 1.
    static uint64_t mask_of(uint64_t limit) { return ~uint64_t{0} >> __builtin_clzll(limit); }

    // count numbers, uniform over 0..limit, 0..limit - 1, ...: masked draws, thrown away while too large. All the
    // limits have the mask. Word is 32 bits wide where the mask is, as NumPy draws.
    template <typename Word>
    void draw(uint64_t limit, uint64_t mask, uint64_t count, uint64_t* out) {
        for (uint64_t k = 0; k < count;) {
            uint64_t value = generator_();
            if (sizeof(Word) == 8) {
                value = value << 32 | generator_();
            }
            value &= mask;
            // whether a draw is kept cannot be foreseen, so no branch hangs on it
            out[k] = value;
            k += value <= limit - k;
        }
    }

    template <typename T>
    void permute(T* data, uint64_t size) {
        // Draws do not depend on the data: a block of them ahead of its swaps lets the caches fetch meanwhile.
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

// Integers of 4 or 8 bytes, which of them is known only when the array is seen.
class OffsetView {
  public:
    OffsetView(const py::array& array, const char* name) {
        const char kind = array.dtype().kind();
        const bool native = array.dtype().byteorder() == '=';
        if (array.ndim() < 1 || array.ndim() > 2 || !(array.flags() & py::array::c_style) || !native ||
            !((kind == 'i' && (array.itemsize() == 4 || array.itemsize() == 8)) ||
              (kind == 'u' && array.itemsize() == 4))) {
            throw std::invalid_argument(std::string(name) + " must be a contiguous array of int32, uint32 or int64");
        }
        bytes_ = static_cast<const char*>(array.data());
        size_ = array.size();
        width_ = kind == 'u' ? Width::kUnsigned32 : array.itemsize() == 4 ? Width::kSigned32 : Width::kSigned64;
    }
    int64_t size() const { return size_; }
    int64_t operator[](int64_t i) const {
        switch (width_) {
            case Width::kUnsigned32:
                return load<uint32_t>(i);
            case Width::kSigned32:
                return load<int32_t>(i);
            default:
                return load<int64_t>(i);
        }
    }

  private:
    enum class Width { kUnsigned32, kSigned32, kSigned64 };

    template <typename T>
    int64_t load(int64_t i) const {
        T value;
        std::memcpy(&value, bytes_ + i * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    }
    const char* bytes_;
    int64_t size_;
    Width width_;
};

// The samples that the index arrays describe, read out of the tokens. Trusts none of the arrays it is given: a number
// that points outside another array is an exception.
class SampleReader {
  public:
    SampleReader(py::array tokens, Array<int32_t> lengths, Array<int64_t> pointers, Array<int32_t> document_index,
                 py::array sample_index, py::array shuffle_index, int64_t seq_length,
                 std::optional<int64_t> vocab_size)
        : owners_{tokens, lengths, pointers, document_index, sample_index, shuffle_index},
          tokens_(tokens.data()),
          num_tokens_(tokens.size()),
          token_bytes_(tokens.itemsize()),
          copy_(copier(tokens)),
          lengths_(lengths, "lengths"),
          pointers_(pointers, "pointers"),
          documents_(document_index, "document_index"),
          samples_(sample_index, "sample_index"),
          shuffle_(shuffle_index, "shuffle_index"),
          seq_length_(seq_length),
          vocab_size_(vocab_size.value_or(kUnchecked)) {
        if (pointers_.size() != lengths_.size()) {
            throw std::invalid_argument(std::to_string(pointers_.size()) + " pointers, but " +
                                        std::to_string(lengths_.size()) + " lengths");
        }
        if (shuffle_index.ndim() != 1 || sample_index.ndim() != 2 || sample_index.shape(1) != 2 ||
            sample_index.shape(0) != shuffle_index.size() + 1) {
            throw std::invalid_argument("sample_index must have 2 columns, and 1 row more than shuffle_index");
        }
        if (seq_length < 1 || seq_length > kMax64 / 16) {
            throw std::invalid_argument("seq_length=" + std::to_string(seq_length) + " must be 1 or more");
        }
        if (vocab_size && *vocab_size < 1) {
            throw std::invalid_argument("vocab_size=" + std::to_string(*vocab_size) + " must be 1 or more");
        }
    }

    py::array_t<int64_t> read(const Array<int64_t>& indices_array) const {
        const View<int64_t> indices(indices_array, "indices");
        check_allocation(indices.size());
        py::array_t<int64_t> out({static_cast<py::ssize_t>(indices.size()), static_cast<py::ssize_t>(seq_length_ + 1)});
        int64_t* row = out.mutable_data();
        {
            py::gil_scoped_release unlocked;
            for (int64_t i = 0; i < indices.size(); ++i, row += seq_length_ + 1) {
                fill(indices[i], row);
            }
        }
        return out;
    }

    void read_into(const Array<int64_t>& indices_array, py::array_t<int64_t> out,
                   const Array<int64_t>& rows_array) const {
        constexpr int kAligned = py::detail::npy_api::NPY_ARRAY_ALIGNED_;
        const View<int64_t> indices(indices_array, "indices"), rows(rows_array, "rows");
        if (out.ndim() != 2 || out.shape(1) != seq_length_ + 1 || !(out.flags() & py::array::c_style) ||
            !(out.flags() & kAligned) || rows.size() != indices.size()) {
            throw std::invalid_argument("out must be a contiguous array of " + std::to_string(seq_length_ + 1) +
                                        " columns, and rows as long as indices");
        }
        int64_t* begin = out.mutable_data();  // throws if the array is read-only
        const int64_t num_rows = out.shape(0);
        py::gil_scoped_release unlocked;
        for (int64_t i = 0; i < indices.size(); ++i) {
            const int64_t row = rows[i];
            if (row < 0 || row >= num_rows) {
                throw std::invalid_argument("row " + std::to_string(row) + " is outside the " +
                                            std::to_string(num_rows) + " of out");
            }
            fill(indices[i], begin + row * (seq_length_ + 1));
        }
    }

    py::array_t<int64_t> read_one(int64_t index) const {
        check_allocation(1);
        py::array_t<int64_t> out(static_cast<py::ssize_t>(seq_length_ + 1));
        int64_t* row = out.mutable_data();
        {
            py::gil_scoped_release unlocked;
            fill(index, row);
        }
        return out;
    }

  private:
    static constexpr int64_t kUnchecked = 0;  // in the place of a vocabulary's size

    using Copy = int64_t (*)(const void* tokens, int64_t begin, int64_t count, int64_t vocab_size, int64_t* out);

    // Widens tokens begin .. begin + count into `out`. Gives the place of the first id outside 0..vocab_size - 1,
    // counted from `begin`; -1 where there is none.
    template <typename T>
    static int64_t widen(const void* tokens, int64_t begin, int64_t count, int64_t vocab_size, int64_t* out) {
        const T* from = static_cast<const T*>(tokens) + begin;
        T lowest = 0, highest = 0;  // apart from the copy, in the file's narrow type, both loops become vector code
        for (int64_t i = 0; i < count; ++i) {
            lowest = std::min(lowest, from[i]);
            highest = std::max(highest, from[i]);
        }
        for (int64_t i = 0; i < count; ++i) {
            out[i] = static_cast<int64_t>(from[i]);
        }
        if (vocab_size == kUnchecked || (lowest >= 0 && static_cast<int64_t>(highest) < vocab_size)) {
            return -1;
        }
        int64_t wrong = 0;
        while (wrong < count && out[wrong] >= 0 && out[wrong] < vocab_size) {
            ++wrong;
        }
        return wrong < count ? wrong : -1;
    }

    static Copy copier(const py::array& tokens) {
        constexpr int kAligned = py::detail::npy_api::NPY_ARRAY_ALIGNED_;
        const char kind = tokens.dtype().kind(), order = tokens.dtype().byteorder();
        if (tokens.ndim() != 1 || !(tokens.flags() & py::array::c_style) || !(tokens.flags() & kAligned) ||
            (order != '=' && order != '|')) {
            throw std::invalid_argument("tokens must be a flat, contiguous, aligned array in native byte order");
        }
        if (kind == 'i') {
            switch (tokens.itemsize()) {
                case 1:
                    return widen<int8_t>;
                case 2:
                    return widen<int16_t>;
                case 4:
                    return widen<int32_t>;
                case 8:
                    return widen<int64_t>;
            }
        }
        if (kind == 'u' && tokens.itemsize() == 1) {
            return widen<uint8_t>;
        }
        if (kind == 'u' && tokens.itemsize() == 2) {
            return widen<uint16_t>;
        }
        throw std::invalid_argument("tokens must be int8, int16, int32, int64, uint8 or uint16");
    }

    void check_allocation(int64_t count) const {
        if (count > kMax64 / 16 / (seq_length_ + 1)) {
            throw std::invalid_argument(std::to_string(count) + " samples of " + std::to_string(seq_length_ + 1) +
                                        " tokens are beyond 64 bits");
        }
    }

    // Sample `index`, in the shuffled order: seq_length + 1 ids.
    void fill(int64_t index, int64_t* out) const {
        if (index < 0 || index >= shuffle_.size()) {
            throw std::out_of_range("sample " + std::to_string(index) + " is outside the " +
                                    std::to_string(shuffle_.size()) + " samples");
        }
        const int64_t row = shuffle_[index];
        if (row < 0 || row >= shuffle_.size()) {
            throw damaged("shuffle_index[" + std::to_string(index) + "] = " + std::to_string(row));
        }
        const int64_t first = samples_[2 * row], first_offset = samples_[2 * row + 1];
        const int64_t last = samples_[2 * row + 2], last_offset = samples_[2 * row + 3];
        if (first < 0 || last < first || last >= documents_.size()) {
            throw damaged("sample_index[" + std::to_string(row) + "] goes from position " + std::to_string(first) +
                          " to " + std::to_string(last) + " of " + std::to_string(documents_.size()));
        }
        int64_t missing = seq_length_ + 1;
        for (int64_t position = first; position <= last; ++position) {
            const int64_t document = documents_[position];
            if (document < 0 || document >= lengths_.size()) {
                throw damaged("document_index[" + std::to_string(position) + "] = " + std::to_string(document) +
                              " of " + std::to_string(lengths_.size()) + " documents");
            }
            const int64_t length = lengths_[document], pointer = pointers_[document];
            if (length < 0 || pointer < 0 || pointer % token_bytes_ != 0 || pointer / token_bytes_ > num_tokens_ ||
                length > num_tokens_ - pointer / token_bytes_) {
                throw damaged("document " + std::to_string(document) + " lies at byte " + std::to_string(pointer) +
                              " with " + std::to_string(length) + " tokens, but the .bin has " +
                              std::to_string(num_tokens_) + " of " + std::to_string(token_bytes_) + " bytes");
            }
            const int64_t begin = position == first ? first_offset : 0;
            // the next sample's first token is this one's last
            if (begin < 0 || begin > length || (position == last && (last_offset < 0 || last_offset >= length))) {
                throw damaged("sample_index[" + std::to_string(row) + "] has the offsets " +
                              std::to_string(first_offset) + " and " + std::to_string(last_offset) + ", document " +
                              std::to_string(document) + " " + std::to_string(length) + " tokens");
            }
            const int64_t end = position == last ? last_offset + 1 : length;
            if (end < begin || end - begin > missing) {
                throw damaged("sample_index[" + std::to_string(row) + "] describes another number of tokens than " +
                              std::to_string(seq_length_ + 1));
            }
            const int64_t wrong = copy_(tokens_, pointer / token_bytes_ + begin, end - begin, vocab_size_, out);
            if (wrong >= 0) {
                throw std::invalid_argument("token " + std::to_string(begin + wrong) + " of document " +
                                            std::to_string(document) + " is " + std::to_string(out[wrong]) +
                                            ", outside vocab_size=" + std::to_string(vocab_size_) +
                                            "; use the tokenizer the data was made with, or set vocab_size to its");
            }
            out += end - begin;
            missing -= end - begin;
        }
        if (missing != 0) {
            throw damaged("sample_index[" + std::to_string(row) + "] describes " +
                          std::to_string(seq_length_ + 1 - missing) + " tokens, not " +
                          std::to_string(seq_length_ + 1));
        }
    }

    static std::invalid_argument damaged(const std::string& what) {
        return std::invalid_argument(what + ": the .idx or the index cache is damaged; delete the cache "
                                            "(data_cache_path), and if that does not help copy the dataset anew");
    }

    std::array<py::array, 6> owners_;  // keeps the memory that the views look at
    const void* tokens_;
    int64_t num_tokens_;
    int64_t token_bytes_;
    Copy copy_;
    View<int32_t> lengths_;
    View<int64_t> pointers_;
    View<int32_t> documents_;
    OffsetView samples_;
    OffsetView shuffle_;
    int64_t seq_length_;
    int64_t vocab_size_;
};

}  // namespace

PYBIND11_MODULE(helpers, module) {
    module.doc() = "Index arrays of the GPT dataset and of blends, the samples they describe, and packing.";
    module.def("build_sample_index", &build_sample_index, py::arg("lengths").noconvert(),
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"));
    module.def("build_blend_index", &build_blend_index, py::arg("weights").noconvert(), py::arg("size"));
    module.def("build_exhaustive_blend_index", &build_exhaustive_blend_index, py::arg("sizes").noconvert(),
               py::arg("size"));
    py::class_<SampleReader>(module, "SampleReader")
        .def(py::init<py::array, Array<int32_t>, Array<int64_t>, Array<int32_t>, py::array, py::array, int64_t,
                      std::optional<int64_t>>(),
             py::arg("tokens").noconvert(), py::arg("lengths").noconvert(), py::arg("pointers").noconvert(),
             py::arg("document_index").noconvert(), py::arg("sample_index").noconvert(),
             py::arg("shuffle_index").noconvert(), py::arg("seq_length"), py::arg("vocab_size"))
        .def("read", &SampleReader::read, py::arg("indices").noconvert())
        .def("read_into", &SampleReader::read_into, py::arg("indices").noconvert(), py::arg("out").noconvert(),
             py::arg("rows").noconvert())
        .def("read_one", &SampleReader::read_one, py::arg("index"));
    py::class_<Shuffler>(module, "Shuffler")
        .def(py::init<int64_t>(), py::arg("seed"))
        .def("shuffle", &Shuffler::shuffle, py::arg("array").noconvert());
    packing::register_packing(module);
    packing::register_steps(module);
    packing::register_buckets(module);
}
