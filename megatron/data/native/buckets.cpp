// Lengths to which rows are padded: by rule, and the best ones for given samples. packing.py documents the functions,
// packing.h the shared types.

#include "packing.h"

#include <utility>

namespace packing {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 62;

Array bucket_lengths(const Array& lengths_array, int64_t per_octave) {
    constexpr int64_t kLongest = int64_t{1} << 42, kMostPerOctave = 1 << 20;  // their product is within 64 bits
    Lengths lengths(lengths_array);
    if (per_octave < 1 || per_octave > kMostPerOctave) {
        throw std::invalid_argument("per_octave=" + std::to_string(per_octave) + " must be 1 to 2**20");
    }
    Array out(static_cast<py::ssize_t>(lengths.size));
    int64_t* rounded = out.mutable_data();
    py::gil_scoped_release unlocked;
    lengths.check(kLongest, "2**42");
    for (int64_t i = 0; i < lengths.size; ++i) {
        const int64_t length = lengths.data[i];
        const int power = 63 - __builtin_clzll(static_cast<uint64_t>(length));
        const int64_t octave = int64_t{1} << power;
        // the smallest sufficient octave + floor(k * octave / per_octave)
        const int64_t k = ((length - octave) * per_octave + octave - 1) >> power;
        rounded[i] = octave + (k << power) / per_octave;
    }
    return out;
}

// Distinct lengths, ascending, and the number of samples up to each.
struct Histogram {
    std::vector<int64_t> distinct;
    std::vector<int64_t> up_to;

    explicit Histogram(const Lengths& lengths) {
        if (lengths.can_be_counted()) {
            std::vector<int64_t> counts(static_cast<size_t>(lengths.largest) + 1, 0);
            for (int64_t i = 0; i < lengths.size; ++i) {
                ++counts[lengths.data[i]];
            }
            for (size_t length = 1; length < counts.size(); ++length) {
                if (counts[length] > 0) {
                    add(static_cast<int64_t>(length), counts[length]);
                }
            }
        } else {
            std::vector<int64_t> ordered;
            ordered.assign(lengths.data, lengths.data + lengths.size);
            std::sort(ordered.begin(), ordered.end());
            for (const int64_t length : ordered) {
                add(length, 1);
            }
        }
    }

  private:
    void add(int64_t length, int64_t count) {
        if (!distinct.empty() && distinct.back() == length) {
            up_to.back() += count;
            return;
        }
        up_to.push_back(count + (up_to.empty() ? 0 : up_to.back()));
        distinct.push_back(length);
    }
};

// One layer of the dynamic program: updates costs[i], the fewest padded tokens of the i + 1 shortest lengths with some
// number of edges, to one edge more. If the edge before distinct[i] is distinct[t], the cost is costs[t] + distinct[i]
// * (up_to[i] - up_to[t]): for each t a line in distinct[i]. Slopes fall as t grows and queries ascend, so a queue
// holds the lower envelope of the lines and the layer takes linear time (the convex hull trick). before[i] becomes t.
// There must be at least as many lengths as edges.
void add_edge(const Histogram& histogram, int64_t edges, std::vector<int64_t>& costs, uint32_t* before) {
    const std::vector<int64_t>& up_to = histogram.up_to;
    const auto at = [&](int64_t t, int64_t length) { return costs[t] - up_to[t] * length; };
    const auto hidden = [&](int64_t a, int64_t b, int64_t c) {  // b, by a and c
        return static_cast<__int128>(costs[c] - costs[a]) * (up_to[b] - up_to[a]) <=
               static_cast<__int128>(costs[b] - costs[a]) * (up_to[c] - up_to[a]);
    };
    const auto num_lengths = static_cast<int64_t>(histogram.distinct.size());
    std::vector<int64_t> envelope, next(costs);
    size_t front = 0;
    for (int64_t i = edges - 1; i < num_lengths; ++i) {
        while (envelope.size() >= front + 2 && hidden(envelope[envelope.size() - 2], envelope.back(), i - 1)) {
            envelope.pop_back();
        }
        envelope.push_back(i - 1);
        const int64_t length = histogram.distinct[i];
        while (front + 1 < envelope.size() && at(envelope[front + 1], length) < at(envelope[front], length)) {
            ++front;
        }
        next[i] = at(envelope[front], length) + up_to[i] * length;
        before[i] = static_cast<uint32_t>(envelope[front]);
    }
    costs = std::move(next);
}

Array bucket_edges(const Array& lengths_array, int64_t num_buckets) {
    constexpr int64_t kMostChoices = int64_t{1} << 30;  // 4 GiB
    Lengths lengths(lengths_array);
    check_at_least_1(num_buckets, "num_buckets");
    std::vector<int64_t> edges;
    {
        py::gil_scoped_release unlocked;
        lengths.check(kMostTokens, "2**62");
        if (lengths.largest > kMostTokens / lengths.size) {
            throw std::invalid_argument("the samples padded to the longest have more than 2**62 tokens");
        }
        const Histogram histogram(lengths);
        const auto num_lengths = static_cast<int64_t>(histogram.distinct.size());
        const int64_t count = std::min(num_buckets, num_lengths);
        if (count < num_lengths && count > kMostChoices / num_lengths) {
            throw std::invalid_argument("num_buckets=" + std::to_string(num_buckets) + " of " +
                                        std::to_string(num_lengths) +
                                        " distinct lengths need too much memory; use fewer");
        }
        if (count == num_lengths) {
            edges = histogram.distinct;
        } else {
            std::vector<int64_t> costs;
            for (int64_t i = 0; i < num_lengths; ++i) {
                costs.push_back(histogram.distinct[i] * histogram.up_to[i]);
            }
            std::vector<uint32_t> before(static_cast<size_t>((count - 1) * num_lengths));
            for (int64_t layer = 2; layer <= count; ++layer) {
                add_edge(histogram, layer, costs, before.data() + (layer - 2) * num_lengths);
            }
            int64_t last = num_lengths - 1;
            for (int64_t layer = count; layer > 1; --layer) {
                edges.push_back(histogram.distinct[last]);
                last = before[(layer - 2) * num_lengths + last];
            }
            edges.push_back(histogram.distinct[last]);
            std::reverse(edges.begin(), edges.end());
        }
    }
    return to_array(edges);
}

}  // namespace

void register_buckets(py::module_& module) {
    module.def("bucket_lengths", &bucket_lengths, py::arg("lengths").noconvert(), py::arg("per_octave"));
    module.def("bucket_edges", &bucket_edges, py::arg("lengths").noconvert(), py::arg("num_buckets"));
}

}  // namespace packing
