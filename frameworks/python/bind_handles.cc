#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "sirtaki/barrier.h"

namespace sirtaki::python {

namespace py = pybind11;

std::chrono::milliseconds Milliseconds(double seconds) {
  constexpr double kMost = 1e12;
  if (std::isnan(seconds) || seconds > kMost) return std::chrono::milliseconds(0);
  // Too short to be a number of milliseconds is not the same as no limit.
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

namespace {

// This many dropped handles are kept, the oldest first: with more, programs which never wait would
// keep all tensors.
constexpr std::size_t kMostDropped = 256;
std::deque<std::shared_ptr<detail::Pending>>& Dropped() {
  static auto& dropped = *new std::deque<std::shared_ptr<detail::Pending>>();  // outlives Python
  return dropped;
}

}  // namespace

py::object RowsTensor(const std::vector<std::int64_t>& rows) {
  return py::cast(at::tensor(rows, at::kInt));
}

PythonHandle::~PythonHandle() {
  if (!pending_) return;
  std::shared_ptr<detail::Pending> ending;
  if (named_) {
    Dropped().push_back(std::move(pending_));
    if (Dropped().size() <= kMostDropped) return;
    ending = std::move(Dropped().front());
    Dropped().pop_front();
  } else {
    ending = std::move(pending_);
  }
  // It gives the name free, for which it takes the queue's lock.
  const py::gil_scoped_release release;
  ending.reset();
}

Wait::~Wait() {
  if (Dropped().empty() || std::uncaught_exceptions() > exceptions_) return;
  std::deque<std::shared_ptr<detail::Pending>> ending;
  ending.swap(Dropped());
  const py::gil_scoped_release release;
  ending.clear();
}

bool PythonHandle::Poll() {
  bool done = false;
  {
    const py::gil_scoped_release release;
    done = poll(Handle(pending_));
  }
  if (done) named_ = false;
  return done;
}

py::object PythonHandle::Synchronize() {
  const Wait wait;
  named_ = false;
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<std::int64_t>> rows;
  {
    const py::gil_scoped_release release;
    const GroupedHandle handle(pending_);
    tensors = synchronize(handle);
    if (wanted_ == Wanted::kTensorAndSplits) rows = received_splits(handle);
  }
  switch (wanted_) {
    case Wanted::kTensor:
      return py::cast(tensors.front());
    case Wanted::kTensors:
      return py::cast(tensors);
    case Wanted::kTensorAndSplits:
      return py::make_tuple(tensors.front(), RowsTensor(rows.front()));
    case Wanted::kNothing:
      break;
  }
  return py::none();
}

void BindHandles(py::module_& module) {
  py::class_<PythonHandle>(module, "Handle")
      .def("wait", &PythonHandle::Synchronize)
      .def("done", &PythonHandle::Poll)
      .def("__call__", &PythonHandle::Synchronize);
  module.def("poll", [](PythonHandle& handle) { return handle.Poll(); });
  module.def("synchronize", [](PythonHandle& handle) { return handle.Synchronize(); });

  module.def(
      "barrier", [](const ProcessSet& set) { barrier(BarrierOptions().process_set(set)); },
      Waiting());
  module.def(
      "monitored_barrier",
      [](double timeout_seconds, const ProcessSet& set) {
        monitored_barrier(Milliseconds(timeout_seconds), BarrierOptions().process_set(set));
      },
      Waiting());
  module.def(
      "join", [](const ProcessSet& set) { return join(JoinOptions().process_set(set)); },
      Waiting());
}

}  // namespace sirtaki::python
