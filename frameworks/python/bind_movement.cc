#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "sirtaki/movement.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

template <class Options>
Options OptionsOf(std::string name, const ProcessSet& set) {
  return Options().name(std::move(name)).process_set(set);
}

template <class Input, class Output>
void DefineBroadcast(py::module_& module, const char* name,
                     Output (*function)(const Input&, int, const BroadcastOptions&,
                                        const Session&)) {
  module.def(
      name,
      [function](const Input& input, int root_rank, std::string call_name, const ProcessSet& set) {
        return function(input, root_rank, OptionsOf<BroadcastOptions>(std::move(call_name), set),
                        Session());
      },
      Waiting());
}

template <class Input, class AnyHandle>
void DefineBroadcastAsync(py::module_& module, const char* name,
                          AnyHandle (*function)(const Input&, int, const BroadcastOptions&,
                                                const Session&)) {
  module.def(
      name,
      [function](const Input& input, int root_rank, std::string call_name, const ProcessSet& set) {
        const bool named = !call_name.empty();
        return PythonHandle(
            function(input, root_rank, OptionsOf<BroadcastOptions>(std::move(call_name), set),
                     Session()),
            named);
      },
      WithoutGil());
}

template <class Input, class Output>
void DefineAllgather(py::module_& module, const char* name,
                     Output (*function)(const Input&, const AllgatherOptions&, const Session&)) {
  module.def(
      name,
      [function](const Input& input, std::string call_name, const ProcessSet& set) {
        return function(input, OptionsOf<AllgatherOptions>(std::move(call_name), set), Session());
      },
      Waiting());
}

template <class Input, class AnyHandle>
void DefineAllgatherAsync(py::module_& module, const char* name,
                          AnyHandle (*function)(const Input&, const AllgatherOptions&,
                                                const Session&)) {
  module.def(
      name,
      [function](const Input& input, std::string call_name, const ProcessSet& set) {
        const bool named = !call_name.empty();
        return PythonHandle(
            function(input, OptionsOf<AllgatherOptions>(std::move(call_name), set), Session()),
            named);
      },
      WithoutGil());
}

AlltoallOptions AlltoallOf(std::vector<std::int64_t> splits, std::string name,
                           const ProcessSet& set) {
  return OptionsOf<AlltoallOptions>(std::move(name), set).splits(std::move(splits));
}

py::tuple Alltoall(const at::Tensor& tensor, std::vector<std::int64_t> splits, std::string name,
                   const ProcessSet& set) {
  const Wait wait;
  AlltoallResult result;
  {
    const py::gil_scoped_release release;
    result = alltoall(tensor, AlltoallOf(std::move(splits), std::move(name), set));
  }
  return py::make_tuple(result.tensor, RowsTensor(result.received_splits));
}

}  // namespace

void BindMovement(py::module_& module) {
  DefineBroadcast<at::Tensor, at::Tensor>(module, "broadcast", &broadcast);
  DefineBroadcast<at::Tensor, at::Tensor>(module, "broadcast_", &broadcast_);
  DefineBroadcast<Tensors, Tensors>(module, "grouped_broadcast", &grouped_broadcast);
  DefineBroadcast<Tensors, Tensors>(module, "grouped_broadcast_", &grouped_broadcast_);
  DefineBroadcastAsync<at::Tensor, Handle>(module, "broadcast_async", &broadcast_async);
  DefineBroadcastAsync<at::Tensor, Handle>(module, "broadcast_async_", &broadcast_async_);
  DefineBroadcastAsync<Tensors, GroupedHandle>(module, "grouped_broadcast_async",
                                               &grouped_broadcast_async);
  DefineBroadcastAsync<Tensors, GroupedHandle>(module, "grouped_broadcast_async_",
                                               &grouped_broadcast_async_);
  DefineAllgather<at::Tensor, at::Tensor>(module, "allgather", &allgather);
  DefineAllgather<Tensors, Tensors>(module, "grouped_allgather", &grouped_allgather);
  DefineAllgatherAsync<at::Tensor, Handle>(module, "allgather_async", &allgather_async);
  DefineAllgatherAsync<Tensors, GroupedHandle>(module, "grouped_allgather_async",
                                               &grouped_allgather_async);
  module.def("alltoall", &Alltoall);
  module.def(
      "alltoall_async",
      [](const at::Tensor& tensor, std::vector<std::int64_t> splits, std::string name,
         const ProcessSet& set) {
        const bool named = !name.empty();
        return PythonHandle(
            alltoall_async(tensor, AlltoallOf(std::move(splits), std::move(name), set)), named,
            Wanted::kTensorAndSplits);
      },
      WithoutGil());
}

}  // namespace sirtaki::python
