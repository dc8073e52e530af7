#include <c10/core/Device.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/archive_broadcast.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/broadcast.h"

namespace sirtaki {
namespace {

// What has to agree before the state of one rank can be that of another.
std::vector<std::string> Describe(const torch::optim::Optimizer& optimizer, int root_rank) {
  std::vector<std::string> lines = {"root rank " + std::to_string(root_rank),
                                    c10::demangle(typeid(optimizer).name())};
  for (std::string& line : detail::DescribeOptimizer(optimizer)) lines.push_back(std::move(line));
  return lines;
}

}  // namespace

void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                               const ProcessSet& process_set) {
  const std::string call = "broadcast_optimizer_state";
  const detail::SessionSet set = detail::SetOf(process_set);
  detail::ThrowIfError(set.session->Check());
  detail::AgreeOnList(call, Describe(optimizer, root_rank), "", set);

  std::optional<torch::serialize::OutputArchive> saved;
  const auto save = [&](const detail::WriteBytes& write) {
    if (!saved) detail::SaveOptimizer(optimizer, saved.emplace());
    saved->save_to(write);
  };
  const auto load = [&](const detail::ReadBytes& read, const std::function<std::size_t()>& size) {
    // Before the new state takes its memory.
    optimizer.state().clear();
    torch::serialize::InputArchive archive;
    // The state is loaded on the CPU, not where it was: the root's GPU may be none of this rank's.
    archive.load_from(read, size, c10::kCPU);
    detail::LoadOptimizer(optimizer, archive);
  };
  detail::BroadcastArchive(save, load, root_rank, call, "sirtaki/" + call + "/state", set);
}

}  // namespace sirtaki
