#include <torch/csrc/utils/pybind.h>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "sirtaki/messages.h"

namespace sirtaki::python {

namespace py = pybind11;

void BindMessages(py::module_& module) {
  module.def(
      "send",
      [](const at::Tensor& tensor, int to, int tag) {
        send(tensor, to, MessageOptions().tag(tag));
      },
      WithoutGil());
  module.def(
      "recv_",
      [](const at::Tensor& tensor, int from, int tag) {
        return recv_(tensor, from, MessageOptions().tag(tag));
      },
      WithoutGil());
  module.def(
      "isend",
      [](const at::Tensor& tensor, int to, int tag) {
        return PythonHandle(isend(tensor, to, MessageOptions().tag(tag)), false, Wanted::kNothing);
      },
      WithoutGil());
  module.def(
      "irecv",
      [](const at::Tensor& tensor, int from, int tag) {
        return PythonHandle(irecv(tensor, from, MessageOptions().tag(tag)), false);
      },
      WithoutGil());
}

}  // namespace sirtaki::python
