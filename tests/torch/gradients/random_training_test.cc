// Random training programs give the same parameters with shards as without, to the bit.
#include "tests/torch/gradients/random_training.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "frameworks/torch/tensors/tensor_bridge.h"
#include "tests/support/test_scale.h"
#include "tests/torch/checkpoint/scratch_folder.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests::random_training {
namespace {

bool SameBits(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const torch::Tensor x = a.contiguous();
  const torch::Tensor y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// The first thing that two runs have seen differently; empty: none.
std::string FirstDifference(const std::vector<Seen>& first, const std::vector<Seen>& second) {
  for (std::size_t i = 0; i < first.size() && i < second.size(); ++i) {
    if (SameBits(first[i].tensor, second[i].tensor)) continue;
    const torch::Tensor a = first[i].tensor.reshape(-1).to(torch::kDouble);
    const torch::Tensor b = second[i].tensor.reshape(-1).to(torch::kDouble);
    std::ostringstream text;
    text << first[i].what << ": ";
    if (a.numel() != b.numel()) return text.str() + "other sizes";
    const torch::Tensor differs = a.ne(b).nonzero().reshape(-1);
    text << differs.numel() << " of " << a.numel() << " elements";
    if (differs.numel() == 0) return text.str() + ", in signs of zeros or kinds of NaN";
    const auto at = differs[0].item<std::int64_t>();
    text << ", the first is " << at << ": " << a[at].item<double>() << " and "
         << b[at].item<double>();
    return text.str();
  }
  return first.size() == second.size() ? "" : "they have not seen equally much";
}

// What went wrong; empty: nothing.
std::string TrainBothWays(const Program& program) {
  const ScratchFolder folder;
  const auto ranks = static_cast<std::size_t>(program.size);
  std::vector<std::string> wrong(ranks);
  std::vector<std::vector<Seen>> seen(ranks);
  RunTorchRanks(
      program.size,
      [&](int rank) {
        const auto here = static_cast<std::size_t>(rank);
        std::string running = "without shards";
        try {
          Run whole(program, rank, /*sharded=*/false, folder.File("whole"));
          const std::vector<Seen> expected = whole.Train();
          running = "with shards";
          Run sharded(program, rank, /*sharded=*/true, folder.File("sharded"));
          seen[here] = sharded.Train();
          wrong[here] = FirstDifference(expected, seen[here]);
        } catch (...) {
          wrong[here] = running + ": " + detail::TextOfCurrent();
        }
      },
      program.config, program.host_of_rank, program.sharing);
  std::string text;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (!wrong[rank].empty()) text += "\nrank " + std::to_string(rank) + ": " + wrong[rank];
  }
  if (!text.empty()) return text;
  for (std::size_t i = 0; i < seen[0].size(); ++i) {
    const auto& [what, tensor] = seen[0][i];
    if (what.rfind("parameter", 0) != 0) continue;
    if (!torch::isfinite(tensor).all().item<bool>()) return "\n" + what + ": not finite";
    for (std::size_t rank = 1; rank < ranks && !program.own_numbers; ++rank) {
      if (SameBits(tensor, seen[rank][i].tensor)) continue;
      return "\n" + what + ": rank " + std::to_string(rank) + " has other bits than rank 0";
    }
  }
  return {};
}

TEST(RandomTrainingTest, ShardsGiveTheBitsOfARunWithout) {
  const std::uint64_t first = TestSeed();
  const int count = ScaledCount(30, 200);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    const Program program(seed);
    const std::string wrong = TrainBothWays(program);
    ASSERT_EQ(wrong, "")
        << "again with SIRTAKI_TEST_SEED=" << seed
        << " SIRTAKI_TEST_SCALE=0.001 sirtaki_torch_tests --gtest_filter=RandomTrainingTest.*\n"
        << program.ToString();
  }
}

}  // namespace
}  // namespace sirtaki::tests::random_training
