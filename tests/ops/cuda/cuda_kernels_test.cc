// What our kernels compute, by the code of their threads on the host, against the host's own
// conversions and loops.
#include "ops/cuda/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "fusion/convert.h"
#include "ops/base/kernels.h"
#include "ops/cuda/kernel_bodies.h"
#include "tests/support/fake_gpus.h"

namespace sirtaki::ops::cuda {
namespace {

using core::DType;
using core::ReduceOp;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::FakeGpus;

class CudaKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(Device::Open(gpus_.cuda(), 1, &device_).ok());
    scope_ = std::make_unique<Device::Scope>(*device_);
    ASSERT_TRUE(Kernels::Load(device_, "an image", &kernels_).ok());
    stream_ = gpus_.MakeStream();
  }
  void Copy(DType from, DType to, const std::vector<CopySegment>& segments,
            fusion::Scale scale = {}, const fusion::Identity& identity = {}) {
    const core::Status status = kernels_->Copy(from, to, segments, scale, identity, stream_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    gpus_.RunDevices();
  }

  FakeGpus gpus_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Device::Scope> scope_;
  std::unique_ptr<Kernels> kernels_;
  StreamHandle stream_ = nullptr;
};

// Numbers of a type, the awkward ones too: as float64 first.
std::vector<std::byte> Numbers(DType dtype, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> memory(static_cast<std::size_t>(count) * core::SizeOf(dtype));
  if (core::IsFloating(dtype)) {
    std::vector<double> values;
    for (std::int64_t i = 0; i < count; ++i) {
      const double magnitude = std::ldexp(std::uniform_real_distribution<>(-2, 2)(random),
                                          std::uniform_int_distribution<>(-30, 17)(random));
      values.push_back(i % 31 == 0 ? -0.0 : magnitude);
    }
    if (dtype == DType::kF64) {
      std::memcpy(memory.data(), values.data(), memory.size());
    } else {
      fusion::Convert(DType::kF64, values.data(), dtype, memory.data(), count);
    }
  } else {
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  }
  return memory;
}

TEST_F(CudaKernelsTest, ConvertsAndScalesAsTheHostDoes) {
  const std::vector<std::pair<DType, DType>> pairs = {
      {DType::kF32, DType::kF32},  {DType::kF64, DType::kF64},  {DType::kF32, DType::kF16},
      {DType::kF16, DType::kF32},  {DType::kF32, DType::kBF16}, {DType::kBF16, DType::kF32},
      {DType::kF64, DType::kF16},  {DType::kF16, DType::kF64},  {DType::kF64, DType::kBF16},
      {DType::kBF16, DType::kF64}, {DType::kU8, DType::kI32},   {DType::kI32, DType::kU8},
      {DType::kI8, DType::kI32},   {DType::kI32, DType::kI8},   {DType::kI16, DType::kI32},
      {DType::kI32, DType::kI16},  {DType::kI32, DType::kI64},  {DType::kI64, DType::kI32},
      {DType::kI64, DType::kI64},  {DType::kU8, DType::kU8},    {DType::kI8, DType::kI8},
      {DType::kI16, DType::kI16},  {DType::kI32, DType::kI32}};
  constexpr std::int64_t kCount = 5000;  // two tiles, the second not full
  for (const auto& [from, to] : pairs) {
    for (const fusion::Scale scale : {fusion::Scale{},
                                      {.divisor = 3},
                                      {.factor = 0.3},
                                      {.factor = -2.5, .divisor = 3},
                                      {.factor = 1e30}}) {
      SCOPED_TRACE(std::string(core::DTypeName(from)) + " to " + std::string(core::DTypeName(to)));
      const std::vector<std::byte> in = Numbers(from, kCount, 7);
      std::vector<std::byte> expected(kCount * core::SizeOf(to));
      fusion::Convert(from, in.data(), to, expected.data(), kCount, scale);
      std::vector<std::byte> out(expected.size());
      Copy(from, to, {{in.data(), out.data(), kCount}}, scale);
      EXPECT_TRUE(out == expected);
    }
  }
}

TEST_F(CudaKernelsTest, EveryHalfComesThroughFloat32) {
  for (const DType half : {DType::kF16, DType::kBF16}) {
    std::vector<std::uint16_t> all(1 << 16);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    std::vector<float> wide(all.size());
    std::vector<std::uint16_t> back(all.size());
    const auto count = static_cast<long long>(all.size());
    Copy(half, DType::kF32, {{all.data(), wide.data(), count}});
    Copy(DType::kF32, half, {{wide.data(), back.data(), count}});
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (std::isnan(wide[i])) {
        float again = 0;
        fusion::Convert(half, &back[i], DType::kF32, &again, 1);
        EXPECT_TRUE(std::isnan(again)) << i;
      } else {
        EXPECT_EQ(back[i], all[i]);
      }
    }
  }
}

TEST_F(CudaKernelsTest, PacksManySegmentsInFewLaunches) {
  std::mt19937 random(11);
  constexpr int kSegments = 3 * CopyTable::kMost + 5;
  std::vector<std::vector<float>> tensors;
  std::int64_t total = 0;
  for (int i = 0; i < kSegments; ++i) {
    tensors.emplace_back(static_cast<std::size_t>(random() % 700));
    for (float& value : tensors.back()) value = static_cast<float>(random() % 1000);
    total += static_cast<std::int64_t>(tensors.back().size());
  }
  tensors.front().assign(10001, 2.5F);  // several tiles
  total += 20000;
  // One element off the alignment of any vector, and a guard behind.
  std::vector<float> packed(static_cast<std::size_t>(total) + 2, -1);
  std::vector<CopySegment> segments;
  std::vector<float> expected = {-1};
  float* to = packed.data() + 1;
  for (const std::vector<float>& tensor : tensors) {
    segments.push_back({tensor.data(), to, static_cast<long long>(tensor.size())});
    to += tensor.size();
    for (const float value : tensor) expected.push_back(value / 4);
  }
  gpus_.Forget();
  Copy(DType::kF32, DType::kF32, segments, {.divisor = 4});
  EXPECT_EQ(gpus_.calls("cuLaunchKernel").size(), 4u);
  expected.resize(packed.size(), -1);
  EXPECT_TRUE(packed == expected);
}

TEST_F(CudaKernelsTest, WhatHasNoInputGetsTheIdentityUnscaled) {
  std::vector<float> out(5, -1);
  fusion::Identity identity;
  const float infinity = std::numeric_limits<float>::infinity();
  std::memcpy(identity.bytes.data(), &infinity, sizeof(infinity));
  const float given[] = {2, 4};
  Copy(DType::kF32, DType::kF32, {{given, out.data(), 2}, {nullptr, out.data() + 2, 2}},
       {.factor = 0.5}, identity);
  EXPECT_THAT(out, ElementsAre(1, 2, infinity, infinity, -1));
}

TEST_F(CudaKernelsTest, NothingIsNotLaunched) {
  gpus_.Forget();
  Copy(DType::kF32, DType::kF32, {});
  Copy(DType::kF32, DType::kF32, {{nullptr, nullptr, 0}});
  EXPECT_TRUE(gpus_.calls().empty());
}

TEST_F(CudaKernelsTest, ReducesAsTheHostDoes) {
  constexpr std::int64_t kCount = 777;
  constexpr std::int64_t kMembers = 3;
  int reductions = 0;
  for (int o = 0; o < core::kReduceOpCount; ++o) {
    for (int d = 0; d < core::kDTypeCount; ++d) {
      const auto op = static_cast<ReduceOp>(o);
      const auto dtype = static_cast<DType>(d);
      if (!Kernels::Reduces(op, dtype)) continue;
      ++reductions;
      SCOPED_TRACE(std::string(core::ReduceOpName(op)) + " of " +
                   std::string(core::DTypeName(dtype)));
      std::vector<std::byte> parts = Numbers(dtype, kCount * kMembers, 3);
      if (dtype == DType::kBool) {
        for (std::byte& byte : parts) byte &= std::byte{1};
      }
      std::vector<std::byte> expected = parts;
      ReduceParts(op, dtype, expected.data(), kMembers, kCount, {}, {});
      expected.resize(kCount * core::SizeOf(dtype));
      std::vector<std::byte> result(expected.size());
      ASSERT_TRUE(
          kernels_->Reduce(op, dtype, parts.data(), kMembers, kCount, result.data(), stream_).ok());
      gpus_.RunDevices();
      EXPECT_TRUE(result == expected);
    }
  }
  EXPECT_EQ(reductions, 3 * 6 + 2 * 4);
}

TEST_F(CudaKernelsTest, ANanWinsWhereverItStands) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> parts = {nan, 1, 0.0F, 2, nan, -0.0F};  // two members of three
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    std::vector<float> result(3);
    ASSERT_TRUE(kernels_->Reduce(op, DType::kF32, parts.data(), 2, 3, result.data(), stream_).ok());
    gpus_.RunDevices();
    EXPECT_TRUE(std::isnan(result[0]) && std::isnan(result[1]));
    EXPECT_EQ(std::signbit(result[2]), op == ReduceOp::kMin);
  }
}

TEST_F(CudaKernelsTest, AllAreFoundWhenTheyAreLoaded) {
  std::shared_ptr<Device> device;
  ASSERT_TRUE(Device::Open(gpus_.cuda(), 4, &device).ok());
  constexpr int kNoSuchSymbol = 500;
  constexpr int kCopies = 4;
  constexpr int kConversions = 25;
  constexpr int kReductions = 20;
  gpus_.FailNext("cuModuleGetFunction", kNoSuchSymbol, kCopies + kConversions + kReductions - 1);
  std::unique_ptr<Kernels> kernels;
  EXPECT_THAT(Kernels::Load(device, "an image", &kernels).message(),
              AllOf(HasSubstr("cuModuleGetFunction of sirtaki_bit_xor_8: a fake error"),
                    HasSubstr("SIRTAKI_GPU_ARCHITECTURES")));
  ASSERT_TRUE(Kernels::Load(device, "an image", &kernels).ok());
  gpus_.FailNext("cuModuleGetFunction", kNoSuchSymbol);  // nobody asks again
  const float value = 1;
  float out = 0;
  const CopySegment segment{&value, &out, 1};
  EXPECT_TRUE(kernels->Copy(DType::kF32, DType::kF32, {&segment, 1}, {}, {}, stream_).ok());
}

TEST_F(CudaKernelsTest, TheDriverIsOfTheMajorVersionOfTheCompilerOrLater) {
  for (const int toolkit : {0, 11080, 12090, 13000, 13020}) {
    EXPECT_TRUE(Kernels::CheckDriver(gpus_.cuda(), toolkit).ok()) << toolkit;  // it is for 13.0
  }
  const core::Status status = Kernels::CheckDriver(gpus_.cuda(), 14010);
  EXPECT_EQ(status.code(), core::StatusCode::kUnsupported);
  EXPECT_EQ(status.message(),
            "the driver here is for CUDA 13.0, and the kernels of this build, which nvcc 14.1 has "
            "compiled, need one for CUDA 14.0 or later: install a later driver, or build with an "
            "nvcc of CUDA 13 (CUDAToolkit_ROOT)");
}

TEST_F(CudaKernelsTest, CopiesWholeTilesAndTheirRestsOfEverySize) {
  for (const DType dtype : {DType::kU8, DType::kI16, DType::kI32, DType::kI64}) {
    const auto size = static_cast<std::int64_t>(core::SizeOf(dtype));
    for (const std::int64_t count :
         {kTile, kTile - 1, kTile + 1, 2 * kTile - 16 / size, kTile / 2 + 3, kTile / 4 + 5}) {
      SCOPED_TRACE(std::string(core::DTypeName(dtype)) + " " + std::to_string(count));
      const std::vector<std::byte> in = Numbers(dtype, count, 9);
      std::vector<std::byte> out(in.size() + 1, std::byte{0x5A});
      Copy(dtype, dtype, {{in.data(), out.data(), count}});
      EXPECT_EQ(out.back(), std::byte{0x5A});
      out.pop_back();
      EXPECT_TRUE(out == in);
      Copy(dtype, dtype, {{out.data(), out.data(), count}});  // onto itself
      EXPECT_TRUE(out == in);
    }
  }
}

TEST_F(CudaKernelsTest, FailuresNameTheKernel) {
  gpus_.FailNext("cuLaunchKernel", 700);
  const float value = 1;
  float out = 0;
  const CopySegment segment{&value, &out, 1};
  EXPECT_THAT(kernels_->Copy(DType::kF32, DType::kF16, {&segment, 1}, {}, {}, stream_).message(),
              HasSubstr("cuLaunchKernel of sirtaki_convert_float32_float16: a fake error"));
  // A pair that no kernel has.
  EXPECT_THAT(kernels_->Copy(DType::kF16, DType::kI64, {&segment, 1}, {}, {}, stream_).message(),
              HasSubstr("there is no kernel sirtaki_convert_float16_int64"));
  gpus_.FailNext("cuModuleLoadData", 209);
  std::shared_ptr<Device> device;
  ASSERT_TRUE(Device::Open(gpus_.cuda(), 4, &device).ok());
  std::unique_ptr<Kernels> none;
  EXPECT_THAT(Kernels::Load(device, "an image", &none).message(),
              HasSubstr("do not run on device 4: cuModuleLoadData"));
}

TEST_F(CudaKernelsTest, AKernelIsOfItsDeviceAlone) {
  const float value = 1;
  float out = 0;
  const CopySegment segment{&value, &out, 1};
  const auto copy = [&](StreamHandle stream) {
    return kernels_->Copy(DType::kF32, DType::kF32, {&segment, 1}, {}, {}, stream);
  };
  EXPECT_THAT(copy(gpus_.MakeStream(2)).message(), HasSubstr("400"));
  EXPECT_TRUE(copy(stream_).ok());
  std::shared_ptr<Device> other;
  ASSERT_TRUE(Device::Open(gpus_.cuda(), 2, &other).ok());
  {
    const Device::Scope scope(*other);
    EXPECT_THAT(copy(stream_).message(), HasSubstr("400"));
  }
  scope_.reset();
  EXPECT_THAT(copy(stream_).message(), HasSubstr("201"));  // the thread has no device
}

}  // namespace
}  // namespace sirtaki::ops::cuda
