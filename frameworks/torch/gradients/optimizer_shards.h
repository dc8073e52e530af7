// The shards of a sharded optimizer: which rank makes the step of which part of each parameter, and
// keeps the state for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/engine/work.h"
#include "frameworks/torch/gradients/common_parameters.h"
#include "frameworks/torch/gradients/launched_buckets.h"
#include "frameworks/torch/session/session_set.h"
#include "sirtaki/detail/gradient_reducer.h"
#include "sirtaki/optimizer_options.h"

namespace sirtaki::detail {

struct TensorCall;

// The choice that ShardBy::Auto comes to for optimizers of this class, which is Base's own.
ShardBy ChooseShardBy(const std::type_info& type);
// The reason why the state of this optimizer cannot be sharded; empty if it can.
std::string WhyNotSharded(const torch::optim::Optimizer& optimizer);
// Throws what a step is on all ranks when one of them has joined.
[[noreturn]] void ThrowJoined(int rank);

// Returns the first element of each rank's shard of a parameter, and the end of the last one. A
// shard begins at a multiple of 128 bytes: LibTorch's kernels take two vectors of up to 64 bytes at
// a time, and what is left at the end one by one, which may round otherwise. A parameter with fewer
// bytes than that for each rank belongs to rank `least`, as all do by Parameter.
std::vector<std::int64_t> CutShards(std::int64_t elements, std::int64_t element_bytes, int ranks,
                                    int least, ShardBy by);

// The shards of an optimizer belong to it, and are used by the thread that uses it. Parameters that
// have left the optimizer are kept, with their state: they may come back.
class OptimizerShards {
 public:
  // `what`: "parameters of the optimizer #2"; the name of the gather has it. `by`: not Auto.
  // `of_gradients`: of Shard::Gradients. `common`: the option share_parameters.
  OptimizerShards(SessionSet set, std::string what, ShardBy by, bool of_gradients, bool common);

  // Makes a step in which the optimizer has this rank's shards in the place of its parameters, and
  // then gives all ranks the shards of all, or waits for them where parameters are common. The step of
  // a rank that throws is an error on every rank. Collective.
  void Step(torch::optim::Optimizer& optimizer, const std::function<void()>& base_step);

  // Lets the parameters of a new optimizer lie once on the host, where that is wanted. Collective.
  void Share(const torch::optim::Optimizer& optimizer);
  // Until the first step lets go of copies that broadcasts and loaded files have left: they would be
  // there beside the first gradients.
  void LetGoOfCopies();

  const SessionSet& set() const { return set_; }
  // Whether the optimizer's state is that of shards: a step has cut it, and none was loaded since.
  bool is_cut() const { return is_cut_; }
  void SetCut(bool cut) { is_cut_ = cut; }
  // Saves the state of this rank's shards, for ShardsOfAllRanks. Precondition: is_cut().
  void Save(torch::optim::Optimizer& optimizer, torch::serialize::OutputArchive& archive);
  // Cuts parameters that no step has seen yet, in the order of the optimizer, which all ranks have.
  void CutParameters(const torch::optim::Optimizer& optimizer);
  std::vector<ShardOfParameter> Mine() const;

  // ---- the shards of gradients ----

  bool of_gradients() const { return of_gradients_; }
  // The part of an average, which comes to be in `result`, that this rank keeps; nothing where
  // `result` does not lie as the parameter did when it was cut. Where the part is no whole parameter,
  // `*shard` gets memory for it; null: the part stays where it is in `result`.
  std::optional<core::KeptPart> PartToKeep(const at::Tensor& parameter, const at::Tensor& result,
                                           at::Tensor* shard) const;
  // Whether TakeGradient would throw nothing.
  bool MayTake(const at::Tensor& parameter) const;
  // Returns how a parameter was cut; null if it was not.
  core::PartCuts CutsOf(const at::Tensor& parameter) const;
  // Keeps this rank's shard of an average: `shard` if that is defined. Throws InvalidArgument if there
  // is one that no step has used, or the parameter could not be cut. This and PartToKeep are called on
  // autograd's threads too, for different parameters at once.
  void TakeGradient(const at::Tensor& parameter, const at::Tensor& average,
                    const at::Tensor& shard);
  void DropGradients();
  LaunchedBuckets& launched() { return launched_; }
  // What TakeGradient has kept, in the order in which the parameters were cut: norms are added up in
  // it.
  std::vector<at::Tensor> Gradients() const;

 private:
  struct Shards {
    std::size_t number = 0;  // in the order in which parameters were cut, from 1
    at::Tensor parameter;
    std::vector<std::int64_t> strides;  // as it was cut
    std::vector<std::int64_t> cuts;     // empty: it was not
    CommonPlace place;
    at::Tensor mine;            // not defined: this rank has none of it
    bool has_gradient = false;  // an average was taken,
    at::Tensor gradient;        // and this is `mine` of it

    bool is_stepped() const { return has_gradient || parameter.grad().defined(); }
  };
  using Groups = std::vector<std::vector<at::Tensor>>;

  std::size_t self() const { return static_cast<std::size_t>(set_.members.index()); }
  Shards& ShardsOf(const at::Tensor& parameter);
  // Null: it was not cut.
  const Shards* FindCut(const at::Tensor& parameter) const;
  // Lets `mine` be this rank's shard, wherever that lies now.
  void Place(Shards& shards) const;
  void TakeState(torch::optim::Optimizer& optimizer, const Shards& shards) const;
  // What CommonParameters takes of these, whose shards do not lie in the memory of their parameters
  // until they are placed again.
  std::vector<CommonCandidate> CandidatesOf(const std::vector<Shards*>& all) const;
  // Finds the shards of all parameters, once each, and of those that have a gradient.
  void Find(const torch::optim::Optimizer& optimizer, std::vector<Shards*>* all,
            std::vector<Shards*>* stepped);
  Groups Cut(torch::optim::Optimizer& optimizer, const std::vector<Shards*>& all,
             const std::vector<Shards*>& stepped);
  // Ends what Cut has begun.
  void Uncut(const std::vector<Shards*>& all, const std::vector<Shards*>& stepped) const;
  void Gather(std::vector<Shards*> stepped, const std::string& error);
  // Flat parameters of one type and place, and where their shards begin.
  using SmallParameters = std::vector<std::pair<at::Tensor, std::vector<std::int64_t>>>;
  void Pack(const SmallParameters& parameters, TensorCall* call) const;
  void Unpack(const SmallParameters& parameters, const at::Tensor& packed) const;

  const SessionSet set_;
  const std::string what_;
  const ShardBy by_;
  const bool of_gradients_;
  std::unordered_map<const void*, Shards> shards_;  // by parameter
  std::size_t cut_ = 0;                             // how many of them are
  std::vector<std::int64_t> elements_;              // by rank
  CommonParameters common_;
  LaunchedBuckets launched_;
  bool is_cut_ = false;
};

}  // namespace sirtaki::detail
