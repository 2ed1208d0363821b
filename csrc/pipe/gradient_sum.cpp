#include "pipe/gradient_sum.h"

namespace pipetransformer::pipe {

namespace {

bool owned_alone(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.use_count() == 1 &&
         tensor.has_storage() && tensor.storage().use_count() == 1 &&
         tensor.is_non_overlapping_and_dense();
}

}  // namespace

void add_to(at::Tensor& sum, const at::Tensor& grad) {
  if (!grad.defined()) {
    return;
  }
  if (!sum.defined()) {
    sum = grad;
  } else if (owned_alone(sum) && sum.scalar_type() == grad.scalar_type()) {
    sum.add_(grad);
  } else if (sum.layout() == at::kStrided) {
    sum = sum.add(grad);
  } else {
    sum = grad.add(sum);  // sparse + dense is only defined this way round
  }
}

}  // namespace pipetransformer::pipe
