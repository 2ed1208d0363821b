// What the tensor side hands to the squared-norms kernel: plain data and a
// stream. No torch, no CUDA header, so both sides can include it.
#pragma once

#include <cstdint>

namespace pipetransformer::autofreeze {

enum class ElementType : int32_t { kDouble, kFloat, kHalf, kBFloat16 };

// What is summed: squares, or absolute values.
enum class Term : int32_t { kSquare, kAbsolute };

struct SquaredNormsParams {
  // Kernel parameters are limited to 4 KiB; longer lists take several launches.
  static constexpr int kMaxTensors = 128;
  // Partial sums per tensor. Fixed, so that the bits of a result do not depend
  // on the device.
  static constexpr int kBlocksPerTensor = 64;

  struct Item {
    const void* data;  // device memory, contiguous
    int64_t numel;
    ElementType type;
  };

  Item items[kMaxTensors];
  int num_tensors;
  Term term;
  // (num_tensors, kBlocksPerTensor) row-major on the device; every entry is
  // written. Summing a row gives the tensor's norm.
  double* partial_sums;
};

// Launches on `stream` (a cudaStream_t) of the current device and returns at
// once. Returns nullptr, or the error of the launch as static text.
const char*
launch_squared_norms(const SquaredNormsParams& params, void* stream) noexcept;

}  // namespace pipetransformer::autofreeze
