// Trains in an elastic job until it is killed: python/elastic.py by the C++ API.
//
//   sirtakirun --elastic -H ... elastic [BATCH] FOLDER
//
// BATCH is a rank's number of rows, 16 unless it is given: a larger one makes longer steps. FOLDER
// gets the events that reference/course.py describes.
#include <sirtaki/torch.h>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>

#include "benchmarks/support/measure.h"

namespace sirtaki::benchmarks {
namespace {

constexpr std::int64_t kCommitEvery = 10;
constexpr std::array<std::int64_t, 4> kWidths = {256, 768, 768, 10};

// The time by the clock that all hosts of this machine share.
double Now() { return Seconds(Clock::now().time_since_epoch()); }

// When this process began, which is before its libraries were loaded.
double Started() {
  std::ifstream file("/proc/self/stat");
  file.ignore(std::numeric_limits<std::streamsize>::max(), ')');
  constexpr int kFieldsBetween = 19;
  std::string skipped;
  for (int i = 0; i < kFieldsBetween; ++i) file >> skipped;
  double ticks = 0;
  file >> ticks;
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

class Course {
 public:
  explicit Course(const std::string& folder) {
    std::array<char, 256> host{};
    gethostname(host.data(), host.size() - 1);
    const std::string name = std::string(host.data()) + "-" + std::to_string(getpid());
    kill_ = folder + "/kill-" + name;
    events_ = std::fopen((folder + "/events-" + name).c_str(), "ae");
    if (events_ == nullptr) throw std::runtime_error("no events can be written to " + folder);
    Say("start", Started());
  }

  void Ready() { Say("ready", Now()); }
  void NoteJoined() { ++group_; }
  void NoteStep(std::int64_t step) {
    Say("step", Now(),
        " " + std::to_string(step) + " " + std::to_string(size()) + " " + std::to_string(group_));
  }
  void Watch(const at::Tensor& output) {
    if (!std::filesystem::exists(kill_)) return;
    output.register_hook([this](const at::Tensor& /*gradient*/) {
      Say("killed", Now());
      std::raise(SIGKILL);
    });
  }

 private:
  void Say(const char* event, double at, const std::string& words = "") {
    std::fprintf(events_, "%s %.6f%s\n", event, at, words.c_str());
    std::fflush(events_);
  }

  std::string kill_;
  std::FILE* events_ = nullptr;
  int group_ = 0;
};

int Main(std::int64_t batch, const std::string& folder) {
  Course course(folder);
  at::manual_seed(0);
  torch::nn::Sequential net;
  for (std::size_t layer = 1; layer < kWidths.size(); ++layer) {
    if (layer > 1) net->push_back(torch::nn::ReLU());
    net->push_back(torch::nn::Linear(kWidths[layer - 1], kWidths[layer]));
  }
  at::manual_seed(static_cast<std::uint64_t>(getpid()));
  const at::Tensor inputs = at::randn({batch, kWidths.front()});
  const at::Tensor targets = at::randint(kWidths.back(), {batch}, at::kLong);
  // The others wait for what comes behind.
  course.Ready();
  init();
  auto optimizer = DistributedOptimizer(
      torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)),
      net->named_parameters());
  std::int64_t step = 0;
  auto state = elastic::State().model(net).optimizer(optimizer).value("step", step);
  elastic::run(state, [&] {
    course.NoteJoined();
    for (;;) {
      optimizer.zero_grad();
      const at::Tensor output = net->forward(inputs);
      course.Watch(output);
      torch::nn::functional::cross_entropy(output, targets).backward();
      optimizer.step();
      course.NoteStep(++step);
      if (step % kCommitEvery == 0) state.commit();
    }
  });
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  const std::int64_t batch = argc == 3 ? std::strtoll(argv[1], nullptr, 10) : 16;
  if (argc < 2 || argc > 3 || batch <= 0) {
    std::fprintf(stderr, "usage: elastic [BATCH] FOLDER\n");
    return 2;
  }
  return sirtaki::benchmarks::Guarded(
      "elastic", [&] { return sirtaki::benchmarks::Main(batch, argv[argc - 1]); });
}
