#include "tests/torch/gpu/fake_cuda.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;

thread_local int current_device = 0;
thread_local std::map<int, StreamHandle> current_streams;

struct Block {
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
  const std::lock_guard<std::mutex> lock(blocks.mutex);
  return blocks.by_memory[memory];
}

StreamHandle HandleOf(c10::Stream stream) {
  return reinterpret_cast<StreamHandle>(static_cast<std::intptr_t>(stream.id()));
}

c10::Stream StreamOf(c10::Device device, StreamHandle handle) {
  return c10::Stream(c10::Stream::UNSAFE, device,
                     static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(handle)));
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return Cuda(current_device); }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return StreamOf(device, current_streams[device.index()]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device().index()] = HandleOf(stream);
    return before;
  }
  void* getStreamNativeHandle(c10::Stream stream) const override { return HandleOf(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    Blocks& blocks = TheBlocks();
    const std::lock_guard<std::mutex> lock(blocks.mutex);
    blocks.by_memory[memory.get()].recorded_on.push_back(HandleOf(stream));
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

void Free(void* memory) {
  {
    Blocks& blocks = TheBlocks();
    const std::lock_guard<std::mutex> lock(blocks.mutex);
    blocks.by_memory.erase(memory);
  }
  std::free(memory);
}

at::Tensor Empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> /*format*/) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  const auto bytes =
      static_cast<std::size_t>(c10::multiply_integers(shape)) * c10::elementSize(*type);
  void* const memory = std::malloc(bytes + 1);
  {
    Blocks& blocks = TheBlocks();
    const std::lock_guard<std::mutex> lock(blocks.mutex);
    blocks.by_memory[memory].allocated_on = current_streams[device->index()];
  }
  return at::for_blob(memory, shape)
      .context(memory, Free)
      .options(at::TensorOptions().dtype(*type).device(*device))
      .target_device(*device)
      .make_tensor();
}

// For tensors that lie flat, as those of these tests.
at::Tensor EmptyStrided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef /*strides*/,
                        std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                        std::optional<at::Device> device, std::optional<bool> pinned) {
  return Empty(sizes, type, layout, device, pinned, std::nullopt);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", Empty);
  library.impl("empty_strided", EmptyStrided);
}

}  // namespace

void SetCurrentStream(int device, StreamHandle stream) { current_streams[device] = stream; }

StreamHandle CurrentStreamOf(int device) { return current_streams[device]; }

StreamHandle AllocatedOn(const at::Tensor& tensor) {
  return BlockOf(tensor.const_data_ptr()).allocated_on;
}

std::vector<StreamHandle> RecordedOn(const at::Tensor& tensor) {
  return BlockOf(tensor.const_data_ptr()).recorded_on;
}

}  // namespace sirtaki::tests
