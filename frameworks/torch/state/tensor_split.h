// Parameters that are one rank's part of a tensor: they are marked as such, and put together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "frameworks/torch/session/session_set.h"
#include "parallel/split.h"

namespace torch::optim {
class Optimizer;
}

namespace sirtaki::detail {

// A TensorSplit says how a tensor is divided among the ranks of a set, by their order there.
struct TensorSplit {
  SessionSet set;
  std::string key;  // what the set's calls for this layer begin with
  std::int64_t dim = 0;
  parallel::Split split;

  int index() const { return static_cast<int>(set.members.index()); }
};
using TensorSplitPtr = std::shared_ptr<const TensorSplit>;

// A mark stays on the tensor, whatever memory, type and device it is given, as long as the split is
// kept by somebody else; copies have none. Thread-safe.
void MarkSplit(const at::Tensor& parameter, const TensorSplitPtr& split);
// Null: the tensor is whole, and not of a split layer.
TensorSplitPtr SplitOf(const at::Tensor& tensor);
// The same, but null also where the split is over one rank, which has the whole.
TensorSplitPtr SplitOverRanks(const at::Tensor& tensor);

// ", part 1 of 4 along dimension 0" for lists that ranks compare; empty: the tensor is whole.
std::string SplitText(const at::Tensor& tensor);

// Marks a parameter of a pipeline whose other stages other ranks have, as long as `stage`, a text that is
// the same on all ranks that have the parameter, lives.
void MarkStage(const at::Tensor& parameter, const std::shared_ptr<const std::string>& stage);
std::string StageTextOf(const at::Tensor& tensor);  // empty: it is not marked so
// What lists that ranks compare say of a parameter without its name: SplitText, and the text of its stage.
std::string PlaceText(const at::Tensor& tensor);
// Whether parameters of the optimizer are marked so.
bool IsOfAStage(const torch::optim::Optimizer& optimizer);

// The part of the whole that the rank with this index has, in new memory.
at::Tensor TakePart(const at::Tensor& whole, const TensorSplit& split, int index);

// The shape of the whole.
std::vector<std::int64_t> WholeSizes(const at::Tensor& part, const TensorSplit& split);

// The whole, in new memory. Collective over the split's set.
at::Tensor GatherWhole(const at::Tensor& part, const TensorSplit& split);

// The sets of several ranks over which parameters of the optimizer are split, each once, with one of
// their splits. The ranks of a set have the same parameters in the same order.
std::vector<TensorSplitPtr> SplitSetsOf(const torch::optim::Optimizer& optimizer);

}  // namespace sirtaki::detail
