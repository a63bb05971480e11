// Byte-level BPE behind the pre-tokenizer ` ?[^separators]+`, as BLOOM's. Ids are those of the tokenizers library.

#include "helpers.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <functional>
#include <memory>
#include <queue>
#include <string_view>
#include <utility>
#include <vector>

namespace {

constexpr int32_t kNever = std::numeric_limits<int32_t>::max();
constexpr size_t kLongestCached = 128;          // bytes of a piece
constexpr size_t kCacheBytes = size_t{48} << 20;  // it is emptied when it is full
constexpr size_t kScanned = 64;                 // symbols among which the next merge is found by looking at all

uint64_t mixed(uint64_t value) {
    value *= 0x9e3779b97f4a7c15U;
    return value ^ (value >> 32);
}

// The rank and the result of each mergeable pair of ids, by open addressing.
class Merges {
  public:
    struct Merge {
        int32_t rank = kNever;
        int32_t result = 0;
    };

    // merges: [M, 3] left, right, result. Of a pair that occurs twice the last one counts, as in the library.
    explicit Merges(const Array<int32_t>& merges) {
        if (merges.ndim() != 2 || merges.shape(1) != 3) {
            throw std::invalid_argument("merges must be [any, 3]");
        }
        const auto rows = merges.unchecked<2>();
        size_t size = 16;
        while (size < 2 * static_cast<size_t>(rows.shape(0))) {
            size *= 2;
        }
        slots_.resize(size);
        for (py::ssize_t rank = 0; rank < rows.shape(0); ++rank) {
            Slot& slot = slots_[place(key(rows(rank, 0), rows(rank, 1)))];
            slot = {key(rows(rank, 0), rows(rank, 1)), {static_cast<int32_t>(rank), rows(rank, 2)}};
        }
    }

    Merge find(int32_t left, int32_t right) const { return slots_[place(key(left, right))].merge; }

  private:
    struct Slot {
        uint64_t key = ~uint64_t{0};
        Merge merge;
    };

    static uint64_t key(int32_t left, int32_t right) {
        return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
    }

    // The slot of the key, or the free one where it would stand.
    size_t place(uint64_t key) const {
        const size_t mask = slots_.size() - 1;
        size_t at = mixed(key) & mask;
        while (slots_[at].key != key && slots_[at].key != ~uint64_t{0}) {
            at = (at + 1) & mask;
        }
        return at;
    }

    std::vector<Slot> slots_;
};

// Ids of pieces seen before.
class Cache {
  public:
    Cache() { clear(); }

    // Appends the ids of the piece and returns true, or returns false.
    bool append(std::string_view piece, uint64_t hash, std::vector<int32_t>& out) const {
        for (size_t at = hash & mask(); slots_[at].length; at = (at + 1) & mask()) {
            const Slot& slot = slots_[at];
            if (slot.hash == static_cast<uint32_t>(hash >> 32) && slot.length == piece.size() &&
                std::memcmp(keys_.data() + slot.key, piece.data(), piece.size()) == 0) {
                out.insert(out.end(), ids_.begin() + slot.ids, ids_.begin() + slot.ids + slot.count);
                return true;
            }
        }
        return false;
    }

    void insert(std::string_view piece, uint64_t hash, const int32_t* ids, size_t count) {
        if (keys_.size() + ids_.size() * sizeof(int32_t) + slots_.size() * sizeof(Slot) > kCacheBytes) {
            clear();
        }
        if (2 * ++used_ > slots_.size()) {
            grow();
        }
        put({static_cast<uint32_t>(hash >> 32), static_cast<uint32_t>(keys_.size()), static_cast<uint32_t>(ids_.size()),
             static_cast<uint16_t>(piece.size()), static_cast<uint16_t>(count)},
            hash);
        keys_.append(piece);
        ids_.insert(ids_.end(), ids, ids + count);
    }

    static uint64_t hash_of(std::string_view piece) {
        uint64_t hash = piece.size();
        size_t at = 0;
        for (; at + 8 <= piece.size(); at += 8) {
            uint64_t word;
            std::memcpy(&word, piece.data() + at, 8);
            hash = mixed(hash ^ word);
        }
        uint64_t word = 0;
        std::memcpy(&word, piece.data() + at, piece.size() - at);
        return mixed(mixed(hash ^ word) + word);
    }

  private:
    struct Slot {
        uint32_t hash = 0;  // its upper half
        uint32_t key = 0, ids = 0;
        uint16_t length = 0, count = 0;  // length 0: free
    };

    size_t mask() const { return slots_.size() - 1; }

    void put(const Slot& slot, uint64_t hash) {
        size_t at = hash & mask();
        while (slots_[at].length) {
            at = (at + 1) & mask();
        }
        slots_[at] = slot;
    }

    void grow() {
        std::vector<Slot> old(slots_.size() * 2);
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (slot.length) {
                put(slot, hash_of(std::string_view(keys_).substr(slot.key, slot.length)));
            }
        }
    }

    void clear() {
        slots_.assign(size_t{1} << 12, Slot());
        keys_.clear();
        ids_.clear();
        used_ = 0;
    }

    std::vector<Slot> slots_;
    std::string keys_;
    std::vector<int32_t> ids_;
    size_t used_ = 0;
};

// Not thread-safe: it has a cache.
class BytePairEncoder {
  public:
    BytePairEncoder(const Array<int32_t>& byte_ids, const Array<int32_t>& merges, const std::u32string& separators)
        : merges_(merges) {
        if (byte_ids.ndim() != 1 || byte_ids.size() != 256) {
            throw std::invalid_argument("byte_ids must be the ids of 256 bytes");
        }
        std::copy(byte_ids.data(), byte_ids.data() + 256, byte_ids_.begin());
        for (const char32_t separator : separators) {
            if (separator >= separators_.size()) {
                throw std::invalid_argument("separators must be below U+10000");
            }
            separators_[separator] = true;
        }
    }

    py::tuple encode_batch(const std::vector<py::str>& texts) {
        std::vector<std::string_view> views;
        views.reserve(texts.size());
        for (const py::str& text : texts) {
            Py_ssize_t size = 0;
            const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
            if (!data) {
                throw py::error_already_set();
            }
            views.emplace_back(data, static_cast<size_t>(size));
        }
        Array<int64_t> lengths(static_cast<py::ssize_t>(texts.size()));
        int64_t* length = lengths.mutable_data();
        auto ids = std::make_unique<std::vector<int32_t>>();
        {
            py::gil_scoped_release unlocked;
            for (const std::string_view text : views) {
                const size_t before = ids->size();
                encode(text, *ids);
                *length++ = static_cast<int64_t>(ids->size() - before);
            }
        }
        std::vector<int32_t>* held = ids.release();
        const py::capsule owner(held, [](void* p) { delete static_cast<std::vector<int32_t>*>(p); });
        return py::make_tuple(
            Array<int32_t>(static_cast<py::ssize_t>(held->size()), held->data(), owner), lengths);
    }

  private:
    // Cuts a text into words, each with the space before it, and what lies between words.
    void encode(std::string_view text, std::vector<int32_t>& out) {
        size_t begin = 0, at = 0;
        while (at < text.size()) {
            while (at < text.size()) {
                const size_t size = separator_at(text, at);
                if (!size) {
                    break;
                }
                at += size;
            }
            const size_t word = at < text.size() && at > begin && text[at - 1] == ' ' ? at - 1 : at;
            encode_piece(text.substr(begin, word - begin), out);
            while (at < text.size() && !separator_at(text, at)) {
                ++at;
                while (at < text.size() && (static_cast<uint8_t>(text[at]) & 0xc0U) == 0x80) {
                    ++at;
                }
            }
            encode_piece(text.substr(word, at - word), out);
            begin = at;
        }
    }

    // Bytes of the separator at a character; 0: it is none.
    size_t separator_at(std::string_view text, size_t at) const {
        const auto byte = [&](size_t offset) { return static_cast<uint32_t>(static_cast<uint8_t>(text[at + offset])); };
        const uint32_t first = byte(0);
        if (first < 0x80) {
            return separators_[first] ? 1 : 0;
        }
        if (first < 0xe0) {
            return separators_[(first & 0x1fU) << 6 | (byte(1) & 0x3fU)] ? 2 : 0;
        }
        if (first < 0xf0) {
            return separators_[(first & 0xfU) << 12 | (byte(1) & 0x3fU) << 6 | (byte(2) & 0x3fU)] ? 3 : 0;
        }
        return 0;
    }

    void encode_piece(std::string_view piece, std::vector<int32_t>& out) {
        if (piece.empty()) {
            return;
        }
        const bool cached = piece.size() <= kLongestCached;
        const uint64_t hash = cached ? Cache::hash_of(piece) : 0;
        if (cached && cache_.append(piece, hash, out)) {
            return;
        }
        const size_t before = out.size();
        for (const char byte : piece) {
            out.push_back(byte_ids_[static_cast<uint8_t>(byte)]);
        }
        const size_t count =
            piece.size() <= kScanned ? merge_few(&out[before], piece.size()) : merge_many(&out[before], piece.size());
        out.resize(before + count);
        if (cached) {
            cache_.insert(piece, hash, &out[before], count);
        }
    }

    // Merges until no pair can be, always the pair of the lowest rank, the leftmost of equals. Returns how many remain.
    size_t merge_few(int32_t* ids, size_t size) const {
        std::array<Merges::Merge, kScanned> next;  // of each symbol with the one behind it
        for (size_t i = 0; i + 1 < size; ++i) {
            next[i] = merges_.find(ids[i], ids[i + 1]);
        }
        while (size > 1) {
            size_t best = 0;
            for (size_t i = 1; i + 1 < size; ++i) {
                best = next[i].rank < next[best].rank ? i : best;
            }
            if (next[best].rank == kNever) {
                break;
            }
            ids[best] = next[best].result;
            --size;
            std::copy(ids + best + 2, ids + size + 1, ids + best + 1);
            std::copy(next.begin() + best + 1, next.begin() + size, next.begin() + best);
            if (best > 0) {
                next[best - 1] = merges_.find(ids[best - 1], ids[best]);
            }
            if (best + 1 < size) {
                next[best] = merges_.find(ids[best], ids[best + 1]);
            }
        }
        return size;
    }

    // The same in O(n log n), by a queue.
    size_t merge_many(int32_t* ids, size_t size) const {
        struct Symbol {
            size_t previous, next;
            Merges::Merge merge;  // with the next one
        };
        using Entry = std::pair<int32_t, size_t>;  // rank and place
        const size_t none = size;
        std::vector<Symbol> symbols(size);
        std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
        const auto look = [&](size_t i) {
            Symbol& symbol = symbols[i];
            symbol.merge = symbol.next == none ? Merges::Merge() : merges_.find(ids[i], ids[symbol.next]);
            if (symbol.merge.rank != kNever) {
                queue.emplace(symbol.merge.rank, i);
            }
        };
        for (size_t i = size; i-- > 0;) {
            symbols[i].previous = i ? i - 1 : none;
            symbols[i].next = i + 1;
            look(i);
        }
        while (!queue.empty()) {
            const auto [rank, i] = queue.top();
            queue.pop();
            if (symbols[i].merge.rank != rank) {
                continue;  // it has been merged since
            }
            const size_t gone = symbols[i].next;
            ids[i] = symbols[i].merge.result;
            symbols[gone].merge = Merges::Merge();
            symbols[i].next = symbols[gone].next;
            if (symbols[i].next != none) {
                symbols[symbols[i].next].previous = i;
            }
            look(i);
            if (symbols[i].previous != none) {
                look(symbols[i].previous);
            }
        }
        size_t count = 0;
        for (size_t i = 0; i != none; i = symbols[i].next) {
            ids[count++] = ids[i];
        }
        return count;
    }

    std::array<int32_t, 256> byte_ids_{};
    Merges merges_;
    std::bitset<0x10000> separators_;
    Cache cache_;
};

}  // namespace

void register_byte_pairs(py::module_& module) {
    py::class_<BytePairEncoder>(module, "BytePairEncoder")
        .def(py::init<const Array<int32_t>&, const Array<int32_t>&, const std::u32string&>(), py::arg("byte_ids"),
             py::arg("merges"), py::arg("separators"))
        .def("encode_batch", &BytePairEncoder::encode_batch, py::arg("texts"));
}
