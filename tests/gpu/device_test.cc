// A real GPU does here what the fakes stand for. The tests skip with a reason where there is none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fusion/convert.h"
#include "ops/base/kernels.h"
#include "ops/cuda/device.h"
#include "ops/cuda/kernel_image.h"
#include "ops/cuda/kernels.h"
#include "ops/nccl/communicator.h"
#include "ops/nccl/device_memory.h"
#include "tests/support/no_gpu.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::ReduceOp;
using core::Status;
using cuda::CopyKind;
using cuda::CopySegment;

using Bytes = std::vector<std::byte>;

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const Status loaded = cuda::Load(&cuda_);
    if (!loaded.ok()) return tests::SkipWithoutGpu(loaded.message());
    std::string why;
    const void* const image = cuda::KernelImage(&why);
    if (image == nullptr) return tests::SkipWithoutGpu(why);
    Expect(cuda::Device::Open(cuda_.api, 0, &device_));
    Expect(device_->Adopt());
    Expect(cuda::Stream::Make(device_, &stream_));
    Expect(cuda::Kernels::Load(device_, image, &kernels_));
    events_ = std::make_unique<cuda::EventPool>(device_);
  }
  void TearDown() override {
    for (void* memory : taken_) cuda_.api.Free(memory);
  }

  static void Expect(const Status& status) { ASSERT_TRUE(status.ok()) << status.ToString(); }
  void Expect(cuda::Error error) { Expect(cuda::Check(cuda_.api, error, "CUDA")); }

  void* OnDevice(const Bytes& bytes) {
    void* memory = nullptr;
    Expect(cuda_.api.Malloc(&memory, bytes.size() + 1));
    taken_.push_back(memory);
    Expect(cuda_.api.MemcpyAsync(memory, bytes.data(), bytes.size(), CopyKind::kHostToDevice,
                                 stream_->handle()));
    return memory;
  }
  Bytes FromDevice(const void* memory, std::size_t bytes) {
    Bytes result(bytes);
    Expect(cuda_.api.MemcpyAsync(result.data(), memory, bytes, CopyKind::kDeviceToHost,
                                 stream_->handle()));
    Finish();
    return result;
  }
  // Until the device has come to the end of the stream.
  void Finish() {
    cuda::EventPtr event;
    Expect(events_->Take(&event));
    Expect(event->Record(stream_->handle()));
    const auto limit = core::Clock::now() + std::chrono::seconds(30);
    bool reached = false;
    while (!reached && core::Clock::now() < limit) {
      const Status status = event->Poll(&reached);
      ASSERT_TRUE(status.ok()) << status.ToString();
      std::this_thread::yield();
    }
    ASSERT_TRUE(reached) << "the device did not finish";
  }

  cuda::Library cuda_;
  std::shared_ptr<cuda::Device> device_;
  std::unique_ptr<cuda::Stream> stream_;
  std::unique_ptr<cuda::Kernels> kernels_;
  std::unique_ptr<cuda::EventPool> events_;
  std::vector<void*> taken_;
};

// The numbers of floating types are between -8 and 8; any bits of the others.
Bytes Numbers(DType dtype, std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes memory(static_cast<std::size_t>(count) * core::SizeOf(dtype));
  if (!core::IsFloating(dtype)) {
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    return memory;
  }
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = std::uniform_real_distribution<>(-8, 8)(random);
  if (dtype == DType::kF64) {
    std::memcpy(memory.data(), values.data(), memory.size());
  } else {
    fusion::Convert(DType::kF64, values.data(), dtype, memory.data(), count);
  }
  return memory;
}

TEST_F(GpuTest, KernelsConvertAsTheHostDoes) {
  const std::vector<std::pair<DType, DType>> pairs = {
      {DType::kF32, DType::kF32},   {DType::kF64, DType::kF64},  {DType::kF16, DType::kF16},
      {DType::kBF16, DType::kBF16}, {DType::kF32, DType::kF16},  {DType::kF16, DType::kF32},
      {DType::kF32, DType::kBF16},  {DType::kBF16, DType::kF32}, {DType::kF64, DType::kF16},
      {DType::kF64, DType::kBF16},  {DType::kI8, DType::kI32},   {DType::kI32, DType::kI16},
      {DType::kI32, DType::kI64},   {DType::kI64, DType::kI64}};
  constexpr std::int64_t kCount = 100003;
  for (const auto& [from, to] : pairs) {
    // By 4: exact for floating types, however the device divides.
    for (const fusion::Scale scale : {fusion::Scale{}, {.divisor = 4}}) {
      if (!scale.identity() && from == to && core::IsHalf(from)) continue;  // not the host's affair
      SCOPED_TRACE(std::string(core::DTypeName(from)) + " to " + std::string(core::DTypeName(to)));
      const Bytes in = Numbers(from, kCount, 3);
      Bytes expected(kCount * core::SizeOf(to));
      fusion::Convert(from, in.data(), to, expected.data(), kCount, scale);
      void* const target = OnDevice(Bytes(expected.size()));
      const CopySegment segment{OnDevice(in), target, kCount};
      Expect(kernels_->Copy(from, to, {&segment, 1}, scale, {}, stream_->handle()));
      EXPECT_TRUE(FromDevice(target, expected.size()) == expected);
    }
  }
}

TEST_F(GpuTest, KernelsReduceAsTheHostDoes) {
  constexpr std::int64_t kCount = 70001;
  constexpr std::int64_t kMembers = 3;
  for (const auto& [op, dtype] :
       std::vector<std::pair<ReduceOp, DType>>{{ReduceOp::kMin, DType::kF16},
                                               {ReduceOp::kMax, DType::kBF16},
                                               {ReduceOp::kMin, DType::kF32},
                                               {ReduceOp::kMax, DType::kF64},
                                               {ReduceOp::kBitAnd, DType::kU8},
                                               {ReduceOp::kBitOr, DType::kI16},
                                               {ReduceOp::kBitXor, DType::kI32},
                                               {ReduceOp::kBitXor, DType::kI64}}) {
    SCOPED_TRACE(std::string(core::ReduceOpName(op)) + " of " +
                 std::string(core::DTypeName(dtype)));
    const Bytes parts = Numbers(dtype, kCount * kMembers, 5);
    Bytes expected = parts;
    ReduceParts(op, dtype, expected.data(), kMembers, kCount, {}, {});
    expected.resize(kCount * core::SizeOf(dtype));
    void* const memory = OnDevice(parts);
    Expect(kernels_->Reduce(op, dtype, memory, kMembers, kCount, memory, stream_->handle()));
    EXPECT_TRUE(FromDevice(memory, expected.size()) == expected);
  }
}

TEST_F(GpuTest, ACommunicatorOfOneReducesInStagingMemory) {
  nccl::Library library;
  const Status loaded = nccl::Load(&library);
  if (!loaded.ok()) return tests::SkipWithoutGpu(loaded.message());
  nccl::UniqueId id;
  ASSERT_EQ(library.api.GetUniqueId(&id), nccl::Result::kSuccess);
  std::unique_ptr<nccl::Communicator> communicator;
  const auto all =
      std::make_shared<nccl::ProcessCommunicators>(std::make_shared<const nccl::Api>(library.api));
  Expect(nccl::Communicator::Init(all, id, 1, 0, {}, &communicator));
  {
    nccl::DeviceMemory memory(cuda_.api, *communicator);
    std::byte* staging = nullptr;
    constexpr std::int64_t kCount = 4096;
    Expect(memory.Reserve(kCount * 4, &staging));
    const Bytes in = Numbers(DType::kF32, kCount, 7);
    Expect(cuda_.api.MemcpyAsync(staging, in.data(), in.size(), CopyKind::kHostToDevice,
                                 stream_->handle()));
    Expect(communicator->Run("ncclAllReduce",
                             [&](nccl::CommHandle comm) {
                               return library.api.AllReduce(
                                   staging, staging, kCount, nccl::DataType::kFloat32,
                                   nccl::RedOp::kSum, comm, stream_->handle());
                             },
                             {}));
    EXPECT_TRUE(FromDevice(staging, in.size()) == in);
    Expect(communicator->CheckAsync());
  }
  Expect(communicator->Finalize({}));
}

}  // namespace
}  // namespace sirtaki::ops
