#include <pybind11/stl.h>

#include <string>

#include "frameworks/python/bindings.h"
#include "sirtaki/memory.h"
#include "sirtaki/memory_plan.h"
#include "sirtaki/observability.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;

py::dict ToDict(const MetricValues& values) {
  py::dict dict;
  dict["steps"] = values.steps;
  dict["timed_steps"] = values.timed_steps;
  dict["step_seconds"] = values.step_seconds;
  dict["backward_seconds"] = values.backward_seconds;
  dict["session_seconds"] = values.session_seconds;
  dict["wait_seconds"] = values.wait_seconds;
  dict["transfer_seconds"] = values.transfer_seconds;
  dict["exposed_seconds"] = values.exposed_seconds;
  dict["agreement_seconds"] = values.agreement_seconds;
  dict["calls"] = values.calls;
  dict["messages"] = values.messages;
  dict["refused_calls"] = values.refused_calls;
  dict["groups"] = values.groups;
  dict["device_groups"] = values.device_groups;
  dict["tensors"] = values.tensors;
  dict["bytes"] = values.bytes;
  dict["negotiation_seconds"] = values.negotiation_seconds;
  dict["queue_seconds"] = values.queue_seconds;
  dict["pack_seconds"] = values.pack_seconds;
  dict["move_seconds"] = values.move_seconds;
  dict["unpack_seconds"] = values.unpack_seconds;
  dict["stall_warnings"] = values.stall_warnings;
  dict["overlap"] = values.overlap;
  dict["fusion_efficiency"] = values.fusion_efficiency;
  return dict;
}

py::dict MetricsNow() {
  Metrics now;
  {
    const py::gil_scoped_release release;
    now = metrics();
  }
  py::dict dict = ToDict(now);
  dict["last_step"] = ToDict(now.last_step);
  return dict;
}

py::dict MemoryNow() {
  const MemoryUse use = memory_use();
  py::dict dict;
  dict["in_use_bytes"] = use.in_use_bytes;
  dict["cached_bytes"] = use.cached_bytes;
  dict["peak_bytes"] = use.peak_bytes;
  dict["limit_bytes"] = use.limit_bytes;
  dict["returned_bytes"] = use.returned_bytes;
  dict["allocations"] = use.allocations;
  dict["from_heap"] = use.from_heap;
  return dict;
}

}  // namespace

void BindObservability(py::module_& module) {
  module.def("metrics", &MetricsNow);
  module.def("memory_use", &MemoryNow);
  module.def(
      "memory_plan",
      [](std::int64_t parameters, std::int64_t gradients, std::int64_t state, int ranks,
         int ranks_of_host, bool parameters_once) {
        return memory_plan({parameters, gradients, state}, ranks, ranks_of_host, parameters_once)
            .text();
      },
      WithoutGil());
  module.def("release_memory", &release_memory, WithoutGil());
  module.def("start_timeline", &start_timeline, WithoutGil());
  module.def("stop_timeline", &stop_timeline, WithoutGil());
  module.def("mark", &mark, WithoutGil());
}

}  // namespace sirtaki::python
