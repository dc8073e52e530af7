// Messages that go from GPU to GPU by NCCL, both of which are fakes: where the ranks have come to a pair
// and where they cannot, in whatever order they are posted, and how they end when a rank fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/message_rank.h"
#include "tests/support/rank_threads.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::Status;
using core::StatusCode;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using tests::Of;
using Place = tests::MessagePlace;
using Rank = tests::MessageRank;

// What may go by NCCL here, in elements of 4 bytes.
constexpr std::int64_t kLargeCount = 64;
constexpr int kPairTag = 77;
constexpr int kVerdictTag = 78;

class NcclMessagePairTest : public tests::MessageRanksTest {
 protected:
  using Change = std::function<void(int rank, LanesOptions&)>;
  static void TakeLarge(LanesOptions& options) { options.least_direct_bytes = 4 * kLargeCount; }
  void RunPairs(int size, const std::function<void(Rank& self, int rank)>& body,
                const Change& change = nullptr) {
    RunRanks(size, body, [&change](int rank, LanesOptions& options) {
      TakeLarge(options);
      if (change) change(rank, options);
    });
  }

  // Sends large messages from one rank to another until one has gone by NCCL, `tries` at most, while no
  // other pair is made. Returns whether one has.
  bool MakePair(Rank& self, int rank, int from, int to, int tries = 1 << 20) {
    bool is_made = false;
    const std::size_t before = gpus_.calls("ncclSend").size();
    for (int i = 0; !is_made && i < tries; ++i) {
      if (rank == from) {
        EXPECT_TRUE(self.Finish(self.Send(to, kPairTag, Of(kLargeCount, i))).ok());
        // The first is a greeting of the pair's.
        is_made = gpus_.calls("ncclSend").size() >= before + 2;
        const core::WorkPtr verdict =
            self.Send(to, kVerdictTag, Of(1, is_made ? 1 : 0), Place::kHost);
        EXPECT_TRUE(self.Finish(verdict).ok());
      } else {
        const core::WorkPtr taken = self.Receive(from, kPairTag, kLargeCount);
        EXPECT_TRUE(self.Finish(taken).ok());
        EXPECT_EQ(Rank::Held(taken), Of(kLargeCount, i));
        const core::WorkPtr verdict = self.Receive(from, kVerdictTag, 1, Place::kHost);
        EXPECT_TRUE(self.Finish(verdict).ok());
        is_made = Rank::Held(verdict)[0] == 1;
      }
    }
    return is_made;
  }

  // Makes the pair of ranks 0 and 1, and launches a message by it that waits on the sender's device.
  core::WorkPtr LaunchBehindGate(Rank& self, int rank, std::barrier<>& both,
                                 const std::atomic<bool>& open, int tag = 0) {
    EXPECT_TRUE(MakePair(self, rank, 0, 1));
    both.arrive_and_wait();
    if (rank == 0) gpus_.PutGate(self.device().producer(), open);
    core::WorkPtr message =
        rank == 0 ? self.Send(1, tag, Of(kLargeCount, 5)) : self.Receive(0, tag, kLargeCount);
    while (!message->handle->done()) self.Step();
    return message;
  }
};

TEST_F(NcclMessagePairTest, LargeOnesGoByNcclWhenThePairIsMade) {
  RunPairs(2, [&](Rank& self, int rank) {
    ASSERT_TRUE(MakePair(self, rank, 0, 1));
    if (rank == 0) gpus_.Forget();
    for (int i = 0; i < 20; ++i) {
      if (rank == 0) {
        EXPECT_TRUE(self.Finish(self.Send(1, 3, Of(kLargeCount + i, i))).ok());
      } else {
        const core::WorkPtr taken = self.Receive(0, 3, kLargeCount + i);
        EXPECT_TRUE(self.Finish(taken).ok());
        EXPECT_EQ(Rank::Held(taken), Of(kLargeCount + i, i));
      }
    }
  });
  EXPECT_THAT(gpus_.calls("ncclSend"), SizeIs(20));
  EXPECT_THAT(gpus_.calls("cudaMemcpyAsync"), IsEmpty());
  EXPECT_EQ(gpus_.live_communicators(), 0);
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclMessagePairTest, SmallOnesMakeNone) {
  RunPairs(2, [&](Rank& self, int rank) {
    for (int i = 0; i < 20; ++i) {
      const core::WorkPtr send = self.Send(1 - rank, 0, Of(kLargeCount - 1, i));
      EXPECT_TRUE(self.Finish(self.Receive(1 - rank, 0, kLargeCount - 1)).ok());
      EXPECT_TRUE(self.Finish(send).ok());
    }
  });
  EXPECT_THAT(gpus_.calls("nccl"), IsEmpty());
}

// One way is made while the other one is not, and both at once carry messages that are posted in
// opposite orders.
TEST_F(NcclMessagePairTest, ArriveHoweverTheyArePosted) {
  std::barrier both(2);
  RunPairs(2, [&](Rank& self, int rank) {
    ASSERT_TRUE(MakePair(self, rank, 0, 1));
    both.arrive_and_wait();
    ASSERT_TRUE(MakePair(self, rank, 1, 0));
    constexpr int kTags = 5;
    constexpr int kEach = 4;
    std::vector<core::WorkPtr> sends;
    std::map<std::pair<int, int>, core::WorkPtr> receives;
    for (int i = 0; i < kEach; ++i) {
      for (int tag = 0; tag < kTags; ++tag) {
        sends.push_back(self.Send(1 - rank, tag, Of(kLargeCount + tag, 100 * tag + i)));
      }
    }
    for (int tag = kTags - 1; tag >= 0; --tag) {
      for (int i = 0; i < kEach; ++i) {
        receives[{tag, i}] = self.Receive(1 - rank, tag, kLargeCount + tag);
      }
    }
    for (const auto& [which, receive] : receives) {
      EXPECT_TRUE(self.Finish(receive).ok());
      EXPECT_EQ(Rank::Held(receive),
                Of(kLargeCount + which.first, 100 * which.first + which.second));
    }
    for (const core::WorkPtr& send : sends) EXPECT_TRUE(self.Finish(send).ok());
    self.StepToEnd();  // the last answer may be under way
    EXPECT_THAT(self.device().lanes().Running(), IsEmpty());
  });
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

// A message waits on the device for what its stream waits for, and nobody's host does.
TEST_F(NcclMessagePairTest, AreDoneWhenTheyAreLaunched) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunPairs(2, [&](Rank& self, int rank) {
    const core::WorkPtr message = LaunchBehindGate(self, rank, both, open);
    EXPECT_TRUE(message->handle->status().ok());
    gpus_.RunDevices();
    if (rank == 1) {
      EXPECT_EQ(Rank::Held(message), Of(kLargeCount, -1));
    }
    both.arrive_and_wait();
    open = true;
    EXPECT_TRUE(self.Finish(message).ok());
    if (rank == 1) {
      EXPECT_EQ(Rank::Held(message), Of(kLargeCount, 5));
    }
  });
}

TEST_F(NcclMessagePairTest, TheEndOfASessionWaitsForWhatIsLaunched) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunPairs(2, [&](Rank& self, int rank) {
    const core::WorkPtr message = LaunchBehindGate(self, rank, both, open);
    self.StepToEnd();
    both.arrive_and_wait();
    open = true;
    self.device().EndLanes();
    EXPECT_EQ(Rank::Held(message), Of(kLargeCount, 5));
  });
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

// What comes back is made of what was sent, all before anything of it is there.
TEST_F(NcclMessagePairTest, ThoseThatWaitForEachOtherOnTheDeviceDoNotHang) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunPairs(2, [&](Rank& self, int rank) {
    ASSERT_TRUE(MakePair(self, rank, 0, 1));
    both.arrive_and_wait();
    ASSERT_TRUE(MakePair(self, rank, 1, 0));
    both.arrive_and_wait();
    const auto launched = [&](const core::WorkPtr& work) {
      while (!work->handle->done()) self.Step();
      const auto& on_gpu = static_cast<const cuda::DeviceWork&>(*work);
      EXPECT_TRUE(cuda::AwaitDone(on_gpu, self.device().producer()).ok());
      return work;
    };
    if (rank == 0) gpus_.PutGate(self.device().producer(), open);
    core::WorkPtr last;
    for (int i = 0; i < 6; ++i) {
      const bool sends = i % 2 == rank;
      const core::WorkPtr message = sends ? self.Send(1 - rank, i, Of(kLargeCount, i))
                                          : self.Receive(1 - rank, i, kLargeCount);
      last = launched(message);
    }
    both.arrive_and_wait();
    open = true;
    EXPECT_TRUE(self.Finish(last).ok());
    if (rank == 0) {
      EXPECT_EQ(Rank::Held(last), Of(kLargeCount, 5));
    }
  });
}

TEST_F(NcclMessagePairTest, AReceiverOnTheHostTakesThemThere) {
  RunPairs(2, [&](Rank& self, int rank) {
    ASSERT_TRUE(MakePair(self, rank, 0, 1));
    const std::vector<Place> places = {Place::kHost, Place::kGpu, Place::kHost, Place::kGpu};
    std::vector<core::WorkPtr> messages;
    for (int i = 0; i < 4; ++i) {
      messages.push_back(rank == 0 ? self.Send(1, 0, Of(kLargeCount, i))
                                   : self.Receive(0, 0, kLargeCount, places[i]));
    }
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(self.Finish(messages[i]).ok());
      if (rank == 1) {
        EXPECT_EQ(Rank::Held(messages[i]), Of(kLargeCount, i));
      }
    }
    // A sender on the host offers nothing.
    const core::WorkPtr last = rank == 0 ? self.Send(1, 0, Of(kLargeCount, 9), Place::kHost)
                                         : self.Receive(0, 0, kLargeCount);
    EXPECT_TRUE(self.Finish(last).ok());
    EXPECT_EQ(Rank::Held(last), Of(kLargeCount, 9));
  });
}

TEST_F(NcclMessagePairTest, AnotherShapeIsAMismatchOfTheReceiveAlone) {
  RunPairs(2, [&](Rank& self, int rank) {
    ASSERT_TRUE(MakePair(self, rank, 0, 1));
    ExpectMismatchOfTheSecond(self, rank, 70);
  });
}

// Each of these leaves the messages to the host, on both sides.
TEST_F(NcclMessagePairTest, WhatOneSideCannotDoNeitherDoes) {
  const auto without_nccl = [](LanesOptions& options) {
    options.load_nccl = [](nccl::Library*) {
      return Status(StatusCode::kUnsupported, "NCCL was not found");
    };
  };
  const auto with_another_one = [this](LanesOptions& options) {
    options.load_nccl = [this](nccl::Library* library) {
      library->api = gpus_.nccl();
      library->version = 22700;
      return Status::Ok();
    };
  };
  const auto unshared = [](LanesOptions& options) { options.nccl_shares = false; };
  const auto out_of_memory = [](LanesOptions& options) {
    options.load_nccl = [](nccl::Library*) -> Status { throw std::bad_alloc(); };
  };
  for (const std::function<void(LanesOptions&)>& lacks :
       std::vector<std::function<void(LanesOptions&)>>{without_nccl, with_another_one, unshared,
                                                       out_of_memory}) {
    for (const int which : {0, 1}) {
      RunPairs(
          2, [&](Rank& self, int rank) { EXPECT_FALSE(MakePair(self, rank, 0, 1, 15)); },
          [&](int rank, LanesOptions& options) {
            if (rank == which) lacks(options);
          });
      EXPECT_THAT(gpus_.calls("ncclSend"), IsEmpty());
      EXPECT_EQ(gpus_.live_communicators(), 0);
    }
  }
}

// The host sends one message of a line after the other, and the copies of all begin at once, from when
// both sides know of the refusal.
TEST_F(NcclMessagePairTest, WhereThePairIsRefusedNoCopyWaitsForTheMessageBefore) {
  constexpr std::size_t kMessages = 3;
  for (const int which : {0, 1}) {
    std::barrier both(2);
    std::atomic<bool> at_once{false};
    const auto round = [&](Rank& self, int rank) {
      std::vector<core::WorkPtr> messages;
      both.arrive_and_wait();
      if (rank == 0) {
        gpus_.Forget();
        for (std::size_t i = 0; i < kMessages; ++i) {
          messages.push_back(self.Send(1, 3, Of(kLargeCount, static_cast<std::int32_t>(i))));
        }
        const auto limit = core::Clock::now() + std::chrono::milliseconds(100);
        const auto have_begun = [&] { return gpus_.calls("cudaMemcpyAsync").size() == kMessages; };
        while (!have_begun() && core::Clock::now() < limit) std::this_thread::yield();
        at_once = have_begun();
      }
      both.arrive_and_wait();
      for (std::size_t i = 0; rank == 1 && i < kMessages; ++i) {
        messages.push_back(self.Receive(0, 3, kLargeCount));
      }
      for (std::size_t i = 0; i < kMessages; ++i) {
        EXPECT_TRUE(self.Finish(messages[i]).ok());
        EXPECT_EQ(Rank::Held(messages[i]), Of(kLargeCount, static_cast<std::int32_t>(i)));
      }
    };
    RunPairs(
        2,
        [&](Rank& self, int rank) {
          for (int i = 0; i < 300; ++i) {
            round(self, rank);
            if (at_once) break;
          }
          EXPECT_TRUE(at_once);
        },
        [&](int rank, LanesOptions& options) {
          if (rank != which) return;
          options.load_nccl = [](nccl::Library*) {
            return Status(StatusCode::kUnsupported, "NCCL was not found");
          };
        });
  }
}

// One side cannot make the communicator, and the messages do not wait for it.
class NcclMessagePairRefusedTest : public NcclMessagePairTest,
                                   public ::testing::WithParamInterface<const char*> {};

TEST_P(NcclMessagePairRefusedTest, ACommunicatorThatOneSideCannotMakeIsNotMade) {
  gpus_.FailNext(GetParam(), static_cast<int>(nccl::Result::kInvalidUsage));
  std::barrier both(2);
  std::atomic<bool> has_failed{false};
  RunPairs(
      2,
      [&](Rank& self, int rank) {
        for (bool is_last = false; !is_last;) {
          is_last = has_failed;
          EXPECT_FALSE(MakePair(self, rank, 0, 1, 40));
          both.arrive_and_wait();
          if (rank == 0) has_failed = !gpus_.calls(GetParam()).empty();
          both.arrive_and_wait();
        }
      },
      [](int, LanesOptions& options) { options.nccl_limit = std::chrono::milliseconds(50); });
  EXPECT_EQ(gpus_.live_communicators(), 0);
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

INSTANTIATE_TEST_SUITE_P(Calls, NcclMessagePairRefusedTest,
                         ::testing::Values("ncclCommInitRankConfig", "ncclCommSplit"));

// Abort of what is under way, as the engines of all ranks abandon.
TEST_F(NcclMessagePairTest, AbandonEndsThemOnTheDevice) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunPairs(2, [&](Rank& self, int rank) {
    // The sender's rank is lost before its part has begun.
    const core::WorkPtr message = LaunchBehindGate(self, rank, both, open);
    const core::WorkPtr waiting =
        rank == 0 ? self.Send(1, 1, Of(kLargeCount, 5)) : self.Receive(0, 2, kLargeCount);
    both.arrive_and_wait();
    const Status why(StatusCode::kPeerLost, "rank 0 is lost");
    if (rank == 1) {
      self.device().lanes().Abandon(why);
      EXPECT_EQ(self.Finish(waiting), why);
      EXPECT_TRUE(self.Finish(message).ok());  // whoever asks for a fault learns that it is garbage
      EXPECT_EQ(self.Send(0, 0, Of(kLargeCount, 3))->handle->status(), why);
    }
    both.arrive_and_wait();
    open = true;
    if (rank == 0) {
      self.device().lanes().Abandon(why);
      EXPECT_EQ(self.Finish(waiting), why);
    }
    self.device().EndLanes();
  });
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(NcclMessagePairTest, AnErrorOnTheWayIsTheGroupsFault) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  InprocWorld world(2);
  tests::RankThreads::Run(2, [&](int rank) {
    Rank self(gpus_, world, rank, TakeLarge);
    const core::WorkPtr message = LaunchBehindGate(self, rank, both, open, 6);
    both.arrive_and_wait();
    if (rank == 1) {
      gpus_.SetAsyncError(1, nccl::Result::kRemoteError);
      while (self.device().failure().ok()) self.Step();
      EXPECT_THAT(
          self.device().failure().message(),
          HasSubstr("receive from rank 0, tag 6: NCCL, during an operation: remote process"));
      EXPECT_EQ(self.device().failure().origin().rank, 1);
      self.device().lanes().Abandon(self.device().failure());  // as the engine does
    }
    both.arrive_and_wait();
    open = true;
    if (rank == 0) self.device().lanes().Abandon({StatusCode::kPeerLost, "rank 1 is lost"});
    self.device().EndLanes();
  });
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(NcclMessagePairTest, AFailureOfTheLaunchIsTheGroupsFault) {
  const std::vector<std::pair<std::string, int>> failures = {{"ncclRecv", 3},
                                                             {"cudaStreamWaitEvent", 700}};
  for (const auto& [function, error] : failures) {
    std::barrier both(2);
    InprocWorld world(2);
    tests::RankThreads::Run(2, [&, function = function, error = error](int rank) {
      Rank self(gpus_, world, rank, TakeLarge);
      ASSERT_TRUE(MakePair(self, rank, 0, 1));
      both.arrive_and_wait();
      core::WorkPtr message;
      if (rank == 1) {
        message = self.Receive(0, 5, kLargeCount);
        gpus_.FailNext(function, error);
      }
      both.arrive_and_wait();
      // Only the receiver launches: the sender is told nothing of the answer.
      if (rank == 0) message = self.Send(1, 5, Of(kLargeCount, 1));
      if (rank == 1) {
        while (self.device().failure().ok()) self.Step();
        EXPECT_THAT(self.device().failure().message(), HasSubstr("receive from rank 0, tag 5"));
        EXPECT_THAT(self.device().failure().message(), HasSubstr(function));
        EXPECT_EQ(self.Finish(message), self.device().failure());
      }
      both.arrive_and_wait();
      self.device().lanes().Abandon({StatusCode::kPeerLost, "a rank is lost"});
      EXPECT_FALSE(self.Finish(message).ok());
      self.device().EndLanes();
    });
  }
}

// A session may end while a pair is being made, and with messages that nobody takes.
TEST_F(NcclMessagePairTest, ASessionMayEndAtAnyTime) {
  for (int tries = 1; tries < 12; ++tries) {
    RunPairs(2, [&](Rank& self, int rank) {
      MakePair(self, rank, 0, 1, tries);
      const core::WorkPtr receive = self.Receive(1 - rank, 0, kLargeCount);
      const core::WorkPtr send = self.Send(1 - rank, 1, Of(kLargeCount, 3));
      self.device().EndLanes();
      EXPECT_EQ(receive->handle->status().code(), StatusCode::kShutDown);
      EXPECT_EQ(send->handle->status().code(), StatusCode::kShutDown);
    });
    EXPECT_EQ(gpus_.live_communicators(), 0);
    EXPECT_EQ(gpus_.live_allocations(), 0);
  }
}

// What is sent is posted in random orders, from and to GPUs and hosts, while streams go on by chance.
TEST_F(NcclMessagePairTest, RandomProgramsArrive) {
  const std::uint64_t seed = tests::TestSeed();
  const int programs = tests::ScaledCount(3, 60);
  for (int program = 0; program < programs; ++program) {
    std::mt19937_64 shared(seed + static_cast<std::uint64_t>(program));
    const int size = 2 + static_cast<int>(shared() % 2);
    struct Plan {
      int from, to, tag;
      std::int64_t count;
      Place sends, takes;
    };
    std::vector<Plan> plans(50);
    const auto place = [&] { return shared() % 6 == 0 ? Place::kHost : Place::kGpu; };
    for (Plan& plan : plans) {
      plan.from = static_cast<int>(shared() % static_cast<unsigned>(size));
      plan.to = static_cast<int>(shared() % static_cast<unsigned>(size));
      plan.tag = static_cast<int>(shared() % 3);
      plan.count = static_cast<std::int64_t>(kLargeCount / 2 + shared() % kLargeCount);
      plan.sends = place();
      plan.takes = place();
    }
    gpus_.SetSeed(seed + static_cast<std::uint64_t>(program));
    RunPairs(size, [&](Rank& self, int rank) {
      std::mt19937_64 own(seed * 31 + static_cast<std::uint64_t>(10 * program + rank));
      const bool is_made = rank >= 2 || MakePair(self, rank, 0, 1);
      ASSERT_TRUE(is_made);
      for (int round = 0; round < 3; ++round) {
        // Those of one line stay in their order.
        std::vector<std::vector<std::pair<std::size_t, bool>>> lines;
        std::map<std::pair<std::pair<int, int>, bool>, std::size_t> known;
        for (std::size_t i = 0; i < plans.size(); ++i) {
          for (const bool sends : {true, false}) {
            if ((sends ? plans[i].from : plans[i].to) != rank) continue;
            const std::pair<int, int> line{sends ? plans[i].to : plans[i].from, plans[i].tag};
            const auto [at, is_new] = known.try_emplace({line, sends}, lines.size());
            if (is_new) lines.emplace_back();
            lines[at->second].emplace_back(i, sends);
          }
        }
        std::vector<std::pair<std::size_t, core::WorkPtr>> posted;
        for (std::vector<std::size_t> next(lines.size()); !lines.empty();) {
          const std::size_t which = own() % lines.size();
          const auto [i, sends] = lines[which][next[which]++];
          const Plan& plan = plans[i];
          const auto value = static_cast<std::int32_t>(1000 * round + static_cast<int>(i));
          posted.emplace_back(
              i, sends ? self.Send(plan.to, plan.tag, Of(plan.count, value), plan.sends)
                       : self.Receive(plan.from, plan.tag, plan.count, plan.takes));
          if (own() % 4 == 0) self.Step();
          if (next[which] < lines[which].size()) continue;
          lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(which));
          next.erase(next.begin() + static_cast<std::ptrdiff_t>(which));
        }
        std::shuffle(posted.begin(), posted.end(), own);
        for (const auto& [i, work] : posted) {
          const Status status = self.Finish(work);
          ASSERT_TRUE(status.ok()) << status.ToString();
          EXPECT_EQ(
              Rank::Held(work),
              Of(plans[i].count, static_cast<std::int32_t>(1000 * round + static_cast<int>(i))));
        }
      }
    });
    EXPECT_EQ(gpus_.live_communicators(), 0);
    EXPECT_EQ(gpus_.live_allocations(), 0);
  }
}

}  // namespace
}  // namespace sirtaki::ops
