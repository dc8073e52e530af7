// sirtaki::Error as the exceptions of sirtaki.common.exceptions, which are of the kinds that
// Horovod's programs catch.
#include <exception>

#include "frameworks/python/bindings.h"
#include "sirtaki/error.h"

namespace sirtaki::python {
namespace {

namespace py = pybind11;

void Raise(const Error& error) {
  const py::object type = py::module_::import("sirtaki.common.exceptions")
                              .attr("CLASSES")[error_code_name(error.code())];
  const py::object exception = type(error.what());
  exception.attr("rank") = error.origin().rank;
  exception.attr("host") = error.origin().host;
  exception.attr("tensor") = error.origin().tensor;
  PyErr_SetObject(type.ptr(), exception.ptr());
}

}  // namespace

void BindErrors(py::module_& /*module*/) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      Raise(error);
    }
  });
}

}  // namespace sirtaki::python
