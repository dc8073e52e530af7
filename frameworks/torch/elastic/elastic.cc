#include "sirtaki/elastic.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/checkpoint/scheduler_position.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/collectives.h"
#include "sirtaki/data_parallel.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/session.h"

namespace sirtaki::elastic {
namespace {

using detail::ElasticCopy;
using detail::ElasticPart;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

[[noreturn]] void Refuse(core::StatusCode code, const std::string& text) {
  detail::ThrowStatus(core::Status(code, "elastic::State: " + text));
}

// A part of an archive is copied as the bytes that it is saved in.
using Save = std::function<void(OutputArchive&)>;
using Load = std::function<void(InputArchive&)>;

ElasticCopy CopyOfArchive(const Save& save, const Load& load) {
  const auto kept = std::make_shared<std::string>();
  ElasticCopy copy;
  copy.save = [save, kept] {
    OutputArchive archive;
    save(archive);
    std::string bytes;
    archive.save_to([&bytes](const void* from, std::size_t size) {
      bytes.append(static_cast<const char*>(from), size);
      return size;
    });
    return detail::ElasticKeep(kept, std::move(bytes));
  };
  copy.restore = [load, kept] {
    InputArchive archive;
    archive.load_from(kept->data(), kept->size(), c10::kCPU);
    load(archive);
  };
  return copy;
}

ElasticPart PartOfArchive(const char* kind, const std::string& name, const Save& save,
                          const Load& load) {
  ElasticPart part;
  part.name = detail::ElasticName(kind, name);
  part.commit = CopyOfArchive(save, load);
  part.step = CopyOfArchive(save, load);
  part.sync = [save, load, key = detail::ElasticKey(part)](int root) {
    std::string sent;
    detail::BroadcastSaved(
        [&save, &sent](const detail::WriteBytes& write) {
          OutputArchive archive;
          save(archive);
          archive.save_to([&sent, &write](const void* from, std::size_t size) {
            sent.append(static_cast<const char*>(from), size);
            return write(from, size);
          });
        },
        [&load](const detail::ReadBytes& read, const std::function<std::size_t()>& size) {
          InputArchive archive;
          archive.load_from(read, size, c10::kCPU);
          load(archive);
        },
        root, key, {});
    if (sent.empty()) return;  // by another rank, or to nobody
    // What an object drops when it is loaded, say what its ranks have agreed on, all ranks drop.
    InputArchive archive;
    archive.load_from(sent.data(), sent.size(), c10::kCPU);
    load(archive);
  };
  return part;
}

template <class Scheduler>
ElasticPart PartOfScheduler(const std::string& name, Scheduler& scheduler) {
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

// Why an optimizer cannot be made again for other ranks; empty: it can.
std::string WhyNot(const DistributedOptimizerOptions& options) {
  if (detail::ShardOfJob(options.shard()) != Shard::None) {
    return "is sharded, and a rank that is lost takes its shards of the state with it: use "
           "Shard::None, or checkpoints and sirtakirun --max-restarts";
  }
  if (options.process_set().membership() != nullptr) {
    return "averages over a process set, which ends with the ranks that it was made of: let it "
           "average over all ranks";
  }
  return {};
}

void CheckMayChange(const std::string& name, const DistributedOptimizerOptions& options) {
  const std::string why = WhyNot(options);
  if (!why.empty()) Refuse(core::StatusCode::kUnsupported, "the " + name + " " + why);
}

using NamedCopies = std::vector<std::pair<std::string, at::Tensor>>;

using Tensors = std::unordered_set<const c10::TensorImpl*>;

NamedCopies TensorsOf(const torch::nn::Module& module, const Tensors& skipped = {}) {
  NamedCopies tensors;
  const auto take = [&tensors, &skipped](const auto& named) {
    for (const auto& item : named) {
      if (!item.value().defined() || skipped.contains(item.value().unsafeGetTensorImpl())) continue;
      tensors.emplace_back(item.key(), item.value());
    }
  };
  take(module.named_parameters());
  take(module.named_buffers());
  return tensors;
}

NamedCopies CopiesOf(const torch::nn::Module& module, const Tensors& skipped) {
  const at::NoGradGuard no_grad;
  NamedCopies copies = TensorsOf(module, skipped);
  for (auto& [_, tensor] : copies) tensor = tensor.detach().clone();
  return copies;
}

void RestoreModule(const NamedCopies& now, const NamedCopies& kept, const std::string& name) {
  const at::NoGradGuard no_grad;
  const auto same_name = [](const auto& a, const auto& b) { return a.first == b.first; };
  if (!std::equal(now.begin(), now.end(), kept.begin(), kept.end(), same_name)) {
    Refuse(core::StatusCode::kInvalidArgument,
           "the " + name + " has got or lost parameters or buffers since the last commit()");
  }
  for (std::size_t i = 0; i < now.size(); ++i) now[i].second.detach().copy_(kept[i].second);
}

ElasticCopy CopyOfModule(torch::nn::Module& module, const std::string& title,
                         const std::function<Tensors()>& skipped) {
  const auto kept = std::make_shared<NamedCopies>();
  return {
      [&module, kept, skipped] { return detail::ElasticKeep(kept, CopiesOf(module, skipped())); },
      [&module, kept, skipped, title] {
        RestoreModule(TensorsOf(module, skipped()), *kept, title);
      },
  };
}

std::vector<at::Tensor> ParametersOf(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

// The streams on which the tensors are made have done that when an element of one is here.
class Awaited {
 public:
  void Add(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta() || tensor.numel() == 0) return;
    if (devices_.insert(tensor.device()).second) {
      (void)tensor.detach().flatten().slice(0, 0, 1).cpu();
    }
  }
  bool any() const { return !devices_.empty(); }

 private:
  std::unordered_set<c10::Device> devices_;
};

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
  // Returns when all GPUs that the state lies on have done what they were given. False: there is none.
  bool AwaitGpus() const {
    Awaited awaited;
    for (const ElasticPart& part : parts) {
      if (!part.tensors) continue;
      for (const at::Tensor& tensor : part.tensors()) awaited.Add(tensor);
    }
    return awaited.any();
  }
  // After a fault a GPU may have what a collective has left that was broken off. That is known when
  // all is copied, and the last copy stays.
  void Commit(std::int64_t at) {
    const Keep keep = Copy(&ElasticPart::commit);
    (void)AwaitGpus();
    detail::ThrowIfError(detail::CurrentSession()->Check());
    NoteCommit(keep, at);
  }
  void NoteCommit(const Keep& keep, std::int64_t at) {
    Replace(keep);
    has_copy = true;
    place = committed_at = at;
    stepped_at = -1;
  }
  void KeepStep() {
    const Keep keep = Copy(&ElasticPart::step);
    const bool has_gpus = AwaitGpus();
    const core::Status status = detail::CurrentSession()->Check();
    // What the step has launched on a GPU may be broken off as well. On CPUs it is made.
    if (has_gpus) detail::ThrowIfError(status);
    Replace(keep);
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
  // To the last step() where parameters are still those, else to the last commit().
  void GoBack() {
    if (stepped_at < 0 || is_receiving || begun != StepsBegun() || versions != Versions()) {
      return RestoreCommit();
    }
    Restore(&ElasticPart::step);
    place = stepped_at;
  }
  void Sync(bool from_newest);

  std::int64_t StepsBegun() const {
    std::int64_t steps = 0;
    for (const auto& [_, optimizer] : optimizers)
      steps += detail::ReducerOf(*optimizer)->steps_begun();
    return steps;
  }
  // The parameters of optimizers, which a step() does not copy.
  Tensors OfOptimizers() const {
    Tensors all;
    for (const auto& [_, optimizer] : optimizers) {
      for (const at::Tensor& parameter : ParametersOf(*optimizer)) {
        all.insert(parameter.unsafeGetTensorImpl());
      }
    }
    return all;
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
    const Tensors of_optimizers = OfOptimizers();
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
  std::int64_t stepped_at = -1;  // -1: there was no step() since the commit()
  std::int64_t begun = 0;        // steps of optimizers before that
  VersionList versions;          // of their parameters, then
  bool has_warned = false;       // that step() does nothing
  bool is_receiving = false;     // parts of another rank's state, and has not got all
};

void State::Impl::Sync(bool from_newest) {
  const auto session = detail::CurrentSession();
  detail::ThrowIfError(session->Check());
  std::vector<std::string> lines;
  for (const ElasticPart& part : parts) lines.push_back(part.name + part.type);
  detail::AgreeOnList("elastic::State", lines, "", session);
  const at::Tensor places =
      allgather(at::full({1}, place, at::kLong), AllgatherOptions().name("sirtaki/elastic place"));
  const auto* const begin = places.const_data_ptr<std::int64_t>();
  const auto root = from_newest ? std::max_element(begin, begin + places.numel()) - begin : 0;
  is_receiving = rank() != root;
  const bool is_as_stepped = versions == Versions();
  try {
    for (const ElasticPart& part : parts) part.sync(static_cast<int>(root));
  } catch (...) {
    // What the root has sent is marked as written to, and is what it was.
    if (!is_receiving && is_as_stepped) versions = Versions();
    throw;
  }
  Commit(begin[root]);
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
      Refuse(core::StatusCode::kInvalidArgument,
             "the " + part.name + " is there already: give this one another name");
    }
  }
  impl_->parts.push_back(std::move(part));
  impl_->has_copy = false;
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
  ElasticPart part;
  part.name = detail::ElasticName("model", name);
  part.commit = CopyOfModule(module, part.name, [] { return Tensors(); });
  part.step =
      CopyOfModule(module, part.name, [impl = impl_.get()] { return impl->OfOptimizers(); });
  part.tensors = [&module] {
    std::vector<at::Tensor> tensors;
    for (const auto& [_, tensor] : TensorsOf(module)) tensors.push_back(tensor);
    return tensors;
  };
  part.sync = [&module](int root) { broadcast_parameters(module, root); };
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
  const std::string title = part.name;
  Add(std::move(part)).impl_->models.emplace_back(title, &module);
  return *this;
}

State& State::optimizer(torch::optim::Optimizer& optimizer, const std::string& name) {
  ElasticPart part = PartOfArchive(
      "optimizer", name,
      [&optimizer](OutputArchive& archive) { detail::SaveOptimizer(optimizer, archive); },
      [&optimizer](InputArchive& archive) { detail::LoadOptimizer(optimizer, archive); });
  part.step = CopyOfOptions(optimizer);
  part.tensors = [&optimizer] { return ParametersOf(optimizer); };
  part.sync = [&optimizer](int root) { broadcast_optimizer_state(optimizer, root); };
  // What backward() has made of a gradient is of a step that is not made.
  part.leave = [&optimizer] { optimizer.zero_grad(); };
  if (detail::GradientReducer* const reducer = detail::ReducerOf(optimizer)) {
    CheckMayChange(part.name, reducer->options());
    part.leave = [reducer, let_go = part.leave] {
      reducer->Leave();
      let_go();
    };
    part.renew = [reducer, &optimizer] { reducer->Renew(optimizer); };
  }
  const std::string title = part.name;
  Add(std::move(part)).impl_->optimizers.emplace_back(title, &optimizer);
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

void State::step() {
  const std::string why = impl_->WhyStepsAreUnknown();
  if (why.empty()) return impl_->KeepStep();
  if (std::exchange(impl_->has_warned, true) || rank() != 0) return;
  core::Log(
      core::LogLevel::kWarning,
      "elastic::State: step() keeps nothing, and a loss goes back to the last commit(): " + why);
}

void State::commit() {
  impl_->Commit(impl_->place + 1);
  ++impl_->commits;
  check_changes();
}

void State::check_changes() {
  if (!is_elastic()) return;
  const bool changes = rank() == 0 && !detail::ElasticChange().empty();
  at::Tensor told = at::full({1}, changes ? 1 : 0, at::kByte);
  broadcast_(told, 0, BroadcastOptions().name("sirtaki/elastic change"));
  if (told.item<std::uint8_t>() != 0) throw HostsUpdated();
}

void State::restore() {
  if (!impl_->has_copy) {
    Refuse(core::StatusCode::kInvalidArgument,
           "restore() was called before commit(), sync() or run()");
  }
  impl_->RestoreCommit();
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

std::string ElasticName(const char* kind, const std::string& name) {
  return kind + (" " + core::Quoted(name));
}

std::string ElasticType(const std::type_info& type) {
  return " of type " + c10::demangle(type.name());
}

ElasticPart ElasticTensorPart(const std::string& name, at::Tensor& value) {
  ElasticPart part;
  part.name = ElasticName("value", name);
  part.type = ElasticType(typeid(at::Tensor));
  // Returns a copy that has what a program gives to a tensor.
  const auto copy = [](const at::Tensor& from, c10::Device device) {
    const at::NoGradGuard no_grad;
    return from.detach()
        .to(device, from.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
        .set_requires_grad(from.requires_grad());
  };
  const auto make_copy = [&value, copy]() -> ElasticCopy {
    const auto kept = std::make_shared<at::Tensor>();
    return {
        [&value, kept, copy] {
          return ElasticKeep(kept, value.defined() ? copy(value, value.device()) : at::Tensor());
        },
        [&value, kept, copy] {
          value = kept->defined() ? copy(*kept, kept->device()) : at::Tensor();
        },
    };
  };
  part.commit = make_copy();
  part.step = make_copy();
  part.tensors = [&value] { return std::vector<at::Tensor>{value}; };
  part.sync = [&value, copy, key = ElasticKey(part)](int root) {
    // The root's device may be none of this rank's; a list may be empty.
    const c10::Device device = value.defined() ? value.device() : c10::Device(c10::kCPU);
    std::vector<at::Tensor> list;
    if (value.defined() && rank() == root) list.push_back(copy(value, c10::kCPU));
    list = broadcast_object(list, root, key);
    if (rank() != root) value = list.empty() ? at::Tensor() : copy(list.front(), device);
  };
  return part;
}

namespace {

// The tensors in a value, in an order that depends on how it is made up.
std::vector<at::Tensor> TensorsOf(const std::vector<at::Tensor>& value) { return value; }
std::vector<at::Tensor> TensorsOf(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  value.visit([&tensors](const c10::IValue& one) {
    if (one.isTensor()) tensors.push_back(one.toTensor());
    return false;
  });
  return tensors;
}

// Puts these in the place of the tensors in a value.
void Replace(std::vector<at::Tensor>& value, const std::vector<at::Tensor>& tensors) {
  value = tensors;
}
void Replace(c10::IValue& value, const std::vector<at::Tensor>& tensors) {
  const std::vector<at::Tensor> before = TensorsOf(value);
  c10::IValue::HashIdentityIValueMap copies;
  for (std::size_t i = 0; i < tensors.size(); ++i) copies.emplace(before[i], tensors[i]);
  value = value.deepcopy(copies);
}

using SizeOf = std::function<std::size_t()>;
void LoadOnCpu(std::vector<at::Tensor>& value, const ReadBytes& read, const SizeOf& size) {
  torch::load(value, read, size, c10::kCPU);
}
void LoadOnCpu(c10::IValue& value, const ReadBytes& read, const SizeOf& size) {
  torch::serialize::InputArchive archive;
  archive.load_from(read, size, c10::kCPU);
  archive.read("value", value);
}

template <class T>
void SyncTensors(T& value, int root, const std::string& key) {
  if (rank() == root) return BroadcastSaved(Saver(value), nullptr, root, key, {});
  T received;
  BroadcastSaved(
      nullptr,
      [&received](const ReadBytes& read, const SizeOf& size) { LoadOnCpu(received, read, size); },
      root, key, {});
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> before = TensorsOf(value);
  std::vector<at::Tensor> now = TensorsOf(received);
  const auto place_of = [&](std::size_t i) {
    // One that is longer than it was here goes on where it begins.
    if (before.size() != now.size()) i = std::min(i, before.size() - 1);
    return before[i].defined() ? before[i].device() : c10::Device(c10::kCPU);
  };
  for (std::size_t i = 0; i < now.size() && !before.empty(); ++i) {
    if (!now[i].defined()) continue;
    now[i] = now[i].detach().to(place_of(i)).set_requires_grad(now[i].requires_grad());
  }
  Replace(received, now);
  value = std::move(received);
}

}  // namespace

void ElasticSync(std::vector<at::Tensor>& value, int root, const std::string& key) {
  SyncTensors(value, root, key);
}
void ElasticSync(c10::IValue& value, int root, const std::string& key) {
  SyncTensors(value, root, key);
}

// The state that run() begins with is there to go back to, too.
ElasticAttempts::ElasticAttempts(elastic::State state) : state_(std::move(state)) {
  elastic::State::Impl& made = *state_.impl_;
  made.NoteCommit(made.Copy(&ElasticPart::commit), 0);
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
    // Only now nothing of the job before writes to it any more.
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
