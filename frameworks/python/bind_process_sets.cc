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
      .def(
          "rank", [](const ProcessSet& set) { return set.rank(); }, WithoutGil())
      .def(
          "size", [](const ProcessSet& set) { return set.size(); }, WithoutGil())
      .def(
          "ranks", [](const ProcessSet& set) { return set.ranks(); }, WithoutGil())
      .def(
          "included", [](const ProcessSet& set) { return set.included(); }, WithoutGil());
  module.def(
      "add_process_set", [](const std::vector<int>& ranks) { return add_process_set(ranks); },
      WithoutGil());
  module.def(
      "remove_process_set", [](const ProcessSet& set) { remove_process_set(set); }, WithoutGil());
  module.def(
      "local_process_set", [] { return local_process_set(); }, WithoutGil());
  module.def(
      "cross_process_set", [] { return cross_process_set(); }, WithoutGil());
  module.def(
      "initial_process_sets", [] { return initial_process_sets(); }, WithoutGil());
}

}  // namespace sirtaki::python
