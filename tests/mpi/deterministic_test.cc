// RANKS: 3 4
// The option deterministic: the same bits whatever was ready together. Without shared memory, whose
// order of adding is always that of the ranks.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "session/session.h"
#include "tests/support/mpi_main.h"
#include "tests/support/session_calls.h"
#include "tests/support/test_scale.h"

namespace sirtaki::session {
namespace {

using core::Status;
using tests::Vector;

constexpr std::size_t kTensors = 40;

std::vector<float> Given(int rank, std::size_t tensor) {
  std::vector<float> values(100 + tensor * 997);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto x = static_cast<float>(i + 1);
    values[i] = std::sin(x * static_cast<float>(rank + 1)) *
                std::pow(10.0F, static_cast<float>((i + static_cast<std::size_t>(rank)) % 9) - 4);
  }
  return values;
}

enum class Submission { kAllAtOnce, kOneByOne };

// The sums, submitted in an order of this rank's own; one by one, which nothing can fuse, in an order
// of all ranks.
std::vector<std::vector<float>> Sums(bool deterministic, std::uint64_t seed,
                                     Submission submission = Submission::kAllAtOnce) {
  std::shared_ptr<Session> session;
  Status status = Session::CreateOfProcess(tests::SessionOptions([&](core::Config& config) {
                                             config.shared_memory = core::SharedMemoryMode::kOff;
                                             config.deterministic = deterministic;
                                           }),
                                           &session);
  EXPECT_TRUE(status.ok()) << status.ToString();
  if (!status.ok()) return {};
  const int rank = session->topology().rank;
  std::vector<std::unique_ptr<Vector>> vectors;
  std::vector<std::size_t> order(kTensors);
  std::iota(order.begin(), order.end(), 0);
  for (const std::size_t tensor : order) {
    vectors.push_back(std::make_unique<Vector>(core::OpKind::kAllReduce,
                                               "t" + std::to_string(tensor), Given(rank, tensor)));
  }
  std::mt19937_64 random(seed + static_cast<std::uint64_t>(rank) * 1000);
  if (submission == Submission::kAllAtOnce) std::shuffle(order.begin(), order.end(), random);
  for (const std::size_t tensor : order) {
    EXPECT_TRUE(vectors[tensor]->Submit(*session).ok());
    if (submission == Submission::kAllAtOnce) continue;
    status = vectors[tensor]->Synchronize(*session);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  std::vector<std::vector<float>> sums;
  for (const auto& vector : vectors) {
    if (submission == Submission::kAllAtOnce) {
      status = vector->Synchronize(*session);
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
    sums.push_back(vector->values());
  }
  EXPECT_TRUE(session->Shutdown("the test is over").ok());
  return sums;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::uint64_t SeedOfAll() {
  std::uint64_t seed = tests::WorldRank() == 0 ? tests::TestSeed() : 0;
  MPI_Bcast(&seed, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
  return seed;
}

TEST(DeterministicTest, RunsInDifferentOrdersGiveTheSameBits) {
  const std::uint64_t seed = SeedOfAll();
  const std::vector<std::vector<float>> first = Sums(true, seed, Submission::kOneByOne);
  ASSERT_EQ(first.size(), kTensors);
  for (std::uint64_t run = 1; run <= 5; ++run) {
    const std::vector<std::vector<float>> again = Sums(true, seed + run);
    ASSERT_EQ(again.size(), first.size());
    for (std::size_t tensor = 0; tensor < first.size(); ++tensor) {
      EXPECT_TRUE(SameBits(again[tensor], first[tensor])) << "tensor " << tensor << ", run " << run;
    }
  }
}

// A control: these numbers and ranks show in their bits what was fused.
TEST(DeterministicTest, WithoutTheOptionWhatIsFusedShowsInTheBits) {
  const std::uint64_t seed = SeedOfAll();
  const std::vector<std::vector<float>> alone = Sums(false, seed, Submission::kOneByOne);
  ASSERT_EQ(alone.size(), kTensors);
  bool differs = false;
  for (std::uint64_t run = 1; run <= 20 && !differs; ++run) {
    const std::vector<std::vector<float>> fused = Sums(false, seed + run);
    ASSERT_EQ(fused.size(), kTensors);
    differs = !std::equal(alone.begin(), alone.end(), fused.begin(), SameBits);
    MPI_Bcast(&differs, 1, MPI_CXX_BOOL, 0, MPI_COMM_WORLD);
  }
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace sirtaki::session
