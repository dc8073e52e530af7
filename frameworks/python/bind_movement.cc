#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "sirtaki/data_parallel.h"
#include "sirtaki/movement.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;

template <class Options>
Options OptionsOf(std::string name, const ProcessSet& set) {
  return Options().name(std::move(name)).process_set(set);
}

template <class Input, class Result>
void DefineBroadcast(py::module_& module, const char* name,
                     Result (*function)(const Input&, int, const BroadcastOptions&)) {
  module.def(
      name,
      [function](const Input& input, int root_rank, std::string call_name, const ProcessSet& set) {
        const auto options = OptionsOf<BroadcastOptions>(std::move(call_name), set);
        return ForPython(function(input, root_rank, options), !options.name().empty());
      },
      GuardOf<Result>());
}

AlltoallOptions AlltoallOf(std::vector<std::int64_t> splits, std::string name,
                           const ProcessSet& set) {
  return OptionsOf<AlltoallOptions>(std::move(name), set).splits(std::move(splits));
}

py::tuple Alltoall(const at::Tensor& tensor, std::vector<std::int64_t> splits, std::string name,
                   const ProcessSet& set) {
  const AlltoallOptions options = AlltoallOf(std::move(splits), std::move(name), set);
  const AlltoallResult result = Released([&] { return alltoall(tensor, options); });
  return py::make_tuple(result.tensor, RowsTensor(result.received_splits));
}

}  // namespace

void BindMovement(py::module_& module) {
  DefineBroadcast(module, "broadcast", &broadcast);
  DefineBroadcast(module, "broadcast_", &broadcast_);
  DefineBroadcast(module, "grouped_broadcast", &grouped_broadcast);
  DefineBroadcast(module, "grouped_broadcast_", &grouped_broadcast_);
  DefineBroadcast(module, "broadcast_async", &broadcast_async);
  DefineBroadcast(module, "broadcast_async_", &broadcast_async_);
  DefineBroadcast(module, "grouped_broadcast_async", &grouped_broadcast_async);
  DefineBroadcast(module, "grouped_broadcast_async_", &grouped_broadcast_async_);
  module.def("broadcast_buffers", [](const std::vector<at::Tensor>& buffers, int root_rank,
                                     std::string name, const ProcessSet& set) {
    const auto options = OptionsOf<BroadcastOptions>(std::move(name), set);
    Released([&] { detail::BroadcastBuffers(buffers, root_rank, options); });
  });
  Define(module, "allgather", &allgather, &OptionsOf<AllgatherOptions>);
  Define(module, "grouped_allgather", &grouped_allgather, &OptionsOf<AllgatherOptions>);
  Define(module, "allgather_async", &allgather_async, &OptionsOf<AllgatherOptions>);
  Define(module, "grouped_allgather_async", &grouped_allgather_async, &OptionsOf<AllgatherOptions>);
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
