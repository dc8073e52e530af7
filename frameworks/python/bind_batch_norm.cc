#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "frameworks/python/bindings.h"
#include "sirtaki/sync_batch_norm.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;

// The training step of a Python module that has the parameters and buffers itself: they may be
// replaced there at any time, so that each call brings them.
class BatchNormTraining {
 public:
  explicit BatchNormTraining(std::int64_t num_features, const ProcessSet& set)
      : module_(std::make_shared<SyncBatchNormImpl>(
            torch::nn::BatchNormOptions(num_features).affine(false).track_running_stats(false),
            set)) {}

  at::Tensor Forward(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                     const std::optional<at::Tensor>& bias,
                     const std::optional<at::Tensor>& running_mean,
                     const std::optional<at::Tensor>& running_var,
                     const std::optional<at::Tensor>& num_batches_tracked, double eps,
                     std::optional<double> momentum) {
    module_->options.eps(eps).momentum(momentum);
    module_->weight = weight.value_or(at::Tensor());
    module_->bias = bias.value_or(at::Tensor());
    module_->running_mean = running_mean.value_or(at::Tensor());
    module_->running_var = running_var.value_or(at::Tensor());
    module_->num_batches_tracked = num_batches_tracked.value_or(at::Tensor());
    return module_->forward(input);
  }

 private:
  const std::shared_ptr<SyncBatchNormImpl> module_;
};

}  // namespace

void BindBatchNorm(py::module_& module) {
  py::class_<BatchNormTraining>(module, "BatchNormTraining")
      .def(py::init<std::int64_t, const ProcessSet&>())
      .def("forward", &BatchNormTraining::Forward, WithoutGil());
}

}  // namespace sirtaki::python
