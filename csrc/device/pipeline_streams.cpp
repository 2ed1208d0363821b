#include "device/pipeline_streams.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace pipetransformer::device {

// Note [Streams of a border]
// A tensor of stage j is written on j's stream and read on the next stage's.
//  * Order. The producer's thread marks its stream right after the cell; the
//    reader waits for that mark. Marking later, from the reader's thread, would
//    wait for cells that the producer has queued since, and stages that should
//    overlap would take turns.
//  * Copies run on a pair of streams that belongs to one pair of devices. A
//    copy on a stream that computes would wait for the cells queued there, and
//    a stream shared by two borders would let one's copies wait for the
//    other's. Both ends are needed: a copy between devices is ordered with the
//    current streams of both.
//  * Lifetime. The allocator gives memory back to the stream it came from as
//    soon as the host drops it. Whoever uses a tensor on another stream
//    therefore tells the allocator: the copy for its source, the reader for
//    the copied tensor, which belongs to the copy stream.
// Gradients cross the same borders the other way round.

namespace {

// A stream of torch's pool, or the current one where a backend has no pool.
// Copies get high priority, from a pool that NCCL takes none of its streams
// from: behind an all-reduce a border would wait for all replicas.
c10::Stream pooled_stream(c10::Device device, bool for_copies) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  try {
    return guard.getStreamFromGlobalPool(device, for_copies);
  } catch (const c10::Error&) {
    return guard.getStream(device);
  }
}

// All stages compute on one stream, so borders need no mark.
bool use_several_streams(
    const std::vector<c10::Device>& devices,
    bool own_streams) {
  const auto streams = std::any_of(devices.begin(), devices.end(), has_streams);
  const bool one_device =
      std::all_of(devices.begin(), devices.end(), [&](const auto& device) {
        return device == devices.front();
      });
  return streams && (own_streams || !one_device);
}

void keep_storage(const at::Tensor& value, c10::Stream stream) {
  if (value.has_storage()) {
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(value.storage().data_ptr(), stream);
  }
}

}  // namespace

void keep_until(const at::Tensor& value, c10::Stream stream) {
  switch (value.layout()) {
    case at::kSparse:
      keep_storage(value._indices(), stream);
      keep_storage(value._values(), stream);
      break;
    case at::kSparseCsr:
    case at::kSparseBsr:
      keep_storage(value.crow_indices(), stream);
      keep_storage(value.col_indices(), stream);
      keep_storage(value.values(), stream);
      break;
    case at::kSparseCsc:
    case at::kSparseBsc:
      keep_storage(value.ccol_indices(), stream);
      keep_storage(value.row_indices(), stream);
      keep_storage(value.values(), stream);
      break;
    default:
      keep_storage(value, stream);
  }
}

PipelineStreams::PipelineStreams(
    std::vector<c10::Device> devices,
    bool own_streams)
    : devices_(std::move(devices)),
      several_streams_(use_several_streams(devices_, own_streams)),
      marks_(std::make_shared<MarkPool>()) {
  for (const c10::Device& device : devices_) {
    const bool own = own_streams && has_streams(device);
    own_streams_.push_back(
        own ? std::optional(pooled_stream(device, /*for_copies=*/false))
            : std::nullopt);
  }
}

void PipelineStreams::begin() {
  for (const auto& own : own_streams_) {
    if (own.has_value()) {
      marks_->record(current_stream(own->device())).hold_back(*own);
    }
  }
}

void PipelineStreams::join() {
  for (const auto& own : own_streams_) {
    if (own.has_value()) {
      marks_->record(*own).hold_back(current_stream(own->device()));
    }
  }
}

Mark PipelineStreams::mark(c10::Device device) {
  return has_streams(device) ? marks_->record(current_stream(device)) : Mark();
}

Mark PipelineStreams::mark_border(c10::Device device) {
  return several_streams_ ? mark(device) : Mark();
}

at::Tensor PipelineStreams::bring(
    const at::Tensor& value,
    c10::Device target,
    const Mark& ready) {
  if (!value.defined()) {
    return value;
  }
  const c10::Device source = value.device();
  if (source != target) {
    if (has_streams(source) && has_streams(target)) {
      return copy_between(value, target, ready);
    }
    if (source.is_meta() || target.is_meta()) {
      return value.to(target);
    }
    if (has_streams(source)) {
      return copy_to_host(value, ready);
    }
    return has_streams(target) ? copy_from_host(value, target)
                               : value.to(target);
  }
  if (!ready.empty() && ready.stream().device() == target) {
    const c10::Stream reader = current_stream(target);
    if (ready.stream() != reader) {
      ready.hold_back(reader);
      keep_until(value, reader);
    }
  }
  return value;
}

// Lets `stream` wait for what has written `value`.
void PipelineStreams::hold_back_source(
    const at::Tensor& value,
    const Mark& ready,
    c10::Stream stream) {
  ready.hold_back(stream);
  // A layer may return a tensor of another device than its stage's: that one
  // was written on the current stream there, which the mark does not cover.
  if (ready.empty() || ready.stream().device() != value.device()) {
    marks_->record(current_stream(value.device())).hold_back(stream);
  }
}

at::Tensor PipelineStreams::copy_between(
    const at::Tensor& value,
    c10::Device target,
    const Mark& ready) {
  const CopyStreams copy = copy_streams(value.device(), target);
  hold_back_source(value, ready, copy.source);
  at::Tensor result;
  {
    // Two guards: the devices may be of different types.
    const c10::MultiStreamGuard at_source(copy.source);
    const c10::MultiStreamGuard at_target(copy.target);
    result = value.to(target, /*non_blocking=*/true);
  }
  keep_until(value, copy.source);
  const c10::Stream reader = current_stream(target);
  if (copy.target != reader) {
    marks_->record(copy.target).hold_back(reader);
    keep_until(result, reader);
  }
  return result;
}

// The host reads the copy next, so the copy is waited for; work queued on other
// streams is not.
at::Tensor
PipelineStreams::copy_to_host(const at::Tensor& value, const Mark& ready) {
  const c10::Device host(c10::kCPU);
  const c10::Stream copy = copy_streams(value.device(), host).source;
  hold_back_source(value, ready, copy);
  const c10::MultiStreamGuard at_source(copy);
  return value.to(host, /*non_blocking=*/false);
}

// Pageable memory is read before the call returns, pinned memory is not: its
// owner may write to it as soon as the pipeline has returned, so wait for that.
at::Tensor
PipelineStreams::copy_from_host(const at::Tensor& value, c10::Device target) {
  const c10::Stream copy = copy_streams(c10::Device(c10::kCPU), target).target;
  at::Tensor result;
  {
    const c10::MultiStreamGuard at_target(copy);
    result = value.to(target, /*non_blocking=*/!value.is_pinned());
  }
  const c10::Stream reader = current_stream(target);
  if (copy != reader) {
    marks_->record(copy).hold_back(reader);
    keep_until(result, reader);
  }
  return result;
}

PipelineStreams::CopyStreams
PipelineStreams::copy_streams(c10::Device source, c10::Device target) {
  const bool pooled = use_copy_streams_;
  const auto stream_of = [pooled](c10::Device device) {
    if (!has_streams(device)) {  // c10 has a value for it
      return c10::Stream(c10::Stream::DEFAULT, device);
    }
    return pooled ? pooled_stream(device, /*for_copies=*/true)
                  : current_stream(device);
  };
  if (!pooled) {
    return {stream_of(source), stream_of(target)};
  }
  const std::lock_guard lock(mutex_);
  for (const CopyStreams& known : copies_) {
    if (known.source.device() == source && known.target.device() == target) {
      return known;
    }
  }
  copies_.push_back({stream_of(source), stream_of(target)});
  return copies_.back();
}

}  // namespace pipetransformer::device
