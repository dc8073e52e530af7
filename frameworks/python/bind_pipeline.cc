#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/optim/sgd.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "frameworks/python/reducers.h"
#include "sirtaki/pipeline.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;
using detail::PipelineCore;
using Tensors = PipelineCore::Tensors;
using Skips = std::vector<std::tuple<std::string, int, int>>;

PipelineOptions PipelineOptionsOf(
    int micro_batches, const std::string& schedule, const std::string& partition,
    int stages_per_rank, const std::vector<int>& placing, const std::vector<int>& recompute,
    const Skips& skips, const PipelineOptions::Ties& ties, double timeout, const std::string& name,
    const ProcessSet& process_set,
    const std::optional<std::tuple<Mesh, std::string, std::string>>& mesh) {
  std::vector<PipelineSkip> skip_list;
  for (const auto& [skip, from, to] : skips) skip_list.push_back({skip, from, to});
  PipelineOptions options = PipelineOptions()
                                .micro_batches(micro_batches)
                                .schedule(schedule)
                                .partition(partition)
                                .stages_per_rank(stages_per_rank)
                                .placing(placing)
                                .recompute(recompute)
                                .skips(std::move(skip_list))
                                .ties(ties)
                                .timeout(Milliseconds(timeout))
                                .name(name)
                                .process_set(process_set);
  if (mesh) options.mesh(std::get<0>(*mesh), std::get<1>(*mesh), std::get<2>(*mesh));
  return options;
}

// An error of Python's in backward() has been put into the thread's state by autograd; it leaves as
// the exception that it is.
template <class Body>
auto WithPythonErrors(const Body& body) {
  try {
    return body();
  } catch (python_error& error) {
    const py::gil_scoped_acquire acquire;
    error.restore();
    throw py::error_already_set();
  }
}

using MakeStage = std::function<std::pair<PipelineStage::Function, NamedTensors>(int stage)>;

// The core, which waits and lets functions of Python go: without the interpreter's lock.
class PythonPipeline {
 public:
  PythonPipeline(const PipelineOptions& options, const std::vector<int>& begins,
                 const MakeStage& make, const PipelineLoss::Function& loss)
      : core_(std::make_unique<PipelineCore>(
            options, begins,
            [&make](int stage) {
              auto [forward, parameters] = make(stage);
              return PipelineCore::Stage{std::move(forward), std::move(parameters)};
            },
            loss)) {}
  ~PythonPipeline() {
    const py::gil_scoped_release release;
    core_.reset();
  }
  PythonPipeline(const PythonPipeline&) = delete;
  PythonPipeline& operator=(const PythonPipeline&) = delete;

  double TrainBatch(const Tensors& inputs, const Tensors& targets) {
    return WithPythonErrors([&] { return core_->TrainBatch(inputs, targets); });
  }
  std::pair<double, Tensors> EvaluateBatch(const Tensors& inputs, const Tensors& targets) {
    Tensors outputs;
    const double loss = core_->EvaluateBatch(inputs, targets, &outputs);
    return {loss, std::move(outputs)};
  }
  PipelineCore& core() { return *core_; }

 private:
  std::unique_ptr<PipelineCore> core_;
};

py::dict Facts(const PipelineReport& report) {
  py::dict facts;
  facts["schedule"] = report.schedule;
  facts["picture"] = report.picture;
  facts["bubble"] = report.bubble;
  facts["peak_activations"] = report.peak_activations;
  facts["most_kept"] = report.most_kept;
  facts["waited"] = report.waited;
  return facts;
}

// The arguments of Python's DistributedOptimizer.
py::dict OptimizerArguments(PythonPipeline& pipeline) {
  const DistributedOptimizerOptions options = pipeline.core().optimizer_options();
  py::dict arguments;
  arguments["process_set"] = options.process_set();
  arguments["backward_passes_per_step"] = options.backward_passes_per_step();
  arguments["average_at"] = options.average_at() == Average::Step ? "step" : "backward";
  return arguments;
}

}  // namespace

void BindPipeline(py::module_& module) {
  py::class_<PipelineOptions>(module, "PipelineOptions")
      .def(py::init(&PipelineOptionsOf), py::kw_only(), py::arg("micro_batches"),
           py::arg("schedule"), py::arg("partition"), py::arg("stages_per_rank"),
           py::arg("placing"), py::arg("recompute"), py::arg("skips"), py::arg("ties"),
           py::arg("timeout"), py::arg("name"), py::arg("process_set"), py::arg("mesh"));

  module.def("cut_layers", &PipelineCore::Cut, Waiting());
  module.def("pipeline_stage_of", &PipelineCore::StageTextOf, WithoutGil());
  module.def("pipeline_rows_of", &PipelineCore::RowsOf, WithoutGil());
  py::class_<PythonPipeline>(module, "Pipeline")
      .def(py::init<const PipelineOptions&, const std::vector<int>&, const MakeStage&,
                    const PipelineLoss::Function&>(),
           Waiting())
      .def("train_batch", &PythonPipeline::TrainBatch, Waiting())
      .def("evaluate_batch", &PythonPipeline::EvaluateBatch, Waiting())
      .def("clip_grad_norm",
           [](PythonPipeline& self,
              const std::vector<std::pair<PythonOptimizer*, py::list>>& optimizers, double max_norm,
              double norm_type, bool error_if_nonfinite) {
             std::deque<torch::optim::SGD> plain;  // make no step
             std::vector<torch::optim::Optimizer*> all;
             for (const auto& [optimizer, groups] : optimizers) {
               if (optimizer != nullptr) {
                 optimizer->Follow(groups);
                 all.push_back(optimizer);
               } else {
                 all.push_back(&plain.emplace_back(groups.cast<Tensors>(), 0));
               }
             }
             const py::gil_scoped_release release;
             return self.core().ClipGradNorm(all, max_norm, norm_type, error_if_nonfinite);
           })
      .def("replace_parameters",
           [](PythonPipeline& self, const NamedTensors& now) { self.core().Replace(now); })
      .def("optimizer_options", &OptimizerArguments)
      .def_property_readonly("stages", [](PythonPipeline& self) { return self.core().stages(); })
      .def_property_readonly("is_first",
                             [](PythonPipeline& self) { return self.core().is_first(); })
      .def_property_readonly("is_last", [](PythonPipeline& self) { return self.core().is_last(); })
      .def("report", [](PythonPipeline& self) { return Facts(self.core().report()); });
}

}  // namespace sirtaki::python
