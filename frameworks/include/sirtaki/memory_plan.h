// A memory plan tells what the parameters, gradients and state of an optimizer take on a host with
// each kind of shards, before a job is started with another kind or with more ranks.
//
//   std::cout << sirtaki::memory_plan(optimizer).text();
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/optimizer_options.h"

namespace sirtaki {

// A model and its optimizer, in bytes on one rank without shards.
struct TrainedBytes {
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t state = 0;
};

// The sums of the ranks of a host, in bytes, beside what activations, buckets under way and the
// processes themselves take.
struct SIRTAKI_API MemoryPlan {
  struct Choice {
    Shard shard = Shard::None;
    ShardOver shard_over = ShardOver::All;  // of meaning on several hosts
    TrainedBytes of_host;
    std::int64_t together() const { return of_host.parameters + of_host.gradients + of_host.state; }
  };

  int ranks = 1;          // of the job
  int ranks_of_host = 1;  // of this host
  TrainedBytes of_rank;
  // The choices begin without shards; those over hosts are there where there are several.
  std::vector<Choice> choices;
  // For comparison: with shards of parameters too, as FSDP and stage 3 of ZeRO have them. The layer
  // that is at work is whole there, and comes to this.
  TrainedBytes fully_sharded;
  // This rank's process takes so much now, a page that k processes have counting one k-th (Pss); -1
  // where the system does not tell.
  std::int64_t in_use_now = -1;

  // Returns a table with a line for each choice, and one for comparison, in MiB.
  std::string text() const;
};

// Plans for this job: its ranks, and those of this host. Parameters of a sharded optimizer count once
// on a host where it has them so: on the CPU. The state is that of LibTorch's Adagrad, Adam, AdamW,
// RMSprop and SGD with their options; of another class what this rank has of it now. Not collective.
// Throws NotInitialized.
SIRTAKI_API MemoryPlan memory_plan(const torch::optim::Optimizer& optimizer);

// Plans for any job, whose hosts have as many ranks each. `parameters_once`: the ranks of a host have
// the parameters of a sharded optimizer once. Throws InvalidArgument if `ranks` is no multiple of
// `ranks_of_host`, or one of them is below 1.
SIRTAKI_API MemoryPlan memory_plan(const TrainedBytes& of_rank, int ranks, int ranks_of_host,
                                   bool parameters_once = true);

}  // namespace sirtaki
