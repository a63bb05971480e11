// The index arrays of blend.py: the dataset of each sample, and its number in that dataset.

#include "helpers.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kMax16 = std::numeric_limits<int16_t>::max();

void check_number_of_datasets(int64_t count) {
    if (count < 1 || count > kMax16) {
        throw std::invalid_argument(std::to_string(count) + " datasets cannot be blended; give 1 to " +
                                    std::to_string(kMax16));
    }
}

// Draws `size` samples, each from the dataset furthest behind its weight, the first of equals, and writes the dataset
// and its previously drawn samples. With `sizes`, which add up to `size` or more, a dataset leaves after that many
// samples.
void deal(const std::vector<double>& weights, const std::vector<int64_t>& sizes, int64_t size, int16_t* dataset_out,
          int64_t* sample_out) {
    std::vector<int64_t> drawn(weights.size(), 0);
    std::vector<size_t> open;  // datasets with samples left, in order
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

}  // namespace

void register_blends(py::module_& module) {
    module.def("build_blend_index", &build_blend_index, py::arg("weights").noconvert(), py::arg("size"));
    module.def("build_exhaustive_blend_index", &build_exhaustive_blend_index, py::arg("sizes").noconvert(),
               py::arg("size"));
}
