// RANKS: 1 2 3 4
// Whole sessions over MPI, in a program that has initialised MPI itself.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "session/session.h"
#include "tests/support/mpi_interpose.h"
#include "tests/support/mpi_main.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::OpKind;
using core::Status;
using core::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using tests::Vector;

class SessionMpiTest : public testing::TestWithParam<core::TransportMode> {
 protected:
  static StartOptions Options(const std::function<void(core::Config&)>& change = nullptr) {
    return tests::SessionOptions([&](core::Config& config) {
      config.transport = GetParam();
      config.stall_warning = seconds(0);
      if (change) change(config);
    });
  }

  void Start(const StartOptions& options = Options()) {
    const Status status = Session::CreateMpi(options, &session_);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  void TearDown() override {
    if (!session_) return;
    const Status status = session_->Shutdown("the test is over");
    EXPECT_TRUE(status.ok() || fault_expected_) << status.ToString();
  }

  int rank() const { return session_->topology().rank; }
  int size() const { return session_->topology().size; }
  float RankSum() const { return static_cast<float>(size() * (size() - 1) / 2); }

  std::shared_ptr<Session> session_;
  bool fault_expected_ = false;
};

INSTANTIATE_TEST_SUITE_P(Ways, SessionMpiTest,
                         testing::Values(core::TransportMode::kAuto, core::TransportMode::kMpi),
                         [](const auto& of) {
                           return std::string(of.param == core::TransportMode::kMpi ? "AllMpi"
                                                                                    : "Auto");
                         });

TEST_P(SessionMpiTest, SumsAreRightInBothLanes) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (const std::size_t count :
       {std::size_t{1}, std::size_t{1000}, std::size_t{1} << 18, (std::size_t{3} << 18) + 5}) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(static_cast<std::size_t>(rank()) + i % 13);
    }
    Vector vector(OpKind::kAllReduce, "sum", values);
    const Status status = vector.Run(*session_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float expected = RankSum() + static_cast<float>(size()) * static_cast<float>(i % 13);
      if (vector.values()[i] != expected) ++wrong;
    }
    EXPECT_EQ(wrong, 0U) << "of " << count;
  }
}

TEST_P(SessionMpiTest, ManyTensorsInADifferentOrderOnEachRank) {
  ASSERT_NO_FATAL_FAILURE(Start());
  std::mt19937 random(static_cast<unsigned>(rank()) + 1);
  for (int step = 0; step < 10; ++step) {
    std::vector<Vector> vectors;
    for (int i = 0; i < 50; ++i) {
      const std::size_t count = i % 10 == 0 ? 50000 : static_cast<std::size_t>(i) + 1;
      vectors.emplace_back(OpKind::kAllReduce, "t" + std::to_string(i),
                           std::vector<float>(count, static_cast<float>(rank() + i)));
    }
    std::vector<std::size_t> order(vectors.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      const Status status = vectors[i].Submit(*session_);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      const Status status = vectors[i].Synchronize(*session_);
      ASSERT_TRUE(status.ok()) << status.ToString();
      const float expected = RankSum() + static_cast<float>(size()) * static_cast<float>(i);
      EXPECT_EQ(vectors[i].values().front(), expected);
      EXPECT_EQ(vectors[i].values().back(), expected);
    }
  }
}

TEST_P(SessionMpiTest, BroadcastAndAllGather) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (int root = 0; root < size(); ++root) {
    Vector sent(OpKind::kBroadcast, "b", std::vector<float>(40000, static_cast<float>(rank())),
                root);
    const Status status = sent.Run(*session_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(sent.values(), std::vector<float>(40000, static_cast<float>(root)));
  }
  Vector mine(OpKind::kAllGather, "g",
              std::vector<float>(static_cast<std::size_t>(rank()) * 3, static_cast<float>(rank())));
  const Status status = mine.Run(*session_);
  ASSERT_TRUE(status.ok()) << status.ToString();
  std::vector<float> expected;
  for (int r = 0; r < size(); ++r) {
    expected.insert(expected.end(), static_cast<std::size_t>(r) * 3, static_cast<float>(r));
  }
  EXPECT_EQ(mine.gathered(), expected);
}

TEST_P(SessionMpiTest, UnnamedCallsAreMatchedByTheirOrder) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (int i = 0; i < 200; ++i) {
    Vector vector(OpKind::kAllReduce, "", {static_cast<float>(i)});
    const Status status = vector.Run(*session_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_EQ(vector.values().front(), static_cast<float>(i * size()));
  }
}

TEST_P(SessionMpiTest, LateRankDelaysNobodyElse) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const bool late = rank() == size() - 1;
  Vector awaited(OpKind::kAllReduce, "awaited", {1.0F});
  if (!late) {
    ASSERT_TRUE(awaited.Submit(*session_).ok());
  }
  Vector other(OpKind::kAllReduce, "other", {2.0F});
  ASSERT_TRUE(other.Run(*session_).ok());
  EXPECT_EQ(other.values().front(), static_cast<float>(2 * size()));
  if (late) {
    ASSERT_TRUE(awaited.Submit(*session_).ok());
  }
  ASSERT_TRUE(awaited.Synchronize(*session_).ok());
  EXPECT_EQ(awaited.values().front(), static_cast<float>(size()));
}

TEST_P(SessionMpiTest, RankThatComesLateIsWaitedFor) {
  ASSERT_NO_FATAL_FAILURE(Start());
  // The one sleep of these tests: the others are to cool down and sleep between their looks.
  if (rank() == 0) std::this_thread::sleep_for(milliseconds(300));
  Vector vector(OpKind::kAllReduce, "late", std::vector<float>(100000, 1.0F));
  const Status status = vector.Run(*session_);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(vector.values().back(), static_cast<float>(size()));
}

TEST_P(SessionMpiTest, MismatchFailsOnEveryRankAndTheNameWorksAgain) {
  ASSERT_NO_FATAL_FAILURE(Start());
  if (size() > 1) {
    Vector vector(OpKind::kAllReduce, "w", std::vector<float>(rank() == 1 ? 5 : 4, 1.0F));
    const Status status = vector.Run(*session_);
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.ToString().find("\"w\""), std::string::npos) << status.ToString();
    EXPECT_NE(status.ToString().find("[5]"), std::string::npos) << status.ToString();
    EXPECT_NE(status.ToString().find("[4]"), std::string::npos) << status.ToString();
  }
  Vector again(OpKind::kAllReduce, "w", {1.0F});
  const Status status = again.Run(*session_);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(again.values().front(), static_cast<float>(size()));
}

TEST_P(SessionMpiTest, DuplicateNameIsRefusedHereAndHarmsNobody) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Vector first(OpKind::kAllReduce, "twice", {1.0F});
  ASSERT_TRUE(first.Submit(*session_).ok());
  Vector second(OpKind::kAllReduce, "twice", {1.0F});
  const Status refused = second.Submit(*session_);
  EXPECT_EQ(refused.code(), StatusCode::kDuplicateName) << refused.ToString();
  EXPECT_TRUE(first.Synchronize(*session_).ok());
  EXPECT_EQ(first.values().front(), static_cast<float>(size()));
  Vector third(OpKind::kAllReduce, "twice", {1.0F});
  EXPECT_TRUE(third.Run(*session_).ok());
}

TEST_P(SessionMpiTest, RankThatLeavesFailsWhatTheOthersWaitFor) {
  ASSERT_NO_FATAL_FAILURE(Start());
  if (size() == 1) return;
  if (rank() != 1) {
    Vector vector(OpKind::kAllReduce, "orphan", {1.0F});
    const Status status = vector.Run(*session_);
    EXPECT_EQ(status.code(), StatusCode::kShutDown) << status.ToString();
    EXPECT_NE(status.ToString().find("rank 1"), std::string::npos) << status.ToString();
  }
  const Status status = session_->Shutdown("had enough");
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST_P(SessionMpiTest, WorkUnderWayIsFinishedBeforeTheEnd) {
  ASSERT_NO_FATAL_FAILURE(Start());
  std::vector<Vector> vectors;
  for (int i = 0; i < 20; ++i) {
    vectors.emplace_back(OpKind::kAllReduce, "t" + std::to_string(i),
                         std::vector<float>(20000, 1.0F));
    ASSERT_TRUE(vectors.back().Submit(*session_).ok());
  }
  const Status status = session_->Shutdown("done");
  EXPECT_TRUE(status.ok()) << status.ToString();
  for (Vector& vector : vectors) {
    ASSERT_TRUE(vector.work().handle->done());
    EXPECT_TRUE(vector.work().handle->status().ok()) << vector.work().handle->status().ToString();
    EXPECT_EQ(vector.values().back(), static_cast<float>(size()));
  }
}

TEST_P(SessionMpiTest, CallAfterShutdownIsRefusedAndTheNextSessionWorks) {
  for (int round = 0; round < 5; ++round) {
    ASSERT_NO_FATAL_FAILURE(Start());
    Vector vector(OpKind::kAllReduce, "w", {1.0F});
    ASSERT_TRUE(vector.Run(*session_).ok());
    EXPECT_EQ(vector.values().front(), static_cast<float>(size()));
    ASSERT_TRUE(session_->Shutdown("round").ok());
    Vector refused(OpKind::kAllReduce, "w", {1.0F});
    EXPECT_EQ(refused.Submit(*session_).code(), StatusCode::kNotInitialized);
    int finalized = 0;
    MPI_Finalized(&finalized);
    EXPECT_EQ(finalized, 0);
  }
}

TEST_P(SessionMpiTest, ProgramsCallMpiWhileItIsPaused) {
  ASSERT_NO_FATAL_FAILURE(Start());
  std::vector<Vector> vectors;
  for (int i = 0; i < 5; ++i) {
    vectors.emplace_back(OpKind::kAllReduce, "t" + std::to_string(i),
                         std::vector<float>(200000, 1.0F));
    ASSERT_TRUE(vectors.back().Submit(*session_).ok());
    const Status paused = session_->PauseMedium(core::Clock::now() + seconds(60));
    ASSERT_TRUE(paused.ok()) << paused.ToString();
    EXPECT_TRUE(vectors.back().work().handle->done());  // what came before is over
    const std::int64_t calls =
        tests::MpiCallsMade(tests::MpiCall::kImprobe) + tests::MpiCallsMade(tests::MpiCall::kTest);
    Vector meanwhile(OpKind::kAllReduce, "meanwhile", {1.0F});
    ASSERT_TRUE(meanwhile.Submit(*session_).ok());
    int sum = 1;
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(sum, size());
    int token = rank();
    MPI_Sendrecv_replace(&token, 1, MPI_INT, (rank() + 1) % size(), 0,
                         (rank() + size() - 1) % size(), 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    EXPECT_EQ(token, (rank() + size() - 1) % size());
    std::this_thread::sleep_for(milliseconds(2 * i));  // longer than the engine's naps
    EXPECT_EQ(
        tests::MpiCallsMade(tests::MpiCall::kImprobe) + tests::MpiCallsMade(tests::MpiCall::kTest),
        calls);
    EXPECT_FALSE(size() > 1 && meanwhile.work().handle->done());
    EXPECT_EQ(session_->PauseMedium(core::Clock::now() + seconds(60)).code(),
              StatusCode::kInvalidArgument);
    ASSERT_TRUE(session_->ResumeMedium(core::Clock::now() + seconds(60)).ok());
    EXPECT_TRUE(meanwhile.Synchronize(*session_).ok());
    EXPECT_EQ(meanwhile.values().front(), static_cast<float>(size()));
  }
  EXPECT_EQ(session_->ResumeMedium(core::Clock::now()).code(), StatusCode::kInvalidArgument);
  for (Vector& vector : vectors) EXPECT_TRUE(vector.Synchronize(*session_).ok());
}

TEST_P(SessionMpiTest, ACallThatWouldWaitInAPauseIsAnError) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const core::TimePoint deadline = core::Clock::now() + seconds(60);
  ASSERT_TRUE(session_->PauseMedium(deadline).ok());
  Vector submitted(OpKind::kAllReduce, "submitted", {1.0F});
  ASSERT_TRUE(submitted.Submit(*session_).ok());
  int handle = 0;
  Vector waits(OpKind::kAllReduce, "waits", {1.0F});
  std::vector<Status> refused{waits.Run(*session_),
                              session_->MakeCommunicator(0, deadline, &handle)};
  if (size() > 1) refused.push_back(session_->Wait(*submitted.work().handle, deadline));
  for (const Status& status : refused) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
    EXPECT_NE(status.message().find("resume_mpi()"), std::string::npos) << status.ToString();
  }
  ASSERT_TRUE(session_->ResumeMedium(deadline).ok());
  EXPECT_TRUE(submitted.Synchronize(*session_).ok());
  EXPECT_TRUE(waits.Run(*session_).ok());
}

// It has counted no pause, and takes part in the next one.
TEST_P(SessionMpiTest, APauseWithoutARankThatHasJoinedIsAnError) {
  if (tests::WorldSize() == 1) return;
  ASSERT_NO_FATAL_FAILURE(Start());
  const core::TimePoint deadline = core::Clock::now() + seconds(60);
  if (rank() < size() - 1) {
    const Status paused = session_->PauseMedium(deadline);
    EXPECT_EQ(paused.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(paused.message().find("rank " + std::to_string(size() - 1) + " has joined"),
              std::string::npos)
        << paused.ToString();
  }
  core::HandlePtr joined;
  ASSERT_TRUE(session_->Join(core::kWorldSet, deadline, &joined).ok());
  ASSERT_TRUE(session_->Wait(*joined).ok());
  const Status paused = session_->PauseMedium(deadline);
  ASSERT_TRUE(paused.ok()) << paused.ToString();
  ASSERT_TRUE(session_->ResumeMedium(deadline).ok());
}

// A pause that the ranks do not agree on is refused on all of them.
TEST_P(SessionMpiTest, WorkOfOtherThreadsDoesNotSpoilAPause) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const core::TimePoint deadline = core::Clock::now() + seconds(60);
  std::thread other([&] {
    for (int i = 0; i < 200; ++i) {
      Vector sum(OpKind::kAllReduce, "other", std::vector<float>(i % 2 == 0 ? 10 : 50000, 1.0F));
      const Status status = sum.Run(*session_);
      ASSERT_TRUE(status.ok()) << status.ToString();
      ASSERT_EQ(sum.values().back(), static_cast<float>(size()));
    }
  });
  std::vector<int> granted;
  for (int i = 0; i < 20; ++i) {
    const Status paused = session_->PauseMedium(deadline);
    granted.push_back(paused.ok() ? 1 : 0);
    if (!paused.ok()) {
      EXPECT_NE(paused.message().find("of another thread"), std::string::npos) << paused.ToString();
      continue;
    }
    int sum = 1;
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(sum, size());
    ASSERT_TRUE(session_->ResumeMedium(deadline).ok());
  }
  other.join();
  // Nothing is under way any more; and the ranks were told the same every time.
  ASSERT_TRUE(session_->PauseMedium(deadline).ok());
  std::vector<int> granted_everywhere(granted.size());
  MPI_Allreduce(granted.data(), granted_everywhere.data(), static_cast<int>(granted.size()),
                MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  for (std::size_t i = 0; i < granted.size(); ++i) {
    EXPECT_EQ(granted_everywhere[i], granted[i] * size()) << "pause " << i;
  }
  ASSERT_TRUE(session_->ResumeMedium(deadline).ok());
}

TEST_P(SessionMpiTest, ASessionEndsThoughItIsPaused) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_TRUE(session_->PauseMedium(core::Clock::now() + seconds(60)).ok());
  EXPECT_TRUE(session_->Shutdown("paused").ok());
}

TEST_P(SessionMpiTest, TwoSessionsAtOnce) {
  ASSERT_NO_FATAL_FAILURE(Start());
  std::shared_ptr<Session> other;
  ASSERT_TRUE(Session::CreateMpi(Options(), &other).ok());
  for (int i = 0; i < 20; ++i) {
    Vector one(OpKind::kAllReduce, "w", {1.0F});
    Vector two(OpKind::kAllReduce, "w", std::vector<float>(3, 2.0F));
    ASSERT_TRUE(one.Submit(*session_).ok());
    ASSERT_TRUE(two.Submit(*other).ok());
    ASSERT_TRUE(two.Synchronize(*other).ok());
    ASSERT_TRUE(one.Synchronize(*session_).ok());
    EXPECT_EQ(one.values().front(), static_cast<float>(size()));
    EXPECT_EQ(two.values().back(), static_cast<float>(2 * size()));
  }
  EXPECT_TRUE(other->Shutdown("done").ok());
}

TEST_P(SessionMpiTest, OptionThatOneRankGotWrongIsRefusedByAll) {
  StartOptions options = Options();
  const bool wrong = tests::WorldRank() == tests::WorldSize() - 1;
  if (wrong) options.parsed = {StatusCode::kInvalidArgument, "fusion_bytes is \"lots\""};
  const Status status = Session::CreateMpi(options, &session_);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
  EXPECT_NE(status.ToString().find("fusion_bytes is \"lots\""), std::string::npos)
      << status.ToString();
  EXPECT_EQ(session_, nullptr);
}

TEST_P(SessionMpiTest, AgreedOptionThatDiffersIsRefusedByAll) {
  if (tests::WorldSize() == 1) return;
  const Status status =
      Session::CreateMpi(Options([](core::Config& config) {
                           config.tree_arity = 2 + tests::WorldRank();
                           config.SetSource("tree_arity", core::OptionSource::kProgram);
                         }),
                         &session_);
  EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.ToString();
  EXPECT_NE(status.ToString().find("tree_arity"), std::string::npos) << status.ToString();
}

TEST_P(SessionMpiTest, RankZeroAloneWarnsOfAVariableThatIsNoOption) {
  StartOptions options = Options();
  options.environment = {{"SIRTAKI_COMPRESSION", "fp16"}, {"SIRTAKI_CUDA", "ON"}};
  std::vector<std::string> warned;  // on this rank
  core::SetLogSink([&](core::LogLevel level, const std::string& line) {
    const std::size_t begin = line.find("environment variable");
    if (level == core::LogLevel::kWarning && begin != std::string::npos) {
      warned.push_back(line.substr(begin, line.find(" is ") - begin));
    }
  });
  const Status status = Session::CreateMpi(options, &session_);
  core::SetLogSink(nullptr);
  ASSERT_TRUE(status.ok()) << status.ToString();
  std::vector<std::string> expected;
  if (rank() == 0) expected = {"environment variable SIRTAKI_COMPRESSION"};
  EXPECT_EQ(warned, expected);
}

// The last: MPI is left as after a failure.
TEST_P(SessionMpiTest, ZAbortEndsEveryRankWithItsReason) {
  ASSERT_NO_FATAL_FAILURE(Start());
  fault_expected_ = true;
  if (rank() == size() - 1) {
    session_->Abort("loss is not a number");
  } else {
    Vector vector(OpKind::kAllReduce, "w", {1.0F});
    const Status status = vector.Run(*session_);
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_NE(status.ToString().find("loss is not a number"), std::string::npos)
        << status.ToString();
  }
  EXPECT_EQ(session_->fault().code(), StatusCode::kAborted);
  EXPECT_TRUE(tests::TrueOnAllRanks(true));
}

}  // namespace
}  // namespace sirtaki::session
