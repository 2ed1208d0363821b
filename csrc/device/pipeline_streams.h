// The streams of one pipeline: what computes where, and how tensors get from
// one stream to another so that nothing is read before it is written and no
// memory is used again before its last reader is done.
//
//   stage j on A      ----cell----+mark
//   copy stream, A               wait ==copy==            (A's end of the copy)
//   copy stream, B                    ==copy==+           (B's end)
//   stage j+1 on B    --another cell-----------wait----cell----
//
// Without own streams every stage computes on its caller's current stream of
// its device. With own streams each stage has one from torch's pool, so that
// stages of one device overlap: begin() lets them wait for the caller, join()
// the caller for them, and between two stages of one device bring() waits
// instead of copying. Neighbours copy on a pair of streams of their own, used
// by nothing else: a copy waits for the cell that made the tensor only.
//
// Thread safety: all functions may be called by several threads; "current"
// means the calling thread's. Ownership: streams belong to torch's pool.
// CPU and meta have no streams; there bring() is a plain copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/mark.h"

namespace pipetransformer::device {

class PipelineStreams {
 public:
  // `devices`: by stage.
  PipelineStreams(std::vector<c10::Device> devices, bool own_streams);

  // False copies on the streams that compute, for comparison.
  void use_copy_streams(bool value) noexcept {
    use_copy_streams_ = value;
  }

  // The stream a stage computes on; none: the caller's current one.
  const std::optional<c10::Stream>& own_stream(int32_t stage) const noexcept {
    return own_streams_[stage];
  }

  // The stages' own streams run what is queued on them from now on after what
  // is on the current streams; join() is the reverse.
  void begin();
  void join();

  // What is queued on the current stream of `device` by now; empty for CPU.
  Mark mark(c10::Device device);
  // The same where a tensor of one stage is another stream's business; empty
  // where all stages compute on one stream.
  Mark mark_border(c10::Device device);

  // `value` on `target`, for use on its current stream; itself if it is there
  // already. `ready`: a mark after `value` was written, empty where the current
  // stream of its device wrote it. Waits on the host for copies to or from
  // CPU memory that is not safe to leave behind; may throw what a copy throws.
  at::Tensor
  bring(const at::Tensor& value, c10::Device target, const Mark& ready);

 private:
  // The two ends of the copies from one device to another.
  struct CopyStreams {
    c10::Stream source;
    c10::Stream target;
  };
  CopyStreams copy_streams(c10::Device source, c10::Device target);
  at::Tensor
  copy_between(const at::Tensor& value, c10::Device target, const Mark& ready);
  at::Tensor copy_to_host(const at::Tensor& value, const Mark& ready);
  at::Tensor copy_from_host(const at::Tensor& value, c10::Device target);
  void hold_back_source(
      const at::Tensor& value,
      const Mark& ready,
      c10::Stream stream);

  const std::vector<c10::Device> devices_;
  const bool several_streams_;
  const std::shared_ptr<MarkPool> marks_;
  std::vector<std::optional<c10::Stream>> own_streams_;  // by stage
  std::atomic<bool> use_copy_streams_{true};
  std::mutex mutex_;
  std::vector<CopyStreams> copies_;  // by pair of devices, made when needed
};

// Keeps the memory of `value` from being used again before what is queued on
// `stream` by the time `value` is freed has run. Protects whole storages, so
// shifted views are safe.
void keep_until(const at::Tensor& value, c10::Stream stream);

}  // namespace pipetransformer::device
