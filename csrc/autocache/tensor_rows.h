// Tensors (rows, ...) seen as bytes of rows: checks, layouts, addresses. Shared
// by what stores rows and what hashes them. Thread-safe (no state).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "autocache/record.h"

namespace pipetransformer::autocache {

// Equal values on the CPU, contiguous, without lazy conjugation or negation.
at::Tensor plain(const at::Tensor& tensor);

// The common first dim. Throws c10::ValueError when there is none.
int64_t num_rows_of(const std::vector<at::Tensor>& tensors);

// Bytes of one row of a tensor, encoded as its layout says. Nothing: no tensor
// has this layout, or one that nobody could hold, or the codec does not take
// it or saves nothing; a layout of another process may say anything. Its counts
// are those of the format.
std::optional<uint64_t> stored_bytes(const TensorLayout& row);

// How a codec sees a row, whose sizes stored_bytes() knows.
RowShape shape_of(const TensorLayout& row) noexcept;

// Bytes of one record's payload. Nothing: stored_bytes() has none for a tensor.
std::optional<uint64_t> payload_bytes(const RecordLayout& layout);

// Where the tensors of one record lie in its payload, listed in `segments`. The
// layout is one that payload_bytes() knows.
std::span<const Segment> segments_of(
    const RecordLayout& layout,
    std::byte* payload,
    std::array<Segment, kMaxTensors>& segments);

// Sizes of a row of a tensor.
std::vector<int64_t> sizes_of(const TensorLayout& row);

// An uninitialized tensor for `num_rows` of them.
at::Tensor empty_tensor(const TensorLayout& row, int64_t num_rows);

// Which tensors of a batch hold rows of different lengths along their dim 1,
// padded to one length; empty: none does.
using RaggedTensors = std::vector<bool>;

inline bool is_ragged(const RaggedTensors& ragged, std::size_t k) {
  return k < ragged.size() && ragged[k];
}

// The length that all ragged tensors have; -1 when none is ragged. Throws
// c10::ValueError when there are more flags than tensors, a ragged tensor has
// no dim 1, or lengths differ.
int64_t padded_length(
    const std::vector<at::Tensor>& tensors,
    const RaggedTensors& ragged);

// Layout of one row of each. Nothing: more than a record can describe.
std::optional<RecordLayout>
layout_of(const std::vector<at::Tensor>& tensors, const RaggedTensors& ragged);

// One length in 0..padded per row, contiguous on the CPU; nothing: no tensor is
// ragged. Throws c10::ValueError, also where lengths are given or missing
// though they should not be.
std::optional<at::Tensor> checked_lengths(
    const std::vector<at::Tensor>& tensors,
    const RaggedTensors& ragged,
    const std::optional<at::Tensor>& lengths);

// `layout` with this length of its ragged tensors.
RecordLayout with_length(RecordLayout layout, uint32_t length) noexcept;

// `layout` with all tensors native.
RecordLayout decoded(RecordLayout layout) noexcept;

// The length of the ragged tensors, 0 when there is none. Nothing: they differ.
std::optional<uint32_t> length_of(const RecordLayout& layout) noexcept;

// Row addresses of plain tensors, which outlive it; at most kMaxTensors.
class Rows {
 public:
  explicit Rows(
      const std::vector<at::Tensor>& tensors,
      const RaggedTensors& ragged = {});

  // The bytes of one row, of ragged tensors those of the first `length`
  // elements of dim 1, listed in `segments`. To be written through only where
  // the tensors are the caller's own.
  std::span<const Segment>
  at(int64_t row,
     std::array<Segment, kMaxTensors>& segments,
     int64_t length = 0) const noexcept;

 private:
  std::size_t num_tensors_;
  std::array<Segment, kMaxTensors> first_{};
  std::array<std::size_t, kMaxTensors> element_bytes_{};  // 0: not ragged
};

// Rows of so many bytes, or of all tensors together, that are worth waking a
// thread.
int64_t grain_of(uint64_t row_bytes);
int64_t grain_of(const std::vector<at::Tensor>& tensors);

}  // namespace pipetransformer::autocache
