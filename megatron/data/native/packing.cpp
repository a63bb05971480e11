// Packing of a dataset into the fewest packs. packing.py documents the functions, packing.h the shared types.

#include "packing.h"

#include <map>
#include <numeric>
#include <optional>
#include <utility>

namespace packing {

Sorted::Sorted(const Lengths& lengths) : samples(static_cast<size_t>(lengths.size)) {
    if (lengths.can_be_counted()) {
        by_counting(lengths);
    } else {
        by_comparing(lengths);
    }
}

void Sorted::by_counting(const Lengths& lengths) {
    std::vector<int64_t> next(static_cast<size_t>(lengths.largest) + 1, 0);
    for (int64_t i = 0; i < lengths.size; ++i) {
        ++next[lengths.data[i]];
    }
    int64_t begin = 0;
    for (int64_t length = lengths.largest; length > 0; --length) {
        const int64_t count = next[length];
        if (count > 0) {
            distinct.push_back(length);
            begins.push_back(begin);
        }
        next[length] = begin;
        begin += count;
    }
    begins.push_back(begin);
    for (int64_t i = 0; i < lengths.size; ++i) {
        samples[next[lengths.data[i]]++] = i;
    }
}

void Sorted::by_comparing(const Lengths& lengths) {
    std::iota(samples.begin(), samples.end(), 0);
    const int64_t* data = lengths.data;
    std::sort(samples.begin(), samples.end(),
              [data](int64_t a, int64_t b) { return data[a] != data[b] ? data[a] > data[b] : a < b; });
    for (int64_t k = 0; k < lengths.size; ++k) {
        const int64_t length = data[samples[k]];
        if (distinct.empty() || distinct.back() != length) {
            distinct.push_back(length);
            begins.push_back(k);
        }
    }
    begins.push_back(lengths.size);
}

int64_t count_packs(const std::vector<Group>& groups) {
    int64_t packs = 0;
    for (const Group& group : groups) {
        packs += group.count;
    }
    return packs;
}

void write_packs(const Sorted& sorted, const std::vector<Group>& groups, int64_t* order, int64_t* starts) {
    std::vector<int64_t> next(sorted.begins.begin(), sorted.begins.end() - 1);  // first unused sample of each length
    std::vector<const Group*> layers;
    int64_t written = 0, pack = 0;
    for (const Group& group : groups) {
        if (group.count == 0) {
            continue;
        }
        layers.clear();
        for (const Group* layer = &group;; layer = &groups[layer->parent]) {
            layers.push_back(layer);
            if (layer->parent < 0) {
                break;
            }
        }
        std::reverse(layers.begin(), layers.end());
        for (int64_t i = 0; i < group.count; ++i) {
            starts[pack++] = written;
            for (const Group* layer : layers) {
                const int64_t* samples = sorted.samples.data() + next[layer->which];
                std::copy(samples, samples + layer->copies, order + written);
                next[layer->which] += layer->copies;
                written += layer->copies;
            }
        }
    }
    starts[pack] = written;
}

namespace {

// Best-fit-decreasing puts each sample, longest first, into the pack with the least sufficient room. Packs of equal
// room are interchangeable, and a pack that took a sample is the tightest for the next of equal length. So a group of
// packs takes all it can of a length at once, which gives as many packs as sample by sample.
std::vector<Group> best_fit_decreasing(const Sorted& sorted, int64_t capacity) {
    std::vector<Group> groups;
    std::map<int64_t, std::vector<int64_t>> by_room;  // groups that may take more
    const int64_t shortest = sorted.distinct.back();
    const auto add = [&](Group group, int64_t room) {
        if (room >= shortest) {
            by_room[room].push_back(static_cast<int64_t>(groups.size()));
        }
        groups.push_back(group);
    };
    for (size_t k = 0; k < sorted.distinct.size(); ++k) {
        const int64_t length = sorted.distinct[k], which = static_cast<int64_t>(k);
        for (int64_t left = sorted.begins[k + 1] - sorted.begins[k]; left > 0;) {
            const auto tightest = by_room.lower_bound(length);
            const bool is_new = tightest == by_room.end();
            const int64_t room = is_new ? capacity : tightest->first;
            const int64_t parent = is_new ? -1 : tightest->second.back();
            const int64_t available = is_new ? kMax64 : groups[parent].count;
            // full packs first; the rest is less than one pack takes
            const int64_t copies = std::min(room / length, left);
            const int64_t count = std::min(available, left / copies);
            left -= copies * count;
            if (!is_new) {
                groups[parent].count -= count;
                if (groups[parent].count == 0) {
                    tightest->second.pop_back();
                    if (tightest->second.empty()) {
                        by_room.erase(tightest);
                    }
                }
            }
            add({parent, which, copies, count}, room - copies * length);
        }
    }
    return groups;
}

// Fills packs to the last token, all packs of one content at once: the longest remaining length, then the longest that
// fits, and so on until one or two lengths fill the rest exactly or nothing fits. Each content is used for as many
// packs as its lengths allow, which exhausts one of them, so there are about as many contents as distinct lengths. Long
// lengths go first; the short ones, which fit anywhere, remain for the end. With few distinct lengths and many samples
// of each it gives fewer packs than best-fit-decreasing, without a guarantee.
class ExactFill {
  public:
    // `steps`: limit of comparisons.
    ExactFill(const Sorted& sorted, int64_t capacity, int64_t steps)
        : sorted_(sorted), capacity_(capacity), steps_(steps), used_(sorted.distinct.size(), 0) {
        for (size_t k = 0; k < sorted.distinct.size(); ++k) {
            left_.push_back(sorted.begins[k + 1] - sorted.begins[k]);
            open_.push_back(static_cast<int64_t>(k));
        }
    }

    // Returns nothing if the steps do not suffice.
    std::optional<std::vector<Group>> groups() {
        std::vector<Group> groups;
        while (!open_.empty()) {
            fill_one();
            if (steps_ < 0) {
                return std::nullopt;
            }
            std::sort(content_.begin(), content_.end());
            int64_t packs = kMax64;
            for (const int64_t which : content_) {
                packs = std::min(packs, left_[which] / used_[which]);
            }
            for (const int64_t which : content_) {
                const int64_t parent = which == content_.front() ? -1 : static_cast<int64_t>(groups.size()) - 1;
                groups.push_back({parent, which, used_[which], 0});
                left_[which] -= packs * used_[which];
                used_[which] = 0;
            }
            groups.back().count = packs;
            content_.clear();
            open_.erase(std::remove_if(open_.begin(), open_.end(), [this](int64_t k) { return left_[k] == 0; }),
                        open_.end());
        }
        return groups;
    }

  private:
    void fill_one() {
        int64_t room = capacity_;
        while (steps_ >= 0 && room >= sorted_.distinct[open_.back()] && !finish(room)) {
            const int64_t which = longest_within(room);
            if (which < 0) {
                return;
            }
            take(which);
            room -= sorted_.distinct[which];
        }
    }

    bool is_free(int64_t which, int64_t copies = 1) const { return left_[which] - used_[which] >= copies; }

    void take(int64_t which) {
        if (used_[which]++ == 0) {
            content_.push_back(which);
        }
    }

    // Returns the index in open_ of the longest length that is at most `room`.
    int64_t first_within(int64_t room) const {
        const auto longer = [this](int64_t which, int64_t limit) { return sorted_.distinct[which] > limit; };
        return std::lower_bound(open_.begin(), open_.end(), room, longer) - open_.begin();
    }

    int64_t longest_within(int64_t room) {
        for (size_t k = static_cast<size_t>(first_within(room)); k < open_.size(); ++k, --steps_) {
            if (is_free(open_[k])) {
                return open_[k];
            }
        }
        return -1;
    }

    // Fills the room exactly with one or two lengths, or returns false.
    bool finish(int64_t room) {
        auto longer = static_cast<size_t>(first_within(room)), shorter = open_.size() - 1;
        if (sorted_.distinct[open_[longer]] == room && is_free(open_[longer])) {
            take(open_[longer]);
            return true;
        }
        if (2 * sorted_.distinct[open_[longer]] < room) {
            return false;
        }
        for (; longer <= shorter && shorter < open_.size(); --steps_) {
            const int64_t a = open_[longer], b = open_[shorter];
            const int64_t sum = sorted_.distinct[a] + sorted_.distinct[b];
            if (sum == room && is_free(a, a == b ? 2 : 1) && is_free(b)) {
                take(a);
                take(b);
                return true;
            }
            if (sum < room) {
                --shorter;  // to a longer one
            } else {
                ++longer;
            }
        }
        return false;
    }

    const Sorted& sorted_;
    int64_t capacity_;
    int64_t steps_;
    std::vector<int64_t> left_;     // samples of each length that are in no pack
    std::vector<int64_t> open_;     // lengths with such samples
    std::vector<int64_t> used_;     // copies of each length in the current pack
    std::vector<int64_t> content_;  // lengths in the current pack
};

}  // namespace

std::vector<Group> fewest_packs(const Sorted& sorted, const Lengths& lengths, int64_t capacity) {
    constexpr int64_t kNear = 5000;          // less than 1 in this many packs above the bound is good enough
    constexpr int64_t kStepsASample = 64;    // bounds the time of the second attempt
    std::vector<Group> groups = best_fit_decreasing(sorted, capacity);
    const int64_t packs = count_packs(groups), bound = lengths.sum / capacity + (lengths.sum % capacity != 0);
    if (packs - bound > bound / kNear) {
        std::optional<std::vector<Group>> exact =
            ExactFill(sorted, capacity, kStepsASample * lengths.size + (1 << 16)).groups();
        if (exact && count_packs(*exact) < packs) {
            return std::move(*exact);
        }
    }
    return groups;
}

namespace {

// Steele, Lea and Flood's SplitMix64: the same numbers on every platform.
class SplitMix {
  public:
    explicit SplitMix(uint64_t seed) : state_(seed) {}

    // Returns a number uniform over 0 .. bound - 1, by Lemire's multiplication with rejection.
    uint64_t below(uint64_t bound) {
        const uint64_t unfair = (0 - bound) % bound;
        while (true) {
            const auto product = static_cast<unsigned __int128>(next()) * bound;
            if (static_cast<uint64_t>(product) >= unfair) {
                return static_cast<uint64_t>(product >> 64);
            }
        }
    }

  private:
    uint64_t next() {
        uint64_t mixed = state_ += 0x9e3779b97f4a7c15U;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
        return mixed ^ (mixed >> 31);
    }

    uint64_t state_;
};

void shuffle_equals(Sorted& sorted, int64_t seed) {
    SplitMix random(static_cast<uint64_t>(seed));
    for (size_t k = 0; k < sorted.distinct.size(); ++k) {
        int64_t* samples = sorted.samples.data() + sorted.begins[k];
        for (int64_t left = sorted.begins[k + 1] - sorted.begins[k]; left > 1; --left) {
            std::swap(samples[left - 1], samples[random.below(static_cast<uint64_t>(left))]);
        }
    }
}

py::tuple pack_dataset(const Array& lengths_array, int64_t capacity, std::optional<int64_t> seed) {
    Lengths lengths(lengths_array);
    check_at_least_1(capacity, "capacity");
    py::array_t<int64_t> order(static_cast<py::ssize_t>(lengths.size));
    int64_t* order_out = order.mutable_data();
    std::optional<Sorted> sorted;
    std::vector<Group> groups;
    {
        py::gil_scoped_release unlocked;
        lengths.check(capacity, "capacity=" + std::to_string(capacity));
        sorted.emplace(lengths);
        if (seed) {
            shuffle_equals(*sorted, *seed);
        }
        groups = fewest_packs(*sorted, lengths, capacity);
    }
    py::array_t<int64_t> starts(static_cast<py::ssize_t>(count_packs(groups) + 1));
    int64_t* starts_out = starts.mutable_data();
    {
        py::gil_scoped_release unlocked;
        write_packs(*sorted, groups, order_out, starts_out);
    }
    return py::make_tuple(std::move(order), std::move(starts));
}

}  // namespace

void register_packing(py::module_& module) {
    module.def("pack_dataset", &pack_dataset, py::arg("lengths").noconvert(), py::arg("capacity"), py::arg("seed"));
}

}  // namespace packing
