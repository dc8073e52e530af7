// What goes wrong on GPUs, and what the ranks are told. A failure of one rank ends the others when
// their engines abandon: the tests do that.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/device_ranks.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::ops {
namespace {

using core::OpKind;
using core::ReduceOp;
using core::Status;
using core::StatusCode;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tests::DeviceRank;
using tests::FakeGpus;
using tests::OnDevice;
using tests::RankThreads;

struct Outcome {
  Status handle;
  Status failure;
  std::string tensor;
};

RunCase Sum(std::int64_t count = 40) { return OnDevice({.signature = {.shape = {count}}}); }

// One tensor on each rank; who fails has the others abandon, as the engines do.
std::vector<Outcome> RunOne(FakeGpus& gpus, int size, const RunCase& c,
                            const std::function<void(int rank, LanesOptions&)>& change = nullptr,
                            const std::function<void(int rank, core::RunItem&)>& spoil = nullptr) {
  InprocWorld world(size);
  std::vector<Outcome> outcomes(static_cast<std::size_t>(size));
  std::atomic<bool> failed{false};
  RankThreads::Run(size, [&](int rank) {
    DeviceRank device(gpus, world, rank, [&](LanesOptions& options) {
      if (change) change(rank, options);
    });
    RunSide side;
    core::RunItem item = device.OnDevice(side.MakeItem(c, "w", rank, size));
    if (spoil) spoil(rank, item);
    device.Start({std::move(item)});
    Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    while (!device.lanes().Idle()) {
      device.lanes().Step();
      if (failed) device.lanes().Abandon({StatusCode::kPeerLost, "another rank has failed"});
      std::this_thread::yield();
    }
    if (!c.Joined(rank)) {
      while (!side.handle()->done()) std::this_thread::yield();
      outcome.handle = side.handle()->status();
    }
    // Told before the handle is.
    outcome.failure = device.failure();
    outcome.tensor = device.failed_tensor();
    if (!outcome.failure.ok()) failed = true;
  });
  return outcomes;
}

std::vector<std::string> Texts(const std::vector<Outcome>& outcomes) {
  std::vector<std::string> texts;
  texts.reserve(outcomes.size());
  for (const Outcome& outcome : outcomes) texts.push_back(outcome.handle.ToString());
  return texts;
}

// What all ranks are told of a set that cannot use its GPUs. The session goes on.
void ExpectRefused(const std::vector<Outcome>& outcomes, const std::string& why) {
  EXPECT_THAT(Texts(outcomes), Each(HasSubstr("all-reduce of \"w\" (GPU slot 0): " + why)));
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.handle.code(), StatusCode::kUnsupported);
    EXPECT_TRUE(outcome.failure.ok()) << outcome.failure.ToString();
  }
}

TEST(NcclLanesFailureTest, NoNcclAtOneRankIsToldToAll) {
  FakeGpus gpus;
  const std::vector<Outcome> outcomes = RunOne(gpus, 3, Sum(), [](int rank, LanesOptions& options) {
    if (rank != 1) return;
    options.load_nccl = [](nccl::Library*) {
      return Status(StatusCode::kUnsupported, "NCCL 2.13.4 in /opt/libnccl.so.2 does not do");
    };
  });
  ExpectRefused(outcomes, "rank 1 cannot use its GPU: NCCL 2.13.4 in /opt/libnccl.so.2");
  EXPECT_THAT(gpus.calls("ncclCommInitRankConfig"), IsEmpty());
}

TEST(NcclLanesFailureTest, DifferentVersionsAreNamed) {
  FakeGpus gpus;
  const std::vector<Outcome> outcomes = RunOne(gpus, 2, Sum(), [&](int rank, LanesOptions& o) {
    o.load_nccl = [&gpus, rank](nccl::Library* library) {
      library->api = gpus.nccl();
      library->version = rank == 0 ? 22809 : 22105;
      return Status::Ok();
    };
  });
  ExpectRefused(outcomes, "the ranks have different versions of NCCL: 2.21.5 at 1, 2.28.9 at 0");
  EXPECT_THAT(gpus.calls("ncclCommInitRankConfig"), IsEmpty());
}

TEST(NcclLanesFailureTest, ABuildWithoutKernelsSaysSo) {
  FakeGpus gpus;
  const std::vector<Outcome> outcomes = RunOne(gpus, 2, Sum(), [](int rank, LanesOptions& o) {
    if (rank != 0) return;
    o.kernels = nullptr;
    o.why_no_kernels = "this build has no kernels for GPUs (off: SIRTAKI_CUDA=OFF)";
  });
  ExpectRefused(outcomes, "rank 0 cannot use its GPU: this build has no kernels");
}

TEST(NcclLanesFailureTest, ADriverThatIsTooOldForTheKernelsIsToldToAll) {
  FakeGpus gpus;
  const std::vector<Outcome> outcomes = RunOne(gpus, 2, Sum(), [](int rank, LanesOptions& o) {
    o.kernels_toolkit = rank == 0 ? 13000 : 14010;
  });
  ExpectRefused(outcomes,
                "rank 1 cannot use its GPU: the driver here is for CUDA 13.0, and the kernels of "
                "this build, which nvcc 14.1 has compiled, need one for CUDA 14.0 or later: "
                "install a later driver, or build with an nvcc of CUDA 13 (CUDAToolkit_ROOT)");
}

TEST(NcclLanesFailureTest, ARankThatWaitsInACallOfNcclSaysSo) {
  FakeGpus gpus;
  gpus.AnswerInProgress(-1);
  InprocWorld world(2);
  std::barrier both(2);
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(Sum(), "w", rank, 2))});
    const auto what = [&] {
      device.lanes().Step();
      const auto running = device.lanes().Running();
      return running.empty() ? std::string() : running.back().what;
    };
    while (what().find("(GPU slot 0, in ncclCommInitRankConfig)") == std::string::npos) {
      std::this_thread::yield();
    }
    both.arrive_and_wait();
    device.lanes().Abandon({StatusCode::kAborted, "the test is over"});
  });
}

TEST(NcclLanesFailureTest, ASetThatCannotUseItsGpusHasTheHostAndOtherSets) {
  FakeGpus gpus;
  InprocWorld world(2);
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank, [rank](LanesOptions& options) {
      if (rank == 0) return;
      options.load_nccl = [](nccl::Library*) {
        return Status(StatusCode::kUnsupported, "no NCCL");
      };
    });
    for (const char* name : {"first", "second"}) {  // the second without another rendezvous
      RunSide side;
      device.Start({device.OnDevice(side.MakeItem(Sum(), name, rank, 2))});
      device.RunToIdle();
      ASSERT_TRUE(side.handle()->done());
      EXPECT_THAT(side.handle()->status().message(),
                  AllOf(HasSubstr(name), HasSubstr("rank 1 cannot use its GPU: no NCCL")));
    }
    const RunCase on_host = {.signature = {.shape = {40}}};
    RunSide side;
    device.Start({side.MakeItem(on_host, "host", rank, 2)});
    device.RunToIdle();
    EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
    side.Check(on_host, rank, 2);
  });
}

TEST(NcclLanesFailureTest, AnInitThatFailsAtOneRankEndsAll) {
  FakeGpus gpus;
  gpus.FailNext("ncclCommInitRankConfig", static_cast<int>(nccl::Result::kSystemError), 1);
  gpus.SetLastNcclError("no socket interface found");
  const std::vector<Outcome> outcomes = RunOne(gpus, 3, Sum());
  int causes = 0;
  for (const Outcome& outcome : outcomes) {
    EXPECT_FALSE(outcome.handle.ok());
    if (outcome.failure.ok()) continue;
    EXPECT_EQ(outcome.tensor, "w");
    if (outcome.failure.message().find("no socket interface found") != std::string::npos) ++causes;
  }
  EXPECT_EQ(causes, 1);
  EXPECT_EQ(gpus.live_communicators(), 0);
}

TEST(NcclLanesFailureTest, ResourcesThatAreNotSharedAreRefusedForDirectCalls) {
  FakeGpus gpus;
  for (const bool direct : {true, false}) {
    gpus.Forget();
    const std::vector<Outcome> outcomes = RunOne(gpus, 2, Sum(), [&](int, LanesOptions& options) {
      options.nccl_direct = direct;
      options.nccl_shares = false;
    });
    if (direct) {
      EXPECT_THAT(Texts(outcomes), Each(AllOf(HasSubstr("NCCL_COMM_SPLIT_SHARE_RESOURCES=0"),
                                              HasSubstr("SIRTAKI_NCCL_DIRECT=0"))));
      EXPECT_THAT(gpus.calls("ncclCommInitRankConfig"), IsEmpty());
    } else {
      EXPECT_TRUE(outcomes[0].handle.ok()) << outcomes[0].handle.ToString();
      EXPECT_THAT(gpus.calls("ncclCommSplit"), IsEmpty());
      EXPECT_EQ(gpus.calls("ncclCommFinalize").size(), 2u);
    }
  }
}

TEST(NcclLanesFailureTest, AnInitThatNobodyAnswersEndsAtItsLimit) {
  FakeGpus gpus;
  gpus.AnswerInProgress(-1);
  const std::vector<Outcome> outcomes = RunOne(gpus, 2, Sum(), [](int, LanesOptions& options) {
    options.nccl_limit = std::chrono::milliseconds(30);
  });
  EXPECT_THAT(Texts(outcomes), Each(AnyOf(HasSubstr("still in progress after 30 ms"),
                                          HasSubstr("another rank has failed"))));
  EXPECT_EQ(gpus.live_communicators(), 0);
}

TEST(NcclLanesFailureTest, AnErrorOnTheWayEndsWhatIsUnderWay) {
  FakeGpus gpus;
  gpus.Hold();  // the reduction never ends by itself
  InprocWorld world(2);
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(Sum(), "w", rank, 2))});
    while (!side.handle()->done()) device.lanes().Step();
    EXPECT_TRUE(side.handle()->status().ok());  // launched
    gpus.SetLastNcclError("NET/Socket : peer has closed");
    gpus.SetAsyncError(rank, nccl::Result::kRemoteError);
    while (device.failure().ok()) std::this_thread::yield();
    EXPECT_EQ(device.failure().code(), StatusCode::kBackend);
    EXPECT_THAT(device.failure().message(), HasSubstr("peer has closed"));
    EXPECT_EQ(device.failed_tensor(), "w");
    // What comes later fails at once, with the same cause.
    RunSide late;
    device.Start({device.OnDevice(late.MakeItem(Sum(), "late", rank, 2))});
    EXPECT_TRUE(late.handle()->done());
    EXPECT_THAT(late.handle()->status().message(), HasSubstr("peer has closed"));
  });
  EXPECT_EQ(gpus.calls("ncclCommAbort").size(), 4u);  // with the parents
  EXPECT_THAT(gpus.calls("ncclCommFinalize"), IsEmpty());
}

TEST(NcclLanesFailureTest, AnErrorOfTheDeviceIsTheGroupsFault) {
  FakeGpus gpus;
  gpus.FailNext("cudaEventQuery", 700, 3);
  gpus.Hold();
  const std::vector<Outcome> outcomes = RunOne(gpus, 2, Sum());
  int causes = 0;
  for (const Outcome& outcome : outcomes) {
    if (outcome.failure.message().find("cudaEventQuery: a fake error") != std::string::npos) {
      ++causes;
    }
  }
  EXPECT_EQ(causes, 1);
  EXPECT_EQ(gpus.calls("ncclCommAbort").size(), 4u);  // with the parents
}

TEST(NcclLanesFailureTest, NoMemoryAtAllSaysHowMuchWasWanted) {
  FakeGpus gpus;
  gpus.nccl().MemAlloc = nullptr;
  gpus.FailNext("cudaMalloc", static_cast<int>(cuda::Error::kMemoryAllocation));
  const RunCase c =
      OnDevice({.signature = {.reduction = ReduceOp::kMax, .shape = {40}}});  // is gathered
  const std::vector<Outcome> outcomes = RunOne(gpus, 2, c);
  EXPECT_THAT(Texts(outcomes),
              ::testing::Contains(HasSubstr("cudaMalloc: out of memory (cudaErrorFake, 2) "
                                            "(1048576 bytes of staging memory)")));
}

// What a communicator's abort finds, for the test below: a table has functions, no closures.
nccl::Result (*abort_in_fake)(nccl::CommHandle) = nullptr;
std::atomic<const core::HandleState*> handle_to_look_at{nullptr};
std::atomic<bool> has_ended_before{false};

TEST(NcclLanesFailureTest, TheFaultIsKnownBeforeTheAbortAndThatBeforeAHandleEnds) {
  FakeGpus gpus;
  has_ended_before = false;
  abort_in_fake = gpus.nccl().CommAbort;
  gpus.nccl().CommAbort = [](nccl::CommHandle comm) {
    if (handle_to_look_at.load()->done()) has_ended_before = true;
    return abort_in_fake(comm);
  };
  gpus.nccl().AllReduce = [](const void*, void*, std::size_t, nccl::DataType, nccl::RedOp,
                             nccl::CommHandle,
                             ops::cuda::StreamHandle) { return nccl::Result::kRemoteError; };
  InprocWorld world(1);
  DeviceRank device(gpus, world, 0, [&](LanesOptions& options) {
    options.host.on_failure = [&, tell = options.host.on_failure](const Status& why,
                                                                  const std::string& tensor) {
      EXPECT_THAT(gpus.calls("ncclCommAbort"), IsEmpty());
      EXPECT_FALSE(device.lanes().Idle());  // a session with idle lanes may end, and end well
      tell(why, tensor);
    };
  });
  RunSide side;
  core::RunItem item = device.OnDevice(side.MakeItem(Sum(), "w", 0, 1));
  handle_to_look_at = side.handle().get();
  device.Start({std::move(item)});
  while (!side.handle()->done()) device.lanes().Step();
  EXPECT_FALSE(side.handle()->status().ok());
  EXPECT_EQ(gpus.calls("ncclCommAbort").size(), 1u);
  EXPECT_FALSE(has_ended_before);
  EXPECT_FALSE(device.failure().ok());
}

TEST(NcclLanesFailureTest, ALaneWithNothingToDoKeepsNoTensors) {
  FakeGpus gpus;
  InprocWorld world(1);
  DeviceRank device(gpus, world, 0);
  RunSide side;
  core::RunItem item = device.OnDevice(side.MakeItem(Sum(), "w", 0, 1));
  const std::weak_ptr<core::Work> work = item.work;
  device.Start({std::move(item)});
  item = {};
  device.RunToIdle();
  const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
  while (!work.expired() && core::Clock::now() < limit) std::this_thread::yield();
  EXPECT_TRUE(work.expired());
}

TEST(NcclLanesFailureTest, TheContextIsThereBeforeTheKernels) {
  FakeGpus gpus;
  RunOne(gpus, 1, Sum());
  // With CUDA 11 choosing a device makes no context; a stream does.
  EXPECT_THAT(gpus.calls("cu"), ::testing::IsSupersetOf({"cudaStreamCreateWithPriority -5"}));
  for (const std::string& call : gpus.calls("cu")) {
    if (call.starts_with("cudaStreamCreate")) break;
    EXPECT_NE(call, "cuModuleLoadData");
  }
}

TEST(NcclLanesFailureTest, ACaptureInAnotherStreamDisturbsNobody) {
  FakeGpus gpus;
  gpus.SetCapturing(gpus.MakeStream());
  RunCase c = OnDevice({.signature = {.kind = OpKind::kAllGather, .shape = {4}}, .rows = {2, 3}});
  for (const Outcome& outcome : RunOne(gpus, 2, c)) {
    EXPECT_TRUE(outcome.handle.ok()) << outcome.handle.ToString();
    EXPECT_TRUE(outcome.failure.ok()) << outcome.failure.ToString();
  }
}

TEST(NcclLanesFailureTest, WhoHasJoinedBeforeItsFirstGpuHasNone) {
  FakeGpus gpus;
  RunCase c = Sum();
  c.joined = core::RankRanges::Span(1, 1);
  const std::vector<Outcome> outcomes = RunOne(gpus, 2, c);
  EXPECT_THAT(outcomes[0].handle.message(),
              HasSubstr("rank 1 cannot use its GPU: it joined before it had used a GPU"));
}

TEST(NcclLanesFailureTest, AnOutputThatCannotBeAllocatedIsAFailure) {
  FakeGpus gpus;
  RunCase c = OnDevice({.signature = {.kind = OpKind::kAllGather, .shape = {4}}, .rows = {2, 3}});
  const std::vector<Outcome> outcomes =
      RunOne(gpus, 2, c, nullptr, [](int rank, core::RunItem& item) {
        if (rank == 1) {
          item.work->allocate_output = [](const auto&) -> void* { throw std::bad_alloc(); };
        }
      });
  EXPECT_THAT(outcomes[1].handle.message(), HasSubstr("out of host memory"));
  EXPECT_EQ(outcomes[1].failure.origin().rank, 1);
}

TEST(NcclLanesFailureTest, AnOutputWhoseAllocationThrowsSomethingElseIsAFailureToo) {
  FakeGpus gpus;
  const RunCase c =
      OnDevice({.signature = {.kind = OpKind::kAllGather, .shape = {4}}, .rows = {2}});
  const std::vector<Outcome> outcomes = RunOne(gpus, 1, c, nullptr, [](int, core::RunItem& item) {
    item.work->allocate_output = [](const auto&) -> void* { throw 1; };
  });
  EXPECT_THAT(outcomes[0].handle.message(), HasSubstr("an exception of unknown type"));
}

TEST(NcclLanesFailureTest, AProcessThatExitsHasNotFailed) {
  for (const bool busy : {true, false}) {
    FakeGpus gpus;
    InprocWorld world(1);
    DeviceRank device(gpus, world, 0);
    RunSide side;
    if (busy) gpus.Hold();
    device.Start({device.OnDevice(side.MakeItem(Sum(), "w", 0, 1))});
    while (!side.handle()->done()) device.lanes().Step();
    if (!busy) device.RunToIdle();
    // CUDA's handlers of the exit come before ours.
    gpus.Unload();
    while (!device.lanes().Idle()) std::this_thread::yield();
    EXPECT_TRUE(device.failure().ok()) << device.failure().ToString();
    device.EndLanes();
    // Nobody knows what NCCL does then.
    EXPECT_THAT(gpus.calls("ncclCommAbort"), IsEmpty());
    EXPECT_THAT(gpus.calls("ncclCommFinalize"), IsEmpty());
  }
}

// Two ranks reduce together: they have a communicator, and both are idle, when this returns. `idle`
// counts them.
void MeetFirst(DeviceRank& device, int rank, std::atomic<int>& idle) {
  RunSide first;
  device.Start({device.OnDevice(first.MakeItem(Sum(), "first", rank, 2))});
  device.RunToIdle();
  ++idle;
  while (idle < 2) std::this_thread::yield();
}

TEST(NcclLanesFailureTest, AbandoningEndsAGroupThatNobodyElseJoins) {
  FakeGpus gpus;
  InprocWorld world(2);
  std::atomic<int> idle{0};
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    MeetFirst(device, rank, idle);
    if (rank == 1) return;
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(Sum(), "w", rank, 2))});
    while (!side.handle()->done()) std::this_thread::yield();
    EXPECT_FALSE(device.lanes().Idle());
    device.lanes().Abandon({StatusCode::kPeerLost, "rank 1 is lost"});
    EXPECT_TRUE(device.lanes().Idle());
    EXPECT_TRUE(device.failure().ok());  // it was not this one's
  });
  EXPECT_EQ(gpus.calls("ncclCommAbort rank 0").size(), 2u);  // with the parent
}

TEST(NcclLanesFailureTest, AbandoningEndsACallThatTheLaneIsStuckIn) {
  FakeGpus gpus;
  InprocWorld world(2);
  std::atomic<int> idle{0};
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    MeetFirst(device, rank, idle);
    if (rank == 1) {
      while (gpus.calls("ncclCommAbort rank 0").size() < 2) std::this_thread::yield();
      return;
    }
    gpus.AnswerInProgress(-1);
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(Sum(), "w", rank, 2))});
    const auto is_in = [&device] {
      const std::vector<core::RunningOperation> running = device.lanes().Running();
      return running.size() == 1 && running[0].what.find("in ncclAllReduce") != std::string::npos;
    };
    while (!is_in()) std::this_thread::yield();
    gpus.AnswerInProgress(0);  // for rank 1's good-bye
    EXPECT_FALSE(side.handle()->done());
    device.lanes().Abandon({StatusCode::kPeerLost, "rank 1 is lost"});
    EXPECT_EQ(side.handle()->status().code(), StatusCode::kPeerLost);
    while (gpus.calls("ncclCommAbort rank 0").size() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(gpus.live_communicators(), 0);
}

// Rank 0 comes to collectives of two sets that rank 1 never comes to: the kernel of the second set
// stands in front of that of the first one. `device`: of rank 0, which has met rank 1 before.
void GetStuckInTwoSets(DeviceRank& device, RunSide* sides) {
  for (const core::SetNumber set : {core::SetNumber{5}, core::kWorldSet}) {
    RunSide& side = *sides++;
    device.Start({device.OnDevice(side.MakeItem(Sum(), "stuck", 0, 2))}, set);
    while (!side.handle()->done()) std::this_thread::yield();
    EXPECT_TRUE(side.handle()->status().ok());  // launched
  }
}

void UseTwoSets(DeviceRank& device, int rank) {
  auto work = std::make_shared<core::Work>();
  work->handle = std::make_shared<core::HandleState>();
  device.lanes().AddSet(5, core::RankRanges::Span(0, 1), work, core::Clock::now());
  device.RunToIdle();
  for (const core::SetNumber set : {core::kWorldSet, core::SetNumber{5}}) {
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(Sum(), "first", rank, 2))}, set);
    device.RunToIdle();
    side.Check(Sum(), rank, 2);
  }
}

TEST(NcclLanesFailureTest, TheCommunicatorsOfAllSetsAreAbortedTogether) {
  FakeGpus gpus;
  InprocWorld world(2);
  std::barrier both(2);
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    UseTwoSets(device, rank);
    both.arrive_and_wait();
    if (rank == 1) return both.arrive_and_wait();
    RunSide sides[2];
    GetStuckInTwoSets(device, sides);
    gpus.SetAsyncError(0, nccl::Result::kRemoteError);
    while (device.failure().ok()) std::this_thread::yield();
    device.EndLanes();
    both.arrive_and_wait();
  });
  EXPECT_EQ(gpus.calls("ncclCommAbort rank 0").size(), 4u);  // with the parents
  EXPECT_EQ(gpus.aborting(), 0);
  EXPECT_THAT(gpus.devices_with_context(),
              ::testing::ElementsAre(1, 2));  // the abort's thread has chosen
}

// The fake refuses to free what is in use, and says so.
TEST(NcclLanesFailureTest, WhatAnAbortedCommunicatorCannotTouchAnyMoreIsLetGo) {
  FakeGpus gpus;
  InprocWorld world(2);
  std::barrier both(2);
  RankThreads::Run(2, [&](int rank) {
    DeviceRank device(gpus, world, rank);
    UseTwoSets(device, rank);
    both.arrive_and_wait();
    if (rank == 1) return both.arrive_and_wait();
    RunSide sides[2];
    GetStuckInTwoSets(device, sides);
    auto kept = std::make_unique<RunSide>();
    core::RunItem item = device.OnDevice(kept->MakeItem(Sum(), "kept", 0, 2));
    const std::weak_ptr<core::Work> watched = item.work;
    device.Start({std::move(item)});
    gpus.SetAsyncError(0, nccl::Result::kRemoteError);
    while (device.failure().ok()) std::this_thread::yield();
    device.EndLanes();
    kept.reset();
    EXPECT_TRUE(watched.expired());
    both.arrive_and_wait();
  });
  EXPECT_EQ(gpus.live_allocations(), 0);
}

TEST(NcclLanesFailureTest, AnAbortThatDoesNotReturnHoldsUpNobody) {
  static FakeGpus& gpus = *new FakeGpus;  // the abort uses it after the lanes
  static std::atomic<bool> open{false};
  InprocWorld world(1);
  RunSide late;
  {
    DeviceRank device(gpus, world, 0);
    RunSide first;  // has the lane take its memory
    device.Start({device.OnDevice(first.MakeItem(Sum(), "first", 0, 1))});
    device.RunToIdle();
    gpus.PutGate(device.producer(), open);  // the device stands still
    device.Start({device.OnDevice(late.MakeItem(Sum(), "late", 0, 1))});
    while (!late.handle()->done()) device.lanes().Step();
    gpus.SetAsyncError(0, nccl::Result::kRemoteError);
    while (device.failure().ok()) std::this_thread::yield();
    while (gpus.aborting() == 0) std::this_thread::yield();
  }
  EXPECT_EQ(gpus.aborting(), 1);  // is left behind
  open = true;
  while (gpus.aborting() > 0) std::this_thread::yield();
}

// What a rank that is stuck in NCCL does, for the test below: a table has functions, no closures.
std::atomic<bool> is_in_init{false};
std::atomic<bool> may_leave_init{false};
std::atomic<bool> has_left_nccl{false};

TEST(NcclLanesFailureTest, ALaneThatIsLeftBehindStillHasItsNccl) {
  is_in_init = may_leave_init = has_left_nccl = false;
  static FakeGpus& gpus = *new FakeGpus;  // the lane uses it after the test
  gpus.nccl().CommInitRankConfig = [](nccl::CommHandle*, int, nccl::UniqueId, int, nccl::Config*) {
    is_in_init = true;
    is_in_init.notify_all();
    may_leave_init.wait(false);
    return nccl::Result::kSystemError;
  };
  gpus.nccl().GetLastError = [](nccl::CommHandle) {
    has_left_nccl = true;
    has_left_nccl.notify_all();
    return "";
  };
  InprocWorld world(1);
  std::weak_ptr<int> loader;
  {
    auto token = std::make_shared<int>();
    loader = token;
    DeviceRank device(gpus, world, 0, [&](LanesOptions& options) {
      options.load_nccl = [token, load = options.load_nccl](nccl::Library* library) {
        return load(library);
      };
    });
    token.reset();
    RunSide side;
    device.Start({device.OnDevice(side.MakeItem(Sum(), "w", 0, 1))});
    while (!is_in_init) device.lanes().Step();
  }
  EXPECT_FALSE(loader.expired());
  may_leave_init = true;
  may_leave_init.notify_all();
  has_left_nccl.wait(false);
}

}  // namespace
}  // namespace sirtaki::ops
