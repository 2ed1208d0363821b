// Kernel of pipetransformer::squared_norms and l1_norms: each block sums one
// slice of one tensor, in fp64 and in a fixed order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "autofreeze/cuda/squared_norms_kernel.h"

namespace pipetransformer::autofreeze {

namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr unsigned kWholeWarp = 0xffffffffU;

__device__ double widen(double value) {
  return value;
}
__device__ double widen(float value) {
  return value;
}
__device__ double widen(__half value) {
  return __half2float(value);
}
__device__ double widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

template <typename T>
__device__ double sum_slice(const void* data, int64_t numel, Term term) {
  const T* values = static_cast<const T*>(data);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  double sum = 0.0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < numel;
       i += stride) {
    const double value = widen(values[i]);
    sum += term == Term::kSquare ? value * value : fabs(value);
  }
  return sum;
}

// The block's sum, valid in thread 0.
__device__ double sum_over_block(double sum) {
  __shared__ double warp_sums[kThreads / kWarpSize];
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(kWholeWarp, sum, offset);
  }
  if (threadIdx.x % kWarpSize == 0) {
    warp_sums[threadIdx.x / kWarpSize] = sum;
  }
  __syncthreads();
  double total = 0.0;
  if (threadIdx.x == 0) {
    for (const double warp_sum : warp_sums) {
      total += warp_sum;
    }
  }
  return total;
}

// Grid: (kBlocksPerTensor, num_tensors).
__global__ void squared_norms(const SquaredNormsParams params) {
  const SquaredNormsParams::Item& item = params.items[blockIdx.y];
  double sum = 0.0;
  switch (item.type) {
    case ElementType::kDouble:
      sum = sum_slice<double>(item.data, item.numel, params.term);
      break;
    case ElementType::kFloat:
      sum = sum_slice<float>(item.data, item.numel, params.term);
      break;
    case ElementType::kHalf:
      sum = sum_slice<__half>(item.data, item.numel, params.term);
      break;
    case ElementType::kBFloat16:
      sum = sum_slice<__nv_bfloat16>(item.data, item.numel, params.term);
      break;
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) {
    params.partial_sums[blockIdx.y * gridDim.x + blockIdx.x] = sum;
  }
}

}  // namespace

static_assert(sizeof(SquaredNormsParams) <= 4096, "kernel parameter limit");

const char*
launch_squared_norms(const SquaredNormsParams& params, void* stream) noexcept {
  const dim3 grid(SquaredNormsParams::kBlocksPerTensor, params.num_tensors);
  squared_norms<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      params);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace pipetransformer::autofreeze
