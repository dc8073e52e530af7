#include "frameworks/torch/parallel/pipeline_state.h"

#include <ATen/ops/empty.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "core/base/digest.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/checkpoint/checkpoint_shards.h"
#include "frameworks/torch/state/archive_broadcast.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/optimizer_device.h"
#include "frameworks/torch/state/sharded_state.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/tensor_parallel.h"

namespace sirtaki::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// What `body` throws is told to all ranks of the row.
template <class Body>
void OnAllRanks(const StateCall& call, const Body& body) {
  std::string error;
  try {
    body();
  } catch (...) {
    error = TextOfCurrent();
  }
  AgreeOnErrors(call.what, error, call.row);
}

// Calls `take` with what each rank has, on the ranks that want it; the others have that of one rank at
// a time. What `take` throws is thrown at the end.
void FromEachRank(const std::string& what, const SessionSet& row, int root_rank, OutputArchive& own,
                  const std::function<void(InputArchive& of_rank, std::size_t place)>& take) {
  const bool wanted = root_rank < 0 || root_rank == row.rank();
  std::exception_ptr thrown;
  const std::vector<int> ranks = row.ranks();
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    InputArchive of_rank;
    BroadcastArchive([&own](const WriteBytes& write) { own.save_to(write); },
                     [&](const ReadBytes& read, const std::function<std::size_t()>& size) {
                       if (wanted) of_rank.load_from(read, size, c10::kCPU);
                     },
                     ranks[place], what, "sirtaki/the state of a pipeline", row);
    if (!wanted || thrown) continue;
    try {
      if (ranks[place] == row.rank()) {
        std::stringstream bytes;
        own.save_to(bytes);
        of_rank.load_from(bytes, c10::kCPU);
      }
      take(of_rank, place);
    } catch (...) {
      thrown = std::current_exception();
    }
  }
  if (thrown) std::rethrow_exception(thrown);
}

// ---- the model ----

void WriteModule(const torch::nn::Module& module, const std::string& prefix,
                 const torch::OrderedDict<std::string, at::Tensor>& whole, OutputArchive& archive) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    archive.write(parameter.key(), whole[prefix + parameter.key()]);
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    archive.write(buffer.key(), whole[prefix + buffer.key()], /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    OutputArchive inner(archive.compilation_unit());
    WriteModule(*child.value(), prefix + child.key() + ".", whole, inner);
    archive.write(child.key(), inner);
  }
}

void CopyAll(InputArchive& from, OutputArchive& to) {
  for (const std::string& key : from.keys()) {
    InputArchive inner;
    if (from.try_read(key, inner)) {
      OutputArchive copy(to.compilation_unit());
      CopyAll(inner, copy);
      to.write(key, copy);
      continue;
    }
    c10::IValue value;
    from.read(key, value);
    if (value.isTensor()) {
      to.write(key, value.toTensor(), /*is_buffer=*/!value.toTensor().requires_grad());
    } else {
      to.write(key, value);
    }
  }
}

at::Tensor ReadByName(InputArchive& archive, const std::string& whole_name,
                      const std::string& rest) {
  const std::size_t dot = rest.find('.');
  at::Tensor tensor;
  InputArchive inner;
  if (dot == std::string::npos ? archive.try_read(rest, tensor)
                               : archive.try_read(rest.substr(0, dot), inner)) {
    return dot == std::string::npos ? tensor : ReadByName(inner, whole_name, rest.substr(dot + 1));
  }
  ThrowInvalid("the state has no " + core::Quoted(whole_name) +
               "; give what torch::save() of the unsplit model, or save_full(), saves");
}

// ---- its optimizer ----

using States = std::map<std::string, std::unique_ptr<OptimizerParamState>>;
using Holders = std::vector<std::vector<at::Tensor>>;

// Where the parameter of a name is in the groups of an optimizer.
struct GroupPlace {
  std::string name;
  std::size_t group = 0;
  std::size_t index = 0;
};
using GroupPlaces = std::vector<GroupPlace>;

// Tensors that stand in the place of the parameters of other ranks, so that an optimizer loads and
// saves their state.
Holders HoldersOf(const GroupPlaces& places, std::size_t groups) {
  Holders holders(groups);
  for (const GroupPlace& place : places) {
    std::vector<at::Tensor>& group = holders[place.group];
    while (group.size() <= place.index) group.push_back(at::empty({0}));
  }
  return holders;
}

std::string OptionsText(const torch::optim::OptimizerParamGroup& group) {
  OutputArchive archive;
  group.options().serialize(archive);
  std::ostringstream bytes;
  archive.save_to(bytes);
  const std::string text = bytes.str();
  const torch::optim::OptimizerOptions& options = group.options();
  return c10::demangle(typeid(options).name()) + " with the learning rate " +
         std::to_string(options.get_lr()) + ", digest " +
         std::to_string(core::Digest(text.data(), text.size()));
}

// The names of this rank's parameters, in the order of the model; those of no group are left out.
GroupPlaces PlacesOf(const Optimizer& optimizer, const NamedTensors& parameters) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw std::runtime_error(
        "LBFGS cannot train a pipeline: its state is of all parameters at once");
  }
  std::map<const void*, std::pair<std::size_t, std::size_t>> by_parameter;
  std::size_t known = 0;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& of_group = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < of_group.size(); ++i) {
      by_parameter.emplace(of_group[i].unsafeGetTensorImpl(), std::pair(g, i));
    }
  }
  GroupPlaces places;
  std::map<const void*, bool> found;
  for (const auto& [name, parameter] : parameters) {
    const auto at = by_parameter.find(parameter.unsafeGetTensorImpl());
    if (at == by_parameter.end()) continue;
    if (SplitOverRanks(parameter)) {
      throw std::runtime_error(
          core::Quoted(name) +
          " is a part of a parameter that is split over ranks, whose state is of that part; save "
          "the optimizer on each rank by its own save()");
    }
    known += found.emplace(at->first, true).second ? 1 : 0;
    places.push_back({name, at->second.first, at->second.second});
  }
  if (known != by_parameter.size()) {
    throw std::runtime_error("the optimizer has " + std::to_string(by_parameter.size() - known) +
                             " parameters that are not the pipeline's; give it those of "
                             "parameters()");
  }
  return places;
}

int LayerOf(const GroupPlace& place) { return std::stoi(place.name); }

// WholeGroups knows the groups of the unsplit model's optimizer, and those of each rank's.
class WholeGroups {
 public:
  // Collective.
  WholeGroups(const StateCall& call, const Optimizer& optimizer, const NamedTensors& parameters)
      : count_(optimizer.param_groups().size()) {
    std::vector<std::string> options;
    std::vector<std::string> lines;
    std::string error;
    try {
      for (const auto& group : optimizer.param_groups()) options.push_back(OptionsText(group));
      for (const GroupPlace& place : PlacesOf(optimizer, parameters)) {
        lines.push_back(std::to_string(place.group) + " " + std::to_string(place.index) + " " +
                        place.name);
      }
    } catch (...) {
      error = TextOfCurrent();
    }
    // Groups of stages that differ belong to no optimizer of the model.
    AgreeOnList(call.what, options, error, call.row, call.timeout);
    auto all = ExchangeLists(call.what, lines, "", call.row, call.timeout);
    if (all.empty()) all.assign(call.row.ranks().size(), lines);
    for (const std::vector<std::string>& of_rank : all) {
      GroupPlaces& places = of_rank_.emplace_back();
      for (const std::string& line : of_rank) {
        GroupPlace& place = places.emplace_back();
        std::istringstream(line) >> place.group >> place.index >> place.name;
      }
      whole_.insert(whole_.end(), places.begin(), places.end());
    }
    std::stable_sort(whole_.begin(), whole_.end(), [](const auto& one, const auto& other) {
      return LayerOf(one) < LayerOf(other);
    });
    std::vector<std::size_t> sizes(count_, 0);
    for (GroupPlace& place : whole_) place.index = sizes[place.group]++;
  }

  std::size_t count() const { return count_; }
  const GroupPlaces& whole() const { return whole_; }
  const GroupPlaces& OfRank(std::size_t place) const { return of_rank_[place]; }

 private:
  const std::size_t count_;
  std::vector<GroupPlaces> of_rank_;
  GroupPlaces whole_;
};

// Takes the states out of the optimizer, which has them for tensors in these places.
void TakeStates(Optimizer& optimizer, const Holders& holders, const GroupPlaces& places,
                States* states) {
  std::map<const void*, std::string> first;  // a parameter may have several names
  for (const GroupPlace& place : places) {
    const void* const holder = holders[place.group][place.index].unsafeGetTensorImpl();
    const auto [known, is_first] = first.emplace(holder, place.name);
    if (!is_first) {
      const auto& state = (*states)[known->second];
      if (state) (*states)[place.name] = state->clone();
      continue;
    }
    const auto found = optimizer.state().find(const_cast<void*>(holder));
    if (found != optimizer.state().end()) (*states)[place.name] = std::move(found->second);
  }
  optimizer.state().clear();
}

// The optimizer's state is another one for a while.
class OtherState {
 public:
  explicit OtherState(Optimizer& optimizer) : put_back_(SetAside(optimizer)) {
    if (GradientReducer* const reducer = ReducerOf(optimizer)) reducer->set_sharded_state(false);
  }
  ~OtherState() {
    if (put_back_) put_back_();
  }
  OtherState(const OtherState&) = delete;
  OtherState& operator=(const OtherState&) = delete;
  void Keep() { put_back_ = nullptr; }

 private:
  std::function<void()> put_back_;
};

void SaveOwn(const StateCall& call, Optimizer& optimizer, OutputArchive& own) {
  GradientReducer* const sharded = ShardedOf(optimizer);
  if (sharded == nullptr) return SaveOptimizer(optimizer, own);
  OutputArchive shards;
  sharded->SaveShards(optimizer, shards);
  const OtherState other(optimizer);
  ShardsOfAllRanks whole(optimizer);
  FromEachRank(call.what, SessionSet(call.row.session, sharded->shard_set()), -1, shards,
               [&](InputArchive& of_rank, std::size_t) { whole.Add(of_rank); });
  whole.Finish();
  SaveOptimizer(optimizer, own);
}

// Another copy of the pipeline may have the rank. Without a root (-1) all ranks are.
bool HasRoot(const SessionSet& row, int root_rank) {
  return root_rank < 0 || row.members.ranks.Contains(root_rank);
}
void CheckRootOfJob(int root_rank, const SessionSet& row) {
  if (root_rank >= 0) CheckRoot(root_rank, SessionSet(row.session, ProcessSet()));
}

}  // namespace

void SaveFullModel(const StateCall& call, const torch::nn::Module& module, int root_rank,
                   OutputArchive& archive) {
  CheckRootOfJob(root_rank, call.row);
  if (!HasRoot(call.row, root_rank)) return;
  OutputArchive own;
  OnAllRanks(call, [&] { WriteModule(module, "", whole_state(module, c10::kCPU), own); });
  OnAllRanks(call, [&] {
    FromEachRank(call.what, call.row, root_rank, own,
                 [&](InputArchive& of_rank, std::size_t) { CopyAll(of_rank, archive); });
  });
}

void LoadFullModel(torch::nn::Module& module, InputArchive& archive) {
  torch::OrderedDict<std::string, at::Tensor> state;
  for (const auto& item : module.named_parameters()) {
    state.insert(item.key(), ReadByName(archive, item.key(), item.key()));
  }
  for (const auto& item : module.named_buffers()) {
    state.insert(item.key(), ReadByName(archive, item.key(), item.key()));
  }
  load_whole_state(module, state);
}

void SaveFullOptimizer(const StateCall& call, const NamedTensors& parameters, Optimizer& optimizer,
                       int root_rank, OutputArchive& archive) {
  CheckRootOfJob(root_rank, call.row);
  const WholeGroups groups(call, optimizer, parameters);
  OutputArchive own;
  OnAllRanks(call, [&] { SaveOwn(call, optimizer, own); });
  if (!HasRoot(call.row, root_rank)) return;
  const OtherState other(optimizer);
  OnAllRanks(call, [&] {
    States states;
    FromEachRank(call.what, call.row, root_rank, own,
                 [&](InputArchive& of_rank, std::size_t place) {
                   const GroupPlaces& places = groups.OfRank(place);
                   const Holders holders = HoldersOf(places, groups.count());
                   {
                     const InPlaceOfParameters in_place(optimizer, holders);
                     LoadOptimizer(optimizer, of_rank);
                   }
                   TakeStates(optimizer, holders, places, &states);
                 });
    if (root_rank >= 0 && root_rank != call.row.rank()) return;
    const Holders holders = HoldersOf(groups.whole(), groups.count());
    for (const GroupPlace& place : groups.whole()) {
      std::unique_ptr<OptimizerParamState>& state = states[place.name];
      if (!state) continue;
      optimizer.state()[holders[place.group][place.index].unsafeGetTensorImpl()] = std::move(state);
    }
    const InPlaceOfParameters in_place(optimizer, holders);
    optimizer.save(archive);
  });
}

void LoadFullOptimizer(const StateCall& call, const NamedTensors& parameters,
                       const std::vector<std::vector<std::string>>& ties, Optimizer& optimizer,
                       InputArchive& archive) {
  const WholeGroups groups(call, optimizer, parameters);
  OtherState other(optimizer);
  OnAllRanks(call, [&] {
    const Holders holders = HoldersOf(groups.whole(), groups.count());
    {
      const InPlaceOfParameters in_place(optimizer, holders);
      optimizer.load(archive);
    }
    States states;
    TakeStates(optimizer, holders, groups.whole(), &states);
    // The unsplit model's optimizer may have the state of a tied parameter once.
    for (const std::vector<std::string>& tie : ties) {
      const auto has = std::find_if(
          tie.begin(), tie.end(), [&](const std::string& name) { return states[name] != nullptr; });
      if (has == tie.end()) continue;
      for (const std::string& name : tie) {
        if (!states[name]) states[name] = CopyOfState(*states[*has]);
      }
    }
    for (const auto& [name, parameter] : parameters) {
      std::unique_ptr<OptimizerParamState>& state = states[name];
      if (state) optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
    PutStateOnDevices(optimizer);
  });
  other.Keep();
}

}  // namespace sirtaki::detail
