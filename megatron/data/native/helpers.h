// Checked views of NumPy arrays for the files here, and what each adds to the module.
//
// Every function has a NumPy twin in tests/data/ as its oracle. Arithmetic is 64-bit throughout, every index read from
// an array is checked before use, errors are exceptions (ValueError in Python), and the GIL is released during loops.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();
constexpr int kAligned = py::detail::npy_api::NPY_ARRAY_ALIGNED_;

// A flat array of one type. Arrays of an .idx file start at byte 34 of the map, so they are not aligned, and reading
// them through a T pointer would be undefined behaviour.
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

void register_samples(py::module_& module);
void register_blends(py::module_& module);
void register_shuffler(py::module_& module);
void register_byte_pairs(py::module_& module);
