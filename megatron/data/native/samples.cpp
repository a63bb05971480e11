// The sample index of gpt.py, and the samples that its index arrays describe.

#include "helpers.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace {

using Int32View = View<int32_t>;

constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kCachedAhead = 32;  // elements between the one in use and the one being prefetched

template <typename Index>
void fill_sample_index(const Int32View& lengths, const Int32View& documents, int64_t seq_length, int64_t num_samples,
                       Index* out) {
    out[0] = out[1] = 0;
    int64_t row = 1;
    int64_t document_begin = 0;       // tokens before this document in the stream
    int64_t boundary = seq_length;    // first token of sample `row`
    for (int64_t position = 0; position < documents.size() && row <= num_samples; ++position) {
        // documents come in random order, so each length is a cache miss unless it is prefetched
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
    // boundary may run one sample past the last: that must be within 64 bits too
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

// Integers of 4 or 8 bytes, a type known at run time only.
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

// Reads samples from the tokens by the index arrays. It trusts none of them: a number that points outside another array
// is an exception.
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
    static constexpr int64_t kUnchecked = 0;  // instead of a vocabulary size

    using Copy = int64_t (*)(const void* tokens, int64_t begin, int64_t count, int64_t vocab_size, int64_t* out);

    // Copies tokens begin .. begin + count to `out`. Returns the index of the first id outside 0..vocab_size - 1,
    // counted from `begin`; -1 without one.
    template <typename T>
    static int64_t widen(const void* tokens, int64_t begin, int64_t count, int64_t vocab_size, int64_t* out) {
        const T* from = static_cast<const T*>(tokens) + begin;
        T lowest = 0, highest = 0;  // two loops, this one in the file's narrow type, are both vectorised
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

    // Writes the seq_length + 1 ids of sample `index` of the shuffled order. Over 60 lines: every number that is read
    // is checked beside its use.
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
            // the last token is also the first of the next sample
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
                                            "; use the tokenizer that made the data, or set vocab_size to its size");
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
                                            "(data_cache_path), and if that does not help copy the dataset again");
    }

    std::array<py::array, 6> owners_;  // keeps the viewed memory alive
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

void register_samples(py::module_& module) {
    module.def("build_sample_index", &build_sample_index, py::arg("lengths").noconvert(),
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"));
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
}
