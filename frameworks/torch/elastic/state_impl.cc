#include "frameworks/torch/elastic/state_impl.h"

#include <ATen/Context.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstddef>
#include <unordered_set>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/archive_broadcast.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/collectives.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/detail/gradient_reducer.h"
#include "sirtaki/session.h"

namespace sirtaki::elastic {

using detail::ElasticCopy;
using detail::ElasticPart;

namespace {

// The streams on which the tensors are made have done that when an element of one is here.
class Awaited {
 public:
  void Add(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta() || tensor.numel() == 0) return;
    if (devices_.insert(tensor.device()).second) {
      (void)tensor.detach().flatten().slice(0, 0, 1).cpu();
    }
  }
  std::vector<c10::Device> devices() const { return {devices_.begin(), devices_.end()}; }

 private:
  std::unordered_set<c10::Device> devices_;
};

}  // namespace

State::Impl::Keep State::Impl::Copy(ElasticCopy ElasticPart::*which) const {
  Keep keep;
  for (const ElasticPart& part : parts) keep.push_back((part.*which).save());
  return keep;
}

void State::Impl::Replace(const Keep& keep) {
  for (const auto& one : keep) one();
}

void State::Impl::Restore(ElasticCopy ElasticPart::*which) const {
  for (const ElasticPart& part : parts) (part.*which).restore();
}

std::vector<c10::Device> State::Impl::AwaitGpus() const {
  if (!at::hasCUDA()) return {};
  Awaited awaited;
  for (const ElasticPart& part : parts) {
    if (!part.tensors) continue;
    for (const at::Tensor& tensor : part.tensors()) awaited.Add(tensor);
  }
  return awaited.devices();
}

void State::Impl::Commit(std::int64_t at, bool is_agreed_on) {
  const Keep keep = Copy(&ElasticPart::commit);
  const auto gpus = AwaitGpus();
  detail::ThrowIfError(detail::CurrentSession()->Check());
  if (HasShards() && !is_agreed_on) KeepShards(at);
  NoteCommit(keep, at, gpus);
  if (HasShards() && is_agreed_on) KeepShards(at);
}

bool State::Impl::HasShards() const {
  return std::any_of(parts.begin(), parts.end(), [](const auto& one) { return one.shards.save; });
}

void State::Impl::KeepShards(std::int64_t at) {
  detail::ShardCopies::Shards mine;
  for (const ElasticPart& part : parts) {
    if (part.shards.save) mine.push_back(part.shards.save());
  }
  leaves ? copies.KeepForChange(at, std::move(mine))
         : copies.Keep(at, std::move(mine), copy_every >= 0);
}

void State::Impl::LeaveForChange() {
  if (HasShards()) {
    leaves = true;
    const detail::Scope stays([this] { leaves = false; });
    Commit(place + 1);
  }
  throw HostsUpdated();
}

void State::Impl::RestoreShards() const {
  const detail::ShardCopies::Shards mine = copies.Mine();
  auto saved = mine.begin();
  for (const ElasticPart& part : parts) {
    if (!part.shards.save || saved == mine.end()) continue;
    if (!saved->empty()) part.shards.restore(*saved);
    ++saved;
  }
}

void State::Impl::NoteCommit(const Keep& keep, std::int64_t at,
                             const std::vector<c10::Device>& gpus) {
  Replace(keep);
  random_at_step = {};
  if (keeps_random) random_before = std::exchange(random_at_commit, RandomState(at, gpus));
  has_copy = true;
  place = committed_at = at;
  stepped_at = -1;
  steps_since_commit = 0;
}

void State::Impl::KeepStep() {
  const Keep keep = Copy(&ElasticPart::step);
  const auto gpus = AwaitGpus();
  const core::Status status = detail::CurrentSession()->Check();
  // What the step has launched on a GPU may be broken off as well. On CPUs it is made.
  if (!gpus.empty()) detail::ThrowIfError(status);
  RandomState random = keeps_random ? RandomState(place + 1, gpus) : RandomState();
  Replace(keep);
  random_at_step = std::move(random);
  stepped_at = ++place;
  begun = StepsBegun();
  versions = Versions();
  detail::ThrowIfError(status);
}

void State::Impl::RestoreCommit() {
  Restore(&ElasticPart::commit);
  place = committed_at;
  stepped_at = -1;
  is_receiving = false;
}

bool State::Impl::IsAtStep() const {
  return stepped_at >= 0 && !is_receiving && begun == StepsBegun() && versions == Versions();
}

void State::Impl::GoBack() {
  goes_back = true;
  if (!IsAtStep()) return RestoreCommit();
  Restore(&ElasticPart::step);
  place = stepped_at;
}

void State::Impl::RestoreRandom(std::int64_t at) {
  for (const RandomState* const kept : {&random_at_step, &random_at_commit, &random_before}) {
    if (kept->place() == at) return kept->Restore();
  }
}

std::int64_t State::Impl::StepsBegun() const {
  std::int64_t steps = 0;
  for (const auto& [_, optimizer] : optimizers)
    steps += detail::ReducerOf(*optimizer)->steps_begun();
  return steps;
}

bool State::Impl::NeverKnowsSteps() const {
  return HasShards() || std::any_of(optimizers.begin(), optimizers.end(), [](const auto& one) {
           return detail::ReducerOf(*one.second) == nullptr;
         });
}

std::string State::Impl::LookAtOptimizers() {
  std::vector<at::Tensor> now;
  for (const auto& [_, optimizer] : optimizers) {
    const std::vector<at::Tensor> parameters = detail::ParametersOf(*optimizer);
    now.insert(now.end(), parameters.begin(), parameters.end());
  }
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  const bool is_known = knows_steps && std::equal(now.begin(), now.end(), looked_at.begin(),
                                                  looked_at.end(), is_same);
  if (is_known) return {};
  of_optimizers.clear();
  for (const at::Tensor& parameter : now) of_optimizers.insert(parameter.unsafeGetTensorImpl());
  looked_at = std::move(now);
  std::string why = WhyStepsAreUnknown();
  knows_steps = why.empty();
  return why;
}

void State::Impl::ConfirmCopies() {
  barrier(BarrierOptions().name("sirtaki/elastic copies are kept"));
  copies.Confirm();
}

bool State::Impl::IsToChange() {
  if (!elastic::is_elastic()) return false;
  const bool changes = rank() == 0 && !detail::ElasticChange().empty();
  at::Tensor told = at::full({1}, changes ? 1 : 0, at::kByte);
  broadcast_(told, 0, BroadcastOptions().name("sirtaki/commit() or check_changes()"));
  copies.Confirm();
  return told.item<std::uint8_t>() != 0;
}

State::Impl::VersionList State::Impl::Versions() const {
  VersionList list;
  for (const auto& [_, optimizer] : optimizers) {
    for (const at::Tensor& parameter : detail::ParametersOf(*optimizer)) {
      list.emplace_back(parameter.unsafeGetTensorImpl(), detail::VersionOf(parameter));
    }
  }
  return list;
}

std::string State::Impl::WhyStepsAreUnknown() const {
  for (const auto& [name, model] : models) {
    for (const auto& item : model->named_parameters()) {
      const auto* const parameter = item.value().unsafeGetTensorImpl();
      if (item.value().requires_grad() && !of_optimizers.contains(parameter)) {
        return "the " + name + " trains " + core::Quoted(item.key()) +
               ", which no optimizer of the state has";
      }
    }
  }
  if (HasShards()) return "an optimizer of it is sharded";
  for (const auto& [name, optimizer] : optimizers) {
    if (detail::ReducerOf(*optimizer) == nullptr) {
      return "the " + name + " is no DistributedOptimizer, and does not tell when it makes a step";
    }
  }
  const std::vector<std::string> without = WithoutModels();
  return without.empty()
             ? ""
             : "the " + without.front() + " has a parameter that no model of the state has";
}

std::vector<std::string> State::Impl::WithoutModels() const {
  Tensors of_models;
  for (const auto& [_, model] : models) {
    for (const at::Tensor& parameter : model->parameters())
      of_models.insert(parameter.unsafeGetTensorImpl());
  }
  std::vector<std::string> names;
  for (const auto& [name, optimizer] : optimizers) {
    const bool is_known = std::ranges::all_of(
        detail::ParametersOf(*optimizer),
        [&](const at::Tensor& one) { return of_models.contains(one.unsafeGetTensorImpl()); });
    if (!is_known) names.push_back(name);
  }
  return names;
}

void State::Impl::WarnOfMissingModels() const {
  const std::vector<std::string> without = WithoutModels();
  if (without.empty() || rank() != 0) return;
  for (const std::string& name : without) {
    core::Log(core::LogLevel::kWarning,
              "elastic::run(): the " + name +
                  " has a parameter that no model of the state has. A worker that comes later "
                  "trains with its own first value of it, and after a loss nothing brings it back: "
                  "give the state the model, as in State().model(*model).optimizer(optimizer)");
  }
}

// Each rank gets its part of the shards that the ranks of the boundary had.
void State::Impl::ReceiveShards(const detail::ShardCopies::Boundary& boundary) const {
  std::vector<const ElasticPart*> sharded;
  for (const ElasticPart& part : parts) {
    if (part.shards.save) sharded.push_back(&part);
  }
  for (int shard = 0; shard < boundary.shards; ++shard) {
    const detail::ShardCopies::Shards saved = copies.Receive(shard);
    if (saved.size() != sharded.size()) {
      RefuseState(core::StatusCode::kInvalidArgument,
                  "it has " + std::to_string(sharded.size()) + " sharded optimizers, and had " +
                      std::to_string(saved.size()) +
                      " when their shards were kept last: add all of them before run()");
    }
    for (std::size_t i = 0; i < sharded.size(); ++i) {
      if (saved[i].empty()) {  // of an optimizer that has made no step
        if (shard == 0) Give({sharded[i]}, boundary.root);
        continue;
      }
      if (shard == 0) sharded[i]->shards.begin();
      sharded[i]->shards.add(saved[i]);
      if (shard + 1 == boundary.shards) sharded[i]->shards.finish();
    }
  }
}

// Compares what the ranks have, and returns the boundary that they go on from.
detail::ShardCopies::Boundary State::Impl::Agree(bool from_newest) {
  std::vector<std::string> lines;
  for (const ElasticPart& part : parts) {
    lines.push_back(part.name + part.type);
    for (const std::string& line : part.describe ? part.describe() : std::vector<std::string>()) {
      lines.push_back(part.name + ": " + line);
    }
  }
  // Each is sent once: ranks that have tied others would wait for ever.
  Tensors in_place;
  for (const ElasticPart& part : parts) {
    if (!part.in_place) continue;
    for (const at::Tensor& tensor : part.in_place()) in_place.insert(tensor.unsafeGetTensorImpl());
  }
  lines.push_back(std::to_string(in_place.size()) + " tensors of models");
  const std::vector<std::int64_t> places =
      detail::AgreeAndGather("elastic::State", lines, "", place, detail::CurrentSession());
  if (from_newest && HasShards()) return copies.Agree(place);
  const auto root = from_newest ? std::max_element(places.begin(), places.end()) : places.begin();
  return {*root, static_cast<int>(root - places.begin()), 0};
}

// Gives all ranks what the root has of these parts. Collective.
void State::Impl::Give(const std::vector<const ElasticPart*>& given, int root) const {
  std::vector<detail::SavedPart> saved;
  std::vector<at::Tensor> in_place;
  Tensors seen;
  for (const ElasticPart* const part : given) {
    if (part->save) saved.push_back({part->save, part->load});
    if (!part->in_place) continue;
    for (const at::Tensor& tensor : part->in_place()) {
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) in_place.push_back(tensor);
    }
  }
  detail::BroadcastTogether(saved, in_place, root, "elastic::State", detail::CurrentSession());
  if (rank() != root || size() == 1) return;
  for (const ElasticPart* const part : given) {
    if (part->given) part->given();
  }
}

void State::Impl::Sync(bool from_newest) {
  detail::ThrowIfError(detail::CurrentSession()->Check());
  const detail::ShardCopies::Boundary boundary = Agree(from_newest);
  const bool is_at_step = IsAtStep();
  is_receiving = rank() != boundary.root;
  // What the root has sent is marked as written to, and is what it was.
  const auto keep_step = [&] {
    if (!is_receiving && is_at_step) versions = Versions();
  };
  try {
    std::vector<const ElasticPart*> given;
    for (const ElasticPart& part : parts) {
      if (boundary.shards == 0 || !part.shards.save) given.push_back(&part);
    }
    Give(given, boundary.root);
    if (boundary.shards > 0) ReceiveShards(boundary);
  } catch (...) {
    keep_step();
    throw;
  }
  keep_step();  // a loss within the commit must not cost it either
  if (std::exchange(goes_back, false)) RestoreRandom(boundary.place);
  // The state that sync() gives is a boundary of its own: its shards are not those of the one before.
  Commit(boundary.place + (HasShards() && !from_newest ? 1 : 0), /*is_agreed_on=*/from_newest);
  is_receiving = false;
  if (elastic::is_elastic()) detail::TellElasticState(boundary.root);
}

}  // namespace sirtaki::elastic
