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

// Layout of one row of each. Nothing: more than a record can describe.
std::optional<RecordLayout> layout_of(const std::vector<at::Tensor>& tensors);

// Bytes of one record's payload. Nothing: no tensors have this layout, or ones
// that nobody could hold; a layout of another process may say anything. Its
// counts are those of the format.
std::optional<uint64_t> payload_bytes(const RecordLayout& layout);

// Uninitialized tensors for `num_rows` records of a layout.
std::vector<at::Tensor>
empty_tensors(const RecordLayout& layout, int64_t num_rows);

// Row addresses of plain tensors, which outlive it; at most kMaxTensors.
class Rows {
 public:
  explicit Rows(const std::vector<at::Tensor>& tensors);

  // The bytes of one row, listed in `segments`. To be written through only
  // where the tensors are the caller's own.
  std::span<const Segment>
  at(int64_t row, std::array<Segment, kMaxTensors>& segments) const noexcept;

 private:
  std::size_t num_tensors_;
  std::array<Segment, kMaxTensors> first_{};
};

// Rows of all tensors together that are worth waking a thread.
int64_t grain_of(const std::vector<at::Tensor>& tensors);

}  // namespace pipetransformer::autocache
