// What describes one cached record: key, layout of its tensors, checksums.
// Plain values of fixed size, because they live in shared memory. Torch-free.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "autocache/codec.h"

namespace pipetransformer::autocache {

inline constexpr std::size_t kMaxTensors = 6;
inline constexpr std::size_t kMaxDims = 6;

// One sample's row of one tensor. Unused sizes are 0.
struct TensorLayout {
  uint8_t dtype = 0;  // c10::ScalarType; this file does not interpret it
  Codec codec = Codec::kNative;
  uint8_t num_dims = 0;  // without the batch dimension
  // 1: sizes[0] is this row's own length; rows of a batch are padded to one.
  uint8_t ragged = 0;
  std::array<uint32_t, kMaxDims> sizes{};

  bool operator==(const TensorLayout&) const = default;
  auto operator<=>(const TensorLayout&) const = default;
};

// All tensors of a record, in order. Unused tensors are zero.
struct RecordLayout {
  uint32_t num_tensors = 0;
  std::array<TensorLayout, kMaxTensors> tensors{};

  bool operator==(const RecordLayout&) const = default;
  auto operator<=>(const RecordLayout&) const = default;
};

// What a record is the value of: sample -> prefix of `boundary` layers with
// these weights (`fingerprint`), applied to these inputs (`input_hash`).
struct RecordKey {
  uint32_t boundary = 0;
  uint32_t has_input_hash = 0;
  uint64_t fingerprint = 0;
  uint64_t input_hash = 0;  // 0 without has_input_hash

  bool operator==(const RecordKey&) const = default;
};

struct RecordHeader {
  uint64_t sample = 0;
  RecordKey key;
  uint64_t payload_bytes = 0;
  uint64_t payload_checksum = 0;
  uint32_t reserved = 0;
  RecordLayout layout;
  uint64_t checksum = 0;  // of everything above
};

static_assert(std::is_trivially_copyable_v<RecordHeader>);
static_assert(
    std::has_unique_object_representations_v<RecordHeader>,
    "padding would make checksums differ");
static_assert(sizeof(RecordHeader) % sizeof(uint64_t) == 0);

// Bytes of a row in the calling process, contiguous, to read from or write to.
struct Segment {
  std::byte* data = nullptr;
  std::size_t size = 0;
};

// What `RecordHeader::checksum` and `payload_checksum` are when all is whole.
uint64_t header_checksum(const RecordHeader& header) noexcept;
uint64_t payload_checksum(std::span<const Segment> segments) noexcept;

// What these take in a record.
uint64_t payload_bytes(std::span<const Segment> segments) noexcept;

// Whether the counts of a layout are those of the format; sizes and types are
// only what its writer says.
bool within_format(const RecordLayout& layout) noexcept;

bool is_native(const RecordLayout& layout) noexcept;

// Whether all tensors are native or encoded by `codec`.
bool readable_with(const RecordLayout& layout, Codec codec) noexcept;

// Whether whoever reads `wanted` also reads `kept`, tensor by tensor.
bool serves(const RecordLayout& kept, const RecordLayout& wanted) noexcept;

// A segment takes whole words of a slot.
constexpr std::size_t padded(std::size_t bytes) noexcept {
  return (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t) * sizeof(uint64_t);
}

}  // namespace pipetransformer::autocache
