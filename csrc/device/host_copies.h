// Copies between the host and devices that wait for nothing but what they need:
// on streams of their own, beside the work that is queued on those that
// compute.
//
// Thread safety: all functions may be called by several threads; "current"
// means the calling thread's. Ownership: streams belong to torch's pool.
#pragma once

#include <ATen/core/Tensor.h>

#include "device/pipeline_streams.h"

namespace pipetransformer::device {

class HostCopies {
 public:
  HostCopies() : streams_({}, /*own_streams=*/false) {}

  // `value` on `target`, for use on its current stream; itself if it is there
  // already. The host waits until `value` has been read, where it is the
  // host's, and not for what is queued on `target`.
  at::Tensor bring(const at::Tensor& value, c10::Device target) {
    return streams_.bring(value, target, Mark());
  }

  // What is queued on the current stream of the device of `value` by now: the
  // last write to it, if that stream made it. Empty for CPU.
  Mark mark(const at::Tensor& value) {
    return streams_.mark(value.device());
  }

  // `value` on the host, as it was at the mark; the host waits for that alone.
  at::Tensor read(const at::Tensor& value, const Mark& written) {
    return streams_.bring(value, c10::Device(c10::kCPU), written);
  }

 private:
  PipelineStreams streams_;
};

}  // namespace pipetransformer::device
