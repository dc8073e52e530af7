// Random programs of collectives on overlapping sets, whose tensors are on GPUs: on fakes that are
// as strict as the real libraries, whose streams go on by chance. A failure prints its seed;
// SIRTAKI_TEST_SEED runs that one first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ops/cuda/device_work.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/support/fake_libraries.h"
#include "tests/support/random_program.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"
#include "tests/support/test_scale.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::DeviceWork;

// A rank's GPU, with two streams that make inputs and one that uses results.
class OnFakeGpu final : public RandomPlace {
 public:
  OnFakeGpu(FakeGpus& gpus, session::Session& session, int device) : gpus_(gpus) {
    EXPECT_TRUE(session.FindGpu(device, &gpu_).ok());
    for (ops::cuda::StreamHandle& stream : producers_) stream = gpus.MakeStream(device);
    consumer_ = gpus.MakeStream(device);
  }

  core::WorkPtr MakeWork(core::Signature* signature) override {
    signature->device = core::DeviceKind::kCuda;
    signature->slot = gpu_->slot();
    auto work = std::make_shared<DeviceWork>();
    work->device = gpu_->device();
    return work;
  }
  void MakeInput(core::Work& work, std::vector<std::byte>& input) override {
    const std::vector<std::byte>& made = inputs_.emplace_back(input);
    std::fill(input.begin(), input.end(), std::byte{0xEE});
    ops::cuda::StreamHandle stream = producers_[inputs_.size() % 2];
    gpus_.PutCopy(stream, input.data(), made.data(), made.size());
    EXPECT_TRUE(NoteReady(gpu_->events(), stream, &ops::cuda::AsDeviceWork(work)).ok());
  }
  void AwaitResult(const core::Work& work) override {
    const auto* const on_gpu = dynamic_cast<const DeviceWork*>(&work);
    if (on_gpu == nullptr) return;  // a barrier
    EXPECT_TRUE(AwaitDone(*on_gpu, consumer_).ok());
    gpus_.AwaitStream(consumer_);
  }

 private:
  FakeGpus& gpus_;
  std::shared_ptr<session::Gpu> gpu_;
  ops::cuda::StreamHandle producers_[2] = {};
  ops::cuda::StreamHandle consumer_ = nullptr;
  std::deque<std::vector<std::byte>> inputs_;
};

std::string RunOnGpus(std::uint64_t seed) {
  const RandomProgram program(seed);
  FakeGpus gpus;
  gpus.SetSeed(seed + 1);
  gpus.AnswerInProgress(static_cast<int>(seed % 3));
  FakeLibraries libraries(gpus);
  const auto world = std::make_shared<session::InprocWorld>(program.size, program.host_of_rank);
  std::vector<std::string> problems(static_cast<std::size_t>(program.size));
  RankThreads::Run(program.size, [&](int rank) {
    std::string& problem = problems[static_cast<std::size_t>(rank)];
    session::StartOptions options = SessionOptions([&](core::Config& config) {
      config.small_bytes = program.small_bytes;
      config.fusion_bytes = program.fusion_bytes;
    });
    options.gpus = libraries.Make();
    std::shared_ptr<session::Session> session;
    const core::Status status = session::Session::CreateInproc(world, rank, options, &session);
    if (!status.ok()) {
      problem = status.ToString();
      return;
    }
    OnFakeGpu gpu(gpus, *session, rank + 1);
    problem = RunRandomProgram(program, *session, seed, &gpu);
    const core::Status end = session->Shutdown("the program is over");
    if (!end.ok()) problem += "\n  " + end.ToString();
  });
  std::string text;
  for (const std::string& problem : problems) text += problem;
  if (!gpus.calls("ncclCommAbort").empty()) text += "\n  a communicator was aborted";
  return text;
}

TEST(RandomGpuProgramsTest, GiveWhatNaiveLoopsGiveWhicheverStreamGoesFirst) {
  const std::uint64_t first = TestSeed();
  const int count = ScaledCount(20, 1000);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    ASSERT_EQ(RunOnGpus(seed), "") << "again with SIRTAKI_TEST_SEED=" << seed;
  }
}

}  // namespace
}  // namespace sirtaki::tests
