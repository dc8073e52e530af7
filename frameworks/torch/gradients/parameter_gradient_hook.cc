// A communication hook of the program's: what it is called with, and what becomes of its result.
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/sparse_call.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {

// The other ranks' hooks have started what waits for this one's: there is no going on.
void ParameterGradient::FailHook(const Bucket& bucket, const std::string& why) const {
  const std::string text = "the communication hook failed for " +
                           GradientsText(bucket.hook->given.parameters) + ": " + why;
  set_.session->session().Abort(text);
  ThrowIfError(set_.session->Check());
  ThrowStatus(Refused(text));
}

// The gradient in its place of the buffer that all gradients of the bucket share.
at::Tensor ParameterGradient::FillBuffer(const BucketPart& part) const {
  at::Tensor place = part.bucket->hook->given.gradients[part.index];
  if (!under_way_->present) return place.zero_();
  const at::Tensor found = under_way_->found.detach();
  return place.copy_(IsSparse(found) ? found.to_dense() : found);
}

// The hook's work in the calling thread's current stream comes behind the gradients, which other
// streams may have made.
void ParameterGradient::AwaitProducers(Bucket& bucket) const {
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
    waits.Await(work, *gpu, bucket.hook->given.buffer);
  }
}

void ParameterGradient::CallHook(Bucket& bucket) const {
  const at::NoGradGuard no_grad;
  BucketHook& hook = *bucket.hook;
  try {
    if (bucket.assembly.of_one()) {
      const at::Tensor& reduced = bucket.parts.front().memory().result;
      // The buffer has a version counter of its own: what the hook does to it is no change of the
      // gradient.
      hook.given.buffer = reduced.variable_data().view(-1);
      hook.given.gradients = {hook.given.buffer.view(reduced.sizes())};
    }
    AwaitProducers(bucket);
    const c10::DeviceGuard guard(hook.given.buffer.device());
    const SessionScope scope(set_.session);
    hook.finish = what_.rule->hook(hook.given);
  } catch (...) {
    FailHook(bucket, TextOfCurrent());
  }
  if (!hook.finish) FailHook(bucket, "it returned nothing to call");
}

void ParameterGradient::LaunchAlone() {
  if (!under_way_ || !under_way_->is_put || handle()) return;
  Bucket& bucket = *part_.load()->bucket;
  if (bucket.hook && !bucket.hook->line) Launch(bucket, /*will_wait=*/true);
}

// The first gradient of the bucket that is collected calls what the hook has returned, whatever
// becomes of that gradient: the other ranks call theirs, and the buffer is in use until then.
void ParameterGradient::FinishHook() const {
  const BucketPartPtr part = part_;
  Bucket& bucket = *part->bucket;
  BucketHook& hook = *bucket.hook;
  if (!hook.finish) return;
  at::Tensor result;
  const SessionScope scope(set_.session);
  try {
    result = std::exchange(hook.finish, nullptr)();
  } catch (...) {
    FailHook(bucket, TextOfCurrent());
  }
  const at::Tensor& buffer = hook.given.buffer;
  if (!result.defined() || result.numel() != buffer.numel() ||
      result.scalar_type() != buffer.scalar_type() || result.device() != buffer.device()) {
    FailHook(bucket, "it gave " + TypeAndShape(result) + " for " + TypeAndShape(buffer) +
                         "; type, number of elements and device have to be equal");
  }
  hook.result = Flat(result).view(-1);
}

void ParameterGradient::CollectFromHook() {
  const BucketPartPtr part = part_;
  Bucket& bucket = *part->bucket;
  const BucketHook& hook = *bucket.hook;
  const at::Tensor average = hook.result.as_strided(
      part->like->shape, part->strides, hook.result.storage_offset() + hook.starts[part->index]);
  const at::Tensor& found = under_way_->found;
  const bool is_written = found.defined() && !found.requires_grad() && !IsSparse(found);
  // The buffer is the next round's as well, and a view is no gradient that zero_grad() could detach.
  Deliver(is_written ? average : average.clone());
}

// The other ranks' hooks wait for this one's also where nothing can be averaged.
void ParameterGradient::DropFromHook() const {
  const BucketPartPtr part = part_;
  if (!under_way_->is_put || !part->bucket->hook || !part->bucket->hook->finish) return;
  const SessionScope scope(set_.session);
  try {
    (void)std::exchange(part->bucket->hook->finish, nullptr)();
  } catch (...) {
    FailHook(*part->bucket, TextOfCurrent());
  }
}

}  // namespace sirtaki::detail
