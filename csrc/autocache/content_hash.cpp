#include "autocache/content_hash.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>

#include "autocache/tensor_rows.h"
#include "core/hash.h"

namespace pipetransformer::autocache {

namespace {

// Dtype and the sizes from `first_dim` on; -1 is no size and ends the list.
uint64_t hash_kind(const at::Tensor& tensor, int64_t first_dim, uint64_t seed) {
  std::vector<int64_t> kind{static_cast<int64_t>(tensor.scalar_type())};
  for (int64_t dim = first_dim; dim < tensor.dim(); ++dim) {
    kind.push_back(tensor.size(dim));
  }
  kind.push_back(-1);
  return core::hash_bytes(kind.data(), kind.size() * sizeof(kind[0]), seed);
}

}  // namespace

uint64_t hash_tensor(const at::Tensor& tensor, uint64_t seed) {
  const at::Tensor source = plain(tensor);
  return core::hash_bytes(
      source.const_data_ptr(), source.nbytes(), hash_kind(source, 0, seed));
}

at::Tensor hash_rows(
    const std::vector<at::Tensor>& tensors,
    const RaggedTensors& ragged,
    const std::optional<at::Tensor>& lengths) {
  const int64_t rows = num_rows_of(tensors);
  const int64_t padded = padded_length(tensors, ragged);
  const std::optional<at::Tensor> checked =
      checked_lengths(tensors, ragged, lengths);
  const int64_t* length =
      checked ? checked->const_data_ptr<int64_t>() : nullptr;
  uint64_t seed = core::kHashSeed;
  std::vector<at::Tensor> sources;
  std::vector<std::size_t> element_bytes;  // of a ragged tensor; else 0
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    const at::Tensor source = plain(tensors[k]);
    const bool is = is_ragged(ragged, k);
    element_bytes.push_back(
        is ? source.nbytes() / std::max<int64_t>(rows * padded, 1) : 0);
    seed = hash_kind(source, is ? 2 : 1, seed);
    sources.push_back(source);
  }
  at::Tensor result = at::empty({rows}, at::kLong);
  auto* hashes = result.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, grain_of(sources), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint64_t hash = seed;
      if (length != nullptr) {
        hash = core::hash_bytes(&length[row], sizeof(length[row]), hash);
      }
      for (std::size_t k = 0; k < sources.size(); ++k) {
        const at::Tensor& source = sources[k];
        const std::size_t size = source.nbytes() / rows;
        const auto* first =
            static_cast<const std::byte*>(source.const_data_ptr());
        const bool is = element_bytes[k] > 0;
        hash = core::hash_bytes(
            first + row * size,
            is ? length[row] * element_bytes[k] : size,
            hash);
      }
      hashes[row] = static_cast<int64_t>(hash);
    }
  });
  return result;
}

}  // namespace pipetransformer::autocache
