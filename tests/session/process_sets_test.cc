// Process sets, join, messages and grouped calls of whole sessions on threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::OpKind;
using core::RankRanges;
using core::SetNumber;
using core::Status;
using core::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using tests::RankThreads;
using tests::Vector;

constexpr core::TimePoint kNever = core::TimePoint::max();

class ProcessSetsTest : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }

  void OnAllRanks(const std::function<void(Session&, int)>& body,
                  const std::function<void(core::Config&)>& change = nullptr,
                  std::vector<int> host_of_rank = {}) {
    const auto world = std::make_shared<InprocWorld>(size(), std::move(host_of_rank));
    RankThreads::Run(size(), [&](int rank) {
      std::shared_ptr<Session> session;
      const Status status =
          Session::CreateInproc(world, rank, tests::SessionOptions(change), &session);
      ASSERT_TRUE(status.ok()) << status.ToString();
      body(*session, rank);
      static_cast<void>(session->Shutdown("the test is over"));
    });
  }

  static float Sum(Session& session, SetNumber set, const std::string& name) {
    Vector vector(OpKind::kAllReduce, name, {1}, -1, set);
    const Status status = vector.Run(session);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return vector.values()[0];
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, ProcessSetsTest, ::testing::Values(2, 3, 4));

TEST_P(ProcessSetsTest, LocalAndCrossAreThereFromTheStart) {
  std::vector<int> hosts;
  for (int rank = 0; rank < size(); ++rank) hosts.push_back(rank % 2);
  OnAllRanks(
      [&](Session& session, int rank) {
        const core::Topology& topology = session.topology();
        const RankRanges local = *session.MembersOf(session.local_set());
        const RankRanges cross = *session.MembersOf(session.cross_set());
        EXPECT_EQ(local.Count(), topology.local_size);
        EXPECT_EQ(local.IndexOf(rank), topology.local_rank);
        EXPECT_EQ(cross.Count(), topology.cross_size);
        EXPECT_EQ(cross.IndexOf(rank), topology.cross_rank);
        EXPECT_EQ(Sum(session, session.local_set(), "l"), static_cast<float>(local.Count()));
        EXPECT_EQ(Sum(session, session.cross_set(), "c"), static_cast<float>(cross.Count()));
      },
      nullptr, hosts);
}

TEST_P(ProcessSetsTest, ASetThatIsNotReadyDelaysNoOther) {
  OnAllRanks([&](Session& session, int rank) {
    SetNumber all = 0;
    SetNumber first = 0;
    ASSERT_TRUE(session.AddSet(RankRanges::Span(0, size() - 1), kNever, &all).ok());
    ASSERT_TRUE(session.AddSet({0}, kNever, &first).ok());
    std::unique_ptr<Vector> waits;
    if (rank == 0) {
      waits = std::make_unique<Vector>(OpKind::kAllReduce, "late", std::vector<float>{1}, -1, all);
      ASSERT_TRUE(waits->Submit(session).ok());
      EXPECT_EQ(Sum(session, first, "alone"), 1);
      // The others submit it after the sum of the world, which waits for this rank.
      EXPECT_FALSE(waits->work().handle->done());
    }
    EXPECT_EQ(Sum(session, core::kWorldSet, "world"), static_cast<float>(size()));
    if (rank == 0) {
      EXPECT_TRUE(waits->Synchronize(session).ok());
    } else {
      EXPECT_EQ(Sum(session, all, "late"), static_cast<float>(size()));
    }
  });
}

TEST_P(ProcessSetsTest, ARankOutsideIsToldAtOnceAndSoIsWhoeverUsesASetThatIsGone) {
  OnAllRanks([&](Session& session, int rank) {
    SetNumber set = 0;
    ASSERT_TRUE(session.AddSet({0}, kNever, &set).ok());
    Vector vector(OpKind::kAllReduce, "w", {1}, -1, set);
    const Status status = vector.Run(session);
    if (rank == 0) {
      EXPECT_TRUE(status.ok()) << status.ToString();
    } else {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(status.message(), HasSubstr("is not in that set, which holds rank 0"));
    }
    ASSERT_TRUE(session.RemoveSet(set, kNever).ok());
    Vector again(OpKind::kAllReduce, "w", {1}, -1, set);
    EXPECT_EQ(again.Run(session).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(session.RemoveSet(set, kNever).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(session.RemoveSet(session.local_set(), kNever).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(session.AddSet({}, kNever, &set).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(session.AddSet({99}, kNever, &set).code(), StatusCode::kInvalidArgument);
    // Different members on one rank: all are told who asked for what, and the next change works.
    const Status differs = session.AddSet(rank == 0 ? RankRanges{0} : RankRanges{1}, kNever, &set);
    EXPECT_EQ(differs.code(), StatusCode::kMismatch);
    EXPECT_THAT(differs.message(), HasSubstr("ranks 0 on rank 0, ranks 1 on rank"));
    EXPECT_TRUE(session.AddSet({0, 1}, kNever, &set).ok());
  });
}

// Rank 0 asks for the second change while the first waits for the others, and is refused.
TEST_P(ProcessSetsTest, ChangesOfTwoThreadsMatchThoughOneIsRefused) {
  std::latch second_begins(1);
  OnAllRanks([&](Session& session, int rank) {
    const core::TimePoint soon = core::Clock::now() + seconds(20);
    const auto refused = [&] {
      const Status status = session.RemoveSet(999, soon);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
    };
    const auto add = [&](const RankRanges& members) {
      SetNumber set = 0;
      const Status status = session.AddSet(members, soon, &set);
      EXPECT_TRUE(status.ok()) << status.ToString();
      return set;
    };
    if (rank == 0) {
      std::thread first(refused);
      while (session.Describe("", seconds(1)).pending.empty() && core::Clock::now() < soon) {
        std::this_thread::yield();
      }
      std::thread second([&] {
        second_begins.count_down();
        add({0});
      });
      first.join();
      second.join();
    } else {
      second_begins.wait();
      refused();
      add({0});
    }
    const SetNumber both = add({0, 1});
    if (rank < 2) {
      EXPECT_EQ(Sum(session, both, "both"), 2);
    }
  });
}

TEST_P(ProcessSetsTest, JoinReturnsTheLastRankAndEndsTheEpoch) {
  std::atomic<int> refused{0};
  OnAllRanks([&](Session& session, int rank) {
    for (int round = 0; round < 20; ++round) {
      // Rank r goes through r + 1 steps; those that have joined add nothing.
      for (int step = 0; step <= rank; ++step) {
        Vector vector(OpKind::kAllReduce, round % 2 == 0 ? "" : "s" + std::to_string(step),
                      std::vector<float>{1});
        ASSERT_TRUE(vector.Run(session).ok());
        EXPECT_EQ(vector.values()[0], static_cast<float>(size() - step));
      }
      const bool last = rank == size() - 1;
      // Until it joins the epoch lasts, and calls of the others are refused.
      while (last && refused < (round + 1) * (size() - 1)) std::this_thread::yield();
      core::HandlePtr joined;
      ASSERT_TRUE(session.Join(core::kWorldSet, kNever, &joined).ok());
      if (!last) {
        Vector late(OpKind::kAllReduce, "late", {1});
        EXPECT_THAT(late.Run(session).message(), HasSubstr("this rank has joined"));
        ++refused;
      }
      ASSERT_TRUE(session.Wait(*joined).ok());
      EXPECT_EQ(joined->value(), size() - 1);
    }
  });
}

TEST_P(ProcessSetsTest, AnUnnamedCallFromASecondThreadIsRefused) {
  OnAllRanks([&](Session& session, int) {
    Vector mine(OpKind::kAllReduce, "", {1});
    ASSERT_TRUE(mine.Run(session).ok());
    std::thread([&] {
      Vector other(OpKind::kAllReduce, "", {1});
      const Status status = other.Run(session);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(status.message(), HasSubstr("a second thread made a call without a name"));
      EXPECT_EQ(Sum(session, core::kWorldSet, "named"), static_cast<float>(size()));
      EXPECT_EQ(Sum(session, session.local_set(), ""), static_cast<float>(size()))
          << "another set has a thread of its own";
    }).join();
    // That thread is gone, so this one may take over its set.
    EXPECT_EQ(Sum(session, session.local_set(), ""), static_cast<float>(size()));
  });
}

TEST_P(ProcessSetsTest, ACallWhoseTimeIsOverNamesWhoMissesIt) {
  std::latch over(size());
  OnAllRanks([&](Session& session, int rank) {
    Vector vector(OpKind::kBarrier, "monitored", {});
    if (rank < size() - 2) {
      EXPECT_TRUE(vector.Submit(session).ok());
    }
    // When this is done, it is known who has submitted the other.
    EXPECT_EQ(Sum(session, core::kWorldSet, "after it"), static_cast<float>(size()));
    if (rank == size() - 2) {
      vector.work().deadline = core::Clock::now() + milliseconds(100);
      EXPECT_TRUE(vector.Submit(session).ok());
    }
    if (rank != size() - 1) {
      const Status status = vector.Synchronize(session);
      EXPECT_EQ(status.code(), StatusCode::kTimedOut);
      EXPECT_THAT(status.message(), HasSubstr("\"monitored\" did not finish within its time-out"));
      EXPECT_THAT(status.message(),
                  HasSubstr("not submitted by rank " + std::to_string(size() - 1)));
    }
    over.arrive_and_wait();
  });
}

TEST_P(ProcessSetsTest, MessagesAreMatchedByPairAndTagInOrder) {
  OnAllRanks([&](Session& session, int rank) {
    const int next = (rank + 1) % size();
    const int previous = (rank + size() - 1) % size();
    std::vector<core::WorkPtr> works;
    std::vector<std::vector<float>> memory(6, std::vector<float>(3));
    const auto start = [&](OpKind kind, int peer, int tag, std::vector<float>& values) {
      auto work = std::make_shared<core::Work>();
      auto signature = std::make_shared<core::Signature>();
      signature->kind = kind;
      signature->shape = {static_cast<std::int64_t>(values.size())};
      work->request.asked = std::move(signature);
      work->request.key =
          core::Key::Named(core::kWorldSet, "message " + std::to_string(works.size()));
      work->peer = peer;
      work->tag = tag;
      work->input = values.data();
      work->output = values.data();
      ASSERT_TRUE(session.Submit(work, false).ok());
      works.push_back(work);
    };
    for (int i = 0; i < 3; ++i) {
      auto& values = memory[static_cast<std::size_t>(i)];
      values.assign(3, static_cast<float>(10 * rank + i));
      start(OpKind::kSend, next, i == 2 ? 7 : 5, values);
    }
    // The tag of its own first, then the two others in their order.
    for (const int i : {2, 0, 1}) {
      start(OpKind::kReceive, previous, i == 2 ? 7 : 5, memory[static_cast<std::size_t>(3 + i)]);
    }
    for (const core::WorkPtr& work : works) {
      const Status status = session.Wait(*work->handle);
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(memory[static_cast<std::size_t>(3 + i)],
                std::vector<float>(3, static_cast<float>(10 * previous + i)));
    }
  });
}

TEST_P(ProcessSetsTest, NothingOfAGroupedCallStartsBeforeAllAreThere) {
  OnAllRanks([&](Session& session, int rank) {
    std::vector<float> a(2, 1.0F);
    std::vector<float> b(30000, 2.0F);
    auto work = std::make_shared<core::Work>();
    core::Signature whole;
    for (std::vector<float>* values : {&a, &b}) {
      auto part = std::make_shared<core::Work>();
      auto signature = std::make_shared<core::Signature>();
      signature->shape = {static_cast<std::int64_t>(values->size())};
      part->request.asked = signature;
      part->input = part->output = values->data();
      whole.parts.push_back(std::move(signature));
      work->parts.push_back(std::move(part));
    }
    if (rank == 0) whole.parts.pop_back();
    const auto run = [&] {
      work->request.key = core::Key::Named(core::kWorldSet, "group");
      work->request.asked = std::make_shared<const core::Signature>(whole);
      work->handle = nullptr;
      Status status = session.Submit(work, true);
      if (status.ok()) status = session.Wait(*work->handle);
      work->handle->Observe();
      return status;
    };
    const Status differs = run();
    EXPECT_EQ(differs.code(), StatusCode::kMismatch);
    EXPECT_THAT(differs.message(),
                HasSubstr("a group of 1 tensor on rank 0, a group of 2 tensors on rank"));
    if (rank == 0) whole.parts.push_back(work->parts[1]->request.signature());
    const Status same = run();
    ASSERT_TRUE(same.ok()) << same.ToString();
    EXPECT_EQ(a, std::vector<float>(2, static_cast<float>(size())));
    EXPECT_EQ(b, std::vector<float>(30000, 2.0F * static_cast<float>(size())));
  });
}

TEST(LoneProcessSetsTest, AWorldOfOneHasThemToo) {
  const auto world = std::make_shared<InprocWorld>(1);
  std::shared_ptr<Session> session;
  ASSERT_TRUE(Session::CreateInproc(world, 0, tests::SessionOptions(), &session).ok());
  SetNumber set = 0;
  ASSERT_TRUE(session->AddSet({0}, kNever, &set).ok());
  Vector vector(OpKind::kAllReduce, "w", {3}, -1, set);
  EXPECT_TRUE(vector.Run(*session).ok());
  EXPECT_TRUE(session->RemoveSet(set, kNever).ok());
  EXPECT_EQ(session->RemoveSet(set, kNever).code(), StatusCode::kInvalidArgument);
  core::HandlePtr joined;
  ASSERT_TRUE(session->Join(core::kWorldSet, kNever, &joined).ok());
  EXPECT_TRUE(joined->done());
  EXPECT_EQ(joined->value(), 0);

  // A message to oneself waits for its other half, and not for ever.
  auto receive = std::make_shared<core::Work>();
  float value = 0;
  auto signature = std::make_shared<core::Signature>();
  signature->kind = OpKind::kReceive;
  signature->shape = {1};
  receive->request.asked = std::move(signature);
  receive->request.key = core::Key::Named(core::kWorldSet, "receive");
  receive->peer = 0;
  receive->output = &value;
  receive->deadline = core::Clock::now() + milliseconds(20);
  ASSERT_TRUE(session->Submit(receive, true).ok());
  EXPECT_EQ(session->Wait(*receive->handle).code(), StatusCode::kTimedOut);
}

}  // namespace
}  // namespace sirtaki::session
