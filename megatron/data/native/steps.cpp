// Packing of a step: one global batch over the data-parallel ranks and their microbatches. packing.py documents the
// function, packing.h the shared types.

#include "packing.h"

#include <cstdlib>
#include <functional>
#include <optional>
#include <queue>
#include <set>
#include <utility>

namespace packing {
namespace {

constexpr int64_t kMostRanks = 1 << 20;

// A microbatch of one rank. `items` are indices into the descending lengths, and stay sorted.
struct Cell {
    std::vector<int64_t> items;
    int64_t total = 0;
};
using Cells = std::vector<Cell>;

class StepPacker {
  public:
    StepPacker(const Lengths& lengths, int64_t max_tokens, int64_t num_ranks)
        : given_(lengths), sorted_(lengths), max_tokens_(max_tokens), num_ranks_(num_ranks) {
        for (const int64_t sample : sorted_.samples) {
            lengths_.push_back(lengths.data[sample]);
        }
    }

    // Returns the cells microbatch by microbatch, rank by rank.
    Cells plan() const {
        Cells cells = fewest();
        arrange(cells);
        return cells;
    }

    int64_t sample(int64_t item) const { return sorted_.samples[item]; }

  private:
    static constexpr int64_t kPartners = 8;         // cells with which the fullest or emptiest one tries to trade
    static constexpr size_t kSearchedItems = 64;    // most samples of an exhaustive search
    static constexpr int64_t kSearchedNodes = 100'000;
    static constexpr int64_t kFunctions = 12;       // dual feasible functions that bound the number of cells
    static constexpr int64_t kAlike = 256;          // totals within max_tokens / kAlike count as equal

    int64_t num_items() const { return static_cast<int64_t>(lengths_.size()); }

    // Returns balanced cells of the fewest microbatches found.
    Cells fewest() const {
        const auto at_least = [this](int64_t cells) { return (cells + num_ranks_ - 1) / num_ranks_; };
        // spreading nearly always suffices; the rest is for lengths that are not small beside max_tokens
        int64_t microbatches = at_least(cells_by_sum());
        std::optional<Cells> cells = spread(microbatches * num_ranks_);
        if (cells) {
            return std::move(*cells);
        }
        Cells tight = packed();
        const int64_t enough = at_least(static_cast<int64_t>(tight.size()));
        for (microbatches = at_least(cells_by_bounds()); microbatches < enough; ++microbatches) {
            if ((cells = spread(microbatches * num_ranks_)) || (cells = search(microbatches * num_ranks_))) {
                return std::move(*cells);
            }
        }
        if ((cells = spread(enough * num_ranks_))) {
            return std::move(*cells);
        }
        tight.resize(static_cast<size_t>(enough * num_ranks_));
        balance(tight);
        return tight;
    }

    int64_t cells_by_sum() const { return given_.sum / max_tokens_ + (given_.sum % max_tokens_ != 0); }

    // Returns a lower bound of the cells of any packing: Fekete and Schepers' dual feasible functions u(k), which map a
    // length x, in units of max_tokens, to floor((k + 1) x) / k, or to x itself if (k + 1) x is an integer.
    int64_t cells_by_bounds() const {
        int64_t most = cells_by_sum();
        for (int64_t k = 1; k <= kFunctions; ++k) {
            __int128 mapped = 0;  // in units of max_tokens * k
            for (const int64_t length : lengths_) {
                const __int128 scaled = static_cast<__int128>(length) * (k + 1);
                mapped += scaled % max_tokens_ == 0 ? static_cast<__int128>(length) * k
                                                    : scaled / max_tokens_ * max_tokens_;
            }
            const __int128 unit = static_cast<__int128>(max_tokens_) * k;
            most = std::max(most, static_cast<int64_t>((mapped + unit - 1) / unit));
        }
        return most;
    }

    // Puts each sample, longest first, into the emptiest cell, then balances. Returns nothing if a cell exceeds
    // max_tokens.
    std::optional<Cells> spread(int64_t num_cells) const {
        using Load = std::pair<int64_t, int64_t>;  // tokens, cell
        std::priority_queue<Load, std::vector<Load>, std::greater<>> emptiest;
        for (int64_t cell = 0; cell < num_cells; ++cell) {
            emptiest.emplace(0, cell);
        }
        Cells cells(static_cast<size_t>(num_cells));
        for (int64_t item = 0; item < num_items(); ++item) {
            Cell& cell = cells[emptiest.top().second];
            const int64_t number = emptiest.top().second;
            cell.items.push_back(item);
            cell.total += lengths_[item];
            emptiest.pop();
            emptiest.emplace(cell.total, number);
        }
        balance(cells);
        for (const Cell& cell : cells) {
            if (cell.total > max_tokens_) {
                return std::nullopt;
            }
        }
        return cells;
    }

    // Returns nearly the fewest cells, unbalanced.
    Cells packed() const {
        const std::vector<Group> groups = fewest_packs(sorted_, given_, max_tokens_);
        Cells cells;
        std::vector<int64_t> order(lengths_.size()), starts(static_cast<size_t>(count_packs(groups)) + 1);
        std::vector<int64_t> item_of(lengths_.size());
        for (int64_t item = 0; item < num_items(); ++item) {
            item_of[sorted_.samples[item]] = item;
        }
        write_packs(sorted_, groups, order.data(), starts.data());
        for (size_t pack = 0; pack + 1 < starts.size(); ++pack) {
            cells.emplace_back();
            for (int64_t k = starts[pack]; k < starts[pack + 1]; ++k) {
                put(cells.back(), item_of[order[k]]);
            }
        }
        return cells;
    }

    // Searches depth-first for a packing into that many cells, tightest cell first. Returns nothing after
    // kSearchedNodes, or for many samples.
    std::optional<Cells> search(int64_t num_cells) const {
        if (lengths_.size() > kSearchedItems) {
            return std::nullopt;
        }
        // no more cells than items can be used
        const int64_t usable = std::min(num_cells, num_items());
        std::vector<int64_t> rooms(static_cast<size_t>(usable), max_tokens_), chosen;
        int64_t nodes = 0;
        if (!place(rooms, chosen, usable * max_tokens_ - given_.sum, nodes)) {
            return std::nullopt;
        }
        Cells cells(static_cast<size_t>(num_cells));
        for (int64_t item = 0; item < num_items(); ++item) {
            put(cells[chosen[item]], item);
        }
        balance(cells);
        return cells;
    }

    // `slack`: tokens that may still be lost to rooms too small for any sample.
    bool place(std::vector<int64_t>& rooms, std::vector<int64_t>& chosen, int64_t slack, int64_t& nodes) const {
        const size_t item = chosen.size();
        if (item == lengths_.size()) {
            return true;
        }
        if (++nodes > kSearchedNodes) {
            return false;
        }
        std::vector<std::pair<int64_t, int64_t>> options;  // room, cell
        for (size_t cell = 0; cell < rooms.size(); ++cell) {
            if (rooms[cell] >= lengths_[item]) {
                options.emplace_back(rooms[cell], cell);
            }
        }
        std::sort(options.begin(), options.end());
        int64_t tried = -1;
        for (const auto& [room, cell] : options) {
            if (room == tried) {
                continue;  // cells of equal room are interchangeable
            }
            tried = room;
            const int64_t rest = room - lengths_[item];
            const int64_t lost = rest < lengths_.back() ? rest : 0;
            if (lost > slack) {
                continue;
            }
            rooms[cell] = rest;
            chosen.push_back(cell);
            if (place(rooms, chosen, slack - lost, nodes)) {
                return true;
            }
            chosen.pop_back();
            rooms[cell] = room;
            if (room == lengths_[item]) {
                return false;  // an exact fit is never worse than another place
            }
        }
        return false;
    }

    void put(Cell& cell, int64_t item) const {
        cell.items.insert(std::upper_bound(cell.items.begin(), cell.items.end(), item), item);
        cell.total += lengths_[item];
    }

    void take(Cell& cell, int64_t item) const {
        cell.items.erase(std::lower_bound(cell.items.begin(), cell.items.end(), item));
        cell.total -= lengths_[item];
    }

    // A trade between two cells: `given` of the fuller for `taken` of the emptier one (-1: nothing).
    struct Trade {
        int64_t given = -1;
        int64_t taken = -1;
    };

    // Returns the trade that brings two cells closest, if any brings them closer.
    std::optional<Trade> best_trade(const Cell& full, const Cell& empty) const {
        const int64_t difference = full.total - empty.total;
        int64_t best = difference;
        Trade trade;
        size_t other = 0;
        for (const int64_t given : full.items) {
            // the best trade moves half the difference; both lists descend, so `other` only advances
            const int64_t wanted = lengths_[given] - difference / 2;
            while (other < empty.items.size() && lengths_[empty.items[other]] > wanted) {
                ++other;
            }
            for (size_t k = other - (other > 0); k <= other && k <= empty.items.size(); ++k) {
                const int64_t taken = k < empty.items.size() ? empty.items[k] : -1;
                const int64_t moved = lengths_[given] - (taken < 0 ? 0 : lengths_[taken]);
                const int64_t remaining = std::abs(difference - 2 * moved);
                if (remaining < best) {
                    best = remaining;
                    trade = {given, taken};
                }
            }
        }
        return trade.given < 0 ? std::nullopt : std::optional(trade);
    }

    // Trades between the fullest and the emptiest cells until none brings two of them closer. The fullest never grows.
    void balance(Cells& cells) const {
        std::set<std::pair<int64_t, int64_t>> by_total;
        for (size_t cell = 0; cell < cells.size(); ++cell) {
            by_total.emplace(cells[cell].total, cell);
        }
        // each trade lowers the sum of squared totals, so this ends; the bound is for adversarial lengths
        for (int64_t trades = 8 * num_items() + 1000; trades > 0 && by_total.size() > 1; --trades) {
            const int64_t fullest = by_total.rbegin()->second, emptiest = by_total.begin()->second;
            if (by_total.rbegin()->first - by_total.begin()->first < 2) {
                return;
            }
            if (trade_with_emptiest(cells, by_total, fullest) || trade_with_fullest(cells, by_total, emptiest)) {
                continue;
            }
            // neither can improve: continue with the others
            by_total.erase({cells[fullest].total, fullest});
            by_total.erase({cells[emptiest].total, emptiest});
        }
    }

    using ByTotal = std::set<std::pair<int64_t, int64_t>>;

    bool trade_with_emptiest(Cells& cells, ByTotal& by_total, int64_t fullest) const {
        int64_t tries = kPartners;
        for (auto it = by_total.begin(); it != by_total.end() && tries > 0; ++it, --tries) {
            if (it->second != fullest && exchange(cells, by_total, fullest, it->second)) {
                return true;
            }
        }
        return false;
    }

    bool trade_with_fullest(Cells& cells, ByTotal& by_total, int64_t emptiest) const {
        int64_t tries = kPartners;
        for (auto it = by_total.rbegin(); it != by_total.rend() && tries > 0; ++it, --tries) {
            if (it->second != emptiest && exchange(cells, by_total, it->second, emptiest)) {
                return true;
            }
        }
        return false;
    }

    bool exchange(Cells& cells, ByTotal& by_total, int64_t full, int64_t empty) const {
        const std::optional<Trade> trade = best_trade(cells[full], cells[empty]);
        if (!trade) {
            return false;
        }
        by_total.erase({cells[full].total, full});
        by_total.erase({cells[empty].total, empty});
        take(cells[full], trade->given);
        put(cells[empty], trade->given);
        if (trade->taken >= 0) {
            take(cells[empty], trade->taken);
            put(cells[full], trade->taken);
        }
        by_total.emplace(cells[full].total, full);
        by_total.emplace(cells[empty].total, empty);
        return true;
    }

    // Orders the cells so that those of a microbatch are similar in tokens, then in attention, and ranks have equal
    // sums.
    void arrange(Cells& cells) const {
        struct Ranked {
            int64_t total;
            double attention;
            size_t cell;
        };
        std::vector<Ranked> ranked;
        for (size_t cell = 0; cell < cells.size(); ++cell) {
            double attention = 0;  // proportional to the squares of the lengths
            for (const int64_t item : cells[cell].items) {
                attention += static_cast<double>(lengths_[item]) * static_cast<double>(lengths_[item]);
            }
            ranked.push_back({cells[cell].total, attention, cell});
        }
        const auto fuller = [](const Ranked& a, const Ranked& b) {
            return a.total != b.total ? a.total > b.total : a.cell < b.cell;
        };
        std::sort(ranked.begin(), ranked.end(), fuller);
        for (size_t begin = 0, end = 0; begin < ranked.size(); begin = end) {
            while (end < ranked.size() && ranked[begin].total - ranked[end].total <= max_tokens_ / kAlike) {
                ++end;
            }
            std::stable_sort(ranked.begin() + static_cast<int64_t>(begin), ranked.begin() + static_cast<int64_t>(end),
                             [](const Ranked& a, const Ranked& b) { return a.attention > b.attention; });
        }
        std::vector<std::pair<int64_t, size_t>> ranks;  // sum of tokens, rank
        for (int64_t rank = 0; rank < num_ranks_; ++rank) {
            ranks.emplace_back(0, rank);
        }
        Cells arranged(cells.size());
        for (size_t first = 0; first < cells.size(); first += ranks.size()) {
            // the fullest cell to the rank with the smallest sum
            std::sort(ranks.begin(), ranks.end());
            const auto begin = ranked.begin() + static_cast<int64_t>(first);
            std::sort(begin, begin + static_cast<int64_t>(ranks.size()), fuller);
            for (size_t k = 0; k < ranks.size(); ++k) {
                ranks[k].first += ranked[first + k].total;
                arranged[first + ranks[k].second] = std::move(cells[ranked[first + k].cell]);
            }
        }
        cells = std::move(arranged);
    }

    const Lengths& given_;
    Sorted sorted_;
    std::vector<int64_t> lengths_;  // descending
    int64_t max_tokens_;
    int64_t num_ranks_;
};

py::tuple pack_step(const Array& lengths_array, int64_t max_tokens, int64_t num_ranks) {
    Lengths lengths(lengths_array);
    check_at_least_1(max_tokens, "max_tokens");
    check_at_least_1(num_ranks, "num_ranks");
    if (num_ranks > kMostRanks) {
        throw std::invalid_argument("num_ranks=" + std::to_string(num_ranks) + " is more than " +
                                    std::to_string(kMostRanks));
    }
    std::vector<int64_t> order, starts{0};
    {
        py::gil_scoped_release unlocked;
        lengths.check(max_tokens, "max_tokens=" + std::to_string(max_tokens));
        const StepPacker packer(lengths, max_tokens, num_ranks);
        for (const Cell& cell : packer.plan()) {
            const size_t begin = order.size();
            for (const int64_t item : cell.items) {
                order.push_back(packer.sample(item));
            }
            std::sort(order.begin() + static_cast<int64_t>(begin), order.end());
            starts.push_back(static_cast<int64_t>(order.size()));
        }
    }
    return py::make_tuple(to_array(order), to_array(starts));
}

}  // namespace

void register_steps(py::module_& module) {
    module.def("pack_step", &pack_step, py::arg("lengths").noconvert(), py::arg("max_tokens"), py::arg("num_ranks"));
}

}  // namespace packing
