#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/ordered_dict.h>

#include <string>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/check_parameters.h"
#include "sirtaki/metrics.h"
#include "sirtaki/process_set.h"

namespace sirtaki {
// sirtaki/objects.h declares these; its templates and torch/serialize.h are not needed here.
SIRTAKI_API std::string broadcast_object(const std::string& bytes, int root_rank,
                                         const std::string& name, const ProcessSet& process_set);
SIRTAKI_API std::vector<std::string> allgather_object(const std::string& bytes,
                                                      const std::string& name,
                                                      const ProcessSet& process_set);
}  // namespace sirtaki

namespace sirtaki::python {
namespace {

namespace py = pybind11;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

py::bytes BroadcastBytes(const std::string& bytes, int root_rank, const std::string& name,
                         const ProcessSet& set) {
  const Wait wait;
  std::string received;
  {
    const py::gil_scoped_release release;
    received = broadcast_object(bytes, root_rank, name, set);
  }
  return py::bytes(received);
}

py::list AllgatherBytes(const std::string& bytes, const std::string& name, const ProcessSet& set) {
  const Wait wait;
  std::vector<std::string> received;
  {
    const py::gil_scoped_release release;
    received = allgather_object(bytes, name, set);
  }
  py::list list;
  for (const std::string& of_rank : received) list.append(py::bytes(of_rank));
  return list;
}

// Names may be the same where two modules stand one after the other.
void BroadcastNamed(const Named& tensors, int root_rank, const ProcessSet& set) {
  torch::OrderedDict<std::string, at::Tensor> named;
  for (const auto& [name, tensor] : tensors) {
    std::string distinct = name;
    for (int number = 2; named.contains(distinct); ++number) {
      distinct = name + " #" + std::to_string(number);
    }
    named.insert(std::move(distinct), tensor);
  }
  broadcast_parameters(named, root_rank, set);
}

}  // namespace

void BindObjects(py::module_& module) {
  module.def("broadcast_bytes", &BroadcastBytes);
  module.def("allgather_bytes", &AllgatherBytes);
  module.def("broadcast_parameters", &BroadcastNamed, Waiting());
  module.def(
      "check_parameters",
      [](const Named& tensors, const ProcessSet& set) { check_parameters(tensors, set); },
      Waiting());
  module.def(
      "metric_average",
      [](double value, const std::string& name, const ProcessSet& set) {
        return metric_average(value, name, set);
      },
      Waiting());
  module.def(
      "weighted_metric_average",
      [](double value, double weight, const std::string& name, const ProcessSet& set) {
        return metric_average(value, weight, name, set);
      },
      Waiting());
  module.def(
      "tensor_metric_average",
      [](const at::Tensor& values, const std::string& name, const ProcessSet& set) {
        return metric_average(values, name, set);
      },
      Waiting());
}

}  // namespace sirtaki::python
