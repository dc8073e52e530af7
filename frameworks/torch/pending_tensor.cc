#include "frameworks/torch/pending_tensor.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <exception>
#include <utility>
#include <vector>

#include "core/rank_ranges.h"
#include "core/text.h"
#include "core/wire.h"
#include "frameworks/torch/tensor_bridge.h"
#include "frameworks/torch/throw.h"
#include "ops/validate.h"

namespace sirtaki::detail {
namespace {

// A call that may take longer than this may take for ever: a later moment might not be a TimePoint.
constexpr std::chrono::hours kEndlessTimeout{24 * 365 * 10};

// Why this rank's arguments are wrong, whatever the others'; empty if they are not.
std::string WhyInvalid(const TensorCall& call, const core::Signature& signature, int size) {
  if (!call.invalid.empty()) return call.invalid;
  std::string why = WhyNotMovable(call.tensor);
  if (why.empty()) {
    why = ops::ValidateRequest(signature, core::RankRanges::Span(0, size - 1),
                               static_cast<int>(call.tensor.dim()));
  }
  if (!why.empty()) return why;
  if (call.in_place && at::has_internal_overlap(call.tensor) == at::MemOverlap::Yes) {
    return "in place on a tensor whose elements share memory (expanded); make it contiguous first";
  }
  if (call.timeout.count() < 0) {
    return "the timeout is negative: " + core::DurationText(call.timeout);
  }
  return {};
}

// Every rank that gives this name sees the same, and no message could carry it to the others.
void CheckName(const std::string& name) {
  if (name.size() <= core::kMaxNameBytes) return;
  ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                           "the name " + core::Quoted(name) + " is too long; at most " +
                               std::to_string(core::kMaxNameBytes) + " bytes are allowed",
                           core::Origin{-1, {}, name}));
}

}  // namespace

core::Signature PendingTensor::MakeSignature(const TensorCall& call, int size,
                                             std::string* invalid) {
  core::Signature signature = Describe(call.tensor);
  signature.kind = call.kind;
  if (call.kind == core::OpKind::kAllReduce) {
    signature.reduction = call.reduction;
    signature.prescale = call.prescale;
    signature.postscale = call.postscale;
    signature.wire = call.wire;
  }
  if (call.kind == core::OpKind::kBroadcast) signature.root = call.root;
  if (call.kind == core::OpKind::kAllGather && !signature.shape.empty()) {
    signature.shape.erase(signature.shape.begin());
  }
  *invalid = WhyInvalid(call, signature, size);
  return signature;
}

void PendingTensor::GiveMemory(const TensorCall& call, core::Work& work) {
  at::NoGradGuard no_grad;
  const at::Tensor& tensor = call.tensor;
  at::Tensor input = Flat(tensor);
  if (call.kind == core::OpKind::kAllGather) {
    gathered_ = std::make_shared<Gathered>();
    work.rows = input.size(0);
    work.allocate_output = [gathered = gathered_, options = input.options(),
                            shape = input.sizes().vec()](const std::vector<std::int64_t>& rows) {
      std::vector<std::int64_t> whole = shape;
      whole[0] = 0;
      for (const std::int64_t count : rows) whole[0] += count;
      gathered->tensor = at::empty(whole, options);
      return gathered->tensor.data_ptr();
    };
  } else if (call.in_place) {
    result_ = tensor;
    moved_ = input;
    NoteOverwritten(tensor);
  } else if (call.kind == core::OpKind::kBroadcast) {
    // A copy on the root, so that its own tensor stays as it is; a buffer elsewhere.
    const bool root = call.root == session_->topology().rank;
    moved_ = root && input.is_alias_of(tensor) ? input.clone()
             : root                            ? input
                                               : at::empty_like(input);
    result_ = moved_;
    input = moved_;
  } else {
    moved_ = at::empty_like(input);
    result_ = moved_;
  }
  work.input = input.const_data_ptr();
  work.output = moved_.defined() ? moved_.mutable_data_ptr() : nullptr;
  work.keep_alive = std::make_shared<std::vector<at::Tensor>>(
      std::initializer_list<at::Tensor>{std::move(input), moved_});
}

std::string PendingTensor::TryGiveMemory(const TensorCall& call, core::Work& work) {
  try {
    GiveMemory(call, work);
    return {};
  } catch (const std::exception& error) {
    moved_ = at::Tensor();
    result_ = at::Tensor();
    return WhyNoMemory(error);
  }
}

std::shared_ptr<PendingTensor> PendingTensor::Start(TensorCall call,
                                                    std::shared_ptr<SessionState> session) {
  ThrowIfError(session->Check());
  CheckName(call.name);
  std::shared_ptr<PendingTensor> pending(new PendingTensor());
  pending->session_ = std::move(session);

  auto work = std::make_shared<core::Work>();
  core::Request& request = work->request;
  request.key = call.name.empty() ? core::Key::Unnamed(core::kWorldSet, 0)
                                  : core::Key::Named(core::kWorldSet, call.name);
  pending->what_ = std::string(core::OpKindName(call.kind)) +
                   (call.name.empty() ? " without a name" : " " + core::Quoted(call.name));
  request.signature = std::make_shared<const core::Signature>(
      MakeSignature(call, pending->session_->topology().size, &request.invalid));
  if (request.invalid.empty()) request.invalid = pending->TryGiveMemory(call, *work);
  if (call.timeout.count() > 0 && call.timeout < kEndlessTimeout) {
    work->deadline = core::Clock::now() + call.timeout;
  }

  ThrowIfError(pending->session_->Submit(work, call.will_wait));
  pending->handle_ = work->handle;
  return pending;
}

PendingTensor::~PendingTensor() {
  if (handle_) handle_->Observe();
}

void PendingTensor::CheckSession() const {
  if (session_->gone()) {
    ThrowStatus(core::Status(core::StatusCode::kNotInitialized,
                             what_ + ": its session was shut down before the handle was used"));
  }
}

bool PendingTensor::Poll() {
  CheckSession();
  if (!handle_->done()) return false;
  Finish();
  return true;
}

at::Tensor PendingTensor::Synchronize() {
  CheckSession();
  if (!handle_->done()) {
    const core::Status waited = session_->Wait(*handle_);
    if (!handle_->done()) ThrowIfError(waited);  // in a forked child
  }
  Finish();
  ThrowIfError(handle_->status());
  return result_;
}

void PendingTensor::Finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_) return;
  finished_ = true;
  if (handle_->status().ok()) {
    at::NoGradGuard no_grad;
    if (gathered_) {
      result_ = std::move(gathered_->tensor);
    } else if (!moved_.is_alias_of(result_)) {
      result_.detach().copy_(moved_);
    }
  }
  handle_->Observe();
}

}  // namespace sirtaki::detail
