#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "sirtaki/mesh.h"

namespace sirtaki::python {

namespace py = pybind11;

void BindMesh(py::module_& module) {
  using Axes = std::vector<std::pair<std::string, int>>;
  py::class_<Mesh>(module, "Mesh")
      .def_property_readonly("axes",
                             [](const Mesh& mesh) {
                               Axes axes;
                               for (const auto& [name, size] : mesh.axes()) {
                                 axes.emplace_back(name, size);
                               }
                               return axes;
                             })
      .def("coordinate", &Mesh::coordinate)
      .def("ranks", &Mesh::ranks)
      .def("set", &Mesh::set)
      .def("sets", &Mesh::sets);
  module.def(
      "mesh",
      [](const Axes& given) {
        std::vector<MeshAxis> axes;
        for (const auto& [name, size] : given) axes.push_back({name, size});
        return mesh(axes);
      },
      WithoutGil());
}

}  // namespace sirtaki::python
