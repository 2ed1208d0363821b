// Tensor side of the codec's kernels: checks, memory, stream. Empty where the
// kernels were not built; CUDA tensors then take the ATen implementation.
#ifdef PIPETRANSFORMER_WITH_KERNELS

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "autocache/codec_ops.h"
#include "autocache/cuda/codec_kernels.h"
#include "autocache/tensor_rows.h"

namespace pipetransformer::autocache {

namespace {

ValueType value_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return ValueType::kHalf;
    case at::kBFloat16:
      return ValueType::kBFloat16;
    default:  // the argument checks leave no other
      return ValueType::kFloat;
  }
}

// A tensor on the device. The copy is ordered by the stream; what is in memory
// that is not pinned has been read when it returns.
at::Tensor copied(const at::Tensor& values, const c10::Device& device) {
  return values.to(device, values.scalar_type(), /*non_blocking=*/true);
}

at::Tensor
on_device(const std::vector<RowPlace>& places, const c10::Device& device) {
  const auto num_bytes =
      static_cast<int64_t>(places.size() * sizeof(DeviceRow));
  const at::Tensor bytes = at::empty({num_bytes}, at::kByte);
  auto* each = reinterpret_cast<DeviceRow*>(bytes.mutable_data_ptr());
  for (const RowPlace& place : places) {
    const RowShape shape = shape_of(place.layout);
    *each++ = {
        place.offset,
        shape.tokens,
        shape.tokens * shape.channels,
        static_cast<int64_t>(place.layout.codec)};
  }
  return copied(bytes, device);
}

const DeviceRow* rows_in(const at::Tensor& bytes) {
  return static_cast<const DeviceRow*>(bytes.const_data_ptr());
}

void check_launch(const char* error, const c10::Device& device) {
  TORCH_CHECK(
      error == nullptr,
      "codec kernels: expected a launch on ",
      device,
      ", got ",
      error);
}

uint32_t bits_of_fill(double fill, at::ScalarType dtype) {
  const at::Tensor value =
      at::full({1}, fill, at::TensorOptions().dtype(dtype));
  uint32_t bits = 0;
  std::memcpy(&bits, value.const_data_ptr(), value.nbytes());
  return bits;
}

std::tuple<at::Tensor, at::Tensor> decode_cuda(
    const at::Tensor& encoded,
    const at::Tensor& offsets,
    const at::Tensor& codecs,
    const std::optional<at::Tensor>& lengths,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    double fill) {
  const std::vector<RowPlace> places = check_decode_rows_args(
      encoded, offsets, codecs, lengths, sizes, dtype, fill);
  const c10::Device device = encoded.device();
  const c10::DeviceGuard guard(device);
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto num_rows = static_cast<int64_t>(places.size());
  const at::Tensor values = empty_rows(encoded, places.size(), sizes, dtype);
  const at::Tensor whole =
      at::ones({num_rows}, encoded.options().dtype(at::kBool));
  if (values.numel() == 0) {
    return {values, whole};
  }
  const at::Tensor source = aligned(encoded);
  const at::Tensor table = on_device(places, device);
  DecodeParams params{};
  params.encoded = static_cast<const std::byte*>(source.const_data_ptr());
  params.rows = rows_in(table);
  params.num_rows = num_rows;
  params.row_values = static_cast<uint64_t>(values.numel() / num_rows);
  params.channels = shape_of(places[0].layout).channels;
  params.values = values.mutable_data_ptr();
  params.whole = whole.mutable_data_ptr<bool>();
  params.type = value_type(dtype);
  params.fill = bits_of_fill(lengths ? fill : 0.0, dtype);
  params.any_int8 =
      std::any_of(places.begin(), places.end(), [](const RowPlace& place) {
        return place.layout.codec == Codec::kInt8;
      });
  check_launch(launch_decode(params, stream.native_handle()), device);
  return {values, whole};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> encode_cuda(
    const at::Tensor& rows,
    const std::optional<at::Tensor>& lengths,
    int64_t codec) {
  const std::vector<RowPlace> places =
      check_encode_rows_args(rows, lengths, codec);
  const c10::Device device = rows.device();
  const c10::DeviceGuard guard(device);
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto on_it = at::TensorOptions().device(device);
  const at::Tensor encoded =
      at::zeros({encoded_size(places)}, on_it.dtype(at::kByte));
  const at::Tensor kept = copied(taken_of(places), device);
  const at::Tensor offsets = offsets_of(places);
  if (encoded.numel() == 0) {
    return {encoded, offsets, kept};
  }
  const at::Tensor source = rows.detach().resolve_neg().contiguous();
  const at::Tensor table = on_device(places, device);
  EncodeParams params{};
  params.values = source.const_data_ptr();
  params.rows = rows_in(table);
  params.num_rows = static_cast<int64_t>(places.size());
  params.row_values = static_cast<uint64_t>(source.numel()) / places.size();
  params.channels = shape_of(places[0].layout).channels;
  params.encoded = static_cast<std::byte*>(encoded.mutable_data_ptr());
  params.kept = kept.mutable_data_ptr<bool>();
  params.type = value_type(source.scalar_type());
  params.codec = static_cast<Codec>(codec);
  // Memory that goes back before the kernels end is used again in the order of
  // the stream.
  at::Tensor limits;
  at::Tensor factors;
  at::Tensor ranks;
  if (params.codec == Codec::kInt8) {
    const std::vector<int64_t> shape{
        params.num_rows, static_cast<int64_t>(params.channels)};
    limits = at::empty(shape, on_it.dtype(at::kFloat));
    factors = at::empty(shape, on_it.dtype(at::kFloat));
    ranks = at::empty({params.num_rows}, on_it.dtype(at::kLong));
    params.limits = limits.mutable_data_ptr<float>();
    params.factors = factors.mutable_data_ptr<float>();
    params.last_ranks =
        reinterpret_cast<uint64_t*>(ranks.mutable_data_ptr<int64_t>());
  }
  check_launch(launch_encode(params, stream.native_handle()), device);
  return {encoded, offsets, kept};
}

}  // namespace

TORCH_LIBRARY_IMPL(pipetransformer, CUDA, m) {
  m.impl("decode_rows", &decode_cuda);
  m.impl("encode_rows", &encode_cuda);
}

}  // namespace pipetransformer::autocache

#endif  // PIPETRANSFORMER_WITH_KERNELS
