// What asynchronous calls give to Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <exception>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "sirtaki/handle.h"

namespace sirtaki::python {

// Wanted says in what shape Python gets the result.
enum class Wanted : unsigned char { kTensor, kTensors, kTensorAndSplits, kNothing };

// One class for both kinds of handles, with one result each. Used with the interpreter's lock. A
// handle of a named operation that is dropped unused keeps its name in flight, as Horovod's do,
// until this rank has next waited for something: which call finds the name in use does not depend
// on how fast the operation is.
class PythonHandle {
 public:
  PythonHandle(const Handle& handle, bool named, Wanted wanted = Wanted::kTensor)
      : pending_(handle.pending()), named_(named), wanted_(wanted) {}
  PythonHandle(const GroupedHandle& handle, bool named, Wanted wanted = Wanted::kTensors)
      : pending_(handle.pending()), named_(named), wanted_(wanted) {}
  PythonHandle(PythonHandle&&) noexcept = default;
  PythonHandle& operator=(PythonHandle&&) = delete;
  ~PythonHandle();

  bool Poll();
  pybind11::object Synchronize();

 private:
  std::shared_ptr<detail::Pending> pending_;
  bool named_;  // and not used yet
  const Wanted wanted_;
};

// Gives the names of dropped handles free when it ends without an exception. Constructed and
// destroyed with the interpreter's lock.
class Wait {
 public:
  Wait() = default;
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;
  ~Wait();

 private:
  const int exceptions_ = std::uncaught_exceptions();
};

// Seconds, as Python counts time-outs; none: no limit.
std::chrono::milliseconds Milliseconds(double seconds);

// Functions that wait for other ranks are bound with this guard.
using Waiting = pybind11::call_guard<Wait, pybind11::gil_scoped_release>;

// Released calls what waits where the function needs the interpreter's lock before or after that.
template <class Call>
auto Released(const Call& call) {
  const Wait wait;
  const pybind11::gil_scoped_release release;
  return call();
}

// What Python gets from a call: of an asynchronous one a handle, of others the result.
template <class Result>
inline constexpr bool kIsHandle = std::is_constructible_v<PythonHandle, const Result&, bool>;
template <class Result>
auto ForPython(Result result, bool named) {
  if constexpr (kIsHandle<Result>) {
    return PythonHandle(result, named);
  } else {
    return result;
  }
}
template <class Result>
using GuardOf = std::conditional_t<kIsHandle<Result>, WithoutGil, Waiting>;

// Binds a collective. Its arguments are its input and what `options_of` makes its options of.
template <class Input, class Result, class Options, class... Arguments>
void Define(pybind11::module_& module, const char* name,
            Result (*function)(const Input&, const Options&), Options (*options_of)(Arguments...)) {
  module.def(
      name,
      [function, options_of](const Input& input, Arguments... arguments) {
        const Options options = options_of(std::move(arguments)...);
        return ForPython(function(input, options), !options.name().empty());
      },
      GuardOf<Result>());
}

// How many rows came from each rank, as Horovod's programs get them: an int32 tensor.
pybind11::object RowsTensor(const std::vector<std::int64_t>& rows);

}  // namespace sirtaki::python
