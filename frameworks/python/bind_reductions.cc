#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "frameworks/python/reduce_op.h"
#include "sirtaki/reductions.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;

AllreduceOptions AllreduceOf(int op, std::string name, double prescale, double postscale,
                             const ProcessSet& set, int compression, bool everywhere) {
  return AllreduceOptions()
      .op(OpOf(op))
      .name(std::move(name))
      .prescale(prescale)
      .postscale(postscale)
      .process_set(set)
      .compression(CompressionOf(compression))
      .compression_scope(ScopeOf(everywhere));
}

ReducescatterOptions ReducescatterOf(int op, std::string name, double prescale, double postscale,
                                     const ProcessSet& set) {
  return ReducescatterOptions()
      .op(OpOf(op))
      .name(std::move(name))
      .prescale(prescale)
      .postscale(postscale)
      .process_set(set);
}

}  // namespace

void BindReductions(py::module_& module) {
  Define(module, "allreduce", &allreduce, &AllreduceOf);
  Define(module, "allreduce_", &allreduce_, &AllreduceOf);
  Define(module, "grouped_allreduce", &grouped_allreduce, &AllreduceOf);
  Define(module, "grouped_allreduce_", &grouped_allreduce_, &AllreduceOf);
  Define(module, "allreduce_async", &allreduce_async, &AllreduceOf);
  Define(module, "allreduce_async_", &allreduce_async_, &AllreduceOf);
  Define(module, "sparse_allreduce_async", &sparse_allreduce_async, &AllreduceOf);
  Define(module, "grouped_allreduce_async", &grouped_allreduce_async, &AllreduceOf);
  Define(module, "grouped_allreduce_async_", &grouped_allreduce_async_, &AllreduceOf);
  Define(module, "reducescatter", &reducescatter, &ReducescatterOf);
  Define(module, "grouped_reducescatter", &grouped_reducescatter, &ReducescatterOf);
  Define(module, "reducescatter_async", &reducescatter_async, &ReducescatterOf);
  Define(module, "grouped_reducescatter_async", &grouped_reducescatter_async, &ReducescatterOf);
}

}  // namespace sirtaki::python
