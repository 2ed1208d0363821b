// Cutting a mini-batch into micro-batches along dimension 0 and putting tensors
// together again, for values and for gradients. No graph is recorded: the
// autograd nodes of the pipe do that part. Thread-safe, no state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipe/pipe_call.h"
#include "pipe/rows.h"

namespace pipetransformer::pipe {

// Rows of each micro-batch, by tensor position; an empty entry is a tensor that
// is handed to every micro-batch whole.
using RowLayout = std::vector<std::vector<int64_t>>;

struct Scattered {
  RowLayout rows;
  std::vector<Activations> microbatches;
};

// `tensors` as given by the caller, history and all; 0-dim ones and those
// marked in `whole` are handed to every micro-batch. Rows are cut as by
// split_rows. `record`: whether inputs carry gradient. `what` names them in
// errors: std::runtime_error when two tensors give different numbers of
// micro-batches, std::invalid_argument for sparse and nested tensors.
Scattered scatter(
    const std::string& what,
    const Tensors& tensors,
    const std::vector<bool>& whole,
    int64_t num_microbatches,
    RowSplit split,
    int64_t min_rows,
    bool record);

// Of the first tensor that is cut; empty: none is.
std::vector<int64_t> first_cut(const RowLayout& rows);

// Throws std::invalid_argument unless each micro-batch has the same share of
// every tensor's rows as of `like`: others would meet rows that are not theirs.
void check_shares(
    const std::string& what,
    const RowLayout& rows,
    const std::vector<int64_t>& like);

// How much the mean of each micro-batch counts in the mean of all rows; adds up
// to one. Equal shares where there are no rows. `count`: micro-batches.
std::vector<double> row_weights(const RowLayout& rows, std::size_t count);

struct Gathered {
  RowLayout rows;
  Tensors tensors;
  std::vector<bool> requires_grad;
};

// Throws std::runtime_error for a 0-dim tensor: outputs need rows.
void check_has_rows(const at::Tensor& output, std::size_t position);

// Concatenates position by position; a single micro-batch is not copied.
// Throws std::runtime_error for 0-dim outputs.
Gathered gather(const std::vector<Activations>& microbatches);

// Gradients of gathered tensors, cut for their micro-batches.
std::vector<Tensors> scatter_grads(
    const Tensors& grads,
    const RowLayout& rows,
    int64_t num_microbatches);

// Gradient of input `position` from those of its micro-batches: concatenated
// (zeros where there is none), or summed for a tensor that was not cut.
// Undefined when no micro-batch has one.
at::Tensor gather_grads(
    const std::vector<Tensors>& grads,
    std::size_t position,
    const std::vector<int64_t>& rows);

}  // namespace pipetransformer::pipe
