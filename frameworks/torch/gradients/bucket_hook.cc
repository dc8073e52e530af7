#include "frameworks/torch/gradients/bucket_hook.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "core/base/text.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/session/session_scope.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {

std::string GradientsText(const std::vector<std::string>& names) {
  constexpr std::size_t kMostTold = 2;
  std::string text = names.size() == 1 ? "the gradient of " : "the gradients of ";
  for (std::size_t i = 0; i < std::min(names.size(), kMostTold); ++i) {
    text += (i == 0 ? "" : ", ") + core::Quoted(names[i]);
  }
  if (names.size() <= kMostTold) return text;
  return text + " and " + std::to_string(names.size() - kMostTold) + " more";
}

void BucketHook::Fail(const std::string& why) const {
  const std::string text =
      "the communication hook failed for " + GradientsText(given.parameters) + ": " + why;
  set_.session->session().Abort(text);
  ThrowIfError(set_.session->Check());
  ThrowInvalid(text, core::Origin{set_.session->topology().rank, "", given.name});
}

// The hook's work in the calling thread's current stream comes behind the gradients, which other
// streams may have made.
void BucketHook::AwaitProducers(Bucket& bucket) const {
  std::vector<core::WorkPtr> works;
  std::shared_ptr<session::Gpu> gpu;
  for (const BucketPart& part : bucket.parts) {
    const auto gradient = part.gradient.lock();
    if (!gradient || part.on_gpu() == nullptr || !part.on_gpu()->device) continue;
    if (!part.work->request.invalid.empty()) continue;  // its place in the buffer has zeros
    works.push_back(part.work);
    gpu = gradient->gpu();
  }
  if (works.empty()) return;
  ThrowIfError(NoteReadyInStreams(works, *gpu));
  GpuWaits waits;
  for (const core::WorkPtr& one : works) {
    ops::cuda::DeviceWork& work = ops::cuda::AsDeviceWork(*one);
    work.done = work.ready;
    waits.Await(work, *gpu, given.buffer);
  }
}

void BucketHook::Call(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  try {
    if (bucket.assembly.of_one()) {
      const at::Tensor& reduced = bucket.parts.front().memory().result;
      // The buffer has a version counter of its own: what the hook does to it is no change of the
      // gradient.
      given.buffer = reduced.variable_data().view(-1);
      given.gradients = {given.buffer.view(reduced.sizes())};
    }
    AwaitProducers(bucket);
    const c10::DeviceGuard guard(given.buffer.device());
    const SessionScope scope(set_.session);
    finish_ = hook_(given);
  } catch (...) {
    Fail(TextOfCurrent());
  }
  if (!finish_) Fail("it returned nothing to call");
}

// Precondition: the hook was called, and what it has returned was not.
at::Tensor BucketHook::CallReturned() {
  const SessionScope scope(set_.session);
  try {
    return std::exchange(finish_, nullptr)();
  } catch (...) {
    Fail(TextOfCurrent());
  }
}

void BucketHook::Finish() {
  if (!finish_) return;
  const at::Tensor given_back = CallReturned();
  const at::Tensor& buffer = given.buffer;
  if (!given_back.defined() || given_back.numel() != buffer.numel() ||
      given_back.scalar_type() != buffer.scalar_type() || given_back.device() != buffer.device()) {
    Fail("it gave " + TypeAndShape(given_back) + " for " + TypeAndShape(buffer) +
         "; type, number of elements and device have to be equal");
  }
  result = Flat(given_back).view(-1);
}

void BucketHook::Drop() {
  if (finish_) (void)CallReturned();
}

void BucketHook::End(bool of_one) {
  finish_ = nullptr;
  result = at::Tensor();
  if (!of_one) return;
  given.buffer = at::Tensor();
  given.gradients.clear();
}

}  // namespace sirtaki::detail
