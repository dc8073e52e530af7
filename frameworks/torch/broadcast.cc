#include "sirtaki/broadcast.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <sstream>
#include <utility>

#include "frameworks/torch/agreement.h"
#include "frameworks/torch/pending_tensor.h"
#include "frameworks/torch/session_state.h"
#include "frameworks/torch/tensor_bridge.h"
#include "frameworks/torch/throw.h"

namespace sirtaki {
namespace {

using detail::PendingTensor;
using detail::SessionState;
using detail::TensorCall;
using StatePtr = std::shared_ptr<SessionState>;

std::shared_ptr<PendingTensor> StartBroadcast(const at::Tensor& tensor, int root_rank,
                                              std::string name, const StatePtr& session) {
  TensorCall call;
  call.kind = core::OpKind::kBroadcast;
  call.tensor = tensor;
  call.name = std::move(name);
  call.in_place = true;
  call.root = root_rank;
  return PendingTensor::Start(std::move(call), session);
}

void CheckRoot(int root_rank, const StatePtr& session) {
  if (root_rank >= 0 && root_rank < session->topology().size) return;
  detail::ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                                   "root rank " + std::to_string(root_rank) + " of a job of " +
                                       std::to_string(session->topology().size)));
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
    lines.push_back("\"" + list.names[i] + "\" " + detail::TypeAndShape(list.tensors[i]));
  }
  return lines;
}

void BroadcastAll(const NamedList& list, int root_rank, const Session& session) {
  const StatePtr state = detail::StateOf(session);
  detail::ThrowIfError(state->Check());
  detail::AgreeOnList("broadcast_parameters", Describe(list, root_rank), "", state);
  CheckRoot(root_rank, state);
  if (state->topology().size == 1) return;
  std::vector<std::shared_ptr<PendingTensor>> pending;
  for (std::size_t i = 0; i < list.names.size(); ++i) {
    if (!list.tensors[i].defined()) continue;
    pending.push_back(
        StartBroadcast(list.tensors[i], root_rank, "broadcast_parameters/" + list.names[i], state));
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

std::string Save(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return std::move(stream).str();
}

void Load(torch::optim::Optimizer& optimizer, const at::Tensor& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()),
                    static_cast<std::size_t>(bytes.numel()));
  // load() adds to what is there.
  optimizer.state().clear();
  optimizer.load(archive);
}

std::vector<std::string> DescribeGroups(const torch::optim::Optimizer& optimizer, int root_rank) {
  std::vector<std::string> lines = {"root rank " + std::to_string(root_rank)};
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      lines.push_back("parameter " + std::to_string(i) + " of group " + std::to_string(g) + ", " +
                      detail::TypeAndShape(parameters[i]));
    }
  }
  return lines;
}

}  // namespace

void broadcast_parameters(const torch::nn::Module& module, int root_rank, const Session& session) {
  NamedList list;
  for (const auto& item : module.named_parameters()) list.Add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) list.Add("buffer " + item.key(), item.value());
  BroadcastAll(list, root_rank, session);
}

void broadcast_parameters(const torch::OrderedDict<std::string, at::Tensor>& tensors, int root_rank,
                          const Session& session) {
  NamedList list;
  for (const auto& item : tensors) list.Add(item.key(), item.value());
  BroadcastAll(list, root_rank, session);
}

void broadcast_parameters(const std::vector<at::Tensor>& tensors, int root_rank,
                          const Session& session) {
  NamedList list;
  for (const at::Tensor& tensor : tensors) {
    list.Add("tensor " + std::to_string(list.names.size()), tensor);
  }
  BroadcastAll(list, root_rank, session);
}

// By the optimizer's own save and load, which know all optimizers and map parameters by position.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                               const Session& session) {
  const std::string what = "broadcast_optimizer_state";
  const StatePtr state = detail::StateOf(session);
  detail::ThrowIfError(state->Check());
  detail::AgreeOnList(what, DescribeGroups(optimizer, root_rank), "", state);
  CheckRoot(root_rank, state);
  if (state->topology().size == 1) return;

  const bool is_root = state->topology().rank == root_rank;
  std::string error;
  std::string saved;
  if (is_root) {
    try {
      saved = Save(optimizer);
    } catch (const std::exception& failure) {
      error = std::string("the state cannot be saved: ") + failure.what();
    }
  }
  detail::AgreeOnErrors(what + "/save", error, state);

  at::Tensor length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(saved.size());
  StartBroadcast(length, root_rank, what + "/length", state)->Synchronize();
  at::Tensor bytes = at::empty({*length.const_data_ptr<std::int64_t>()}, at::kByte);
  if (is_root && !saved.empty()) {
    std::memcpy(bytes.mutable_data_ptr(), saved.data(), saved.size());
    saved = std::string();
  }
  StartBroadcast(bytes, root_rank, what + "/bytes", state)->Synchronize();

  if (!is_root) {
    try {
      Load(optimizer, bytes);
    } catch (const std::exception& failure) {
      error = std::string("the state cannot be loaded: ") + failure.what();
    }
  }
  detail::AgreeOnErrors(what + "/load", error, state);
}

}  // namespace sirtaki
