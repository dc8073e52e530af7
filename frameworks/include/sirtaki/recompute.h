// recompute() trades time for memory: a part of the forward pass keeps nothing for backward(), which
// runs the part again. This is activation checkpointing.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "sirtaki/export.h"

namespace sirtaki {

namespace detail {

using Segment = std::function<std::vector<at::Tensor>()>;

// Runs the segment as recompute() does. `inputs`: the tensors among its arguments.
SIRTAKI_API std::vector<at::Tensor> Recompute(Segment segment,
                                              const std::vector<at::Tensor>& inputs);

inline void AddTensors(std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  tensors.push_back(tensor);
}
inline void AddTensors(std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& list) {
  tensors.insert(tensors.end(), list.begin(), list.end());
}
template <class T>
void AddTensors(std::vector<at::Tensor>& /*tensors*/, const T& /*no_tensor*/) {}

}  // namespace detail

// Returns function(inputs...), which is a tensor or a std::vector of tensors, and keeps none of the
// tensors that backward() needs of its inside. backward() calls the function once more with the same
// inputs, and then goes through what that has made:
//
//   auto y = sirtaki::recompute(
//       [block](const at::Tensor& x) mutable { return block->forward(x); }, x);
//
// Gradients are those of the plain call, of the inputs, the modules' parameters and whatever else
// the function uses; at most the last bits differ, where three or more uses of a tensor are added up
// in another order. Each parameter's gradient is complete once in each backward(), also where several
// segments share it, so a DistributedOptimizer needs nothing. Segments may be nested, and
// retain_graph, create_graph and torch::autograd::grad work. Without a gradient to compute it is the
// plain call.
//
// The second run finds the random numbers of the first (of the default generators of the CPU, of the
// current GPU, and of the others that the process uses), so that dropout drops the same, and the same
// autocast; in both runs autocast keeps no weight that it has converted. No other thread, as one of a
// data loader's, may draw from these generators while a function runs that draws from them: dropout would
// drop others in backward(), and nothing notices. Give such threads generators of their own. What else the
// function changes, it changes twice: the running statistics of a batch norm, for instance. A collective
// within it is called again in backward(), in the same order on all ranks.
//
// The function and the inputs are kept until backward(): capture modules by value (holders are
// references), not locals by reference. What the function uses must not be changed in place until
// then, nor by the function. backward() throws InvalidArgument if inputs, or parameters that
// require gradients, were, or if the second run makes other shapes or types, or uses other tensors
// that require gradients, than the first. A change of other captured tensors is not noticed: give
// them as inputs.
template <class Function, class... Inputs>
auto recompute(Function&& function, Inputs&&... inputs) {
  using Kept = std::tuple<std::decay_t<Inputs>...>;
  using Result =
      std::decay_t<std::invoke_result_t<std::decay_t<Function>&, const std::decay_t<Inputs>&...>>;
  constexpr bool kOne = std::is_same_v<Result, at::Tensor>;
  static_assert(kOne || std::is_same_v<Result, std::vector<at::Tensor>>,
                "the function of recompute() returns a tensor or a std::vector of tensors");
  static_assert(
      (!std::is_same_v<std::decay_t<Inputs>, at::TensorList> && ...),
      "give recompute() a std::vector of tensors: what an at::TensorList refers to may be "
      "gone in backward()");
  std::vector<at::Tensor> tensors;
  (detail::AddTensors(tensors, inputs), ...);
  auto segment = [function = std::decay_t<Function>(std::forward<Function>(function)),
                  kept = Kept(std::forward<Inputs>(inputs)...)]() mutable {
    if constexpr (kOne) {
      return std::vector<at::Tensor>{std::apply(function, std::as_const(kept))};
    } else {
      return std::apply(function, std::as_const(kept));
    }
  };
  std::vector<at::Tensor> results = detail::Recompute(std::move(segment), tensors);
  if constexpr (kOne) {
    return std::move(results.front());
  } else {
    return results;
  }
}

}  // namespace sirtaki
