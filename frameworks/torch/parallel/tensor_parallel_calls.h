// What split layers are made of: their name between the ranks, and the four ways into a part of the
// model that is computed in parts and out of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/tensor_split.h"

namespace sirtaki::detail {

// ParallelCalls keeps what a split layer has, its splits as well: marks of parameters end with the layer.
struct ParallelCalls {
  std::string kind;
  std::string name;
  SessionSet set;
  std::string key;          // "ColumnParallelLinear #3"
  TensorSplitPtr along[2];  // the same split, along dimension 0 and 1

  const TensorSplit& split() const { return *along[0]; }
  int ranks() const { return split().split.ranks; }
  int index() const { return split().index(); }
  std::int64_t part_size() const { return parallel::PartSize(split().split, index()); }
};
using ParallelCallsPtr = std::shared_ptr<const ParallelCalls>;

// A Made is a tensor, or why this rank could not make it, which the other ranks are told. Exceptions of Python
// pass through Make: activation checkpointing ends a recomputation by one, on all ranks.
struct Made {
  at::Tensor tensor;
  std::string invalid;
};
Made Make(const std::function<at::Tensor()>& make);

// Starts a sum over the ranks, in place: the tensor is the caller's own. All ranks get
// InvalidArgument if one of them has made none.
std::shared_ptr<PendingTensor> StartSum(const ParallelCalls& calls, const std::string& part,
                                        const Made& made, bool will_wait);
// GatherMade returns what all ranks have made, one behind the other. All ranks get InvalidArgument if
// one of them has made none.
at::Tensor GatherMade(const ParallelCalls& calls, const std::string& part, const Made& made);

// A Region is a way between tensors that all ranks have alike and their parts, each of which is the
// gradient of another.
enum class Region : std::uint8_t {
  kEnter,    // the tensor itself; its gradients are summed
  kSum,      // the sum of the ranks' tensors; its gradient is passed on
  kGather,   // the last dimension whole; of its gradient the rank's part
  kScatter,  // the rank's part of the last dimension; of its gradient the whole
};

// Differentiable, as often as one likes. Collective, except kEnter and kScatter.
at::Tensor Through(Region region, const at::Tensor& tensor, const ParallelCallsPtr& calls);
// The same as kSum for a tensor of the caller's own, in its memory. Precondition: several ranks.
at::Tensor SumOwn(const Made& made, const ParallelCallsPtr& calls);
// The same as kGather for a part that may not be there. Precondition: several ranks.
at::Tensor GatherOwn(const Made& made, const ParallelCallsPtr& calls);

// A linear layer of whose output this rank has a part.
at::Tensor ColumnLinear(const at::Tensor& input, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias, const ParallelCallsPtr& calls);

// The loss of each row of logits [rows, part] with its target [rows]; float32 of half types. `wrong`:
// why this rank's targets are refused, on all ranks; empty: they are looked at.
at::Tensor SplitCrossEntropy(const at::Tensor& logits, const at::Tensor& target,
                             const std::string& wrong, const ParallelCallsPtr& calls,
                             std::int64_t ignore_index, double label_smoothing);

}  // namespace sirtaki::detail
