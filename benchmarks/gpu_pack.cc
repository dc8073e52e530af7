// The bytes that our kernels on a GPU read and write in a second, each beside a device's own copy
// that moves as many, taken in turn with it: gradients of ResNet-50 into a buffer and out of it.
//
//   gpu_pack [--rounds N]      ends with code 77 and the reason if there is no GPU
#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/support/gpu.h"
#include "benchmarks/support/measure.h"
#include "benchmarks/support/resnet50_shapes.h"
#include "core/base/types.h"
#include "ops/cuda/device.h"
#include "ops/cuda/kernel_image.h"
#include "ops/cuda/kernels.h"

namespace sirtaki::benchmarks {
namespace {

using core::DType;
using core::Status;
using ops::cuda::CopySegment;
namespace cuda = ops::cuda;

constexpr std::size_t kAlignment = 256;  // as LibTorch's allocator has it

class Gpu {
 public:
  Gpu(const cuda::Api& api, const void* image) : api_(api) {
    Require(cuda::Device::Open(api_, 0, &device_));
    Require(device_->Adopt());
    Require(cuda::Stream::Make(device_, &stream_));
    Require(cuda::Kernels::Load(device_, image, &kernels_));
    events_ = std::make_unique<cuda::EventPool>(device_);
  }
  ~Gpu() {
    for (void* memory : taken_) api_.Free(memory);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  std::byte* Take(std::size_t bytes) {
    void* memory = nullptr;
    Require(cuda::Check(api_, api_.Malloc(&memory, bytes), "cudaMalloc"));
    taken_.push_back(memory);
    Require(cuda::Check(api_, api_.MemsetAsync(memory, 0, bytes, stream_->handle()), "cudaMemset"));
    return static_cast<std::byte*>(memory);
  }

  // Seconds of one of many launches that follow each other.
  double Timed(const std::function<void()>& launch) {
    constexpr int kLaunches = 200;
    launch();
    Finish();
    const auto start = Clock::now();
    for (int i = 0; i < kLaunches; ++i) launch();
    Finish();
    return Seconds(Clock::now() - start) / kLaunches;
  }

  void Copy(DType from, DType to, const std::vector<CopySegment>& segments, double factor) {
    Require(kernels_->Copy(from, to, segments, {.factor = factor}, {}, stream_->handle()));
  }
  void DeviceCopy(void* to, const void* from, std::size_t bytes) {
    Require(cuda::Check(
        api_, api_.MemcpyAsync(to, from, bytes, cuda::CopyKind::kDeviceToDevice, stream_->handle()),
        "cudaMemcpyAsync"));
  }

 private:
  void Finish() {
    cuda::EventPtr event;
    Require(events_->Take(&event));
    Require(event->Record(stream_->handle()));
    for (bool reached = false; !reached;) Require(event->Poll(&reached));
  }

  const cuda::Api& api_;
  std::shared_ptr<cuda::Device> device_;
  std::unique_ptr<cuda::Stream> stream_;
  std::unique_ptr<cuda::Kernels> kernels_;
  std::unique_ptr<cuda::EventPool> events_;
  std::vector<void*> taken_;
};

// Memory for tensors one by one, each aligned, and for all of them in a row.
struct Tensors {
  Tensors(Gpu& gpu, const std::vector<std::int64_t>& counts, DType loose_type, DType packed_type) {
    const auto loose_size = core::SizeOf(loose_type);
    const auto packed_size = core::SizeOf(packed_type);
    std::size_t elements = 0;
    std::size_t loose_bytes = 0;
    for (const std::int64_t count : counts) {
      const auto n = static_cast<std::size_t>(count);
      elements += n;
      loose_bytes += (n * loose_size + kAlignment - 1) / kAlignment * kAlignment;
    }
    moved = elements * (loose_size + packed_size);
    std::byte* loose = gpu.Take(loose_bytes);
    std::byte* row = gpu.Take(elements * packed_size);
    for (const std::int64_t count : counts) {
      const auto n = static_cast<std::size_t>(count);
      pack.push_back({loose, row, count});
      unpack.push_back({row, loose, count});
      loose += (n * loose_size + kAlignment - 1) / kAlignment * kAlignment;
      row += n * packed_size;
    }
  }
  std::vector<CopySegment> pack;
  std::vector<CopySegment> unpack;
  std::size_t moved = 0;  // bytes that are read and written
};

void Measure(Gpu& gpu, int rounds, const std::string& work, std::size_t moved,
             const std::function<void()>& launch) {
  std::byte* const from = gpu.Take(moved / 2);
  std::byte* const to = gpu.Take(moved / 2);
  const Pair pair = Interleave(
      rounds, [&] { return gpu.Timed(launch); },
      [&] { return gpu.Timed([&] { gpu.DeviceCopy(to, from, moved / 2); }); });
  const double bytes = static_cast<double>(moved) * 1e-9;
  Emit(Row{work, 1, bytes / pair.ours, "GB/s", "device's copy of as many bytes",
           bytes / pair.reference});
}

int Main(int argc, char** argv) {
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "11"));
  cuda::Library library;
  const Status loaded = cuda::Load(&library);
  std::string why = loaded.message();
  const void* const image = loaded.ok() ? cuda::KernelImage(&why) : nullptr;
  if (image == nullptr) {
    std::fprintf(stderr, "%s\n", why.c_str());
    return kSkipped;
  }
  std::vector<std::int64_t> gradients;
  std::int64_t all = 0;
  for (const auto& shape : ResNet50Shapes()) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    gradients.push_back(count);
    all += count;
  }
  for (const DType packed : {DType::kF32, DType::kBF16, DType::kF16}) {
    const std::string types = "float32 and " + std::string(core::DTypeName(packed)) + ", scaled";
    for (const bool one : {true, false}) {
      Gpu gpu(library.api, image);
      const Tensors tensors(gpu, one ? std::vector<std::int64_t>{all} : gradients, DType::kF32,
                            packed);
      const std::string what = one ? "25.6 M elements in one piece" : "161 gradients of ResNet-50";
      Measure(gpu, rounds, "pack " + what + ", " + types, tensors.moved,
              [&] { gpu.Copy(DType::kF32, packed, tensors.pack, 0.5); });
      Measure(gpu, rounds, "unpack " + what + ", " + types, tensors.moved,
              [&] { gpu.Copy(packed, DType::kF32, tensors.unpack, 0.5); });
    }
  }
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("gpu_pack", [&] { return Main(argc, argv); });
}
