// A backend whose collectives end on a device, as NCCL's do: a call queues the
// work and completes its future at once; the work itself ends when a test says
// so, or with abort(). It refuses what is on the host.
#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

using Works = c10::intrusive_ptr<c10d::Work>;

class QueuedWork : public c10d::Work {
 public:
  QueuedWork(
      std::shared_ptr<std::atomic<bool>> ended,
      std::shared_ptr<const std::string> error,
      c10d::OpType type)
      : c10d::Work(-1, type),
        ended_(std::move(ended)),
        error_(std::move(error)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    finish();
  }
  bool isCompleted() override {
    return *ended_;
  }
  std::exception_ptr exception() const override {
    return *ended_ && !error_->empty()
               ? std::make_exception_ptr(std::runtime_error(*error_))
               : nullptr;
  }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const std::shared_ptr<std::atomic<bool>> ended_;
  const std::shared_ptr<const std::string> error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class DeviceBackend : public c10d::Backend {
 public:
  DeviceBackend(int rank, int size, std::string refuses_abort)
      : c10d::Backend(rank, size), refuses_abort_(std::move(refuses_abort)) {}

  const std::string getBackendName() const override {
    return "device";
  }
  Works broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& /*options*/) override {
    return queue(tensors, c10d::OpType::BROADCAST);
  }
  Works allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& /*options*/) override {
    return queue(tensors, c10d::OpType::ALLREDUCE);
  }
  void abort() override {
    ++aborts;
    end();
    TORCH_CHECK(refuses_abort_.empty(), refuses_abort_);
  }

  // Ends what has been queued so far, with an error as a peer's lost connection
  // leaves it, or with none.
  void end(const std::string& error = "") {
    *std::exchange(error_, std::make_shared<std::string>()) = error;
    *std::exchange(ended_, std::make_shared<std::atomic<bool>>(false)) = true;
  }

  std::atomic<int> aborts{0};
  std::atomic<int> calls{0};

 private:
  Works queue(const std::vector<at::Tensor>& tensors, c10d::OpType type) {
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(!tensor.is_cpu(), "device: expected no tensors on the host");
    }
    ++calls;
    return c10::make_intrusive<QueuedWork>(ended_, error_, type);
  }

  const std::string refuses_abort_;
  std::shared_ptr<std::atomic<bool>> ended_ =
      std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<std::string> error_ = std::make_shared<std::string>();
};

// Carries what is on devices through the host, with another backend, and is
// done when a call returns: what an engine may train with.
class HostedBackend : public c10d::Backend {
 public:
  explicit HostedBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "hosted";
  }
  Works broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override {
    return carry(tensors, c10d::OpType::BROADCAST, [&](auto& on_host) {
      return inner_->broadcast(on_host, options);
    });
  }
  Works allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override {
    return carry(tensors, c10d::OpType::ALLREDUCE, [&](auto& on_host) {
      return inner_->allreduce(on_host, options);
    });
  }
  void abort() override {
    aborted_ = true;
  }

 private:
  Works carry(
      std::vector<at::Tensor>& tensors,
      c10d::OpType type,
      const std::function<Works(std::vector<at::Tensor>&)>& start) {
    const auto on_host = std::make_shared<std::vector<at::Tensor>>();
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(!tensor.is_cpu(), "device: expected no tensors on the host");
      on_host->push_back(tensor.detach().to(at::kCPU));
    }
    const Works work = start(*on_host);
    while (!work->isCompleted()) {
      if (aborted_) {
        // The other backend goes on with what it was given.
        static_cast<void>(new auto(on_host));
        C10_THROW_ERROR(DistBackendError, "the communicator was aborted");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    try {
      work->wait();
    } catch (const std::exception& error) {  // as NCCL reports it
      C10_THROW_ERROR(DistBackendError, error.what());
    }
    for (size_t k = 0; k < tensors.size(); ++k) {
      tensors[k].detach().copy_((*on_host)[k]);
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors));
    return c10d::Work::create_from_future(future);
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
  std::atomic<bool> aborted_{false};
};

}  // namespace

PYBIND11_MODULE(device_backend, m) {
  py::module_::import("torch.distributed");
  py::class_<HostedBackend, c10d::Backend, c10::intrusive_ptr<HostedBackend>>(
      m, "HostedBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
  py::class_<DeviceBackend, c10d::Backend, c10::intrusive_ptr<DeviceBackend>>(
      m, "DeviceBackend")
      .def(
          py::init<int, int, std::string>(),
          py::arg("rank"),
          py::arg("size"),
          py::arg("refuses_abort") = "")
      .def("end", &DeviceBackend::end, py::arg("error") = "")
      .def_property_readonly(
          "aborts",
          [](const DeviceBackend& self) { return self.aborts.load(); })
      .def_property_readonly(
          "calls", [](const DeviceBackend& self) { return self.calls.load(); });
}
