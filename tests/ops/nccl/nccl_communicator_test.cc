// Communicators over a table that answers as NCCL does: in progress, late, never, with errors.
#include "ops/nccl/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/log.h"
#include "tests/support/fake_gpus_state.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tests::FakeGpus;
using tests::RankThreads;

constexpr auto kShort = std::chrono::milliseconds(20);

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  UniqueId Id() {
    UniqueId id;
    EXPECT_EQ(api_.GetUniqueId(&id), Result::kSuccess);
    return id;
  }
  std::unique_ptr<Communicator> Alone() {
    std::unique_ptr<Communicator> made;
    const Status status = Communicator::Init(all_, Id(), 1, 0, {}, &made);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return made;
  }
  // The communicator is connected, and direct.
  std::unique_ptr<Communicator> Direct(std::shared_ptr<ProcessCommunicators> all,
                                       const UniqueId& id, int rank, cuda::StreamHandle stream) {
    std::unique_ptr<Communicator> made;
    EXPECT_TRUE(Communicator::Init(std::move(all), id, 2, rank, {}, &made).ok());
    float value = 1;
    EXPECT_TRUE(Sum(*made, &value, stream, {}).ok());
    gpus_.AwaitStream(stream);
    const Status status = made->MakeDirect(Device(rank), {});
    EXPECT_TRUE(status.ok()) << status.ToString();
    return made;
  }
  // One reduction of one number, in place.
  Status Sum(Communicator& comm, float* value, cuda::StreamHandle stream,
             const Patience& patience) {
    return comm.Run(
        "ncclAllReduce",
        [&](CommHandle handle) {
          return api_.AllReduce(value, value, 1, DataType::kFloat32, RedOp::kSum, handle, stream);
        },
        patience);
  }

  // Those of a process.
  std::shared_ptr<ProcessCommunicators> Process() {
    return std::make_shared<ProcessCommunicators>(
        std::shared_ptr<const Api>(std::shared_ptr<const Api>(), &api_));
  }
  // Ranks that are threads, each with a device of its own.
  void RunRanks(int size, const std::function<void(int rank)>& body) {
    RankThreads::Run(size, [&](int rank) {
      gpus_.cuda().SetDevice(rank);
      body(rank);
    });
  }
  std::shared_ptr<cuda::Device> Device(int number = 1) {
    std::shared_ptr<cuda::Device> device;
    EXPECT_TRUE(cuda::Device::Open(gpus_.cuda(), number, &device).ok());
    return device;
  }

  FakeGpus gpus_;
  Api& api_ = gpus_.nccl();
  const std::shared_ptr<ProcessCommunicators> all_ = Process();
};

TEST_F(NcclCommunicatorTest, RanksMeetAndReduce) {
  const UniqueId id = Id();
  gpus_.AnswerInProgress(3);
  std::vector<float> values = {1, 2, 4};
  RunRanks(3, [&](int rank) {
    std::unique_ptr<Communicator> comm;
    ASSERT_TRUE(Communicator::Init(all_, id, 3, rank, {}, &comm).ok());
    EXPECT_EQ(comm->rank(), rank);
    EXPECT_EQ(comm->size(), 3);
    float& value = values[static_cast<std::size_t>(rank)];
    cuda::StreamHandle stream = gpus_.MakeStream(rank);
    ASSERT_TRUE(Sum(*comm, &value, stream, {}).ok());
    gpus_.AwaitStream(stream);  // where it is now
    EXPECT_EQ(value, 7);
    EXPECT_TRUE(comm->CheckAsync().ok());
    EXPECT_TRUE(comm->Finalize({}).ok());
  });
  EXPECT_EQ(gpus_.live_communicators(), 0);
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), IsEmpty());
  EXPECT_THAT(gpus_.calls("ncclCommInitRankConfig rank 0"),
              ElementsAre("ncclCommInitRankConfig rank 0 blocking 0"));
}

TEST_F(NcclCommunicatorTest, AnInitThatNobodyElseJoinsEndsAtTheDeadline) {
  std::unique_ptr<Communicator> made;
  const Status status =
      Communicator::Init(all_, Id(), 2, 0, {.limit = kShort}, &made, {.ranks = "ranks 3-4"});
  EXPECT_EQ(status.code(), StatusCode::kTimedOut);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("ncclCommInitRankConfig: still in progress after 20 ms, which is "
                              "nccl_limit: not all of ranks 3-4 have come to it"),
                    HasSubstr("\"in ncclCommInitRankConfig\""), HasSubstr("SIRTAKI_NCCL_LIMIT")));
  made.reset();  // is left to the others' abort
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), IsEmpty());
  all_->AbortAll(Device());
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), ElementsAre("ncclCommAbort rank 0"));
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(NcclCommunicatorTest, AnInitThatFailsAtOneRankEndsAtTheOthersWhenTheyAreStopped) {
  const UniqueId id = Id();
  gpus_.FailNext("ncclCommInitRankConfig", static_cast<int>(Result::kSystemError), 1);
  gpus_.SetLastNcclError("no route to host");
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0};
  std::atomic<int> stopped{0};
  RunRanks(3, [&](int rank) {
    std::unique_ptr<Communicator> made;
    const Status status = Communicator::Init(all_, id, 3, rank, {.stop = &stop}, &made);
    if (status.code() == StatusCode::kBackend) {
      ++failed;
      EXPECT_THAT(status.message(), HasSubstr("no route to host"));
      stop = true;  // as the group's fault does on the other ranks
    } else {
      EXPECT_EQ(status.code(), StatusCode::kAborted);
      ++stopped;
    }
  });
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(stopped, 2);
  all_->AbortAll(Device());
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(NcclCommunicatorTest, ACallInProgressIsPolledToItsEnd) {
  const std::unique_ptr<Communicator> comm = Alone();
  for (const int times : {0, 1, 2, 17}) {
    gpus_.AnswerInProgress(times);
    float value = 3;
    cuda::StreamHandle stream = gpus_.MakeStream();
    ASSERT_TRUE(Sum(*comm, &value, stream, {}).ok());
    char behind = 0;
    gpus_.PutWrite(stream, &behind, 1, 1);
    gpus_.RunDevices();
    EXPECT_EQ(behind, 1);
  }
}

TEST_F(NcclCommunicatorTest, ACallThatNeverEndsMeetsItsLimit) {
  const std::unique_ptr<Communicator> comm = Alone();
  gpus_.AnswerInProgress(-1);
  float value = 3;
  const Status status = Sum(*comm, &value, gpus_.MakeStream(), {.limit = kShort});
  EXPECT_EQ(status.code(), StatusCode::kTimedOut);
  EXPECT_THAT(status.message(), HasSubstr("ncclAllReduce"));
}

// What a communicator is asked for, and how its first look goes: a table has functions, no closures.
Config config_seen;
std::string name_seen;
std::atomic<bool> is_first_look{false};

Result SeeConfig(CommHandle* handle, int size, UniqueId id, int rank, Config* config) {
  config_seen = *config;
  if (config->comm_name != nullptr) name_seen = config->comm_name;
  Api plain;
  tests::FillFakeNccl(&plain);
  return plain.CommInitRankConfig(handle, size, id, rank, config);
}

TEST_F(NcclCommunicatorTest, IsMadeAsChosen) {
  api_.CommInitRankConfig = SeeConfig;
  std::unique_ptr<Communicator> made;
  ASSERT_TRUE(
      Communicator::Init(
          all_, Id(), 1, 0, {}, &made,
          {.name = "sirtaki, the world, GPU slot 0", .max_ctas = 4, .cta_policy = kCtaPolicyZero})
          .ok());
  EXPECT_EQ(config_seen.size, sizeof(Config));
  EXPECT_EQ(config_seen.version, 22809u);
  EXPECT_EQ(config_seen.blocking, 0);
  EXPECT_EQ(config_seen.max_ctas, 4);
  EXPECT_EQ(config_seen.cta_policy, kCtaPolicyZero);
  EXPECT_EQ(config_seen.min_ctas, kUndefined);
  EXPECT_EQ(name_seen, "sirtaki, the world, GPU slot 0");
}

TEST_F(NcclCommunicatorTest, APolicyThatTheLibraryDoesNotTakeIsLeftOutAndSaidOnce) {
  api_.CommInitRankConfig = SeeConfig;
  api_.GetVersion = [](int* version) {
    *version = 22703;
    return Result::kSuccess;
  };
  std::vector<std::string> warnings;
  core::SetLogSink([&](core::LogLevel, const std::string& line) { warnings.push_back(line); });
  std::unique_ptr<Communicator> made;
  const auto make = [&](int policy) {
    EXPECT_TRUE(Communicator::Init(all_, Id(), 1, 0, {}, &made, {.cta_policy = policy}).ok());
    return config_seen.cta_policy;
  };
  EXPECT_EQ(make(kUndefined), kUndefined);
  EXPECT_EQ(make(kCtaPolicyEfficiency), kCtaPolicyEfficiency);
  EXPECT_THAT(warnings, IsEmpty());
  EXPECT_EQ(make(kCtaPolicyZero), kUndefined);  // it would be refused
  EXPECT_EQ(make(kCtaPolicyZero), kUndefined);
  core::SetLogSink(nullptr);
  EXPECT_THAT(warnings,
              ElementsAre(AllOf(HasSubstr("nccl_cta_policy=zero"), HasSubstr("needs NCCL 2.28.0"),
                                HasSubstr("2.27.3 is loaded"))));
  EXPECT_EQ(FirstWithCtaPolicy(kUndefined), kOldestVersion);
  EXPECT_EQ(FirstWithCtaPolicy(kCtaPolicyEfficiency), 22700);
}

TEST_F(NcclCommunicatorTest, TheTimeOfAStoppedProcessDoesNotCount) {
  const std::unique_ptr<Communicator> comm = Alone();
  gpus_.AnswerInProgress(1);
  api_.CommGetAsyncError = [](CommHandle handle, Result* error) {
    if (is_first_look.exchange(false)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2200));  // as if it had been stopped
    }
    Api plain;
    tests::FillFakeNccl(&plain);
    return plain.CommGetAsyncError(handle, error);
  };
  is_first_look = true;
  float value = 3;
  const Status status =
      Sum(*comm, &value, gpus_.MakeStream(), {.limit = std::chrono::milliseconds(2000)});
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST_F(NcclCommunicatorTest, WhoeverLooksFindsTheCallThatIsWaitedFor) {
  const std::unique_ptr<Communicator> comm = Alone();
  std::atomic<bool> stop{false};
  std::atomic<const char*> in{nullptr};
  gpus_.AnswerInProgress(3);
  float passing = 3;
  EXPECT_TRUE(Sum(*comm, &passing, gpus_.MakeStream(), {.in = &in}).ok());
  EXPECT_EQ(in, nullptr);
  gpus_.AnswerInProgress(-1);
  RankThreads::Run(2, [&](int rank) {
    if (rank == 0) {
      float value = 3;
      EXPECT_FALSE(Sum(*comm, &value, gpus_.MakeStream(), {.stop = &stop, .in = &in}).ok());
      return;
    }
    while (in == nullptr) std::this_thread::yield();
    EXPECT_STREQ(in, "ncclAllReduce");
    stop = true;
  });
  EXPECT_STREQ(in, "ncclAllReduce");  // in which it was stopped
}

TEST_F(NcclCommunicatorTest, ErrorsSayWhatNcclSays) {
  const std::unique_ptr<Communicator> comm = Alone();
  gpus_.FailNext("ncclAllReduce", static_cast<int>(Result::kSystemError));
  gpus_.SetLastNcclError("socketProgress: Connection reset by peer");
  float value = 3;
  const Status status = Sum(*comm, &value, gpus_.MakeStream(), {});
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_EQ(status.message(),
            "ncclAllReduce: a fake NCCL error: socketProgress: Connection reset by peer");
}

TEST_F(NcclCommunicatorTest, AGroupIsClosedWhateverHappensInIt) {
  const std::unique_ptr<Communicator> comm = Alone();
  gpus_.Forget();
  gpus_.FailNext("ncclBroadcast", static_cast<int>(Result::kInvalidArgument), 1);
  std::vector<float> values(3, 1);
  cuda::StreamHandle stream = gpus_.MakeStream();
  const auto broadcasts = [&](CommHandle handle) {
    for (float& value : values) {
      const Result result =
          api_.Broadcast(&value, &value, 1, DataType::kFloat32, 0, handle, stream);
      if (result != Result::kSuccess) return result;
    }
    return Result::kSuccess;
  };
  EXPECT_FALSE(comm->RunGroup("ncclBroadcast", broadcasts, {}).ok());
  const std::string call = "ncclBroadcast rank 0 count 1 type 7 root 0";
  EXPECT_THAT(gpus_.calls("nccl"), ElementsAre("ncclGroupStart", call, call, "ncclGroupEnd"));
  // The thread can open another one.
  gpus_.Forget();
  gpus_.AnswerInProgress(2);
  EXPECT_TRUE(comm->RunGroup("ncclBroadcast", broadcasts, {}).ok());
  EXPECT_THAT(gpus_.calls("nccl"), ElementsAre("ncclGroupStart", call, call, call, "ncclGroupEnd"));
}

TEST_F(NcclCommunicatorTest, AnErrorOnTheWayIsFoundByAsking) {
  const std::unique_ptr<Communicator> comm = Alone();
  EXPECT_TRUE(comm->CheckAsync().ok());
  gpus_.SetAsyncError(0, Result::kRemoteError);
  gpus_.SetLastNcclError("peer closed the connection");
  const Status status = comm->CheckAsync();
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_THAT(status.message(), HasSubstr("remote process exited: peer closed the connection"));
}

TEST_F(NcclCommunicatorTest, AbortsOnceAndEndsWhatIsInTheStream) {
  const UniqueId id = Id();
  std::barrier both(2);
  RunRanks(2, [&](int rank) {
    std::unique_ptr<Communicator> comm;
    const std::shared_ptr<ProcessCommunicators> all = Process();
    ASSERT_TRUE(Communicator::Init(all, id, 2, rank, {}, &comm).ok());
    float value = 3;
    cuda::StreamHandle stream = gpus_.MakeStream(rank);
    ASSERT_TRUE(Sum(*comm, &value, stream, {}).ok());  // connects them
    both.arrive_and_wait();
    if (rank == 1) {  // never comes to the next one
      EXPECT_TRUE(all->AbortAll(Device()));
      return;
    }
    ASSERT_TRUE(Sum(*comm, &value, stream, {}).ok());
    char behind = 0;
    gpus_.PutWrite(stream, &behind, 1, 1);
    gpus_.RunDevices();
    EXPECT_EQ(behind, 0);
    all->AbortAll(Device());
    all->AbortAll(Device());
    gpus_.RunDevices();
    EXPECT_EQ(behind, 1);
    EXPECT_EQ(comm->CheckAsync().code(), StatusCode::kAborted);
    EXPECT_EQ(comm->Finalize({}).code(), StatusCode::kAborted);
  });
  EXPECT_THAT(gpus_.calls("ncclCommAbort rank 0"), ElementsAre("ncclCommAbort rank 0"));
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

// Two communicators of a rank whose peer never comes, in one stream: the kernel of the second one
// made stands in front.
struct StuckPair {
  std::unique_ptr<Communicator> first;
  std::unique_ptr<Communicator> second;
  float values[2] = {1, 2};
};

TEST_F(NcclCommunicatorTest, AllAreAbortedAtOnce) {
  const UniqueId ids[2] = {Id(), Id()};
  std::barrier both(2);
  RunRanks(2, [&](int rank) {
    const std::shared_ptr<ProcessCommunicators> all = Process();
    StuckPair pair;
    ASSERT_TRUE(Communicator::Init(all, ids[0], 2, rank, {}, &pair.first).ok());
    ASSERT_TRUE(Communicator::Init(all, ids[1], 2, rank, {}, &pair.second).ok());
    cuda::StreamHandle stream = gpus_.MakeStream(rank);
    ASSERT_TRUE(Sum(*pair.first, &pair.values[0], stream, {}).ok());
    ASSERT_TRUE(Sum(*pair.second, &pair.values[1], stream, {}).ok());
    both.arrive_and_wait();
    if (rank == 1) return;
    gpus_.Forget();
    ASSERT_TRUE(Sum(*pair.second, &pair.values[1], stream, {}).ok());
    ASSERT_TRUE(Sum(*pair.first, &pair.values[0], stream, {}).ok());
    all->AbortAll(Device());
    EXPECT_EQ(gpus_.aborting(), 0);
    const std::string call = "ncclCommAbort rank 0";
    EXPECT_THAT(gpus_.calls("ncclCommAbort"), ElementsAre(call, call));
  });
}

TEST_F(NcclCommunicatorTest, OneAfterTheOtherWouldDeadlock) {
  gpus_.LimitWaits(kShort);
  const auto abort_the_second = [this] {
    cuda::StreamHandle stream = gpus_.MakeStream(1);
    float value = 1;
    CommHandle last = nullptr;
    for (int i = 0; i < 2; ++i) {
      const UniqueId id = Id();
      Config config;
      Result result = Result::kSuccess;
      CommHandle peer = nullptr;  // never comes to the second reduction
      cuda::StreamHandle its_stream = gpus_.MakeStream(2);
      gpus_.cuda().SetDevice(2);
      api_.CommInitRankConfig(&peer, 2, id, 1, &config);
      gpus_.cuda().SetDevice(1);
      api_.CommInitRankConfig(&last, 2, id, 0, &config);
      for (CommHandle comm : {peer, last}) api_.CommGetAsyncError(comm, &result);
      api_.AllReduce(&value, &value, 1, DataType::kFloat32, RedOp::kSum, peer, its_stream);
      for (int call = 0; call < 2; ++call) {
        api_.AllReduce(&value, &value, 1, DataType::kFloat32, RedOp::kSum, last, stream);
      }
    }
    api_.CommAbort(last);
  };
  EXPECT_DEATH(abort_the_second(), "ncclCommAbort would deadlock");
}

TEST_F(NcclCommunicatorTest, WhatAThreadIsStuckInIsLeftForTheNextAbort) {
  const std::unique_ptr<Communicator> stuck = Alone();
  const std::unique_ptr<Communicator> other = Alone();
  std::atomic<bool> is_in{false};
  std::atomic<bool> may_leave{false};
  RunRanks(2, [&](int rank) {
    if (rank == 0) {
      EXPECT_TRUE(stuck
                      ->Run("ncclAllReduce",
                            [&](CommHandle) {
                              is_in = true;
                              is_in.notify_all();
                              may_leave.wait(false);
                              return Result::kSuccess;
                            },
                            {})
                      .ok());
      return;
    }
    is_in.wait(false);
    all_->AbortAll(Device());
    EXPECT_EQ(gpus_.calls("ncclCommAbort").size(), 1u);
    EXPECT_EQ(other->CheckAsync().code(), StatusCode::kAborted);
    may_leave = true;
    may_leave.notify_all();
  });
  EXPECT_TRUE(stuck->CheckAsync().ok());
  all_->AbortAll(Device());
  EXPECT_EQ(gpus_.calls("ncclCommAbort").size(), 2u);
  EXPECT_EQ(stuck->CheckAsync().code(), StatusCode::kAborted);
}

// Two ranks have direct communicators. Rank 0 is in a call that does not return; rank 1 does `then`
// with the process's communicators of rank 0.
class NcclDirectTest : public NcclCommunicatorTest {
 protected:
  using Call = std::function<Status(Communicator&, float*, cuda::StreamHandle, const Patience&)>;
  Status GetStuck(const Call& call, const std::function<void(ProcessCommunicators&)>& then) {
    const UniqueId id = Id();
    std::barrier both(2);
    std::atomic<const char*> in{nullptr};
    std::shared_ptr<ProcessCommunicators> of_first = Process();
    Status stuck;
    RunRanks(2, [&](int rank) {
      cuda::StreamHandle stream = gpus_.MakeStream(rank);
      const auto all = rank == 0 ? of_first : Process();
      const std::unique_ptr<Communicator> comm = Direct(all, id, rank, stream);
      both.arrive_and_wait();
      if (rank == 0) {
        gpus_.AnswerInProgress(-1);
        gpus_.Forget();
      }
      both.arrive_and_wait();
      float value = 2;
      if (rank == 0) {
        stuck = call(*comm, &value, stream, {.limit = kShort, .stop = &stop_, .in = &in});
      } else if (then != nullptr) {
        while (gpus_.calls("ncclAllReduce").empty()) std::this_thread::yield();
        EXPECT_STREQ(in, "ncclAllReduce");
        then(*of_first);
      }
      both.arrive_and_wait();
      all->AbortAll(Device(rank));
      EXPECT_EQ(comm->CheckAsync().code(), StatusCode::kAborted);
    });
    EXPECT_EQ(gpus_.live_communicators(), 0);
    return stuck;
  }

  std::atomic<bool> stop_{false};
};

TEST_F(NcclDirectTest, ItsCallsAreOverWhenTheyReturn) {
  const UniqueId id = Id();
  std::vector<float> values = {1, 2};
  std::barrier both(2);
  RunRanks(2, [&](int rank) {
    cuda::StreamHandle stream = gpus_.MakeStream(rank);
    const std::unique_ptr<Communicator> comm = Direct(all_, id, rank, stream);
    both.arrive_and_wait();
    gpus_.AnswerInProgress(3);
    float& value = values[static_cast<std::size_t>(rank)];
    Result result = Result::kInProgress;
    ASSERT_TRUE(comm->Run("ncclAllReduce",
                          [&](CommHandle handle) {
                            return result = api_.AllReduce(&value, &value, 1, DataType::kFloat32,
                                                           RedOp::kSum, handle, stream);
                          },
                          {})
                    .ok());
    EXPECT_EQ(result, Result::kSuccess);
    gpus_.AwaitStream(stream);
    EXPECT_EQ(value, 3);
    both.arrive_and_wait();
    EXPECT_TRUE(comm->Finalize({}).ok());
  });
  EXPECT_EQ(gpus_.live_communicators(), 0);
  EXPECT_THAT(gpus_.calls("ncclCommSplit rank 0"), ElementsAre("ncclCommSplit rank 0 blocking 1"));
  EXPECT_EQ(gpus_.calls("ncclCommDestroy").size(), 4u);
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), IsEmpty());
}

TEST_F(NcclDirectTest, ACallThatIsStuckIsEndedByTheAbort) {
  const Call sum = [this](auto& comm, auto* value, auto stream, const Patience& patience) {
    return Sum(comm, value, stream, patience);
  };
  const Status status =
      GetStuck(sum, [this](ProcessCommunicators& all) { all.AbortAll(Device()); });
  EXPECT_EQ(status.code(), StatusCode::kBackend) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("ncclAllReduce"));
}

// The call may be stuck behind the kernel of another one.
TEST_F(NcclDirectTest, WhereOneIsInACallAllAreAborted) {
  const Call sum = [this](auto& comm, auto* value, auto stream, const Patience& patience) {
    return Sum(comm, value, stream, patience);
  };
  std::unique_ptr<Communicator> idle;
  const Status status = GetStuck(sum, [&](ProcessCommunicators& all) {
    gpus_.AnswerInProgress(0);
    ASSERT_TRUE(Communicator::Init(all.shared_from_this(), Id(), 1, 0, {}, &idle).ok());
    all.StartAbortIfInCall(Device());
    while (idle->CheckAsync().ok()) std::this_thread::yield();
  });
  EXPECT_FALSE(status.ok());
}

TEST_F(NcclDirectTest, WhereNoneIsInACallNoneIsAborted) {
  const UniqueId id = Id();
  RunRanks(2, [&](int rank) {
    const auto all = Process();
    const auto comm = Direct(all, id, rank, gpus_.MakeStream(rank));
    all->StartAbortIfInCall(Device(rank));
    EXPECT_TRUE(comm->CheckAsync().ok());
    EXPECT_TRUE(comm->Finalize({}).ok());
  });
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), IsEmpty());
}

TEST_F(NcclDirectTest, AStoppedCallerCallsNoMore) {
  const Call sum = [this](auto& comm, auto* value, auto stream, const Patience& patience) {
    stop_ = true;
    gpus_.Forget();
    Status status = Sum(comm, value, stream, patience);
    EXPECT_THAT(gpus_.calls("ncclAllReduce"), IsEmpty());
    return status;
  };
  EXPECT_EQ(GetStuck(sum, nullptr).code(), StatusCode::kAborted);
}

TEST_F(NcclDirectTest, ACallInWhichHostsWaitMeetsItsLimit) {
  const Call good_bye = [](auto& comm, auto*, auto, const Patience& patience) {
    return comm.Finalize(patience);
  };
  const Status status = GetStuck(good_bye, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("ncclCommFinalize: still in progress after 20 ms"));
}

TEST_F(NcclDirectTest, ASplitThatNobodyElseComesToEndsAtTheLimit) {
  const UniqueId id = Id();
  RunRanks(2, [&](int rank) {
    std::unique_ptr<Communicator> comm;
    const std::shared_ptr<ProcessCommunicators> all = Process();
    ASSERT_TRUE(Communicator::Init(all, id, 2, rank, {}, &comm, {.ranks = "ranks 0-1"}).ok());
    if (rank == 0) {
      const Status status = comm->MakeDirect(Device(0), {.limit = kShort});
      EXPECT_EQ(status.code(), StatusCode::kTimedOut);
      EXPECT_THAT(status.message(), HasSubstr("ncclCommSplit"));
    }
    all->AbortAll(Device(rank));
  });
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(NcclCommunicatorTest, AGoodByeThatFailsLeavesItToAnAbort) {
  const std::unique_ptr<Communicator> comm = Alone();
  gpus_.FailNext("ncclCommFinalize", static_cast<int>(Result::kRemoteError));
  EXPECT_FALSE(comm->Finalize({}).ok());
  all_->AbortAll(Device());
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), ElementsAre("ncclCommAbort rank 0"));
  EXPECT_THAT(gpus_.calls("ncclCommDestroy"), IsEmpty());
}

}  // namespace
}  // namespace sirtaki::ops::nccl
