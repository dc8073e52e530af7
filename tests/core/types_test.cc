#include "core/types.h"

#include <gtest/gtest.h>

#include <set>
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
      {DType::kU8, "uint8", 1, false},     {DType::kI8, "int8", 1, false},
      {DType::kI16, "int16", 2, false},    {DType::kI32, "int32", 4, false},
      {DType::kI64, "int64", 8, false},    {DType::kF16, "float16", 2, true},
      {DType::kBF16, "bfloat16", 2, true}, {DType::kF32, "float32", 4, true},
      {DType::kF64, "float64", 8, true},   {DType::kBool, "bool", 1, false},
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
}

}  // namespace
}  // namespace sirtaki::core
