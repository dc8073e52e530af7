// These functions average losses, accuracies and the like over the ranks.
//
//   const double loss = sirtaki::metric_average(sum / batches, "loss");
//   const double accuracy = sirtaki::metric_average(right / seen, seen, "accuracy");  // weighted
//
// All are collective, over all ranks or those of a process set, and give the same bits on each.
// Calls without a name are matched by the order in which the ranks make them; a name may be used
// again as soon as the call has returned. Each call costs one all-reduce. Autograd does not see
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

// Returns the mean of the ranks' values, each counting the same.
SIRTAKI_API double metric_average(double value, const std::string& name = "",
                                  const ProcessSet& process_set = {});

// Returns sum(value * weight) / sum(weight) over the ranks: for shares of different sizes, with the
// number of samples as weight. The value of a rank of weight 0 is not used (0 / 0 where it saw
// nothing). Every rank throws InvalidArgument if a weight is negative, infinite or NaN, or if the
// weights add up to 0 or to infinity.
SIRTAKI_API double metric_average(double value, double weight, const std::string& name = "",
                                  const ProcessSet& process_set = {});

// Returns the mean of each element, as a new tensor of the same type and shape, which have to be
// the same on all ranks. Floating point only: every rank throws InvalidArgument otherwise, since
// the mean of integers would be truncated.
SIRTAKI_API at::Tensor metric_average(const at::Tensor& values, const std::string& name = "",
                                      const ProcessSet& process_set = {});

}  // namespace sirtaki
