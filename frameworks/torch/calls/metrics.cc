#include "sirtaki/metrics.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <sstream>
#include <utility>

#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

// `invalid`: what is wrong with this rank's values.
at::Tensor Reduce(const at::Tensor& values, core::ReduceOp reduction, std::string invalid,
                  const std::string& name, const ProcessSet& process_set) {
  const detail::SessionSet set = detail::SetOf(process_set);
  detail::TensorCall call = detail::OwnCall(core::OpKind::kAllReduce, values, name, set);
  call.reduction = reduction;
  call.invalid = std::move(invalid);
  return detail::PendingTensor::Start(std::move(call), set.session)->Synchronize();
}

std::string Text(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

}  // namespace

double metric_average(double value, const std::string& name, const ProcessSet& process_set) {
  const at::Tensor values = at::empty({}, at::kDouble);
  *values.mutable_data_ptr<double>() = value;
  return *Reduce(values, core::ReduceOp::kAverage, "", name, process_set).const_data_ptr<double>();
}

double metric_average(double value, double weight, const std::string& name,
                      const ProcessSet& process_set) {
  std::string invalid;
  if (!std::isfinite(weight) || weight < 0) {
    invalid = "the weight is " + Text(weight) + "; it must be a finite number, not negative";
  }
  const at::Tensor values = at::empty({2}, at::kDouble);
  values.mutable_data_ptr<double>()[0] = weight == 0 ? 0 : value * weight;
  values.mutable_data_ptr<double>()[1] = weight;
  const at::Tensor sums =
      Reduce(values, core::ReduceOp::kSum, std::move(invalid), name, process_set);
  const double sum = sums.const_data_ptr<double>()[0];
  const double total = sums.const_data_ptr<double>()[1];
  if (total > 0 && std::isfinite(total)) return sum / total;
  detail::ThrowInvalid(
      "metric_average" + (name.empty() ? "" : " \"" + name + "\"") +
      ": the weights of all ranks add up to " + Text(total) +
      "; give at least one rank a weight above 0, and none one that is too large to be added");
}

at::Tensor metric_average(const at::Tensor& values, const std::string& name,
                          const ProcessSet& process_set) {
  std::string invalid;
  if (values.defined() && !values.is_floating_point()) {
    invalid = "an average of " + detail::TypeAndShape(values) +
              " would be truncated; convert it to a floating point type";
  }
  return Reduce(values, core::ReduceOp::kAverage, std::move(invalid), name, process_set);
}

}  // namespace sirtaki
