// The parts of the extension module sirtaki._C. Each file binds what the public header of its name
// offers; shapes and defaults that Python users see are made in the package's own modules.
//
// The interpreter's lock is let go in every call that could wait, be it for a lock: threads of the
// library free tensors, and those that Python knows need the interpreter's lock for it.
#pragma once

#include <pybind11/pybind11.h>

#include "sirtaki/process_set.h"

namespace sirtaki::python {

using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// These are called in this order: types come before the functions that take them.
void BindErrors(pybind11::module_& module);
void BindSession(pybind11::module_& module);
void BindProcessSets(pybind11::module_& module);
void BindMesh(pybind11::module_& module);
void BindHandles(pybind11::module_& module);
void BindReductions(pybind11::module_& module);
void BindMovement(pybind11::module_& module);
void BindMessages(pybind11::module_& module);
void BindObjects(pybind11::module_& module);
void BindObservability(pybind11::module_& module);
void BindReducers(pybind11::module_& module);
void BindPipeline(pybind11::module_& module);
void BindBatchNorm(pybind11::module_& module);
void BindTensorParallel(pybind11::module_& module);

}  // namespace sirtaki::python
