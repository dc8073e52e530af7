// The way of a reduced gradient back into `.grad`.
#include <ATen/core/grad_mode.h>

#include <exception>
#include <string>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/sparse_call.h"
#include "frameworks/torch/gradients/gradient_arena.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_form.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/error.h"

namespace sirtaki::detail {

// What the lane has used, and who allocates it has to know of.
at::Tensor ParameterGradient::AllocatedMemory() const {
  const at::Tensor& used = place() != nullptr && place()->Has(moved_) ? found_ : moved_;
  return used.defined() && !IsSparse(used) && !LiesInArena(used) ? used : at::Tensor();
}

void ParameterGradient::Deliver(const at::Tensor& average) {
  constexpr std::size_t kOurs = 2;  // `.grad` and found_
  const bool arrives = present_ && place() != nullptr && place()->Has(average) &&
                       average.const_data_ptr() != found_.const_data_ptr();
  // Unless somebody has got hold of it meanwhile.
  if (arrives && found_.use_count() == kOurs && found_.storage().use_count() == 1) {
    what_.parameter.mutable_grad() = average;
  } else if (found_.defined() && !found_.requires_grad() && !IsSparse(found_)) {
    if (average.data_ptr() != found_.data_ptr()) found_.copy_(average);
  } else {
    what_.parameter.mutable_grad() = average;
  }
}

void ParameterGradient::CollectFromHook() {
  at::Tensor result;
  try {
    result = finish_hook_();
  } catch (...) {
    FailHook(TextOfCurrent());
  }
  if (!result.defined() || result.numel() != moved_.numel() ||
      result.scalar_type() != moved_.scalar_type() || result.device() != moved_.device()) {
    FailHook("it gave " + TypeAndShape(result) + " for " + TypeAndShape(moved_) +
             "; type, number of elements and device have to be equal");
  }
  Deliver(result.detach().reshape(moved_.sizes()));
}

// The other ranks' hooks wait for this one's also where nothing can be averaged.
void ParameterGradient::DropFromHook() {
  try {
    (void)std::exchange(finish_hook_, nullptr)();
  } catch (...) {
    FailHook(TextOfCurrent());
  }
}

// Others who share its memory share the version as well, and write what is theirs.
bool ParameterGradient::FoundWritten() const {
  return found_.defined() && !shares_ && VersionOf(found_) != version_;
}

// Precondition: Await has said ok.
core::Status ParameterGradient::Collect(GpuWaits& waits) {
  if (on_gpu_) waits.Await(*on_gpu_, *gpu_, AllocatedMemory());
  // A device may be far behind, but whoever gets this memory next comes behind what it does there.
  if (kept_) *kept_ = at::Tensor();
  const bool same = what_.parameter.grad().is_same(found_);
  if (!same || FoundWritten()) {
    return Refused("the gradient of " + core::Quoted(what_.name) + " was " +
                   (same ? "changed" : "replaced") +
                   " while it was being reduced: call step() or synchronize() on the optimizer "
                   "before zero_grad() and before changing gradients");
  }
  const int joined = sparse_ ? sparse_->joined() : handle()->joined();
  if (present_ && on_average_ && joined >= 0) {
    return Refused("the gradient of " + core::Quoted(what_.name) +
                   " held an average already, and cannot be averaged again: rank " +
                   std::to_string(joined) +
                   " has joined, and brings zeros in its place. Let the passes add up in no_sync() "
                   "or by backward_passes_per_step, or call "
                   "zero_grad() between them");
  }
  if (sparse_) {
    sparse_dims_ = moved_.sparse_dim();
    // Ranks without the gradient cannot tell an empty one from none: it is none for all of them.
    what_.parameter.mutable_grad() = moved_._nnz() > 0 ? moved_ : at::Tensor();
    delivered_ = true;
    return {};
  }
  if (AbsentEverywhere()) return {};
  sparse_dims_ = 0;
  if (what_.rule->hook) {
    CollectFromHook();
  } else {
    Deliver(moved_);
  }
  delivered_ = true;
  return {};
}

// Not ok with a handle that is not done: the wait was given up.
core::Status ParameterGradient::Await() {
  if (sparse_) {
    try {
      moved_ = sparse_->Results().front();
      return {};
    } catch (const Error& error) {
      if (error.code() != ErrorCode::mismatch) throw;
      sparse_error_ = std::current_exception();
      return Refused(error.what());
    }
  }
  const core::HandlePtr handle = this->handle();
  if (!handle) {
    // Its submission threw in backward(), and the program went on.
    return Refused("the reduction of the gradient of " + core::Quoted(what_.name) +
                   " could not be started in backward(), which has thrown the reason");
  }
  return handle->done() ? handle->status() : set_.session->Wait(*handle);
}

ArenaPlace* ParameterGradient::place() const {
  return in_ && !in_->places.empty() ? &in_->places[in_part_] : nullptr;
}

core::HandlePtr ParameterGradient::handle() const { return in_ ? in_->assembly.handle() : handle_; }

bool ParameterGradient::AbsentEverywhere() const {
  return in_ ? in_->assembly.AbsentEverywhere(in_part_) : handle_->absent_everywhere();
}

// In the form and the place that it now has.
void ParameterGradient::StartAnew() {
  // It would not be noticed any more that the gradient was written meanwhile.
  const bool written = FoundWritten();
  if (in_) in_->assembly.Release(in_part_);
  in_.reset();
  if (handle_) handle_->Observe();
  handle_.reset();
  on_gpu_.reset();
  sparse_.reset();
  Start(/*will_wait=*/true);
  if (written) --version_;
}

// After a failure that all ranks know of: a bucket that cannot be reduced is taken apart, so that
// only those of its gradients fail that have to. False if it is something else.
bool ParameterGradient::StartByItself(const core::Status& status) {
  // A backward() that has thrown takes no part in a second attempt.
  if (status.message().find(kBackwardThrew) != std::string::npos) return false;
  const bool agreed = status.code() == core::StatusCode::kMismatch ||
                      status.code() == core::StatusCode::kInvalidArgument;
  if (!in_ || !agreed || !handle()) return false;
  // Whose fault a mismatch is nobody knows, and the next bucket would meet it again.
  if (status.code() == core::StatusCode::kMismatch) seen_.stays_out = true;
  TakeOut();
  StartAnew();
  return true;
}

// After a mismatch, of which all ranks know: it may be that some have a sparse gradient and others,
// which have none, did not know of that.
std::shared_ptr<Pending> ParameterGradient::AskForForms() {
  const bool is_sparse = present_ && IsSparse(found_) && !what_.rule->sparse_as_dense;
  return detail::AskForForms(
      what_.key, {present_, is_sparse ? found_.sparse_dim() : 0, sparse_ != nullptr, round_}, set_);
}

// False if it is something else.
bool ParameterGradient::TakeForms() {
  const at::Tensor forms = std::exchange(forms_, nullptr)->Results().front();
  const auto form = DecideForm(what_.name, what_.key, forms, what_.rule->of_module);
  if (!form) return false;
  sparse_error_ = nullptr;
  sparse_dims_ = *form;
  StartAnew();
  return true;
}

bool ParameterGradient::ready() const {
  if (forms_) return forms_->Poll();
  if (sparse_) return sparse_->Poll();
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
  if (what_.rule->alone) {
    delivered_ = refused_.empty();
    if (delivered_) return core::Status::Ok();
    return Refused("the gradient of " + core::Quoted(what_.name) + ": " + refused_);
  }
  // Its bucket was dissolved before it was complete: who had made it is gone.
  if (in_ && in_ != bucket_.load() && !handle()) {
    StartAnew();
    return go_on();
  }
  core::Status status = mismatch_;
  if (!forms_) {
    status = Await();
    if (const core::HandlePtr handle = this->handle(); handle && !handle->done()) {
      reset.self = nullptr;  // in a forked child
      return status;
    }
    if (!status.ok() && finish_hook_) DropFromHook();
    if (StartByItself(status)) return go_on();
    const bool mismatch = sparse_error_ || status.code() == core::StatusCode::kMismatch;
    if (mismatch && !asked_) {
      asked_ = true;
      mismatch_ = status;
      forms_ = AskForForms();
      return go_on();
    }
  } else if (TakeForms()) {
    return go_on();
  }
  // What one rank could not do, for want of memory or in a CUDA graph, it may do next time.
  if (sparse_error_ || status.code() == core::StatusCode::kMismatch) seen_.stays_out = true;
  if (sparse_error_) std::rethrow_exception(sparse_error_);
  return status.ok() ? Collect(waits) : std::move(status);
}

core::Status ParameterGradient::Finish(GpuWaits& waits) {
  for (;;) {
    if (auto status = Advance(waits)) return *std::move(status);
  }
}

void ParameterGradient::Clear() {
  if (in_) in_->assembly.Release(in_part_);
  in_.reset();
  fresh_.store(false, std::memory_order_relaxed);
  if (handle_) handle_->Observe();
  handle_.reset();
  on_gpu_.reset();
  captured_ = false;
  sparse_.reset();
  sparse_error_ = nullptr;
  found_ = at::Tensor();
  moved_ = at::Tensor();
  kept_.reset();
  finish_hook_ = nullptr;
  refused_.clear();
  forms_.reset();
  asked_ = false;
  mismatch_ = {};
}

}  // namespace sirtaki::detail
