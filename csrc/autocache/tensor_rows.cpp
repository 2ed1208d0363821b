#include "autocache/tensor_rows.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/typeid.h>

#include <algorithm>
#include <limits>
#include <string>

namespace pipetransformer::autocache {

namespace {

constexpr int64_t kBytesPerTask = int64_t{1} << 20;
constexpr uint64_t kMaxRowBytes = uint64_t{1}
                                  << 40;  // times rows stays in range

// Of one element; 0 for what is no type of a plain tensor.
std::size_t element_bytes(uint8_t dtype) {
  if (dtype >= static_cast<uint8_t>(at::ScalarType::NumOptions)) {
    return 0;
  }
  const auto type = static_cast<at::ScalarType>(dtype);
  return at::isQIntType(type)
             ? 0
             : caffe2::TypeMeta::fromScalarType(type).itemsize();
}

// Of one row of a tensor as it is, `stored_bytes` tells of which ones.
std::optional<uint64_t> row_bytes(const TensorLayout& row) {
  uint64_t extent = element_bytes(row.dtype);  // a size of 0 counting as 1
  bool empty = false;
  if (extent == 0) {
    return std::nullopt;
  }
  for (uint16_t dim = 0; dim < row.num_dims; ++dim) {
    const uint64_t size = std::max<uint64_t>(row.sizes[dim], 1);
    if (size > kMaxRowBytes / extent) {
      return std::nullopt;
    }
    extent *= size;
    empty = empty || row.sizes[dim] == 0;
  }
  return empty ? 0 : extent;
}

// Whether a codec takes values of a type.
bool takes(Codec codec, uint8_t dtype) {
  const auto type = static_cast<at::ScalarType>(dtype);
  const bool half = type == at::kBFloat16 || type == at::kHalf;
  return type == at::kFloat || (codec == Codec::kInt8 && half);
}

}  // namespace

std::optional<uint64_t> stored_bytes(const TensorLayout& row) {
  const std::optional<uint64_t> native = row_bytes(row);
  if (!native || row.codec == Codec::kNative) {
    return native;
  }
  if (!takes(row.codec, row.dtype) || row.num_dims == 0) {
    return std::nullopt;
  }
  const std::optional<uint64_t> encoded =
      encoded_bytes(row.codec, shape_of(row));
  return encoded && *encoded < *native ? encoded : std::nullopt;
}

RowShape shape_of(const TensorLayout& row) noexcept {
  RowShape shape{1, 1};
  for (uint8_t dim = 0; dim < row.num_dims; ++dim) {
    (dim + 1 < row.num_dims ? shape.tokens : shape.channels) *= row.sizes[dim];
  }
  return shape;
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
}

int64_t num_rows_of(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(
      !tensors.empty(), "tensors: expected at least one, got none");
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        tensor.dim() >= 1 && tensor.size(0) == tensors[0].size(0),
        "tensors: expected equal first dims, got shapes ",
        tensors[0].sizes(),
        " and ",
        tensor.sizes());
  }
  return tensors[0].size(0);
}

std::optional<RecordLayout>
layout_of(const std::vector<at::Tensor>& tensors, const RaggedTensors& ragged) {
  RecordLayout layout;
  if (tensors.size() > kMaxTensors) {
    return std::nullopt;
  }
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    const at::Tensor& tensor = tensors[k];
    TensorLayout& row = layout.tensors[layout.num_tensors++];
    const int64_t num_dims = tensor.dim() - 1;
    if (num_dims > static_cast<int64_t>(kMaxDims) ||
        tensor.layout() != at::kStrided || tensor.is_quantized()) {
      return std::nullopt;
    }
    row.dtype = static_cast<uint8_t>(tensor.scalar_type());
    row.num_dims = static_cast<uint8_t>(num_dims);
    row.ragged = is_ragged(ragged, k) ? 1 : 0;
    for (int64_t dim = 0; dim < num_dims; ++dim) {
      const int64_t size = tensor.size(dim + 1);
      if (size > std::numeric_limits<uint32_t>::max()) {
        return std::nullopt;
      }
      row.sizes[dim] = static_cast<uint32_t>(size);
    }
  }
  return layout;
}

std::optional<uint64_t> payload_bytes(const RecordLayout& layout) {
  uint64_t total = 0;
  for (uint32_t k = 0; k < layout.num_tensors; ++k) {
    const std::optional<uint64_t> bytes = stored_bytes(layout.tensors[k]);
    if (!bytes) {
      return std::nullopt;
    }
    total += padded(*bytes);
  }
  return total;
}

std::span<const Segment> segments_of(
    const RecordLayout& layout,
    std::byte* payload,
    std::array<Segment, kMaxTensors>& segments) {
  for (uint32_t k = 0; k < layout.num_tensors; ++k) {
    const uint64_t bytes = stored_bytes(layout.tensors[k]).value();
    segments[k] = {payload, bytes};
    payload += padded(bytes);
  }
  return {segments.data(), layout.num_tensors};
}

std::vector<int64_t> sizes_of(const TensorLayout& row) {
  return {row.sizes.begin(), row.sizes.begin() + row.num_dims};
}

at::Tensor empty_tensor(const TensorLayout& row, int64_t num_rows) {
  std::vector<int64_t> sizes = sizes_of(row);
  sizes.insert(sizes.begin(), num_rows);
  return at::empty(sizes, static_cast<at::ScalarType>(row.dtype));
}

int64_t padded_length(
    const std::vector<at::Tensor>& tensors,
    const RaggedTensors& ragged) {
  TORCH_CHECK_VALUE(
      ragged.size() <= tensors.size(),
      "ragged: expected one flag per tensor (",
      tensors.size(),
      "), got ",
      ragged.size());
  int64_t length = -1;
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    if (!is_ragged(ragged, k)) {
      continue;
    }
    const at::Tensor& tensor = tensors[k];
    TORCH_CHECK_VALUE(
        tensor.dim() >= 2 && (length < 0 || tensor.size(1) == length),
        "ragged: expected tensors of one padded length",
        length < 0 ? "" : " (" + std::to_string(length) + ")",
        ", got shape ",
        tensor.sizes());
    length = tensor.size(1);
  }
  return length;
}

std::optional<at::Tensor> checked_lengths(
    const std::vector<at::Tensor>& tensors,
    const RaggedTensors& ragged,
    const std::optional<at::Tensor>& lengths) {
  const int64_t padded = padded_length(tensors, ragged);
  TORCH_CHECK_VALUE(
      lengths.has_value() == (padded >= 0),
      "lengths: expected with ragged tensors, and only with them");
  if (!lengths) {
    return std::nullopt;
  }
  const int64_t rows = tensors[0].size(0);
  TORCH_CHECK_VALUE(
      lengths->dim() == 1 && lengths->numel() == rows &&
          lengths->scalar_type() == at::kLong,
      "lengths: expected int64 of shape (",
      rows,
      ",), got ",
      lengths->scalar_type(),
      " of shape ",
      lengths->sizes());
  at::Tensor checked = lengths->cpu().contiguous();
  const auto* length = checked.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK_VALUE(
        length[row] >= 0 && length[row] <= padded,
        "lengths: expected 0..",
        padded,
        " (the padded length), got ",
        length[row]);
  }
  return checked;
}

RecordLayout with_length(RecordLayout layout, uint32_t length) noexcept {
  for (TensorLayout& tensor : layout.tensors) {
    if (tensor.ragged != 0) {
      tensor.sizes[0] = length;
    }
  }
  return layout;
}

RecordLayout decoded(RecordLayout layout) noexcept {
  for (TensorLayout& tensor : layout.tensors) {
    tensor.codec = Codec::kNative;
  }
  return layout;
}

std::optional<uint32_t> length_of(const RecordLayout& layout) noexcept {
  std::optional<uint32_t> length;
  for (const TensorLayout& tensor : layout.tensors) {
    if (tensor.ragged == 0) {
      continue;
    }
    if (length && *length != tensor.sizes[0]) {
      return std::nullopt;
    }
    length = tensor.sizes[0];
  }
  return length.value_or(0);
}

Rows::Rows(const std::vector<at::Tensor>& tensors, const RaggedTensors& ragged)
    : num_tensors_(tensors.size()) {
  for (std::size_t k = 0; k < num_tensors_; ++k) {
    const at::Tensor& tensor = tensors[k];
    first_[k].data =
        static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
    first_[k].size = tensor.nbytes() / std::max<int64_t>(tensor.size(0), 1);
    if (is_ragged(ragged, k)) {
      element_bytes_[k] = first_[k].size / std::max<int64_t>(tensor.size(1), 1);
    }
  }
}

std::span<const Segment> Rows::at(
    int64_t row,
    std::array<Segment, kMaxTensors>& segments,
    int64_t length) const noexcept {
  for (std::size_t k = 0; k < num_tensors_; ++k) {
    const std::size_t ragged = element_bytes_[k];
    segments[k] = {
        first_[k].data + row * first_[k].size,
        ragged > 0 ? length * ragged : first_[k].size};
  }
  return {segments.data(), num_tensors_};
}

int64_t grain_of(uint64_t row_bytes) {
  return std::max<int64_t>(
      1, kBytesPerTask / static_cast<int64_t>(row_bytes + 1));
}

int64_t grain_of(const std::vector<at::Tensor>& tensors) {
  uint64_t row_bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    const auto rows = std::max<int64_t>(tensor.size(0), 1);
    row_bytes += tensor.nbytes() / static_cast<uint64_t>(rows);
  }
  return grain_of(row_bytes);
}

}  // namespace pipetransformer::autocache
