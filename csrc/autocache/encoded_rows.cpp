#include "autocache/encoded_rows.h"

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace pipetransformer::autocache {

namespace {

at::ScalarType type_of(const TensorLayout& row) {
  return static_cast<at::ScalarType>(row.dtype);
}

}  // namespace

void RowCodec::encode(
    Codec codec,
    RecordLayout& layout,
    std::array<Segment, kMaxTensors>& segments) {
  RecordLayout wanted = layout;
  std::size_t most = 0;
  for (uint32_t k = 0; k < layout.num_tensors; ++k) {
    TensorLayout& row = wanted.tensors[k];
    row.codec = codec;
    const std::optional<uint64_t> bytes = stored_bytes(row);
    row.codec = bytes ? codec : Codec::kNative;
    most += bytes ? padded(*bytes) : 0;
  }
  if (encoded_.size() < most) {
    encoded_.resize(most);
  }
  std::byte* to = encoded_.data();
  for (uint32_t k = 0; k < layout.num_tensors; ++k) {
    const TensorLayout& row = wanted.tensors[k];
    if (row.codec != Codec::kNative && encode(row, segments[k], to)) {
      const uint64_t bytes = stored_bytes(row).value();
      layout.tensors[k] = row;
      segments[k] = {to, bytes};
      to += padded(bytes);
    }
  }
}

std::span<const Segment> RowCodec::places_of(
    const RecordLayout& layout,
    const std::array<Segment, kMaxTensors>& targets,
    std::array<Segment, kMaxTensors>& places) {
  std::size_t used = 0;
  for (uint32_t k = 0; k < layout.num_tensors; ++k) {
    const TensorLayout& row = layout.tensors[k];
    places[k] = {nullptr, stored_bytes(row).value()};
    used += row.codec != Codec::kNative ? padded(places[k].size) : 0;
  }
  if (encoded_.size() < used) {
    encoded_.resize(used);
  }
  std::byte* next = encoded_.data();
  for (uint32_t k = 0; k < layout.num_tensors; ++k) {
    const bool native = layout.tensors[k].codec == Codec::kNative;
    places[k].data = native ? targets[k].data : next;
    next += native ? 0 : padded(places[k].size);
  }
  return {places.data(), layout.num_tensors};
}

bool RowCodec::decode(
    const RecordLayout& layout,
    const std::array<Segment, kMaxTensors>& targets) {
  const std::byte* next = encoded_.data();
  for (uint32_t k = 0; k < layout.num_tensors; ++k) {
    const TensorLayout& row = layout.tensors[k];
    if (row.codec == Codec::kNative) {
      continue;
    }
    if (!decode(row, next, targets[k])) {
      return false;
    }
    next += padded(stored_bytes(row).value());
  }
  return true;
}

bool RowCodec::encode(
    const TensorLayout& row,
    const Segment& from,
    std::byte* to) {
  const RowShape shape = shape_of(row);
  const std::size_t count = shape.tokens * shape.channels;
  const at::ScalarType type = type_of(row);
  const auto* values = reinterpret_cast<const float*>(from.data);
  if (type != at::kFloat) {
    wide_.resize(std::max(wide_.size(), count));
    const auto* halves = reinterpret_cast<const uint16_t*>(from.data);
    (type == at::kHalf ? widen_fp16 : widen_bf16)(halves, wide_.data(), count);
    values = wide_.data();
  }
  return encoder_.encode(row.codec, shape, values, to);
}

bool RowCodec::decode(
    const TensorLayout& row,
    const std::byte* from,
    const Segment& to) {
  const RowShape shape = shape_of(row);
  const std::size_t count = shape.tokens * shape.channels;
  const at::ScalarType type = type_of(row);
  if (type == at::kFloat) {
    auto* values = reinterpret_cast<float*>(to.data);
    return autocache::decode(row.codec, shape, from, values);
  }
  wide_.resize(std::max(wide_.size(), count));
  auto* halves = reinterpret_cast<uint16_t*>(to.data);
  const bool whole = autocache::decode(row.codec, shape, from, wide_.data());
  (type == at::kHalf ? narrow_fp16 : narrow_bf16)(wide_.data(), halves, count);
  return whole;
}

std::vector<at::Tensor> round_trip(
    const std::vector<at::Tensor>& tensors,
    Codec codec,
    const RaggedTensors& ragged,
    const std::optional<at::Tensor>& lengths) {
  const int64_t num_rows = num_rows_of(tensors);
  const std::optional<at::Tensor> row_lengths =
      checked_lengths(tensors, ragged, lengths);
  const std::optional<RecordLayout> layout = layout_of(tensors, ragged);
  if (!layout || codec == Codec::kNative) {
    return tensors;
  }
  const int64_t* length =
      row_lengths ? row_lengths->const_data_ptr<int64_t>() : nullptr;
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) {
    results.push_back(plain(tensor).clone());
  }
  const Rows rows(results, ragged);
  at::parallel_for(
      0, num_rows, grain_of(results), [&](int64_t begin, int64_t end) {
        RowCodec codec_of_thread;
        std::array<Segment, kMaxTensors> targets;
        for (int64_t row = begin; row < end; ++row) {
          const int64_t valid = length != nullptr ? length[row] : 0;
          RecordLayout kept =
              with_length(*layout, static_cast<uint32_t>(valid));
          rows.at(row, targets, valid);
          std::array<Segment, kMaxTensors> segments = targets;
          codec_of_thread.encode(codec, kept, segments);
          codec_of_thread.decode(kept, targets);
        }
      });
  return results;
}

}  // namespace pipetransformer::autocache
