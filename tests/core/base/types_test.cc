#include "core/base/types.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>

namespace sirtaki::core {
namespace {

TEST(TypesTest, DTypesHaveTheirSizes) {
  struct Expected {
    DType dtype;
    std::string_view name;
    std::size_t bytes;
    bool floating;
  };
  const Expected all[] = {
      {DType::kU8, "uint8", 1, false},
      {DType::kI8, "int8", 1, false},
      {DType::kI16, "int16", 2, false},
      {DType::kI32, "int32", 4, false},
      {DType::kI64, "int64", 8, false},
      {DType::kF16, "float16", 2, true},
      {DType::kBF16, "bfloat16", 2, true},
      {DType::kF32, "float32", 4, true},
      {DType::kF64, "float64", 8, true},
      {DType::kBool, "bool", 1, false},
      {DType::kC64, "complex64", 8, false},
      {DType::kC128, "complex128", 16, false},
      {DType::kF8E4M3FN, "float8_e4m3fn", 1, false},
      {DType::kF8E4M3FNUZ, "float8_e4m3fnuz", 1, false},
      {DType::kF8E5M2, "float8_e5m2", 1, false},
      {DType::kF8E5M2FNUZ, "float8_e5m2fnuz", 1, false},
      {DType::kF8E8M0FNU, "float8_e8m0fnu", 1, false},
  };
  static_assert(std::size(all) == kDTypeCount);
  for (const Expected& expected : all) {
    SCOPED_TRACE(expected.name);
    EXPECT_EQ(DTypeName(expected.dtype), expected.name);
    EXPECT_EQ(SizeOf(expected.dtype), expected.bytes);
    EXPECT_EQ(IsFloating(expected.dtype), expected.floating);
  }
}

TEST(TypesTest, OperationsHaveTheFieldsWords) {
  EXPECT_EQ(OpKindName(OpKind::kAllReduce), "all-reduce");
  EXPECT_EQ(OpKindName(OpKind::kBroadcast), "broadcast");
  EXPECT_EQ(OpKindName(OpKind::kAllGather), "all-gather");
  EXPECT_EQ(ReduceOpName(ReduceOp::kSum), "sum");
  EXPECT_EQ(ReduceOpName(ReduceOp::kAverage), "average");
  std::set<std::string_view> names;
  for (int i = 0; i < kOpKindCount; ++i) names.insert(OpKindName(static_cast<OpKind>(i)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kOpKindCount));
  names.clear();
  for (int i = 0; i < kReduceOpCount; ++i) names.insert(ReduceOpName(static_cast<ReduceOp>(i)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kReduceOpCount));
  EXPECT_FALSE(names.contains("unknown"));
}

TEST(TypesTest, ReductionsAreDefinedWhereTheyHaveAMeaning) {
  const auto defined_for = [](ReduceOp op) {
    std::string types;
    for (int i = 0; i < kDTypeCount; ++i) {
      const auto dtype = static_cast<DType>(i);
      if (IsDefined(op, dtype)) types.append(types.empty() ? "" : " ").append(DTypeName(dtype));
    }
    return types;
  };
  const std::string integers = "uint8 int8 int16 int32 int64";
  const std::string floating = "float16 bfloat16 float32 float64";
  EXPECT_EQ(defined_for(ReduceOp::kSum), integers + " " + floating + " complex64 complex128");
  EXPECT_EQ(defined_for(ReduceOp::kAverage), defined_for(ReduceOp::kSum));
  EXPECT_EQ(defined_for(ReduceOp::kMin), integers + " " + floating + " bool");
  EXPECT_EQ(defined_for(ReduceOp::kBitXor), integers + " bool");
  EXPECT_EQ(defined_for(ReduceOp::kAdasum), floating);
}

}  // namespace
}  // namespace sirtaki::core
