// The parts of the extension module sirtaki._C. Each file binds what the public header of its name
// offers; shapes and defaults that Python users see are made in the package's own modules.
//
// The interpreter's lock is let go in every call that could wait, be it for a lock: threads of the
// library free tensors, and those that Python knows need the interpreter's lock for it.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "sirtaki/process_set.h"

namespace sirtaki::python {

using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// Seconds, as Python counts time-outs; none: no limit.
inline std::chrono::milliseconds Milliseconds(double seconds) {
  constexpr double kMost = 1e12;
  if (std::isnan(seconds) || seconds > kMost) return std::chrono::milliseconds(0);
  // Too short to be a number of milliseconds is not the same as no limit.
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

// In the order of the module's initialisation: types come before the functions that take them.
void BindErrors(pybind11::module_& module);
void BindSession(pybind11::module_& module);
void BindProcessSets(pybind11::module_& module);
void BindHandles(pybind11::module_& module);
void BindReductions(pybind11::module_& module);
void BindMovement(pybind11::module_& module);
void BindMessages(pybind11::module_& module);
void BindObjects(pybind11::module_& module);
void BindObservability(pybind11::module_& module);
void BindReducers(pybind11::module_& module);
void BindBatchNorm(pybind11::module_& module);

}  // namespace sirtaki::python
