// Builders of the index arrays of gpt.py and blend.py: the loops that are too slow in Python.
//
// Every function has a NumPy twin in tests/data/ that is its oracle. Arithmetic is 64-bit throughout, every index read
// from an array is checked before use, faults are exceptions (ValueError in Python), and the interpreter's lock is free
// while a loop runs.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
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

// The arrays of an .idx file start 34 bytes into the map, so they are not aligned: reading through an int32_t pointer
// would be undefined.
class Int32View {
  public:
    explicit Int32View(const Array<int32_t>& array, const char* name)
        : bytes_(static_cast<const char*>(static_cast<const py::array&>(array).data())), size_(array.size()) {
        if (array.ndim() != 1) {
            throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.ndim()) +
                                        " dimensions; it must have 1");
        }
    }
    int64_t size() const { return size_; }
    int64_t operator[](int64_t i) const {
        int32_t value;
        std::memcpy(&value, bytes_ + i * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    }

  private:
    const char* bytes_;
    int64_t size_;
};

template <typename Index>
void fill_sample_index(const Int32View& lengths, const Int32View& documents, int64_t seq_length, int64_t num_samples,
                       Index* out) {
    out[0] = out[1] = 0;
    int64_t row = 1;
    int64_t document_begin = 0;       // tokens ahead of this document in the stream
    int64_t boundary = seq_length;    // token at which sample `row` begins
    for (int64_t position = 0; position < documents.size() && row <= num_samples; ++position) {
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

std::pair<py::array, py::array> build_blend_index(const Array<double>& weights_array, int64_t size) {
    if (weights_array.ndim() != 1) {
        throw std::invalid_argument("weights must have 1 dimension");
    }
    const std::vector<double> weights(weights_array.data(), weights_array.data() + weights_array.size());
    if (weights.empty() || weights.size() > static_cast<size_t>(std::numeric_limits<int16_t>::max())) {
        throw std::invalid_argument(std::to_string(weights.size()) + " datasets cannot be blended; give 1 to 32767");
    }
    for (const double weight : weights) {
        if (!std::isfinite(weight) || weight < 0) {
            throw std::invalid_argument("weight " + std::to_string(weight) + " must be finite and not negative");
        }
    }
    if (size < 0 || size > kMax64 / 16) {
        throw std::invalid_argument("size=" + std::to_string(size) + " is negative or beyond 64 bits");
    }
    py::array_t<int16_t> dataset_index(static_cast<py::ssize_t>(size));
    py::array_t<int64_t> sample_index(static_cast<py::ssize_t>(size));
    int16_t* dataset_out = dataset_index.mutable_data();
    int64_t* sample_out = sample_index.mutable_data();
    {
        py::gil_scoped_release unlocked;
        std::vector<int64_t> drawn(weights.size(), 0);
        for (int64_t i = 0; i < size; ++i) {
            const double due = std::max(static_cast<double>(i), 1.0);
            size_t neediest = 0;
            double largest_error = weights[0] * due - static_cast<double>(drawn[0]);
            for (size_t d = 1; d < weights.size(); ++d) {
                const double error = weights[d] * due - static_cast<double>(drawn[d]);
                if (error > largest_error) {
                    largest_error = error;
                    neediest = d;
                }
            }
            dataset_out[i] = static_cast<int16_t>(neediest);
            sample_out[i] = drawn[neediest]++;
        }
    }
    return {std::move(dataset_index), std::move(sample_index)};
}

// numpy.random.RandomState(seed).shuffle for flat arrays, draw for draw. One instance must not be used by two threads
// at once.
class Shuffler {
  public:
    explicit Shuffler(int64_t seed) {
        if (seed < 0 || seed > static_cast<int64_t>(std::numeric_limits<uint32_t>::max())) {
            throw std::invalid_argument("seed=" + std::to_string(seed) + " must be between 0 and 2**32 - 1");
        }
        generator_.seed(static_cast<uint32_t>(seed));
    }

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
    // Uniform over 0..limit: masked draws, thrown away while too large.
    uint64_t draw(uint64_t limit) {
        uint64_t mask = limit;
        for (int shift = 1; shift < 64; shift *= 2) {
            mask |= mask >> shift;
        }
        uint64_t value;
        do {
            value = generator_();
            if (limit > std::numeric_limits<uint32_t>::max()) {
                value = value << 32 | generator_();
            }
            value &= mask;
        } while (value > limit);
        return value;
    }

    template <typename T>
    void permute(T* data, uint64_t size) {
        // Draws do not depend on the data: a block of them ahead of its swaps lets the caches fetch meanwhile.
        std::array<uint64_t, 64> partner;
        for (uint64_t left = size; left > 1;) {
            const uint64_t count = std::min<uint64_t>(partner.size(), left - 1);
            for (uint64_t k = 0; k < count; ++k) {
                partner[k] = draw(left - 1 - k);
                __builtin_prefetch(data + partner[k], 1);
            }
            for (uint64_t k = 0; k < count; ++k) {
                std::swap(data[left - 1 - k], data[partner[k]]);
            }
            left -= count;
        }
    }

    std::mt19937 generator_;
};

}  // namespace

PYBIND11_MODULE(helpers, module) {
    module.doc() = "Index arrays of the GPT dataset and of blends.";
    module.def("build_sample_index", &build_sample_index, py::arg("lengths").noconvert(),
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"));
    module.def("build_blend_index", &build_blend_index, py::arg("weights").noconvert(), py::arg("size"));
    py::class_<Shuffler>(module, "Shuffler")
        .def(py::init<int64_t>(), py::arg("seed"))
        .def("shuffle", &Shuffler::shuffle, py::arg("array").noconvert());
}
