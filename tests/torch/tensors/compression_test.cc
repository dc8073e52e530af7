#include "sirtaki/compression.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "frameworks/torch/tensors/compression.h"
#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using detail::WireType;
using testing::AllOf;
using testing::HasSubstr;

// On the small lane, and on the large one: more than a window, divisible by nothing.
const std::vector<std::int64_t> kCounts = {0, 1, 5, 1000003};

AllreduceOptions Compressed(Compression compression, ReduceOp op = ReduceOp::Average) {
  return AllreduceOptions()
      .op(op)
      .compression(compression)
      .compression_scope(CompressionScope::Everywhere);
}

torch::ScalarType TypeOf(Compression compression) {
  return compression == Compression::F16 ? torch::kHalf : torch::kBFloat16;
}

// Every rank can make every rank's.
torch::Tensor ValuesOf(int rank, std::int64_t count, torch::ScalarType type) {
  return (torch::arange(count, torch::kDouble) * 0.37 + rank).sin().mul(3 + rank).to(type);
}

// The all-reduce as compression.h says it, by LibTorch's own conversions.
torch::Tensor Reference(const std::vector<torch::Tensor>& inputs, Compression compression,
                        ReduceOp op) {
  const auto half = TypeOf(compression);
  auto sum = inputs[0].to(half).to(torch::kFloat);
  for (std::size_t r = 1; r < inputs.size(); ++r) sum = sum + inputs[r].to(half).to(torch::kFloat);
  if (op == ReduceOp::Average) sum = sum / static_cast<double>(inputs.size());
  return sum.to(half).to(inputs[0].scalar_type());
}

bool SameBits(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

void ExpectSameBitsOnAllRanks(const torch::Tensor& tensor) {
  const auto bytes = tensor.reshape({-1}).view(torch::kUInt8);
  const auto all = allgather(bytes.unsqueeze(0));
  for (std::int64_t r = 0; r < all.size(0); ++r) EXPECT_TRUE(torch::equal(all[r], bytes));
}

core::Topology Hosts(int size, int local_size) {
  core::Topology topology;
  topology.size = size;
  topology.local_size = local_size;
  return topology;
}

TEST(WireTypeTest, FloatsTravelAsWhatWasAsked) {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    const auto of = [&](Compression compression) {
      return WireType(compression, CompressionScope::Everywhere, Hosts(2, 2), type);
    };
    EXPECT_EQ(of(Compression::None), std::nullopt);
    EXPECT_EQ(of(Compression::F16), core::DType::kF16);
    EXPECT_EQ(of(Compression::BF16), core::DType::kBF16);
  }
}

TEST(WireTypeTest, OtherTypesTravelAsTheyAre) {
  for (const auto type : {torch::kHalf, torch::kBFloat16, torch::kInt, torch::kLong, torch::kBool,
                          torch::kComplexFloat}) {
    EXPECT_EQ(WireType(Compression::F16, CompressionScope::Everywhere, Hosts(4, 2), type),
              std::nullopt);
  }
}

TEST(WireTypeTest, BetweenHostsNeedsSeveral) {
  const auto of = [](const core::Topology& topology) {
    return WireType(Compression::BF16, CompressionScope::BetweenHosts, topology, torch::kFloat);
  };
  EXPECT_EQ(of(Hosts(1, 1)), std::nullopt);
  EXPECT_EQ(of(Hosts(4, 4)), std::nullopt);
  EXPECT_EQ(of(Hosts(4, 3)), core::DType::kBF16);  // and the one rank of the other host:
  EXPECT_EQ(of(Hosts(4, 1)), core::DType::kBF16);
}

TEST(CompressionTest, ResultsAreThoseOfTheRoundedInputs) {
  RunTorchRanks(3, [](int rank) {
    for (const auto compression : {Compression::F16, Compression::BF16}) {
      for (const auto type : {torch::kFloat, torch::kDouble}) {
        for (const auto op : {ReduceOp::Sum, ReduceOp::Average}) {
          for (const std::int64_t count : kCounts) {
            std::vector<torch::Tensor> inputs;
            for (int r = 0; r < 3; ++r) inputs.push_back(ValuesOf(r, count, type));
            const auto result =
                allreduce(inputs[static_cast<std::size_t>(rank)], Compressed(compression, op));
            EXPECT_TRUE(SameBits(result, Reference(inputs, compression, op)))
                << type << " as " << TypeOf(compression) << ", " << count;
          }
        }
      }
    }
  });
}

TEST(CompressionTest, AllRanksGetTheSameBits) {
  RunTorchRanks(4, [](int rank) {
    for (const std::int64_t count : kCounts) {
      if (count == 0) continue;
      const auto mine = ValuesOf(rank, count, torch::kFloat);
      ExpectSameBitsOnAllRanks(allreduce(mine, Compressed(Compression::BF16)));
      ExpectSameBitsOnAllRanks(allreduce(mine.to(torch::kHalf)));
    }
  });
}

TEST(CompressionTest, WorksInPlaceAndOnViews) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> inputs = {ValuesOf(0, 60000, torch::kFloat),
                                               ValuesOf(1, 60000, torch::kFloat)};
    const auto expected = Reference(inputs, Compression::F16, ReduceOp::Average);
    auto mine = inputs[static_cast<std::size_t>(rank)].clone();
    const auto before = mine.clone();
    EXPECT_TRUE(SameBits(allreduce(mine, Compressed(Compression::F16)), expected));
    EXPECT_TRUE(SameBits(mine, before)) << "the input was written to";
    allreduce_(mine, Compressed(Compression::F16));
    EXPECT_TRUE(SameBits(mine, expected));
    auto columns = inputs[static_cast<std::size_t>(rank)].reshape({200, 300}).t();
    allreduce_(columns, Compressed(Compression::F16));
    EXPECT_TRUE(torch::equal(columns, expected.reshape({200, 300}).t()));
  });
}

TEST(CompressionTest, AnAverageThatFitsDoesNotOverflowAsASum) {
  RunTorchRanks(3, [](int rank) {
    for (const std::int64_t count : {3, 100001}) {
      const auto mine = torch::full({count}, 60000 - 32 * rank, torch::kHalf);
      const auto average = allreduce(mine);
      EXPECT_TRUE(torch::equal(average, torch::full({count}, 59968, torch::kHalf)));
      const auto sum = allreduce(mine, AllreduceOptions().op(ReduceOp::Sum));
      EXPECT_TRUE(sum.isinf().all().item<bool>());
      const auto wide = mine.to(torch::kFloat);
      EXPECT_TRUE(torch::equal(allreduce(wide, Compressed(Compression::F16)),
                               torch::full({count}, 59968.0f)));
    }
  });
}

TEST(CompressionTest, WhatIsNotFiniteAndWhatIsSubnormalSurvives) {
  const float inf = std::numeric_limits<float>::infinity();
  RunTorchRanks(2, [inf](int rank) {
    const auto few = rank == 0 ? torch::tensor({std::nanf(""), inf, inf, 3e-7f, -0.0f, 70000.0f})
                               : torch::tensor({1.0f, 2.0f, -inf, 3e-7f, -0.0f, 0.0f});
    const float tiny = torch::tensor(3e-7f).to(torch::kHalf).item<float>();
    ASSERT_NE(tiny, 3e-7f);  // subnormal as float16: a few bits only
    for (const std::int64_t times : {1, 20001}) {
      const auto sum = allreduce(few.repeat({times}), Compressed(Compression::F16, ReduceOp::Sum))
                           .reshape({times, 6});
      EXPECT_TRUE(sum.select(1, 0).isnan().all().item<bool>());
      EXPECT_TRUE(sum.select(1, 1).eq(inf).all().item<bool>());
      EXPECT_TRUE(sum.select(1, 2).isnan().all().item<bool>());
      EXPECT_TRUE(sum.select(1, 3).eq(2 * tiny).all().item<bool>()) << sum[0];
      EXPECT_TRUE(torch::signbit(sum.select(1, 4)).all().item<bool>());
      EXPECT_TRUE(sum.select(1, 5).eq(inf).all().item<bool>()) << "beyond float16's range";
    }
  });
}

// The factors as the options say it: prescale before anything is rounded, postscale at the end.
TEST(CompressionTest, FactorsBringValuesIntoTheRangeAndBack) {
  RunTorchRanks(2, [](int rank) {
    for (const std::int64_t count : {7, 100001}) {
      for (const auto type : {torch::kFloat, torch::kDouble}) {
        const auto mine = torch::full({count}, 4e6 * (rank + 1), type);
        const auto options = Compressed(Compression::F16).prescale(0x1p-10).postscale(0x1p10);
        const auto expected = torch::full({count}, 5859.375, torch::kDouble)  // 6e6 / 1024
                                  .to(torch::kHalf)
                                  .to(type) *
                              1024;
        EXPECT_TRUE(torch::equal(allreduce(mine, options), expected));
        const auto none = Compressed(Compression::F16).postscale(1e-30);
        EXPECT_TRUE(torch::equal(allreduce(torch::ones({count}, type), none),
                                 torch::ones({count}, type) * 1e-30))
            << "float16 has no 1e-30";
      }
    }
  });
}

// Nothing of 16-bit tensors is rounded before it is added up.
TEST(CompressionTest, FactorsOfHalfTensorsAreAppliedInFloat) {
  RunTorchRanks(3, [](int) {
    for (const std::int64_t count : {7, 100001}) {
      const auto mine = torch::full({count}, 3, torch::kHalf);
      const auto options = AllreduceOptions().op(ReduceOp::Sum).prescale(1e-9).postscale(1e9);
      EXPECT_TRUE(torch::equal(allreduce(mine, options), torch::full({count}, 9, torch::kHalf)));
    }
  });
}

TEST(CompressionTest, IsBetweenHostsOnlyUnlessToldOtherwise) {
  const auto tenth = torch::full({50000}, 0.1f);
  const auto rounded = tenth.to(torch::kBFloat16).to(torch::kFloat);
  const auto options = AllreduceOptions().compression(Compression::BF16);
  for (const bool one_host : {true, false}) {
    RunTorchRanks(
        2,
        [&](int) {
          EXPECT_TRUE(torch::equal(allreduce(tenth, options), one_host ? tenth : rounded));
        },
        {}, one_host ? std::vector<int>{} : std::vector<int>{0, 1});
  }
}

TEST(CompressionTest, AloneNothingTravelsAndNothingIsRounded) {
  RunTorchRanks(1, [](int) {
    for (const std::int64_t count : {3, 100000}) {
      const auto tenth = torch::full({count}, 0.1f);
      EXPECT_TRUE(torch::equal(allreduce(tenth, Compressed(Compression::BF16)), tenth));
    }
  });
}

TEST(CompressionTest, LeavesOtherTypesAlone) {
  RunTorchRanks(2, [](int rank) {
    const auto numbers = torch::tensor({1, 1000001}) * (rank + 1);
    EXPECT_TRUE(torch::equal(allreduce(numbers, Compressed(Compression::F16, ReduceOp::Sum)),
                             torch::tensor({3, 3000003})));
    const auto half = torch::full({3}, 1.0e5, torch::kBFloat16);
    EXPECT_TRUE(torch::equal(allreduce(half, Compressed(Compression::F16)), half));
  });
}

TEST(CompressionTest, RanksThatDoNotAgreeAreTold) {
  RunTorchRanks(3, [](int rank) {
    const auto tensor = torch::ones({4});
    std::string text = ErrorOf(ErrorCode::Mismatch, [&] {
      const auto compression = rank == 1 ? Compression::BF16 : Compression::None;
      allreduce(tensor, Compressed(compression).name("w"));
    });
    EXPECT_THAT(text, AllOf(HasSubstr("\"w\": "), HasSubstr("not compressed on ranks 0, 2"),
                            HasSubstr("compressed to bfloat16 on rank 1")));
    text = ErrorOf(ErrorCode::Mismatch, [&] {
      const auto compression = rank == 0 ? Compression::F16 : Compression::BF16;
      allreduce(tensor, Compressed(compression).name("w"));
    });
    EXPECT_THAT(text, AllOf(HasSubstr("compressed to float16 on rank 0"),
                            HasSubstr("compressed to bfloat16 on ranks 1-2")));
    EXPECT_TRUE(torch::equal(allreduce(tensor), tensor));
  });
}

TEST(CompressionTest, AnUndefinedTensorIsToldAsEver) {
  RunTorchRanks(2, [](int) {
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { allreduce(torch::Tensor(), Compressed(Compression::F16)); }),
                HasSubstr("undefined"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
