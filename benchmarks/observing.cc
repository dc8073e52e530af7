// What it costs to see inside a run: a step and small calls while a timeline is written beside the
// same without one, and the share of both that the recorder takes, which is always on.
//
//   mpirun -np 2 --bind-to none observing [--rounds N]
#include <mpi.h>
#include <sirtaki/torch.h>

#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/support/measure.h"
#include "benchmarks/support/models.h"
#include "benchmarks/support/ranks.h"
#include "session/session_observability.h"

namespace sirtaki::benchmarks {
namespace {

constexpr int kTensors = 1000;

// A folder of this rank's own, for its timelines.
class Folder {
 public:
  Folder() {
    std::string path = (std::filesystem::temp_directory_path() / "sirtaki-observing-XXXXXX");
    if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("no folder like " + path);
    path_ = path;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Seconds of `count` events, each with its time and a name.
double EventsTime(std::uint64_t count) {
  core::trace::Observer observer;
  const std::string name = "\"gradient/layers.3.weight\"";
  const auto start = Clock::now();
  for (std::uint64_t i = 0; i < count; ++i) {
    core::trace::Event event;
    event.number = i;
    event.begin = core::Clock::now();
    event.end = event.begin;
    event.SetText(name);
    observer.recorder.Add(event);
  }
  return Seconds(Clock::now() - start);
}

void Compare(const std::string& work, int rounds, const Folder& folder,
             const std::function<void()>& body) {
  const core::trace::Recorder& recorder =
      detail::CurrentSession()->session().observation().observer()->recorder;
  std::vector<double> events;
  const auto plain = [&] {
    const std::uint64_t before = recorder.added();
    const double seconds = Timed(body);
    events.push_back(static_cast<double>(recorder.added() - before));
    return seconds;
  };
  const auto with_timeline = [&] {
    start_timeline(folder.path());
    const double seconds = Timed(body);
    stop_timeline();
    return seconds;
  };
  const std::vector<double> seconds =
      Interleave(rounds, {{kOurs, with_timeline}, {"no timeline", plain}});
  const double many = Median(events);
  const double recording = Slowest(EventsTime(static_cast<std::uint64_t>(many)));
  if (rank() != 0) return;
  Emit(Row{work + ", with a timeline", size(), seconds[0] * 1e3, "ms", "no timeline",
           seconds[1] * 1e3});
  Emit(Row{work + ": recording", size(), recording / seconds[1] * 100, "% of its time", "goal", 2});
  Emit(Sample{work + ": events", size(), kOurs, many, "events"});
}

void Step(int rounds, const Folder& folder) {
  at::manual_seed(0);
  torch::nn::Sequential model = MakeMlp();
  const at::Tensor inputs = at::randn({8, 2048});
  const at::Tensor targets = at::randint(2048, {8}, at::kLong);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.01));
  auto optimizer = DistributedOptimizer(std::move(sgd), model->named_parameters());
  broadcast_parameters(*model, 0);
  Compare("a step of the MLP, batch 8", rounds, folder, [&] {
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model->forward(inputs), targets).backward();
    optimizer.step();
  });
}

void SmallCalls(int rounds, const Folder& folder) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < kTensors; ++i) tensors.push_back(at::zeros({256}));
  Compare(std::to_string(kTensors) + " small calls", rounds, folder, [&] {
    std::vector<Handle> handles;
    for (int i = 0; i < kTensors; ++i) {
      handles.push_back(allreduce_async_(tensors[static_cast<std::size_t>(i)],
                                         AllreduceOptions().name(std::to_string(i))));
    }
    for (const Handle& handle : handles) synchronize(handle);
  });
}

int Main(int argc, char** argv) {
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "21"));
  init();
  at::set_num_threads(1);
  const Folder folder;
  Step(rounds, folder);
  SmallCalls(rounds, folder);
  shutdown();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("observing", [&] { return Main(argc, argv); });
}
