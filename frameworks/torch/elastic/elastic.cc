#include "sirtaki/elastic.h"

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/elastic/random_state.h"
#include "frameworks/torch/elastic/state_parts.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/collectives.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/detail/shard_copies.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/session.h"

namespace sirtaki::elastic {

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

using detail::ElasticCopy;
using detail::ElasticPart;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

struct State::Impl {
  using Keep = std::vector<std::function<void()>>;
  Keep Copy(ElasticCopy ElasticPart::*which) const {
    Keep keep;
    for (const ElasticPart& part : parts) keep.push_back((part.*which).save());
    return keep;
  }
  static void Replace(const Keep& keep) {
    for (const auto& one : keep) one();
  }
  void Restore(ElasticCopy ElasticPart::*which) const {
    for (const ElasticPart& part : parts) (part.*which).restore();
  }
  // Returns when all GPUs that the state lies on have done what they were given: which these are.
  std::vector<c10::Device> AwaitGpus() const {
    if (!at::hasCUDA()) return {};
    Awaited awaited;
    for (const ElasticPart& part : parts) {
      if (!part.tensors) continue;
      for (const at::Tensor& tensor : part.tensors()) awaited.Add(tensor);
    }
    return awaited.devices();
  }
  // After a fault a GPU may have what a collective has left that was broken off. That is known when
  // all is copied, and the last copy stays.
  // `is_agreed_on`: all ranks have the boundary's other parts already, whatever becomes of its shards.
  void Commit(std::int64_t at, bool is_agreed_on = false) {
    const Keep keep = Copy(&ElasticPart::commit);
    const auto gpus = AwaitGpus();
    detail::ThrowIfError(detail::CurrentSession()->Check());
    if (HasShards() && !is_agreed_on) KeepShards(at);
    NoteCommit(keep, at, gpus);
    if (HasShards() && is_agreed_on) KeepShards(at);
  }
  bool HasShards() const {
    return std::any_of(parts.begin(), parts.end(), [](const auto& one) { return one.shards.save; });
  }
  void KeepShards(std::int64_t at) {
    detail::ShardCopies::Shards mine;
    for (const ElasticPart& part : parts) {
      if (part.shards.save) mine.push_back(part.shards.save());
    }
    leaves ? copies.KeepForChange(at, mine) : copies.Keep(at, mine, copy_every >= 0);
  }
  // The ranks that are there after the change have other shards, and some that have some now may not be.
  [[noreturn]] void LeaveForChange() {
    if (HasShards()) {
      leaves = true;
      const detail::Scope stays([this] { leaves = false; });
      Commit(place + 1);
    }
    throw HostsUpdated();
  }
  // The parts whose shards these are, with the bytes of each.
  void RestoreShards() const {
    const detail::ShardCopies::Shards mine = copies.Mine();
    auto saved = mine.begin();
    for (const ElasticPart& part : parts) {
      if (!part.shards.save || saved == mine.end()) continue;
      if (!saved->empty()) part.shards.restore(*saved);
      ++saved;
    }
  }
  void ReceiveShards(const detail::ShardCopies::Boundary& boundary) const;
  void NoteCommit(const Keep& keep, std::int64_t at, const std::vector<c10::Device>& gpus) {
    Replace(keep);
    random_at_step = {};
    if (keeps_random) random_at_commit = RandomState(at, gpus);
    has_copy = true;
    place = committed_at = at;
    stepped_at = -1;
    steps_since_commit = 0;
  }
  void KeepStep() {
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
  void RestoreCommit() {
    Restore(&ElasticPart::commit);
    place = committed_at;
    stepped_at = -1;
    is_receiving = false;
  }
  // Says whether the parameters are those of the last step().
  bool IsAtStep() const {
    return stepped_at >= 0 && !is_receiving && begun == StepsBegun() && versions == Versions();
  }
  // Goes back to the last step() if no parameter has changed since, else to the last commit().
  void GoBack() {
    goes_back = true;
    if (!IsAtStep()) return RestoreCommit();
    Restore(&ElasticPart::step);
    place = stepped_at;
  }
  detail::ShardCopies::Boundary BoundaryOf(bool from_newest) const;
  void Sync(bool from_newest);
  // Draws go on where a loss has brought the training back to. A rank that has received a later place
  // had made its draws before that.
  void RestoreRandom(std::int64_t at) {
    for (const RandomState* const kept : {&random_at_step, &random_at_commit}) {
      if (kept->place() == at) return kept->Restore();
    }
  }

  std::int64_t StepsBegun() const {
    std::int64_t steps = 0;
    for (const auto& [_, optimizer] : optimizers)
      steps += detail::ReducerOf(*optimizer)->steps_begun();
    return steps;
  }
  // Looks at the parameters that the optimizers have now, and returns WhyStepsAreUnknown(). The answer
  // that they are known holds until the groups have others: what a model gets besides is copied.
  std::string LookAtOptimizers() {
    std::vector<at::Tensor> now;
    for (const auto& [_, optimizer] : optimizers) {
      const std::vector<at::Tensor> parameters = ParametersOf(*optimizer);
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
  // Returns whether ranks are to come or to go, on all ranks alike. All have kept the last commit when
  // it returns.
  bool IsToChange() {
    if (!elastic::is_elastic()) return false;
    const bool changes = rank() == 0 && !detail::ElasticChange().empty();
    at::Tensor told = at::full({1}, changes ? 1 : 0, at::kByte);
    broadcast_(told, 0, BroadcastOptions().name("sirtaki/elastic change"));
    copies.Confirm();
    return told.item<std::uint8_t>() != 0;
  }
  // How often each of them was written to.
  using VersionList = std::vector<std::pair<const c10::TensorImpl*, std::int64_t>>;
  VersionList Versions() const {
    VersionList list;
    for (const auto& [_, optimizer] : optimizers) {
      for (const at::Tensor& parameter : ParametersOf(*optimizer)) {
        list.emplace_back(parameter.unsafeGetTensorImpl(), detail::VersionOf(parameter));
      }
    }
    return list;
  }
  // Returns why the state may change unseen between two steps, or is not all of it. Empty: optimizers
  // that tell when they make a step have all parameters that are trained, and models all of those.
  std::string WhyStepsAreUnknown() const {
    Tensors of_models;
    for (const auto& [name, model] : models) {
      for (const auto& item : model->named_parameters()) {
        const auto* const parameter = item.value().unsafeGetTensorImpl();
        if (item.value().requires_grad() && !of_optimizers.contains(parameter)) {
          return "the " + name + " trains " + core::Quoted(item.key()) +
                 ", which no optimizer of the state has";
        }
        of_models.insert(parameter);
      }
    }
    if (HasShards()) return "an optimizer of it is sharded";
    for (const auto& [name, optimizer] : optimizers) {
      if (detail::ReducerOf(*optimizer) == nullptr) {
        return "the " + name +
               " is no DistributedOptimizer, and does not tell when it makes a step";
      }
      for (const at::Tensor& parameter : ParametersOf(*optimizer)) {
        if (!of_models.contains(parameter.unsafeGetTensorImpl())) {
          return "the " + name + " has a parameter that no model of the state has";
        }
      }
    }
    return {};
  }

  std::vector<ElasticPart> parts;
  std::vector<std::pair<std::string, torch::nn::Module*>> models;
  std::vector<std::pair<std::string, torch::optim::Optimizer*>> optimizers;
  std::vector<std::function<void()>> callbacks;
  std::int64_t commits = 0;
  bool has_copy = false;
  std::int64_t place = 0;  // calls of step() and commit() that the state has come through
  std::int64_t committed_at = 0;
  std::int64_t stepped_at = -1;       // -1: there was no step() since the commit()
  std::int64_t begun = 0;             // steps of optimizers before that
  VersionList versions;               // of their parameters, then
  std::vector<at::Tensor> looked_at;  // these parameters at the last step()
  Tensors of_optimizers;              // the same, which it has not copied
  bool knows_steps = false;           // with them, WhyStepsAreUnknown() has nothing to say
  bool has_warned = false;            // that step() does nothing
  bool is_receiving = false;          // it has some parts of another rank's state, and not all yet
  bool keeps_random = true;
  RandomState random_at_step;
  RandomState random_at_commit;
  bool goes_back = false;  // since a loss, and not there yet
  detail::ShardCopies copies;
  std::int64_t copy_every = 0;  // steps; -1: never
  std::int64_t steps_since_commit = 0;
  bool leaves = false;  // this generation, as ranks are to come or to go
};

// Each rank gets its part of the shards that the ranks of the boundary had.
void State::Impl::ReceiveShards(const detail::ShardCopies::Boundary& boundary) const {
  std::vector<const ElasticPart*> sharded;
  for (const ElasticPart& part : parts) {
    if (part.shards.save) sharded.push_back(&part);
  }
  for (int shard = 0; shard < boundary.shards; ++shard) {
    const detail::ShardCopies::Shards saved = copies.Receive(shard);
    for (std::size_t i = 0; i < sharded.size(); ++i) {
      if (saved[i].empty()) {  // of an optimizer that has made no step
        if (shard == 0) sharded[i]->sync(boundary.root);
        continue;
      }
      if (shard == 0) sharded[i]->shards.begin();
      sharded[i]->shards.add(saved[i]);
      if (shard + 1 == boundary.shards) sharded[i]->shards.finish();
    }
  }
}

// The boundary of a state that each rank has all of.
detail::ShardCopies::Boundary State::Impl::BoundaryOf(bool from_newest) const {
  const at::Tensor places =
      allgather(at::full({1}, place, at::kLong), AllgatherOptions().name("sirtaki/elastic place"));
  const auto* const begin = places.const_data_ptr<std::int64_t>();
  const auto root = from_newest ? std::max_element(begin, begin + places.numel()) - begin : 0;
  return {begin[root], static_cast<int>(root), 0};
}

void State::Impl::Sync(bool from_newest) {
  const auto session = detail::CurrentSession();
  detail::ThrowIfError(session->Check());
  std::vector<std::string> lines;
  for (const ElasticPart& part : parts) lines.push_back(part.name + part.type);
  detail::AgreeOnList("elastic::State", lines, "", session);
  const bool takes_shards = from_newest && HasShards();
  const detail::ShardCopies::Boundary boundary =
      takes_shards ? copies.Agree(place) : BoundaryOf(from_newest);
  const bool is_at_step = IsAtStep();
  is_receiving = rank() != boundary.root;
  try {
    for (const ElasticPart& part : parts) {
      if (boundary.shards == 0 || !part.shards.save) part.sync(boundary.root);
    }
    if (boundary.shards > 0) ReceiveShards(boundary);
  } catch (...) {
    // What the root has sent is marked as written to, and is what it was.
    if (!is_receiving && is_at_step) versions = Versions();
    throw;
  }
  if (std::exchange(goes_back, false)) RestoreRandom(boundary.place);
  // What sync() gives to all is a boundary of its own: shards are not those of the one before.
  Commit(boundary.place + (HasShards() && !from_newest ? 1 : 0), /*is_agreed_on=*/from_newest);
  is_receiving = false;
  if (elastic::is_elastic()) detail::TellElasticState();
}

bool is_elastic() { return detail::IsElastic(); }

int generation() { return is_elastic() ? detail::ElasticGeneration() : 0; }

HostsUpdated::HostsUpdated()
    : std::runtime_error("ranks of the elastic job are to come or to go: train in elastic::run()") {
}
HostsUpdated::HostsUpdated(const HostsUpdated&) noexcept = default;
HostsUpdated& HostsUpdated::operator=(const HostsUpdated&) noexcept = default;
HostsUpdated::~HostsUpdated() = default;

State::State() : impl_(std::make_shared<Impl>()) {}

State& State::Add(ElasticPart part) {
  for (const ElasticPart& other : impl_->parts) {
    if (other.name == part.name) {
      RefuseState(core::StatusCode::kInvalidArgument,
                  "the " + part.name + " is there already: give this one another name");
    }
  }
  impl_->parts.push_back(std::move(part));
  impl_->has_copy = impl_->knows_steps = false;
  impl_->stepped_at = -1;
  return *this;
}

State& State::AddObject(const char* kind, const std::string& name, detail::ArchivedObject object,
                        std::function<void()> renew) {
  ElasticPart part = PartOfArchive(kind, name, object.save, object.load);
  part.renew = std::move(renew);
  return Add(std::move(part));
}

State& State::model(torch::nn::Module& module, const std::string& name) {
  Add(PartOfModel(name, module, &impl_->of_optimizers));
  impl_->models.emplace_back(impl_->parts.back().name, &module);
  return *this;
}

State& State::optimizer(torch::optim::Optimizer& optimizer, const std::string& name) {
  Add(PartOfOptimizer(name, optimizer));
  impl_->optimizers.emplace_back(impl_->parts.back().name, &optimizer);
  return *this;
}

State& State::scheduler(torch::optim::LRScheduler& scheduler, const std::string& name) {
  return Add(PartOfScheduler(name, scheduler));
}

State& State::scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                        const std::string& name) {
  return Add(PartOfScheduler(name, scheduler));
}

State& State::sampler(DistributedSampler& sampler, const std::string& name) {
  detail::ArchivedObject archived;
  archived.save = [&sampler](OutputArchive& archive) { sampler.save(archive); };
  archived.load = [&sampler](InputArchive& archive) { sampler.load(archive); };
  return AddObject("sampler", name, std::move(archived),
                   [&sampler] { sampler.take_ranks_of_job(); });
}

State& State::on_change(std::function<void()> callback) {
  impl_->callbacks.push_back(std::move(callback));
  return *this;
}

State& State::keep_random_state(bool keeps) {
  impl_->keeps_random = keeps;
  impl_->random_at_step = impl_->random_at_commit = {};
  return *this;
}

State& State::copy_shards(std::int64_t every_steps) {
  if (every_steps < -1) {
    RefuseState(core::StatusCode::kInvalidArgument,
                "copy_shards(" + std::to_string(every_steps) +
                    "): it is a number of steps, 0 for each commit() alone, or -1 for no copies");
  }
  impl_->copy_every = every_steps;
  return *this;
}

void State::step() {
  if (impl_->copy_every > 0 && impl_->HasShards()) {
    if (++impl_->steps_since_commit == impl_->copy_every) impl_->Commit(impl_->place + 1);
    return;
  }
  const std::string why = impl_->LookAtOptimizers();
  if (why.empty()) return impl_->KeepStep();
  if (std::exchange(impl_->has_warned, true) || rank() != 0) return;
  core::Log(
      core::LogLevel::kWarning,
      "elastic::State: step() keeps nothing, and a loss goes back to the last commit(): " + why);
}

void State::commit() {
  impl_->Commit(impl_->place + 1);
  ++impl_->commits;
  if (impl_->IsToChange()) impl_->LeaveForChange();
}

void State::check_changes() {
  if (impl_->IsToChange()) impl_->LeaveForChange();
}

void State::restore() {
  if (!impl_->has_copy) {
    RefuseState(core::StatusCode::kInvalidArgument,
                "restore() was called before commit(), sync() or run()");
  }
  impl_->RestoreCommit();
  impl_->RestoreShards();
}

void State::sync() { impl_->Sync(/*from_newest=*/false); }

std::int64_t State::commits() const { return impl_->commits; }

}  // namespace sirtaki::elastic

namespace sirtaki::detail {
namespace {

bool EndsTheJob(const Error& error) {
  // The job cannot be joined again with as many ranks as before where one has ended.
  if (!elastic::is_elastic() &&
      std::string(error.what()).find("the program exited") != std::string::npos) {
    return false;
  }
  switch (error.code()) {
    case ErrorCode::PeerLost:
    case ErrorCode::TimedOut:
    case ErrorCode::Aborted:
    case ErrorCode::Backend:
    case ErrorCode::Protocol:
    case ErrorCode::ShutDown:
      return true;
    default:
      return false;
  }
}

}  // namespace

// The state that run() begins with is there to go back to, too.
ElasticAttempts::ElasticAttempts(elastic::State state) : state_(std::move(state)) {
  elastic::State::Impl& made = *state_.impl_;
  made.NoteCommit(made.Copy(&ElasticPart::commit), 0, {});
}

void ElasticAttempts::Begin() {
  elastic::State::Impl& state = *state_.impl_;
  if (joins_again_) {
    shutdown();
    InitAgain();
  }
  if (joins_again_ || sets_up_) {
    for (const ElasticPart& part : state.parts) {
      if (part.leave) part.leave();
    }
    // The state is restored here, when nothing of the job before writes to it any more.
    if (restores_) state.GoBack();
    restores_ = false;
    for (const ElasticPart& part : state.parts) {
      if (part.renew) part.renew();
    }
  }
  if (joins_again_) {
    for (const auto& callback : state.callbacks) callback();
  }
  joins_again_ = sets_up_ = false;
  state.Sync(/*from_newest=*/true);
}

bool ElasticAttempts::NoteError(const Error& error) {
  if (!EndsTheJob(error)) return false;
  if (!run_.GoesOnAfterError(error.code() == ErrorCode::PeerLost, state_.impl_->place))
    return false;
  joins_again_ = restores_ = true;
  return true;
}

}  // namespace sirtaki::detail
