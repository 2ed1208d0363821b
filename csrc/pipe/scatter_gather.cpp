#include "pipe/scatter_gather.h"

#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace pipetransformer::pipe {

namespace {

void check_can_be_cut(
    const std::string& what,
    const at::Tensor& tensor,
    int64_t num_microbatches) {
  const bool is_nested = tensor.is_nested() || tensor.layout() == at::kJagged;
  if (num_microbatches == 1 ||
      (tensor.layout() == at::kStrided && !is_nested)) {
    return;
  }
  throw std::invalid_argument(
      what +
      ": expected dense (strided) tensors, of which micro-batches get their "
      "rows, got a " +
      (is_nested ? "nested" : "sparse") +
      " one; a layer may make it of a dense one");
}

}  // namespace

// Note [Rows that are changed in place]
// Views share one version counter: a layer that changes a micro-batch's rows in
// place would make autograd refuse what the others have saved of theirs. So
// micro-batches count for themselves, where no memory is in two of them. The
// first one goes on to count with the caller's tensor: what changes that
// between forward and backward is refused as ever. Nor does an input that
// carries gradient part: its history is the caller's.
Scattered scatter(
    const std::string& what,
    const Tensors& tensors,
    const std::vector<bool>& whole,
    int64_t num_microbatches,
    RowSplit split,
    int64_t min_rows,
    bool record) {
  Scattered result;
  std::size_t count = 0;
  for (std::size_t p = 0; p < tensors.size(); ++p) {
    const at::Tensor& tensor = tensors[p];
    result.rows.emplace_back();
    if (tensor.dim() == 0 || whole[p]) {
      continue;
    }
    check_can_be_cut(what, tensor, num_microbatches);
    result.rows.back() =
        split_rows(tensor.size(0), num_microbatches, split, min_rows);
    const std::size_t found = result.rows.back().size();
    if (count != 0 && found != count) {
      throw std::runtime_error(
          "Found different number of chunks: expected " +
          std::to_string(count) + " micro-batches of every input, got " +
          std::to_string(found) + " of one with " +
          std::to_string(tensor.size(0)) + " rows");
    }
    count = found;
  }
  result.microbatches.resize(count == 0 ? 1 : count);
  for (std::size_t p = 0; p < tensors.size(); ++p) {
    const at::Tensor data = tensors[p].detach();
    const bool requires_grad = record && tensors[p].requires_grad();
    const auto& rows = result.rows[p];
    const bool uncut = rows.empty() || count == 1;
    const bool apart = !uncut && !tensors[p].requires_grad() &&
                       data.is_non_overlapping_and_dense();
    int64_t start = 0;
    for (std::size_t i = 0; i < result.microbatches.size(); ++i) {
      at::Tensor part = uncut ? data : data.narrow(0, start, rows[i]);
      if (apart && i > 0) {
        part = part.variable_data();
      }
      result.microbatches[i].push_back({std::move(part), requires_grad, 0});
      start += uncut ? 0 : rows[i];
    }
  }
  return result;
}

namespace {

int64_t total_of(const std::vector<int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

}  // namespace

std::vector<int64_t> first_cut(const RowLayout& rows) {
  const auto found =
      std::find_if(rows.begin(), rows.end(), [](const auto& of_tensor) {
        return !of_tensor.empty();
      });
  return found == rows.end() ? std::vector<int64_t>{} : *found;
}

void check_shares(
    const std::string& what,
    const RowLayout& rows,
    const std::vector<int64_t>& like) {
  const int64_t whole = total_of(like);
  for (const std::vector<int64_t>& of_tensor : rows) {
    const int64_t total = total_of(of_tensor);
    for (std::size_t i = 0; i < std::min(of_tensor.size(), like.size()); ++i) {
      if (of_tensor[i] * whole != like[i] * total) {
        throw std::invalid_argument(
            what +
            ": expected as many rows, or the same multiple of them in "
            "every micro-batch, got " +
            std::to_string(of_tensor[i]) + " of " + std::to_string(total) +
            " rows beside " + std::to_string(like[i]) + " of " +
            std::to_string(whole) + " in micro-batch " + std::to_string(i));
      }
    }
  }
}

std::vector<double> row_weights(const RowLayout& rows, std::size_t count) {
  for (const std::vector<int64_t>& of_tensor : rows) {
    int64_t total = 0;
    for (const int64_t part : of_tensor) {
      total += part;
    }
    if (total > 0) {
      std::vector<double> weights;
      for (const int64_t part : of_tensor) {
        weights.push_back(
            static_cast<double>(part) / static_cast<double>(total));
      }
      return weights;
    }
  }
  return std::vector<double>(count, 1.0 / static_cast<double>(count));
}

void check_has_rows(const at::Tensor& output, std::size_t position) {
  if (output.dim() == 0) {
    throw std::runtime_error(
        "output " + std::to_string(position) +
        ": expected a tensor with rows along dimension 0, got a "
        "zero-dimensional one");
  }
}

Gathered gather(const std::vector<Activations>& microbatches) {
  const c10::NoGradGuard no_grad;
  Gathered result;
  for (std::size_t p = 0; p < microbatches.front().size(); ++p) {
    Tensors parts;
    std::vector<int64_t> rows;
    bool requires_grad = false;
    for (const Activations& outputs : microbatches) {
      const Activation& output = outputs[p];
      check_has_rows(output.value, p);
      parts.push_back(output.value);
      rows.push_back(output.value.size(0));
      requires_grad = requires_grad || output.requires_grad;
    }
    result.tensors.push_back(parts.size() == 1 ? parts[0] : at::cat(parts));
    result.rows.push_back(std::move(rows));
    result.requires_grad.push_back(requires_grad);
  }
  return result;
}

std::vector<Tensors> scatter_grads(
    const Tensors& grads,
    const RowLayout& rows,
    int64_t num_microbatches) {
  std::vector<Tensors> result(num_microbatches);
  for (std::size_t p = 0; p < grads.size(); ++p) {
    int64_t start = 0;
    for (int64_t i = 0; i < num_microbatches; ++i) {
      at::Tensor part;
      if (grads[p].defined()) {
        part = num_microbatches == 1 ? grads[p]
                                     : grads[p].narrow(0, start, rows[p][i]);
      }
      start += rows[p][i];
      result[i].push_back(std::move(part));
    }
  }
  return result;
}

at::Tensor gather_grads(
    const std::vector<Tensors>& grads,
    std::size_t position,
    const std::vector<int64_t>& rows) {
  at::Tensor sample;
  for (const Tensors& microbatch : grads) {
    if (position < microbatch.size() && microbatch[position].defined()) {
      sample = microbatch[position];
      break;
    }
  }
  if (!sample.defined()) {
    return sample;
  }
  Tensors parts;
  at::Tensor sum;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const bool defined =
        position < grads[i].size() && grads[i][position].defined();
    if (rows.empty()) {
      if (defined) {
        sum = sum.defined() ? sum.add(grads[i][position]) : grads[i][position];
      }
      continue;
    }
    std::vector<int64_t> sizes = sample.sizes().vec();
    sizes[0] = rows[i];
    parts.push_back(defined ? grads[i][position] : sample.new_zeros(sizes));
  }
  if (rows.empty()) {
    return sum;
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

}  // namespace pipetransformer::pipe
