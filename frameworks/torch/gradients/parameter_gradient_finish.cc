// The way of a reduced gradient back into `.grad`.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <exception>
#include <string>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/gradients/gradient_arena.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_form.h"
#include "frameworks/torch/gradients/gradient_memory.h"
#include "frameworks/torch/gradients/optimizer_shards.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "sirtaki/error.h"

namespace sirtaki::detail {

void ParameterGradient::Deliver(const at::Tensor& average) {
  constexpr std::size_t kOurs = 2;  // `.grad` and under_way_'s
  const at::Tensor& found = under_way_->found;
  const BucketPartPtr part = part_;
  const bool arrives = under_way_->present && part->place && part->place->Has(average) &&
                       average.const_data_ptr() != found.const_data_ptr();
  // Unless somebody has got hold of it meanwhile.
  if (arrives && found.use_count() == kOurs && found.storage().use_count() == 1) {
    what_.parameter.mutable_grad() = average;
  } else if (found.defined() && !found.requires_grad() && !found.is_sparse()) {
    if (average.data_ptr() != found.data_ptr()) found.copy_(average);
  } else if (!average.defined() || HasContractStrides(what_.parameter, average.strides())) {
    what_.parameter.mutable_grad() = average;
  } else {  // torch's fused steps go by addresses
    const at::Tensor placed =
        at::empty_strided(average.sizes(), ContractStrides(what_.parameter), average.options());
    what_.parameter.mutable_grad() = placed.copy_(average);
  }
}

void ParameterGradient::NoteDelivered() {
  if (!std::exchange(delivered_, false)) return;
  hooks_late_ = false;
  at::Tensor& gradient = what_.parameter.mutable_grad();
  if (!what_.counts->shards || !gradient.defined() || gradient.is_sparse()) {
    return history_.NoteAverage(gradient);
  }
  what_.counts->shards->TakeGradient(what_.parameter, gradient, std::exchange(shard_, {}));
  gradient.reset();
}

// A hook that has submitted a bucket takes the shards of those before that are done. What is not done
// in its turn the end of the backward() takes, and all that may be an error.
void ParameterGradient::TakeShardsOfDone(const std::shared_ptr<Bucket>& launched, bool may_wait) {
  for (const std::shared_ptr<Bucket>& bucket :
       what_.counts->shards->launched().Add(launched, may_wait, set_.session->session())) {
    for (const BucketPart& part : bucket->parts) {
      if (const auto gradient = part.gradient.lock()) gradient->TakeShardEarly();
    }
  }
}

// Returns this rank's shard of an average, if the work has brought it.
at::Tensor ParameterGradient::BroughtShard(const BucketPart& part) {
  return part.work->kept && part.work->kept->is_there ? part.memory().shard : at::Tensor();
}

void ParameterGradient::TakeShardEarly() {
  const core::HandlePtr handle = this->handle();
  if (!handle || !handle->done() || !handle->status().ok() || AbsentEverywhere()) return;
  UnderWay& now = *under_way_;
  const BucketPartPtr part = part_;
  at::Tensor& gradient = what_.parameter.mutable_grad();
  OptimizerShards& shards = *what_.counts->shards;
  const bool is_plain = now.present && !now.shares && now.refused.empty() &&
                        shards.MayTake(what_.parameter) && part->on_gpu() == nullptr &&
                        gradient.defined() && part->memory().result.is_same(gradient);
  if (!is_plain || now.is_taken || !gradient.is_same(now.found) || FoundWritten()) return;
  const at::NoGradGuard no_grad;
  shards.TakeGradient(what_.parameter, gradient, BroughtShard(*part));
  now.is_taken = true;
  gradient.reset();
  now.found.reset();
  part->memory() = {};
}

// Others who share its memory share the version as well, and write what is theirs.
bool ParameterGradient::FoundWritten() const {
  const UnderWay& now = *under_way_;
  return now.found.defined() && !now.shares && VersionOf(now.found) != now.version;
}

// What the work has made; it keeps nothing of it. A device may be far behind, but whoever gets the
// memory next comes behind what it does there.
at::Tensor ParameterGradient::TakeResult(GpuWaits& waits) {
  if (!under_way_->is_put) return {};
  const BucketPartPtr part = part_;
  GradientMemory& memory = part->memory();
  if (const ops::cuda::DeviceWork* const work = part->on_gpu()) {
    // The allocator has to know of the memory that the lane has used.
    const at::Tensor& used =
        part->place && part->place->Has(memory.result) ? under_way_->found : memory.result;
    const bool allocated = used.defined() && !used.is_sparse() && !LiesInArena(used);
    waits.Await(*work, *gpu_, allocated ? used : at::Tensor());
  }
  shard_ = BroughtShard(*part);
  return std::exchange(memory, {}).result;
}

// Precondition: Await has said ok.
core::Status ParameterGradient::Collect(GpuWaits& waits) {
  UnderWay& now = *under_way_;
  if (what_.rule->hook) part_.load()->bucket->hook->Finish();
  const at::Tensor result = TakeResult(waits);
  const bool same = what_.parameter.grad().is_same(now.found);
  if (!same || FoundWritten()) {
    return Refused("the gradient of " + core::Quoted(what_.name) + " was " +
                   (same ? "changed" : "replaced") +
                   " while it was being reduced: call step() or synchronize() on the optimizer "
                   "before zero_grad() and before changing gradients");
  }
  const int joined = now.sparse ? now.sparse->joined() : handle()->joined();
  if (joined >= 0) what_.counts->joined = joined;
  if (now.present && joined >= 0 && history_.on_average()) {
    return Refused("the gradient of " + core::Quoted(what_.name) +
                   " held an average already, and cannot be averaged again: rank " +
                   std::to_string(joined) +
                   " has joined, and brings zeros in its place. Let the passes add up in no_sync() "
                   "or by backward_passes_per_step, or call zero_grad() between them");
  }
  if (now.sparse) {
    const at::Tensor sum = now.sparse->Results().front();
    sparse_dims_ = sum.sparse_dim();
    // Ranks without the gradient cannot tell an empty one from none: it is none for all of them.
    what_.parameter.mutable_grad() = sum._nnz() > 0 ? sum : at::Tensor();
    delivered_ = true;
    return {};
  }
  if (now.is_taken || AbsentEverywhere()) return {};
  sparse_dims_ = 0;
  if (what_.rule->hook) {
    CollectFromHook();
  } else {
    Deliver(result);
  }
  delivered_ = true;
  return {};
}

void ParameterGradient::CollectFromHook() {
  const BucketPartPtr part = part_;
  const BucketHook& hook = *part->bucket->hook;
  const at::Tensor average = hook.result.as_strided(
      part->like->shape, part->strides, hook.result.storage_offset() + hook.starts[part->index]);
  const at::Tensor& found = under_way_->found;
  const bool is_written = found.defined() && !found.requires_grad() && !found.is_sparse();
  // The buffer is the next round's as well, and a view is no gradient that zero_grad() could detach.
  Deliver(is_written ? average : average.clone());
}

// Returns a status that is not ok, with a handle that is not done, if the wait was given up.
core::Status ParameterGradient::Await() {
  if (under_way_->sparse) {
    try {
      (void)under_way_->sparse->Results();
      return {};
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Mismatch) throw;
      under_way_->sparse_error = std::current_exception();
      return Refused(error.what());
    }
  }
  const core::HandlePtr handle = this->handle();
  if (!handle) {
    // The submission threw in backward(), and the program went on.
    return Refused("the reduction of the gradient of " + core::Quoted(what_.name) +
                   " could not be started in backward(), which has thrown the reason");
  }
  return handle->done() ? handle->status() : set_.session->Wait(*handle);
}

core::HandlePtr ParameterGradient::handle() const {
  if (!under_way_ || !under_way_->is_put) return nullptr;
  return part_.load()->bucket->assembly.handle();
}

bool ParameterGradient::AbsentEverywhere() const {
  const BucketPartPtr part = part_;
  return part->bucket->assembly.AbsentEverywhere(part->index);
}

void ParameterGradient::ReleasePart() {
  if (!std::exchange(under_way_->is_put, false)) return;
  const BucketPartPtr part = part_;
  Bucket& bucket = *part->bucket;
  // A round in which a launch has failed begins anew.
  if (bucket.hook && bucket.hook->line && !bucket.assembly.handle())
    bucket.hook->line->line.Restart();
  bucket.assembly.Release(part->index);
  // After a failure a lane may still use the memory: whoever keeps the work keeps that.
  if (part->memory().result.defined()) part->work.reset();
  if (bucket.hook && !bucket.assembly.handle()) bucket.hook->End(bucket.assembly.of_one());
}

// Starts the reduction in the form and the place that the gradient now has.
void ParameterGradient::StartAnew() {
  // It would not be noticed any more that the gradient was written meanwhile.
  const bool written = FoundWritten();
  ReleasePart();
  under_way_->sparse.reset();
  Start(/*will_wait=*/true);
  LaunchAlone();
  if (written) --under_way_->version;
}

// After a failure that all ranks know of: a bucket that cannot be reduced is taken apart, so that
// only those of its gradients fail that have to. False if it is something else: a backward() that has
// thrown takes no part in a second attempt.
bool ParameterGradient::StartByItself(const core::Status& status) {
  const bool agreed = status.code() == core::StatusCode::kMismatch ||
                      status.code() == core::StatusCode::kInvalidArgument;
  if (!agreed || !handle() || part_.load()->bucket->assembly.of_one()) return false;
  // Nobody knows whose fault a mismatch is, and the next bucket would meet it again.
  if (status.code() == core::StatusCode::kMismatch) seen_.stays_out = true;
  TakeOut();
  StartAnew();
  return true;
}

// After a mismatch, of which all ranks know: it may be that some have a sparse gradient and others,
// which have none, did not know of that.
std::shared_ptr<Pending> ParameterGradient::AskForForms() {
  const UnderWay& now = *under_way_;
  const bool is_sparse = now.present && now.found.is_sparse() && !what_.rule->sparse_as_dense;
  return detail::AskForForms(
      what_.key,
      {now.present, is_sparse ? now.found.sparse_dim() : 0, now.sparse != nullptr, now.round},
      set_);
}

// False if it is something else.
bool ParameterGradient::TakeForms() {
  const at::Tensor forms = std::exchange(under_way_->forms, nullptr)->Results().front();
  const auto form = DecideForm(what_.name, what_.key, forms, what_.rule->of_module);
  if (!form) return false;
  under_way_->sparse_error = nullptr;
  sparse_dims_ = *form;
  StartAnew();
  return true;
}

bool ParameterGradient::ready() const {
  if (under_way_ && under_way_->forms) return under_way_->forms->Poll();
  if (under_way_ && under_way_->sparse) return under_way_->sparse->Poll();
  const core::HandlePtr handle = this->handle();
  return !handle || handle->done();
}

std::optional<core::Status> ParameterGradient::Advance(GpuWaits& waits) {
  struct Reset {
    ParameterGradient* self;
    ~Reset() {
      if (self == nullptr) return;
      ++self->averages_;
      self->Clear();
      self->gate_.Reset();
    }
  } reset{this};
  const auto go_on = [&reset] {
    reset.self = nullptr;
    return std::nullopt;
  };
  at::NoGradGuard no_grad;
  // Another thread has just reported it, which is a program's mistake.
  if (!under_way_) under_way_.emplace();
  UnderWay& now = *under_way_;
  if (what_.rule->alone) {
    delivered_ = now.refused.empty();
    if (delivered_) return core::Status::Ok();
    return Refused("the gradient of " + core::Quoted(what_.name) + ": " + now.refused);
  }
  // The bucket was taken apart before it was complete: its maker is gone.
  if (now.is_put && part_.load()->bucket->is_apart && !handle()) {
    StartAnew();
    return go_on();
  }
  core::Status status = now.mismatch;
  if (!now.forms) {
    status = Await();
    if (const core::HandlePtr handle = this->handle(); handle && !handle->done()) {
      reset.self = nullptr;  // in a forked child
      return status;
    }
    // The other ranks' hooks wait for this one's also where nothing can be averaged.
    const BucketPartPtr part = part_;
    if (!status.ok() && now.is_put && part->bucket->hook) part->bucket->hook->Drop();
    if (StartByItself(status)) return go_on();
    const bool mismatch = now.sparse_error || status.code() == core::StatusCode::kMismatch;
    if (mismatch && !now.asked) {
      now.asked = true;
      now.mismatch = status;
      now.forms = AskForForms();
      return go_on();
    }
  } else if (TakeForms()) {
    return go_on();
  }
  // A rank that had no memory, or was in a CUDA graph, may average the gradient next time.
  if (now.sparse_error || status.code() == core::StatusCode::kMismatch) seen_.stays_out = true;
  if (now.sparse_error) std::rethrow_exception(now.sparse_error);
  if (status.ok() && !now.sparse) seen_.anywhere = !AbsentEverywhere();
  return status.ok() ? Collect(waits) : std::move(status);
}

core::Status ParameterGradient::Finish(GpuWaits& waits) {
  for (;;) {
    if (auto status = Advance(waits)) return *std::move(status);
  }
}

void ParameterGradient::Clear() {
  history_.ForgetPasses();
  if (under_way_) ReleasePart();
  under_way_.reset();
}

}  // namespace sirtaki::detail
