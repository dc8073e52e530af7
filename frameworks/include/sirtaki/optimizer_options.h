// These options say how a DistributedOptimizer, or DistributedDataParallel, reduces gradients.
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <string>

#include "sirtaki/collectives.h"
#include "sirtaki/compression.h"
#include "sirtaki/gradient_bucket.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

// When gradients are averaged.
enum class Average : std::uint8_t {
  Backward,  // .grad is the average when backward() returns: clip it, look at it, scale it
  Step,      // step() or synchronize() waits for the averages; until then .grad must not be touched
};

// A shard is a rank's part of what all ranks have together.
enum class Shard : std::uint8_t {
  None,
  // The state of the optimizer: each rank keeps it for its shard of the parameters, makes the step
  // of that shard, and gets the others' results from them. Adam's state then takes 8/n bytes for
  // each float32 parameter on n ranks in place of 8, and a step an n-th of the arithmetic.
  OptimizerState,
  // The same, and the gradients: when a gradient was averaged each rank keeps its shard of it, and
  // `.grad` is undefined from the end of backward() on. Its memory serves the next gradients of the
  // same backward(). A step uses the shards up, and so does zero_grad().
  Gradients,
};

// Shards are cut in one of these ways.
enum class ShardBy : std::uint8_t {
  Auto,       // Element for Adagrad, Adam, AdamW, RMSprop and SGD of LibTorch, Parameter for others
  Element,    // a part of each parameter: for optimizers that work element by element
  Parameter,  // whole parameters: for all others
};

// The ranks that have one copy of everything together.
enum class ShardOver : std::uint8_t {
  All,   // those of the process set
  Host,  // those of a host: what is sharded is there once for each host, and shards stay on it
};

// The options are the same on every rank; if they differ, all ranks throw `Mismatch`.
struct DistributedOptimizerOptions {
  // The name tells several optimizers of a program apart, in messages too. Empty: a number does, in
  // the order in which the optimizers are made on the process set.
  TORCH_ARG(std::string, name);
  // The ranks of this set train these parameters together. Default: all ranks.
  TORCH_ARG(ProcessSet, process_set);
  // The operation on gradients is Average or Sum; or Adasum, on what steps change, see
  // DistributedOptimizer. With Sum let gradients go (zero_grad) before each backward(): what is in
  // them already is on all ranks, and would be added up again.
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  // Gradients are reduced while backward() runs. Backward: its end waits for them, as step() would
  // otherwise. Step allows what the end of a backward() cannot: gradients that are differentiable
  // themselves, a second backward() between two steps with op Sum, compression or a hook, and ranks
  // of which some run no backward(). Of no meaning for op Adasum.
  TORCH_ARG(Average, average_at) = Average::Backward;
  // Gradients that are averaged are divided by this factor before they are added up, and by size()
  // / factor afterwards. A factor between 1 and size() keeps large sums in the range of half types.
  // Positive.
  TORCH_ARG(double, gradient_predivide_factor) = 1.0;
  // A gradient is reduced when that many backward() have added to it. The passes add up, as in one
  // process: divide the losses by their number for the mean. step() reduces a gradient that has had
  // fewer passes.
  TORCH_ARG(int, backward_passes_per_step) = 1;
  // The type that float32 and float64 gradients travel as; sparse ones are not compressed.
  TORCH_ARG(Compression, compression) = Compression::None;
  TORCH_ARG(CompressionScope, compression_scope) = CompressionScope::BetweenHosts;
  // If true, sparse gradients, those of Embedding with sparse(true) for instance, become dense
  // before they are reduced, and stay dense; with one rank too. Worth it where most rows have a
  // gradient.
  TORCH_ARG(bool, sparse_as_dense) = false;
  // The hook reduces the gradients instead of the library; it needs the default op, factor and
  // compression. It is not called with one rank.
  TORCH_ARG(CommunicationHook, hook);
  // check_parameters() compares the optimizer's parameters between the ranks before the first step,
  // and then before each n-th step, if this is n. 0: never. A module counts backward(), and compares
  // in the next forward().
  TORCH_ARG(std::int64_t, check_parameters_every) = 0;
  // See DistributedOptimizer; without effect on one rank.
  TORCH_ARG(Shard, shard) = Shard::None;
  TORCH_ARG(ShardBy, shard_by) = ShardBy::Auto;
  // Host needs all ranks of the job: no process_set. Gradients are averaged over all of them.
  TORCH_ARG(ShardOver, shard_over) = ShardOver::All;
  // The parameters of a sharded optimizer lie once for all ranks of the set in memory that these
  // share, from when the optimizer is made, if they are on the CPU, and the ranks that have shards on
  // one host. A program writes to them as ever. False: each rank has its own copy, and a step brings
  // the others' shards there.
  TORCH_ARG(bool, share_parameters) = true;
  // step() calls LibTorch's fused operator in place of Base::step(), with one rank too: it goes over
  // memory once, and rounds otherwise than Base does in last bits. The state stays Base's, so the
  // option may change between runs. For Adagrad, Adam, AdamW and SGD of LibTorch; any other class,
  // sparse gradients and parameters that do not lie dense in memory throw InvalidArgument.
  TORCH_ARG(bool, fused) = false;
};

}  // namespace sirtaki
