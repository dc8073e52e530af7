#include "ops/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::Signature;
using ::testing::HasSubstr;

const core::RankRanges kMembers{0, 1, 3};

std::string Why(const Signature& signature, int dimensions = 1) {
  return ValidateRequest(signature, kMembers, dimensions);
}

TEST(ValidateTest, GoodRequestsPass) {
  EXPECT_EQ(Why({.shape = {3, 4}}), "");
  EXPECT_EQ(Why({.shape = {}}, 0), "");
  EXPECT_EQ(Why({.shape = {0}}), "");
  EXPECT_EQ(Why({.reduction = core::ReduceOp::kAverage, .dtype = DType::kI8, .shape = {3}}), "");
  EXPECT_EQ(Why({.dtype = DType::kBF16, .shape = {3}, .prescale = 0.5, .postscale = -2}), "");
  EXPECT_EQ(Why({.kind = OpKind::kBroadcast, .dtype = DType::kBool, .root = 3, .shape = {2}}), "");
  EXPECT_EQ(Why({.kind = OpKind::kAllGather, .dtype = DType::kBool, .shape = {}}), "");
}

TEST(ValidateTest, BoolIsOnlyMoved) {
  EXPECT_THAT(Why({.dtype = DType::kBool, .shape = {1}}), HasSubstr("bool"));
}

TEST(ValidateTest, ANumberCannotBeGathered) {
  EXPECT_THAT(Why({.kind = OpKind::kAllGather, .shape = {}}, 0), HasSubstr("first dimension"));
}

TEST(ValidateTest, FactorsAreFiniteAndForFloats) {
  EXPECT_THAT(Why({.dtype = DType::kI32, .shape = {1}, .prescale = 2}), HasSubstr("prescale"));
  EXPECT_THAT(Why({.dtype = DType::kI32, .shape = {1}, .postscale = 2}), HasSubstr("int32"));
  EXPECT_THAT(Why({.shape = {1}, .prescale = std::nan("")}), HasSubstr("finite"));
  EXPECT_THAT(Why({.shape = {1}, .postscale = std::numeric_limits<double>::infinity()}),
              HasSubstr("postscale"));
  EXPECT_THAT(Why({.kind = OpKind::kBroadcast, .root = 0, .shape = {1}, .prescale = 2}),
              HasSubstr("all-reduce only"));
}

TEST(ValidateTest, CompressionIsForFloatsThatAreSummed) {
  EXPECT_EQ(Why({.wire = DType::kF16, .shape = {3}}), "");
  EXPECT_EQ(Why({.reduction = core::ReduceOp::kAverage,
                 .dtype = DType::kF64,
                 .wire = DType::kBF16,
                 .shape = {3},
                 .prescale = 0.5}),
            "");
  EXPECT_EQ(Why({.dtype = DType::kI32, .wire = DType::kF16, .shape = {3}}),
            "compression is for float32 and float64, not for int32");
  EXPECT_EQ(Why({.dtype = DType::kBF16, .wire = DType::kBF16, .shape = {3}}),
            "compression is for float32 and float64, not for bfloat16");
  EXPECT_EQ(Why({.wire = DType::kI16, .shape = {3}}),
            "compression is to float16 or bfloat16, not to int16");
  EXPECT_EQ(Why({.kind = OpKind::kBroadcast, .wire = DType::kF16, .root = 0, .shape = {3}}),
            "compression is for all-reduce only");
}

TEST(ValidateTest, RootsAreMembers) {
  EXPECT_THAT(Why({.kind = OpKind::kBroadcast, .root = 2, .shape = {1}}), HasSubstr("0-1, 3"));
  EXPECT_THAT(Why({.kind = OpKind::kBroadcast, .root = -1, .shape = {1}}), HasSubstr("-1"));
  EXPECT_THAT(Why({.root = 0, .shape = {1}}), HasSubstr("no root"));
}

TEST(ValidateTest, OnlyAllReduceReduces) {
  EXPECT_THAT(Why({.kind = OpKind::kAllGather, .reduction = core::ReduceOp::kAverage, .shape = {}}),
              HasSubstr("average"));
}

TEST(ValidateTest, ShapesMakeSense) {
  EXPECT_THAT(Why({.shape = {3, -1}}), HasSubstr("negative"));
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_THAT(Why({.shape = {huge, huge}}), HasSubstr("64 bits"));
  EXPECT_THAT(Why({.shape = {huge, huge, 0}}), HasSubstr("64 bits"));
}

TEST(ValidateTest, GpusAreNotSupportedYet) {
  EXPECT_THAT(Why({.device = core::DeviceKind::kCuda, .shape = {1}}), HasSubstr("GPU"));
}

}  // namespace
}  // namespace sirtaki::ops
