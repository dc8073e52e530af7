#include "sirtaki/broadcast.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <utility>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/named_parameters.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

using detail::SessionSet;

// What this rank has, for the comparison. A wrong root on one rank is a difference like any other.
std::vector<std::string> Describe(const NamedTensors& list, int root_rank) {
  std::vector<std::string> lines = {"root rank " + std::to_string(root_rank)};
  for (const auto& [name, tensor] : list) {
    lines.push_back("\"" + name + "\" " + detail::TypeAndShape(tensor) + detail::PlaceText(tensor));
  }
  return lines;
}

void BroadcastAll(const NamedTensors& list, int root_rank, const ProcessSet& process_set) {
  const SessionSet set = detail::SetOf(process_set);
  detail::ThrowIfError(set.session->Check());
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : list) tensors.push_back(tensor);
  detail::TakeSlots(tensors, *set.session);
  detail::AgreeOnList("broadcast_parameters", Describe(list, root_rank), "", set);
  detail::CheckRoot(root_rank, set);
  if (set.size() == 1) return;
  detail::PendingBroadcasts pending;
  for (const auto& [name, tensor] : list) {
    if (!tensor.defined()) continue;
    pending.Start(tensor, root_rank, "broadcast_parameters/" + name, set);
  }
  pending.Wait();
}

}  // namespace

void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                          const ProcessSet& process_set) {
  BroadcastAll(detail::TensorsOf(module), root_rank, process_set);
}

void broadcast_parameters(const torch::OrderedDict<std::string, at::Tensor>& tensors, int root_rank,
                          const ProcessSet& process_set) {
  BroadcastAll(tensors.pairs(), root_rank, process_set);
}

void broadcast_parameters(const std::vector<at::Tensor>& tensors, int root_rank,
                          const ProcessSet& process_set) {
  NamedTensors list;
  for (const at::Tensor& tensor : tensors) {
    list.emplace_back("tensor " + std::to_string(list.size()), tensor);
  }
  BroadcastAll(list, root_rank, process_set);
}

}  // namespace sirtaki
