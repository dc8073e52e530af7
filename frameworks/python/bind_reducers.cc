#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "frameworks/python/bindings.h"
#include "frameworks/python/reduce_op.h"
#include "frameworks/python/reducers.h"
#include "sirtaki/gradient_bucket.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;

// Ends with close(), or when Python lets it go.
class PythonScope {
 public:
  explicit PythonScope(detail::Scope scope)
      : scope_(std::make_unique<detail::Scope>(std::move(scope))) {}
  void Close() { scope_.reset(); }

 private:
  std::unique_ptr<detail::Scope> scope_;
};

ReducerSettings SettingsOf(NamedTensors named, std::string name, int op, double predivide,
                           int passes, bool at_backward, int compression, bool everywhere,
                           bool sparse_as_dense, std::int64_t check_every, int shard,
                           bool by_element, bool share_parameters, bool over_host,
                           const ProcessSet& set, CommunicationHook hook) {
  ReducerSettings settings;
  settings.named = std::move(named);
  settings.options = DistributedOptimizerOptions()
                         .name(std::move(name))
                         .process_set(set)
                         .op(OpOf(op))
                         .average_at(at_backward ? Average::Backward : Average::Step)
                         .gradient_predivide_factor(predivide)
                         .backward_passes_per_step(passes)
                         .compression(CompressionOf(compression))
                         .compression_scope(ScopeOf(everywhere))
                         .sparse_as_dense(sparse_as_dense)
                         .check_parameters_every(check_every)
                         .shard(static_cast<Shard>(shard))
                         .shard_by(by_element ? ShardBy::Element : ShardBy::Parameter)
                         .share_parameters(share_parameters)
                         .shard_over(over_host ? ShardOver::Host : ShardOver::All)
                         .hook(std::move(hook));
  return settings;
}

}  // namespace

void BindReducers(py::module_& module) {
  module.def(
      "shard_of_job",
      [](int shard) { return static_cast<int>(detail::ShardOfJob(static_cast<Shard>(shard))); },
      WithoutGil());

  py::class_<PythonScope>(module, "Scope").def("close", &PythonScope::Close);

  py::class_<GradientBucket>(module, "GradientBucket")
      .def_readonly("name", &GradientBucket::name)
      .def_readonly("index", &GradientBucket::index)
      .def_readonly("is_last", &GradientBucket::is_last)
      .def_readonly("buffer", &GradientBucket::buffer)
      .def_readonly("parameters", &GradientBucket::parameters)
      .def_readonly("parameter_tensors", &GradientBucket::parameter_tensors)
      .def_readonly("gradients", &GradientBucket::gradients);

  py::class_<ReducerSettings>(module, "ReducerSettings")
      .def(py::init(&SettingsOf), py::kw_only(), py::arg("named"), py::arg("name"), py::arg("op"),
           py::arg("predivide"), py::arg("passes"), py::arg("at_backward"), py::arg("compression"),
           py::arg("everywhere"), py::arg("sparse_as_dense"), py::arg("check_every"),
           py::arg("shard"), py::arg("by_element"), py::arg("share_parameters"),
           py::arg("over_host"), py::arg("process_set"), py::arg("hook").none(true));

  py::class_<PythonOptimizer>(module, "OptimizerReducer")
      .def(py::init<const py::list&, ReducerSettings>())
      .def("step", &PythonOptimizer::Step)
      .def("shards", &PythonOptimizer::Shards)
      .def("gradient_shards",
           [](PythonOptimizer& self) { return self.reducer().gradient_shards(); })
      .def("synchronize", &PythonOptimizer::Synchronize)
      .def("before_zero_grad", &PythonOptimizer::BeforeZeroGrad)
      .def(
          "is_reducing", [](PythonOptimizer& self) { return self.reducer().is_reducing(); },
          WithoutGil())
      .def("clip_grad_norm", &PythonOptimizer::ClipGradNorm)
      .def("skip_step", [](PythonOptimizer& self) { self.reducer().SkipStep(); })
      .def("no_sync", [](PythonOptimizer& self) { return PythonScope(self.reducer().NoSync()); })
      .def("skip_synchronize",
           [](PythonOptimizer& self) { return PythonScope(self.reducer().SkipSynchronize()); })
      .def("has_local_gradients",
           [](PythonOptimizer& self) { return self.reducer().has_local_gradients(); });

  py::class_<ModuleReducer>(module, "ModuleReducer")
      .def(py::init<ReducerSettings>())
      .def("before_forward", &ModuleReducer::BeforeForward, py::arg("training"), WithoutGil())
      .def("begin_backward", &ModuleReducer::BeginBackward, WithoutGil())
      .def("no_sync", [](ModuleReducer& self) { return PythonScope(self.NoSync()); })
      .def_property_readonly("prefix", &ModuleReducer::prefix);
}

}  // namespace sirtaki::python
