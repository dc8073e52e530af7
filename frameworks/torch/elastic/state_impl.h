// A State consists of this, for the files that make it up only: elastic.cc has what programs call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/elastic/random_state.h"
#include "frameworks/torch/elastic/state_parts.h"
#include "sirtaki/detail/elastic_parts.h"
#include "sirtaki/detail/shard_copies.h"
#include "sirtaki/elastic.h"

namespace sirtaki::elastic {

// Used by the thread that trains. The functions throw what the job's calls do.
struct State::Impl {
  using Keep = std::vector<std::function<void()>>;
  Keep Copy(detail::ElasticCopy detail::ElasticPart::*which) const;
  static void Replace(const Keep& keep);
  void Restore(detail::ElasticCopy detail::ElasticPart::*which) const;
  // Returns when all GPUs that the state lies on have done what they were given: which these are.
  std::vector<c10::Device> AwaitGpus() const;
  // After a fault a GPU may have what a collective has left that was broken off. That is known when
  // all is copied, and the last copy stays.
  // `is_agreed_on`: all ranks have the boundary's other parts already, whatever becomes of its shards.
  void Commit(std::int64_t at, bool is_agreed_on = false);
  bool HasShards() const;
  void KeepShards(std::int64_t at);
  // The ranks that are there after the change have other shards, and some that have some now may not be.
  [[noreturn]] void LeaveForChange();
  // Brings back the shards that this rank has kept last, in this generation.
  void RestoreShards() const;
  void ReceiveShards(const detail::ShardCopies::Boundary& boundary) const;
  void NoteCommit(const Keep& keep, std::int64_t at, const std::vector<c10::Device>& gpus);
  void KeepStep();
  void RestoreCommit();
  // Says whether the parameters are those of the last step().
  bool IsAtStep() const;
  // Goes back to the last step() if no parameter has changed since, else to the last commit().
  void GoBack();
  detail::ShardCopies::Boundary Agree(bool from_newest);
  void Give(const std::vector<const detail::ElasticPart*>& given, int root) const;
  void Sync(bool from_newest);
  // Draws go on where a loss has brought the training back to. A rank that has received a later place
  // had made its draws before that.
  void RestoreRandom(std::int64_t at);

  std::int64_t StepsBegun() const;
  // Says that without a look at parameters, of which large models have many.
  bool NeverKnowsSteps() const;
  // Looks at the parameters that the optimizers have now, and returns WhyStepsAreUnknown(). The answer
  // that they are known holds until the groups have others: what a model gets besides is copied, and
  // one that has lost a parameter is refused by its restore().
  std::string LookAtOptimizers();
  // Lets the copies of the commit before the last one go, when all ranks have those of the last.
  void ConfirmCopies();
  // Returns whether ranks are to come or to go, on all ranks alike. All have kept the last commit when
  // it returns.
  bool IsToChange();
  // How often each of them was written to.
  using VersionList = std::vector<std::pair<const c10::TensorImpl*, std::int64_t>>;
  VersionList Versions() const;
  // Returns why the state may change unseen between two steps, or is not all of it. Empty: optimizers
  // that tell when they make a step have all parameters that are trained, and models all of those.
  std::string WhyStepsAreUnknown() const;
  // WithoutModels gives the optimizers that have a parameter which no model of the state has.
  std::vector<std::string> WithoutModels() const;
  // Warns of optimizers whose parameters are in no model of the state: nobody gives their values to others.
  void WarnOfMissingModels() const;

  std::vector<detail::ElasticPart> parts;
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
  RandomState random_before;  // at the commit() before: all may go on from that, if shards are lost
  bool goes_back = false;     // since a loss, and not there yet
  detail::ShardCopies copies;
  std::int64_t copy_every = 0;  // steps; -1: never
  std::int64_t steps_since_commit = 0;
  bool leaves = false;  // this generation, as ranks are to come or to go
};

}  // namespace sirtaki::elastic
