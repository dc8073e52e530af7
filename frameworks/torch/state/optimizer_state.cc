#include <c10/core/Device.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <stdexcept>
#include <string>
#include <typeinfo>
#include <vector>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/archive_broadcast.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/detail/gradient_reducer.h"

namespace sirtaki {
namespace {

// Where the ranks have the state in shards, there is nothing of it that one could give the others.
void SaveOptions(const torch::optim::Optimizer& optimizer,
                 torch::serialize::OutputArchive& archive) {
  torch::serialize::OutputArchive options(archive.compilation_unit());
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    torch::serialize::OutputArchive one(archive.compilation_unit());
    optimizer.param_groups()[g].options().serialize(one);
    options.write(std::to_string(g), one);
  }
  archive.write("options", options);
}

// False if the archive has more than options.
bool LoadOptions(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive options;
  if (!archive.try_read("options", options)) return false;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    torch::serialize::InputArchive one;
    options.read(std::to_string(g), one);
    optimizer.param_groups()[g].options().serialize(one);
  }
  return true;
}

}  // namespace

namespace detail {

std::vector<std::string> DescribeForRanks(const torch::optim::Optimizer& optimizer) {
  std::vector<std::string> lines = DescribeOptimizer(optimizer, &PlaceText);
  lines.insert(lines.begin(), c10::demangle(typeid(optimizer).name()));
  return lines;
}

SavedPart PartForRanks(torch::optim::Optimizer& optimizer) {
  const auto is_sharded = [&optimizer] {
    const GradientReducer* const reducer = ReducerOf(optimizer);
    return reducer != nullptr && reducer->has_sharded_state();
  };
  SavedPart part;
  part.save = [&optimizer, is_sharded](const WriteBytes& write) {
    torch::serialize::OutputArchive saved;
    is_sharded() ? SaveOptions(optimizer, saved) : SaveOptimizer(optimizer, saved);
    saved.save_to(write);
  };
  part.load = [&optimizer, is_sharded](const ReadBytes& read,
                                       const std::function<std::size_t()>& size) {
    const GradientReducer* const reducer = ReducerOf(optimizer);
    // Before the new state takes its memory, unless the root may give none.
    if (reducer == nullptr || !reducer->is_sharded()) optimizer.state().clear();
    torch::serialize::InputArchive archive;
    // The state is loaded on the CPU, not where it was: the root's GPU may be none of this rank's.
    archive.load_from(read, size, c10::kCPU);
    if (!LoadOptions(optimizer, archive)) return LoadOptimizer(optimizer, archive);
    if (is_sharded()) return;
    throw std::runtime_error(
        "the root has the state of its shards only, as it is after a step, and this rank has state "
        "of whole parameters: load it on all ranks, or on the root");
  };
  return part;
}

}  // namespace detail

void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                               const ProcessSet& process_set) {
  const std::string call = "broadcast_optimizer_state";
  const detail::SessionSet set = detail::SetOf(process_set);
  detail::ThrowIfError(set.session->Check());
  std::vector<std::string> lines = detail::DescribeForRanks(optimizer);
  lines.insert(lines.begin(), "root rank " + std::to_string(root_rank));
  detail::AgreeOnList(call, lines, "", set);
  const detail::SavedPart part = detail::PartForRanks(optimizer);
  detail::BroadcastArchive(part.save, part.load, root_rank, call, "sirtaki/" + call + "/state",
                           set);
}

}  // namespace sirtaki
