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

  // What is queued on the current stream of `device` by now; empty for CPU.
  Mark mark(c10::Device device) {
    return streams_.mark(device);
  }

  // `value` on the host, which waits for the mark alone: that of the last write
  // to it.
  at::Tensor read(const at::Tensor& value, const Mark& written) {
    return streams_.bring(value, c10::Device(c10::kCPU), written);
  }

 private:
  PipelineStreams streams_;
};

}  // namespace pipetransformer::device
