#include "frameworks/torch/tensor_call.h"

#include <ATen/MemoryOverlap.h>

#include <memory>
#include <utility>

#include "core/text.h"
#include "core/wire.h"
#include "frameworks/torch/tensor_bridge.h"
#include "frameworks/torch/throw.h"
#include "ops/validate.h"

namespace sirtaki::detail {
namespace {

using core::OpKind;

// A call that may take longer than this may take for ever: a later moment might not be a TimePoint.
constexpr std::chrono::hours kEndlessTimeout{24 * 365 * 10};

bool WorksOnRows(OpKind kind) {
  return core::FirstDimensionVaries(kind) || kind == OpKind::kAllGatherInto ||
         kind == OpKind::kReduceScatter;
}

core::Signature PartSignature(const TensorCall& call, const at::Tensor& tensor) {
  core::Signature signature = Describe(tensor);
  signature.kind = call.kind;
  if (core::Reduces(call.kind)) {
    signature.reduction = call.reduction;
    signature.prescale = call.prescale;
    signature.postscale = call.postscale;
  }
  const bool compressible =
      signature.dtype == core::DType::kF32 || signature.dtype == core::DType::kF64;
  if (call.kind == OpKind::kAllReduce && compressible) signature.wire = call.wire;
  if (core::HasRoot(call.kind)) signature.root = call.root;
  if (core::FirstDimensionVaries(call.kind) && !signature.shape.empty()) {
    signature.shape.erase(signature.shape.begin());
  }
  return signature;
}

std::string WhySplitsWrong(const TensorCall& call, const std::vector<std::int64_t>& splits,
                           std::int64_t rows, const CallMembers& members) {
  const bool used = call.kind == OpKind::kAllToAll ||
                    (call.kind == OpKind::kScatter && call.root == members.rank);
  if (!used) return {};
  if (splits.empty()) {
    if (call.kind == OpKind::kScatter || rows % members.size() == 0) return {};
    return "the first dimension, " + std::to_string(rows) +
           ", does not divide into equal parts for " + std::to_string(members.size()) +
           " ranks; give splits";
  }
  if (static_cast<std::int64_t>(splits.size()) != members.size()) {
    return std::to_string(splits.size()) + " splits for " + std::to_string(members.size()) +
           " ranks; there must be one for each";
  }
  std::int64_t left = rows;
  for (const std::int64_t split : splits) {
    if (split < 0) return "a split is negative: " + std::to_string(split);
    if (split > left) left = -1;
    if (left < 0) break;
    left -= split;
  }
  if (left == 0) return {};
  return "the splits add up to " + std::string(left < 0 ? "more" : "less") +
         " than the first dimension, " + std::to_string(rows);
}

std::string WhyPartInvalid(const TensorCall& call, std::size_t index,
                           const core::Signature& signature, const CallMembers& members) {
  const at::Tensor& tensor = call.at(index);
  std::string why = WhyNotMovable(tensor);
  if (!why.empty()) return why;
  why = ops::ValidateRequest(signature, members.ranks, static_cast<int>(tensor.dim()));
  if (!why.empty()) return why;
  if (call.in_place && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    return "in place on a tensor whose elements share memory (expanded); make it contiguous first";
  }
  if (!WorksOnRows(call.kind)) return {};
  if (tensor.dim() < 1) {
    return std::string(core::OpKindName(call.kind)) +
           " works along the first dimension, and this tensor has none: reshape it to [1]";
  }
  return WhySplitsWrong(call, call.SplitsOf(index), tensor.size(0), members);
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

core::SignaturePtr MakeSignature(const TensorCall& call, const CallMembers& members,
                                 std::string* invalid) {
  *invalid = call.invalid;
  std::vector<core::SignaturePtr> parts;
  for (std::size_t i = 0; i < call.count(); ++i) {
    auto part = std::make_shared<const core::Signature>(PartSignature(call, call.at(i)));
    if (invalid->empty()) {
      *invalid = WhyPartInvalid(call, i, *part, members);
      if (call.grouped && !invalid->empty()) {
        *invalid =
            "tensor " + std::to_string(i) + " of " + std::to_string(call.count()) + ": " + *invalid;
      }
    }
    parts.push_back(std::move(part));
  }
  if (invalid->empty() && call.timeout.count() < 0) *invalid = NegativeTimeoutText(call.timeout);
  if (invalid->empty() && call.grouped && parts.empty()) *invalid = "the list of tensors is empty";
  if (!call.grouped && !parts.empty()) return std::move(parts.front());
  auto whole = std::make_shared<core::Signature>();
  whole->kind = call.kind;
  whole->parts = std::move(parts);
  return whole;
}

void CheckName(const TensorCall& call) {
  std::string why;
  if (call.name.size() > core::kMaxNameBytes) {
    // Every rank that gives this name sees the same, and no message could carry it to the others.
    why = " is too long; at most " + std::to_string(core::kMaxNameBytes) + " bytes are allowed";
  } else if (!call.derived_name && !call.name.empty() && call.name.front() == '#') {
    why = " begins with '#', as names that the library makes itself";
  }
  if (why.empty()) return;
  ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                           "the name " + core::Quoted(call.name) + why,
                           core::Origin{-1, {}, call.name}));
}

std::string DescribeCall(const TensorCall& call) {
  return std::string(core::OpKindName(call.kind)) +
         (call.name.empty() ? " without a name" : " " + core::Quoted(call.name));
}

core::TimePoint DeadlineAfter(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0 || timeout >= kEndlessTimeout) return core::TimePoint::max();
  return core::Clock::now() + timeout;
}

std::string NegativeTimeoutText(std::chrono::milliseconds timeout) {
  return "the timeout is negative: " + core::DurationText(timeout);
}

}  // namespace sirtaki::detail
