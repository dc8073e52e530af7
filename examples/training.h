// The parts that all training programs share, whatever their models and data.
#pragma once

#include <sirtaki/torch.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

namespace examples {

// The learning rate rises from the first to the highest during the warm-up, then falls to zero along
// a cosine.
class WarmupCosine final : public torch::optim::LRScheduler {
 public:
  WarmupCosine(torch::optim::Optimizer& optimizer, double first, double highest,
               std::int64_t warmup_steps, std::int64_t all_steps)
      : LRScheduler(optimizer),
        first_(first),
        highest_(highest),
        warmup_steps_(static_cast<double>(warmup_steps)),
        all_steps_(static_cast<double>(all_steps)) {
    go_to(0);
  }

  // Sets the schedule to where it is after this many steps, and the optimizer's learning rate.
  void go_to(std::int64_t steps) {
    step_count_ = static_cast<unsigned>(std::max<std::int64_t>(steps - 1, 0));
    step();
    step_count_ = static_cast<unsigned>(steps);
  }
  double learning_rate() const { return get_current_lrs().front(); }

 private:
  std::vector<double> get_lrs() override {
    const auto step = static_cast<double>(step_count_);
    double lr = 0;
    if (step < warmup_steps_) {
      lr = first_ + (highest_ - first_) * step / warmup_steps_;
    } else {
      const double share = std::min(1.0, (step - warmup_steps_) / (all_steps_ - warmup_steps_));
      lr = highest_ * 0.5 * (1 + std::cos(3.14159265358979 * share));
    }
    return std::vector<double>(get_current_lrs().size(), lr);
  }

  const double first_;
  const double highest_;
  const double warmup_steps_;
  const double all_steps_;
};

// A hash (FNV-1a) that changes with any bit of the bytes, going on from the hash `before`.
inline unsigned long long digest(const void* memory, std::size_t count,
                                 unsigned long long before = 14695981039346656037ull) {
  const auto* bytes = static_cast<const unsigned char*>(memory);
  for (std::size_t i = 0; i < count; ++i) before = (before ^ bytes[i]) * 1099511628211ull;
  return before;
}

// The hash of all parameters.
inline unsigned long long digest(const torch::nn::Module& net) {
  unsigned long long all = digest(nullptr, 0);
  for (const auto& parameter : net.parameters()) {
    const torch::Tensor flat = parameter.detach().cpu().contiguous();
    all = digest(flat.data_ptr(), flat.nbytes(), all);
  }
  return all;
}

// The file of a checkpoint in `folder`, which is made if it is not there.
inline std::string checkpoint_file(const std::string& folder, const std::string& name) {
  sirtaki::run_rank_zero_first([&] { std::filesystem::create_directories(folder); },
                               sirtaki::RankZeroFirstOptions().name("checkpoint folder"));
  return (std::filesystem::path(folder) / name).string();
}

// Goes on with what the file holds, if it is there, and says so. The scheduler is set by the
// `steps` that this run makes in an epoch: the saved run made another number of steps if it had
// another number of ranks or another batch size.
inline void resume(const std::string& file, const sirtaki::Checkpoint& checkpoint,
                   const std::int64_t& epoch, WarmupCosine& scheduler, std::int64_t steps) {
  const bool found = sirtaki::load_checkpoint(file, checkpoint);
  if (found) scheduler.go_to(epoch * steps);
  if (sirtaki::rank() != 0) return;
  if (found) {
    std::printf("resumed after epoch %lld, at a learning rate of %.3g\n",
                static_cast<long long>(epoch), scheduler.learning_rate());
  } else {
    std::printf("no checkpoint yet: from the beginning\n");
  }
  std::fflush(stdout);
}

}  // namespace examples
