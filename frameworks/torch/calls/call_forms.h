// The forms in which each collective comes: blocking or asynchronous, of one tensor or a group.
#pragma once

#include <utility>
#include <vector>

#include "frameworks/torch/calls/differentiable.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_state.h"
#include "sirtaki/handle.h"

namespace sirtaki::detail {

enum class Form { kNew, kInPlace };

// Returns a call with the values that every options struct has; With adds the tensors.
template <class Options>
TensorCall CallOf(core::OpKind kind, const Options& options, Form form) {
  TensorCall call;
  call.kind = kind;
  call.name = options.name();
  call.process_set = options.process_set();
  call.timeout = options.timeout();
  call.in_place = form == Form::kInPlace;
  return call;
}

inline TensorCall&& With(TensorCall&& call, const at::Tensor& tensor) {
  call.tensor = tensor;
  return std::move(call);
}

inline TensorCall&& With(TensorCall&& call, at::TensorList tensors) {
  call.grouped = true;
  call.group = tensors.vec();
  return std::move(call);
}

inline std::vector<at::Tensor> RunAll(TensorCall&& call) {
  const auto state = CurrentSession();
  if (!call.in_place) return RunDifferentiable(std::move(call), state).tensors;
  call.will_wait = true;
  return PendingTensor::Start(std::move(call), state)->Results();
}

inline at::Tensor RunOne(TensorCall&& call) { return std::move(RunAll(std::move(call)).front()); }

template <class AnyHandle = Handle>
AnyHandle StartCall(TensorCall&& call) {
  return AnyHandle(PendingTensor::Start(std::move(call), CurrentSession()));
}

}  // namespace sirtaki::detail

// Defines the blocking and the asynchronous form of a collective. `suffix`: _ if it is in place.
// `parameters`: those behind the tensors, in parentheses; `call` is made of them.
#define SIRTAKI_PARAMETERS(...) __VA_ARGS__
#define SIRTAKI_TWO_FORMS(Result, Given, AnyHandle, Run, name, suffix, parameters, call) \
  Result name##suffix(Given given, SIRTAKI_PARAMETERS parameters) {                      \
    return detail::Run(detail::With(call, given));                                       \
  }                                                                                      \
  AnyHandle name##_async##suffix(Given given, SIRTAKI_PARAMETERS parameters) {           \
    return detail::StartCall<AnyHandle>(detail::With(call, given));                      \
  }
#define SIRTAKI_LIST_FORMS(name, suffix, parameters, call)                                        \
  SIRTAKI_TWO_FORMS(std::vector<at::Tensor>, at::TensorList, GroupedHandle, RunAll, name, suffix, \
                    parameters, call)
// Those of one tensor and those of several.
#define SIRTAKI_FORMS(name, suffix, parameters, call)                                              \
  SIRTAKI_TWO_FORMS(at::Tensor, const at::Tensor&, Handle, RunOne, name, suffix, parameters, call) \
  SIRTAKI_LIST_FORMS(name, suffix, parameters, call)
