// What asynchronous calls give to Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "sirtaki/handle.h"

namespace sirtaki::python {

// In what shape the result is wanted.
enum class Wanted : unsigned char { kTensor, kTensors, kTensorAndSplits, kNothing };

// One class for both kinds of handles, with one result each. Used with the interpreter's lock.
class PythonHandle {
 public:
  explicit PythonHandle(const Handle& handle, Wanted wanted = Wanted::kTensor)
      : pending_(handle.pending()), wanted_(wanted) {}
  explicit PythonHandle(const GroupedHandle& handle, Wanted wanted = Wanted::kTensors)
      : pending_(handle.pending()), wanted_(wanted) {}
  PythonHandle(PythonHandle&&) noexcept = default;
  PythonHandle& operator=(PythonHandle&&) = delete;
  ~PythonHandle();

  bool Poll() const;
  pybind11::object Synchronize() const;

 private:
  std::shared_ptr<detail::Pending> pending_;
  const Wanted wanted_;
};

// How many rows came from each rank, as Horovod's programs get them: an int32 tensor.
pybind11::object RowsTensor(const std::vector<std::int64_t>& rows);

}  // namespace sirtaki::python
