#include "frameworks/torch/calls/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/protocol/wire.h"

namespace sirtaki::detail {
namespace {

using core::DType;
using core::OpKind;
using core::ReduceOp;
using core::Signature;
using ::testing::HasSubstr;

const core::RankRanges kMembers{0, 1, 3};

std::string Why(const Signature& signature, const OwnTensor& own = {}) {
  return ValidateRequest(signature, kMembers, own);
}

TEST(ValidateTest, GoodRequestsPass) {
  EXPECT_EQ(Why({.shape = {3, 4}}), "");
  EXPECT_EQ(Why({.shape = {}}, {.dimensions = 0}), "");
  EXPECT_EQ(Why({.shape = {0}}), "");
  EXPECT_EQ(Why({.reduction = ReduceOp::kAverage, .dtype = DType::kI8, .shape = {3}}), "");
  EXPECT_EQ(Why({.dtype = DType::kBF16, .shape = {3}, .prescale = 0.5, .postscale = -2}), "");
  EXPECT_EQ(Why({.kind = OpKind::kBroadcast, .dtype = DType::kBool, .root = 3, .shape = {2}}), "");
  EXPECT_EQ(Why({.kind = OpKind::kAllGather, .dtype = DType::kBool, .shape = {}}), "");
}

TEST(ValidateTest, EveryReductionIsForTheTypesThatItIsDefinedFor) {
  for (int d = 0; d < core::kDTypeCount; ++d) {
    for (int o = 0; o < core::kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      const std::string why = Why({.reduction = op, .dtype = dtype, .shape = {2}});
      EXPECT_EQ(why.empty(), core::IsDefined(op, dtype)) << why;
    }
  }
}

TEST(ValidateTest, AnUndefinedReductionIsToldWithWhatIsDefined) {
  EXPECT_EQ(Why({.dtype = DType::kBool, .shape = {1}}),
            "sum is not defined for bool: bool takes min, max, product, bitwise and, bitwise or, "
            "bitwise xor; sum takes uint8, int8, int16, int32, int64, float16, bfloat16, float32, "
            "float64, complex64 and complex128");
  EXPECT_EQ(Why({.reduction = ReduceOp::kMax, .dtype = DType::kC64, .shape = {1}}),
            "max is not defined for complex64: complex64 takes sum, average; max takes uint8, "
            "int8, int16, int32, int64, float16, bfloat16, float32, float64 and bool");
  EXPECT_THAT(Why({.dtype = DType::kF8E5M2, .shape = {1}}),
              HasSubstr("float8_e5m2 has no reduction at all"));
  // Not where it cannot be asked for.
  EXPECT_THAT(Why({.kind = OpKind::kReduceScatter,
                   .reduction = ReduceOp::kBitOr,
                   .dtype = DType::kF32,
                   .shape = {1}}),
              ::testing::Not(HasSubstr("takes sum, average, min, max, product, Adasum")));
}

TEST(ValidateTest, AdasumIsForAllReduce) {
  EXPECT_EQ(Why({.reduction = ReduceOp::kAdasum, .shape = {2}, .prescale = 0.5}), "");
  EXPECT_EQ(Why({.kind = OpKind::kReduce, .reduction = ReduceOp::kAdasum, .root = 0, .shape = {2}}),
            "Adasum is for all-reduce only, not for reduce");
}

TEST(ValidateTest, ANumberHasNoRows) {
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kAllGatherInto, OpKind::kGather,
                            OpKind::kScatter, OpKind::kAllToAll, OpKind::kReduceScatter}) {
    const int root = core::HasRoot(kind) ? 1 : -1;
    EXPECT_THAT(Why({.kind = kind, .root = root, .shape = {}}, {.rank = 1, .dimensions = 0}),
                HasSubstr("along their first dimension, and this one has none"));
  }
  // The other ranks scatter nothing, and give the shape of a row all the same.
  EXPECT_THAT(Why({.kind = OpKind::kScatter, .root = 1, .shape = {}}, {.rank = 0, .dimensions = 0}),
              HasSubstr("along their first dimension, and this one has none"));
  EXPECT_EQ(Why({.kind = OpKind::kReduce, .root = 1, .shape = {}}, {.rank = 1, .dimensions = 0}),
            "");
}

TEST(ValidateTest, SplitsUseUpTheRows) {
  const Signature all_to_all{.kind = OpKind::kAllToAll, .shape = {2}};
  const auto why = [&](std::int64_t rows, const std::vector<std::int64_t>& splits) {
    return Why(all_to_all, {.rank = 1, .rows = rows, .splits = splits});
  };
  EXPECT_EQ(why(6, {}), "");
  EXPECT_EQ(why(0, {}), "");
  EXPECT_EQ(why(7, {0, 7, 0}), "");
  EXPECT_EQ(why(7, {}),
            "the first dimension, 7, cannot be divided into equal parts for 3 ranks: give splits");
  EXPECT_EQ(why(7, {3, 4}), "2 splits were given for 3 ranks: there must be one for each");
  EXPECT_EQ(why(7, {3, -1, 5}), "a split is negative: -1");
  EXPECT_EQ(why(7, {3, 3, 3}), "the splits add up to 9, but the first dimension is 7");
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  EXPECT_THAT(why(7, {huge, huge, 0}), HasSubstr("64 bits"));
}

TEST(ValidateTest, SplitsOfAScatterAreTheRoots) {
  const Signature scatter{.kind = OpKind::kScatter, .root = 3, .shape = {2}};
  const std::vector<std::int64_t> wrong = {1, 1};
  EXPECT_THAT(Why(scatter, {.rank = 3, .rows = 2, .splits = wrong}), HasSubstr("2 splits"));
  EXPECT_EQ(Why(scatter, {.rank = 0, .rows = 0, .splits = wrong}), "");
  EXPECT_EQ(Why(scatter, {.rank = 3, .rows = 7}), "");  // the remainder goes to the first ranks
}

TEST(ValidateTest, FactorsAreFiniteAndForNumbersThatAreNotComplex) {
  EXPECT_EQ(Why({.dtype = DType::kI32, .shape = {1}, .prescale = 2}), "");
  EXPECT_EQ(Why({.dtype = DType::kU8, .shape = {1}, .postscale = 0.5}), "");
  EXPECT_THAT(Why({.dtype = DType::kC64, .shape = {1}, .prescale = 2}), HasSubstr("prescale"));
  EXPECT_THAT(
      Why({.reduction = ReduceOp::kMax, .dtype = DType::kBool, .shape = {1}, .postscale = 2}),
      HasSubstr("bool"));
  EXPECT_THAT(Why({.shape = {1}, .prescale = std::nan("")}), HasSubstr("finite"));
  EXPECT_THAT(Why({.shape = {1}, .postscale = std::numeric_limits<double>::infinity()}),
              HasSubstr("postscale"));
  EXPECT_EQ(Why({.kind = OpKind::kReduceScatter, .shape = {1}, .prescale = 2}), "");
}

TEST(ValidateTest, CompressionIsForSums) {
  EXPECT_EQ(Why({.wire = DType::kF16, .shape = {3}}), "");
  EXPECT_EQ(Why({.reduction = ReduceOp::kAverage,
                 .dtype = DType::kF64,
                 .wire = DType::kBF16,
                 .shape = {3},
                 .prescale = 0.5}),
            "");
  EXPECT_EQ(Why({.reduction = ReduceOp::kMin, .wire = DType::kF16, .shape = {3}}),
            "compression is for sum and average, not for min");
}

TEST(ValidateTest, RootsAreMembers) {
  EXPECT_THAT(Why({.kind = OpKind::kBroadcast, .root = 2, .shape = {1}}), HasSubstr("0-1, 3"));
  EXPECT_THAT(Why({.kind = OpKind::kBroadcast, .root = -1, .shape = {1}}), HasSubstr("-1"));
}

TEST(ValidateTest, EveryKindWithARootHasOneAmongTheMembers) {
  for (const OpKind kind :
       {OpKind::kBroadcast, OpKind::kReduce, OpKind::kGather, OpKind::kScatter}) {
    EXPECT_EQ(Why({.kind = kind, .root = 2, .shape = {1}}),
              "root rank 2 is not among the ranks 0-1, 3");
    EXPECT_EQ(Why({.kind = kind, .root = 3, .shape = {1}}), "");
  }
}

TEST(ValidateTest, ShapesMakeSense) {
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_THAT(Why({.shape = {huge, huge}}), HasSubstr("64 bits"));
  EXPECT_THAT(Why({.shape = {huge, huge, 0}}), HasSubstr("64 bits"));
  EXPECT_THAT(Why({.kind = OpKind::kAllToAll, .shape = {huge}}, {.rows = 3 * huge}),
              HasSubstr("64 bits"));
}

}  // namespace
}  // namespace sirtaki::detail
