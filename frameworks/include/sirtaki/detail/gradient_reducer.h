// What a DistributedOptimizer and a DistributedDataParallel rest on. Programs do not use it by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/optimizer_options.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {

class SessionState;

// A part of a parameter, from element `begin` on in the order in which they lie in memory: a flat view
// of it, or the parameter itself if that is all of it.
struct ShardOfParameter {
  at::Tensor parameter;
  at::Tensor shard;  // not defined: this rank has none, but knows that there is an average
  std::int64_t begin = 0;
  bool has_average =
      false;  // of its gradient, kept in shards: `.grad` of the parameter is undefined
};

// The option `shard` of the job goes before what the program says to its optimizers.
SIRTAKI_API Shard ShardOfJob(Shard of_program);

// Names the parameters by their place in the optimizer: "parameter 0", …. A tensor that stands in
// several places counts once.
SIRTAKI_API NamedTensors NamesByPosition(const torch::optim::Optimizer& optimizer);

// A Scope keeps a state in force until it is destroyed.
class SIRTAKI_API Scope {
 public:
  explicit Scope(std::function<void()> end) : end_(std::move(end)) {}
  Scope(Scope&& other) noexcept : end_(std::exchange(other.end_, nullptr)) {}
  Scope& operator=(Scope&&) = delete;
  ~Scope() {
    if (end_) end_();
  }

 private:
  std::function<void()> end_;
};

// The part of DistributedOptimizer that does not depend on the optimizer's type: hooks in the
// autograd graph that start the reduction of each gradient, and the wait for all of them, at the
// end of backward() or in step().
//
// The optimizer owns it, and it moves with the optimizer. Hooks run on autograd's threads, also
// several at once: on those that call backward(), and for gradients on a GPU on the one that
// autograd has for it; everything else is called by the thread that uses the optimizer.
class SIRTAKI_API GradientReducer {
 public:
  // Compares parameters and options with those of the other ranks (collective), then attaches the
  // hooks. Every rank throws if any rank's do not fit. In an elastic job, before run(), that is left to
  // Renew().
  GradientReducer(const torch::optim::Optimizer& optimizer, NamedTensors named_parameters,
                  const DistributedOptimizerOptions& options);
  // Does the same for parameters without an optimizer: gradients are averaged when backward()
  // returns.
  GradientReducer(NamedTensors parameters, const DistributedOptimizerOptions& options);
  GradientReducer(GradientReducer&&) noexcept;
  GradientReducer& operator=(GradientReducer&&) noexcept;
  ~GradientReducer();  // the hooks stay, and do nothing

  // The job that it was made in is over. Leave() drops what belongs to it; Renew() makes that again
  // in the job that there is now, with the names and options that it was made with, as the
  // constructor does; parameters that the optimizer has got since are "added parameter 1", …. All
  // optimizers leave before the first is renewed: a node of autograd that
  // several of them have would keep dead hooks otherwise. Until then it can only be saved and loaded.
  void Leave();
  void Renew(const torch::optim::Optimizer& optimizer);
  const DistributedOptimizerOptions& options() const;

  using LossClosure = torch::optim::Optimizer::LossClosure;
  using BaseStep = std::function<at::Tensor(LossClosure closure)>;

  // Makes the optimizer's step by `base_step`, with gradients averaged before it or changes
  // combined after it, or with this rank's shards. Throws if the session is gone.
  at::Tensor Step(torch::optim::Optimizer& optimizer, LossClosure closure,
                  const BaseStep& base_step);
  // How often the optimizer's own step has begun, which changes parameters; in all jobs.
  std::int64_t steps_begun() const { return steps_begun_; }
  // Says that no step will use the averaged gradients.
  void SkipStep();
  // Waits until all gradients are averaged. The following step takes them as they then are.
  void Synchronize(const torch::optim::Optimizer& optimizer);
  // Throws while gradients are being reduced; otherwise looks for parameters that are new. Ends what
  // a backward() that has thrown has left.
  void BeforeZeroGrad(const torch::optim::Optimizer& optimizer);
  Scope NoSync();
  Scope SkipSynchronize();
  // A module, which has no optimizer, calls it: looks for parameters that were unfrozen, and ends
  // what a backward() that failed has left. Does nothing within a backward(). `training`: the ranks
  // come here alike.
  void BeforeForward(bool training);
  // A module calls it within a backward(): gradients are averaged at the end of this backward()
  // alone. Otherwise they are at the end of each that makes some, the inner ones too.
  void BeginBackward();
  // The session in which it was made, and the set of ranks over which it averages.
  std::shared_ptr<SessionState> session() const;
  ProcessSet process_set() const;
  // The ranks that have the shards of everything together: several such sets have the same shards
  // with ShardOver::Host.
  ProcessSet shard_set() const;
  bool is_reducing() const;  // gradients are being reduced, so that zero_grad() throws
  // True if gradients stay this rank's own: what steps change is combined instead.
  bool has_local_gradients() const;
  bool is_sharded() const;  // steps cut the optimizer's state into shards
  // This rank's shards of the averaged gradients, with Shard::Gradients on several ranks; `.grad` has
  // none of them then. No value: `.grad` has the gradients.
  std::optional<std::vector<at::Tensor>> gradient_shards() const;
  // True if this rank has the optimizer's state for its shards of the parameters only. Whoever
  // replaces the state says so.
  bool has_sharded_state() const;
  void set_sharded_state(bool sharded);
  void CheckStateIsWhole() const;
  // Precondition: has_sharded_state().
  void SaveShards(torch::optim::Optimizer& optimizer, torch::serialize::OutputArchive& archive);
  // Cuts the parameters as the next step would, without their state. Precondition: is_sharded().
  void CutParameters(const torch::optim::Optimizer& optimizer);
  // This rank's shards of all parameters that were cut.
  std::vector<ShardOfParameter> shards() const;
  const std::string& prefix() const;  // the prefix of the names of its collectives

 private:
  class Impl;
  struct Made;
  Impl& impl() const;  // throws if moved from
  void Make(const torch::optim::Optimizer& optimizer, const NamedTensors& names);
  std::shared_ptr<const Made> made_;
  std::shared_ptr<Impl> impl_;
  std::int64_t steps_begun_ = 0;
};

// A DistributedOptimizer is one, whatever its Base.
class SIRTAKI_API ReducerOwner {
 public:
  virtual ~ReducerOwner();
  virtual GradientReducer& reducer() = 0;

 protected:
  ReducerOwner() = default;
  ReducerOwner(ReducerOwner&&) noexcept = default;
  ReducerOwner& operator=(ReducerOwner&&) noexcept = default;
};

// The reducer of a DistributedOptimizer; null for another optimizer.
SIRTAKI_API GradientReducer* ReducerOf(torch::optim::Optimizer& optimizer);

}  // namespace detail

}  // namespace sirtaki
