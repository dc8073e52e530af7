#include "sirtaki/memory_plan.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/state/optimizer_device.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/detail/elastic_calls.h"

namespace sirtaki {
namespace {

using torch::optim::OptimizerOptions;

// How many tensors of the parameter's size the state has; nothing for other classes' options.
std::optional<int> CountOfTensors(const OptimizerOptions& options) {
  using namespace torch::optim;
  if (const auto* sgd = dynamic_cast<const SGDOptions*>(&options)) {
    return sgd->momentum() != 0 ? 1 : 0;
  }
  if (const auto* adam = dynamic_cast<const AdamOptions*>(&options)) {
    return adam->amsgrad() ? 3 : 2;
  }
  if (const auto* adamw = dynamic_cast<const AdamWOptions*>(&options)) {
    return adamw->amsgrad() ? 3 : 2;
  }
  if (const auto* rms = dynamic_cast<const RMSpropOptions*>(&options)) {
    return 1 + (rms->centered() ? 1 : 0) + (rms->momentum() > 0 ? 1 : 0);
  }
  if (dynamic_cast<const AdagradOptions*>(&options) != nullptr) return 1;
  return std::nullopt;
}

std::int64_t BytesOf(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

TrainedBytes BytesOf(const torch::optim::Optimizer& optimizer, bool* on_cpu) {
  TrainedBytes bytes;
  bool known = true;
  std::unordered_set<const void*> seen;
  for (const auto& group : optimizer.param_groups()) {
    const auto tensors = CountOfTensors(group.options());
    known = known && tensors;
    for (const at::Tensor& parameter : group.params()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      *on_cpu = *on_cpu && parameter.is_cpu();
      bytes.parameters += BytesOf(parameter);
      if (!parameter.requires_grad()) continue;
      bytes.gradients += BytesOf(parameter);
      bytes.state += BytesOf(parameter) * tensors.value_or(0);
    }
  }
  if (known) return bytes;
  bytes.state = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    if (!state) continue;
    for (const at::Tensor* const tensor :
         detail::TensorsOfState(*state).value_or(std::vector<at::Tensor*>())) {
      bytes.state += BytesOf(*tensor);
    }
  }
  return bytes;
}

std::int64_t PssOfThisProcess() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    long long kilobytes = 0;
    if (std::sscanf(line.c_str(), "Pss: %lld kB", &kilobytes) == 1) return kilobytes * 1024;
  }
  return -1;
}

std::string NameOf(const MemoryPlan::Choice& choice) {
  if (choice.shard == Shard::None) return "without shards";
  std::string name = choice.shard == Shard::OptimizerState ? "OptimizerState" : "Gradients";
  return choice.shard_over == ShardOver::Host ? name + ", over hosts" : name;
}

}  // namespace

MemoryPlan memory_plan(const TrainedBytes& of_rank, int ranks, int ranks_of_host,
                       bool parameters_once) {
  if (ranks_of_host < 1 || ranks < ranks_of_host || ranks % ranks_of_host != 0) {
    detail::ThrowInvalid("memory_plan() of " + std::to_string(ranks) + " ranks, " +
                         std::to_string(ranks_of_host) +
                         " on each host: there is at least one on a host, and as many on each");
  }
  MemoryPlan plan;
  plan.ranks = ranks;
  plan.ranks_of_host = ranks_of_host;
  plan.of_rank = of_rank;
  plan.in_use_now = PssOfThisProcess();
  const std::int64_t here = ranks_of_host;
  plan.fully_sharded = {of_rank.parameters * here / ranks, of_rank.gradients * here / ranks,
                        of_rank.state * here / ranks};
  plan.choices.push_back(
      {Shard::None,
       ShardOver::All,
       {here * of_rank.parameters, here * of_rank.gradients, here * of_rank.state}});
  for (const ShardOver over : {ShardOver::All, ShardOver::Host}) {
    const bool one_host = ranks == ranks_of_host;
    if (over == ShardOver::Host && one_host) continue;
    // Shards are there once for each `sharing` ranks, and a host has those of its own ranks.
    const std::int64_t sharing = over == ShardOver::Host ? ranks_of_host : ranks;
    const bool once = parameters_once && (one_host || over == ShardOver::Host);
    TrainedBytes bytes;
    bytes.parameters = once ? of_rank.parameters : here * of_rank.parameters;
    bytes.gradients = here * of_rank.gradients;
    bytes.state = of_rank.state * here / sharing;
    plan.choices.push_back({Shard::OptimizerState, over, bytes});
    bytes.gradients = of_rank.gradients * here / sharing;
    plan.choices.push_back({Shard::Gradients, over, bytes});
  }
  return plan;
}

MemoryPlan memory_plan(const torch::optim::Optimizer& optimizer) {
  const session::Topology& topology = detail::CurrentSession()->topology();
  const auto of_this_host =
      static_cast<int>(std::count(topology.host_of_rank.begin(), topology.host_of_rank.end(),
                                  topology.host_of_rank[static_cast<std::size_t>(topology.rank)]));
  bool on_cpu = true;
  const TrainedBytes bytes = BytesOf(optimizer, &on_cpu);
  // Other hosts may have another number of ranks: as if all were like this one.
  const int hosts = (topology.size + of_this_host - 1) / of_this_host;
  return memory_plan(bytes, hosts * of_this_host, of_this_host, on_cpu && of_this_host > 1);
}

std::string MemoryPlan::text() const {
  char line[200];
  const auto mebibytes = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  std::snprintf(line, sizeof(line), "%-28s%12s%12s%12s%12s\n",
                ("MiB on a host, ranks: " + std::to_string(ranks_of_host)).c_str(), "parameters",
                "gradients", "state", "together");
  std::string text = line;
  const auto add = [&](const std::string& name, const TrainedBytes& bytes) {
    std::snprintf(line, sizeof(line), "%-28s%12.1f%12.1f%12.1f%12.1f\n", name.c_str(),
                  mebibytes(bytes.parameters), mebibytes(bytes.gradients), mebibytes(bytes.state),
                  mebibytes(bytes.parameters + bytes.gradients + bytes.state));
    text += line;
  };
  for (const Choice& choice : choices) {
    add(NameOf(choice), choice.of_host);
    // This rank's own at the last commit(), and as many of others, but where each host has them all;
    // Gradients has the same.
    if (detail::IsElastic() && choice.shard == Shard::OptimizerState) {
      const int copies = choice.shard_over == ShardOver::Host ? 1 : 2;
      add("+ copies of shards", {0, 0, copies * choice.of_host.state});
    }
  }
  add("(FSDP, for comparison)", fully_sharded);
  if (in_use_now >= 0) {
    std::snprintf(line, sizeof(line), "this process takes %.1f MiB now (Pss), all included\n",
                  mebibytes(in_use_now));
    text += line;
  }
  return text;
}

}  // namespace sirtaki
