#include "sirtaki/sampler.h"
#include "sirtaki/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Indices = std::vector<std::size_t>;

DistributedSampler Make(std::size_t samples, int rank, int ranks,
                        DistributedSamplerOptions options = {}) {
  return DistributedSampler(samples, options.rank(rank).ranks(ranks));
}

// What is left of the epoch.
Indices Rest(DistributedSampler& sampler, std::size_t batch_size = 3) {
  Indices all;
  while (const auto batch = sampler.next(batch_size)) {
    EXPECT_LE(batch->size(), batch_size);
    EXPECT_FALSE(batch->empty());
    all.insert(all.end(), batch->begin(), batch->end());
  }
  return all;
}

std::vector<Indices> OfAllRanks(std::size_t samples, int ranks,
                                const DistributedSamplerOptions& options) {
  std::vector<Indices> shares;
  for (int rank = 0; rank < ranks; ++rank) {
    DistributedSampler sampler = Make(samples, rank, ranks, options);
    shares.push_back(Rest(sampler));
    EXPECT_EQ(shares.back().size(), sampler.size());
  }
  return shares;
}

// Counts how often each sample is given to any rank.
std::vector<int> Counts(std::size_t samples, const std::vector<Indices>& shares) {
  std::vector<int> counts(samples);
  for (const Indices& share : shares) {
    for (const std::size_t index : share) ++counts.at(index);
  }
  return counts;
}

void Load(DistributedSampler& into, const DistributedSampler& from) {
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  from.save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  into.load(in);
}

TEST(DistributedSamplerTest, SharesAreInterleaved) {
  const auto options = DistributedSamplerOptions().shuffle(false);
  EXPECT_THAT(OfAllRanks(6, 2, options), ElementsAre(Indices{0, 2, 4}, Indices{1, 3, 5}));
}

TEST(DistributedSamplerTest, KeepGivesEverySampleOnce) {
  for (const std::size_t samples : {0, 1, 2, 7, 8, 9, 100}) {
    for (const int ranks : {1, 2, 3, 5}) {
      const auto shares =
          OfAllRanks(samples, ranks, DistributedSamplerOptions().uneven(Uneven::Keep));
      EXPECT_THAT(Counts(samples, shares), testing::Each(1)) << samples << " on " << ranks;
      for (const Indices& share : shares) {
        EXPECT_LE(shares[0].size() - share.size(), 1u) << samples << " on " << ranks;
      }
    }
  }
}

TEST(DistributedSamplerTest, PadGivesAllRanksAsManyAndTheFirstAgain) {
  const auto options = DistributedSamplerOptions().shuffle(false).uneven(Uneven::Pad);
  EXPECT_THAT(OfAllRanks(7, 3, options),
              ElementsAre(Indices{0, 3, 6}, Indices{1, 4, 0}, Indices{2, 5, 1}));
  // Shuffled: what comes twice is what came first.
  const auto shares = OfAllRanks(7, 3, DistributedSamplerOptions());
  EXPECT_EQ(shares[1][2], shares[0][0]);
  EXPECT_EQ(shares[2][2], shares[1][0]);
}

TEST(DistributedSamplerTest, DropLeavesTheLastOut) {
  const auto options = DistributedSamplerOptions().shuffle(false).uneven(Uneven::Drop);
  EXPECT_THAT(OfAllRanks(8, 3, options), ElementsAre(Indices{0, 3}, Indices{1, 4}, Indices{2, 5}));
  const auto counts = Counts(8, OfAllRanks(8, 3, DistributedSamplerOptions().uneven(Uneven::Drop)));
  EXPECT_EQ(std::count(counts.begin(), counts.end(), 1), 6);
  EXPECT_EQ(std::count(counts.begin(), counts.end(), 0), 2);
}

TEST(DistributedSamplerTest, FewerSamplesThanRanks) {
  const auto unshuffled = DistributedSamplerOptions().shuffle(false);
  EXPECT_THAT(OfAllRanks(2, 5, DistributedSamplerOptions(unshuffled).uneven(Uneven::Pad)),
              ElementsAre(Indices{0}, Indices{1}, Indices{0}, Indices{1}, Indices{0}));
  EXPECT_THAT(OfAllRanks(2, 3, DistributedSamplerOptions(unshuffled).uneven(Uneven::Keep)),
              ElementsAre(Indices{0}, Indices{1}, Indices{}));
  EXPECT_THAT(OfAllRanks(2, 3, DistributedSamplerOptions(unshuffled).uneven(Uneven::Drop)),
              testing::Each(Indices{}));
}

// The order as sampler.h and sampler.cc describe it, computed with 128-bit arithmetic instead of
// the sampler's: the draw below a bound is the first one under the greatest multiple of it.
Indices ExpectedOrder(std::size_t samples, std::uint64_t seed, std::uint64_t epoch) {
  const auto mix = [](std::uint64_t x) {
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
  };
  Indices order(samples);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(mix(mix(seed) + epoch));
  for (std::size_t i = samples - 1; i > 0; --i) {
    __extension__ using Wide = unsigned __int128;
    const Wide all = Wide{1} << 64;
    const Wide multiple = all / (i + 1) * (i + 1);
    std::uint64_t drawn = random();
    while (Wide{drawn} >= multiple) drawn = random();
    std::swap(order[i], order[drawn % (i + 1)]);
  }
  return order;
}

TEST(DistributedSamplerTest, TheOrderIsFixedForAllTimes) {
  for (const std::size_t epoch : {0, 1, 5}) {
    DistributedSampler sampler = Make(1000, 0, 1, DistributedSamplerOptions().seed(42));
    sampler.set_epoch(epoch);
    EXPECT_EQ(Rest(sampler), ExpectedOrder(1000, 42, epoch)) << epoch;
  }
  // A saved run must go on with these, whatever becomes of the code.
  DistributedSampler sampler = Make(10, 0, 1, DistributedSamplerOptions().seed(1));
  EXPECT_THAT(Rest(sampler), ElementsAre(5, 0, 8, 7, 3, 1, 9, 6, 4, 2));
}

TEST(DistributedSamplerTest, OrdersDifferByEpochAndSeed) {
  std::set<Indices> orders;
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    for (std::size_t epoch = 0; epoch < 4; ++epoch) {
      DistributedSampler sampler = Make(50, 0, 1, DistributedSamplerOptions().seed(seed));
      sampler.set_epoch(epoch);
      Indices order = Rest(sampler);
      orders.insert(order);
      std::sort(order.begin(), order.end());
      for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i);
    }
  }
  EXPECT_EQ(orders.size(), 16u);
}

TEST(DistributedSamplerTest, EverySampleComesEverywhereEquallyOften) {
  // 3 samples, 6 orders, 6000 epochs: each place sees each sample about 2000 times.
  constexpr int kEpochs = 6000;
  int seen[3][3] = {};
  DistributedSampler sampler = Make(3, 0, 1);
  for (std::size_t epoch = 0; epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);
    const Indices order = Rest(sampler);
    for (std::size_t place = 0; place < 3; ++place) ++seen[place][order[place]];
  }
  for (const auto& place : seen) {
    for (const int count : place) EXPECT_NEAR(count, kEpochs / 3, 200);  // 5 standard deviations
  }
}

TEST(DistributedSamplerTest, ResetGoesOnToTheNextEpochOnceOneWasBegun) {
  DistributedSampler sampler = Make(20, 1, 2);
  DistributedSampler other = Make(20, 1, 2);
  sampler.reset();
  EXPECT_EQ(sampler.epoch(), 0u);
  const Indices first = Rest(sampler);
  sampler.reset();
  sampler.reset();  // nothing was taken in between
  EXPECT_EQ(sampler.epoch(), 1u);
  const Indices second = Rest(sampler);
  EXPECT_NE(first, second);
  other.set_epoch(1);
  other.reset();
  EXPECT_EQ(Rest(other), second);
}

TEST(DistributedSamplerTest, ResetTakesANewSize) {
  DistributedSampler sampler =
      Make(4, 0, 2, DistributedSamplerOptions().shuffle(false).uneven(Uneven::Keep));
  (void)sampler.next(1);
  sampler.reset(10);
  EXPECT_EQ(sampler.epoch(), 1u);
  EXPECT_THAT(Rest(sampler), ElementsAre(0, 2, 4, 6, 8));
}

TEST(DistributedSamplerTest, APositionSurvivesTheNextResetOnly) {
  DistributedSampler whole = Make(20, 0, 2);
  const Indices all = Rest(whole);
  DistributedSampler sampler = Make(20, 0, 2);
  sampler.set_position(4);
  sampler.reset();
  EXPECT_EQ(sampler.position(), 4u);
  EXPECT_EQ(Rest(sampler), Indices(all.begin() + 4, all.end()));
  sampler.reset();
  EXPECT_EQ(sampler.epoch(), 1u);
  EXPECT_EQ(sampler.position(), 0u);
}

TEST(DistributedSamplerTest, TheSameEpochAgainChangesNothingAnotherBeginsAnew) {
  DistributedSampler sampler = Make(20, 0, 2);
  (void)sampler.next(3);
  sampler.set_epoch(0);
  EXPECT_EQ(sampler.position(), 3u);
  sampler.set_epoch(7);
  EXPECT_EQ(sampler.position(), 0u);
  EXPECT_EQ(Rest(sampler).size(), 10u);
}

TEST(DistributedSamplerTest, LoadedItGoesOnExactly) {
  for (const auto uneven : {Uneven::Pad, Uneven::Drop, Uneven::Keep}) {
    for (int rank = 0; rank < 3; ++rank) {
      const auto options = DistributedSamplerOptions().seed(5).uneven(uneven);
      DistributedSampler sampler = Make(23, rank, 3, options);
      sampler.set_epoch(2);
      (void)sampler.next(4);
      // Another seed, which the saved sampler replaces.
      DistributedSampler resumed =
          Make(23, rank, 3, DistributedSamplerOptions().seed(99).uneven(uneven));
      Load(resumed, sampler);
      EXPECT_EQ(resumed.epoch(), 2u);
      EXPECT_EQ(resumed.position(), 4u);
      resumed.reset();  // as a data loader does first
      EXPECT_EQ(Rest(resumed), Rest(sampler));
      sampler.reset();
      resumed.reset();
      EXPECT_EQ(Rest(resumed), Rest(sampler)) << "the epoch after it";
    }
  }
}

TEST(DistributedSamplerTest, TheStateOfRank0ServesAllRanks) {
  // Under Keep rank 0 has one sample more than rank 1: at the end both are at theirs.
  const auto options = DistributedSamplerOptions().uneven(Uneven::Keep);
  DistributedSampler rank0 = Make(5, 0, 2, options);
  (void)Rest(rank0);
  DistributedSampler rank1 = Make(5, 1, 2, options);
  Load(rank1, rank0);
  EXPECT_EQ(rank1.position(), 2u);
  EXPECT_TRUE(Rest(rank1).empty());
}

TEST(DistributedSamplerTest, AnotherNumberOfRanksSharesWhatIsLeft) {
  constexpr std::size_t kSamples = 50;
  const auto options = DistributedSamplerOptions().uneven(Uneven::Keep);
  std::vector<Indices> shares;
  DistributedSampler saved = Make(kSamples, 0, 2, options);
  for (int rank = 0; rank < 2; ++rank) {
    DistributedSampler sampler = Make(kSamples, rank, 2, options);
    shares.push_back(*sampler.next(8));
    if (rank == 0) Load(saved, sampler);
  }
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSampler sampler = Make(kSamples, rank, 3, options);
    Load(sampler, saved);
    EXPECT_EQ(sampler.position(), 0u);
    EXPECT_EQ(sampler.size(), rank == 0 ? 12u : 11u);  // of 34
    sampler.reset();
    (void)sampler.next(2);
    // And stopped once more.
    DistributedSampler again = Make(kSamples, rank, 3, options);
    Load(again, sampler);
    again.set_position(0);
    shares.push_back(Rest(again));
    again.reset();
    EXPECT_EQ(again.size(), rank == 2 ? 16u : 17u) << "the next epoch is whole";
  }
  EXPECT_THAT(Counts(kSamples, shares), testing::Each(1));
}

TEST(DistributedSamplerTest, AStateThatDoesNotFitIsRefusedAndChangesNothing) {
  DistributedSampler saved = Make(20, 0, 2, DistributedSamplerOptions().seed(3));
  (void)saved.next(5);
  struct Case {
    DistributedSampler sampler;
    std::string text;
  };
  Case cases[] = {
      {Make(21, 0, 2), "the saved sampler has 20 samples, this one has 21"},
      {Make(20, 0, 2, DistributedSamplerOptions().shuffle(false)),
       "the saved sampler shuffles, this one does not"},
      {Make(20, 0, 2, DistributedSamplerOptions().uneven(Uneven::Drop)),
       "the saved sampler has uneven = Pad, this one Drop"},
  };
  for (Case& one : cases) {
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { Load(one.sampler, saved); }),
                HasSubstr(one.text));
    EXPECT_EQ(one.sampler.position(), 0u);
  }
  torch::serialize::OutputArchive empty;
  std::stringstream stream;
  empty.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { saved.load(in); }),
              HasSubstr("no whole number \"samples\""));
}

TEST(DistributedSamplerTest, WrongArgumentsAreRefused) {
  const auto refused = [](const auto& call) { return ErrorOf(ErrorCode::InvalidArgument, call); };
  EXPECT_THAT(refused([] { Make(5, 2, 2); }), HasSubstr("rank 2 of 2 ranks"));
  EXPECT_THAT(refused([] { Make(5, -1, 2); }), HasSubstr("rank -1 of 2 ranks"));
  EXPECT_THAT(refused([] { DistributedSampler(5, DistributedSamplerOptions().rank(0)); }),
              HasSubstr("both rank and ranks"));
  DistributedSampler sampler = Make(5, 0, 2);
  EXPECT_THAT(refused([&] { sampler.next(0); }), HasSubstr("batch_size is 0"));
  EXPECT_THAT(refused([&] { sampler.set_position(4); }),
              HasSubstr("position is 4; this rank has 3 samples"));
  EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [] { DistributedSampler(5); }), HasSubstr("init"));
}

TEST(DistributedSamplerTest, TakesItsRankFromTheSession) {
  RunTorchRanks(3, [](int rank) {
    DistributedSampler sampler(6, DistributedSamplerOptions().shuffle(false));
    EXPECT_THAT(Rest(sampler), ElementsAre(rank, rank + 3));
  });
}

struct Numbers : torch::data::datasets::Dataset<Numbers, torch::Tensor> {
  torch::Tensor get(std::size_t index) override {
    return torch::tensor(static_cast<std::int64_t>(index));
  }
  torch::optional<std::size_t> size() const override { return 12; }
};

// One loop over a data loader.
template <class Loader>
Indices Loop(Loader& loader) {
  Indices all;
  for (const auto& batch : loader) {
    for (const auto& one : batch) all.push_back(one.template item<std::int64_t>());
  }
  return all;
}

TEST(DistributedSamplerTest, ADataLoaderLoopsOverOneEpochAfterTheOther) {
  for (const std::size_t workers : {0, 2}) {
    DistributedSampler sampler = Make(12, 1, 2, DistributedSamplerOptions().seed(4));
    sampler.set_position(2);
    auto loader = torch::data::make_data_loader(Numbers(), sampler,
                                                torch::data::DataLoaderOptions(2).workers(workers));
    DistributedSampler expected = Make(12, 1, 2, DistributedSamplerOptions().seed(4));
    (void)expected.next(2);
    for (std::size_t epoch = 0; epoch < 3; ++epoch) {
      expected.set_epoch(epoch);
      EXPECT_EQ(Loop(*loader), Rest(expected)) << epoch << ", workers: " << workers;
    }
    EXPECT_EQ(sampler.position(), 2u) << "the loader has its own";
  }
}

}  // namespace
}  // namespace sirtaki::tests
