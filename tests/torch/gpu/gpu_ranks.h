// Threads as ranks, each with a session and a GPU of its own, out of fakes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "frameworks/torch/session/session_state.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/support/fake_libraries.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"
#include "tests/torch/gpu/fake_cuda.h"

namespace sirtaki::tests {

using Floats = std::vector<float>;

inline Floats Of(std::int64_t count, float value) {
  return Floats(static_cast<std::size_t>(count), value);
}

// A rank, whose GPU is the one behind its number, and whose current stream is one of its own.
class GpuRank {
 public:
  GpuRank(FakeGpus& gpus, int number)
      : gpus_(gpus), number_(number), stream_(gpus.MakeStream(number + 1)) {
    SetCurrentStream(device(), stream_);
  }

  int number() const { return number_; }
  int device() const { return number_ + 1; }
  ops::cuda::StreamHandle stream() const { return stream_; }

  at::Tensor Tensor(Floats& memory) const { return OnCuda(device(), memory); }

  // The rank's stream waits for what this one has until now, as autograd's engine makes it wait at
  // the end of backward() for the streams of gradients; those of GivenGradients it does not know.
  void Follow(ops::cuda::StreamHandle stream) {
    const c10::DeviceGuard guard(Cuda(device()));
    ops::cuda::EventHandle event = nullptr;
    gpus_.cuda().EventCreateWithFlags(&event, 0);
    gpus_.cuda().EventRecord(event, stream);
    gpus_.cuda().StreamWaitEvent(stream_, event, 0);
    gpus_.cuda().EventDestroy(event);
  }

  // What the tensor holds when the stream that is current on its GPU has come here.
  Floats Read(const at::Tensor& tensor) {
    Floats values(static_cast<std::size_t>(tensor.numel()), -1.0F);
    const ops::cuda::StreamHandle stream = CurrentStreamOf(tensor.device().index());
    const c10::DeviceGuard guard(tensor.device());  // whose default stream it may be
    gpus_.PutCopy(stream, values.data(), tensor.const_data_ptr(), tensor.nbytes());
    gpus_.AwaitStream(stream);
    return values;
  }

 private:
  FakeGpus& gpus_;
  const int number_;
  const ops::cuda::StreamHandle stream_;
};

class GpuRanksTest : public ::testing::Test {
 protected:
  void RunRanks(int size, const std::function<void(GpuRank& rank)>& body,
                const std::function<void(session::GpuLibraries&)>& change = nullptr) {
    const auto world = std::make_shared<session::InprocWorld>(size);
    RankThreads::Run(size, [&](int number) {
      session::StartOptions options = SessionOptions([this](core::Config& config) {
        config.wait = core::WaitMode::kYield;
        if (configure_) configure_(config);
      });
      const auto opened = libraries_.Make();
      if (change) change(*opened);
      options.gpus = opened;
      std::shared_ptr<session::Session> session;
      const core::Status started = session::Session::CreateInproc(world, number, options, &session);
      ASSERT_TRUE(started.ok()) << started.ToString();
      {
        const detail::SessionScope scope(std::make_shared<detail::SessionState>(session));
        GpuRank rank(gpus_, number);
        body(rank);
      }
      (void)session->Shutdown("the test is over");
    });
  }

  // How often a place in this stream of the program's was marked: an event each.
  auto Marked(ops::cuda::StreamHandle stream) const {
    const std::string end = " stream " + std::to_string(gpus_.NumberOf(stream));
    const auto calls = gpus_.calls("cudaEventRecord");
    return std::count_if(calls.begin(), calls.end(),
                         [&end](const std::string& call) { return call.ends_with(end); });
  }

  std::function<void(core::Config&)> configure_;
  FakeGpus gpus_;
  FakeLibraries libraries_{gpus_};
};

}  // namespace sirtaki::tests
