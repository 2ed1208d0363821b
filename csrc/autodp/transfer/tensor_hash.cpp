#include "autodp/transfer/tensor_hash.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "core/hash.h"

namespace pipetransformer::autodp {

namespace {

// Below this many bytes starting threads costs more than hashing.
constexpr int64_t kBytesPerThread = int64_t{1} << 20;

}  // namespace

uint64_t hash_layout(const at::Tensor& tensor, uint64_t seed) {
  seed = core::hash_string(c10::toString(tensor.scalar_type()), seed);
  const auto sizes = tensor.sizes();
  return core::hash_bytes(sizes.data(), sizes.size() * sizeof(int64_t), seed);
}

uint64_t hash_tensor(const at::Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  const auto elements =
      tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
  return core::hash_bytes(
      elements.const_data_ptr(),
      elements.nbytes(),
      hash_layout(tensor, core::kHashSeed));
}

std::vector<uint64_t> hash_tensors(const std::vector<at::Tensor>& tensors) {
  std::vector<uint64_t> hashes(tensors.size());
  std::vector<size_t> here;
  int64_t total_bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].is_cpu()) {
      here.push_back(i);
      total_bytes += static_cast<int64_t>(tensors[i].nbytes());
    } else {
      // Here, since the streams of a device belong to the calling thread.
      hashes[i] = autodp::hash_tensor(tensors[i]);
    }
  }
  const auto count = static_cast<int64_t>(here.size());
  const auto grain = total_bytes < 2 * kBytesPerThread ? count : int64_t{1};
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto index = here[static_cast<size_t>(i)];
      hashes[index] = autodp::hash_tensor(tensors[index]);
    }
  });
  return hashes;
}

}  // namespace pipetransformer::autodp
