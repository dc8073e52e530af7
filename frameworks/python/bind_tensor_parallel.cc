#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "sirtaki/tensor_parallel.h"

namespace sirtaki::python {

namespace py = pybind11;

void BindTensorParallel(py::module_& module) {
  using detail::ParallelLayer;
  using MaybeTensor = std::optional<at::Tensor>;
  py::class_<ParallelLayer>(module, "ParallelLayer")
      .def(py::init([](const std::string& kind, const std::string& name, const ProcessSet& set,
                       const std::string& what, std::int64_t size, std::int64_t blocks,
                       std::int64_t unit, std::vector<std::string> options) {
             return ParallelLayer(kind, name, set, {what.c_str(), size, blocks, unit},
                                  std::move(options));
           }),
           Waiting())
      .def("anew", &ParallelLayer::Anew)
      .def("index", &ParallelLayer::index)
      .def("ranks", &ParallelLayer::ranks)
      .def("part", &ParallelLayer::Part, WithoutGil())
      .def("common", &ParallelLayer::Common, Waiting())
      .def("mark", &ParallelLayer::Mark, WithoutGil())
      .def(
          "column",
          [](const ParallelLayer& self, const at::Tensor& input, const at::Tensor& weight,
             const MaybeTensor& bias, bool gather) {
            return self.Column(input, weight, bias.value_or(at::Tensor()), gather);
          },
          Waiting())
      .def(
          "row",
          [](const ParallelLayer& self, const at::Tensor& input, const at::Tensor& weight,
             const MaybeTensor& bias, bool parallel) {
            return self.Row(input, weight, bias.value_or(at::Tensor()), parallel);
          },
          Waiting())
      .def("embed", &ParallelLayer::Embed, Waiting())
      .def("cross_entropy", &ParallelLayer::CrossEntropy, Waiting());
  module.def("is_split", &is_split, WithoutGil());
  module.def("split_set_of", &detail::SplitSetOf, WithoutGil());
  module.def("whole_shape_of", &detail::WholeShapeOf, WithoutGil());
  module.def("part_for", &detail::PartFor, WithoutGil());
  module.def("whole_of", &whole_of, Waiting());
  module.def("fill_whole", &fill_whole);
}

}  // namespace sirtaki::python
