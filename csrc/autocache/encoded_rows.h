// Rows of tensors on their way to a record and back, through a codec. A tensor
// that the codec does not take, or a row with a value that it cannot hold,
// stays native: a record's layout says of each tensor how it is encoded.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "autocache/codec.h"
#include "autocache/record.h"
#include "autocache/tensor_rows.h"

namespace pipetransformer::autocache {

// Works on one row at a time, in memory that it keeps: one per thread.
class RowCodec {
 public:
  // Encodes what it can of the row that `segments` list, whose tensors are
  // those of `layout`, all native. Both then say what is to be kept; segments
  // that changed are valid until the next call.
  void encode(
      Codec codec,
      RecordLayout& layout,
      std::array<Segment, kMaxTensors>& segments);

  // Where the payload of a record is to be read so that decode() finds it, in
  // `places`: native tensors where they belong, which is `targets`. Valid until
  // the next call. The layout is one that payload_bytes() knows.
  std::span<const Segment> places_of(
      const RecordLayout& layout,
      const std::array<Segment, kMaxTensors>& targets,
      std::array<Segment, kMaxTensors>& places);

  // Brings what was read there to `targets`. False: a tensor is no encoded one,
  // and all are worthless.
  bool decode(
      const RecordLayout& layout,
      const std::array<Segment, kMaxTensors>& targets);

  // The same of one tensor, which the layout says is encoded, and whose encoded
  // bytes are aligned to 4.
  bool encode(const TensorLayout& row, const Segment& from, std::byte* to);
  bool
  decode(const TensorLayout& row, const std::byte* from, const Segment& to);

 private:
  Encoder encoder_;
  std::vector<std::byte> encoded_;
  std::vector<float> wide_;  // a row of halves
};

// What a codec makes of `tensors` (rows, ...): copies with each row as it would
// be read from a record. Arguments as of ActivationStore::store().
std::vector<at::Tensor> round_trip(
    const std::vector<at::Tensor>& tensors,
    Codec codec,
    const RaggedTensors& ragged = {},
    const std::optional<at::Tensor>& lengths = std::nullopt);

}  // namespace pipetransformer::autocache
