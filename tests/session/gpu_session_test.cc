// Sessions whose tensors are on GPUs, which are fakes that keep streams and events as real ones do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "ops/cuda/device_work.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/support/device_ranks.h"
#include "tests/support/fake_gpus_state.h"
#include "tests/support/fake_libraries.h"
#include "tests/support/rank_threads.h"
#include "tests/support/run_cases.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::DType;
using core::OpKind;
using core::Status;
using core::StatusCode;
using ops::Cases;
using ops::RunCase;
using ops::RunSide;
using ops::cuda::DeviceWork;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tests::FakeGpus;
using tests::FakeLibraries;
using tests::OnDevice;
using tests::RankThreads;

constexpr int kHost = -1;  // in the place of a GPU's index

// One tensor of one rank under a collective.
struct Call {
  RunSide side;
  core::WorkPtr work;
  DeviceWork* on_gpu = nullptr;
};

// A send or a receive of one rank.
struct Message {
  std::vector<float> values;
  core::WorkPtr work;
  DeviceWork* on_gpu = nullptr;
};

// A rank of a world of threads, with streams of its own.
class Rank {
 public:
  Rank(FakeGpus& gpus, FakeLibraries& libraries, std::shared_ptr<InprocWorld> world, int rank,
       const std::function<void(GpuLibraries&)>& change = nullptr,
       const std::function<void(core::Config&)>& configure = nullptr)
      : gpus_(gpus), rank_(rank), size_(world->size()) {
    StartOptions options = tests::SessionOptions(configure);
    options.config.wait = core::WaitMode::kYield;
    const std::shared_ptr<GpuLibraries> opened = libraries.Make();
    if (change) change(*opened);
    options.gpus = opened;
    const Status started = Session::CreateInproc(std::move(world), rank, options, &session_);
    EXPECT_TRUE(started.ok()) << started.ToString();
  }

  Session& session() { return *session_; }
  // The streams of a GPU, at first of the rank's own.
  ops::cuda::StreamHandle producer() { return StreamOf(producers_, rank_ + 1); }

  // `gpu`: where the tensor is; kHost: on the host. What is refused before the session sees it goes
  // into the request, as the front end does it.
  std::shared_ptr<Call> Make(RunCase c, const std::string& name, int gpu) {
    auto call = std::make_shared<Call>();
    std::shared_ptr<Gpu> found;
    if (gpu != kHost) {
      const Status status = session_->FindGpu(gpu, &found);
      EXPECT_TRUE(status.ok()) << status.ToString();
      c.signature.device = core::DeviceKind::kCuda;
      c.signature.slot = found->slot();
    }
    const core::RunItem item = call->side.MakeItem(c, name, rank_, size_);
    call->work = item.work;
    if (gpu != kHost) {
      auto work = std::make_shared<DeviceWork>();
      static_cast<core::Work&>(*work) = *item.work;
      work->device = found->device();
      const Status ready = NoteReady(found->events(), StreamOf(producers_, gpu), work.get());
      if (!ready.ok()) work->request.invalid = ready.message();
      call->on_gpu = work.get();
      call->work = std::move(work);
    }
    call->work->request.key = item.key;
    call->work->request.asked = item.signature;
    call->work->handle.reset();
    return call;
  }

  std::shared_ptr<Call> Submit(const RunCase& c, const std::string& name, int gpu) {
    const std::shared_ptr<Call> call = Make(c, name, gpu);
    const Status accepted = session_->Submit(call->work, /*will_wait=*/false);
    EXPECT_TRUE(accepted.ok()) << accepted.ToString();
    return call;
  }

  // `gpu`: as in Make. A receive has place for as many values. `time_out`: zero for none.
  std::shared_ptr<Message> Start(OpKind kind, int peer, std::vector<float> values, int gpu,
                                 core::Duration time_out = {}) {
    auto message = std::make_shared<Message>();
    message->values = std::move(values);
    core::Signature signature{.kind = kind,
                              .shape = {static_cast<std::int64_t>(message->values.size())}};
    if (gpu == kHost) {
      message->work = std::make_shared<core::Work>();
    } else {
      std::shared_ptr<Gpu> found;
      EXPECT_TRUE(session_->FindGpu(gpu, &found).ok());
      signature.device = core::DeviceKind::kCuda;
      signature.slot = found->slot();
      auto work = std::make_shared<DeviceWork>();
      work->device = found->device();
      EXPECT_TRUE(NoteReady(found->events(), StreamOf(producers_, gpu), work.get()).ok());
      message->on_gpu = work.get();
      message->work = std::move(work);
    }
    core::Work& work = *message->work;
    work.request.key =
        core::Key::Named(core::kWorldSet, "#" + std::to_string(++messages_) + ": a message");
    work.request.asked = std::make_shared<const core::Signature>(std::move(signature));
    work.peer = peer;
    if (time_out > core::Duration::zero()) work.deadline = core::Clock::now() + time_out;
    work.input = work.output = message->values.data();
    EXPECT_TRUE(session_->Submit(message->work, /*will_wait=*/false).ok());
    return message;
  }

  // Finish is a user's synchronize, and then waits until the consumer's stream has come to the
  // result.
  Status Finish(Message& message) { return Finish(message.work, message.on_gpu); }
  Status Finish(Call& call) {
    const Status status = Finish(call.work, call.on_gpu);
    if (status.ok()) call.side.handle()->Complete(status);
    return status;
  }
  Status Finish(const core::WorkPtr& work, const DeviceWork* on_gpu) {
    Status status = session_->Wait(*work->handle);
    work->handle->Observe();
    if (status.ok() && on_gpu != nullptr) Arrive(*on_gpu);
    return status;
  }

  void FinishAndCheck(Call& call, const RunCase& c) {
    const Status status = Finish(call);
    ASSERT_TRUE(status.ok()) << status.ToString();
    call.side.Check(c, rank_, size_);
  }

  void Arrive(const DeviceWork& work) {
    ops::cuda::StreamHandle consumer = StreamOf(consumers_, work.device->index());
    ASSERT_TRUE(AwaitDone(work, consumer).ok());
    std::shared_ptr<Gpu> gpu;
    ASSERT_TRUE(session_->FindGpu(work.device->index(), &gpu).ok());
    ops::cuda::EventPtr event;
    ASSERT_TRUE(gpu->Mark(consumer, &event).ok());
    for (bool reached = false; !reached; std::this_thread::yield()) {
      ASSERT_TRUE(event->Poll(&reached).ok());
    }
  }

 private:
  using Streams = std::map<int, ops::cuda::StreamHandle>;  // by GPU
  ops::cuda::StreamHandle StreamOf(Streams& streams, int gpu) {
    ops::cuda::StreamHandle& stream = streams[gpu];
    if (stream == nullptr) stream = gpus_.MakeStream(gpu);
    return stream;
  }

  FakeGpus& gpus_;
  const int rank_;
  const int size_;
  int messages_ = 0;
  std::shared_ptr<Session> session_;
  Streams producers_;
  Streams consumers_;
};

class GpuSessionTest : public ::testing::Test {
 protected:
  // `body` on each rank, whose GPU is the one behind its number.
  void RunRanks(int size, const std::function<void(Rank& rank, int number)>& body,
                const std::function<void(GpuLibraries&)>& change = nullptr) {
    const auto world = std::make_shared<InprocWorld>(size);
    RankThreads::Run(size, [&](int number) {
      Rank rank(gpus_, libraries_, world, number, change, configure_);
      body(rank, number);
      static_cast<void>(rank.session().Shutdown("the test is over"));
    });
  }

  std::function<void(core::Config&)> configure_;
  FakeGpus gpus_;
  FakeLibraries libraries_{gpus_};
};

Cases EveryKind(int size) {
  Cases cases;
  for (const DType dtype : {DType::kF32, DType::kI64, DType::kBF16}) {
    for (const core::ReduceOp op : {core::ReduceOp::kSum, core::ReduceOp::kMax}) {
      const Cases more = ops::ReducingCases(op, dtype, size);
      cases.insert(cases.end(), more.begin(), more.end());
    }
  }
  for (const bool in_place : {false, true}) {
    cases.push_back({.signature = {.kind = OpKind::kBroadcast, .root = size - 1, .shape = {50}},
                     .in_place = in_place});
  }
  cases.push_back({.signature = {.kind = OpKind::kAllGatherInto, .shape = {20}}});
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kAllToAll}) {
    const Cases more = ops::CasesWithRows(kind, DType::kF32, -1, size);
    cases.insert(cases.end(), more.begin(), more.end());
  }
  for (const OpKind kind : {OpKind::kGather, OpKind::kScatter}) {
    const Cases more = ops::CasesWithRows(kind, DType::kU8, 0, size);
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

RunCase Sum(std::int64_t count = 40) { return {.signature = {.shape = {count}}}; }

TEST_F(GpuSessionTest, EveryCollectiveOnGpusAndOnTheHostInOneStep) {
  for (const int size : {2, 3}) {
    const Cases cases = EveryKind(size);
    RunRanks(size, [&](Rank& rank, int number) {
      std::vector<std::shared_ptr<Call>> calls;
      for (std::size_t i = 0; i < cases.size(); ++i) {
        calls.push_back(
            rank.Submit(cases[i], "t" + std::to_string(i), i % 5 == 4 ? kHost : number + 1));
      }
      for (std::size_t i = 0; i < cases.size(); ++i) rank.FinishAndCheck(*calls[i], cases[i]);
      EXPECT_TRUE(rank.session().Shutdown("done").ok());
    });
  }
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), IsEmpty());
  EXPECT_EQ(gpus_.live_communicators(), 0);
  EXPECT_THAT(gpus_.devices_with_context(), ElementsAre(1, 2, 3));
}

TEST_F(GpuSessionTest, AGroupedCallMayBeOnSeveralDevices) {
  RunRanks(2, [&](Rank& rank, int number) {
    // Each rank has its own two GPUs, which it uses first in the same places.
    const std::vector<int> places = {2 * number, kHost, 2 * number + 1, 2 * number};
    auto whole = std::make_shared<core::Signature>();
    auto work = std::make_shared<core::Work>();
    std::vector<std::shared_ptr<Call>> parts;
    for (std::size_t i = 0; i < places.size(); ++i) {
      parts.push_back(rank.Make(Sum(10 + static_cast<std::int64_t>(i)), "", places[i]));
      whole->parts.push_back(parts.back()->work->request.signature());
      work->parts.push_back(parts.back()->work);
    }
    work->request.key = core::Key::Named(core::kWorldSet, "group");
    work->request.asked = whole;
    ASSERT_TRUE(rank.session().Submit(work, /*will_wait=*/true).ok());
    const Status status = rank.session().Wait(*work->handle);
    ASSERT_TRUE(status.ok()) << status.ToString();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i]->on_gpu != nullptr) rank.Arrive(*parts[i]->on_gpu);
      parts[i]->side.handle()->Complete(Status::Ok());
      parts[i]->side.Check(Sum(10 + static_cast<std::int64_t>(i)), number, 2);
    }
  });
  EXPECT_EQ(gpus_.calls("ncclGetUniqueId").size(), 2u);  // a communicator for each slot
  EXPECT_THAT(gpus_.devices_with_context(), ElementsAre(0, 1, 2, 3));
}

TEST_F(GpuSessionTest, SeveralGpusOfAProcessWorkSideBySide) {
  constexpr int kGpus = 3;
  const Cases cases = EveryKind(2);
  RunRanks(2, [&](Rank& rank, int number) {
    const auto gpu = [&](std::size_t i) { return kGpus * number + static_cast<int>(i) % kGpus; };
    for (std::size_t i = 0; i < kGpus; ++i) {  // which gives them their slots
      rank.FinishAndCheck(*rank.Submit(Sum(), "first " + std::to_string(i), gpu(i)), Sum());
    }
    for (int round = 0; round < 3; ++round) {
      std::vector<std::shared_ptr<Call>> calls(cases.size());
      for (std::size_t k = 0; k < cases.size(); ++k) {
        // The ranks submit, and wait, in different orders.
        const std::size_t i = number == 0 ? k : cases.size() - 1 - k;
        calls[i] = rank.Submit(cases[i], std::to_string(round) + " " + std::to_string(i), gpu(i));
      }
      for (std::size_t i = 0; i < cases.size(); ++i) rank.FinishAndCheck(*calls[i], cases[i]);
    }
    EXPECT_TRUE(rank.session().Shutdown("done").ok());
  });
  EXPECT_EQ(gpus_.calls("ncclGetUniqueId").size(), std::size_t{kGpus});
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), IsEmpty());
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(GpuSessionTest, AFailureOnOneGpuOfAProcessEndsAllOfThem) {
  std::barrier both(2);
  RunRanks(2, [&](Rank& rank, int number) {
    // What a lane takes for its first collective would let the devices go on.
    for (const int slot : {0, 1}) {
      const std::string name = "first " + std::to_string(slot);
      rank.FinishAndCheck(*rank.Submit(Sum(), name, 2 * number + slot), Sum());
    }
    core::SetNumber set = 0;
    ASSERT_TRUE(
        rank.session().AddSet(core::RankRanges::Span(0, 1), core::TimePoint::max(), &set).ok());
    both.arrive_and_wait();
    if (number == 0) gpus_.Hold();
    both.arrive_and_wait();
    const auto one = rank.Submit(Sum(5000), "one", 2 * number);
    EXPECT_TRUE(rank.session().Wait(*one->work->handle).ok());  // launched, and never over
    gpus_.SetLastNcclError("the cable is out");
    gpus_.FailNext("ncclCommInitRankConfig", static_cast<int>(ops::nccl::Result::kSystemError));
    const auto other = rank.Make(Sum(5000), "other", 2 * number + 1);
    other->work->request.key = core::Key::Named(set, "other");
    ASSERT_TRUE(rank.session().Submit(other->work, /*will_wait=*/false).ok());
    EXPECT_FALSE(rank.session().Wait(*other->work->handle).ok());
    EXPECT_FALSE(rank.session().Check().ok());
  });
  EXPECT_GE(gpus_.calls("ncclCommAbort").size(), 2u);
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(GpuSessionTest, TheHostOfOneRankAndTheGpuOfAnotherAreAMismatch) {
  RunRanks(2, [&](Rank& rank, int number) {
    const auto wrong = rank.Submit(Sum(), "w", number == 0 ? 1 : kHost);
    const Status status = rank.Finish(*wrong);
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("\"w\""), HasSubstr("on a GPU on rank 0"),
                                        HasSubstr("on the host on rank 1")));
    const auto right = rank.Submit(Sum(), "w", number + 1);
    rank.FinishAndCheck(*right, Sum());
  });
}

TEST_F(GpuSessionTest, WhatIsCapturedInAGraphIsRefusedOnAllRanks) {
  RunRanks(2, [&](Rank& rank, int number) {
    if (number == 1) gpus_.SetCapturing(rank.producer());
    const auto call = rank.Submit(Sum(), "w", number + 1);
    const Status status = rank.Finish(*call);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("CUDA graph"));
    EXPECT_TRUE(rank.session().Check().ok());
  });
}

TEST_F(GpuSessionTest, NcclsFailureOnOneRankIsEverybodysFault) {
  gpus_.SetLastNcclError("the cable is out");
  gpus_.FailNext("ncclAllReduce", static_cast<int>(ops::nccl::Result::kSystemError));
  RunRanks(2, [&](Rank& rank, int number) {
    const auto call = rank.Submit(Sum(5000), "w", number + 1);
    // Whose launch went well learns of it by the next call at the latest.
    Status status = rank.session().Wait(*call->work->handle);
    while (status.ok()) {
      status = rank.session().Check();
      std::this_thread::yield();
    }
    EXPECT_EQ(status.code(), StatusCode::kBackend) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("the cable is out"));
    EXPECT_EQ(status.origin().tensor, "w");
  });
}

// What communicators are asked for: a table has functions, no closures.
core::Mutex asked_mutex;
std::vector<std::pair<ops::nccl::Config, std::string>> asked_of_nccl
    SIRTAKI_GUARDED_BY(asked_mutex);

TEST_F(GpuSessionTest, TheOptionsOfNcclReachIt) {
  configure_ = [](core::Config& config) {
    config.nccl_max_ctas = 3;
    config.nccl_cta_policy = core::NcclCtaPolicy::kEfficiency;
  };
  gpus_.nccl().CommInitRankConfig = [](ops::nccl::CommHandle* handle, int size,
                                       ops::nccl::UniqueId id, int rank,
                                       ops::nccl::Config* config) {
    {
      core::MutexLock lock(asked_mutex);
      asked_of_nccl.emplace_back(*config, config->comm_name);
    }
    ops::nccl::Api plain;
    tests::FillFakeNccl(&plain);
    return plain.CommInitRankConfig(handle, size, id, rank, config);
  };
  RunRanks(2, [&](Rank& rank, int number) {
    rank.FinishAndCheck(*rank.Submit(Sum(), "w", number + 1), Sum());
  });
  core::MutexLock lock(asked_mutex);
  ASSERT_EQ(asked_of_nccl.size(), 2u);
  for (const auto& [config, name] : asked_of_nccl) {
    EXPECT_EQ(config.max_ctas, 3);
    EXPECT_EQ(config.cta_policy, ops::nccl::kCtaPolicyEfficiency);
    EXPECT_EQ(name, "sirtaki, the world, GPU slot 0");
  }
}

TEST_F(GpuSessionTest, ACallOfNcclThatTakesLongerThanItsLimitNamesTheRanks) {
  configure_ = [](core::Config& config) { config.nccl_limit = std::chrono::milliseconds(50); };
  gpus_.AnswerInProgress(-1);
  RunRanks(2, [&](Rank& rank, int number) {
    const auto call = rank.Submit(Sum(), "w", number + 1);
    const Status status = rank.Finish(*call);
    EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
    EXPECT_THAT(status.message(),
                HasSubstr("all-reduce of \"w\" (GPU slot 0): ncclCommInitRankConfig: still in "
                          "progress after 50 ms, which is nccl_limit: not all of ranks 0-1 have "
                          "come to it"));
  });
}

TEST_F(GpuSessionTest, WithoutKernelsOrCudaThereAreNoGpus) {
  const auto find = [&](const std::function<void(GpuLibraries&)>& change) {
    std::string why;
    RunRanks(
        2,
        [&](Rank& rank, int number) {
          std::shared_ptr<Gpu> gpu;
          const Status status = rank.session().FindGpu(1, &gpu);
          EXPECT_EQ(status.code(), StatusCode::kUnsupported);
          if (number == 0) why = status.message();
        },
        change);
    return why;
  };
  EXPECT_EQ(find([](GpuLibraries& libraries) {
              libraries.kernels = nullptr;
              libraries.why_no_kernels = "built without nvcc";
            }),
            "built without nvcc");
  EXPECT_EQ(find([](GpuLibraries& libraries) {
              libraries.open_device = [](int, std::shared_ptr<ops::cuda::Device>*) {
                return Status(StatusCode::kUnsupported, "there is no GPU");
              };
            }),
            "there is no GPU");
  EXPECT_THAT(gpus_.devices_with_context(), IsEmpty());
}

TEST_F(GpuSessionTest, SlotsFollowTheFirstUse) {
  RunRanks(2, [&](Rank& rank, int number) {
    std::shared_ptr<Gpu> gpu;
    for (const int index : number == 0 ? std::vector<int>{3, 1, 3} : std::vector<int>{0, 2, 0}) {
      ASSERT_TRUE(rank.session().FindGpu(index, &gpu).ok());
      EXPECT_EQ(gpu->device()->index(), index);
      EXPECT_EQ(gpu->slot(), index == 1 || index == 2 ? 1u : 0u);
    }
    EXPECT_EQ(rank.session().FindGpu(1000, &gpu).code(), StatusCode::kBackend);
    ASSERT_TRUE(rank.session().FindGpu(5, &gpu).ok());
    EXPECT_EQ(gpu->slot(), 2u);  // what could not be used has none
  });
}

TEST_F(GpuSessionTest, MessagesGoAroundARingOfGpusAndHosts) {
  for (const int size : {2, 3, 4}) {
    RunRanks(size, [&](Rank& rank, int number) {
      const int gpu = number % 3 == 2 ? kHost : number + 1;
      for (int i = 0; i < 5; ++i) {
        const auto receive =
            rank.Start(OpKind::kReceive, (number + size - 1) % size, {-1, -1, -1}, gpu);
        const auto value = static_cast<float>(10 * i + number);
        const auto send = rank.Start(OpKind::kSend, (number + 1) % size, {value, 1, 2}, gpu);
        ASSERT_TRUE(rank.Finish(*receive).ok());
        ASSERT_TRUE(rank.Finish(*send).ok());
        EXPECT_THAT(receive->values,
                    ElementsAre(static_cast<float>(10 * i + (number + size - 1) % size), 1, 2));
      }
      EXPECT_TRUE(rank.session().Shutdown("done").ok());
    });
  }
  EXPECT_THAT(gpus_.calls("nccl"), IsEmpty());
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

// The other ranks say good-bye to NCCL, and wait for this one's.
TEST_F(GpuSessionTest, AMessageThatNobodySendsAbortsNothingAtTheEnd) {
  RunRanks(2, [&](Rank& rank, int number) {
    const RunCase sum = Sum();
    rank.FinishAndCheck(*rank.Submit(sum, "w", number + 1), sum);
    std::shared_ptr<Message> receive;
    if (number == 0) receive = rank.Start(OpKind::kReceive, 1, {0, 0}, kHost);
    EXPECT_TRUE(rank.session().Shutdown("done").ok());
    if (receive) {
      EXPECT_EQ(receive->work->handle->status().code(), StatusCode::kShutDown);
    }
  });
  EXPECT_THAT(gpus_.calls("ncclCommAbort"), IsEmpty());
  EXPECT_EQ(gpus_.live_communicators(), 0);
}

TEST_F(GpuSessionTest, AnAbortEndsAMessageThatWaitsForADevice) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunRanks(2, [&](Rank& rank, int number) {
    if (number == 0) gpus_.PutGate(rank.producer(), open);
    const auto message =
        rank.Start(number == 0 ? OpKind::kSend : OpKind::kReceive, 1 - number, {1, 2}, number + 1);
    both.arrive_and_wait();
    if (number == 1) rank.session().Abort("enough");
    EXPECT_EQ(rank.Finish(*message).code(), StatusCode::kAborted);
    open = true;
    EXPECT_EQ(rank.session().Shutdown("done").code(), StatusCode::kAborted);
  });
}

TEST_F(GpuSessionTest, ALoneRankHasMessagesToItself) {
  RunRanks(1, [&](Rank& rank, int) {
    for (const auto& [from, to] :
         std::vector<std::pair<int, int>>{{1, 1}, {1, 2}, {1, kHost}, {kHost, 2}, {kHost, kHost}}) {
      for (const bool send_first : {true, false}) {
        const auto start = [&, from = from, to = to](bool send) {
          return send ? rank.Start(OpKind::kSend, 0, {3, 4}, from)
                      : rank.Start(OpKind::kReceive, 0, {0, 0}, to);
        };
        const auto one = start(send_first);
        EXPECT_FALSE(one->work->handle->done());
        const auto other = start(!send_first);
        ASSERT_TRUE(rank.Finish(*one).ok());
        ASSERT_TRUE(rank.Finish(*other).ok());
        EXPECT_THAT((send_first ? other : one)->values, ElementsAre(3, 4));
      }
    }
    const auto send = rank.Start(OpKind::kSend, 0, {3, 4}, 1);
    const auto receive = rank.Start(OpKind::kReceive, 0, {0}, 1);
    const Status status = rank.Finish(*receive);
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_THAT(status.message(), HasSubstr("expected float32 [1], rank 0 sent float32 [2]"));
    EXPECT_TRUE(rank.Finish(*send).ok());
    EXPECT_EQ(receive->values, std::vector<float>{0});
    gpus_.FailNext("cudaMemcpyAsync", 700);
    const auto failing = rank.Start(OpKind::kSend, 0, {3, 4}, 1);
    EXPECT_THAT(rank.Finish(*rank.Start(OpKind::kReceive, 0, {0, 0}, 1)).message(),
                HasSubstr("cudaMemcpyAsync"));
    EXPECT_THAT(rank.Finish(*failing).message(), HasSubstr("cudaMemcpyAsync"));
  });
  EXPECT_THAT(gpus_.calls("cudaHostAlloc"), IsEmpty());
  EXPECT_EQ(gpus_.live_events(), 0);
}

// The host waits for the copy, and the GPU does not come to it.
TEST_F(GpuSessionTest, ALoneRanksMessageToTheHostHasTheStallLimit) {
  configure_ = [](core::Config& config) { config.stall_limit = std::chrono::milliseconds(20); };
  std::atomic<bool> open{false};
  RunRanks(1, [&](Rank& rank, int) {
    gpus_.PutGate(rank.producer(), open);
    const auto receive = rank.Start(OpKind::kReceive, 0, {0, 0}, kHost);
    const auto send = rank.Start(OpKind::kSend, 0, {3, 4}, 1);
    for (const auto& half : {receive, send}) {
      const Status status = rank.Finish(half->work, nullptr);
      EXPECT_EQ(status.code(), StatusCode::kTimedOut);
      EXPECT_THAT(status.message(),
                  AllOf(HasSubstr("send to rank 0, tag 0: the GPU has not copied it for "),
                        HasSubstr(", longer than stall_limit (20 ms)")));
    }
    EXPECT_EQ(rank.session().fault().code(), StatusCode::kTimedOut);
    open = true;
  });
}

TEST_F(GpuSessionTest, ALoneRanksMessageToTheHostHasItsOwnTimeOut) {
  std::atomic<bool> open{false};
  RunRanks(1, [&](Rank& rank, int) {
    gpus_.PutGate(rank.producer(), open);
    const auto receive =
        rank.Start(OpKind::kReceive, 0, {0, 0}, kHost, std::chrono::milliseconds(20));
    const auto send = rank.Start(OpKind::kSend, 0, {3, 4}, 1);
    for (const auto& half : {receive, send}) {
      const Status status = rank.Finish(half->work, nullptr);
      EXPECT_EQ(status.code(), StatusCode::kTimedOut);
      EXPECT_THAT(status.message(), HasSubstr("did not finish within its time-out of 20 ms"));
    }
    open = true;
  });
}

// Neither what it reads nor what it writes is used before the streams have come there.
TEST_F(GpuSessionTest, ALoneRanksMessageWaitsForBothOfItsTensors) {
  std::atomic<bool> open{false};
  RunRanks(1, [&](Rank& rank, int) {
    gpus_.PutGate(rank.producer(), open);
    const auto receive = rank.Start(OpKind::kReceive, 0, {0, 0}, 1);
    const auto send = rank.Start(OpKind::kSend, 0, {3, 4}, 1);
    ASSERT_TRUE(send->work->handle->done());
    gpus_.RunDevices();
    EXPECT_EQ(receive->values, std::vector<float>({0, 0}));
    open = true;
    ASSERT_TRUE(rank.Finish(*receive).ok());
    EXPECT_EQ(receive->values, std::vector<float>({3, 4}));
    ASSERT_TRUE(rank.Finish(*send).ok());
  });
}

// The libraries are kept as GpuLibraries::OfProcess does.
TEST_F(GpuSessionTest, TheNextSessionHasTheStreamsAndKernelsOfTheLast) {
  std::vector<std::shared_ptr<ops::cuda::Device>> devices;
  for (const int index : {1, 2}) {
    ASSERT_TRUE(ops::cuda::Device::Open(gpus_.cuda(), index, &devices.emplace_back()).ok());
  }
  const auto keep = [&](GpuLibraries& libraries) {
    libraries.open_device = [&](int index, std::shared_ptr<ops::cuda::Device>* device) {
      *device = devices.at(static_cast<std::size_t>(index) - 1);
      return Status::Ok();
    };
  };
  for (int i = 0; i < 2; ++i) {
    RunRanks(
        2,
        [&](Rank& rank, int number) {
          const auto call = rank.Submit(Sum(), "w", number + 1);
          rank.FinishAndCheck(*call, Sum());
        },
        keep);
  }
  EXPECT_EQ(gpus_.calls("cudaStreamCreateWithPriority").size(), 2u);
  EXPECT_THAT(gpus_.calls("cudaStreamDestroy"), IsEmpty());
  EXPECT_EQ(gpus_.calls("cuModuleLoadData").size(), 2u);
  EXPECT_THAT(gpus_.calls("cuModuleUnload"), IsEmpty());
  EXPECT_EQ(gpus_.live_events(), 0);
}

TEST_F(GpuSessionTest, AForkedChildLeavesCudaAlone) {
  const auto world = std::make_shared<InprocWorld>(1);
  auto rank = std::make_unique<Rank>(gpus_, libraries_, world, 0);
  rank->FinishAndCheck(*rank->Submit(Sum(), "w", 1), Sum());
  gpus_.Forget();
  const pid_t child = fork();
  if (child == 0) {
    rank.reset();
    _exit(gpus_.calls("cu").empty() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(GpuSessionTest, WhatIsOnTheDeviceIsFinishedBeforeTheEnd) {
  std::atomic<bool> open{false};
  std::atomic<int> ending{0};
  RunRanks(2, [&](Rank& rank, int number) {
    // What a lane takes for its first collective would wait for the device.
    rank.FinishAndCheck(*rank.Submit(Sum(), "first", number + 1), Sum());
    gpus_.PutGate(rank.producer(), open);
    const auto call = rank.Submit(Sum(), "w", number + 1);
    ASSERT_TRUE(rank.session().Wait(*call->work->handle).ok());  // launched
    if (++ending == 2) open = true;
    EXPECT_TRUE(rank.session().Shutdown("done").ok());
    call->side.handle()->Complete(Status::Ok());
    call->side.Check(Sum(), number, 2);
  });
}

TEST_F(GpuSessionTest, AnAbortEndsWhatWaitsForADevice) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunRanks(2, [&](Rank& rank, int number) {
    // What a lane takes for its first collective would wait for the device.
    rank.FinishAndCheck(*rank.Submit(Sum(), "first", number + 1), Sum());
    gpus_.PutGate(rank.producer(), open);
    const auto launched = rank.Submit(Sum(), "launched", number + 1);
    ASSERT_TRUE(rank.session().Wait(*launched->work->handle).ok());
    std::shared_ptr<Call> pending;
    if (number == 0) pending = rank.Submit(Sum(), "pending", 1);
    both.arrive_and_wait();
    if (number == 1) rank.session().Abort("enough");
    Status status;
    if (pending) {
      status = rank.session().Wait(*pending->work->handle);
    } else {
      status = rank.session().Check();
    }
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_THAT(status.message(), HasSubstr("enough"));
    EXPECT_EQ(rank.session().Shutdown("done").code(), StatusCode::kAborted);
    both.arrive_and_wait();
    open = true;
  });
  // Those of the parents come when the device has let go of the others.
  while (gpus_.calls("ncclCommAbort").size() < 4) std::this_thread::yield();
}

TEST_F(GpuSessionTest, ALoneRankCopiesInTheStreamOfItsCaller) {
  Cases cases = EveryKind(1);
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    RunCase scaled = Sum(100);
    scaled.signature.dtype = dtype;
    scaled.signature.prescale = 3;
    scaled.signature.postscale = 0.5;
    cases.push_back(scaled);
    scaled.in_place = true;
    cases.push_back(scaled);
  }
  RunRanks(1, [&](Rank& rank, int) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const auto call = rank.Submit(cases[i], "t" + std::to_string(i), 1);
      ASSERT_TRUE(call->work->handle->done());
      rank.FinishAndCheck(*call, cases[i]);
    }
  });
  EXPECT_THAT(gpus_.calls("nccl"), IsEmpty());
  EXPECT_EQ(gpus_.live_streams(), 2);  // the program's
  EXPECT_EQ(gpus_.live_events(), 0);
  EXPECT_THAT(gpus_.devices_with_context(), ElementsAre(1));
}

TEST_F(GpuSessionTest, ALoneRankNeedsKernelsForFactorsAlone) {
  RunRanks(
      1,
      [&](Rank& rank, int) {
        const auto call = rank.Submit(Sum(), "w", 1);
        rank.FinishAndCheck(*call, Sum());
        RunCase scaled = Sum();
        scaled.signature.prescale = 2;
        const Status status = rank.Finish(*rank.Submit(scaled, "s", 1));
        EXPECT_EQ(status.code(), StatusCode::kUnsupported);
        EXPECT_EQ(status.message(), "built without nvcc");
        RunCase adasum = Sum();
        adasum.signature.reduction = core::ReduceOp::kAdasum;
        EXPECT_TRUE(rank.Finish(*rank.Submit(adasum, "a", 1)).ok());
      },
      [](GpuLibraries& libraries) {
        libraries.kernels = nullptr;
        libraries.why_no_kernels = "built without nvcc";
      });
}

}  // namespace
}  // namespace sirtaki::session
