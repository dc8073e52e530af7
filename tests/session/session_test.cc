// Sessions of N threads over the in-process hub: engine, negotiator, lanes and backend together.
#include "session/session.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/thread_annotations.h"
#include "session/inproc/inproc_world.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::Key;
using core::OpKind;
using core::Status;
using core::StatusCode;
using core::TimePoint;
using core::WorkPtr;
using std::chrono::milliseconds;
using std::chrono::seconds;
using tests::RankThreads;
using tests::Vector;

using Sharing = InprocWorld::Sharing;

StartOptions Options(const std::function<void(core::Config&)>& change = nullptr) {
  return tests::SessionOptions([&](core::Config& config) {
    config.wait = core::WaitMode::kYield;  // there are more threads than cores
    if (change) change(config);
  });
}

std::shared_ptr<Session> Start(const std::shared_ptr<InprocWorld>& world, int rank,
                               const StartOptions& options = Options()) {
  std::shared_ptr<Session> session;
  const Status status = Session::CreateInproc(world, rank, options, &session);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return session;
}

std::shared_ptr<Vector> MakeVector(OpKind kind, const std::string& name, std::vector<float> values,
                                   int root = -1) {
  return std::make_shared<Vector>(kind, name, std::move(values), root);
}

std::shared_ptr<Vector> Submit(Session& session, const std::string& name,
                               std::vector<float> values) {
  auto vector = MakeVector(OpKind::kAllReduce, name, std::move(values));
  const Status accepted = vector->Submit(session);
  EXPECT_TRUE(accepted.ok()) << accepted.ToString();
  return vector;
}

Status AllReduce(Session& session, const std::string& name, std::vector<float> values,
                 std::vector<float>* result = nullptr) {
  Vector vector(OpKind::kAllReduce, name, std::move(values));
  Status status = vector.Run(session);
  if (result) *result = vector.values();
  return status;
}

// Sessions of several ranks, which work together as ranks of different hosts do and as those of one
// do.
class SessionTest : public ::testing::TestWithParam<std::tuple<int, Sharing>> {
 protected:
  SessionTest() { world_->Share(std::get<Sharing>(GetParam())); }
  int size() const { return std::get<int>(GetParam()); }
  std::shared_ptr<InprocWorld> world_ = std::make_shared<InprocWorld>(std::get<int>(GetParam()));
};

INSTANTIATE_TEST_SUITE_P(Ranks, SessionTest,
                         ::testing::Combine(::testing::Values(2, 3, 4),
                                            ::testing::Values(Sharing::kNone, Sharing::kDirect)),
                         [](const auto& of) {
                           const bool shares = std::get<Sharing>(of.param) != Sharing::kNone;
                           return std::to_string(std::get<int>(of.param)) +
                                  (shares ? "Sharing" : "");
                         });

TEST_P(SessionTest, SumsOfManyNamedTensorsInRandomOrders) {
  constexpr int kTensors = 40;
  constexpr int kSteps = 4;
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    std::mt19937 random(static_cast<unsigned>(rank) + 17);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<int> order(kTensors);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::shared_ptr<Vector>> tensors(kTensors);
      for (const int i : order) {
        // Small ones and ones of the large lane.
        const std::size_t count = i % 8 == 0 ? 40000 : static_cast<std::size_t>(i) + 1;
        tensors[static_cast<std::size_t>(i)] =
            Submit(*session, "t" + std::to_string(i), std::vector<float>(count, float(rank + i)));
      }
      std::shuffle(order.begin(), order.end(), random);
      for (const int i : order) {
        Vector& tensor = *tensors[static_cast<std::size_t>(i)];
        const Status status = tensor.Synchronize(*session);
        ASSERT_TRUE(status.ok()) << status.ToString();
        const auto expected = float(size() * (size() - 1) / 2 + size() * i);
        for (const float value : tensor.values()) ASSERT_EQ(value, expected);
      }
    }
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, BlockingCallsWithoutANameAreMatchedByTheirOrder) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    for (int i = 0; i < 200; ++i) {
      std::vector<float> sum;
      const Status status = AllReduce(*session, "", {float(rank), float(i)}, &sum);
      ASSERT_TRUE(status.ok()) << status.ToString();
      ASSERT_EQ(sum, (std::vector<float>{float(size() * (size() - 1) / 2), float(size() * i)}));
    }
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, BroadcastAndAllGatherWithDifferentRows) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    const auto sent = MakeVector(OpKind::kBroadcast, "b", {float(rank), float(rank)}, 1);
    const auto joined = MakeVector(OpKind::kAllGather, "g",
                                   std::vector<float>(static_cast<std::size_t>(rank), float(rank)));
    ASSERT_TRUE(sent->Submit(*session, false).ok());
    ASSERT_TRUE(joined->Submit(*session, false).ok());
    ASSERT_TRUE(sent->Synchronize(*session).ok());
    ASSERT_TRUE(joined->Synchronize(*session).ok());
    EXPECT_EQ(sent->values(), (std::vector<float>{1, 1}));
    std::vector<float> expected;
    for (int r = 0; r < size(); ++r) {
      expected.insert(expected.end(), static_cast<std::size_t>(r), float(r));
    }
    EXPECT_EQ(joined->gathered(), expected);
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, SeveralThreadsOfARankWaitAtOnce) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 50; ++i) {
          std::vector<float> sum;
          const std::string name = "thread" + std::to_string(t);
          const Status status = AllReduce(*session, name, {float(rank + i)}, &sum);
          if (!status.ok() || sum[0] != float(size() * (size() - 1) / 2 + size() * i)) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, ALateRankDelaysOnlyItsTensor) {
  std::atomic<int> done_with_others{0};
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    std::shared_ptr<Vector> late;
    if (rank != 0) late = Submit(*session, "late", {1});
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(AllReduce(*session, "other" + std::to_string(i), {1}).ok());
    }
    if (rank == 0) {
      // The others have finished everything else before this one is submitted.
      while (done_with_others < size() - 1) std::this_thread::yield();
      late = Submit(*session, "late", {1});
    } else {
      EXPECT_FALSE(late->work().handle->done());
      ++done_with_others;
    }
    ASSERT_TRUE(late->Synchronize(*session).ok());
    EXPECT_EQ(late->values(), std::vector<float>{float(size())});
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, AMismatchFailsEverywhereAndTheNameWorksAgain) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    for (int round = 0; round < 3; ++round) {
      const Status status = AllReduce(*session, "w", std::vector<float>(rank == 1 ? 3 : 2, 1.0f));
      EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.ToString();
      EXPECT_EQ(status.origin(), (core::Origin{-1, {}, "w"}));
      EXPECT_NE(status.message().find("\"w\""), std::string::npos);
      EXPECT_NE(status.message().find("[3]"), std::string::npos);
      std::vector<float> sum;
      EXPECT_TRUE(AllReduce(*session, "w", {1}, &sum).ok());
      EXPECT_EQ(sum, std::vector<float>{float(size())});
    }
    EXPECT_TRUE(session->fault().ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, AnArgumentThatOneRankGotWrongFailsOnAll) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    const auto tensor = MakeVector(OpKind::kAllReduce, "w", {1});
    if (rank == 1) tensor->work().request.invalid = "a tensor of dreams";
    ASSERT_TRUE(tensor->Submit(*session, true).ok());
    const Status status = tensor->Synchronize(*session);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.origin(), (core::Origin{1, {}, "w"}));
    EXPECT_NE(status.message().find("a tensor of dreams"), std::string::npos) << status.ToString();
    EXPECT_TRUE(AllReduce(*session, "w", {1}).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, ADuplicateNameInFlightIsRefusedHereAndHarmsNobody) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    const auto first = Submit(*session, "w", {1});
    const auto second = MakeVector(OpKind::kAllReduce, "w", {5});
    EXPECT_EQ(second->Submit(*session, false).code(), StatusCode::kDuplicateName);
    ASSERT_TRUE(session->Wait(*first->work().handle).ok());
    // The data has arrived, but nobody has looked: still in flight.
    EXPECT_EQ(MakeVector(OpKind::kAllReduce, "w", {5})->Submit(*session, false).code(),
              StatusCode::kDuplicateName);
    first->work().handle->Observe();
    EXPECT_EQ(first->values(), std::vector<float>{float(size())});
    EXPECT_TRUE(AllReduce(*session, "w", {1}).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, ARankThatLeavesFailsWhatOthersWaitFor) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    ASSERT_TRUE(AllReduce(*session, "w", {1}).ok());
    if (rank != 0) {
      const Status status = AllReduce(*session, "never", {1});
      EXPECT_EQ(status.code(), StatusCode::kShutDown) << status.ToString();
      EXPECT_EQ(status.origin(), (core::Origin{0, {}, "never"}));
      EXPECT_NE(status.message().find("has shut down"), std::string::npos) << status.ToString();
      EXPECT_NE(status.message().find("had enough"), std::string::npos) << status.ToString();
    }
    EXPECT_TRUE(session->Shutdown("had enough").ok());
    EXPECT_FALSE(session->is_alive());
    EXPECT_EQ(session->Check().code(), StatusCode::kNotInitialized);
    EXPECT_EQ(MakeVector(OpKind::kAllReduce, "w", {1})->Submit(*session, false).code(),
              StatusCode::kNotInitialized);
  });
}

TEST_P(SessionTest, WhatIsUnderWayIsFinishedBeforeTheEnd) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    std::vector<std::shared_ptr<Vector>> tensors;
    for (int i = 0; i < 10; ++i) {
      tensors.push_back(
          Submit(*session, "t" + std::to_string(i), std::vector<float>(30000, float(rank))));
    }
    EXPECT_TRUE(session->Shutdown("done").ok());
    for (const auto& tensor : tensors) {
      ASSERT_TRUE(tensor->work().handle->done());
      ASSERT_TRUE(tensor->work().handle->status().ok())
          << tensor->work().handle->status().ToString();
      EXPECT_EQ(tensor->values().back(), float(size() * (size() - 1) / 2));
    }
  });
}

TEST_P(SessionTest, ManySmallOnesAreFinishedBeforeTheEndToo) {
  RankThreads::Run(size(), [&](int rank) {
    for (int round = 0; round < 20; ++round) {
      const auto session = Start(world_, rank);
      std::vector<std::shared_ptr<Vector>> tensors;
      for (int i = 0; i < 200; ++i) {
        tensors.push_back(Submit(*session, "t" + std::to_string(i), {float(rank)}));
      }
      EXPECT_TRUE(session->Shutdown("done").ok());
      for (const auto& tensor : tensors) {
        ASSERT_TRUE(tensor->work().handle->status().ok())
            << tensor->work().handle->status().ToString();
      }
    }
  });
}

TEST_P(SessionTest, ShutdownIsIdempotentAndTheNextSessionWorks) {
  RankThreads::Run(size(), [&](int rank) {
    for (int round = 0; round < 3; ++round) {
      const auto session = Start(world_, rank);
      const auto unfinished = Submit(*session, "w", {float(rank)});
      EXPECT_TRUE(session->Shutdown("first").ok());
      EXPECT_TRUE(session->Shutdown("second").ok());
      // Observed after its session: harmless to the next one.
      unfinished->work().handle->Observe();
    }
  });
}

TEST_P(SessionTest, AnAbortEndsEveryoneWithItsText) {
  std::atomic<int> ready{0};
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    ASSERT_TRUE(AllReduce(*session, "w", {1}).ok());
    ++ready;
    while (ready < size()) std::this_thread::yield();
    if (rank == 1) session->Abort("loss is not a number");
    const Status status = rank == 1 ? session->Check() : AllReduce(*session, "never", {1});
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
    EXPECT_EQ(status.message(), "loss is not a number");
    EXPECT_EQ(status.origin().rank, 1);
    EXPECT_EQ(MakeVector(OpKind::kAllReduce, "x", {1})->Submit(*session, false).message(),
              "loss is not a number");
    EXPECT_EQ(session->Shutdown("done").code(), StatusCode::kAborted);
    EXPECT_EQ(session->fault().code(), StatusCode::kAborted);
  });
}

// These wait for the whole time-out of a peer, which is longer than a busy machine holds a rank up:
// for one size only.
class SessionLossTest : public SessionTest {};

INSTANTIATE_TEST_SUITE_P(Ranks, SessionLossTest,
                         ::testing::Values(std::make_tuple(3, Sharing::kNone)));

TEST_P(SessionLossTest, ALostPeerIsAFaultOnEveryRankWithinItsTime) {
  std::atomic<int> ready{0};
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank, Options([](core::Config& config) {
                                 config.ping_interval = milliseconds(50);
                                 config.peer_timeout = seconds(12);
                                 config.transport = core::TransportMode::kMpi;  // the hub's
                               }));
    ASSERT_NE(session, nullptr);
    EXPECT_TRUE(AllReduce(*session, "w", {1}).ok());
    ++ready;
    while (ready < size()) std::this_thread::yield();
    if (rank == 0) world_->hub().Isolate(size() - 1);
    const TimePoint begin = core::Clock::now();
    const Status status = AllReduce(*session, "never", {1});
    EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.ToString();
    EXPECT_LT(core::Clock::now() - begin, seconds(60));
    EXPECT_EQ(session->Shutdown("done").code(), StatusCode::kPeerLost);
  });
}

TEST_P(SessionLossTest, ABrokenTransportIsAFaultOnTheRanksThatItReaches) {
  std::latch started(size());
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank, Options([](core::Config& config) {
                                 config.ping_interval = milliseconds(50);
                                 config.peer_timeout = seconds(12);
                                 config.transport = core::TransportMode::kMpi;  // the hub's
                               }));
    ASSERT_NE(session, nullptr);
    started.arrive_and_wait();
    if (rank == 0) world_->hub().Break(0, Status(StatusCode::kBackend, "cable pulled"));
    const Status status = AllReduce(*session, "never", {1});
    EXPECT_EQ(status.code(), rank == 0 ? StatusCode::kBackend : StatusCode::kPeerLost)
        << status.ToString();
    EXPECT_FALSE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, ACallThatPassesItsTimeOutFailsTheGroupAndNamesTheTensor) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    Status status;
    if (rank == 0) {
      const auto tensor = MakeVector(OpKind::kAllReduce, "slow", {1});
      tensor->work().deadline = core::Clock::now() + milliseconds(100);
      ASSERT_TRUE(tensor->Submit(*session, true).ok());
      status = tensor->Synchronize(*session);
    } else {
      status = AllReduce(*session, "something else", {1});
    }
    EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
    // The time-out is 100 ms, or less where the submission came late.
    EXPECT_EQ(status.message().find("\"slow\" did not finish within its time-out of "), 0u)
        << status.message();
    EXPECT_EQ(status.origin().rank, 0);
    EXPECT_EQ(status.origin().tensor, "slow");
    EXPECT_EQ(session->Shutdown("done").code(), StatusCode::kTimedOut);
  });
}

TEST_P(SessionTest, AWaitWithADeadlineReturnsAndTheWorkGoesOn) {
  std::atomic<bool> waited{false};
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    if (rank == 0) {
      const auto tensor = Submit(*session, "w", {1});
      EXPECT_EQ(session->Wait(*tensor->work().handle, core::Clock::now() + milliseconds(5)).code(),
                StatusCode::kTimedOut);
      waited = true;
      EXPECT_TRUE(session->Wait(*tensor->work().handle).ok());
    } else {
      while (!waited) std::this_thread::yield();
      EXPECT_TRUE(AllReduce(*session, "w", {1}).ok());
    }
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_P(SessionTest, WaitersOfAllThreadsLearnOfAFault) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    std::vector<std::thread> threads;
    std::atomic<int> aborted{0};
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        const std::string name = "rank " + std::to_string(rank) + " thread " + std::to_string(t);
        if (AllReduce(*session, name, {1}).code() == StatusCode::kAborted) ++aborted;
      });
    }
    if (rank == 0) session->Abort("enough");
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(aborted, 3);
    EXPECT_EQ(session->Shutdown("done").code(), StatusCode::kAborted);
  });
}

TEST_P(SessionTest, HandlesAreDoneWithoutAnybodyWaiting) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    const auto tensor = Submit(*session, "w", {1});
    const TimePoint limit = core::Clock::now() + seconds(30);
    while (!tensor->work().handle->done() && core::Clock::now() < limit) std::this_thread::yield();
    ASSERT_TRUE(tensor->work().handle->done());
    EXPECT_EQ(tensor->values(), std::vector<float>{float(size())});
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

// ---- what is logged ----

class SessionLogTest : public ::testing::Test {
 protected:
  using Line = std::pair<core::LogLevel, std::string>;

  SessionLogTest() {
    core::ConfigureLog({core::LogLevel::kDebug, false, {}});
    core::SetLogSink([this](core::LogLevel level, const std::string& line) {
      core::MutexLock lock(mutex_);
      lines_.emplace_back(level, line);
    });
  }
  ~SessionLogTest() override {
    core::SetLogSink(nullptr);
    core::ConfigureLog({});
  }

  std::vector<Line> LinesWith(const std::string& text) {
    core::MutexLock lock(mutex_);
    std::vector<Line> found;
    for (const Line& line : lines_) {
      if (line.second.find(text) != std::string::npos) found.push_back(line);
    }
    return found;
  }

 private:
  core::Mutex mutex_;
  std::vector<Line> lines_ SIRTAKI_GUARDED_BY(mutex_);
};

TEST_F(SessionLogTest, AFaultThatNobodyHasSeenIsAWarningAtTheEnd) {
  const auto session = Start(std::make_shared<InprocWorld>(1), 0);
  session->Abort("loss is not a number");
  session->NoteSeen(Status(StatusCode::kAborted, "something else"));
  session->ShutdownAndLog("done");
  const auto lines = LinesWith("loss is not a number");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].first, core::LogLevel::kWarning);
  EXPECT_NE(lines[0].second.find("shutdown: aborted: "), std::string::npos) << lines[0].second;
}

TEST_F(SessionLogTest, RankZeroAloneWarnsOfAVariableThatIsNoOption) {
  const auto world = std::make_shared<InprocWorld>(3);
  RankThreads::Run(3, [&](int rank) {
    StartOptions options = Options();
    options.environment = {{"SIRTAKI_JOBS", "2"}};
    if (rank != 1) options.environment.Set("SIRTAKI_COMPRESSION", std::to_string(rank));
    if (rank == 1) options.environment.Set("SIRTAKI_DEBUG", "1");
    EXPECT_TRUE(Start(world, rank, options)->Shutdown("done").ok());
  });
  const auto lines = LinesWith("environment variable");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].first, core::LogLevel::kWarning);
  EXPECT_NE(lines[0].second.find("SIRTAKI_COMPRESSION is no option"), std::string::npos)
      << lines[0].second;
}

TEST_F(SessionLogTest, AFaultThatWasSeenIsNotWarnedOfAgain) {
  const auto session = Start(std::make_shared<InprocWorld>(1), 0);
  session->Abort("loss is not a number");
  session->NoteSeen(session->Check());
  session->ShutdownAndLog("done");
  const auto lines = LinesWith("loss is not a number");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].first, core::LogLevel::kDebug);
}

TEST_F(SessionLogTest, AnEndWithoutAFaultSaysNothing) {
  const auto session = Start(std::make_shared<InprocWorld>(1), 0);
  session->NoteSeen(Status::Ok());
  session->ShutdownAndLog("done");
  EXPECT_TRUE(LinesWith("shutdown").empty());
}

TEST_F(SessionLogTest, AStallIsOneWarningForAllThatWait) {
  const auto world = std::make_shared<InprocWorld>(2);
  // The first warning may come while rank 0 still submits.
  const auto warned = [this] {
    const auto lines = LinesWith("\"gradient0\" and 8 others have waited ");
    return std::any_of(lines.begin(), lines.end(), [](const Line& line) {
      return line.first == core::LogLevel::kWarning &&
             line.second.find("; not submitted by rank 1; rank 1: has submitted nothing yet") !=
                 std::string::npos;
    });
  };
  RankThreads::Run(2, [&](int rank) {
    const auto session = Start(
        world, rank, Options([](core::Config& config) { config.stall_warning = seconds(1); }));
    std::vector<std::shared_ptr<Vector>> gradients;
    const auto submit_all = [&] {
      for (int i = 0; i < 9; ++i) {
        gradients.push_back(Submit(*session, "gradient" + std::to_string(i), {1}));
      }
    };
    if (rank == 0) submit_all();
    const TimePoint limit = core::Clock::now() + seconds(60);
    while (!warned() && core::Clock::now() < limit) std::this_thread::yield();
    if (rank == 1) submit_all();
    for (const auto& gradient : gradients) EXPECT_TRUE(gradient->Synchronize(*session).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
  EXPECT_TRUE(warned());
}

// ---- the start ----

TEST(SessionStartTest, TheTopologyFollowsTheHosts) {
  const auto world = std::make_shared<InprocWorld>(4, std::vector<int>{0, 0, 0, 1});
  RankThreads::Run(4, [&](int rank) {
    const auto session = Start(world, rank);
    const Topology& topology = session->topology();
    EXPECT_EQ(topology.rank, rank);
    EXPECT_EQ(topology.size, 4);
    EXPECT_EQ(topology.local_rank, rank == 3 ? 0 : rank);
    EXPECT_EQ(topology.local_size, rank == 3 ? 1 : 3);
    EXPECT_EQ(topology.cross_rank, rank == 3 ? 1 : 0);
    EXPECT_EQ(topology.cross_size, rank == 0 || rank == 3 ? 2 : 1);
    EXPECT_FALSE(topology.homogeneous);
    EXPECT_GE(session->cores_per_rank(), 1);
    EXPECT_TRUE(AllReduce(*session, "w", {1}).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST(SessionLimitsTest, ChangeOnAllRanksOrOnNone) {
  const auto world = std::make_shared<InprocWorld>(3);
  RankThreads::Run(3, [&](int rank) {
    const auto session = Start(world, rank);
    EXPECT_TRUE(AllReduce(*session, "w", {1}).ok());
    const Session::Limits limits{1 << 20, 1 << 10, 1 << 12, 1 << 16, 1 << 8};
    EXPECT_TRUE(session->SetLimits(limits).ok());
    EXPECT_EQ(session->limits(), limits);
    EXPECT_TRUE(AllReduce(*session, "w", {1}).ok());
    const Status status = session->SetLimits({1 << 20, rank == 2 ? 5 : 6, 1 << 12, 0, 0});
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_EQ(session->limits(), limits);
    EXPECT_TRUE(AllReduce(*session, "w", {1}).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST(SessionStartTest, AnOptionThatOneRankGotWrongIsRefusedByAll) {
  const auto world = std::make_shared<InprocWorld>(3);
  RankThreads::Run(3, [&](int rank) {
    StartOptions options = Options();
    if (rank == 2) options.parsed = Status(StatusCode::kInvalidArgument, "fusion_bytes=lots");
    std::shared_ptr<Session> session;
    const Status status = Session::CreateInproc(world, rank, options, &session);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "rank 2 cannot start: fusion_bytes=lots");
    EXPECT_EQ(session, nullptr);
    // A second try with good options works.
    const auto good = Start(world, rank);
    EXPECT_TRUE(good->Shutdown("done").ok());
  });
}

TEST(SessionStartTest, AgreedOptionsAreRankZerosAndADifferentExplicitOneIsRefused) {
  const auto world = std::make_shared<InprocWorld>(2);
  RankThreads::Run(2, [&](int rank) {
    StartOptions options = Options();
    const core::ProgramOptions mine = {{"tree_arity", rank == 0 ? "3" : "4"}};
    core::Config parsed = options.config;
    ASSERT_TRUE(
        core::ParseConfig({}, {}, rank == 0 ? mine : core::ProgramOptions{}, &parsed, nullptr)
            .ok());
    parsed.start_timeout = seconds(20);
    options.config = parsed;
    const auto session = Start(world, rank, options);
    EXPECT_EQ(session->config().tree_arity, 3);
    EXPECT_TRUE(session->Shutdown("done").ok());

    ASSERT_TRUE(core::ParseConfig({}, {}, mine, &options.config, nullptr).ok());
    options.config.start_timeout = seconds(20);
    std::shared_ptr<Session> refused;
    const Status status = Session::CreateInproc(world, rank, options, &refused);
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("tree_arity"), std::string::npos) << status.ToString();
  });
}

TEST(SessionStartTest, ARankThatDoesNotComeIsATimeOutThatNamesIt) {
  const auto world = std::make_shared<InprocWorld>(3);
  RankThreads::Run(2, [&](int rank) {
    std::shared_ptr<Session> session;
    const Status status = Session::CreateInproc(
        world, rank,
        Options([](core::Config& config) { config.start_timeout = milliseconds(100); }), &session);
    EXPECT_EQ(status.code(), StatusCode::kTimedOut);
    EXPECT_NE(status.message().find("2"), std::string::npos) << status.ToString();
  });
}

// ---- a world of one ----

class LoneSessionTest : public ::testing::Test {
 protected:
  std::shared_ptr<Session> session_ = Start(std::make_shared<InprocWorld>(1), 0);
};

TEST_F(LoneSessionTest, WorkIsDoneWhenSubmitReturns) {
  const auto tensor = MakeVector(OpKind::kAllReduce, "w", {1, 2});
  std::vector<float> out(2);
  tensor->work().output = out.data();
  ASSERT_TRUE(tensor->Submit(*session_, false).ok());
  ASSERT_TRUE(tensor->work().handle->done());
  EXPECT_TRUE(tensor->work().handle->status().ok());
  EXPECT_EQ(out, (std::vector<float>{1, 2}));
  EXPECT_TRUE(session_->Wait(*tensor->work().handle).ok());
}

TEST_F(LoneSessionTest, FactorsAreApplied) {
  const auto tensor = MakeVector(OpKind::kAllReduce, "w", {1, 2});
  auto signature = *tensor->work().request.signature();
  signature.prescale = 3;
  signature.postscale = 0.5;
  tensor->work().request.asked = std::make_shared<core::Signature>(signature);
  ASSERT_TRUE(tensor->Submit(*session_, true).ok());
  EXPECT_EQ(tensor->values(), (std::vector<float>{1.5, 3}));
}

TEST_F(LoneSessionTest, FactorsAreAppliedToHalfTypes) {
  std::vector<std::uint16_t> halves(3000, 0x3C00);  // 1.0
  const auto tensor = MakeVector(OpKind::kAllReduce, "w", {});
  auto signature = *tensor->work().request.signature();
  signature.dtype = core::DType::kF16;
  signature.shape = {3000};
  signature.prescale = 2;
  tensor->work().request.asked = std::make_shared<core::Signature>(signature);
  tensor->work().input = tensor->work().output = halves.data();
  ASSERT_TRUE(tensor->Submit(*session_, true).ok());
  EXPECT_EQ(halves, std::vector<std::uint16_t>(3000, 0x4000));  // 2.0
}

TEST_F(LoneSessionTest, GathersItsOwnRows) {
  const auto tensor = MakeVector(OpKind::kAllGather, "g", {4, 5, 6});
  ASSERT_TRUE(tensor->Submit(*session_, false).ok());
  EXPECT_EQ(tensor->gathered(), (std::vector<float>{4, 5, 6}));
}

TEST_F(LoneSessionTest, AnOutputThatCannotBeAllocatedIsAnError) {
  const auto tensor = MakeVector(OpKind::kAllGather, "g", {4});
  tensor->work().allocate_output = [](const auto&) -> void* { throw std::bad_alloc(); };
  ASSERT_TRUE(tensor->Submit(*session_, false).ok());
  EXPECT_EQ(tensor->work().handle->status().code(), StatusCode::kBackend);
}

TEST_F(LoneSessionTest, ChecksWhatItCanAlone) {
  const auto invalid = MakeVector(OpKind::kAllReduce, "w", {1});
  invalid->work().request.invalid = "a tensor of dreams";
  ASSERT_TRUE(invalid->Submit(*session_, false).ok());
  EXPECT_EQ(invalid->work().handle->status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(invalid->work().handle->status().message().find("a tensor of dreams"),
            std::string::npos);
  const auto again = MakeVector(OpKind::kAllReduce, "w", {1});
  EXPECT_EQ(again->Submit(*session_, false).code(), StatusCode::kDuplicateName);
  invalid->work().handle->Observe();
  EXPECT_TRUE(again->Submit(*session_, false).ok());
}

TEST_F(LoneSessionTest, AbortAndShutdownEndIt) {
  session_->Abort("enough");
  EXPECT_EQ(session_->Check().message(), "enough");
  EXPECT_EQ(MakeVector(OpKind::kAllReduce, "w", {1})->Submit(*session_, false).code(),
            StatusCode::kAborted);
  EXPECT_EQ(session_->Shutdown("done").code(), StatusCode::kAborted);
  EXPECT_EQ(session_->Check().code(), StatusCode::kNotInitialized);
}

// ---- the line about it ----

TEST_P(SessionTest, SaysWhereItIsAndWhatItHas) {
  RankThreads::Run(size(), [&](int rank) {
    const auto session = Start(world_, rank);
    const std::string& line = session->description();
    const std::string place = ": rank " + std::to_string(rank) + " of " + std::to_string(size());
    EXPECT_EQ(line.rfind("Sirtaki ", 0), 0U) << line;
    for (const std::string& part :
         {place, std::string("; in-process"), std::string("host data moves by "),
          std::string(" for each; waits yield"), std::string("; options: ")}) {
      EXPECT_NE(line.find(part), std::string::npos) << part << " in " << line;
    }
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

// ---- forks and the process's own session ----

// Runs in a forked child and gives its exit status.
int InChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(LoneSessionTest, InAForkedChildEveryCallFailsAndTheParentGoesOn) {
  EXPECT_EQ(InChild([&] {
              const Status status = session_->Check();
              if (status.code() != StatusCode::kNotInitialized) return 1;
              if (status.message().find("after fork") == std::string::npos) return 2;
              if (status.message().find("cannot start its own; start it with exec") ==
                  std::string::npos) {
                return 6;
              }
              if (session_->is_alive()) return 3;
              const auto vector = MakeVector(OpKind::kAllReduce, "w", {1});
              if (vector->Submit(*session_).code() != StatusCode::kNotInitialized) return 4;
              if (!session_->Shutdown("in the child").ok()) return 5;
              session_.reset();
              return 0;
            }),
            0);
  EXPECT_TRUE(session_->is_alive());
}

TEST(ForkTest, AChildOfSeveralRanksEndsWithoutTouchingThem) {
  const auto world = std::make_shared<InprocWorld>(2);
  std::latch child_ended(1);  // until then rank 0's work has to be pending
  RankThreads::Run(2, [&](int rank) {
    auto session = Start(world, rank);
    if (rank == 1) child_ended.wait();
    const auto pending = Submit(*session, "w", {1});
    if (rank == 0) {
      EXPECT_EQ(InChild([&] {
                  if (session->Check().code() != StatusCode::kNotInitialized) return 1;
                  if (session->Wait(*pending->work().handle).ok()) return 2;
                  session->Abort("in the child");
                  session.reset();
                  return 0;
                }),
                0);
      child_ended.count_down();
    }
    EXPECT_TRUE(pending->Synchronize(*session).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
}

TEST_F(LoneSessionTest, TheProcessesOwnSessionIsSetAndCleared) {
  EXPECT_EQ(DefaultSession(), nullptr);
  SetDefaultSession(session_);
  EXPECT_EQ(DefaultSession(), session_);
  SetDefaultSession(nullptr);
  EXPECT_EQ(DefaultSession(), nullptr);
}

}  // namespace
}  // namespace sirtaki::session
