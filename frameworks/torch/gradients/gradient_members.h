// The parameters of an optimizer or a module, as the gradients that are reduced for it.
#pragma once

#include <torch/optim/optimizer.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "frameworks/torch/gradients/gradient_rule.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/named_parameters.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {

using GradientPtr = std::shared_ptr<ParameterGradient>;

// Used by the thread that uses the optimizer.
class GradientMembers {
 public:
  struct Description {
    int number = 0;  // of the optimizer, or the module, in its set
    NamedTensors names;
    std::string what;      // "parameters of the optimizer #2"
    std::string prefix;    // of keys
    std::string invalid;   // what is wrong with the options
    std::string habits;    // what else the ranks compare: ", checked every 5 steps"
    bool sharded = false;  // the ranks compare how parameters lie in memory as well
  };
  // `optimizer`: null: a module's.
  static Description Describe(NamedTensors names, const DistributedOptimizerOptions& options,
                              const torch::optim::Optimizer* optimizer, const std::type_info* type,
                              int number);
  GradientMembers(Description description, SessionSet set,
                  std::shared_ptr<const GradientRule> rule);

  // Takes the parameters of the optimizer that are new and drops those that are gone. Collective if
  // anything has changed since the last time; true if so.
  bool Scan(const torch::optim::Optimizer& optimizer);
  // Those that were new when something changed last. No hook of this optimizer has seen a backward()
  // of them.
  const std::vector<GradientPtr>& added() const { return newest_; }
  // Takes the parameters that it was made with. Collective.
  void TakeAll();

  // Throws if the averages could not be used in the calling thread's streams, before anything is
  // waited for: it can be tried again elsewhere. Not if gradients were captured as well, which has
  // to be told to all ranks.
  void CheckStreams() const;
  // Throws what has failed meanwhile if any of them is on a GPU, where what was launched may have
  // left anything. What is there on the host is right. Looks at each: a program may move them.
  void CheckResults() const;

  const std::vector<GradientPtr>& all() const { return all_; }
  // The first gradient that is being reduced; null: none is. Looks at all of them only if some are.
  const ParameterGradient* FirstReported() const;
  // Whether a backward() has written one since its last average, apart from these.
  bool AnyTouched(const std::vector<GradientPtr>& except) const;
  // Whether one belongs to another optimizer as well, or has.
  bool AnyShared() const { return counts_->shared > 0 || !others_.empty(); }
  // Which average of its step the next one is; 0 where nobody counts.
  std::atomic<std::uint32_t>& round() const { return counts_->round; }
  // A rank that had joined before one of the gradients was averaged that this step has; -1: none.
  int joined() const { return counts_->joined; }
  void ForgetJoined() { counts_->joined = -1; }
  // From now on this keeps the averages of the gradients that this optimizer has made.
  void KeepIn(std::shared_ptr<OptimizerShards> shards) { counts_->shards = std::move(shards); }
  // Whether the reducer has anything to do with the gradients.
  bool active() const { return set_.size() > 1 || rule_->sparse_as_dense || rule_->at_backward; }
  int number() const { return of_.number; }
  const std::string& what() const { return of_.what; }
  const std::string& prefix() const { return of_.prefix; }

 private:
  void Take(const NamedParameters& named);
  std::vector<GradientPtr> GradientsOf(const NamedParameters& named, std::string* error);
  std::string DescribePlaces(const NamedParameters& named, std::vector<std::string>* lines) const;

  Description of_;
  const SessionSet set_;
  const std::shared_ptr<const GradientRule> rule_;
  const std::shared_ptr<GradientCounts> counts_ = std::make_shared<GradientCounts>();
  // The optimizer's parameters, as they were last seen; none: it was not looked at.
  std::optional<std::vector<const void*>> scanned_;
  std::vector<GradientPtr> all_;
  std::vector<GradientPtr> newest_;
  std::vector<GradientPtr> others_;  // of these, those that another optimizer has made, and counts
};

}  // namespace sirtaki::detail
