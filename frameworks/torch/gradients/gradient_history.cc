#include "frameworks/torch/gradients/gradient_history.h"

#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {

bool GradientHistory::IsNoted(const at::Tensor& gradient, bool also_changed) const {
  return average_ && average_->gradient._unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
         (also_changed || VersionOf(gradient) == average_->version);
}

bool GradientHistory::Holds(const at::Tensor& gradient) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return IsNoted(gradient, /*also_changed=*/false);
}

void GradientHistory::Note(const at::Tensor& gradient) {
  average_.reset();
  if (!gradient.defined()) return;
  average_.emplace(Average{WeakImpl(gradient.getIntrusivePtr()), VersionOf(gradient)});
}

bool GradientHistory::BeginPass(const at::Tensor& gradient, bool later, bool also_changed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fresh_ = !gradient.defined();
  on_average_ = !fresh_ && (later || IsNoted(gradient, also_changed));
  return on_average_;
}

void GradientHistory::EndPass(const at::Tensor& gradient) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (on_average_) Note(gradient);
}

bool GradientHistory::EndPasses(const at::Tensor& gradient, bool touched, bool averaged) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool holds = IsNoted(gradient, /*also_changed=*/false);
  on_average_ = touched ? on_average_ && holds : gradient.defined() && (averaged || holds);
  return on_average_;
}

void GradientHistory::NoteAverage(const at::Tensor& gradient) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Note(gradient);
}

void GradientHistory::ForgetAverage() {
  const std::lock_guard<std::mutex> lock(mutex_);
  average_.reset();
  on_average_ = false;
}

void GradientHistory::ForgetPasses() {
  const std::lock_guard<std::mutex> lock(mutex_);
  fresh_ = false;
}

bool GradientHistory::fresh() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return fresh_;
}

bool GradientHistory::has_average() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return average_.has_value();
}

bool GradientHistory::on_average() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return on_average_;
}

}  // namespace sirtaki::detail
