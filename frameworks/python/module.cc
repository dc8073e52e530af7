// sirtaki._C: the C++ library as Python sees it. Private: sirtaki.torch is what programs use.
#include "frameworks/python/bindings.h"

PYBIND11_MODULE(_C, module) {
  using namespace sirtaki::python;
  module.doc() = "The C++ part of sirtaki; use sirtaki.torch.";
  BindErrors(module);
  BindSession(module);
  BindProcessSets(module);
  BindMesh(module);
  BindHandles(module);
  BindReductions(module);
  BindMovement(module);
  BindMessages(module);
  BindObjects(module);
  BindObservability(module);
  BindReducers(module);
  BindPipeline(module);
  BindBatchNorm(module);
  BindTensorParallel(module);
}
