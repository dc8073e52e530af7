// Averages of losses, accuracies and the like over the ranks.
//
//   const double loss = sirtaki::metric_average(sum / batches, "loss");
//   const double accuracy = sirtaki::metric_average(right / seen, seen, "accuracy");  // weighted
//
// All are collective, over all ranks or those of a process set, and give the same bits on each.
// Without a name the calls are matched by the order in which the ranks make them; a name may be
// used again as soon as the call has returned. One all-reduce each. Autograd does not see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "sirtaki/export.h"
#include "sirtaki/participants.h"

namespace sirtaki {

// The mean of the ranks' values, each counting the same.
SIRTAKI_API double metric_average(double value, const std::string& name = "",
                                  const Participants& among = {});

// sum(value * weight) / sum(weight) over the ranks: for shares of different sizes, with the number
// of samples as weight. The value of a rank of weight 0 is not looked at (0 / 0 where it saw
// nothing). Throws invalid_argument on every rank if a weight is negative, infinite or NaN, or if
// the weights add up to 0 or to infinity.
SIRTAKI_API double metric_average(double value, double weight, const std::string& name = "",
                                  const Participants& among = {});

// Of each element; a new tensor of the same type and shape, which have to be the same on all ranks.
// Floating point only, invalid_argument on every rank otherwise: the mean of integers would be
// truncated.
SIRTAKI_API at::Tensor metric_average(const at::Tensor& values, const std::string& name = "",
                                      const Participants& among = {});

}  // namespace sirtaki
