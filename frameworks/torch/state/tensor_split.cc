#include "frameworks/torch/state/tensor_split.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/state/optimizer_archive.h"

namespace sirtaki::detail {
namespace {

// The marks of all tensors of this process: a tensor has no room for a mark that LibTorch does not
// take away when a hook is added or memory is replaced. A session is not asked, since optimizers and
// clipping know none.
template <class Of>
class TensorMarks {
 public:
  void Add(const at::Tensor& tensor, const std::shared_ptr<const Of>& split) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(marks_, [](auto& mark) { return mark.second.expired(); });
    auto& splits = marks_
                       .try_emplace(tensor.unsafeGetTensorImpl(),
                                    Mark{WeakTensor(tensor.getIntrusivePtr()), {}})
                       .first->second.splits;
    std::erase_if(splits, [&](const auto& known) { return known.lock() == split; });
    splits.push_back(split);
  }

  std::shared_ptr<const Of> Find(const at::Tensor& tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = marks_.find(tensor.unsafeGetTensorImpl());
    if (found == marks_.end()) return nullptr;
    auto& splits = found->second.splits;
    std::erase_if(splits, [](const auto& split) { return split.expired(); });
    return splits.empty() ? nullptr : splits.back().lock();
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  struct Mark {
    // While this is kept, no other tensor has the address.
    WeakTensor tensor;
    // One for each layer that has the tensor: when a layer goes, that of another remains.
    std::vector<std::weak_ptr<const Of>> splits;

    bool expired() const {
      return tensor.expired() || std::all_of(splits.begin(), splits.end(),
                                             [](const auto& split) { return split.expired(); });
    }
  };

  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Mark> marks_;
};

TensorMarks<TensorSplit>& Marks() {
  static TensorMarks<TensorSplit> marks;
  return marks;
}

TensorMarks<std::string>& StageMarks() {
  static TensorMarks<std::string> marks;
  return marks;
}

}  // namespace

void MarkSplit(const at::Tensor& parameter, const TensorSplitPtr& split) {
  Marks().Add(parameter, split);
}

TensorSplitPtr SplitOf(const at::Tensor& tensor) {
  return tensor.defined() ? Marks().Find(tensor) : nullptr;
}

TensorSplitPtr SplitOverRanks(const at::Tensor& tensor) {
  TensorSplitPtr split = SplitOf(tensor);
  return split && split->split.ranks > 1 ? split : nullptr;
}

std::string SplitText(const at::Tensor& tensor) {
  const TensorSplitPtr split = SplitOverRanks(tensor);
  if (!split) return {};
  return ", part " + std::to_string(split->index()) + " of " + std::to_string(split->split.ranks) +
         " along dimension " + std::to_string(split->dim);
}

void MarkStage(const at::Tensor& parameter, const std::shared_ptr<const std::string>& stage) {
  StageMarks().Add(parameter, stage);
}

std::string StageTextOf(const at::Tensor& tensor) {
  const auto stage = StageMarks().Find(tensor);
  return stage ? *stage : std::string();
}

std::string PlaceText(const at::Tensor& tensor) {
  const std::string stage = StageTextOf(tensor);
  return SplitText(tensor) + (stage.empty() ? "" : ", " + stage);
}

bool IsOfAStage(const torch::optim::Optimizer& optimizer) {
  return std::ranges::any_of(ParametersOf(optimizer), [](const at::Tensor& parameter) {
    return StageMarks().Find(parameter) != nullptr;
  });
}

at::Tensor TakePart(const at::Tensor& whole, const TensorSplit& split, int index) {
  std::vector<at::Tensor> ranges;
  for (const auto& [begin, count] : parallel::RangesOf(split.split, index)) {
    ranges.push_back(whole.narrow(split.dim, begin, count));
  }
  return at::cat(ranges, split.dim).contiguous();
}

std::vector<std::int64_t> WholeSizes(const at::Tensor& part, const TensorSplit& split) {
  std::vector<std::int64_t> sizes = part.sizes().vec();
  sizes[static_cast<std::size_t>(split.dim)] = split.split.size;
  return sizes;
}

at::Tensor GatherWhole(const at::Tensor& part, const TensorSplit& split) {
  const at::NoGradGuard no_grad;
  at::Tensor whole = at::empty(WholeSizes(part, split), part.options());
  if (split.split.ranks == 1) return whole.copy_(part);
  // The parts come one after the other along the first dimension, in which they may differ.
  const at::Tensor parts = AllGatherBlocking(part.detach().movedim(split.dim, 0).contiguous(),
                                             split.key + "/whole", split.set)
                               .movedim(0, split.dim);
  std::int64_t at = 0;
  for (int index = 0; index < split.split.ranks; ++index) {
    for (const auto& [begin, count] : parallel::RangesOf(split.split, index)) {
      whole.narrow(split.dim, begin, count).copy_(parts.narrow(split.dim, at, count));
      at += count;
    }
  }
  return whole;
}

std::vector<TensorSplitPtr> SplitSetsOf(const torch::optim::Optimizer& optimizer) {
  std::vector<TensorSplitPtr> sets;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      TensorSplitPtr split = SplitOverRanks(parameter);
      if (!split) continue;
      const auto is_same = [&split](const TensorSplitPtr& known) {
        return known->set.members.set == split->set.members.set;
      };
      if (std::none_of(sets.begin(), sets.end(), is_same)) sets.push_back(std::move(split));
    }
  }
  return sets;
}

}  // namespace sirtaki::detail
