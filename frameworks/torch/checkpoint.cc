#include "sirtaki/checkpoint.h"

#include <ATen/ops/empty.h>
#include <torch/serialize/archive.h>

#include <cstring>
#include <memory>
#include <optional>
#include <sstream>

#include "core/log.h"
#include "frameworks/torch/agreement.h"
#include "frameworks/torch/checkpoint_file.h"
#include "frameworks/torch/checkpoint_parts.h"
#include "frameworks/torch/throw.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/collectives.h"

namespace sirtaki {
namespace {

using detail::CheckpointParts;
using detail::Reader;
using detail::SessionState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using StatePtr = std::shared_ptr<SessionState>;

// The text of what it throws; empty if it throws nothing.
template <class Call>
std::string ErrorOf(const Call& call) {
  try {
    call();
    return {};
  } catch (const std::exception& error) {
    return detail::TextOf(error);
  }
}

// Every rank must have the same parts. `what`: save_checkpoint or load_checkpoint.
StatePtr Begin(const std::string& what, const CheckpointParts& parts, const Session& session) {
  const StatePtr state = detail::StateOf(session);
  detail::ThrowIfError(state->Check());
  detail::AgreeOnList(what, detail::DescribeParts(parts), detail::WhyNoCheckpoint(parts), state);
  return state;
}

// Of all ranks, a row each. Collective.
std::vector<at::Tensor> GatherGeneratorStates(const CheckpointParts& parts,
                                              const Session& session) {
  std::vector<at::Tensor> states;
  for (const auto& [name, generator] : detail::GeneratorsOf(parts)) {
    states.push_back(allgather(detail::StateOfGenerator(generator).unsqueeze(0),
                               AllgatherOptions().name("sirtaki/save_checkpoint/generator " + name),
                               session));
  }
  return states;
}

// What rank 0 found. The same on all ranks after ShareOutcome.
struct Outcome {
  bool found = false;
  int ranks = 0;  // that wrote it
};

// Loading that can still be taken back: a failure on any rank leaves all as they were.
class Restoring {
 public:
  Restoring(const CheckpointParts& parts, const Reader& reader)
      : parts_(parts), reader_(reader), small_parts_(parts) {}

  // By rank 0. `small`: what the others need beside models and optimizers.
  Outcome FromFile(const std::string& path, std::string* small) {
    Outcome outcome;
    InputArchive archive;
    outcome.found = detail::ReadCheckpointFile(path, &archive);
    if (!outcome.found) return outcome;
    const std::string error = ErrorOf([&] {
      outcome.ranks = detail::ReadHeader(archive);
      models_.emplace(parts_, archive);
      optimizers_.emplace(parts_);
      detail::LoadOptimizers(parts_, archive);
      detail::ReadSmallParts(parts_, reader_, archive);
      OutputArchive for_others;
      detail::WriteSmallParts(parts_, detail::ReadGeneratorStates(parts_, archive), for_others);
      *small = detail::ToBytes(for_others);
    });
    if (!error.empty()) throw std::runtime_error(path + ": " + error);
    return outcome;
  }

  // By the others.
  void FromBytes(const at::Tensor& small) {
    InputArchive archive;
    archive.load_from(static_cast<const char*>(small.const_data_ptr()),
                      static_cast<std::size_t>(small.numel()), c10::kCPU);
    detail::ReadSmallParts(parts_, reader_, archive);
  }

  void Keep() {
    small_parts_.Keep();
    if (optimizers_) optimizers_->Keep();
    if (models_) models_->Apply();
  }

 private:
  const CheckpointParts& parts_;
  const Reader reader_;
  detail::SmallPartsUndo small_parts_;
  std::optional<detail::OptimizerUndo> optimizers_;
  std::optional<detail::ReadModels> models_;
};

at::Tensor FromRoot(at::Tensor tensor, const std::string& name, const Session& session) {
  return broadcast_(tensor, 0, BroadcastOptions().name("sirtaki/load_checkpoint/" + name), session);
}

// Gives the others what rank 0 found, and the length of what it has for them. Collective.
Outcome ShareOutcome(const Outcome& of_root, std::int64_t* bytes, const Session& session) {
  at::Tensor facts = at::empty({3}, at::kLong);
  auto* numbers = facts.mutable_data_ptr<std::int64_t>();
  numbers[0] = of_root.found ? 1 : 0;
  numbers[1] = of_root.ranks;
  numbers[2] = *bytes;
  FromRoot(facts, "outcome", session);
  *bytes = numbers[2];
  return {numbers[0] != 0, static_cast<int>(numbers[1])};
}

}  // namespace

void save_checkpoint(const std::string& path, const Checkpoint& checkpoint,
                     const Session& session) {
  const CheckpointParts& parts = checkpoint.parts();
  const StatePtr state = Begin("save_checkpoint", parts, session);
  const auto generator_states = GatherGeneratorStates(parts, session);
  std::string error;
  if (state->topology().rank == 0) {
    error = ErrorOf([&] {
      OutputArchive archive;
      detail::WriteHeader(state->topology().size, archive);
      detail::WriteModels(parts, archive);
      detail::WriteOptimizers(parts, archive);
      detail::WriteSmallParts(parts, generator_states, archive);
      detail::WriteCheckpointFile(path, archive);
    });
  }
  detail::AgreeOnErrors("save_checkpoint/write", error, state);
}

bool load_checkpoint(const std::string& path, const Checkpoint& checkpoint,
                     const Session& session) {
  const CheckpointParts& parts = checkpoint.parts();
  const StatePtr state = Begin("load_checkpoint", parts, session);
  const Reader reader = {state->topology().rank, state->topology().size};
  const bool is_root = reader.rank == 0;
  std::optional<Restoring> restoring;
  Outcome outcome;
  std::string small;
  std::string error = ErrorOf([&] {
    restoring.emplace(parts, reader);
    if (is_root) outcome = restoring->FromFile(path, &small);
  });
  detail::AgreeOnErrors("load_checkpoint/read", error, state);

  auto bytes = static_cast<std::int64_t>(small.size());
  outcome = ShareOutcome(outcome, &bytes, session);
  if (outcome.found) {
    at::Tensor buffer = at::empty({bytes}, at::kByte);
    if (is_root) std::memcpy(buffer.mutable_data_ptr(), small.data(), small.size());
    FromRoot(buffer, "parts", session);
    if (!is_root) error = ErrorOf([&] { restoring->FromBytes(buffer); });
    detail::AgreeOnErrors("load_checkpoint/parts", error, state);
  }
  restoring->Keep();
  if (!outcome.found) return false;

  for (const auto& one : parts.models) broadcast_parameters(*one.part, 0, session);
  for (const auto& one : parts.optimizers) broadcast_optimizer_state(*one.part, 0, session);
  if (is_root && outcome.ranks != reader.ranks) {
    SIRTAKI_LOG(kWarning, "load_checkpoint: " << path << " was written by " << outcome.ranks
                                              << " ranks and is read by " << reader.ranks
                                              << ": random generators are seeded anew");
  }
  return true;
}

}  // namespace sirtaki
