// Shared by packing.cpp, steps.cpp and buckets.cpp: checked lengths of samples, samples sorted by length, and packs.
//
// Arithmetic is 64-bit throughout, every length is checked before use, errors are exceptions (ValueError in Python),
// and the GIL is released during loops. Equal input gives equal output on every machine. Oracles in Python are in
// tests/data/test_packing.py.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace packing {

namespace py = pybind11;

using Array = py::array_t<int64_t, py::array::c_style>;

constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

// A flat array of lengths, each 1 to `most`, and their sum.
struct Lengths {
    const int64_t* data;
    int64_t size;
    int64_t sum = 0;
    int64_t largest = 0;

    explicit Lengths(const Array& array) : data(array.data()), size(array.size()) {
        constexpr int kAligned = py::detail::npy_api::NPY_ARRAY_ALIGNED_;
        if (array.ndim() != 1 || !(array.flags() & py::array::c_style) || !(array.flags() & kAligned)) {
            throw std::invalid_argument("lengths must be a flat, contiguous, aligned array");
        }
        if (size == 0) {
            throw std::invalid_argument("lengths is empty; give at least one sample");
        }
    }

    // `limit` is the name of `most` in messages.
    void check(int64_t most, const std::string& limit) {
        for (int64_t i = 0; i < size; ++i) {
            if (data[i] < 1 || data[i] > most) {
                fail(i, limit);
            }
            if (data[i] > kMax64 - sum) {
                throw std::invalid_argument("the lengths' sum is beyond 64 bits");
            }
            sum += data[i];
            largest = std::max(largest, data[i]);
        }
    }

    // Returns true if an array indexed by length has a size in proportion to the samples.
    bool can_be_counted() const { return largest <= std::max<int64_t>(4 * size, 1 << 16); }

  private:
    [[noreturn]] void fail(int64_t i, const std::string& limit) const {
        const std::string found = "lengths[" + std::to_string(i) + "] = " + std::to_string(data[i]);
        if (data[i] < 1) {
            throw std::invalid_argument(found + " must be at least 1; leave samples without tokens out");
        }
        throw std::invalid_argument(found + " is more than " + limit +
                                    "; raise it, or drop, truncate or split longer samples");
    }
};

inline void check_at_least_1(int64_t value, const char* name) {
    if (value < 1) {
        throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + " must be at least 1");
    }
}

inline Array to_array(const std::vector<int64_t>& values) {
    Array array(static_cast<py::ssize_t>(values.size()));
    std::copy(values.begin(), values.end(), array.mutable_data());
    return array;
}

// Samples by length, longest first; equal ones in the order of their numbers.
struct Sorted {
    std::vector<int64_t> samples;
    std::vector<int64_t> distinct;  // lengths, descending
    std::vector<int64_t> begins;    // samples of distinct[k] are samples[begins[k]] .. samples[begins[k + 1]]

    explicit Sorted(const Lengths& lengths);

  private:
    void by_counting(const Lengths& lengths);
    void by_comparing(const Lengths& lengths);
};

// Packs of equal lengths: those of `parent` (-1: none), then `copies` samples of one length.
struct Group {
    int64_t parent;
    int64_t which;  // index in Sorted::distinct
    int64_t copies;
    int64_t count;
};

// Returns groups whose packs hold all samples, at most `capacity` tokens each, in as few packs as are found.
std::vector<Group> fewest_packs(const Sorted& sorted, const Lengths& lengths, int64_t capacity);

int64_t count_packs(const std::vector<Group>& groups);

// Writes the samples of every pack, pack by pack, and the start of each pack; `starts` has one element more.
void write_packs(const Sorted& sorted, const std::vector<Group>& groups, int64_t* order, int64_t* starts);

void register_packing(py::module_& module);
void register_steps(py::module_& module);
void register_buckets(py::module_& module);

}  // namespace packing
