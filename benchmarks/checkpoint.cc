// Checkpoints of the MLP with Adam, whose state is in shards, beside files that the ranks write and
// read at once without a library.
//
//   mpirun -np 4 --bind-to none checkpoint --save FOLDER
//   mpirun -np 2 --bind-to none checkpoint --load FOLDER --save OTHER_FOLDER
//
// With --load the ranks begin with what the folder has, else with a step. References: *raw*, each
// rank writes or reads its share of as many bytes by write(2) and read(2), as save_checkpoint
// writes: to a file beside, which is brought to the disk and renamed.
#include <fcntl.h>
#include <mpi.h>
#include <sirtaki/torch.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "benchmarks/support/measure.h"
#include "benchmarks/support/models.h"
#include "benchmarks/support/ranks.h"
#include "core/base/descriptor.h"

namespace sirtaki::benchmarks {
namespace {

namespace fs = std::filesystem;

void Check(bool ok, const std::string& what) {
  if (!ok) throw std::system_error(errno, std::generic_category(), what);
}

// The file of this rank beside a checkpoint, as write(2) and read(2) write and read it.
class RawFile {
 public:
  // `bytes`: of all ranks together.
  RawFile(const std::string& folder, std::uint64_t bytes)
      : folder_(folder),
        path_(folder + "/raw." + std::to_string(rank())),
        bytes_(bytes / static_cast<std::uint64_t>(size()), 'x') {}

  void Write() {
    const std::string temporary = path_ + ".tmp";
    {
      core::Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666));
      for (std::size_t at = 0; at < bytes_.size();) {
        const ssize_t written = write(file.get(), bytes_.data() + at, bytes_.size() - at);
        Check(written > 0, temporary);
        at += static_cast<std::size_t>(written);
      }
      Check(fsync(file.get()) == 0, temporary);
    }
    Check(rename(temporary.c_str(), path_.c_str()) == 0, path_);
    const core::Descriptor folder(open(folder_.c_str(), O_RDONLY | O_DIRECTORY));
    Check(fsync(folder.get()) == 0, folder_);
  }

  void Read() {
    const core::Descriptor file(open(path_.c_str(), O_RDONLY));
    for (std::size_t at = 0; at < bytes_.size();) {
      const ssize_t got = read(file.get(), bytes_.data() + at, bytes_.size() - at);
      Check(got > 0, path_);
      at += static_cast<std::size_t>(got);
    }
  }

 private:
  const std::string folder_;
  const std::string path_;
  std::string bytes_;
};

std::uint64_t BytesOfCheckpoint(const std::string& folder) {
  std::uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("run.pt")) bytes += entry.file_size();
  }
  return bytes;
}

void Run(const std::string& load, const std::string& save, int rounds) {
  at::set_num_threads(1);
  at::manual_seed(0);
  torch::nn::Sequential model = MakeMlp();
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-4));
  auto optimizer = DistributedOptimizer(std::move(adam), model->named_parameters(),
                                        DistributedOptimizerOptions().shard(Shard::OptimizerState));
  const auto checkpoint = Checkpoint().model(*model).optimizer(optimizer);
  broadcast_parameters(*model, 0);
  if (!load.empty()) {
    RawFile raw(load, BytesOfCheckpoint(load));
    raw.Write();
    Measure("load", rounds, "ms", 1e3,
            {{kOurs, [&] { return Timed([&] { load_checkpoint(load + "/run.pt", checkpoint); }); }},
             {"raw", [&] { return Timed([&] { raw.Read(); }); }}});
  }
  if (save.empty()) return;
  optimizer.zero_grad();
  torch::nn::functional::cross_entropy(model->forward(at::randn({8, 2048})),
                                       at::randint(2048, {8}, at::kLong))
      .backward();
  optimizer.step();
  save_checkpoint(save + "/run.pt", checkpoint);
  RawFile raw(save, BytesOfCheckpoint(save));
  Measure("save", rounds, "ms", 1e3,
          {{kOurs, [&] { return Timed([&] { save_checkpoint(save + "/run.pt", checkpoint); }); }},
           {"raw", [&] { return Timed([&] { raw.Write(); }); }}});
}

int Main(int argc, char** argv) {
  init();
  Run(Flag(argc, argv, "load", ""), Flag(argc, argv, "save", ""),
      std::stoi(Flag(argc, argv, "rounds", "5")));
  shutdown();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("checkpoint", [&] { return Main(argc, argv); });
}
