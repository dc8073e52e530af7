// How gradients are reduced: what the options of an optimizer come to.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/types.h"
#include "sirtaki/compression.h"
#include "sirtaki/gradient_bucket.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {

struct GradientRule {
  core::SetNumber set = core::kWorldSet;
  core::ReduceOp reduction = core::ReduceOp::kAverage;
  double predivide = 1.0;  // before the sum, which is multiplied by it
  Compression compression = Compression::None;
  CompressionScope scope = CompressionScope::BetweenHosts;
  int passes = 1;            // backward passes before a gradient is reduced
  bool of_module = false;    // there is no step()
  bool at_backward = false;  // averaged when backward() returns, not in step()
  bool alone = false;        // one rank: nothing is reduced, what can be wrong is checked
  bool sparse_as_dense = false;
  bool keeps_shards = false;     // of the averages, by Shard::Gradients
  std::int64_t check_every = 0;  // steps the parameters are compared; 0: never
  bool has_hook = false;
  CommunicationHook hook;  // empty: the library reduces, or one rank has nothing to reduce

  // The changes that steps have made are combined; gradients stay where they are.
  bool of_steps() const { return reduction == core::ReduceOp::kAdasum; }
  // An average with something added to it on each rank may be averaged again.
  bool may_repeat() const {
    return reduction == core::ReduceOp::kAverage && compression == Compression::None && !has_hook;
  }
};

// Returns what is wrong with the options; empty if nothing is.
std::string WhyInvalid(const DistributedOptimizerOptions& options, bool of_module);

// `ranks`: of the process set.
GradientRule MakeRule(const DistributedOptimizerOptions& options, bool of_module, int ranks);

// True if two optimizers may have the same parameter. Its gradient is averaged for the first that
// steps, and again for the other: that leaves an average as it is but for its last bits, which are
// the same on all ranks. It would multiply a sum, and of a hook nobody knows.
bool CanShare(const GradientRule& a, const GradientRule& b);

// "average, 2 backward passes, bfloat16 everywhere": only what is not a default after the first.
std::string ToText(const GradientRule& rule);

}  // namespace sirtaki::detail
