// Gradients that go together: the order that the ranks agree on, and what happens to buckets when
// gradients are missing, change or cannot be reduced.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "frameworks/torch/session/session_state.h"
#include "session/session_observability.h"
#include "sirtaki/barrier.h"
#include "sirtaki/collectives.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/gradients/overlap.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::MatchesRegex;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Tensors = std::vector<torch::Tensor>;

core::Config Buckets(std::int64_t first, std::int64_t others) {
  core::Config config;
  config.first_bucket_bytes = first;
  config.bucket_bytes = others;
  return config;
}

// What a rank has started, in order: the elements of each gradient, by bucket.
class Started {
 public:
  using Bucket = std::pair<std::pair<std::uint64_t, std::uint64_t>, std::vector<std::int64_t>>;

  void Note(int rank, const core::RunBatch& batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Bucket> buckets;
    for (const core::RunItem& item : batch.items) {
      if (item.key.form != core::Key::Form::kBucket) {
        ++others_[rank];
        continue;
      }
      buckets.push_back({{item.key.number, item.key.bucket}, {}});
      for (const core::SignaturePtr& part : item.signature->parts) {
        buckets.back().second.push_back(part->ElementCount());
      }
    }
    auto& all = of_rank_[rank];
    all.insert(all.end(), buckets.begin(), buckets.end());
  }
  // Since the last call.
  std::vector<Bucket> Take(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    others_[rank] = 0;
    return std::exchange(of_rank_[rank], {});
  }
  int others(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return others_[rank];
  }
  auto Listener() {
    return [this](int rank, const core::RunBatch& batch) { Note(rank, batch); };
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<Bucket>> of_rank_;
  std::map<int, int> others_;
};

// Layers of 1, 2 and 3 parameters each, float32; the last is ready first.
struct Chain : torch::nn::Module {
  Chain() {
    for (std::int64_t i = 0; i < 3; ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), torch::ones({i + 1})));
    }
  }
  torch::Tensor loss(double factor) {
    auto value = weights[0].sum() * factor;
    value = value + value.detach() * 0 + weights[1].sum() * factor;
    return (value + weights[2].sum() * factor) * 1.0;
  }
  Tensors weights;
};

DistributedOptimizer<SGD> Wrap(torch::nn::Module& net, double rate = 1.0,
                               Average average = Average::Backward) {
  return DistributedOptimizer<SGD>(SGD(net.parameters(), SGDOptions(rate)), net.named_parameters(),
                                   DistributedOptimizerOptions().average_at(average));
}

constexpr auto kPlainSharing = session::InprocWorld::Sharing::kNone;

TEST(GradientBucketsTest, TheLayoutIsAgreedInTheFirstStepAndStays) {
  for (const int size : {2, 3}) {
    Started started;
    RunTorchRanks(
        size,
        [&](int rank) {
          Chain net;
          auto optimizer = Wrap(net);
          started.Take(rank);
          std::vector<Started::Bucket> first;
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            net.loss(rank + 1).backward();
            optimizer.step();
            const auto buckets = started.Take(rank);
            if (step == 0) {
              EXPECT_TRUE(buckets.empty());
            } else if (step == 1) {
              first = buckets;
              ASSERT_EQ(buckets.size(), 2u) << "of 4 bytes, and of the rest";
              EXPECT_EQ(buckets[0].second.size(), 1u);
              EXPECT_EQ(buckets[1].second.size(), 2u);
            } else {
              EXPECT_EQ(buckets, first) << step;
            }
            const float sum = -0.5f * static_cast<float>((size + 1) * (step + 1));
            EXPECT_TRUE(torch::equal(net.weights[1].detach(), torch::full({2}, 1 + sum)));
          }
          const auto& told = detail::CurrentSession()->session().observation();
          EXPECT_THAT(told.KeyText("bucket 0 of arena 1"),
                      MatchesRegex(R"(.*1 \(the gradient of "w."\))"));
          EXPECT_THAT(told.KeyText("bucket 1 of arena 1"),
                      MatchesRegex(R"(.*1 \(the gradients of "w.", "w."\))"));
        },
        Buckets(4, 1000), {}, kPlainSharing, started.Listener());
  }
}

// The elements of each bucket's gradient, by the buckets' numbers, where the first of three
// parameters, of 1, 2 and 4 elements, is ready first.
std::vector<std::int64_t> OrderOfBuckets(bool deterministic) {
  Started started;
  core::Config config = Buckets(1, 1);
  config.deterministic = deterministic;
  std::vector<std::int64_t> order;
  RunTorchRanks(
      2,
      [&](int rank) {
        auto a = torch::ones({1}, torch::requires_grad());
        auto b = torch::ones({2}, torch::requires_grad());
        auto c = torch::ones({4}, torch::requires_grad());
        const NamedTensors names = {{"a", a}, {"b", b}, {"c", c}};
        auto optimizer = DistributedOptimizer(SGD({a, b, c}, SGDOptions(0.1)), names);
        for (int step = 0; step < 2; ++step) {
          started.Take(rank);
          optimizer.zero_grad();
          // Backward goes from the end of the chain to its beginning.
          auto x = (c * 2).sum();
          x = (b * x).sum();
          x = (a * x).sum();
          x.backward();
          optimizer.step();
        }
        if (rank > 0) return;
        auto buckets = started.Take(rank);
        std::sort(buckets.begin(), buckets.end());
        for (const auto& bucket : buckets) order.push_back(bucket.second.front());
      },
      config, {}, kPlainSharing, started.Listener());
  return order;
}

TEST(GradientBucketsTest, AreInTheOrderInWhichGradientsBecomeReady) {
  EXPECT_THAT(OrderOfBuckets(/*deterministic=*/false), ElementsAre(1, 2, 4));
}

TEST(GradientBucketsTest, AreInTheReverseOrderOfTheParametersIfDeterministic) {
  EXPECT_THAT(OrderOfBuckets(/*deterministic=*/true), ElementsAre(4, 2, 1));
}

TEST(GradientBucketsTest, ThereAreNoneWithoutASize) {
  Started started;
  RunTorchRanks(
      2,
      [&](int rank) {
        Chain net;
        auto optimizer = Wrap(net);
        for (int step = 0; step < 3; ++step) {
          started.Take(rank);
          optimizer.zero_grad();
          net.loss(1).backward();
          optimizer.step();
          EXPECT_EQ(started.others(rank), 3);
          EXPECT_TRUE(started.Take(rank).empty());
        }
      },
      Buckets(0, 0), {}, kPlainSharing, started.Listener());
}

TEST(GradientBucketsTest, AreReducedWhileBackwardStillRuns) {
  constexpr int kSize = 2;
  RunTorchRanks(
      kSize,
      [&](int rank) {
        EXPECT_TRUE(LastGradientIsReducedBeforeTheFirstExists(
            rank, kSize,
            [&](const auto& names) {
              return DistributedOptimizer(SGD(names.values(), SGDOptions(0.1)), names);
            },
            /*steps=*/2));
      },
      Buckets(1, 1));
}

struct BucketBranches : torch::nn::Module {
  BucketBranches() {
    a = register_parameter("a", torch::zeros({2}));
    b = register_parameter("b", torch::zeros({3}));
  }
  torch::Tensor a;
  torch::Tensor b;
};

TEST(GradientBucketsTest, AGradientMayBeMissingOnSomeRanksOrOnAll) {
  RunTorchRanks(3, [](int rank) {
    BucketBranches net;
    auto optimizer = Wrap(net);
    for (const int who : {-2, 1, -1, 0, -2}) {
      optimizer.zero_grad();
      auto loss = net.a.sum() * (rank + 1);
      const bool uses = who == rank || who == -2;
      if (uses) loss = loss + net.b.sum() * 3;
      loss.backward();
      optimizer.step();
      EXPECT_TRUE(torch::equal(net.a.grad(), torch::full({2}, 2.0f)));
      ASSERT_EQ(net.b.grad().defined(), who != -1) << who;
      if (who == -1) continue;
      EXPECT_TRUE(torch::equal(net.b.grad(), torch::full({3}, who == -2 ? 3.0f : 1.0f))) << who;
    }
    // Nobody has any.
    optimizer.zero_grad();
    optimizer.step();
    EXPECT_FALSE(net.a.grad().defined());
  });
}

// A part of the model that no rank uses at first, and then one rank now and then.
TEST(GradientBucketsTest, AGradientThatComesLaterGoesIntoABucketAsWell) {
  for (const Average average : {Average::Backward, Average::Step}) {
    Started started;
    RunTorchRanks(
        2,
        [&](int rank) {
          BucketBranches net;
          auto optimizer = Wrap(net, 1.0, average);
          const auto step = [&](bool uses) {
            optimizer.zero_grad();
            started.Take(rank);
            auto loss = net.a.sum();
            if (uses && rank == 1) loss = loss + net.b.sum();
            loss.backward();
            optimizer.step();
            EXPECT_EQ(net.b.grad().defined(), uses);
            if (!uses) return;
            EXPECT_TRUE(torch::equal(net.b.grad(), torch::full({3}, 0.5f)));
          };
          for (int i = 0; i < 3; ++i) step(false);
          EXPECT_EQ(started.others(rank), 1) << "the part that nobody has used";
          step(true);
          step(false);  // the ranks agree on another layout at its end
          std::vector<Started::Bucket> first;
          for (const bool uses : {false, true, false}) {
            step(uses);
            EXPECT_EQ(started.others(rank), 0);
            auto buckets = started.Take(rank);
            ASSERT_EQ(buckets.size(), 1U);
            EXPECT_THAT(buckets[0].second, testing::UnorderedElementsAre(2, 3));
            if (first.empty()) first = buckets;
            EXPECT_EQ(buckets, first) << "the layout stays";
          }
        },
        {}, {}, kPlainSharing, started.Listener());
  }
}

TEST(GradientBucketsTest, AreNotMadeWhileARankHasJoined) {
  Started started;
  RunTorchRanks(
      3,
      [&](int rank) {
        Chain net;
        auto optimizer = Wrap(net);
        const auto step = [&] {
          optimizer.zero_grad();
          net.loss(3).backward();
          optimizer.step();
        };
        if (rank < 2) {
          for (int i = 0; i < 2; ++i) step();
          EXPECT_TRUE(torch::equal(net.weights[1].grad(), torch::full({2}, 2.0f)));
        }
        join();
        EXPECT_TRUE(started.Take(rank).empty());
        for (int i = 0; i < 3; ++i) {
          step();
          EXPECT_EQ(started.Take(rank).empty(), i == 0) << i;
          EXPECT_TRUE(torch::equal(net.weights[1].grad(), torch::full({2}, 3.0f)));
        }
        // The ranks say the same, whichever had joined first.
        const auto& told = detail::CurrentSession()->session().observation();
        EXPECT_THAT(told.KeyText("bucket 0 of arena 1, layout 1 since join 1"),
                    HasSubstr("(the gradients of"));
      },
      Buckets(100, 100), {}, kPlainSharing, started.Listener());
}

TEST(GradientBucketsTest, ARankThatHasJoinedServesThem) {
  Started started;
  RunTorchRanks(
      3,
      [&](int rank) {
        Chain net;
        auto optimizer = Wrap(net);
        const auto steps = [&](int count, float expected) {
          for (int i = 0; i < count; ++i) {
            optimizer.zero_grad();
            net.loss(3).backward();
            optimizer.step();
            EXPECT_TRUE(torch::equal(net.weights[1].grad(), torch::full({2}, expected)));
          }
        };
        for (int epoch = 0; epoch < 3; ++epoch) {
          steps(3, 3);
          started.Take(rank);
          if (rank != 1) {
            steps(2, 2);
            EXPECT_EQ(started.Take(rank).size(), 2u);
          }
          join();
          started.Take(rank);
        }
      },
      Buckets(100, 100), {}, kPlainSharing, started.Listener());
}

TEST(GradientBucketsTest, ASecondBackwardIsAnErrorThatNamesTheGradient) {
  RunTorchRanks(2, [](int) {
    BucketBranches net;
    auto optimizer = Wrap(net, 1.0, Average::Step);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      // The bucket is not complete: b is missing.
      const bool all = step != 1;
      (all ? net.a.sum() + net.b.sum() : net.a.sum()).backward();
      const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { (net.a.sum() * 2).backward(); });
      EXPECT_THAT(text, AllOf(HasSubstr("\"a\""), HasSubstr("step()"), HasSubstr("synchronize()")));
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.zero_grad(); }),
                  HasSubstr("\"a\""));
      optimizer.step();
      EXPECT_EQ(net.b.grad().defined(), all);
    }
    EXPECT_EQ(net.a[0].item<float>(), -3);
  });
}

TEST(GradientBucketsTest, ARankThatHasEndedFailsTheOthersGradientsByName) {
  RunTorchRanks(2, [](int rank) {
    BucketBranches net;
    auto optimizer = Wrap(net);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      if (step == 2) break;
      (net.a.sum() + net.b.sum()).backward();
      optimizer.step();
    }
    if (rank == 1) return;
    EXPECT_THAT(ErrorOf(ErrorCode::ShutDown, [&] { (net.a.sum() + net.b.sum()).backward(); }),
                MatchesRegex("shut down: the gradients of \"[ab]\", \"[ab]\": "
                             "rank 1 has shut down: .*"));
  });
}

// Each step has two backward(), or one.
void TakeApartOneThatCannotBeReduced(Average average) {
  Started started;
  RunTorchRanks(
      3,
      [&](int rank) {
        auto dense = torch::zeros({2}, torch::requires_grad());
        auto table = torch::zeros({4, 2}, torch::requires_grad());
        const NamedTensors names = {{"dense", dense}, {"table", table}};
        auto optimizer = DistributedOptimizer(SGD({dense, table}, SGDOptions(1.0)), names,
                                              DistributedOptimizerOptions().average_at(average));
        for (int step = 0; step < 6; ++step) {
          started.Take(rank);
          optimizer.zero_grad();
          const bool sparse = step >= 2 && step < 4;
          // Ranks that have none do not know that it is sparse.
          auto loss = dense.sum();
          if (rank > 0 || !sparse) {
            auto of_table = torch::embedding(table, torch::tensor({1}), -1, false, sparse).sum();
            if (average == Average::Step) {
              of_table.backward();
            } else {
              loss = loss + of_table;
            }
          }
          loss.backward();
          optimizer.step();
          EXPECT_EQ(table.grad().is_sparse(), sparse);
          EXPECT_TRUE(torch::equal(dense.grad(), torch::ones({2})));
          EXPECT_FLOAT_EQ(table.grad().to_dense()[1][0].item<float>(), sparse ? 2.0f / 3 : 1);
          // The bucket has both; when that has failed, the one that was right. What has failed at the end
          // of a backward() is known when the next one lays out.
          const bool none = step == 0 || step == 2 || (average == Average::Backward && step == 3);
          EXPECT_EQ(started.Take(rank).size(), none ? 0u : 1u) << step;
        }
      },
      {}, {}, kPlainSharing, started.Listener());
}

TEST(GradientBucketsTest, OneThatCannotBeReducedIsTakenApart) {
  for (const Average average : {Average::Backward, Average::Step}) {
    TakeApartOneThatCannotBeReduced(average);
  }
}

// The words of an error do not decide: a parameter may be called like one.
TEST(GradientBucketsTest, ABucketIsTakenApartWhateverItsGradientsAreCalled) {
  RunTorchRanks(2, [](int rank) {
    auto named = torch::zeros({2}, torch::requires_grad());
    auto other = torch::zeros({4, 2}, torch::requires_grad());
    auto optimizer =
        DistributedOptimizer(SGD({named, other}, SGDOptions(1.0)),
                             NamedTensors{{"its backward() has thrown", named}, {"other", other}});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const bool sparse = step == 2;
      const auto table = torch::embedding(other, torch::tensor({1}), -1, false, sparse);
      (named.sum() * (rank + 1) + table.sum()).backward();
      optimizer.step();
      EXPECT_TRUE(torch::equal(named.grad(), torch::full({2}, 1.5f))) << step;
      EXPECT_EQ(other.grad().is_sparse(), sparse) << step;
    }
  });
}

TEST(GradientBucketsTest, OnlyTheGradientThatIsWrongFails) {
  RunTorchRanks(2, [](int rank) {
    BucketBranches net;
    auto optimizer = Wrap(net, 1.0, Average::Step);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      (net.a.sum() + net.b.sum()).backward();
      if (step != 2) {
        optimizer.step();
        continue;
      }
      // Written by the program of one rank while the bucket is on its way.
      if (rank == 1) net.b.grad().mul_(2);
      if (rank == 1) {
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.synchronize(); }),
                    AllOf(HasSubstr("\"b\""), HasSubstr("changed")));
      } else {
        optimizer.synchronize();
      }
      EXPECT_TRUE(torch::equal(net.a.grad(), torch::ones({2})));
    }
  });
}

TEST(GradientBucketsTest, AnAddedParameterMakesNewOnes) {
  Started started;
  RunTorchRanks(
      2,
      [&](int rank) {
        Chain net;
        auto added = torch::zeros({10}, torch::requires_grad());
        auto optimizer = Wrap(net);
        std::vector<std::size_t> gradients;
        for (int step = 0; step < 5; ++step) {
          started.Take(rank);
          if (step == 2) {
            optimizer.add_param_group(torch::optim::OptimizerParamGroup(
                Tensors{added}, std::make_unique<SGDOptions>(1.0)));
          }
          optimizer.zero_grad();
          (net.loss(1) + added.sum() * (rank + 1)).backward();
          optimizer.step();
          const auto buckets = started.Take(rank);
          gradients.push_back(buckets.empty() ? 0 : buckets[0].second.size());
        }
        EXPECT_THAT(gradients, ElementsAre(0u, 3u, 3u, 4u, 4u));
        EXPECT_TRUE(torch::equal(added.detach(), torch::full({10}, -1.5f * 3)));
      },
      Buckets(1000, 1000), {}, kPlainSharing, started.Listener());
}

TEST(GradientBucketsTest, ASecondOptimizerOfTheSameParametersDissolvesThem) {
  Started started;
  RunTorchRanks(
      2,
      [&](int rank) {
        BucketBranches net;
        auto first = Wrap(net);
        std::optional<DistributedOptimizer<SGD>> second;
        for (int step = 0; step < 5; ++step) {
          started.Take(rank);
          first.zero_grad();
          (step == 0 ? net.a.sum() + net.b.sum() : net.a.sum()).backward();
          // While a bucket waits for b.
          if (step == 3) second.emplace(Wrap(net));
          if (second && step == 3) second->synchronize();
          first.step();
          if (second && step > 3) second->step();
          EXPECT_TRUE(torch::equal(net.a.grad(), torch::ones({2}))) << step;
          EXPECT_EQ(started.Take(rank).empty(), step % 4 == 0) << step;
        }
      },
      {}, {}, kPlainSharing, started.Listener());
}

TEST(GradientBucketsTest, TwoThreadsMayFillABucketAtOnce) {
  RunTorchRanks(2, [](int rank) {
    BucketBranches net;
    auto optimizer = Wrap(net, 1.0, Average::Step);
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      std::thread other([&] { (net.b.sum() * (rank + 1)).backward(); });
      (net.a.sum() * (rank + 1)).backward();
      other.join();
      optimizer.step();
      ASSERT_TRUE(torch::equal(net.a.grad(), torch::full({2}, 1.5f))) << step;
      ASSERT_TRUE(torch::equal(net.b.grad(), torch::full({3}, 1.5f))) << step;
    }
  });
}

}  // namespace
}  // namespace sirtaki::tests
