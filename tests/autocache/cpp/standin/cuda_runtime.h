// What codec.cu uses of CUDA, on the host: a block is 256 threads at a time,
// and blocks run one after the other. tests/autocache/test_codec_kernels.py
// writes launches as calls of launch_on_host().
#pragma once

#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;

  dim3() = default;
  dim3(unsigned width, unsigned height = 1) : x(width), y(height) {}
};

using cudaStream_t = struct Stream*;
enum cudaError_t { cudaSuccess };

inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t) {
  return "";
}

namespace host {

inline constexpr int kThreads = 256;
inline std::barrier<> all_threads{kThreads};
inline std::atomic<int> votes;

}  // namespace host

inline thread_local dim3 threadIdx;
inline dim3 blockIdx;
inline dim3 gridDim;

inline void __syncthreads() {
  host::all_threads.arrive_and_wait();
}

inline int __syncthreads_or(int vote) {
  host::votes += vote != 0 ? 1 : 0;
  __syncthreads();
  const int any = host::votes;
  __syncthreads();
  if (threadIdx.x == 0) {
    host::votes = 0;
  }
  __syncthreads();
  return any;
}

inline uint32_t atomicAdd(uint32_t* to, uint32_t value) {
  return std::atomic_ref(*to).fetch_add(value);
}

// Compiled without contraction, so that these round as they say.
inline float __fmul_rn(float one, float other) {
  return one * other;
}

inline float __fadd_rn(float one, float other) {
  return one + other;
}

inline float __fdiv_rn(float one, float other) {
  return one / other;
}

inline float fmaxf(float one, float other) {
  return one > other ? one : other;
}

template <typename Kernel, typename Params>
void launch_on_host(
    Kernel kernel,
    dim3 grid,
    int num_threads,
    const Params& params) {
  if (num_threads != host::kThreads) {
    std::abort();
  }
  gridDim = grid;
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < host::kThreads; ++number) {
    threads.emplace_back([&, number] {
      threadIdx = dim3(number);
      for (unsigned block = 0; block < grid.x * grid.y; ++block) {
        __syncthreads();
        if (number == 0) {
          blockIdx = dim3(block % grid.x, block / grid.x);
        }
        __syncthreads();
        kernel(params);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}
