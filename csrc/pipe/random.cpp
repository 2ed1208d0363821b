#include "pipe/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "core/hash.h"

namespace pipetransformer::pipe {

// Note [Supplying the generator]
// Operations that draw take an optional generator; layers pass none and get the
// process-wide default. We register one boxed kernel for all of them under a
// dispatch key that is otherwise unused, and include that key on a thread for
// as long as it runs a cell. The kernel puts the thread's generator where none
// was given and calls on below the key. All other operations fall through at no
// cost. The generator is seeded at the first draw of each layer only.
//
// That an operation takes a generator does not mean that it draws (rrelu in
// eval mode, attention without dropout, no elements). So until a call is known
// to draw, the generator is compared before and after each such operation.
//
// Some kernels of accelerators (fused dropout, fused attention) take no
// generator: they draw from their device's default one. For these the default
// one is lent: under a lock it gets our seed and offset for the call, and has
// its own back after it. Such a kernel may call others of its kind (fused
// attention does); they draw from what their thread has been lent already. Work
// that draws from the same default generator on a thread without a scope at
// that moment is not kept out. Nor are kernels of other libraries: a cell that
// is recomputed looks whether one has drawn (pipe_call.cpp).
//
// torch.utils.checkpoint saves the state of the default generators and puts it
// back for its recomputation, which runs outside the scope: it would draw other
// numbers than the forward. So a draw below its hooks is refused; its reentrant
// form has no hooks, and is not noticed.

namespace {

constexpr c10::DispatchKey kDrawKey =
    c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local DrawScope::State* draws_of_thread = nullptr;

IsCheckpoint is_checkpoint = nullptr;  // set once, before any scope

// Fallback scopes share the default generator: one at a time.
std::recursive_mutex& fallback_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

// Not at::equal: no operation, which the caller's modes would see.
bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Tells the seed that something draws, if the generator moves.
class DrawWatch {
 public:
  DrawWatch(CallSeed& seed, at::Generator generator)
      : seed_(seed), generator_(std::move(generator)) {
    if (!seed_.drawn()) {
      before_ = state_of(generator_);
    }
  }
  void look() {
    if (before_.defined() && !same_state(before_, state_of(generator_))) {
      seed_.note_draw();
    }
  }

 private:
  CallSeed& seed_;
  const at::Generator generator_;
  at::Tensor before_;
};

// Refuses a draw that torch.utils.checkpoint would not repeat.
class RepeatedDraw {
 public:
  explicit RepeatedDraw(at::Generator generator)
      : generator_(std::move(generator)) {
    const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
    if (hooks && is_checkpoint != nullptr && is_checkpoint(hooks->first)) {
      before_ = state_of(generator_);
    }
  }
  void look() const {
    if (before_.defined() && !same_state(before_, state_of(generator_))) {
      throw std::runtime_error(
          "pipe: expected no random draws within torch.utils.checkpoint, which "
          "would draw other numbers in backward, got some; recompute with the "
          "pipeline's own checkpoint (of the engine: PipeConfig.checkpoint)");
    }
  }

 private:
  const at::Generator generator_;
  at::Tensor before_;
};

at::Generator make_generator(c10::Device device) {
  if (device.is_cpu()) {
    return at::detail::createCPUGenerator();
  }
  return at::globalContext()
      .getAcceleratorHooksInterface(device.type())
      .getNewGenerator(device.index());
}

}  // namespace

struct DrawScope::State {
  DrawPosition position;
  int64_t layer = 0;
  std::unordered_map<c10::Device, std::pair<at::Generator, int64_t>> generators;
  std::optional<c10::impl::IncludeDispatchKeyGuard> include;
  // Fallback only.
  std::unique_lock<std::recursive_mutex> alone;
  at::Tensor default_state;
  at::Tensor seeded_state;  // undefined once the call is known to draw
  bool moved = false;

  uint64_t key() const {
    const std::array<uint64_t, 4> words{
        position.seed->claim(),
        static_cast<uint64_t>(position.step),
        static_cast<uint64_t>(position.microbatch),
        static_cast<uint64_t>(layer)};
    return core::hash_bytes(words.data(), sizeof(words));
  }

  at::Generator generator(c10::Device device) {
    auto found = generators.find(device);
    if (found == generators.end()) {
      found = generators.try_emplace(device, make_generator(device), layer - 1)
                  .first;
    }
    auto& [generator, seeded_for] = found->second;
    if (seeded_for != layer) {
      const uint64_t seed = key();
      const std::lock_guard lock(generator.mutex());
      generator.set_current_seed(seed);
      seeded_for = layer;
    }
    return generator;
  }

  void seed_default() {
    at::Generator shared = at::detail::getDefaultCPUGenerator();
    const uint64_t seed = key();
    const std::lock_guard lock(shared.mutex());
    shared.set_current_seed(seed);
    seeded_state =
        position.seed->drawn() ? at::Tensor() : at::Tensor(shared.get_state());
  }

  // Before the default generator is seeded anew or put back.
  void look_at_default() {
    moved = moved ||
            (seeded_state.defined() &&
             !same_state(
                 seeded_state, state_of(at::detail::getDefaultCPUGenerator())));
  }
};

namespace {

bool is_generator(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

// The device an operation draws on: its first tensor's, else the one it names.
c10::Device device_of_call(const torch::jit::Stack& stack, std::size_t first) {
  for (std::size_t k = first; k < stack.size(); ++k) {
    if (stack[k].isTensor() && stack[k].toTensor().defined()) {
      return stack[k].toTensor().device();
    }
  }
  for (std::size_t k = first; k < stack.size(); ++k) {
    if (stack[k].isDevice()) {
      return stack[k].toDevice();
    }
  }
  return c10::kCPU;
}

void supply_generator(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack->size() - arguments.size();
  std::optional<DrawWatch> watch;
  std::optional<RepeatedDraw> repeated;
  if (draws_of_thread != nullptr) {
    for (std::size_t k = 0; k < arguments.size(); ++k) {
      c10::IValue& value = (*stack)[first + k];
      if (value.isNone() && is_generator(arguments[k])) {
        const c10::Device device = device_of_call(*stack, first);
        if (!device.is_meta()) {
          value = draws_of_thread->generator(device);
          watch.emplace(*draws_of_thread->position.seed, value.toGenerator());
          repeated.emplace(value.toGenerator());
        }
      }
    }
  }
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kDrawKey);
  op.redispatchBoxed(keys & below, stack);
  if (watch) {
    watch->look();
    repeated->look();
  }
}

// The default generator of a device, with another one's seed and offset while
// it lives; the other one then continues where the default one has got to.
class LentGenerator {
 public:
  explicit LentGenerator(at::Generator mine)
      : alone_(mutex_of(mine.device())),
        mine_(std::move(mine)),
        shared_(at::globalContext().defaultGenerator(mine_.device())),
        seed_(shared_.current_seed()),
        offset_(shared_.get_offset()),
        outer_(std::exchange(lent_, mine_.device())) {
    put(shared_, mine_.current_seed(), mine_.get_offset());
  }
  ~LentGenerator() {
    mine_.set_offset(shared_.get_offset());
    put(shared_, seed_, offset_);
    lent_ = outer_;
  }
  LentGenerator(const LentGenerator&) = delete;
  LentGenerator& operator=(const LentGenerator&) = delete;

  // Whether this thread has been lent the generator of a device.
  static bool is_lent(c10::Device device) {
    return lent_ == device;
  }

  // The default generator's own offset, while nothing of it is lent.
  static uint64_t own_offset(c10::Device device) {
    const std::lock_guard alone(mutex_of(device));
    at::Generator shared = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(shared.mutex());
    return shared.get_offset();
  }

 private:
  // One of each device, or kernels on different devices would take turns.
  static std::mutex& mutex_of(c10::Device device) {
    static std::array<std::mutex, 128> mutexes;  // an index is at most 127
    return mutexes.at(static_cast<std::size_t>(device.index()));
  }
  static void put(at::Generator& generator, uint64_t seed, uint64_t offset) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
    generator.set_offset(offset);
  }

  static thread_local std::optional<c10::Device> lent_;

  const std::lock_guard<std::mutex> alone_;
  at::Generator mine_;
  at::Generator shared_;
  const uint64_t seed_;
  const uint64_t offset_;
  const std::optional<c10::Device> outer_;
};

thread_local std::optional<c10::Device> LentGenerator::lent_;

void lend_default_generator(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kDrawKey);
  const std::size_t first = stack->size() - op.schema().arguments().size();
  const c10::Device device = device_of_call(*stack, first);
  if (draws_of_thread == nullptr || device.is_cpu() || device.is_meta() ||
      LentGenerator::is_lent(device)) {
    op.redispatchBoxed(keys & below, stack);
    return;
  }
  const at::Generator mine = draws_of_thread->generator(device);
  DrawWatch watch(*draws_of_thread->position.seed, mine);
  const RepeatedDraw repeated(mine);
  {
    const LentGenerator lent(mine);
    op.redispatchBoxed(keys & below, stack);
  }
  watch.look();
  repeated.look();
}

// A kernel of an accelerator that draws from the default generator, itself or
// by other such kernels. Choosing among kernels is marked as drawing and is
// not.
bool draws_without_generator(const c10::OperatorHandle& op) {
  const auto has_kernel = [&op](c10::DispatchKey key) {
    return op.hasKernelForDispatchKey(key);
  };
  return op.hasTag(at::Tag::nondeterministic_seeded) &&
         op.operator_name().name != "aten::_fused_sdp_choice" &&
         (has_kernel(c10::DispatchKey::CUDA) ||
          has_kernel(c10::DispatchKey::XPU) ||
          has_kernel(c10::DispatchKey::PrivateUse1));
}

bool takes_generator(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (is_generator(argument)) {
      return true;
    }
  }
  return false;
}

// The registrations; they live as long as the process.
std::vector<torch::Library> register_kernels() {
  std::vector<torch::Library> libraries;
  libraries.emplace_back(
      torch::Library::IMPL, "_", kDrawKey, __FILE__, __LINE__);
  libraries.back().fallback(torch::CppFunction::makeFallthrough());
  libraries.emplace_back(
      torch::Library::IMPL, "aten", kDrawKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || op->operator_name().getNamespace() != "aten") {
      continue;
    }
    const bool supply = takes_generator(op->schema());
    if (!supply && !draws_without_generator(*op)) {
      continue;
    }
    const std::string full = name.overload_name.empty()
                                 ? name.name
                                 : name.name + "." + name.overload_name;
    libraries.back().impl(
        full.c_str(),
        supply ? torch::CppFunction::makeFromBoxedFunction<&supply_generator>()
               : torch::CppFunction::makeFromBoxedFunction<
                     &lend_default_generator>());
  }
  return libraries;
}

void warn_of_fallback(const char* reason) {
  TORCH_WARN(
      "pipe: keyed draws are not available with this torch, cells will run one "
      "by one: ",
      reason);
}

at::Tensor probe_draw(uint64_t seed) {
  const DrawScope scope(
      {std::make_shared<CallSeed>(seed), 0, 0}, 0, /*keyed=*/true);
  return at::rand({8}, at::TensorOptions(at::kFloat).device(at::kCPU));
}

constexpr int kProbes = 3;

// None after an exception. What is in force on the thread (dispatch modes of
// Python, transforms of torch.func) must neither see the draws nor decide; nor
// what other threads draw meanwhile from the default generator.
std::optional<bool> probe(bool warns) {
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::default_included_set, c10::default_excluded_set);
  try {
    static const std::vector<torch::Library> kLibraries = register_kernels();
    const at::Tensor first = probe_draw(1);
    const bool works =
        at::equal(first, probe_draw(1)) && !at::equal(first, probe_draw(2));
    if (!works && warns) {
      warn_of_fallback("they are not repeated by their keys");
    }
    return works;
  } catch (const std::exception& error) {
    if (warns) {
      const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
      warn_of_fallback(
          of_torch != nullptr ? of_torch->what_without_backtrace()
                              : error.what());
    }
  }
  return std::nullopt;
}

}  // namespace

bool keyed_draws_work() {
  static std::mutex mutex;
  static std::optional<bool> works;
  static int tries = 0;  // an exception may have been of the moment
  const std::lock_guard lock(mutex);
  if (!works && tries < kProbes) {
    works = probe(/*warns=*/tries == 0);
    ++tries;
  }
  return works.value_or(false);
}

std::optional<uint64_t> default_offset(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) {
    return std::nullopt;
  }
  try {
    return LentGenerator::own_offset(device);
  } catch (const c10::Error&) {  // while a graph is captured
    return std::nullopt;
  }
}

DrawScope::DrawScope(const DrawPosition& position, int64_t layer, bool keyed)
    : state_(std::make_unique<State>()), previous_(nullptr) {
  state_->position = position;
  state_->layer = layer;
  if (keyed) {
    state_->include.emplace(kDrawKey);
  } else {
    state_->alone = std::unique_lock(fallback_mutex());
    state_->default_state = at::detail::getDefaultCPUGenerator().get_state();
    state_->seed_default();
  }
  previous_ = std::exchange(draws_of_thread, state_.get());
}

DrawScope::~DrawScope() {
  draws_of_thread = previous_;
  if (!state_->default_state.defined()) {
    return;
  }
  state_->look_at_default();
  {
    at::Generator shared = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(shared.mutex());
    shared.set_state(state_->default_state);
  }
  if (state_->moved) {
    state_->position.seed->note_draw();
  }
}

void check_workers_can_draw(bool keyed) {
  const bool in_fallback =
      draws_of_thread != nullptr && draws_of_thread->alone.owns_lock();
  if (!keyed && in_fallback) {
    throw std::runtime_error(
        "pipe: expected a call outside any draw_scope, got one inside (keyed "
        "draws do not work with this torch, so one scope at a time may draw)");
  }
}

void set_draw_layer(int64_t layer) {
  DrawScope::State* state = draws_of_thread;
  if (state == nullptr || state->layer == layer) {
    return;
  }
  state->layer = layer;
  if (state->default_state.defined()) {
    state->look_at_default();
    state->seed_default();
  }
}

void set_checkpoint_test(IsCheckpoint test) {
  is_checkpoint = test;
}

std::shared_ptr<CallSeed> seed_of_call(std::optional<uint64_t> given) {
  if (given) {
    return std::make_shared<CallSeed>(*given);
  }
  DrawScope::State* enclosing = draws_of_thread;
  if (enclosing == nullptr) {
    return std::make_shared<CallSeed>(
        at::detail::getDefaultCPUGenerator(), nullptr);
  }
  // In a cell of another pipe: one of that cell's own draws. A fallback scope
  // has seeded the default generator.
  return std::make_shared<CallSeed>(
      enclosing->include.has_value() ? enclosing->generator(c10::kCPU)
                                     : at::detail::getDefaultCPUGenerator(),
      enclosing->position.seed);
}

}  // namespace pipetransformer::pipe
