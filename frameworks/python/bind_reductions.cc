#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "frameworks/python/reduce_op.h"
#include "sirtaki/reductions.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

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

// The blocking forms, of one tensor or several.
template <class Input, class Output>
void DefineAllreduce(py::module_& module, const char* name,
                     Output (*function)(const Input&, const AllreduceOptions&, const Session&)) {
  module.def(
      name,
      [function](const Input& input, int op, std::string call_name, double prescale,
                 double postscale, const ProcessSet& set, int compression, bool everywhere) {
        return function(input,
                        AllreduceOf(op, std::move(call_name), prescale, postscale, set, compression,
                                    everywhere),
                        Session());
      },
      Waiting());
}

template <class Input, class AnyHandle>
void DefineAllreduceAsync(py::module_& module, const char* name,
                          AnyHandle (*function)(const Input&, const AllreduceOptions&,
                                                const Session&)) {
  module.def(
      name,
      [function](const Input& input, int op, std::string call_name, double prescale,
                 double postscale, const ProcessSet& set, int compression, bool everywhere) {
        const bool named = !call_name.empty();
        return PythonHandle(function(input,
                                     AllreduceOf(op, std::move(call_name), prescale, postscale, set,
                                                 compression, everywhere),
                                     Session()),
                            named);
      },
      WithoutGil());
}

template <class Input, class Output>
void DefineReducescatter(py::module_& module, const char* name,
                         Output (*function)(const Input&, const ReducescatterOptions&,
                                            const Session&)) {
  module.def(
      name,
      [function](const Input& input, int op, std::string call_name, double prescale,
                 double postscale, const ProcessSet& set) {
        return function(input, ReducescatterOf(op, std::move(call_name), prescale, postscale, set),
                        Session());
      },
      Waiting());
}

template <class Input, class AnyHandle>
void DefineReducescatterAsync(py::module_& module, const char* name,
                              AnyHandle (*function)(const Input&, const ReducescatterOptions&,
                                                    const Session&)) {
  module.def(
      name,
      [function](const Input& input, int op, std::string call_name, double prescale,
                 double postscale, const ProcessSet& set) {
        const bool named = !call_name.empty();
        return PythonHandle(
            function(input, ReducescatterOf(op, std::move(call_name), prescale, postscale, set),
                     Session()),
            named);
      },
      WithoutGil());
}

}  // namespace

void BindReductions(py::module_& module) {
  DefineAllreduce<at::Tensor, at::Tensor>(module, "allreduce", &allreduce);
  DefineAllreduce<at::Tensor, at::Tensor>(module, "allreduce_", &allreduce_);
  DefineAllreduce<Tensors, Tensors>(module, "grouped_allreduce", &grouped_allreduce);
  DefineAllreduce<Tensors, Tensors>(module, "grouped_allreduce_", &grouped_allreduce_);
  DefineAllreduceAsync<at::Tensor, Handle>(module, "allreduce_async", &allreduce_async);
  DefineAllreduceAsync<at::Tensor, Handle>(module, "allreduce_async_", &allreduce_async_);
  DefineAllreduceAsync<at::Tensor, Handle>(module, "sparse_allreduce_async",
                                           &sparse_allreduce_async);
  DefineAllreduceAsync<Tensors, GroupedHandle>(module, "grouped_allreduce_async",
                                               &grouped_allreduce_async);
  DefineAllreduceAsync<Tensors, GroupedHandle>(module, "grouped_allreduce_async_",
                                               &grouped_allreduce_async_);
  DefineReducescatter<at::Tensor, at::Tensor>(module, "reducescatter", &reducescatter);
  DefineReducescatter<Tensors, Tensors>(module, "grouped_reducescatter", &grouped_reducescatter);
  DefineReducescatterAsync<at::Tensor, Handle>(module, "reducescatter_async", &reducescatter_async);
  DefineReducescatterAsync<Tensors, GroupedHandle>(module, "grouped_reducescatter_async",
                                                   &grouped_reducescatter_async);
}

}  // namespace sirtaki::python
