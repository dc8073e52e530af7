// The buckets of an optimizer's gradients: which gradients go together, and in which order, as the
// ranks have agreed after they saw the gradients become ready; with the option deterministic in the
// reverse order of the parameters. docs/protocol.md, "Buckets".
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/work.h"
#include "core/protocol/request.h"
#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/gradients/bucket_hook.h"
#include "frameworks/torch/gradients/gradient_arena.h"
#include "frameworks/torch/session/session_set.h"
#include "fusion/bucket_assembly.h"
#include "session/session_observability.h"

namespace sirtaki::detail {

struct GradientRule;
class ParameterGradient;

// The memory of one gradient, which its work keeps.
struct GradientMemory {
  at::Tensor given;  // what it is brought from, if that lies elsewhere than the result
  // Where it is reduced: `.grad` itself, or a flat copy, or zeros, or its place in an arena or a
  // hook's buffer.
  at::Tensor result;
  // This rank's shard, with Shard::Gradients, if the work has brought it there.
  at::Tensor shard;
};

struct Bucket;

// The part of a bucket that one gradient is.
struct BucketPart {
  Bucket* bucket = nullptr;
  std::size_t index = 0;
  std::weak_ptr<ParameterGradient> gradient;
  core::SignaturePtr like;            // what it is like, on all ranks,
  std::vector<std::int64_t> strides;  // and how its memory lies
  core::PartCuts cuts;                // of the ranks' shards; null: some need the whole
  std::optional<ArenaPlace> place;    // none: the bucket has no arena
  // The work of the last round serves again. It is used by whoever has reported the gradient's
  // gate.
  core::WorkPtr work;

  // A work without memory, for the next round. The engine may still refer to the last one.
  core::Work& Renew(bool for_gpu);
  ops::cuda::DeviceWork* on_gpu() const;  // null: it is not
  GradientMemory& memory() const { return *static_cast<GradientMemory*>(work->keep_alive.get()); }
};
using BucketPartPtr = std::shared_ptr<BucketPart>;  // keeps the bucket

// A bucket, which its gradients share. A gradient that goes by itself is a bucket of one.
struct Bucket {
  Bucket(core::Key key, core::SignaturePtr signature)
      : assembly(std::move(key), std::move(signature)), parts(assembly.parts().size()) {}

  static BucketPartPtr PartOf(const std::shared_ptr<Bucket>& bucket, std::size_t index,
                              std::weak_ptr<ParameterGradient> gradient, core::SignaturePtr like,
                              std::vector<std::int64_t> strides);

  // Whether its gradients go together from now on. Not if a join has ended since it was made: ranks
  // that had joined have missed what became of it.
  bool goes_on() const { return !assembly.of_one() && !is_apart && *joins == joins_before; }
  // Averages that are under way in the bucket end, and nothing new goes in.
  void TakeApart();

  fusion::BucketAssembly assembly;
  std::vector<BucketPart> parts;
  std::unique_ptr<BucketHook> hook;  // null: the library reduces it
  std::atomic<bool> is_apart{false};
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

  // The optimizer has other parameters than before: new buckets are made.
  void Renew() { renew_ = true; }
  bool renews() const { return renew_; }
  // Buckets are made if there are none yet, or they no longer fit. Both calls are collective if so,
  // and throw what a collective throws.
  // When all gradients of an average are submitted: asks for what the ranks have seen of them.
  void Ask(const Gradients& members);
  // Called at the end of the average, when nothing is outstanding, whether it went well or not, and
  // nowhere else: all ranks have to dissolve buckets between the same averages. `wait`: an arena is
  // waited for; otherwise the buckets in one come with the next average. Never waits for a rank
  // that has not yet submitted this average.
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
  std::uint64_t layout_number() const {
    return (joins_before_ & 0xffff) << 48 | (layouts_ & 0xffff) << 32 | number_;
  }
  std::shared_ptr<Bucket> MakeBucket(Gradients gradients, ArenaPlaces places, std::size_t index,
                                     session::BucketNames* names);
  std::unique_ptr<BucketHook> MakeHook(const Bucket& bucket, const Gradients& gradients) const;

  const SessionSet set_;
  const std::uint64_t number_;
  const std::string prefix_;
  const std::string key_;  // of the agreement
  const std::shared_ptr<const GradientRule> rule_;
  const std::shared_ptr<const std::atomic<std::uint64_t>> joins_;  // of the set, by this rank
  std::uint64_t joins_before_ = 0;                                 // the layout was made
  session::Session::Limits limits_;                                // with which that was
  bool renew_ = false;
  std::uint64_t layouts_ = 0;            // made since the last join
  std::shared_ptr<Pending> asked_;       // the sum of what the ranks have seen
  std::unique_ptr<ArenaOrders> orders_;  // then the buckets, while their arenas are made
  std::vector<std::shared_ptr<Bucket>> buckets_;
  Gradients gradients_;  // of these; they keep them alive
  std::vector<ops::nccl::ArenaPtr> arenas_;
  Gradients left_out_;                                 // of the layout, as no rank had seen them
  std::shared_ptr<const session::BucketNames> names_;  // of what the buckets hold; null: no layout
};

}  // namespace sirtaki::detail
