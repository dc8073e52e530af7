// How a DistributedOptimizer, or DistributedDataParallel, reduces gradients.
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <string>

#include "sirtaki/collectives.h"
#include "sirtaki/compression.h"
#include "sirtaki/gradient_bucket.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

// The same on every rank; what differs is thrown as `mismatch` on all of them.
struct DistributedOptimizerOptions {
  // Tells several optimizers of a program apart, in messages too. Empty: by a number, in the order
  // in which they are made on the process set.
  TORCH_ARG(std::string, name);
  // The ranks that train these parameters together. Default: all.
  TORCH_ARG(ProcessSet, process_set);
  // Average or Sum of the gradients. With Sum let gradients go (zero_grad) before each backward():
  // what is in them already is on all ranks, and would be added up anew. Or Adasum, of what steps
  // change: see below.
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  // With Average: gradients are divided by this before they are added up, and by size() / this
  // afterwards. Between 1 and size() it keeps large sums in the range of half types. Positive.
  TORCH_ARG(double, gradient_predivide_factor) = 1.0;
  // A gradient is reduced when so many backward() have added to it. As in one process the passes
  // add up: divide the losses by their number for the mean. step() reduces what has had fewer.
  TORCH_ARG(int, backward_passes_per_step) = 1;
  // What float32 and float64 gradients travel as; not sparse ones.
  TORCH_ARG(Compression, compression) = Compression::None;
  TORCH_ARG(CompressionScope, compression_scope) = CompressionScope::BetweenHosts;
  // Sparse gradients, those of Embedding with sparse(true) for instance, become dense before they
  // are reduced, and stay so. Worth it where most rows have one.
  TORCH_ARG(bool, sparse_as_dense) = false;
  // Reduces the gradients instead of the library; needs the default op, factor and compression. Not
  // called with one rank.
  TORCH_ARG(CommunicationHook, hook);
  // Before the first step, and then before every so many, check_parameters() compares the
  // optimizer's parameters between the ranks. 0: never.
  TORCH_ARG(std::int64_t, check_parameters_every) = 0;
};

}  // namespace sirtaki
