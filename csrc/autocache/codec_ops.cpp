#include "autocache/codec_ops.h"

#include <ATen/Parallel.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/overflows.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <tuple>

#include "autocache/encoded_rows.h"
#include "autocache/tensor_rows.h"

namespace pipetransformer::autocache {

namespace {

// A flat argument on the host, one value per row.
at::Tensor host_values(
    const at::Tensor& values,
    const char* name,
    at::ScalarType dtype,
    int64_t rows) {
  TORCH_CHECK_VALUE(
      values.dim() == 1 && values.scalar_type() == dtype &&
          values.device().is_cpu() && values.numel() == rows,
      name,
      ": expected ",
      dtype,
      " of shape (",
      rows,
      ",) on the host, got ",
      values.scalar_type(),
      " of shape ",
      values.sizes(),
      " on ",
      values.device());
  return values.contiguous();
}

at::Tensor
host_lengths(const at::Tensor& lengths, int64_t rows, int64_t padded_length) {
  at::Tensor checked = host_values(lengths, "lengths", at::kLong, rows);
  const auto* length = checked.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK_VALUE(
        length[row] >= 0 && length[row] <= padded_length,
        "lengths: expected 0..",
        padded_length,
        " (the padded length), got ",
        length[row]);
  }
  return checked;
}

TensorLayout with_length(TensorLayout row, int64_t length) {
  if (row.ragged != 0) {
    row.sizes[0] = static_cast<uint32_t>(length);
  }
  return row;
}

int64_t bytes_of(const RowPlace& place) {
  return static_cast<int64_t>(stored_bytes(place.layout).value());
}

bool is_encoded_one(const RowPlace& place) {
  return place.layout.codec != Codec::kNative;
}

// Values of a row, all tokens.
int64_t count_of(const RowPlace& place) {
  const RowShape shape = shape_of(place.layout);
  return static_cast<int64_t>(shape.tokens * shape.channels);
}

}  // namespace

std::vector<RowPlace> check_decode_rows_args(
    const at::Tensor& encoded,
    const at::Tensor& offsets,
    const at::Tensor& codecs,
    const std::optional<at::Tensor>& lengths,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    double fill) {
  TORCH_CHECK_VALUE(
      encoded.dim() == 1 && encoded.scalar_type() == at::kByte,
      "encoded: expected one dim of Byte, got ",
      encoded.scalar_type(),
      " of shape ",
      encoded.sizes());
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
      "dtype: expected Float, Half or BFloat16, got ",
      dtype);
  const bool too_large = dtype == at::kHalf ? c10::overflows<c10::Half>(fill)
                         : dtype == at::kFloat
                             ? c10::overflows<float>(fill)
                             : c10::overflows<c10::BFloat16>(fill);
  TORCH_CHECK_VALUE(
      !too_large, "fill: expected a value that ", dtype, " holds, got ", fill);
  const bool ragged = lengths.has_value();
  TORCH_CHECK_VALUE(
      sizes.size() <= kMaxDims && sizes.size() >= (ragged ? 1 : 0) &&
          std::all_of(
              sizes.begin(),
              sizes.end(),
              [](int64_t size) {
                return size >= 0 &&
                       size <= std::numeric_limits<uint32_t>::max();
              }),
      "sizes: expected those of a row of a record, got ",
      sizes);
  TensorLayout layout;
  layout.dtype = static_cast<uint8_t>(dtype);
  layout.num_dims = static_cast<uint8_t>(sizes.size());
  layout.ragged = ragged ? 1 : 0;
  std::copy(sizes.begin(), sizes.end(), layout.sizes.begin());
  TORCH_CHECK_VALUE(
      stored_bytes(layout).has_value(),
      "sizes: expected those of a row of a record, got ",
      sizes);
  const int64_t num_rows = offsets.numel();
  const at::Tensor begins =
      host_values(offsets, "offsets", at::kLong, num_rows);
  const at::Tensor kinds = host_values(codecs, "codecs", at::kByte, num_rows);
  const auto* begin = begins.const_data_ptr<int64_t>();
  const auto* kind = kinds.const_data_ptr<uint8_t>();
  at::Tensor checked_lengths;
  if (ragged) {
    checked_lengths = host_lengths(*lengths, num_rows, sizes[0]);
  }
  std::vector<RowPlace> places;
  places.reserve(num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t length =
        ragged ? checked_lengths.const_data_ptr<int64_t>()[row] : 0;
    TensorLayout kept = with_length(layout, length);
    TORCH_CHECK_VALUE(
        kind[row] < kNumCodecs,
        "codecs: expected 0..",
        kNumCodecs - 1,
        ", got ",
        static_cast<int>(kind[row]));
    kept.codec = static_cast<Codec>(kind[row]);
    const std::optional<uint64_t> bytes = stored_bytes(kept);
    TORCH_CHECK_VALUE(
        bytes.has_value(),
        "codecs: expected one that takes row ",
        row,
        ", got ",
        static_cast<int>(kind[row]));
    const auto size = static_cast<int64_t>(*bytes);
    TORCH_CHECK_VALUE(
        begin[row] >= 0 && begin[row] % 8 == 0 && size <= encoded.numel() &&
            begin[row] <= encoded.numel() - size,
        "offsets: expected multiples of 8 with ",
        size,
        " bytes behind them, of ",
        encoded.numel(),
        ", got ",
        begin[row]);
    places.push_back({begin[row], length, kept});
  }
  return places;
}

std::vector<RowPlace> check_encode_rows_args(
    const at::Tensor& rows,
    const std::optional<at::Tensor>& lengths,
    int64_t codec) {
  TORCH_CHECK_VALUE(
      codec > 0 && codec < kNumCodecs,
      "codec: expected 1..",
      kNumCodecs - 1,
      ", got ",
      codec);
  const bool ragged = lengths.has_value();
  TORCH_CHECK_VALUE(
      rows.dim() >= (ragged ? 2 : 1),
      "rows: expected at least ",
      ragged ? 2 : 1,
      " dims, got shape ",
      rows.sizes());
  const int64_t num_rows = rows.size(0);
  at::Tensor checked;
  if (ragged) {
    checked = host_lengths(*lengths, num_rows, rows.size(1));
  }
  const std::optional<RecordLayout> record = layout_of({rows}, {ragged});
  std::vector<RowPlace> places;
  places.reserve(num_rows);
  int64_t offset = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    RowPlace place{offset, 0, {}};
    if (ragged) {
      place.length = checked.const_data_ptr<int64_t>()[row];
    }
    if (record) {
      place.layout = with_length(record->tensors[0], place.length);
      place.layout.codec = static_cast<Codec>(codec);
      const std::optional<uint64_t> bytes = stored_bytes(place.layout);
      if (bytes) {
        offset += static_cast<int64_t>(padded(*bytes));
      } else {
        place.layout.codec = Codec::kNative;
      }
    }
    places.push_back(place);
  }
  return places;
}

int64_t encoded_size(const std::vector<RowPlace>& places) {
  for (auto place = places.rbegin(); place != places.rend(); ++place) {
    if (is_encoded_one(*place)) {
      return place->offset + static_cast<int64_t>(padded(bytes_of(*place)));
    }
  }
  return 0;
}

at::Tensor offsets_of(const std::vector<RowPlace>& places) {
  at::Tensor offsets =
      at::empty({static_cast<int64_t>(places.size())}, at::kLong);
  auto* offset = offsets.mutable_data_ptr<int64_t>();
  for (const RowPlace& place : places) {
    *offset++ = place.offset;
  }
  return offsets;
}

at::Tensor taken_of(const std::vector<RowPlace>& places) {
  at::Tensor taken =
      at::empty({static_cast<int64_t>(places.size())}, at::kBool);
  auto* each = taken.mutable_data_ptr<bool>();
  for (const RowPlace& place : places) {
    *each++ = is_encoded_one(place);
  }
  return taken;
}

at::Tensor empty_rows(
    const at::Tensor& encoded,
    std::size_t num_rows,
    at::IntArrayRef sizes,
    at::ScalarType dtype) {
  std::vector<int64_t> shape{static_cast<int64_t>(num_rows)};
  shape.insert(shape.end(), sizes.begin(), sizes.end());
  return at::empty(shape, encoded.options().dtype(dtype));
}

at::Tensor aligned(const at::Tensor& encoded) {
  const at::Tensor dense = encoded.contiguous();
  return dense.storage_offset() % 8 == 0 ? dense : dense.clone();
}

namespace {

// --- CPU ---------------------------------------------------------------------

std::tuple<at::Tensor, at::Tensor> decode_cpu(
    const at::Tensor& encoded,
    const at::Tensor& offsets,
    const at::Tensor& codecs,
    const std::optional<at::Tensor>& lengths,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    double fill) {
  const std::vector<RowPlace> places = check_decode_rows_args(
      encoded, offsets, codecs, lengths, sizes, dtype, fill);
  const auto num_rows = static_cast<int64_t>(places.size());
  const at::Tensor source = aligned(encoded);
  at::Tensor rows =
      lengths ? at::full(
                    empty_rows(encoded, places.size(), sizes, dtype).sizes(),
                    fill,
                    encoded.options().dtype(dtype))
              : empty_rows(encoded, places.size(), sizes, dtype);
  at::Tensor whole = at::ones({num_rows}, at::kBool);
  auto* from = const_cast<std::byte*>(
      static_cast<const std::byte*>(source.const_data_ptr()));
  auto* flags = whole.mutable_data_ptr<bool>();
  const Rows targets({rows}, {lengths.has_value()});
  at::parallel_for(
      0, num_rows, grain_of({rows}), [&](int64_t begin, int64_t end) {
        std::array<Segment, kMaxTensors> segments;
        RowCodec decoder;
        for (int64_t row = begin; row < end; ++row) {
          const RowPlace& place = places[row];
          targets.at(row, segments, place.length);
          if (is_encoded_one(place)) {
            flags[row] =
                decoder.decode(place.layout, from + place.offset, segments[0]);
          } else if (segments[0].size > 0) {
            std::memcpy(
                segments[0].data, from + place.offset, segments[0].size);
          }
        }
      });
  return {rows, whole};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> encode_cpu(
    const at::Tensor& rows,
    const std::optional<at::Tensor>& lengths,
    int64_t codec) {
  const std::vector<RowPlace> places =
      check_encode_rows_args(rows, lengths, codec);
  at::Tensor encoded = at::zeros({encoded_size(places)}, at::kByte);
  at::Tensor kept = taken_of(places);
  if (encoded.numel() > 0) {
    const at::Tensor source = plain(rows);
    const Rows sources({source}, {lengths.has_value()});
    auto* to = static_cast<std::byte*>(encoded.mutable_data_ptr());
    auto* flags = kept.mutable_data_ptr<bool>();
    at::parallel_for(
        0, source.size(0), grain_of({source}), [&](int64_t begin, int64_t end) {
          std::array<Segment, kMaxTensors> segments;
          RowCodec encoder;
          for (int64_t row = begin; row < end; ++row) {
            const RowPlace& place = places[row];
            sources.at(row, segments, place.length);
            if (is_encoded_one(place)) {
              flags[row] =
                  encoder.encode(place.layout, segments[0], to + place.offset);
            }
          }
        });
  }
  return {encoded, offsets_of(places), kept};
}

// --- every other backend -----------------------------------------------------

// Bits of float32 as 16 bits, with the arithmetic of codec_format.h on int32:
// numbers of that many bits do not leave its range, or are not chosen.
at::Tensor bf16_bits(const at::Tensor& bits) {
  const at::Tensor last = bits.bitwise_right_shift(16).bitwise_and(1);
  // In int64, because NaNs leave the range; the bits lost are those above.
  return bits.to(at::kLong).add(0x7fff).add(last).bitwise_right_shift(16);
}

at::Tensor fp16_bits(const at::Tensor& bits) {
  constexpr int64_t kBias = int64_t{127 - 15} << 23;
  const at::Tensor magnitude = bits.bitwise_and(int64_t{kMagnitude});
  const at::Tensor last = magnitude.bitwise_right_shift(13).bitwise_and(1);
  const at::Tensor normal =
      magnitude.sub(kBias).add(0xfff).add(last).bitwise_right_shift(13);
  const at::Tensor tiny = magnitude.view(at::kFloat)
                              .add(0.5f)
                              .view(at::kInt)
                              .sub(int64_t{bits_of(0.5f)});
  const at::Tensor sign = bits.bitwise_right_shift(16).bitwise_and(0x8000);
  return at::where(magnitude.lt(int64_t{bits_of(0x1p-14f)}), tiny, normal)
      .bitwise_or(sign)
      .to(at::kLong);
}

// The lower 16 bits of integers, as a 16-bit type.
at::Tensor as_halves(const at::Tensor& bits, at::ScalarType dtype) {
  const at::Tensor low = bits.bitwise_and(0xffff);
  return low.sub(low.ge(0x8000).to(at::kLong).mul(0x10000))
      .to(at::kShort)
      .view(dtype);
}

at::Tensor half_bits(const at::Tensor& halves) {
  return halves.view(at::kShort).to(at::kInt).bitwise_and(0xffff);
}

at::Tensor floats_of_bf16(const at::Tensor& halves) {
  return half_bits(halves).bitwise_left_shift(16).view(at::kFloat);
}

at::Tensor floats_of_fp16(const at::Tensor& halves) {
  constexpr int64_t kBias = int64_t{127 - 15} << 23;
  constexpr int64_t kStep = int64_t{1} << 23;
  const at::Tensor half = half_bits(halves);
  const at::Tensor shifted = half.bitwise_and(0x7fff).bitwise_left_shift(13);
  const at::Tensor normal = shifted.add(kBias);
  const at::Tensor special =
      normal.add(shifted.ge(31 * kStep).to(at::kInt).mul(kBias));
  const at::Tensor tiny =
      shifted.add(kBias + kStep)
          .view(at::kFloat)
          .sub(float_of(static_cast<uint32_t>(kBias + kStep)))
          .view(at::kInt);
  const at::Tensor sign = half.bitwise_and(0x8000).bitwise_left_shift(16);
  return at::where(shifted.lt(kStep), tiny, special)
      .bitwise_or(sign)
      .view(at::kFloat);
}

at::Tensor widened(const at::Tensor& values) {
  switch (values.scalar_type()) {
    case at::kHalf:
      return floats_of_fp16(values);
    case at::kBFloat16:
      return floats_of_bf16(values);
    default:
      return values;
  }
}

at::Tensor narrowed(const at::Tensor& values, at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return as_halves(fp16_bits(values.view(at::kInt)), dtype);
    case at::kBFloat16:
      return as_halves(bf16_bits(values.view(at::kInt)), dtype);
    default:
      return values;
  }
}

// Values of an int8 row, (tokens * channels,) float32, and whether it is one.
std::tuple<at::Tensor, at::Tensor>
decode_int8(const at::Tensor& row, RowShape shape) {
  const Int8Parts parts(shape);
  const auto places = static_cast<int64_t>(parts.places);
  const auto channels = static_cast<int64_t>(shape.channels);
  const auto count = static_cast<int64_t>(shape.tokens * shape.channels);
  const at::Tensor scales =
      row.narrow(0, 0, channels * int64_t{sizeof(float)}).view(at::kFloat);
  const at::Tensor apart = row.narrow(
                                  0,
                                  static_cast<int64_t>(parts.outliers),
                                  places * int64_t{sizeof(Apart)})
                               .view(at::kInt)
                               .view({places, 2});
  const at::Tensor values =
      row.narrow(0, static_cast<int64_t>(parts.values), count)
          .view(at::kChar)
          .view({-1, channels});
  const at::Tensor index =
      apart.select(1, 0).to(at::kLong).bitwise_and(int64_t{UINT32_MAX});
  const at::Tensor none = index.eq(int64_t{kNoIndex});
  const at::Tensor inside = index.lt(count);
  // Behind the last value stands what has no place.
  const at::Tensor target =
      at::where(inside, index, at::full_like(index, count));
  at::Tensor restored = at::empty({count + 1}, scales.options());
  restored.narrow(0, 0, count)
      .copy_(values.to(at::kFloat).mul(scales).flatten());
  restored.scatter_(
      0, target, apart.select(1, 1).contiguous().view(at::kFloat));
  // Outliers ascend by channel, then by token; empty places are the last.
  const at::Tensor order = at::where(
      none,
      at::full_like(index, std::numeric_limits<int64_t>::max()),
      index.remainder(channels)
          .mul(static_cast<int64_t>(shape.tokens))
          .add(index.div(channels, "floor")));
  const at::Tensor ascends = order.narrow(0, 1, places - 1)
                                 .gt(order.narrow(0, 0, places - 1))
                                 .logical_or(none.narrow(0, 1, places - 1));
  const at::Tensor finite = scales.view(at::kInt)
                                .bitwise_and(int64_t{kMagnitude})
                                .lt(int64_t{kInfinity});
  const at::Tensor whole = finite.all()
                               .logical_and(inside.logical_or(none).all())
                               .logical_and(ascends.all());
  return {restored.narrow(0, 0, count), whole};
}

std::tuple<at::Tensor, at::Tensor> decode_composite(
    const at::Tensor& encoded,
    const at::Tensor& offsets,
    const at::Tensor& codecs,
    const std::optional<at::Tensor>& lengths,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    double fill) {
  const std::vector<RowPlace> places = check_decode_rows_args(
      encoded, offsets, codecs, lengths, sizes, dtype, fill);
  const auto num_rows = static_cast<int64_t>(places.size());
  const at::Tensor source = aligned(encoded);
  at::Tensor rows = empty_rows(encoded, places.size(), sizes, dtype);
  if (lengths) {
    rows.fill_(fill);
  }
  at::Tensor flags = at::ones({num_rows}, encoded.options().dtype(at::kBool));
  for (int64_t row = 0; row < num_rows; ++row) {
    const RowPlace& place = places[row];
    const at::Tensor bytes = source.narrow(0, place.offset, bytes_of(place));
    at::Tensor values;
    switch (place.layout.codec) {
      case Codec::kNative:
        values = bytes.view(dtype);
        break;
      case Codec::kBf16:
        values = floats_of_bf16(bytes.view(at::kBFloat16));
        break;
      case Codec::kFp16:
        values = floats_of_fp16(bytes.view(at::kHalf));
        break;
      case Codec::kInt8: {
        const auto [restored, whole] =
            decode_int8(bytes, shape_of(place.layout));
        values = narrowed(restored, dtype);
        flags.select(0, row).copy_(whole);
        break;
      }
    }
    rows.select(0, row).flatten().narrow(0, 0, values.numel()).copy_(values);
  }
  return {rows, flags};
}

// The parts of int8 rows, each as if padded with zeros to the longest one:
// these change no sum and no peak.
struct Int8Rows {
  at::Tensor scales;  // (rows, channels)
  at::Tensor steps;   // (rows, tokens * channels) uint8
  at::Tensor index;   // (rows, places) int32: outliers, in order
  at::Tensor apart;   // (rows, places) float32: their values
};

// `values` (rows, tokens, channels) float32; the others (rows, 1) int64.
Int8Rows encode_int8(
    const at::Tensor& values,
    const at::Tensor& tokens,
    const at::Tensor& places) {
  const int64_t num_rows = values.size(0);
  const int64_t num_tokens = values.size(1);
  const int64_t channels = values.size(2);
  const int64_t count = num_tokens * channels;
  const at::Tensor magnitudes = values.abs();
  // Token by token: the order of a sum is part of its bits.
  at::Tensor sums = at::zeros({num_rows, channels}, values.options());
  for (int64_t token = 0; token < num_tokens; ++token) {
    sums.add_(magnitudes.select(1, token));
  }
  const at::Tensor count_of_tokens = tokens.to(at::kFloat);
  const at::Tensor limits =
      sums.mul(at::full_like(count_of_tokens, kOutlier).div(count_of_tokens))
          .unsqueeze(1);
  const at::Tensor above = magnitudes.gt(limits);
  const at::Tensor times =
      at::where(above, magnitudes.div(limits), at::full_like(magnitudes, -1.0))
          .view({num_rows, count});
  // Of equal ones, the first stay first.
  const at::Tensor order =
      std::get<1>(at::sort(times, /*stable=*/true, 1, /*descending=*/true));
  const at::Tensor ranks =
      at::arange(count, order.options()).unsqueeze(0).lt(places);
  const at::Tensor is_apart = at::zeros({num_rows, count}, ranks.options())
                                  .scatter(1, order, ranks)
                                  .view({num_rows, num_tokens, channels})
                                  .logical_and(above);
  const at::Tensor peaks = magnitudes.masked_fill(is_apart, 0.0).amax(1);
  const at::Tensor counts = peaks.ge(kSmallest);
  const at::Tensor none = at::zeros_like(peaks);
  const at::Tensor scales =
      at::where(counts, peaks.div(at::full_like(peaks, kSteps)), none);
  const at::Tensor factors =
      at::where(counts, at::full_like(peaks, kSteps).div(peaks), none);
  const at::Tensor steps = values.mul(factors.unsqueeze(1))
                               .add(kRounds)
                               .view(at::kInt)
                               .bitwise_and(0xff)
                               .to(at::kByte)
                               .masked_fill(is_apart, 0);
  // Channel by channel, each to its place; a place too many takes the others.
  const auto most = static_cast<int64_t>(outlier_places(count));
  const at::Tensor in_order =
      is_apart.transpose(1, 2).reshape({num_rows, count});
  const at::Tensor target = at::where(
      in_order,
      in_order.to(at::kLong).cumsum(1).sub(1),
      at::full_like(order, most));
  const at::Tensor indices = at::arange(count, order.options())
                                 .view({num_tokens, channels})
                                 .t()
                                 .reshape({1, count})
                                 .expand({num_rows, count});
  at::Tensor index = at::full({num_rows, most + 1}, -1, order.options());
  index.scatter_(1, target, indices);
  index = index.narrow(1, 0, most);
  const at::Tensor apart = values.reshape({num_rows, count})
                               .gather(1, index.clamp_min(0))
                               .masked_fill(index.lt(0), 0.0);
  return {scales, steps.view({num_rows, count}), index.to(at::kInt), apart};
}

// A number of each row, (rows, 1) int64, on the device of `like`.
template <typename Value>
at::Tensor column(
    const std::vector<RowPlace>& places,
    const at::Tensor& like,
    Value value) {
  at::Tensor column =
      at::empty({static_cast<int64_t>(places.size()), 1}, at::kLong);
  auto* each = column.mutable_data_ptr<int64_t>();
  for (const RowPlace& place : places) {
    *each++ = value(place);
  }
  return column.to(like.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> encode_composite(
    const at::Tensor& rows,
    const std::optional<at::Tensor>& lengths,
    int64_t codec) {
  const std::vector<RowPlace> places =
      check_encode_rows_args(rows, lengths, codec);
  at::Tensor encoded = at::zeros(
      {encoded_size(places)},
      at::TensorOptions().dtype(at::kByte).device(rows.device()));
  at::Tensor kept = taken_of(places).to(rows.device());
  if (encoded.numel() == 0) {
    return {encoded, offsets_of(places), kept};
  }
  const int64_t num_rows = rows.size(0);
  const at::Tensor wide =
      widened(rows.detach().resolve_neg().contiguous()).reshape({num_rows, -1});
  const at::Tensor valid =
      at::arange(wide.size(1), kept.options().dtype(at::kLong))
          .unsqueeze(0)
          .lt(column(places, rows, count_of));
  const at::Tensor bits = wide.view(at::kInt).bitwise_and(int64_t{kMagnitude});
  const auto kind = static_cast<Codec>(codec);
  const uint32_t beyond =
      kind == Codec::kFp16 ? bits_of(kLargestFp16) + 1 : bits_of(kLargest);
  kept = kept.logical_and(
      bits.ge(int64_t{beyond}).logical_and(valid).any(1).logical_not());
  if (kind != Codec::kInt8) {
    const at::Tensor halves = kind == Codec::kFp16
                                  ? narrowed(wide, at::kHalf)
                                  : narrowed(wide, at::kBFloat16);
    for (int64_t row = 0; row < num_rows; ++row) {
      const RowPlace& place = places[row];
      if (is_encoded_one(place)) {
        encoded.narrow(0, place.offset, bytes_of(place))
            .copy_(halves.select(0, row)
                       .narrow(0, 0, count_of(place))
                       .view(at::kByte));
      }
    }
    return {encoded, offsets_of(places), kept};
  }
  const int64_t channels = rows.size(-1);
  // What is refused may be anything: it is not computed with.
  const at::Tensor usable = valid.logical_and(kept.unsqueeze(1));
  const Int8Rows parts = encode_int8(
      wide.masked_fill(usable.logical_not(), 0.0)
          .view({num_rows, -1, channels}),
      column(
          places,
          rows,
          [](const RowPlace& place) {
            return static_cast<int64_t>(shape_of(place.layout).tokens);
          })
          .clamp_min(1),
      column(places, rows, [](const RowPlace& place) {
        return static_cast<int64_t>(outlier_places(count_of(place)));
      }));
  for (int64_t row = 0; row < num_rows; ++row) {
    const RowPlace& place = places[row];
    if (!is_encoded_one(place)) {
      continue;
    }
    const Int8Parts format(shape_of(place.layout));
    const auto num_places = static_cast<int64_t>(format.places);
    const at::Tensor to = encoded.narrow(0, place.offset, bytes_of(place));
    to.narrow(0, 0, static_cast<int64_t>(format.outliers))
        .view(at::kFloat)
        .copy_(parts.scales.select(0, row));
    const at::Tensor apart = to.narrow(
                                   0,
                                   static_cast<int64_t>(format.outliers),
                                   num_places * int64_t{sizeof(Apart)})
                                 .view(at::kInt)
                                 .view({num_places, 2});
    apart.select(1, 0).copy_(
        parts.index.select(0, row).narrow(0, 0, num_places));
    apart.select(1, 1).copy_(
        parts.apart.select(0, row).narrow(0, 0, num_places).view(at::kInt));
    to.narrow(0, static_cast<int64_t>(format.values), count_of(place))
        .copy_(parts.steps.select(0, row).narrow(0, 0, count_of(place)));
  }
  return {encoded, offsets_of(places), kept};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pipetransformer, m) {
  m.def(
      "decode_rows(Tensor encoded, Tensor offsets, Tensor codecs, "
      "Tensor? lengths, int[] sizes, ScalarType dtype, float fill) "
      "-> (Tensor, Tensor)");
  m.def(
      "encode_rows(Tensor rows, Tensor? lengths, int codec) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(pipetransformer, CompositeExplicitAutograd, m) {
  m.impl("decode_rows", &decode_composite);
  m.impl("encode_rows", &encode_composite);
}

TORCH_LIBRARY_IMPL(pipetransformer, CPU, m) {
  m.impl("decode_rows", &decode_cpu);
  m.impl("encode_rows", &encode_cpu);
}

}  // namespace pipetransformer::autocache
