// A pretended accelerator for tests: device type "fake", four devices, streams
// and events. It computes at once, on the host, so its numbers are always
// right; but it keeps account of what a real device would be allowed to do, and
// reports
//   * memory read or written by a stream that nothing orders after the last
//     write (for writes: after the last reads),
//   * memory freed while another stream than the one it belongs to may use it,
//     unless the allocator was told (record_stream) or the owner waits for it,
//   * copies to the host, and from pinned memory, that nobody waits for.
// It counts as well how often a thread went to another device in a way that
// makes a context there (CUDA's setDevice, which its events call; not the
// unchecked way of a guard's end).
// "Ordered" is counted with vector clocks: every stream counts its operations
// and knows how far each other stream was when it last waited for it.
#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace at::native {
TORCH_API Tensor view(const Tensor& self, IntArrayRef size);
TORCH_API Tensor as_strided_tensorimpl(
    const Tensor& self,
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<int64_t> storage_offset);
}  // namespace at::native

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kPoolStreams = 32;
constexpr int64_t kHighPriority = 101;  // the first of that pool

using StreamKey = std::pair<int, int64_t>;  // device, id
using Clock = std::map<StreamKey, uint64_t>;

std::string text(const StreamKey& key) {
  return std::to_string(key.first) + "/" + std::to_string(key.second);
}

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, count] : other) {
    into[stream] = std::max(into[stream], count);
  }
}

uint64_t at_of(const Clock& clock, const StreamKey& stream) {
  const auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}

struct Memory {
  int64_t bytes = 0;
  StreamKey owner;
  StreamKey writer;
  uint64_t written = 0;
  Clock reads;
  Clock uses;  // reads and writes
  std::set<StreamKey> kept;
};

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point at;  // what was before it is done then
};

// What is known about all streams and all memory. One lock for everything.
struct World {
  std::mutex mutex;
  std::map<StreamKey, Clock> streams;
  Clock host;
  std::map<const void*, Memory> memory;
  std::set<const void*> pinned;  // of the host
  std::vector<std::string> violations;
  std::vector<std::string> copies;
  std::vector<std::string> waits;  // of the host
  std::string disabled;
  std::string skipped;  // a place in the code whose calls are left out
  std::map<std::string, int64_t>
      places;  // with how many waits and records each
  std::map<std::string, int64_t> counts;
  std::array<int64_t, kDevices> next_stream{};
  std::array<int64_t, kDevices> used{};  // bytes
  std::array<int64_t, kDevices> peaks{};
  std::array<int64_t, kDevices> limits{};  // 0: none
};

World& world() {
  static World* const it = new World();  // outlives every thread
  return *it;
}

thread_local int current_device = 0;
thread_local std::array<int64_t, kDevices> current_streams{};

StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(
      c10::Stream::UNSAFE,
      c10::Device(kType, static_cast<c10::DeviceIndex>(device)),
      id);
}

// --- the account (call with the lock held) ---------------------------------

// A new operation of a stream: after everything the host has waited for.
uint64_t tick(const StreamKey& stream) {
  Clock& clock = world().streams[stream];
  merge(clock, world().host);
  return ++clock[stream];
}

// Where in the extension the call comes from: the offsets of two callers; empty
// for calls of torch's own.
std::string place_in_extension() {
  std::array<void*, 24> frames{};
  const int depth = backtrace(frames.data(), static_cast<int>(frames.size()));
  Dl_info own{};
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&place_in_extension), &own);
  std::string found;
  for (int k = 0, taken = 0; k < depth && taken < 2; ++k) {
    const bool known =
        dladdr(frames[k], &info) != 0 && info.dli_fname != nullptr;
    if (known && info.dli_fbase == own.dli_fbase) {
      continue;
    }
    if (!known || std::strstr(info.dli_fname, "/_C.") == nullptr) {
      return taken == 0 ? "" : found;
    }
    const auto offset = reinterpret_cast<uintptr_t>(frames[k]) -
                        reinterpret_cast<uintptr_t>(info.dli_fbase);
    found += (taken++ == 0 ? "" : "/") + std::to_string(offset);
  }
  return found;
}

// Counts a call, and tells whether a test wants it to be left out.
bool omitted(const std::string& what) {
  ++world().counts[what];
  const std::string place = what + " " + place_in_extension();
  ++world().places[place];
  return world().disabled == what || world().skipped == place;
}

void report(const std::string& what) {
  world().violations.push_back(what);
}

void use(
    const void* pointer,
    const StreamKey& stream,
    bool write,
    const std::string& what) {
  const auto found = world().memory.find(pointer);
  if (found == world().memory.end()) {
    return;  // no bytes
  }
  Memory& memory = found->second;
  const Clock& clock = world().streams[stream];
  const uint64_t now = at_of(clock, stream);
  if (memory.written > at_of(clock, memory.writer)) {
    report(
        what + " on " + text(stream) + " uses memory that " +
        text(memory.writer) + " may still write");
  }
  if (write) {
    for (const auto& [reader, count] : memory.reads) {
      if (count > at_of(clock, reader)) {
        report(
            what + " on " + text(stream) + " writes memory that " +
            text(reader) + " may still read");
      }
    }
    memory.writer = stream;
    memory.written = now;
    memory.reads.clear();
  } else {
    memory.reads[stream] = now;
  }
  memory.uses[stream] = now;
}

// The host waits for a stream.
void wait_for(const StreamKey& stream, const std::string& why) {
  merge(world().host, world().streams[stream]);
  world().waits.push_back(why);
}

// --- memory ----------------------------------------------------------------

void release(void* pointer) {
  World& all = world();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.memory.find(pointer);
    const Memory& memory = found->second;
    const Clock& owner = all.streams[memory.owner];
    for (const auto& [stream, count] : memory.uses) {
      const bool waited = count <= at_of(owner, stream) ||
                          count <= at_of(all.host, stream) ||
                          memory.kept.count(stream) > 0;
      if (stream != memory.owner && !waited) {
        report(
            "memory of " + text(memory.owner) + " is freed while " +
            text(stream) + " may use it");
      }
    }
    all.used[memory.owner.first] -= memory.bytes;
    all.memory.erase(found);
  }
  std::free(pointer);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(
        kType, static_cast<c10::DeviceIndex>(current_device));
    if (bytes == 0) {
      return {nullptr, device};
    }
    Memory memory;
    memory.owner = {current_device, current_streams[current_device]};
    memory.bytes = static_cast<int64_t>(bytes);
    const std::lock_guard lock(world().mutex);
    int64_t& used = world().used[current_device];
    const int64_t limit = world().limits[current_device];
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        limit == 0 || used + memory.bytes <= limit,
        "fake out of memory. Tried to allocate ",
        bytes,
        " bytes where ",
        used,
        " of ",
        limit,
        " are in use");
    void* pointer = std::malloc(bytes);
    TORCH_CHECK(pointer != nullptr, "no memory on the host");
    used += memory.bytes;
    world().peaks[current_device] =
        std::max(world().peaks[current_device], used);
    world().memory[pointer] = std::move(memory);
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};

Allocator allocator;

// --- streams and events ----------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(current_device)};
  }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0 && device.index() != current_device) {
      const std::lock_guard lock(world().mutex);
      ++world().counts["device " + std::to_string(device.index())];
    }
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.index() < 0 ? current_device : device.index();
    return stream_of(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index(), 0);
  }
  c10::Stream
  getStreamFromGlobalPool(c10::Device device, bool high) const override {
    const std::lock_guard lock(world().mutex);
    const int64_t next = world().next_stream[device.index()]++;
    const int64_t first = high ? kHighPriority : 1;
    return stream_of(device.index(), next % kPoolStreams + first);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return previous;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex device,
      const c10::EventFlag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "event of device ",
        device,
        " recorded on device ",
        stream.device_index());
    if (*event == nullptr) {
      *event = new Event();
    }
    there_and_back(stream.device(), [&] {
      auto* const recorded = static_cast<Event*>(*event);
      recorded->clock = world().streams[key_of(stream)];
      recorded->at = std::chrono::steady_clock::now();
      ++world().counts["record"];
    });
  }
  void block(void* event, const c10::Stream& stream) const override {
    there_and_back(stream.device(), [&] {
      if (!omitted("wait")) {
        merge(
            world().streams[key_of(stream)], static_cast<Event*>(event)->clock);
      }
    });
  }
  // As CUDA's events do.
  template <typename Body>
  void there_and_back(c10::Device device, const Body& body) const {
    const c10::Device before = getDevice();
    setDevice(device);
    {
      const std::lock_guard lock(world().mutex);
      body();
    }
    setDevice(before);
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void
  destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex)
      const override {
    const std::chrono::duration<double, std::milli> elapsed =
        static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
    return elapsed.count();
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const std::lock_guard lock(world().mutex);
    wait_for(key_of(stream), "stream");
  }
  void synchronizeEvent(void* event) const override {
    const std::lock_guard lock(world().mutex);
    merge(world().host, static_cast<Event*>(event)->clock);
    world().waits.emplace_back("event");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    const std::lock_guard lock(world().mutex);
    for (const auto& [stream, clock] : world().streams) {
      merge(world().host, clock);
    }
    world().waits.emplace_back("device");
  }
  void recordDataPtrOnStream(
      const c10::DataPtr& pointer,
      const c10::Stream& stream) const override {
    const std::lock_guard lock(world().mutex);
    const auto found = world().memory.find(pointer.get());
    if (found != world().memory.end() && !omitted("keep")) {
      found->second.kept.insert(key_of(stream));
    }
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A generator with a seed and an offset, as CUDA's; values come from hashing.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(
            c10::Device(kType, index),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    return seed_;
  }
  void set_state(const c10::TensorImpl&) override {
    TORCH_CHECK(false, "no state can be set");
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const std::array<uint64_t, 2> words{seed_, offset_};
    at::Tensor state = at::detail::empty_cpu(
        {sizeof(words)},
        at::kByte,
        std::nullopt,
        std::nullopt,
        std::nullopt,
        std::nullopt);
    std::memcpy(state.data_ptr(), words.data(), sizeof(words));
    return state.getIntrusivePtr();
  }
  void
  graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>&) override {}
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  c10::DeviceType device_type() const {
    return kType;
  }
  bool next_bit() {
    uint64_t word = seed_ * 0x9E3779B97F4A7C15ULL + ++offset_;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
    return ((word ^ (word >> 31)) & 1) != 0;
  }

 private:
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = 0;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* const all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int k = 0; k < kDevices; ++k) {
      made->push_back(
          at::make_generator<Generator>(static_cast<c10::DeviceIndex>(k)));
    }
    return made;
  }();
  return all->at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator&
  getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index);
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard lock(world().mutex);
    return world().pinned.count(data) > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
};

// --- kernels ---------------------------------------------------------------

StreamKey current_stream(c10::Device device) {
  return {device.index(), current_streams[device.index()]};
}

const void* memory_of(const at::Tensor& tensor) {
  return tensor.storage().data();
}

// The same memory as a CPU tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::from_blob(
      static_cast<char*>(tensor.storage().mutable_data()) +
          tensor.storage_offset() * tensor.itemsize(),
      tensor.sizes(),
      tensor.strides(),
      at::TensorOptions(tensor.dtype()));
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(
      size,
      &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(
      size,
      stride,
      &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// As a CUDA copy: between devices on the source's current stream, with a
// barrier against the target's before and after; with the host on the device's.
at::Tensor
copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const bool from = self.device().type() == kType;
  const bool to = target.device().type() == kType;
  {
    const std::lock_guard lock(world().mutex);
    const StreamKey reads =
        from ? current_stream(self.device()) : current_stream(target.device());
    const StreamKey other = to ? current_stream(target.device()) : reads;
    auto& streams = world().streams;
    merge(streams[reads], streams[other]);
    merge(streams[other], streams[reads]);
    tick(reads);
    if (from) {
      use(memory_of(self), reads, false, "copy");
    }
    if (to) {
      use(memory_of(target), reads, true, "copy");
    }
    merge(streams[other], streams[reads]);
    if (!from || !to) {
      if (!non_blocking) {
        wait_for(reads, from ? "copy to the host" : "copy from the host");
      } else if (from) {
        report("a copy to the host is not waited for");
      } else if (world().pinned.count(memory_of(self)) > 0) {
        report("a copy from pinned memory is not waited for");
      }
    }
    world().copies.push_back(
        (from ? text(reads) : "host") + " -> " + (to ? text(other) : "host"));
  }
  const at::AutoDispatchBelowAutograd guard;
  (to ? on_cpu(target) : target).copy_(from ? on_cpu(self) : self);
  return target;
}

// Fused dropout, as CUDA's: takes no generator, draws from the default one.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input,
    double p,
    std::optional<bool> /*train*/) {
  TORCH_CHECK(
      p == 0.5 || p == 0, "the pretended dropout knows p = 0.5 and 0 only");
  at::Tensor mask = at::ones(input.sizes(), at::kBool);
  if (p > 0) {
    at::Generator shared = default_generator(input.device().index());
    auto* generator = static_cast<Generator*>(shared.unsafeGetGeneratorImpl());
    const std::lock_guard lock(shared.mutex());
    for (int64_t k = 0; k < mask.numel(); ++k) {
      mask.data_ptr<bool>()[k] = generator->next_bit();
    }
  }
  mask = mask.to(input.device());
  return {input * mask / (1 - p), mask};
}

// Fused attention, as CUDA's: an operation that calls another one through the
// dispatcher, and both are said to draw. The inner one returns the queries
// where it drew 1, and 0 elsewhere; nothing is drawn where dropout_p is 0.
c10::IValue argument(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack,
    const std::string& name) {
  const auto index = op.schema().argumentIndexWithName(name);
  TORCH_CHECK(index, op.schema().name(), ": no argument ", name);
  return stack[stack.size() - op.schema().arguments().size() + *index];
}

void return_first(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack,
    const at::Tensor& first) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(first);
  for (size_t k = 1; k < op.schema().returns().size(); ++k) {
    if (op.schema().returns()[k].type()->kind() == c10::TypeKind::TensorType) {
      stack->emplace_back(at::empty({0}, first.options()));
    } else {
      stack->emplace_back(int64_t{0});
    }
  }
}

void attention_inner(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::Tensor query = argument(op, *stack, "query").toTensor();
  const double rate = argument(op, *stack, "dropout_p").toDouble();
  return_first(
      op,
      stack,
      std::get<0>(::native_dropout(query, rate > 0 ? 0.5 : 0, true)));
}

void attention_outer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto inner = c10::Dispatcher::singleton().findSchemaOrThrow(
      "aten::_flash_attention_forward", "");
  torch::jit::Stack arguments;
  for (const c10::Argument& one : inner.schema().arguments()) {
    if (op.schema().argumentIndexWithName(one.name())) {
      arguments.push_back(argument(op, *stack, one.name()));
    } else if (one.type()->kind() == c10::TypeKind::SymIntType) {
      arguments.emplace_back(int64_t{1});
    } else {
      arguments.push_back(one.default_value().value_or(c10::IValue()));
    }
  }
  inner.callBoxed(arguments);
  return_first(op, stack, arguments.front().toTensor());
}

// Of another library: it draws from the default generator as well.
at::Tensor foreign_noise(const at::Tensor& like) {
  return std::get<0>(::native_dropout(at::ones_like(like), 0.5, true));
}

TORCH_LIBRARY(foreign, m) {
  m.def("noise(Tensor like) -> Tensor");
}

TORCH_LIBRARY_IMPL(foreign, PrivateUse1, m) {
  m.impl("noise", &foreign_noise);
}

// Everything else: on the current stream, computed by the CPU's kernel on the
// same memory.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        stack_(stack),
        first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    for (size_t k = 0; k < arguments.size(); ++k) {
      c10::IValue& value = (*stack_)[first_ + k];
      originals_.push_back(value);
      const auto* alias = arguments[k].alias_info();
      value = to_cpu(value, alias != nullptr && alias->isWrite());
    }
    TORCH_CHECK(device_.has_value(), "no device for ", op_.schema().name());
    account();
    {
      const at::AutoDispatchBelowAutograd guard;
      op_.callBoxed(stack_);
    }
    bring_results();
  }

 private:
  at::Tensor alias(const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || tensor.device().type() != kType) {
      return tensor;
    }
    TORCH_CHECK(
        !device_.has_value() || *device_ == tensor.device(),
        op_.schema().name(),
        ": tensors on two devices");
    device_ = tensor.device();
    used_.emplace_back(memory_of(tensor), write);
    if (write && tensor.numel() == 0) {
      // The operation may give it a size.
      empty_.emplace_back(
          tensor, at::empty({0}, at::TensorOptions(tensor.dtype())));
      return empty_.back().second;
    }
    return on_cpu(tensor);
  }

  c10::IValue to_cpu(const c10::IValue& value, bool write) {
    if (value.isTensor()) {
      return alias(value.toTensor(), write);
    }
    if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(alias(tensor, write));
      }
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor :
           value.toOptionalTensorVector()) {
        tensors.push_back(
            tensor.has_value() ? std::optional(alias(*tensor, write))
                               : std::nullopt);
      }
      return tensors;
    }
    if (value.isDevice()) {
      device_ = value.toDevice();
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  void account() {
    const std::lock_guard lock(world().mutex);
    stream_ = ::current_stream(*device_);
    tick(stream_);
    for (const bool write : {false, true}) {
      for (const auto& [pointer, writes] : used_) {
        if (writes == write) {
          use(pointer, stream_, write, op_.schema().name());
        }
      }
    }
    for (const auto& result : op_.schema().returns()) {
      if (result.type()->kind() != c10::TypeKind::TensorType &&
          result.type()->kind() != c10::TypeKind::ListType) {
        wait_for(stream_, op_.schema().name());  // as .item()
      }
    }
  }

  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    const at::Tensor tensor = at::empty_strided(
        result.sizes(), result.strides(), result.options().device(*device_));
    {
      const std::lock_guard lock(world().mutex);
      use(memory_of(tensor), stream_, true, op_.schema().name());
    }
    on_cpu(tensor).copy_(result);
    return tensor;
  }

  // The view of a tensor that an operation gave of its memory.
  static at::Tensor view_of(const at::Tensor& base, const at::Tensor& part) {
    const auto* first = static_cast<const char*>(on_cpu(base).const_data_ptr());
    const auto* own = static_cast<const char*>(part.const_data_ptr());
    return at::native::as_strided_tensorimpl(
        base,
        part.sizes(),
        part.strides(),
        base.storage_offset() + (own - first) / base.itemsize());
  }

  // The argument that a result of the schema is, or is a view of.
  std::optional<c10::IValue> argument_of(const c10::Argument& result) const {
    const auto& arguments = op_.schema().arguments();
    for (size_t k = 0; k < arguments.size(); ++k) {
      if (result.alias_info() != nullptr &&
          arguments[k].alias_info() != nullptr &&
          *result.alias_info() == *arguments[k].alias_info()) {
        return originals_[k];
      }
    }
    return std::nullopt;
  }

  void bring_results() {
    const at::AutoDispatchBelowAutograd guard;
    for (const auto& [original, sized] : empty_) {
      if (sized.numel() > 0) {
        const at::Tensor made = to_device(sized);
        auto* const tensor = original.unsafeGetTensorImpl();
        tensor->set_storage_keep_dtype(made.storage());
        tensor->set_sizes_and_strides(made.sizes(), made.strides());
      }
    }
    const auto& returns = op_.schema().returns();
    for (size_t k = 0; k < returns.size(); ++k) {
      c10::IValue& value = (*stack_)[first_ + k];
      if (const auto argument = argument_of(returns[k])) {
        const bool writes = returns[k].alias_info()->isWrite();
        value = writes || !value.isTensor()
                    ? *argument
                    : view_of(argument->toTensor(), value.toTensor());
      } else if (value.isTensor()) {
        value = to_device(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorVector()) {
          tensors.push_back(to_device(tensor));
        }
        value = tensors;
      }
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* const stack_;
  const size_t first_;
  std::vector<c10::IValue> originals_;
  std::vector<std::pair<const void*, bool>> used_;
  std::vector<std::pair<at::Tensor, at::Tensor>> empty_;  // on device, on host
  std::optional<c10::Device> device_;
  StreamKey stream_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Autocast changes nothing here.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_copy_from", &copy_from);
  m.impl("native_dropout", &native_dropout);
  m.impl(
      "_scaled_dot_product_flash_attention",
      torch::CppFunction::makeFromBoxedFunction<&attention_outer>());
  m.impl(
      "_flash_attention_forward",
      torch::CppFunction::makeFromBoxedFunction<&attention_inner>());
}

// --- what tests ask --------------------------------------------------------

std::vector<std::string> take(std::vector<std::string>& list) {
  const std::lock_guard lock(world().mutex);
  return std::exchange(list, {});
}

TORCH_LIBRARY(fake_device, m) {
  m.def("violations() -> str[]", [] { return take(world().violations); });
  m.def("copies() -> str[]", [] { return take(world().copies); });
  m.def("host_waits() -> str[]", [] { return take(world().waits); });
  m.def("disable(str what) -> ()", [](std::string what) {
    const std::lock_guard lock(world().mutex);
    world().disabled = std::move(what);
  });
  m.def("skip(str place) -> ()", [](std::string place) {
    const std::lock_guard lock(world().mutex);
    world().skipped = std::move(place);
  });
  m.def("forget_places() -> ()", [] {
    const std::lock_guard lock(world().mutex);
    world().places.clear();
  });
  m.def("places() -> str[]", [] {
    const std::lock_guard lock(world().mutex);
    std::vector<std::string> found;
    for (const auto& [place, count] : world().places) {
      found.push_back(place);
    }
    return found;
  });
  m.def("count(str what) -> int", [](std::string what) {
    const std::lock_guard lock(world().mutex);
    return world().counts[what];
  });
  m.def("set_stream(int device, int stream) -> int", [](int64_t d, int64_t s) {
    return std::exchange(current_streams.at(d), s);
  });
  // Operations of `other` that a stream is ordered after; its own: all so far.
  m.def(
      "knows(int device, int stream, int other_device, int other) -> int",
      [](int64_t d, int64_t s, int64_t other_d, int64_t other) {
        const std::lock_guard lock(world().mutex);
        const StreamKey key{static_cast<int>(other_d), other};
        return static_cast<int64_t>(
            at_of(world().streams[{static_cast<int>(d), s}], key));
      });
  // Whether the host has waited for the last write to a tensor.
  m.def("is_known(Tensor value) -> bool", [](const at::Tensor& value) {
    const std::lock_guard lock(world().mutex);
    const Memory& memory = world().memory.at(memory_of(value));
    return memory.written <= at_of(world().host, memory.writer);
  });
  m.def("current_stream(int device) -> int", [](int64_t device) {
    return current_streams.at(device);
  });
  m.def("pin(Tensor host) -> ()", [](const at::Tensor& host) {
    at::globalContext().lazyInitDevice(kType);  // or nothing counts as pinned
    const std::lock_guard lock(world().mutex);
    world().pinned.insert(memory_of(host));
  });
  m.def(
      "limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
        const std::lock_guard lock(world().mutex);
        world().limits.at(device) = bytes;
      });
  // Bytes in use, and the most that were since the last call.
  m.def("memory(int device) -> int[]", [](int64_t device) {
    const std::lock_guard lock(world().mutex);
    const int64_t used = world().used.at(device);
    return std::vector<int64_t>{
        used, std::exchange(world().peaks.at(device), used)};
  });
  m.def("num_blocks() -> int", [] {
    const std::lock_guard lock(world().mutex);
    return static_cast<int64_t>(world().memory.size());
  });
  m.def("generator_position(int device) -> int[]", [](int64_t device) {
    const at::Generator& shared =
        default_generator(static_cast<c10::DeviceIndex>(device));
    return std::vector<int64_t>{
        static_cast<int64_t>(shared.current_seed()),
        static_cast<int64_t>(shared.get_offset())};
  });
  m.def(
      "set_generator_position(int device, int seed, int offset) -> ()",
      [](int64_t device, int64_t seed, int64_t offset) {
        at::Generator shared =
            default_generator(static_cast<c10::DeviceIndex>(device));
        shared.set_current_seed(static_cast<uint64_t>(seed));
        shared.set_offset(static_cast<uint64_t>(offset));
      });
  m.def("synchronize() -> ()", [] { Guard().synchronizeDevice(0); });
}

const bool registered = [] {
  c10::register_privateuse1_backend("fake");
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
