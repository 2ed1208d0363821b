#include "autocache/record.h"

#include <algorithm>

#include "core/hash.h"

namespace pipetransformer::autocache {

uint64_t header_checksum(const RecordHeader& header) noexcept {
  return core::hash_bytes(&header, offsetof(RecordHeader, checksum));
}

uint64_t payload_checksum(std::span<const Segment> segments) noexcept {
  uint64_t hash = core::kHashSeed;
  for (const Segment& segment : segments) {
    hash = core::hash_bytes(segment.data, segment.size, hash);
  }
  return hash;
}

uint64_t payload_bytes(std::span<const Segment> segments) noexcept {
  uint64_t bytes = 0;
  for (const Segment& segment : segments) {
    bytes += padded(segment.size);
  }
  return bytes;
}

bool within_format(const RecordLayout& layout) noexcept {
  if (layout.num_tensors > kMaxTensors) {
    return false;
  }
  return std::all_of(
      layout.tensors.begin(),
      layout.tensors.end(),
      [](const TensorLayout& tensor) {
        return tensor.num_dims <= kMaxDims &&
               tensor.ragged <= (tensor.num_dims > 0 ? 1 : 0) &&
               static_cast<uint8_t>(tensor.codec) < kNumCodecs;
      });
}

bool is_native(const RecordLayout& layout) noexcept {
  return readable_with(layout, Codec::kNative);
}

bool readable_with(const RecordLayout& layout, Codec codec) noexcept {
  return std::all_of(
      layout.tensors.begin(),
      layout.tensors.end(),
      [codec](const TensorLayout& tensor) {
        return tensor.codec == Codec::kNative || tensor.codec == codec;
      });
}

bool serves(const RecordLayout& kept, const RecordLayout& wanted) noexcept {
  return std::equal(
      kept.tensors.begin(),
      kept.tensors.end(),
      wanted.tensors.begin(),
      [](const TensorLayout& one, const TensorLayout& other) {
        return one.codec == Codec::kNative || one.codec == other.codec;
      });
}

}  // namespace pipetransformer::autocache
