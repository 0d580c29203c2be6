// A fake device: memory, streams, generators and graphs of an accelerator that is not there.
//
// Operators are those of the CPU, run in place on tensors that look at the device's memory. What is kept
// around them are the rules of a device that Python code can break without noticing on a CPU: memory that the
// host can't read and that runs out, tensors on two devices, streams that nobody waits for, copies that have
// not arrived, generators of its own, a context that ends, graphs that are recorded and replayed.
//
// FAKE_DEVICE=cuda in the environment: it takes the place of CUDA in a build of torch without CUDA, and has to
// be loaded before torch is imported. Else it is PrivateUse1. It says nothing about the numbers, the kernels
// and the speed of a GPU.

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Utils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
#include <c10/core/CachingDeviceAllocator.h>
#define HAS_DEVICE_ALLOCATOR
#endif

constexpr int DEVICES = 4;
enum Counter { LAUNCHES, WAITS, ALLOCATIONS, BYTES, EMPTIED, REPLAYS, COUNTERS };

// What Python reads and writes.
extern "C" {
int fake_visible = 2;                 // devices, as CUDA_VISIBLE_DEVICES leaves them
int fake_asserts = 0;                 // whether a bad index ends the context
int fake_dead = 0;                    // whether that has happened
int fake_capturing = 0;               // whether a graph is being captured
int fake_noting = 0;                  // whether fake_noted says what was launched
int64_t fake_counters[COUNTERS] = {};
int64_t fake_fail_from = INT64_MAX;   // the first allocation that fails,
int64_t fake_fail_until = INT64_MAX;  // and the first after it that does not
int64_t fake_capacity[DEVICES], fake_used[DEVICES], fake_peak[DEVICES];
}

namespace {

using c10::Device, c10::DeviceIndex, c10::IValue, c10::Stream, at::Tensor;

const bool IS_CUDA = std::getenv("FAKE_DEVICE") && !std::strcmp(std::getenv("FAKE_DEVICE"), "cuda");
const auto TYPE = IS_CUDA ? c10::DeviceType::CUDA : c10::DeviceType::PrivateUse1;
const auto KEY = IS_CUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;

std::recursive_mutex mutex;
using Locked = std::lock_guard<std::recursive_mutex>;

thread_local int current_device = 0;
thread_local int64_t current_stream[DEVICES] = {};

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }
int index_of(Device device) { return device.has_index() ? device.index() : current_device; }
Stream stream_of(int device) { return Stream(Stream::UNSAFE, Device(TYPE, device), current_stream[device]); }
int number_of(Stream stream) { return stream.device_index() << 20 | int(stream.id()); }

void check_alive() { TORCH_CHECK(!fake_dead, "CUDA error: device-side assert triggered"); }

// ---- who has waited for whom: a vector clock for each stream, and one for the host ----------------------------

using Clock = std::map<int, uint64_t>;  // of each stream, how much of its work is known to be done

void join(Clock& clock, const Clock& other) {
  for (auto& [stream, time] : other) clock[stream] = std::max(clock[stream], time);
}

std::map<int, Clock> clocks;
Clock host;
std::vector<std::string> races, noted;
std::string running = "host";

struct Running {  // the name of what runs now
  std::string before = running;
  explicit Running(const std::string& name) { running = name; }
  ~Running() { running = before; }
};

struct Late {  // a copy to the host that has not arrived
  int stream;
  uint64_t time;
  std::function<void()> arrive;
};
std::vector<Late> late;

void host_knows(const Clock& clock) {
  join(host, clock);
  auto waiting = std::move(late);
  late.clear();
  for (auto& each : waiting)
    if (host[each.stream] >= each.time) each.arrive();
    else late.push_back(each);
}

void host_waits(const Clock& clock) {
  check_alive();
  TORCH_CHECK(!fake_capturing, "CUDA error: operation not permitted when stream is capturing");
  fake_counters[WAITS]++;
  host_knows(clock);
}

// ---- memory: the host sees it where it can't read, kernels see it DISTANCE further on ---------------------------

constexpr size_t SPAN = size_t(1) << 33, DISTANCE = SPAN * DEVICES, GRAIN = 512;

char* reserve() {
  auto at = (char*)mmap(nullptr, 2 * DISTANCE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED && !mprotect(at + DISTANCE, DISTANCE, PROT_READ | PROT_WRITE), "no addresses");
  for (auto& each : fake_capacity) each = int64_t(1) << 40;
  return at;
}
char* const memory = reserve();
size_t used_up[DEVICES] = {};

bool is_ours(const void* at) { return at >= memory && at < memory + DISTANCE; }
char* for_kernels(const void* at) { return (char*)at + (is_ours(at) ? DISTANCE : 0); }

struct Access {
  int stream = -1;
  uint64_t time = 0;
  std::string by;
};

struct Block {
  char* address = nullptr;
  size_t size = 0;
  int device = 0, stream = 0;  // where it was allocated
  Access written;
  std::map<int, Access> read;
  std::set<int> recorded;  // record_stream
};
std::map<const void*, Block> blocks;
std::multimap<std::pair<int, size_t>, Block> freed;  // by stream and size

void release(void* address) {
  Locked locked(mutex);
  auto block = blocks.at(address);
  blocks.erase(address);
  fake_used[block.device] -= block.size;
  for (int other : block.recorded) join(clocks[block.stream], clocks[other]);
  block.recorded.clear();
  std::memset(for_kernels(address), 0xFE, block.size);
  freed.insert({{block.stream, block.size}, block});  // handed out again without waiting
}

c10::DataPtr allocate(size_t bytes, int device) {
  Locked locked(mutex);
  if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(TYPE, device)};
  auto size = (bytes + GRAIN - 1) / GRAIN * GRAIN;
  auto number = fake_counters[ALLOCATIONS]++;
  bool fails = number >= fake_fail_from && number < fake_fail_until;
  TORCH_CHECK_WITH(OutOfMemoryError, !fails && fake_used[device] + int64_t(size) <= fake_capacity[device],
                   "CUDA out of memory. Tried to allocate ", bytes, " bytes on the fake device ", device, ", of whose ",
                   fake_capacity[device], " bytes ", fake_used[device], " are in use (allocation ", number, ")");
  Block block;
  block.stream = number_of(stream_of(device));
  if (auto found = freed.find({block.stream, size}); found != freed.end()) {
    block = found->second;
    freed.erase(found);
  } else {
    TORCH_CHECK(used_up[device] + size <= SPAN, "the fake device has no addresses left");
    block.address = memory + device * SPAN + used_up[device];
    used_up[device] += size;
  }
  block.size = size, block.device = device;
  blocks[block.address] = block;
  fake_used[device] += size;
  fake_peak[device] = std::max(fake_peak[device], fake_used[device]);
  fake_counters[BYTES] += size;
  std::memset(for_kernels(block.address), 0xFF, size);  // NaN
  return {block.address, block.address, &release, Device(TYPE, device)};
}

void record_on(const void* address, Stream stream) {
  Locked locked(mutex);
  if (auto found = blocks.find(address); found != blocks.end()) found->second.recorded.insert(number_of(stream));
}

#ifdef HAS_DEVICE_ALLOCATOR
struct Memory final : c10::DeviceAllocator {
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { fake_counters[EMPTIED]++; }
  void recordStream(const c10::DataPtr& pointer, Stream stream) override { record_on(pointer.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { fake_peak[device] = fake_used[device]; }
#else
struct Memory final : c10::Allocator {
#endif
  c10::DataPtr allocate(size_t bytes) override { return ::allocate(bytes, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(for_kernels(to), for_kernels(from), count);
  }
};
Memory allocator;

std::set<const void*> pinned;

struct PinnedMemory final : c10::Allocator {
  static void release(void* address) {
    Locked locked(mutex);
    pinned.erase(address);
    std::free(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    Locked locked(mutex);
    void* address = std::malloc(bytes);
    pinned.insert(address);
    return {address, address, &PinnedMemory::release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
PinnedMemory pinned_allocator;

// ---- streams and events -------------------------------------------------------------------------------------------

constexpr int64_t LAG = 64;  // launches that the device is behind: an event that is older has happened

struct Launch {  // work in a stream
  int stream;
  uint64_t time = 0;

  Launch(Stream on) : stream(number_of(on)) {
    if (fake_capturing) return;  // nothing runs
    join(clocks[stream], host);
    time = ++clocks[stream][stream];
    fake_counters[LAUNCHES]++;
    if (fake_noting) noted.push_back(running);
  }

  void touch(const Tensor& tensor, bool writes) {
    if (fake_capturing || !is_ours(tensor)) return;
    auto found = blocks.find(tensor.storage().data());
    if (found == blocks.end()) return;
    auto& block = found->second;
    after(block.written, "wrote", writes);
    if (writes) {
      for (auto& [_, each] : block.read) after(each, "read", writes);
      block.written = {stream, time, running};
      block.read.clear();
    } else {
      block.read[stream] = {stream, time, running};
    }
  }

  void after(const Access& before, const char* did, bool writes) {
    if (before.stream < 0 || clocks[stream][before.stream] >= before.time) return;
    std::ostringstream text;
    text << running << " on stream " << stream << (writes ? " writes" : " reads") << " what " << before.by << " " << did
         << " on stream " << before.stream << ", without waiting";
    races.push_back(text.str());
  }
};

struct Event {
  Clock clock;
  int64_t launched = 0;
  std::chrono::steady_clock::time_point at;
};

struct Streams final : c10::impl::DeviceGuardImplInterface {
  Streams() = default;
  c10::DeviceType type() const override { return TYPE; }
  DeviceIndex deviceCount() const noexcept override { return fake_visible; }
  Device getDevice() const override { return Device(TYPE, current_device); }
  void uncheckedSetDevice(Device to) const noexcept override { current_device = index_of(to); }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.index() < fake_visible, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(to);
  }
  Device exchangeDevice(Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }

  Stream getStream(Device device) const noexcept override { return stream_of(index_of(device)); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, Device(TYPE, index_of(device)), 0); }
  Stream getNewStream(Device device, int = 0) const override {
    static std::atomic<int64_t> last = 0;
    return Stream(Stream::UNSAFE, Device(TYPE, index_of(device)), ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override {
    auto before = stream_of(stream.device_index());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const { return (void*)stream.id(); }
  bool isStreamCapturing(const Stream&) const { return fake_capturing; }
  bool queryStream(const Stream&) const override { return false; }
  void synchronizeStream(const Stream& stream) const override {
    Locked locked(mutex);
    host_waits(clocks[number_of(stream)]);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Locked locked(mutex);
    Clock all;
    for (auto& [stream, clock] : clocks)
      if (stream >> 20 == device) join(all, clock);
    host_waits(all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    record_on(pointer.get(), stream);
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked locked(mutex);
    if (!*event) *event = new Event();
    join(clocks[number_of(stream)], host);
    *(Event*)*event = {clocks[number_of(stream)], fake_counters[LAUNCHES], std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    Locked locked(mutex);
    if (event) join(clocks[number_of(stream)], ((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override {
    Locked locked(mutex);
    if (!event) return true;
    auto& asked = *(Event*)event;
    bool known = true;
    for (auto& [stream, time] : asked.clock) known = known && host[stream] >= time;
    if (!known && fake_counters[LAUNCHES] - asked.launched < LAG) return false;
    host_knows(asked.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Locked locked(mutex);
    if (event) host_waits(((Event*)event)->clock);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(((Event*)to)->at - ((Event*)from)->at).count();
  }
};
Streams streams;

// ---- random numbers -----------------------------------------------------------------------------------------------

struct Random final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Random(DeviceIndex device) : c10::GeneratorImpl(Device(TYPE, device), c10::DispatchKeySet(KEY)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override { return seed_ = c10::detail::getNonDeterministicRandom(true), offset_ = 0, seed_; }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    seed_ = ((const uint64_t*)state.data())[0], offset_ = ((const uint64_t*)state.data())[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    TORCH_CHECK(!fake_capturing, "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture");
    auto state = at::detail::empty_cpu({16}, at::kByte, false, std::nullopt);
    auto data = (uint64_t*)state.mutable_data_ptr();
    data[0] = seed_, data[1] = offset_;
    return state.getIntrusivePtr();
  }
  Random* clone_impl() const override {
    auto copy = new Random(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
};

const at::Generator& default_generator(int64_t device) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < DEVICES; i++) all.push_back(at::make_generator<Random>(DeviceIndex(i)));
    return all;
  }();
  return made.at(device < 0 ? current_device : device);
}

struct Drawing {  // while an operator of the CPU runs, the CPU's generator draws what the device's would
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor before = cpu.get_state();
  explicit Drawing(Random& random) {
    cpu.set_current_seed(random.seed_ * 1000003 + random.offset_ + 17);
    random.offset_ += 4;
  }
  ~Drawing() { cpu.set_state(before); }
};

// ---- tensors ------------------------------------------------------------------------------------------------------

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  auto data = allocate(bytes, storage->device().index());
  if (auto kept = std::min(bytes, storage->nbytes()))
    std::memcpy(for_kernels(data.get()), for_kernels(storage->data()), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

// As on CUDA: the new shape first, then the memory, which may run out.
void reshape(const Tensor& tensor, at::IntArrayRef size, at::OptionalIntArrayRef stride) {
  auto impl = tensor.unsafeGetTensorImpl();
  if (impl->sizes() == size && (!stride || impl->strides() == *stride)) return;
  if (stride) impl->set_sizes_and_strides(size, *stride);
  else impl->set_sizes_contiguous(size);
  auto needed = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (impl->numel() && needed > tensor.storage().nbytes()) resize_storage(tensor.storage().unsafeGetStorageImpl(), needed);
}

using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using On = std::optional<Device>;

at::ScalarType type_of(Type type) { return type.value_or(at::typeMetaToScalarType(at::get_default_dtype())); }

Tensor empty(at::IntArrayRef size, Type type, Layout layout, On on, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "the fake device has strided tensors only");
  c10::DeviceGuard guard(on.value_or(Device(TYPE)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(KEY), type_of(type), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Type type, Layout, On on, std::optional<bool>) {
  c10::DeviceGuard guard(on.value_or(Device(TYPE)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(KEY), type_of(type));
}

Tensor empty_like(const Tensor& tensor, Device on) {
  return empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, on, {});
}

class Views {  // tensors of the CPU that look at the memory of the device's
  std::map<c10::StorageImpl*, c10::Storage> storages;
  std::map<c10::StorageImpl*, Tensor> seen_through;  // by the storage of a view
  std::vector<std::pair<Tensor, Tensor>> pairs;      // of the device, of the CPU

 public:
  Tensor of(const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    for (auto& [ours, view] : pairs)
      if (ours.is_same(tensor)) return view;
    auto storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages.find(storage);
    if (found == storages.end()) {
      c10::DataPtr data(for_kernels(storage->data()), Device(c10::kCPU));
      c10::Storage made(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      seen_through[made.unsafeGetStorageImpl()] = tensor;
      found = storages.emplace(storage, made).first;
    }
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         tensor.dtype());
    auto impl = view.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    impl->_set_conj(tensor.is_conj());
    impl->_set_neg(tensor.is_neg());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    pairs.emplace_back(tensor, view);
    return view;
  }

  // Do to the device's tensors what an operator has done to shape or memory of their views.
  void settle() {
    for (auto& [ours, view] : pairs) {
      bool moved = view.numel() && view.storage().data() != for_kernels(ours.storage().data());
      reshape(ours, view.sizes(), view.strides());
      if (moved)
        std::memcpy(for_kernels(ours.storage().data()), view.storage().data(),
                    std::min(ours.storage().nbytes(), view.storage().nbytes()));
    }
  }

  // Return the device's tensor for what an operator has returned: an argument, a view of one, a new one.
  Tensor back(const Tensor& result, Device on) {
    if (!result.device().is_cpu()) return result;
    for (auto& [ours, view] : pairs)
      if (view.is_same(result)) return ours;
    auto found = seen_through.find(result.storage().unsafeGetStorageImpl());
    if (found != seen_through.end()) {
      auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(found->second.storage()),
                                                           found->second.key_set(), result.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      return made;
    }
    auto made = empty_like(result, on);
    std::memcpy(for_kernels(made.storage().data()), result.storage().data(),
                std::min(made.storage().nbytes(), result.storage().nbytes()));
    return made;
  }
};

// ---- every operator -----------------------------------------------------------------------------------------------

using Tensors = std::function<Tensor(const Tensor&)>;

IValue mapped(const IValue& value, const Tensors& by) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(by(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& each : value.toTensorVector()) made.push_back(each.defined() ? by(each) : each);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& each : value.toOptionalTensorVector())
      made.push_back(each && each->defined() ? std::optional<Tensor>(by(*each)) : each);
    return made;
  }
  return value;
}

void for_each(const IValue& value, const std::function<void(const Tensor&)>& see) {
  mapped(value, [&](const Tensor& each) { return see(each), each; });
}

struct Call {  // of an operator
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  std::vector<Tensor> outputs;  // of a captured one: it writes there

  bool writes(size_t argument) const {
    auto alias = op.schema().arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }

  Device device() const {
    On found;
    for (auto& each : arguments) for_each(each, [&](const Tensor& t) { if (is_ours(t) && !found) found = t.device(); });
    for (auto& each : arguments)
      if (each.isDevice() && each.toDevice().type() == TYPE && !found) found = each.toDevice();
    return Device(TYPE, index_of(found.value_or(Device(TYPE))));
  }

  void check_devices(Device on) const {
    static const std::set<std::string> with_indices = {"index", "index_put", "_index_put_impl", "_unsafe_index",
                                                       "_unsafe_index_put", "_ctc_loss", "_pack_padded_sequence",
                                                       "_pad_packed_sequence"};
    auto name = op.schema().name().substr(6);
    while (name.back() == '_') name.pop_back();
    for (auto& each : arguments)
      for_each(each, [&](const Tensor& t) {
        bool is_fine = t.device() == on || t.is_meta() || (t.is_cpu() && (t.dim() == 0 || with_indices.count(name)));
        TORCH_CHECK(is_fine, "Expected all tensors to be on the same device, but found at least two devices, ", on, " and ",
                    t.device(), "! (", op.schema().name(), ")");
      });
  }

  bool waits() const {  // the size of the result is read by the host
    static const std::set<std::string> ops = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::bincount",
                                              "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
                                              "aten::repeat_interleave"};
    bool found = ops.count(op.schema().name());
    if (op.schema().name() == "aten::index")
      for_each(arguments[1], [&](const Tensor& t) { found = found || t.scalar_type() == at::kBool; });
    return found;
  }

  // Run the CPU's operator on what stands for the device's tensors.
  torch::jit::Stack run(Device on, const Tensors& stand_in) const {
    bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
    auto random = default_generator(on.index());
    torch::jit::Stack stack;
    for (auto& value : arguments) {
      if (value.isGenerator()) {
        random = value.toGenerator(), draws = true;
        TORCH_CHECK(random.device().type() == TYPE, "Expected a '", on, "' generator, but found '", random.device(), "'");
        stack.emplace_back();
      } else if (value.isDevice() && value.toDevice().type() == TYPE) {
        stack.emplace_back(Device(c10::kCPU));
      } else {
        stack.push_back(mapped(value, stand_in));
      }
    }
    std::optional<Drawing> drawing;
    if (draws) drawing.emplace(*random.get<Random>());
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
  }

  // Find only the shapes of the results, on zeros; return garbage, or the arguments that would be written.
  torch::jit::Stack imagined(Device on) {
    auto shapes = run(on, [](const Tensor& t) {
      return is_ours(t) ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU)).zero_() : t;
    });
    torch::jit::Stack results;
    for (size_t i = 0; i < shapes.size(); i++) {
      auto alias = op.schema().returns()[i].alias_info();
      if (alias && alias->isWrite()) {
        for (size_t a = 0; a < arguments.size(); a++)
          if (writes(a) && *op.schema().arguments()[a].alias_info() == *alias) results.push_back(arguments[a]);
      } else {
        results.push_back(mapped(shapes[i], [&](const Tensor& t) { return outputs.emplace_back(empty_like(t, on)); }));
      }
    }
    return results;
  }
};

std::vector<Call> graph;  // that is being captured
std::map<int64_t, std::vector<Call>> graphs;

torch::jit::Stack compute(Call& call) {
  Locked locked(mutex);
  check_alive();
  Running name(call.op.schema().name());
  auto on = call.device();
  call.check_devices(on);
  c10::DeviceGuard guard(on);
  if (fake_capturing) {
    TORCH_CHECK(!call.waits(), "CUDA error: operation not permitted when stream is capturing");
    auto results = call.imagined(on);
    graph.push_back(call);
    return results;
  }
  Launch launch(stream_of(on.index()));
  for (size_t i = 0; i < call.arguments.size(); i++)
    for_each(call.arguments[i], [&](const Tensor& t) { launch.touch(t, call.writes(i)); });
  Views views;
  torch::jit::Stack results;
  try {
    results = call.run(on, [&](const Tensor& t) { return views.of(t); });
  } catch (const c10::IndexError&) {
    if (!fake_asserts) throw;
    auto nothing = call.imagined(on);
    fake_dead = true;  // the host learns of it with its next call
    return nothing;
  }
  views.settle();
  for (auto& each : results)
    each = mapped(each, [&](const Tensor& t) {
      auto made = views.back(t, on);
      launch.touch(made, true);
      return made;
    });
  if (call.waits()) host_waits(clocks[launch.stream]);
  return results;
}

void compute_boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  Call call{op, {arguments.begin(), arguments.end()}, {}};
  for (auto& each : compute(call)) stack->push_back(each);
}

void replay(int64_t number) {
  Locked locked(mutex);
  fake_counters[REPLAYS]++;
  for (auto call : graphs.at(number)) {
    auto place = call.outputs.begin();
    auto results = compute(call);
    if (place != call.outputs.end())
      for (auto& each : results)
        for_each(each, [&](const Tensor& t) {
          auto& to = *place++;
          std::memcpy(for_kernels(to.storage().data()), for_kernels(t.storage().data()), to.storage().nbytes());
        });
  }
}

// As on CUDA: one launch if all tensors share device and dtype and those of a place their layout, else torch's own
// loop, to which a key that nobody has filled leads. (_foreach_copy_ may change the dtype, and knows fewer of them.)
// https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/ForeachBinaryOpList.cu
void compute_lists(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<std::vector<Tensor>> lists;
  for (auto& each : torch::jit::last(*stack, op.schema().arguments().size()))
    if (each.isTensorList()) lists.push_back(each.toTensorVector());
  bool copies = op.schema().name() == "aten::_foreach_copy_", alike = !lists.empty() && !lists[0].empty();
  for (auto& list : lists)
    for (size_t i = 0; alike && i < list.size(); i++)
      alike = list.size() == lists[0].size() && list[i].device() == lists[0][0].device() &&
              list[i].scalar_type() == (copies ? list : lists[0])[0].scalar_type() && list[i].is_non_overlapping_and_dense() &&
              list[i].sizes() == lists[0][i].sizes() && list[i].strides() == lists[0][i].strides();
  if (!alike) return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::HPU), stack);
  auto type = lists[0][0].scalar_type();
  bool unknown = c10::isBarebonesUnsignedType(type) || c10::isFloat8Type(type) || type == at::kComplexHalf;
  TORCH_CHECK_NOT_IMPLEMENTED(!copies || !unknown, "\"foreach_tensor_copy\" not implemented for '", c10::toString(type), "'");
  compute_boxed(op, stack);
}

// ---- operators of its own -----------------------------------------------------------------------------------------

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from)) return to;
  Locked locked(mutex);
  check_alive();
  Running name("aten::copy_");
  bool onto = is_ours(to), off = is_ours(from);
  if (fake_capturing) {
    TORCH_CHECK(onto && off, "CUDA error: operation not permitted when stream is capturing");
    graph.push_back({c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""), {to, from, non_blocking}, {}});
    return to;
  }
  auto stream = stream_of((off ? from : to).device().index());
  auto other = stream_of((onto ? to : from).device().index());
  // Between host and device goes dense memory only: else a temporary one on the device is filled or read.
  Tensor temporary;
  auto& ours = onto ? to : from;
  if (onto != off && (!ours.is_non_overlapping_and_dense() || to.sizes() != from.sizes() ||
                      (off && to.strides() != from.strides() && !ours.is_contiguous())))
    temporary = empty(to.sizes(), ours.scalar_type(), {}, ours.device(), {}, {});
  join(clocks[number_of(stream)], clocks[number_of(other)]);  // two devices wait for each other
  Launch launch(stream);
  launch.touch(from, false);
  launch.touch(to, true);
  join(clocks[number_of(other)], clocks[number_of(stream)]);
  at::AutoDispatchBelowADInplaceOrView below;
  Views views;
  auto target = views.of(to), source = views.of(from);
  if (!onto && non_blocking && pinned.count(to.storage().data())) {
    auto arrives = source.clone();  // as it is now in the stream
    std::memset(to.data_ptr(), 0xAB, to.nbytes());
    late.push_back({launch.stream, launch.time, [target, arrives]() mutable { target.copy_(arrives); }});
    return to;
  }
  target.copy_(source);
  if (!onto || (!off && !non_blocking)) host_waits(clocks[launch.stream]);
  return to;
}

at::Scalar item(const Tensor& tensor) {
  Locked locked(mutex);
  Running name("aten::item");
  Launch launch(stream_of(tensor.device().index()));
  launch.touch(tensor, false);
  host_waits(clocks[launch.stream]);
  at::AutoDispatchBelowADInplaceOrView below;
  Views views;
  return views.of(tensor).item();
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  reshape(self, size, {});
  if (format && *format != at::MemoryFormat::Contiguous) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  reshape(self, size, stride.data() ? at::OptionalIntArrayRef(stride) : std::nullopt);
  return self;
}
Tensor& set_whole(Tensor& self, at::Storage storage) {
  return self.set_(storage, 0, {int64_t(storage.nbytes() / self.dtype().itemsize())}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return self.is_same(other) ? self : set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
Tensor& set_nothing(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocate(0, self.device().index()), &allocator, true);
  return self.set_(storage, 0, {0}, {});
}
bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() && self.strides() == other.strides();
}
void record_stream(Tensor& self, Stream stream) { record_on(self.storage().data(), stream); }

// ---- what torch asks a device -------------------------------------------------------------------------------------

template <class Base>  // either CUDA's or those of other devices; a name that one of them has not is not asked
struct Hooks final : Base {
  bool hasCUDA() const { return true; }
  int getNumGPUs() const { return fake_visible; }
  DeviceIndex current_device() const { return ::current_device; }
  void deviceSynchronize(DeviceIndex device) const { streams.synchronizeDevice(device); }
  at::Allocator* getCUDADeviceAllocator() const { return &allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  void init() const {}
  bool hasPrimaryContext(DeviceIndex) const { return true; }
  DeviceIndex deviceCount() const { return fake_visible; }
  DeviceIndex getCurrentDevice() const { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const { streams.setDevice({TYPE, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const { return streams.exchangeDevice({TYPE, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const { return exchangeDevice(device); }
  at::Generator getNewGenerator(DeviceIndex device) const {
    return at::make_generator<Random>(DeviceIndex(device < 0 ? ::current_device : device));
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const { return default_generator(device); }
  Device getDeviceFromPtr(void* at) const {
    TORCH_CHECK(is_ours(at), "this address is not the device's");
    return Device(TYPE, ((char*)at - memory) / SPAN);
  }
  bool isPinnedPtr(const void* address) const {
    Locked locked(mutex);
    return pinned.count(address) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const { return &pinned_allocator; }
};

void fill(torch::Library& aten) {
  for (auto& each : c10::Dispatcher::singleton().getAllOpNames())
    if (each.name.rfind("aten::_foreach_", 0) == 0)
      aten.impl((each.name.substr(6) + (each.overload_name.empty() ? "" : "." + each.overload_name)).c_str(),
                torch::CppFunction::makeFromBoxedFunction<&compute_lists>());
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("copy_", copy_);
  aten.impl("_local_scalar_dense", item);
  aten.impl("as_strided", +[](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  aten.impl("view", +[](const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  aten.impl("_reshape_alias", +[](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  aten.impl("_fused_sdp_choice", +[](const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                                     std::optional<double>, bool) -> int64_t { return 0; });  // plain operators
  aten.impl("resize_", resize_);
  aten.impl("set_.source_Storage_storage_offset", set_storage);
  aten.impl("set_.source_Storage", set_whole);
  aten.impl("set_.source_Tensor", set_tensor);
  aten.impl("set_", set_nothing);
  aten.impl("is_set_to", is_set_to);
  aten.impl("record_stream", record_stream);
}

TORCH_LIBRARY(fake_device, own) {
  own.def("default_generator(int device) -> Generator?", [](int64_t device) { return default_generator(device); });
  own.def("resize_storage(Tensor of, int bytes) -> ()", [](const Tensor& of, int64_t bytes) {
    resize_storage(of.storage().unsafeGetStorageImpl(), bytes);
  });
  own.def("replay(int graph) -> ()", replay);
}

const bool loaded = [] {
  c10::SetAllocator(TYPE, &allocator, 100);
  static c10::impl::DeviceGuardImplRegistrar registrar(TYPE, &streams);
  if (IS_CUDA) {  // torch asks for these while it is imported, and keeps the answer
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<Hooks<at::CUDAHooksInterface>>();
    });
  } else {
    at::RegisterPrivateUse1HooksInterface(new Hooks<at::PrivateUse1HooksInterface>());
  }
  static torch::Library all(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_boxed>());
  static torch::Library aten(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
  fill(aten);
  return true;
}();

const char* said(std::vector<std::string>& lines) {  // and forgets it
  static std::string text;
  text.clear();
  for (auto& each : lines) text += each + "\n";
  lines.clear();
  return text.c_str();
}

}  // namespace

extern "C" {
const char* fake_races() { Locked locked(mutex); return said(races); }
const char* fake_noted() { Locked locked(mutex); return said(noted); }
void fake_begin_capture() { fake_capturing = 1, graph.clear(); }
int64_t fake_end_capture() {
  static int64_t last = 0;
  fake_capturing = 0;
  graphs[++last] = std::move(graph);
  graph.clear();
  return last;
}
void fake_drop_graph(int64_t number) { graphs.erase(number); }
}
