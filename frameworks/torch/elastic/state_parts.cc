#include "frameworks/torch/elastic/state_parts.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/checkpoint/checkpoint_shards.h"
#include "frameworks/torch/checkpoint/scheduler_position.h"
#include "frameworks/torch/state/archive_broadcast.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/sharded_state.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/data_parallel.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/detail/gradient_reducer.h"
#include "sirtaki/detail/shard_copies.h"
#include "sirtaki/objects.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::elastic {
namespace {

using detail::ElasticCopy;
using detail::ElasticPart;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// `expected`: how many there may be.
std::string BytesOf(const Save& save, std::size_t expected = 0) {
  OutputArchive archive;
  save(archive);
  return detail::BytesOf(archive, expected);
}

void LoadBytes(const Load& load, const std::string& bytes) {
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), c10::kCPU);
  load(archive);
}

// `is_elsewhere` says that nothing is to be copied here; null: it never is.
ElasticCopy CopyOfArchive(const Save& save, const Load& load,
                          const std::function<bool()>& is_elsewhere = nullptr) {
  const auto kept = std::make_shared<std::string>();
  return {[save, kept, is_elsewhere] {
            const bool skips = is_elsewhere && is_elsewhere();
            return detail::ElasticKeep(kept, skips ? std::string() : BytesOf(save, kept->size()));
          },
          [load, kept] {
            if (!kept->empty()) LoadBytes(load, *kept);
          }};
}

template <class Scheduler>
ElasticPart PartOfAnyScheduler(const std::string& name, Scheduler& scheduler) {
  const Save save = [&scheduler](OutputArchive& archive) {
    for (const auto& [key, number] : detail::PositionOf(scheduler)) {
      archive.write(key, c10::IValue(number));
    }
  };
  const Load load = [&scheduler](InputArchive& archive) {
    detail::SchedulerPosition position = detail::PositionOf(scheduler);
    for (auto& [key, number] : position) {
      c10::IValue value;
      archive.read(key, value);
      number = value.toDouble();
    }
    detail::SetPosition(scheduler, position);
  };
  return PartOfArchive("scheduler", name, save, load);
}

bool IsSharded(const DistributedOptimizerOptions& options) {
  return detail::ShardOfJob(options.shard()) != Shard::None;
}

// Why an optimizer cannot be made again for other ranks; empty: it can.
std::string WhyNot(const DistributedOptimizerOptions& options) {
  if (IsSharded(options) && !detail::IsElastic()) {
    return "is sharded, and nobody keeps copies of shards in a job that is not elastic: use "
           "sirtakirun --elastic, or Shard::None, or checkpoints and sirtakirun --max-restarts";
  }
  if (options.process_set().membership() != nullptr) {
    return "averages over a process set, which ends with the ranks that it was made of: let it "
           "average over all ranks";
  }
  return {};
}

void CheckMayChange(const std::string& name, const DistributedOptimizerOptions& options) {
  const std::string why = WhyNot(options);
  if (!why.empty()) RefuseState(core::StatusCode::kUnsupported, "the " + name + " " + why);
}

using NamedCopies = std::vector<std::pair<std::string, at::Tensor>>;

NamedCopies TensorsOf(const torch::nn::Module& module, const Tensors* skipped = nullptr) {
  NamedCopies tensors;
  const auto is_skipped = [skipped](const at::Tensor& tensor) {
    return skipped != nullptr && skipped->contains(tensor.unsafeGetTensorImpl());
  };
  const auto take = [&tensors, &is_skipped](const auto& named) {
    for (const auto& item : named) {
      if (!item.value().defined() || is_skipped(item.value())) continue;
      tensors.emplace_back(item.key(), item.value());
    }
  };
  take(module.named_parameters());
  take(module.named_buffers());
  return tensors;
}

NamedCopies CopiesOf(const torch::nn::Module& module, const Tensors* skipped) {
  const at::NoGradGuard no_grad;
  NamedCopies copies = TensorsOf(module, skipped);
  for (auto& [_, tensor] : copies) tensor = tensor.detach().clone();
  return copies;
}

void RestoreModule(const NamedCopies& now, const NamedCopies& kept, const std::string& name) {
  const at::NoGradGuard no_grad;
  const auto same_name = [](const auto& a, const auto& b) { return a.first == b.first; };
  if (!std::equal(now.begin(), now.end(), kept.begin(), kept.end(), same_name)) {
    RefuseState(core::StatusCode::kInvalidArgument,
                "the " + name + " has got or lost parameters or buffers since the last commit()");
  }
  for (std::size_t i = 0; i < now.size(); ++i) now[i].second.detach().copy_(kept[i].second);
}

ElasticCopy CopyOfModule(torch::nn::Module& module, const std::string& title,
                         const Tensors* skipped) {
  const auto kept = std::make_shared<NamedCopies>();
  return {
      [&module, kept, skipped] { return detail::ElasticKeep(kept, CopiesOf(module, skipped)); },
      [&module, kept, skipped, title] { RestoreModule(TensorsOf(module, skipped), *kept, title); },
  };
}

ElasticCopy CopyOfOptions(torch::optim::Optimizer& optimizer) {
  using Options = std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>;
  const auto kept = std::make_shared<Options>();
  ElasticCopy copy;
  copy.save = [&optimizer, kept] {
    Options options;
    for (const auto& group : optimizer.param_groups()) {
      options.push_back(group.has_options() ? group.options().clone() : nullptr);
    }
    return detail::ElasticKeep(kept, std::move(options));
  };
  copy.restore = [&optimizer, kept] {
    auto& groups = optimizer.param_groups();
    for (std::size_t i = 0; i < groups.size() && i < kept->size(); ++i) {
      if ((*kept)[i]) groups[i].set_options((*kept)[i]->clone());
    }
  };
  return copy;
}

using detail::ShardCopies;

std::string SaveShards(detail::GradientReducer& reducer, torch::optim::Optimizer& optimizer) {
  if (!reducer.has_sharded_state()) return {};
  const bool is_on_each_host = reducer.options().shard_over() == ShardOver::Host;
  return (is_on_each_host ? ShardCopies::kOfEachHost : ShardCopies::kOfJob) +
         BytesOf([&](OutputArchive& archive) { reducer.SaveShards(optimizer, archive); });
}

void LoadArchive(const std::string& shards, InputArchive* archive) {
  archive->load_from(shards.data() + 1, shards.size() - 1, c10::kCPU);
}

void RestoreShards(detail::GradientReducer& reducer, torch::optim::Optimizer& optimizer,
                   const std::string& shards) {
  InputArchive archive;
  LoadArchive(shards, &archive);
  std::unordered_map<const void*, at::Tensor> mine;
  for (const detail::ShardOfParameter& one : detail::CutAgain(reducer, optimizer)) {
    if (one.shard.defined()) mine[one.parameter.unsafeGetTensorImpl()] = one.shard;
  }
  const auto ranges = detail::ShardCover(detail::DescribeOptimizer(optimizer)).RangesOf(archive);
  std::vector<std::vector<at::Tensor>> groups;
  std::size_t place = 0;
  for (const auto& group : optimizer.param_groups()) {
    std::vector<at::Tensor>& of_group = groups.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const std::int64_t count = ranges[place++].count;
      if (count == 0) continue;
      of_group.push_back(count == parameter.numel() ? parameter
                                                    : mine.at(parameter.unsafeGetTensorImpl()));
    }
  }
  optimizer.state().clear();
  {
    const detail::InPlaceOfParameters in_place(optimizer, std::move(groups));
    detail::LoadOptimizer(optimizer, archive);
  }
  reducer.set_sharded_state(true);
}

detail::ElasticShards ShardsOf(detail::GradientReducer& reducer,
                               torch::optim::Optimizer& optimizer) {
  const auto all = std::make_shared<std::unique_ptr<detail::ShardsOfAllRanks>>();
  detail::ElasticShards shards;
  shards.save = [&reducer, &optimizer] { return SaveShards(reducer, optimizer); };
  shards.restore = [&reducer, &optimizer](const std::string& saved) {
    RestoreShards(reducer, optimizer, saved);
  };
  shards.begin = [&reducer, &optimizer, all] {  // a rank that is alone has no shards
    *all = reducer.is_sharded() ? std::make_unique<detail::ShardsOfAllRanks>(
                                      optimizer, detail::CutAgain(reducer, optimizer))
                                : std::make_unique<detail::ShardsOfAllRanks>(optimizer);
  };
  shards.add = [all](const std::string& saved) {
    if (saved.front() == ShardCopies::kAgain) return;
    InputArchive archive;
    LoadArchive(saved, &archive);
    try {
      (*all)->Add(archive);
    } catch (const std::runtime_error& error) {
      RefuseState(
          core::StatusCode::kInvalidArgument,
          "an optimizer cannot take the shards that were kept last: " + std::string(error.what()) +
              ". A sharded optimizer gets all its parameters before run()");
    }
  };
  shards.finish = [&reducer, all] {
    (*all)->Finish();
    all->reset();
    reducer.set_sharded_state(true);  // of a rank that is alone it does nothing
  };
  return shards;
}

// The module itself may be one, and some in it.
std::vector<detail::ModuleSynchronizer*> SynchronizersIn(torch::nn::Module& module) {
  std::vector<detail::ModuleSynchronizer*> found;
  const auto look_at = [&found](torch::nn::Module& one) {
    auto* const owner = dynamic_cast<detail::SynchronizerOwner*>(&one);
    if (owner != nullptr) found.push_back(&owner->synchronizer());
  };
  look_at(module);
  for (const auto& child : module.modules(/*include_self=*/false)) look_at(*child);
  return found;
}

}  // namespace

void RefuseState(core::StatusCode code, const std::string& text) {
  detail::ThrowStatus(core::Status(code, "elastic::State: " + text));
}

ElasticPart PartOfArchive(const char* kind, const std::string& name, const Save& save,
                          const Load& load) {
  ElasticPart part;
  part.name = detail::ElasticName(kind, name);
  part.commit = CopyOfArchive(save, load);
  part.step = CopyOfArchive(save, load);
  part.save = [save](const detail::WriteBytes& write) {
    OutputArchive archive;
    save(archive);
    archive.save_to(write);
  };
  part.load = [load](const detail::ReadBytes& read, const std::function<std::size_t()>& bytes) {
    InputArchive archive;
    archive.load_from(read, bytes, c10::kCPU);
    load(archive);
  };
  // Loading may drop something, as a GradScaler drops what its ranks have agreed on: the root loads
  // its own, too.
  part.given = [save, load] { LoadBytes(load, BytesOf(save)); };
  return part;
}

ElasticPart PartOfScheduler(const std::string& name, torch::optim::LRScheduler& scheduler) {
  return PartOfAnyScheduler(name, scheduler);
}

ElasticPart PartOfScheduler(const std::string& name,
                            torch::optim::ReduceLROnPlateauScheduler& scheduler) {
  return PartOfAnyScheduler(name, scheduler);
}

ElasticPart PartOfModel(const std::string& name, torch::nn::Module& module,
                        const Tensors* not_in_steps) {
  ElasticPart part;
  part.name = detail::ElasticName("model", name);
  part.commit = CopyOfModule(module, part.name, nullptr);
  part.step = CopyOfModule(module, part.name, not_in_steps);
  part.tensors = part.in_place = [&module] {
    std::vector<at::Tensor> tensors;
    for (const auto& [_, tensor] : TensorsOf(module)) tensors.push_back(tensor);
    return tensors;
  };
  part.describe = [&module] {
    std::vector<std::string> lines;
    for (const auto& [key, tensor] : TensorsOf(module)) {
      lines.push_back(core::Quoted(key) + " " + detail::TypeAndShape(tensor) +
                      detail::SplitText(tensor));
    }
    return lines;
  };
  for (const auto* const synchronizer : SynchronizersIn(module)) {
    CheckMayChange(part.name, synchronizer->options().gradients());
  }
  part.leave = [&module] {
    for (auto* const synchronizer : SynchronizersIn(module)) synchronizer->Leave();
    module.zero_grad();
  };
  part.renew = [&module] {
    for (auto* const synchronizer : SynchronizersIn(module)) synchronizer->Renew();
  };
  return part;
}

ElasticPart PartOfOptimizer(const std::string& name, torch::optim::Optimizer& optimizer) {
  const Save save = [&optimizer](OutputArchive& archive) {
    detail::SaveOptimizer(optimizer, archive);
  };
  const Load load = [&optimizer](InputArchive& archive) {
    detail::LoadOptimizer(optimizer, archive);
  };
  ElasticPart part = PartOfArchive("optimizer", name, save, load);
  part.step = CopyOfOptions(optimizer);
  part.tensors = [&optimizer] { return detail::ParametersOf(optimizer); };
  part.describe = [&optimizer] { return detail::DescribeForRanks(optimizer); };
  const detail::SavedPart for_ranks = detail::PartForRanks(optimizer);
  part.save = for_ranks.save;
  part.load = for_ranks.load;
  part.given = nullptr;
  detail::GradientReducer* const reducer = detail::ReducerOf(optimizer);
  if (reducer != nullptr) {
    CheckMayChange(part.name, reducer->options());
    part.renew = [reducer, &optimizer] { reducer->Renew(optimizer); };
    if (IsSharded(reducer->options())) {
      part.shards = ShardsOf(*reducer, optimizer);
      // State that is cut is kept by ShardCopies.
      part.commit = CopyOfArchive(save, load, [reducer] { return reducer->has_sharded_state(); });
    }
  }
  // The gradients belong to a step that is not made any more, and shards to the ranks of then.
  part.leave = [reducer, &optimizer] {
    if (reducer != nullptr) {
      if (reducer->has_sharded_state()) optimizer.state().clear();
      reducer->Leave();
    }
    optimizer.zero_grad();
  };
  return part;
}

}  // namespace sirtaki::elastic
