// RANKS: 1 2 3 4
// Half the bytes over MPI: on both lanes, in counts that no number of ranks divides.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::vector<std::int64_t> kCounts = {0, 1, 3, 1023, 40001, 1300007};

class CompressionMpiTest : public testing::Test {
 protected:
  void SetUp() override { init(); }
  void TearDown() override { shutdown(); }
};

// Sixteenths below 128, which float32 adds up exactly in any order.
torch::Tensor ValuesOf(int of_rank, std::int64_t count, torch::ScalarType type) {
  return ((torch::arange(count, torch::kLong) * 37 + of_rank * 101) % 4001 - 2000)
      .to(torch::kDouble)
      .div(16)
      .to(type);
}

torch::Tensor Average(std::int64_t count, torch::ScalarType type, torch::ScalarType wire) {
  auto sum = torch::zeros({count}, torch::kFloat);
  for (int r = 0; r < size(); ++r) sum += ValuesOf(r, count, type).to(wire).to(torch::kFloat);
  return (sum / size()).to(wire).to(type);
}

bool SameBits(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

TEST_F(CompressionMpiTest, FloatsAreRoundedOnTheWay) {
  for (const auto compression : {Compression::F16, Compression::BF16}) {
    const auto wire = compression == Compression::F16 ? torch::kHalf : torch::kBFloat16;
    const auto options =
        AllreduceOptions().compression(compression).compression_scope(CompressionScope::Everywhere);
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      for (const std::int64_t count : kCounts) {
        const auto mine = ValuesOf(rank(), count, type);
        const auto expected = size() == 1 ? mine : Average(count, type, wire);
        EXPECT_TRUE(SameBits(allreduce(mine, options), expected))
            << type << " as " << wire << ", " << count;
      }
    }
  }
}

TEST_F(CompressionMpiTest, HalfTensorsAreRoundedOnce) {
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    for (const std::int64_t count : kCounts) {
      const auto mine = ValuesOf(rank(), count, type);
      EXPECT_TRUE(SameBits(allreduce(mine), Average(count, type, type))) << type << ", " << count;
    }
  }
}

// What no order of additions makes equal: only taking the gathered value does.
TEST_F(CompressionMpiTest, AllRanksGetTheSameBits) {
  const auto mine = (torch::arange(300007, torch::kFloat) + rank()).sin();
  const auto result = allreduce(mine, AllreduceOptions()
                                          .compression(Compression::F16)
                                          .compression_scope(CompressionScope::Everywhere));
  const auto all = allgather(result.unsqueeze(0));
  for (int r = 0; r < size(); ++r) EXPECT_TRUE(SameBits(all[r].contiguous(), result));
}

TEST_F(CompressionMpiTest, AnAverageThatFitsDoesNotOverflowAsASum) {
  for (const std::int64_t count : {3, 100001}) {
    const auto mine = torch::full({count}, 60000, torch::kHalf);
    EXPECT_TRUE(torch::equal(allreduce(mine), mine));
  }
}

TEST_F(CompressionMpiTest, RanksThatDoNotAgreeAreTold) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto compression = rank() == 0 ? Compression::F16 : Compression::None;
  try {
    allreduce(torch::ones({3}), AllreduceOptions()
                                    .name("w")
                                    .compression(compression)
                                    .compression_scope(CompressionScope::Everywhere));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Mismatch);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("compressed to float16 on rank 0"),
                                    HasSubstr("not compressed on rank")));
  }
  EXPECT_TRUE(torch::equal(allreduce(torch::ones({3})), torch::ones({3})));
}

}  // namespace
}  // namespace sirtaki::tests
