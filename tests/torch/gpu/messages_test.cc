// send and recv of tensors on GPUs, which are fakes that keep streams and events as real ones do.
// Threads are the ranks.
#include "sirtaki/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "sirtaki/collectives.h"
#include "tests/torch/gpu/gpu_ranks.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class GpuMessagesTest : public GpuRanksTest {};

TEST_F(GpuMessagesTest, GoAroundARing) {
  for (const int size : {1, 2, 3}) {
    RunRanks(size, [&](GpuRank& rank) {
      const int next = (rank.number() + 1) % size;
      const int previous = (rank.number() + size - 1) % size;
      Floats memory = {-1, -1, -1, -1, -1, -1};
      const at::Tensor got = OnCuda(rank.device(), memory, {2, 3}, {1, 2});  // not flat
      const auto number = static_cast<float>(rank.number());
      Floats mine = {number, 1, 2, 3, 4, 5};
      const Handle receiving = irecv(got, previous);
      const Handle sending = isend(OnCuda(rank.device(), mine, {2, 3}, {3, 1}), next);
      EXPECT_TRUE(synchronize(receiving).is_same(got));
      synchronize(sending);
      EXPECT_EQ(rank.Read(got), Floats({static_cast<float>(previous), 3, 1, 4, 2, 5}));
    });
  }
  EXPECT_THAT(gpus_.calls("nccl"), IsEmpty());
}

TEST_F(GpuMessagesTest, OneSideMayBeOnTheHost) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = {7, 8};
    const at::Tensor on_gpu = rank.Tensor(memory);
    if (rank.number() == 0) {
      send(on_gpu, 1);
      recv_(on_gpu, 1);
      EXPECT_EQ(rank.Read(on_gpu), Floats({8, 9}));
    } else {
      at::Tensor on_host = torch::zeros({2});
      recv_(on_host, 0);
      EXPECT_TRUE(on_host.equal(torch::tensor({7.0F, 8.0F})));
      send(on_host + 1, 0);
    }
  });
}

TEST_F(GpuMessagesTest, ABatchMayCrossItself) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats mine(3, static_cast<float>(rank.number()));
    Floats got(3, -1);
    const std::vector<P2POp> operations = {P2POp::send(rank.Tensor(mine), 1 - rank.number(), 4),
                                           P2POp::receive(rank.Tensor(got), 1 - rank.number(), 4)};
    const std::vector<Handle> handles = batch_isend_irecv(operations);
    for (const Handle& handle : handles) synchronize(handle);
    EXPECT_EQ(rank.Read(rank.Tensor(got)), Floats(3, static_cast<float>(1 - rank.number())));
  });
}

// What was made in a stream is sent when that has come there; whichever stream asks finds what was
// received.
TEST_F(GpuMessagesTest, StreamsWaitButNotTheHost) {
  std::atomic<bool> open{false};
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = {0, 0};
    const at::Tensor tensor = rank.Tensor(memory);
    if (rank.number() == 0) {
      const Floats made = {5, 6};
      gpus_.PutGate(rank.stream(), open);
      gpus_.PutCopy(rank.stream(), memory.data(), made.data(), 8);
      const Handle sending = isend(tensor, 1);
      EXPECT_FALSE(poll(sending));
      send(torch::ones({1}), 1, MessageOptions().tag(1));
      synchronize(sending);
      return;
    }
    const Handle receiving = irecv(tensor, 0);
    recv_(torch::empty({1}), 0, MessageOptions().tag(1));
    EXPECT_FALSE(poll(receiving));
    open = true;
    std::vector<Floats> found(2, Floats(2, -1));
    for (Floats& values : found) {
      const StreamHandle stream = gpus_.MakeStream();
      SetCurrentStream(rank.device(), stream);
      EXPECT_TRUE(synchronize(receiving).is_same(tensor));
      gpus_.PutCopy(stream, values.data(), memory.data(), 8);
      rank.Read(tensor);
    }
    EXPECT_THAT(found, Each(Floats({5, 6})));
  });
}

TEST_F(GpuMessagesTest, ATensorIsKeptUntilItIsSent) {
  std::atomic<bool> open{false};
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = {1, 2};
    if (rank.number() == 1) {
      EXPECT_EQ(rank.Read(recv_(rank.Tensor(memory), 0)), Floats({3, 3}));
      return;
    }
    const int before = LiveBlocksOn(rank.device());
    const Floats threes = {3, 3};
    gpus_.PutGate(rank.stream(), open);
    {
      at::Tensor made = at::empty({2}, at::TensorOptions().device(Cuda(rank.device())));
      gpus_.PutCopy(rank.stream(), made.mutable_data_ptr(), threes.data(), 8);
      isend(made, 1);
    }
    EXPECT_EQ(LiveBlocksOn(rank.device()), before + 1);
    open = true;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (LiveBlocksOn(rank.device()) > before && std::chrono::steady_clock::now() < limit) {
      std::this_thread::yield();
    }
    EXPECT_EQ(LiveBlocksOn(rank.device()), before);
  });
}

// What goes by NCCL is read on the device, behind what has made it and before what the stream does next.
TEST_F(GpuMessagesTest, LargeOnesGoByNcclInTheirStreams) {
  constexpr std::size_t kCount = 65536;
  RunRanks(2, [&](GpuRank& rank) {
    const bool sends = rank.number() == 0;
    Floats memory(kCount, -1);
    for (bool is_over = false; !is_over;) {
      // The first one by NCCL is a greeting.
      const std::size_t before = gpus_.calls("ncclSend").size();
      if (sends) {
        gpus_.PutWrite(rank.stream(), memory.data(), 1, 4 * kCount);
        send(rank.Tensor(memory), 1);
        gpus_.PutWrite(rank.stream(), memory.data(), 2, 4 * kCount);
        is_over = before > 0 && gpus_.calls("ncclSend").size() > before;
        send(torch::full({1}, is_over ? 1.0 : 0.0), 1, MessageOptions().tag(1));
      } else {
        Floats got(kCount, -1);
        const Floats read = rank.Read(recv_(rank.Tensor(got), 0));
        std::uint32_t bits = 0;
        std::memcpy(&bits, &read.back(), 4);
        EXPECT_EQ(bits, 0x01010101U);
        is_over = recv_(torch::zeros({1}), 0, MessageOptions().tag(1)).item<float>() > 0;
      }
    }
    rank.Read(rank.Tensor(memory));  // all of the stream has run
  });
}

TEST_F(GpuMessagesTest, TheReceiverIsToldOfAnotherShape) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats two = {1, 2};
    Floats three = {0, 0, 0};
    if (rank.number() == 0) {
      send(rank.Tensor(two), 1);
      send(rank.Tensor(two), 1);
      return;
    }
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { recv_(rank.Tensor(three), 0); }),
                HasSubstr("expected float32 [3], rank 0 sent float32 [2]"));
    Floats got = {0, 0};
    EXPECT_EQ(rank.Read(recv_(rank.Tensor(got), 0)), Floats({1, 2}));
  });
}

// Only here: nobody else takes part.
TEST_F(GpuMessagesTest, ACaptureIsRefused) {
  RunRanks(2, [&](GpuRank& rank) {
    Floats memory = {1};
    const at::Tensor tensor = rank.Tensor(memory);
    if (rank.number() == 1) {
      gpus_.SetCapturing(rank.stream());
      for (const auto& call : std::vector<std::function<void()>>{
               [&] { send(tensor, 0); }, [&] { recv_(tensor, 0); },
               [&] {
                 batch_isend_irecv({P2POp::send(torch::ones({1}), 0), P2POp::receive(tensor, 0)});
               }}) {
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, call), HasSubstr("CUDA graph"));
      }
      gpus_.SetCapturing(rank.stream(), false);
      send(tensor, 0);
    } else {
      Floats got = {0};
      EXPECT_EQ(rank.Read(recv_(rank.Tensor(got), 1)), Floats({1}));
    }
  });
}

TEST_F(GpuMessagesTest, AGpuThatCannotBeUsedIsSaid) {
  RunRanks(
      2,
      [&](GpuRank& rank) {
        Floats memory = {1};
        const std::string text = ErrorOf(ErrorCode::InvalidArgument,
                                         [&] { send(rank.Tensor(memory), 1 - rank.number()); });
        EXPECT_THAT(text, HasSubstr("send to rank"));
        EXPECT_THAT(text, HasSubstr("no CUDA runtime"));
      },
      [](session::GpuLibraries& libraries) {
        libraries.open_device = [](int, std::shared_ptr<ops::cuda::Device>*) {
          return core::Status(core::StatusCode::kUnsupported, "no CUDA runtime");
        };
      });
}

}  // namespace
}  // namespace sirtaki::tests
