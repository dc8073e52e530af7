#include "sirtaki/broadcast.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <exception>
#include <memory>
#include <utility>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

using detail::PendingTensor;
using detail::SessionSet;
using detail::TensorCall;

std::shared_ptr<PendingTensor> StartBroadcast(const at::Tensor& tensor, int root_rank,
                                              std::string name, const SessionSet& set) {
  TensorCall call;
  call.kind = core::OpKind::kBroadcast;
  call.tensor = tensor;
  call.name = std::move(name);
  call.process_set = set.process_set;
  call.in_place = true;
  call.root = root_rank;
  return PendingTensor::Start(std::move(call), set.session);
}

struct NamedList {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;

  void Add(std::string name, const at::Tensor& tensor) {
    names.push_back(std::move(name));
    tensors.push_back(tensor);
  }
};

// What this rank has, for the comparison. A wrong root on one rank is a difference like any other.
std::vector<std::string> Describe(const NamedList& list, int root_rank) {
  std::vector<std::string> lines = {"root rank " + std::to_string(root_rank)};
  for (std::size_t i = 0; i < list.names.size(); ++i) {
    lines.push_back("\"" + list.names[i] + "\" " + detail::TypeAndShape(list.tensors[i]) +
                    detail::SplitText(list.tensors[i]));
  }
  return lines;
}

void BroadcastAll(const NamedList& list, int root_rank, const ProcessSet& process_set) {
  const SessionSet set = detail::SetOf(process_set);
  detail::ThrowIfError(set.session->Check());
  detail::TakeSlots(list.tensors, *set.session);
  detail::AgreeOnList("broadcast_parameters", Describe(list, root_rank), "", set);
  detail::CheckRoot(root_rank, set);
  if (set.size() == 1) return;
  std::vector<std::shared_ptr<PendingTensor>> pending;
  for (std::size_t i = 0; i < list.names.size(); ++i) {
    if (!list.tensors[i].defined()) continue;
    pending.push_back(
        StartBroadcast(list.tensors[i], root_rank, "broadcast_parameters/" + list.names[i], set));
  }
  // All are waited for before the first error is thrown, so that no rank leaves another waiting.
  std::exception_ptr first_error;
  for (const auto& one : pending) {
    try {
      one->Synchronize();
    } catch (...) {
      if (!first_error) first_error = std::current_exception();
    }
  }
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace

void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                          const ProcessSet& process_set) {
  NamedList list;
  for (const auto& item : module.named_parameters()) list.Add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) list.Add("buffer " + item.key(), item.value());
  BroadcastAll(list, root_rank, process_set);
}

void broadcast_parameters(const torch::OrderedDict<std::string, at::Tensor>& tensors, int root_rank,
                          const ProcessSet& process_set) {
  NamedList list;
  for (const auto& item : tensors) list.Add(item.key(), item.value());
  BroadcastAll(list, root_rank, process_set);
}

void broadcast_parameters(const std::vector<at::Tensor>& tensors, int root_rank,
                          const ProcessSet& process_set) {
  NamedList list;
  for (const at::Tensor& tensor : tensors) {
    list.Add("tensor " + std::to_string(list.names.size()), tensor);
  }
  BroadcastAll(list, root_rank, process_set);
}

}  // namespace sirtaki
