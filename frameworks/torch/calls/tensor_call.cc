#include "frameworks/torch/calls/tensor_call.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

#include "core/base/text.h"
#include "core/protocol/wire.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/validate.h"
#include "frameworks/torch/session/known_calls.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

using core::OpKind;

// A call that may take longer than this may take for ever: a later moment might not be a TimePoint.
constexpr std::chrono::hours kEndlessTimeout{24 * 365 * 10};

std::optional<core::DType> WireOf(const TensorCall& call, core::DType dtype) {
  const bool compressible = dtype == core::DType::kF32 || dtype == core::DType::kF64;
  return call.kind == OpKind::kAllReduce && compressible ? call.wire : std::nullopt;
}

bool OverlapsItself(const TensorCall& call, std::size_t index = 0) {
  if (!call.in_place || call.at(index).is_contiguous()) return false;
  return at::has_internal_overlap(call.at(index)) == at::MemOverlap::Yes;
}

core::Signature PartSignature(const TensorCall& call, const at::Tensor& tensor) {
  core::Signature signature = Describe(tensor);
  signature.kind = call.kind;
  if (core::Reduces(call.kind)) {
    signature.reduction = call.reduction;
    signature.prescale = call.prescale;
    signature.postscale = call.postscale;
  }
  signature.wire = WireOf(call, signature.dtype);
  if (core::HasRoot(call.kind)) signature.root = call.root;
  if (core::FirstDimensionVaries(call.kind) && !signature.shape.empty()) {
    signature.shape.erase(signature.shape.begin());
  }
  return signature;
}

std::string WhyPartInvalid(const TensorCall& call, std::size_t index,
                           const core::Signature& signature, const CallMembers& members) {
  const at::Tensor& tensor = call.at(index);
  std::string why = WhyNotMovable(tensor);
  if (!why.empty()) return why;
  OwnTensor own;
  own.rank = members.rank;
  own.dimensions = static_cast<int>(tensor.dim());
  if (tensor.dim() > 0) own.rows = tensor.size(0);
  own.splits = call.SplitsOf(index);
  why = detail::ValidateRequest(signature, members.ranks, own);
  if (!why.empty()) return why;
  if (OverlapsItself(call, index)) {
    return "the call is in place and the tensor's elements share memory (expanded); make it "
           "contiguous first";
  }
  return {};
}

// Tells whether a grouped call in place writes two tensors in the same memory. Which one's
// result it would be is anybody's guess, and another on each rank. What does not lie flat is
// written back in order.
std::string WhyGroupInvalid(const TensorCall& call) {
  // Each entry is where a tensor's memory begins, and its index.
  std::vector<std::pair<std::uintptr_t, std::size_t>> begins;
  for (std::size_t i = 0; i < call.group.size(); ++i) {
    const at::Tensor& tensor = call.group[i];
    if (tensor.numel() == 0 || !LiesFlat(tensor)) continue;
    begins.emplace_back(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()), i);
  }
  std::sort(begins.begin(), begins.end());
  for (std::size_t i = 1; i < begins.size(); ++i) {
    const auto& [begin, index] = begins[i - 1];
    if (begin + call.group[index].nbytes() <= begins[i].first) continue;
    return "tensors " + std::to_string(std::min(index, begins[i].second)) + " and " +
           std::to_string(std::max(index, begins[i].second)) +
           " of the list share memory, to which both results would be written";
  }
  return {};
}

// The ranks must agree on the signature. `*invalid` is set to why this rank's arguments are wrong.
core::SignaturePtr MakeSignature(const TensorCall& call, const CallMembers& members,
                                 SessionState& session, CallGpus* gpus, std::string* invalid) {
  *invalid = call.invalid;
  core::SignaturePtr lone;
  std::vector<core::SignaturePtr> parts;
  if (call.count() > core::kMaxParts) {  // no message could carry them
    *invalid = "the list has " + std::to_string(call.count()) + " tensors; at most " +
               std::to_string(core::kMaxParts) + " are allowed";
  }
  for (std::size_t i = 0; i < call.count() && call.count() <= core::kMaxParts; ++i) {
    auto part = std::make_shared<core::Signature>(PartSignature(call, call.at(i)));
    // Whatever is wrong with the call, which may be right elsewhere: ranks take slots alike.
    std::shared_ptr<session::Gpu> gpu;
    std::string why;
    if (IsOnGpu(call.at(i))) why = FindGpuOf(call.at(i), session, &gpu);
    if (gpu != nullptr) part->slot = gpu->slot();
    gpus->push_back(std::move(gpu));
    if (invalid->empty()) {
      *invalid = WhyPartInvalid(call, i, *part, members);
      if (invalid->empty()) *invalid = std::move(why);
      if (call.grouped && !invalid->empty()) {
        *invalid =
            "tensor " + std::to_string(i) + " of " + std::to_string(call.count()) + ": " + *invalid;
      }
    }
    (call.grouped ? parts.emplace_back() : lone) = std::move(part);
  }
  if (invalid->empty() && call.timeout.count() < 0) *invalid = NegativeTimeoutText(call.timeout);
  if (invalid->empty() && call.grouped && call.in_place) *invalid = WhyGroupInvalid(call);
  if (invalid->empty() && call.grouped && parts.empty()) *invalid = "the list of tensors is empty";
  if (lone != nullptr) return lone;
  auto whole = std::make_shared<core::Signature>();
  whole->kind = call.kind;
  whole->parts = std::move(parts);
  whole->round = call.round;
  return whole;
}

// Whether all that may be wrong with a call is in its signature, or is looked at by IsAgain.
bool MayBeKnown(const TensorCall& call) {
  return !call.grouped && call.invalid.empty() && call.splits.empty() && call.tensor.defined() &&
         !core::FirstDimensionVaries(call.kind);
}

// Whether the call, on the host, has this signature, which was right on this rank, and is right.
bool IsAgain(const core::Signature& signature, const TensorCall& call) {
  const auto is_factor = [](double a, double b) {
    return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
  };
  return MayBeKnown(call) && call.timeout.count() >= 0 && WhyNotMovable(call.tensor).empty() &&
         IsDescribedBy(signature, call.tensor) && signature.kind == call.kind &&
         signature.reduction == call.reduction && signature.root == call.root &&
         is_factor(signature.prescale, call.prescale) &&
         is_factor(signature.postscale, call.postscale) &&
         signature.wire == WireOf(call, signature.dtype) && !OverlapsItself(call);
}

}  // namespace

std::size_t TensorCall::count() const {
  if (kind == OpKind::kBarrier) return 0;
  return grouped ? group.size() : 1;
}

const std::vector<std::int64_t>& TensorCall::SplitsOf(std::size_t index) const {
  static const std::vector<std::int64_t> kEqual;
  if (splits.empty()) return kEqual;
  return splits.size() == 1 ? splits.front() : splits[index];
}

void FillIn(const TensorCall& call, const CallMembers& members, SessionState& session,
            core::Request* request, CallGpus* gpus) {
  if (call.name.empty()) {
    request->key = core::Key::Unnamed(members.set, 0);
    request->asked = MakeSignature(call, members, session, gpus, &request->invalid);
    return;
  }
  KnownCalls::Known known = session.known_calls().Find(call.name);
  if (known.signature != nullptr && known.key.set == members.set &&
      IsAgain(*known.signature, call)) {
    request->key = std::move(known.key);
    request->asked = std::move(known.signature);
    gpus->push_back(nullptr);
    return;
  }
  request->key = core::Key::Named(members.set, call.name);
  core::SignaturePtr signature = MakeSignature(call, members, session, gpus, &request->invalid);
  request->asked = signature;
  if (request->invalid.empty() && MayBeKnown(call) && gpus->front() == nullptr) {
    session.known_calls().Note(call.name, {request->key, std::move(signature)});
  }
}

void CheckName(const TensorCall& call) {
  std::string why;
  if (call.name.size() > core::kMaxNameBytes) {
    // Every rank that gives this name sees the same, and no message could carry it to the others.
    why = " is too long; at most " + std::to_string(core::kMaxNameBytes) + " bytes are allowed";
  } else if (!call.derived_name && !call.name.empty() && call.name.front() == '#') {
    why = " begins with '#', which is kept for names that the library makes";
  }
  if (why.empty()) return;
  ThrowInvalid("the name " + core::Quoted(call.name) + why, core::Origin{-1, {}, call.name});
}

std::string DescribeCall(core::OpKind kind, const std::string& name) {
  return std::string(core::OpKindName(kind)) +
         (name.empty() ? " without a name"
                       : " " + core::Key::Named(core::kWorldSet, name).ToString());
}

core::TimePoint DeadlineAfter(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0 || timeout >= kEndlessTimeout) return core::TimePoint::max();
  return core::Clock::now() + timeout;
}

core::TimePoint DeadlineOf(std::chrono::milliseconds timeout) {
  if (timeout.count() < 0) {
    ThrowInvalid(NegativeTimeoutText(timeout));
  }
  return DeadlineAfter(timeout);
}

std::string NegativeTimeoutText(std::chrono::milliseconds timeout) {
  return "the timeout is negative: " + core::DurationText(timeout);
}

}  // namespace sirtaki::detail
