#include "sirtaki/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "sirtaki/collectives.h"
#include "sirtaki/session.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(MeshSetsTest, RowsLieWithinHostsAndAreSetsOfTheirOwn) {
  // Ranks 0 and 3 on one host, 1 and 2 on the other.
  const std::vector<int> hosts = {0, 1, 1, 0};
  RunTorchRanks(
      4,
      [](int rank) {
        const Mesh grid = mesh({{"data", -1}, {"tensor", 2}});
        ASSERT_EQ(grid.axes().size(), 2U);
        EXPECT_EQ(grid.axes()[0].size, 2);
        EXPECT_EQ(grid.size("data"), 2);
        EXPECT_EQ(grid.coordinate("data"), rank == 0 || rank == 3 ? 0 : 1);
        EXPECT_EQ(grid.coordinate("tensor"), rank == 3 || rank == 2 ? 1 : 0);
        EXPECT_EQ(grid.ranks("tensor"),
                  rank == 0 || rank == 3 ? (std::vector<int>{0, 3}) : (std::vector<int>{1, 2}));
        // By coordinate here, ascending there.
        if (rank > 1) {
          EXPECT_THAT(grid.ranks("data"), ElementsAre(3, 2));
          EXPECT_THAT(grid.set("data").ranks(), ElementsAre(2, 3));
        }
        EXPECT_EQ(grid.sets("data").size(), 2U);
        EXPECT_THAT(grid.sets("data")[1].ranks(), ElementsAre(2, 3));
      },
      {}, hosts);
}

TEST(MeshSetsTest, ACallOfARowStaysThere) {
  RunTorchRanks(4, [](int rank) {
    const Mesh grid = mesh({{"data", 2}, {"pipe", 2}, {"tensor", 1}});
    const auto sum = [&](const std::string& axis) {
      return allreduce(torch::full({1}, 1.0 + rank),
                       AllreduceOptions().op(ReduceOp::Sum).process_set(grid.set(axis)))
          .item<double>();
    };
    EXPECT_EQ(sum("data"), rank % 2 == 0 ? 1 + 3 : 2 + 4);
    EXPECT_EQ(sum("pipe"), rank < 2 ? 1 + 2 : 3 + 4);
    EXPECT_EQ(sum("tensor"), 1 + rank);
  });
}

TEST(MeshSetsTest, ASizeThatDoesNotFitIsRefusedOnEveryRank) {
  RunTorchRanks(3, [](int) {
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [] {
                          mesh({{"data", 2}, {"pipe", 2}});
                        }),
                HasSubstr("its sizes have to multiply to 3, the number of ranks"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [] {
                          mesh({{"data", 3}}).set("date");
                        }),
                HasSubstr("there is no axis of the mesh \"date\"; allowed is data"));
  });
}

TEST(MeshSetsTest, RanksThatDisagreeAreTold) {
  RunTorchRanks(2, [](int rank) {
    EXPECT_THAT(
        ErrorOf(ErrorCode::Mismatch,
                [&] {
                  mesh({{rank == 0 ? "data" : "pipe", 2}});
                }),
        AllOf(HasSubstr("the axes of mesh()"), HasSubstr("axis \"data\" of size 2 on rank 0")));
  });
}

TEST(MeshSetsTest, NeedsAJob) {
  ErrorOf(ErrorCode::NotInitialized, [] { mesh({{"data", 1}}); });
}

}  // namespace
}  // namespace sirtaki::tests
