// The buckets of an optimizer's gradients: which gradients go together, and in which order, as the
// ranks have agreed after they saw the gradients become ready; with the option deterministic in the
// reverse order of the parameters. docs/protocol.md, "Buckets".
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/protocol/request.h"
#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/gradients/gradient_arena.h"
#include "frameworks/torch/session/session_set.h"
#include "fusion/bucket_assembly.h"
#include "session/session_observability.h"

namespace sirtaki::detail {

struct GradientRule;
class ParameterGradient;

// One bucket, which its gradients share.
struct Bucket {
  Bucket(core::Key key, core::SignaturePtr signature)
      : assembly(std::move(key), std::move(signature)) {}

  // A join has ended since it was made: ranks that had joined have missed what became of it.
  bool outdated() const { return *joins != joins_before; }

  fusion::BucketAssembly assembly;
  std::vector<std::weak_ptr<ParameterGradient>> gradients;
  // Of each gradient's memory, on all ranks.
  std::vector<std::vector<std::int64_t>> strides;
  ArenaPlaces places;                                       // empty: it has no arena
  std::shared_ptr<const std::atomic<std::uint64_t>> joins;  // of the set, by this rank
  std::uint64_t joins_before = 0;
};

// Belongs to one optimizer. Used by the thread that uses the optimizer.
class GradientBuckets {
 public:
  using Gradients = std::vector<std::shared_ptr<ParameterGradient>>;

  // `number`: the optimizer's in its set; `prefix`: of its keys. `rule`: of the gradients that it
  // may take; those that another optimizer has made are not its own.
  GradientBuckets(const SessionSet& set, int number, const std::string& prefix,
                  std::shared_ptr<const GradientRule> rule);
  ~GradientBuckets();  // as Dissolve
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // Those in buckets, also if the optimizer has them no more.
  const Gradients& gradients() const { return gradients_; }

  // The optimizer has other parameters than before: Update makes new buckets.
  void Renew() { renew_ = true; }
  // Buckets are made if there are none yet, or they no longer fit. Both calls are collective if so,
  // and throw what a collective throws.
  // When all gradients of an average are submitted: asks for what the ranks have seen of them.
  void Ask(const Gradients& members);
  // At the end of the average, when nothing is outstanding, whether it went well or not. Nowhere
  // else: all ranks have to dissolve buckets between the same averages. `wait`: an arena is waited
  // for; otherwise the buckets in one come with the next average. Never waits for a rank that has
  // not yet submitted this average.
  void Take(const Gradients& members, bool wait);

 private:
  void Dissolve();
  void TakeArenas();
  bool Fits() const;
  bool Wanted(const Gradients& members) const;
  void LayOut(const Gradients& members, const std::int64_t* sums);
  bool Lasts() const;
  // The number of this layout, as the key of a bucket has it. Joins, which end on all ranks, are part
  // of it: while some have joined, the others count layouts of which these do not know.
  std::uint64_t arena_number() const {
    return (joins_before_ & 0xffff) << 48 | (layouts_ & 0xffff) << 32 | number_;
  }
  void MakeBucket(Gradients gradients, ArenaPlaces places, std::size_t index,
                  session::BucketNames* names);

  const SessionSet set_;
  const std::uint64_t number_;
  const std::string key_;  // of the agreement
  const std::shared_ptr<const GradientRule> rule_;
  const std::shared_ptr<const std::atomic<std::uint64_t>> joins_;  // of the set, by this rank
  std::uint64_t joins_before_ = 0;                                 // the layout was made
  session::Session::Limits limits_;                                // with which that was
  bool laid_out_ = false;
  bool renew_ = false;
  std::uint64_t layouts_ = 0;  // made since the last join
  // What the ranks have seen, until it is taken.
  at::Tensor told_;
  std::shared_ptr<Pending> asked_;
  // Then the arenas, while they are made.
  std::vector<Gradients> laid_;
  std::unique_ptr<ArenaOrders> orders_;
  Gradients gradients_;
  std::vector<ops::nccl::ArenaPtr> arenas_;
  std::shared_ptr<const session::BucketNames> names_;  // of what the buckets hold, while laid out
};

}  // namespace sirtaki::detail
