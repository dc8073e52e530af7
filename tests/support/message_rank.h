// Ranks that are threads, each with a GPU of FakeGpus, and send each other messages.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/device_ranks.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::tests {

using Values = std::vector<std::int32_t>;

inline Values Of(std::int64_t count, std::int32_t value) {
  return Values(static_cast<std::size_t>(count), value);
}

enum class MessagePlace { kGpu, kHost };

// A rank whose lanes send and receive. The memory of its messages outlives them.
class MessageRank {
 public:
  MessageRank(FakeGpus& gpus, ops::InprocWorld& world, int rank,
              const std::function<void(ops::LanesOptions&)>& change = nullptr)
      : device_(gpus, world, rank, change) {}

  DeviceRank& device() { return device_; }

  core::WorkPtr Send(int to, int tag, Values values, MessagePlace place = MessagePlace::kGpu) {
    const auto count = static_cast<std::int64_t>(values.size());
    return Start(core::OpKind::kSend, to, tag, {count}, std::move(values), place);
  }
  core::WorkPtr Receive(int from, int tag, std::int64_t count,
                        MessagePlace place = MessagePlace::kGpu) {
    return Start(core::OpKind::kReceive, from, tag, {count}, Of(count, -1), place);
  }

  // Takes the pinned memory of a small message, which CUDA gives when the device stands still.
  void TakePinnedMemory() {
    const core::WorkPtr send = Send(0, 99, Of(4, 3), MessagePlace::kHost);
    EXPECT_TRUE(Finish(Receive(0, 99, 4)).ok());
    EXPECT_TRUE(Finish(send).ok());
  }

  // Steps until the message has ended, and its tensor is there.
  core::Status Finish(const core::WorkPtr& work) {
    const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
    while (!work->handle->done()) {
      if (core::Clock::now() > limit)
        return {core::StatusCode::kTimedOut, "the message does not end"};
      Step();
    }
    const core::Status& status = work->handle->status();
    const auto* on_gpu = dynamic_cast<const ops::cuda::DeviceWork*>(work.get());
    if (!status.ok() || on_gpu == nullptr || on_gpu->done == nullptr) return status;
    // The other side may wait for an answer of this one.
    for (bool reached = false; !reached; Step()) {
      if (core::Status polled = on_gpu->done->Poll(&reached); !polled.ok()) return polled;
      if (core::Clock::now() > limit) return {core::StatusCode::kTimedOut, "the copy does not end"};
    }
    return status;
  }
  void Step() {
    if (!device_.lanes().Step()) std::this_thread::yield();
  }

  // Until the host has nothing under way.
  void StepToEnd() {
    const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
    while (device_.lanes().NeedsStepping() && core::Clock::now() < limit) Step();
    EXPECT_FALSE(device_.lanes().NeedsStepping());
  }

  // What the work's memory holds now.
  static Values Held(const core::WorkPtr& work) {
    const auto* first = static_cast<const std::int32_t*>(work->output);
    return {first, first + work->request.signature()->ElementCount()};
  }

 private:
  core::WorkPtr Start(core::OpKind kind, int peer, int tag, std::vector<std::int64_t> shape,
                      Values values, MessagePlace place) {
    Values& memory = tensors_.emplace_back(std::move(values));
    core::RunItem item;
    item.work = std::make_shared<core::Work>();
    item.work->request.key = core::Key::Named(core::kWorldSet, "m" + std::to_string(++count_));
    item.work->request.asked = std::make_shared<const core::Signature>(core::Signature{
        .kind = kind,
        .dtype = core::DType::kI32,
        .device = place == MessagePlace::kGpu ? core::DeviceKind::kCuda : core::DeviceKind::kHost,
        .shape = std::move(shape)});
    item.work->peer = peer;
    item.work->tag = tag;
    item.work->input = item.work->output = memory.data();
    item.work->handle = std::make_shared<core::HandleState>();
    if (place == MessagePlace::kGpu) item = device_.OnDevice(std::move(item));
    device_.lanes().StartP2p(item.work, core::Clock::now());
    return item.work;
  }

  std::list<Values> tensors_;
  int count_ = 0;
  DeviceRank device_;
};

class MessageRanksTest : public ::testing::Test {
 protected:
  void RunRanks(int size, const std::function<void(MessageRank& self, int rank)>& body,
                const std::function<void(int rank, ops::LanesOptions&)>& change = nullptr) {
    ops::InprocWorld world(size);
    RankThreads::Run(size, [&](int rank) {
      MessageRank self(gpus_, world, rank, [&](ops::LanesOptions& options) {
        if (change) change(rank, options);
      });
      body(self, rank);
      EXPECT_TRUE(self.device().failure().ok()) << self.device().failure().ToString();
    });
  }

  // Rank 0 sends three messages, the second of which rank 1 expects in another shape.
  static void ExpectMismatchOfTheSecond(MessageRank& self, int rank, std::int64_t count) {
    if (rank == 0) {
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(self.Finish(self.Send(1, 3, Of(count + i, i))).ok());
      return;
    }
    std::vector<core::WorkPtr> taken;
    for (const int more : {0, 9, 2}) taken.push_back(self.Receive(0, 3, count + more));
    const core::Status status = self.Finish(taken[1]);
    EXPECT_EQ(status.code(), core::StatusCode::kMismatch);
    EXPECT_EQ(status.message(), "receive from rank 0, tag 3: expected int32 [" +
                                    std::to_string(count + 9) + "], rank 0 sent int32 [" +
                                    std::to_string(count + 1) + "]");
    EXPECT_EQ(MessageRank::Held(taken[1]), Of(count + 9, -1));
    for (const int i : {0, 2}) {
      const core::WorkPtr& other = taken[static_cast<std::size_t>(i)];
      EXPECT_TRUE(self.Finish(other).ok());
      EXPECT_EQ(MessageRank::Held(other), Of(count + i, i));
    }
  }

  FakeGpus gpus_;
};

}  // namespace sirtaki::tests
