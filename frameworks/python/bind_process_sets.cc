#include <pybind11/stl.h>

#include <vector>

#include "frameworks/python/bindings.h"
#include "sirtaki/process_set.h"

namespace sirtaki::python {

namespace py = pybind11;

void BindProcessSets(py::module_& module) {
  py::class_<ProcessSet>(module, "ProcessSet")
      .def(py::init<>())  // all ranks
      .def_property_readonly("id", &ProcessSet::id)
      .def("rank", &ProcessSet::rank, WithoutGil())
      .def("size", &ProcessSet::size, WithoutGil())
      .def("ranks", &ProcessSet::ranks, WithoutGil())
      .def("included", &ProcessSet::included, WithoutGil());
  module.def(
      "add_process_set", [](const std::vector<int>& ranks) { return add_process_set(ranks); },
      WithoutGil());
  module.def(
      "remove_process_set", [](const ProcessSet& set) { remove_process_set(set); }, WithoutGil());
  module.def("local_process_set", &local_process_set, WithoutGil());
  module.def("cross_process_set", &cross_process_set, WithoutGil());
  module.def("initial_process_sets", &initial_process_sets, WithoutGil());
}

}  // namespace sirtaki::python
