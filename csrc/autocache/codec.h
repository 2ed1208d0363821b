// Codecs: how a row of float32 values is kept in fewer bytes.
//
//   kBf16, kFp16  each value rounded to nearest, ties to even; relative error
//                 at most 2^-8 and 2^-11 (fp16 below 2^-14: absolute 2^-25)
//   kInt8         a byte per value and a scale per channel, which is the
//                 largest value of the row's tokens there; what is large
//                 against its channel stands apart with its exact value. Error
//                 of the others: at most 1/254 of the channel's largest one,
//                 or 1e-30 where that is larger
//
//   int8: float scale[channels] | {uint32 index, float value}[outlier_places]
//         | int8 value[tokens][channels]
//
// Scales are finite. Outliers come channel by channel, each once; places that
// are left hold index 2^32 - 1.
//
// A row is a matrix of tokens x channels, token by token; to the others than
// int8 it is only so many values. How many bytes an encoded row has depends on
// codec and shape alone. Rows with values that a codec cannot hold, such as a
// mask's infinities, are refused. Equal rows give equal bytes.
//
// Torch-free. Memory is the caller's, of encoded rows aligned to 4 bytes.
// Source: per-channel scales and outliers apart as in LLM.int8() (Dettmers et
// al., 2022), with the scale over tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "autocache/codec_format.h"

namespace pipetransformer::autocache {

// Nothing: the codec does not take rows of that shape; int8 needs two tokens.
std::optional<uint64_t> encoded_bytes(Codec codec, RowShape shape) noexcept;

// Encodes row after row; not thread-safe, because it keeps its working memory.
class Encoder {
 public:
  // Writes encoded_bytes() to `to`. False: a value is not finite, or larger
  // than the codec holds (1e30, with kFp16 65504); `to` is worthless.
  bool encode(Codec codec, RowShape shape, const float* from, std::byte* to);

 private:
  // A value that stands apart.
  struct Outlier {
    uint32_t token;
    uint32_t channel;
    float times;  // of the limit of its channel
  };

  bool encode_int8(RowShape shape, const float* from, std::byte* to);
  void find_outliers(RowShape shape, const float* from);
  void leave_out_outliers(RowShape shape, const float* from);

  std::vector<float> limits_;  // of each channel: larger ones stand apart
  std::vector<float> peaks_;   // of each channel, without what stands apart
  std::vector<float> factors_;
  std::vector<Outlier> outliers_;
};

// Whether encoded_bytes(), which may hold anything, are an encoded row.
bool is_encoded(Codec codec, RowShape shape, const std::byte* from) noexcept;

// Reads them. False: they are none, and `to` is worthless.
bool decode(
    Codec codec,
    RowShape shape,
    const std::byte* from,
    float* to) noexcept;

// Rows of bf16 and fp16 as float32, and back with the rounding above.
void widen_bf16(const uint16_t* from, float* to, std::size_t count) noexcept;
void widen_fp16(const uint16_t* from, float* to, std::size_t count) noexcept;
void narrow_bf16(const float* from, uint16_t* to, std::size_t count) noexcept;
void narrow_fp16(const float* from, uint16_t* to, std::size_t count) noexcept;

}  // namespace pipetransformer::autocache
