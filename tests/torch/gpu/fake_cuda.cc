#include "tests/torch/gpu/fake_cuda.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::EventHandle;
using ops::cuda::StreamHandle;
using Lock = std::lock_guard<std::mutex>;

constexpr c10::DeviceIndex kDevices = 8;

thread_local int current_device = 0;
thread_local std::map<int, c10::StreamId> current_streams;
std::atomic<const char*> next_allocation_fails{nullptr};
std::array<std::atomic<int>, kDevices> read_backs{};

// ---- streams ----

// LibTorch's numbers: 0 is the default one, an odd one stands in a table of its own streams, and an
// even one is somebody else's handle. The tests' are its own.
struct OwnStreams {
  std::mutex mutex;
  std::vector<StreamHandle> handles;
};

OwnStreams& TheOwnStreams() {
  static auto* streams = new OwnStreams;
  return *streams;
}

c10::StreamId NumberOf(StreamHandle handle) {
  if (handle == nullptr) return 0;
  OwnStreams& own = TheOwnStreams();
  const Lock lock(own.mutex);
  const auto found = std::find(own.handles.begin(), own.handles.end(), handle);
  const auto index = found - own.handles.begin();
  if (found == own.handles.end()) own.handles.push_back(handle);
  return (index << 1) | 1;
}

StreamHandle HandleOf(c10::StreamId number) {
  if ((number & 1) == 0) return reinterpret_cast<StreamHandle>(static_cast<std::intptr_t>(number));
  OwnStreams& own = TheOwnStreams();
  const Lock lock(own.mutex);
  return own.handles.at(static_cast<std::size_t>(number >> 1));
}

// Null: it is no more. With the lock.
FakeStream* Find(FakeGpus::State& state, int device, StreamHandle handle) {
  if (handle == nullptr) {
    FakeStream& stream = state.default_streams[device];
    stream.device = device;
    return &stream;
  }
  const auto found = state.streams.find(handle);
  return found == state.streams.end() ? nullptr : found->second.get();
}

// ---- memory ----

struct Block {
  int device = 0;
  std::size_t bytes = 0;
  StreamHandle allocated_on = nullptr;
  std::vector<StreamHandle> recorded_on;
};

struct Blocks {
  std::mutex mutex;
  std::map<const void*, Block> by_memory;
};

Blocks& TheBlocks() {
  static Blocks* blocks = new Blocks;  // tensors may go while the process exits
  return *blocks;
}

Block BlockOf(const void* memory) {
  Blocks& blocks = TheBlocks();
  const Lock lock(blocks.mutex);
  return blocks.by_memory.at(memory);
}

void Free(void* memory) {
  const std::shared_ptr<void> owned(memory, std::free);
  Block block;
  {
    Blocks& blocks = TheBlocks();
    const Lock lock(blocks.mutex);
    block = std::move(blocks.by_memory.extract(memory).mapped());
  }
  FakeGpus::State* const state = FindFakeGpus();
  if (state == nullptr) return;
  const Lock lock(state->mutex);
  FakeStream* const home = Find(*state, block.device, block.allocated_on);
  if (home == nullptr) return;
  const auto busy = std::make_shared<int>(0);
  for (StreamHandle handle : block.recorded_on) {
    FakeStream* const user = Find(*state, block.device, handle);
    if (user == nullptr) continue;
    ++*busy;
    state->Put(*user, "a free", [busy] {
      --*busy;
      return true;
    });
  }
  state->Put(*home, "a free", [owned, busy, bytes = block.bytes] {
    if (*busy > 0) return false;
    std::memset(owned.get(), 0xEE, bytes);
    return true;
  });
}

at::Tensor Allocate(std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides,
                    at::ScalarType type, at::Device device) {
  if (const char* text = next_allocation_fails.exchange(nullptr)) TORCH_CHECK(false, text);
  if (!device.has_index()) device = Cuda(current_device);
  std::size_t elements = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {
      elements = 0;
      break;
    }
    elements += static_cast<std::size_t>((sizes[i] - 1) * strides[i]);
  }
  Block block{device.index(), elements * c10::elementSize(type), nullptr, {}};
  block.allocated_on = HandleOf(current_streams[device.index()]);
  void* const memory = std::malloc(block.bytes + 1);
  {
    Blocks& blocks = TheBlocks();
    const Lock lock(blocks.mutex);
    blocks.by_memory[memory] = std::move(block);
  }
  return at::for_blob(memory, sizes)
      .strides(strides)
      .context(memory, Free)
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

at::Tensor Empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i > 1; --i) strides[i - 2] = strides[i - 1] * shape[i - 1];
  at::Tensor tensor = Allocate(shape.vec(), std::move(strides), type.value_or(at::kFloat), *device);
  if (format) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

at::Tensor EmptyStrided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                        std::optional<at::ScalarType> type, std::optional<at::Layout> /*layout*/,
                        std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  return Allocate(C10_AS_INTARRAYREF_SLOW(sizes).vec(), C10_AS_INTARRAYREF_SLOW(strides).vec(),
                  type.value_or(at::kFloat), *device);
}

// ---- computing ----

// The same memory, for the host to compute with. Keeps nobody's alive, as a device does not, but
// numbers of the host's, which a kernel has in its arguments.
at::Tensor OnHost(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor.detach();
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(at::TensorOptions().dtype(tensor.scalar_type()))
      .make_tensor();
}

// Into the stream that is current here, and, if given, behind `other`. Returns whether it is over.
using Over = std::shared_ptr<std::atomic<bool>>;
Over Put(const char* what, at::Device device, std::function<void()> work,
         const Over& other = nullptr) {
  auto over = std::make_shared<std::atomic<bool>>(false);
  const StreamHandle handle = HandleOf(current_streams[device.index()]);
  FakeGpus::State& state = TheFakeGpus();
  const Lock lock(state.mutex);
  FakeStream& stream = *Find(state, device.index(), handle);
  if (!stream.IsOf(device.index())) FailAsMisuse("a tensor in a stream of another device");
  state.Log(std::string(what) + " stream " + std::to_string(stream.number));
  state.PutByProgram(stream, what, [over, other, work = std::move(work)] {
    if (other && !*other) return false;
    const at::NoGradGuard no_grad;
    work();
    *over = true;
    return true;
  });
  return over;
}

void WaitUntil(const std::atomic<bool>& over) {
  while (!over) {
    {
      FakeGpus::State& state = TheFakeGpus();
      const Lock lock(state.mutex);
      state.Run();
    }
    std::this_thread::yield();
  }
}

at::Tensor& Copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  // What comes from the host is staged, as the real one does.
  const at::Device device = (self.is_cuda() ? self : from).device();
  const at::Tensor staged = from.is_cpu() ? from.clone() : OnHost(from);
  const auto copy = [to = OnHost(self), staged] { to.copy_(staged); };
  if (from.is_cuda() && from.device() != device) {
    // In the stream of what is read, between two places of the other's.
    const Over ready = Put("ready", device, [] {});
    const Over over = Put("copy_", from.device(), copy, ready);
    Put(
        "wait", device, [] {}, over);
    return self;
  }
  const Over over = Put("copy_", device, copy);
  // Either way LibTorch waits for the stream, unless the host's memory is pinned.
  if ((self.is_cpu() || from.is_cpu()) && !non_blocking) {
    NoteReadBack(device);
    WaitUntil(*over);
  }
  return self;
}

at::Tensor& Add(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  Put("add_", self.device(),
      [to = OnHost(self), other = OnHost(other), alpha] { to.add_(other, alpha); });
  return self;
}

at::Tensor& Zero(at::Tensor& self) {
  Put("zero_", self.device(), [to = OnHost(self)] { to.zero_(); });
  return self;
}

// ---- what LibTorch finds ----

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return Cuda(current_device); }
  // CUDA makes a context where it is sent. Nobody is sent to where he is; and back, at the end of a
  // guard, c10 sends only where there is one.
  void setDevice(c10::Device device) const override {
    if (current_device == device.index()) return;
    current_device = device.index();
    if (FakeGpus::State* const state = FindFakeGpus()) state->cuda.SetDevice(current_device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device().index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(c10::Stream stream) const override { return HandleOf(stream.id()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  // On the stream's device; then back, as the real one goes.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    const ops::cuda::Api& api = TheFakeGpus().cuda;
    const c10::Device before = exchangeDevice(stream.device());
    auto handle = static_cast<EventHandle>(*event);
    if (handle == nullptr) api.EventCreateWithFlags(&handle, 0);
    api.EventRecord(handle, HandleOf(stream.id()));
    *event = handle;
    setDevice(before);
  }
  void block(void* event, const c10::Stream& stream) const override {
    TheFakeGpus().cuda.StreamWaitEvent(HandleOf(stream.id()), static_cast<EventHandle>(event), 0);
  }
  bool queryEvent(void* event) const override {
    const ops::cuda::Api& api = TheFakeGpus().cuda;
    const bool reached =
        api.EventQuery(static_cast<EventHandle>(event)) == ops::cuda::Error::kSuccess;
    if (!reached) api.GetLastError();  // as LibTorch does
    return reached;
  }
  void synchronizeEvent(void* event) const override {
    while (!queryEvent(event)) std::this_thread::yield();
  }
  void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override {
    if (event == nullptr) return;
    const c10::Device before = exchangeDevice(Cuda(device));
    TheFakeGpus().cuda.EventDestroy(static_cast<EventHandle>(event));
    setDevice(before);
  }
  // Memory that was not allocated here is none of its business, as with the real one.
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    Blocks& blocks = TheBlocks();
    const Lock lock(blocks.mutex);
    const auto found = blocks.by_memory.find(memory.get());
    if (found != blocks.by_memory.end()) {
      found->second.recorded_on.push_back(HandleOf(stream.id()));
    }
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

// Without them autograd knows of no streams.
struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs /*unused*/) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static const auto* const generators = [] {
      auto* made = new std::vector<at::Generator>;
      for (std::uint64_t i = 0; i < kDevices; ++i) {
        made->push_back(at::detail::createCPUGenerator(1000 + i));
      }
      return made;
    }();
    return (*generators)[static_cast<std::size_t>(device)];
  }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", Empty);
  library.impl("empty_strided", EmptyStrided);
  library.impl("view", at::native::view);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("copy_", Copy);
  library.impl("add_.Tensor", Add);
  library.impl("zero_", Zero);
}

}  // namespace

void SetCurrentStream(int device, StreamHandle stream) {
  current_streams[device] = NumberOf(stream);
}

StreamHandle CurrentStreamOf(int device) { return HandleOf(current_streams[device]); }

void WaitForStream(at::Device device) {
  WaitUntil(*Put("WaitForStream", device, [] {}));
}

void NoteReadBack(at::Device device) { ++read_backs[static_cast<std::size_t>(device.index())]; }
int ReadBacks(at::Device device) { return read_backs[static_cast<std::size_t>(device.index())]; }

StreamHandle AllocatedOn(const at::Tensor& tensor) {
  return BlockOf(tensor.const_data_ptr()).allocated_on;
}

std::vector<StreamHandle> RecordedOn(const at::Tensor& tensor) {
  return BlockOf(tensor.const_data_ptr()).recorded_on;
}

int LiveBlocksOn(int device) {
  Blocks& blocks = TheBlocks();
  const Lock lock(blocks.mutex);
  return static_cast<int>(
      std::count_if(blocks.by_memory.begin(), blocks.by_memory.end(),
                    [device](const auto& block) { return block.second.device == device; }));
}

void FailNextAllocation(const char* text) { next_allocation_fails = text; }

}  // namespace sirtaki::tests
