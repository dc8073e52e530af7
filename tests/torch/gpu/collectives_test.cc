// The public collectives with tensors on GPUs: fakes, which keep streams and events as real ones
// do. Threads are the ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "frameworks/inproc_world.h"
#include "sirtaki/torch.h"
#include "tests/support/fake_libraries.h"
#include "tests/support/session_calls.h"
#include "tests/torch/gpu/fake_cuda.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::CopyKind;
using ops::cuda::StreamHandle;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Floats = std::vector<float>;

AllreduceOptions Sum(const std::string& name) {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

// A rank, whose GPU is the one behind its number, and whose current stream is one of its own.
class Rank {
 public:
  Rank(FakeGpus& gpus, const Session& session, int number)
      : gpus_(gpus), session_(session), number_(number), stream_(gpus.MakeStream()) {
    SetCurrentStream(device(), stream_);
  }

  const Session& session() const { return session_; }
  int number() const { return number_; }
  int device() const { return number_ + 1; }
  StreamHandle stream() const { return stream_; }

  at::Tensor Tensor(Floats& memory) const { return OnCuda(device(), memory); }

  // What the tensor holds when the current stream has come here.
  Floats Read(const at::Tensor& tensor) {
    Floats values(static_cast<std::size_t>(tensor.numel()), -1.0F);
    const StreamHandle stream = CurrentStreamOf(device());
    EXPECT_EQ(gpus_.cuda().MemcpyAsync(values.data(), tensor.const_data_ptr(), tensor.nbytes(),
                                       CopyKind::kDeviceToHost, stream),
              ops::cuda::Error::kSuccess);
    ops::cuda::EventHandle event = nullptr;
    gpus_.cuda().EventCreateWithFlags(&event, 0);
    gpus_.cuda().EventRecord(event, stream);
    while (gpus_.cuda().EventQuery(event) != ops::cuda::Error::kSuccess) std::this_thread::yield();
    gpus_.cuda().EventDestroy(event);
    return values;
  }

 private:
  FakeGpus& gpus_;
  const Session& session_;
  const int number_;
  const StreamHandle stream_;
};

class GpuCollectivesTest : public ::testing::Test {
 protected:
  void RunRanks(int size, const std::function<void(Rank& rank)>& body,
                const std::function<void(frameworks::GpuLibraries&)>& change = nullptr) {
    const auto world = std::make_shared<frameworks::InprocWorld>(size);
    RankThreads::Run(size, [&](int number) {
      frameworks::StartOptions options =
          SessionOptions([](core::Config& config) { config.wait = core::WaitMode::kYield; });
      const auto opened = libraries_.Make();
      if (change) change(*opened);
      options.gpus = opened;
      std::shared_ptr<frameworks::Session> session;
      const core::Status started =
          frameworks::Session::CreateInproc(world, number, options, &session);
      ASSERT_TRUE(started.ok()) << started.ToString();
      const Session front(std::make_shared<detail::SessionState>(session));
      Rank rank(gpus_, front, number);
      body(rank);
      (void)session->Shutdown("the test is over");
    });
  }

  FakeGpus gpus_;
  FakeLibraries libraries_{gpus_};
};

TEST_F(GpuCollectivesTest, InPlaceAndStreamsWaitButNotTheHost) {
  std::atomic<bool> open{false};
  std::barrier both(2);
  RunRanks(2, [&](Rank& rank) {
    Floats memory = {0, 0, 0};
    const at::Tensor tensor = rank.Tensor(memory);
    const Floats made(3, static_cast<float>(rank.number() + 1));
    // What the backward pass writes is in the stream, and not in the memory yet.
    gpus_.PutGate(rank.stream(), open);
    gpus_.cuda().MemcpyAsync(memory.data(), made.data(), 12, CopyKind::kDeviceToDevice,
                             rank.stream());
    const Handle handle = allreduce_async_(tensor, Sum("w"), rank.session());
    // Whichever stream is current where it is asked for finds the result.
    std::vector<Floats> found(2, Floats(3, -1));
    for (Floats& values : found) {
      const StreamHandle stream = gpus_.MakeStream();
      SetCurrentStream(rank.device(), stream);
      EXPECT_TRUE(synchronize(handle).is_same(tensor));
      gpus_.cuda().MemcpyAsync(values.data(), memory.data(), 12, CopyKind::kDeviceToHost, stream);
    }
    gpus_.RunDevices();
    EXPECT_THAT(found, Each(Floats(3, -1)));
    both.arrive_and_wait();
    open = true;
    EXPECT_EQ(rank.Read(tensor), Floats(3, 3));
    gpus_.RunDevices();
    EXPECT_THAT(found, Each(Floats(3, 3)));
  });
}

TEST_F(GpuCollectivesTest, EachKindGivesItsResult) {
  RunRanks(2, [&](Rank& rank) {
    const Session& session = rank.session();
    const auto number = static_cast<float>(rank.number());
    Floats memory = {number, number + 10};
    const at::Tensor tensor = rank.Tensor(memory);
    const at::Tensor sum = allreduce(tensor, Sum("sum"), session);
    EXPECT_EQ(sum.device(), Cuda(rank.device()));
    EXPECT_EQ(rank.Read(sum), Floats({1, 21}));
    EXPECT_EQ(rank.Read(tensor), Floats({number, number + 10}));
    EXPECT_EQ(rank.Read(allreduce(tensor, AllreduceOptions().name("average"), session)),
              Floats({0.5F, 10.5F}));
    EXPECT_EQ(rank.Read(allreduce(tensor, Sum("scaled").prescale(2).postscale(3), session)),
              Floats({6, 126}));
    EXPECT_EQ(rank.Read(reducescatter(tensor, ReducescatterOptions().op(ReduceOp::Sum), session)),
              Floats({rank.number() == 0 ? 1.0F : 21.0F}));
    const at::Tensor all = allgather_into(tensor, {}, session);
    EXPECT_EQ(rank.Read(all), Floats({0, 10, 1, 11}));
    Floats to_fill = memory;
    EXPECT_EQ(rank.Read(broadcast_(rank.Tensor(to_fill), 1, {}, session)), Floats({1, 11}));
  });
}

TEST_F(GpuCollectivesTest, WhatArrivesBelongsToTheLaneAndWaitsForItsUser) {
  RunRanks(2, [&](Rank& rank) {
    Floats memory(static_cast<std::size_t>(rank.number() + 1), static_cast<float>(rank.number()));
    const at::Tensor all = allgather(rank.Tensor(memory), {}, rank.session());
    EXPECT_EQ(rank.Read(all), Floats({0, 1, 1}));
    EXPECT_NE(AllocatedOn(all), rank.stream());
    EXPECT_THAT(RecordedOn(all), Contains(rank.stream()));
    Floats two = {5, 6};
    const AlltoallResult exchanged = alltoall(rank.Tensor(two), {}, rank.session());
    EXPECT_EQ(rank.Read(exchanged.tensor), rank.number() == 0 ? Floats({5, 5}) : Floats({6, 6}));
    EXPECT_THAT(exchanged.received_splits, ElementsAre(1, 1));
  });
}

TEST_F(GpuCollectivesTest, AGroupMixesTheHostAndTheGpu) {
  RunRanks(2, [&](Rank& rank) {
    Floats a = {1, 2};
    Floats b = {3};
    const at::Tensor on_host = torch::ones({4});
    const std::vector<at::Tensor> tensors = {rank.Tensor(a), on_host, rank.Tensor(b)};
    const auto handle = grouped_allreduce_async_(tensors, Sum("group"), rank.session());
    EXPECT_EQ(synchronize(handle).size(), 3u);
    EXPECT_EQ(rank.Read(tensors[0]), Floats({2, 4}));
    EXPECT_EQ(rank.Read(tensors[2]), Floats({6}));
    EXPECT_TRUE(on_host.equal(torch::full({4}, 2)));
  });
  // One event for all of the group's inputs.
  EXPECT_EQ(gpus_.calls("cudaStreamIsCapturing").size(), 2u);
}

TEST_F(GpuCollectivesTest, TheHostHereAndAGpuThereIsAMismatch) {
  RunRanks(2, [&](Rank& rank) {
    Floats memory = {1};
    const at::Tensor tensor = rank.number() == 0 ? rank.Tensor(memory) : torch::ones({1});
    const std::string text =
        ErrorOf(ErrorCode::mismatch, [&] { allreduce(tensor, Sum("w"), rank.session()); });
    EXPECT_THAT(text, HasSubstr("\"w\""));
    EXPECT_THAT(text, HasSubstr("on a GPU on rank 0"));
    EXPECT_THAT(text, HasSubstr("on the host on rank 1"));
  });
}

TEST_F(GpuCollectivesTest, ACaptureIsRefusedOnAllRanks) {
  RunRanks(2, [&](Rank& rank) {
    if (rank.number() == 0) gpus_.SetCapturing(rank.stream());
    Floats memory = {1};
    EXPECT_THAT(ErrorOf(ErrorCode::invalid_argument,
                        [&] { allreduce_(rank.Tensor(memory), Sum("w"), rank.session()); }),
                HasSubstr("CUDA graph"));
  });
}

TEST_F(GpuCollectivesTest, AGpuThatCannotBeUsedIsToldToAll) {
  RunRanks(
      2,
      [&](Rank& rank) {
        Floats memory = {1};
        EXPECT_THAT(ErrorOf(ErrorCode::invalid_argument,
                            [&] { allreduce_(rank.Tensor(memory), Sum("w"), rank.session()); }),
                    HasSubstr("a tensor on cuda:"));
        EXPECT_NO_THROW(allreduce(torch::ones({1}), Sum("h"), rank.session()));
      },
      [](frameworks::GpuLibraries& libraries) {
        libraries.load_cuda = [](const ops::cuda::Library**) {
          return core::Status(core::StatusCode::kUnsupported, "no CUDA runtime");
        };
      });
  EXPECT_THAT(gpus_.devices_with_context(), IsEmpty());
}

TEST_F(GpuCollectivesTest, WhatGpusCannotDoYetSaysSo) {
  RunRanks(2, [&](Rank& rank) {
    const Session& session = rank.session();
    Floats memory = {1};
    const at::Tensor tensor = rank.Tensor(memory);
    EXPECT_THAT(ErrorOf(ErrorCode::invalid_argument, [&] { send(tensor, 0, {}, session); }),
                HasSubstr("messages of tensors on a GPU"));
  });
}

TEST_F(GpuCollectivesTest, ALoneRankCopiesInItsStream) {
  RunRanks(1, [&](Rank& rank) {
    Floats memory = {1, 2};
    const at::Tensor tensor = rank.Tensor(memory);
    EXPECT_EQ(rank.Read(allreduce(tensor, Sum("w").prescale(3), rank.session())), Floats({3, 6}));
    EXPECT_EQ(rank.Read(allgather(tensor, {}, rank.session())), Floats({1, 2}));
    EXPECT_EQ(rank.Read(allreduce_(tensor, Sum("w"), rank.session())), Floats({1, 2}));
  });
  EXPECT_THAT(gpus_.calls("nccl"), IsEmpty());
}

}  // namespace
}  // namespace sirtaki::tests
