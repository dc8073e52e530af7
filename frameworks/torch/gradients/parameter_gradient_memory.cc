// What the other ranks are told of a gradient, the part of a bucket that it has, and its memory there.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/validate.h"
#include "frameworks/torch/gradients/gradient_arena.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_memory.h"
#include "frameworks/torch/gradients/optimizer_shards.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/tensors/compression.h"
#include "frameworks/torch/tensors/cpu_allocator.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {
namespace {

// The tensor into which an earlier gradient was moved serves again if nobody has kept it and it is what
// EmptyForBackend would make. It is on the CPU.
bool IsVacantLike(const at::Tensor& moved, const at::Tensor& like, at::IntArrayRef strides) {
  return moved.defined() && moved.use_count() == 1 && moved.storage().use_count() == 1 &&
         like.is_cpu() && moved.dtype() == like.dtype() && moved.sizes() == like.sizes() &&
         moved.strides() == strides;
}

constexpr const char* kCaptured =
    "it was made while its stream was captured in a CUDA graph; collectives cannot be replayed, so "
    "call backward() and step() outside of captures";

}  // namespace

core::Signature ParameterGradient::SignatureOf(const at::Tensor& shaped) const {
  core::Signature signature = Describe(shaped);
  signature.kind = core::OpKind::kAllReduce;
  if (signature.device == core::DeviceKind::kCuda && gpu_) signature.slot = gpu_->slot();
  signature.reduction = what_.rule->reduction;
  signature.prescale = 1.0 / what_.rule->predivide;
  signature.postscale = what_.rule->predivide;
  signature.wire = WireType(what_.rule->compression, what_.rule->scope, set_.session->topology(),
                            shaped.scalar_type());
  return signature;
}

core::SignaturePtr ParameterGradient::RequestOf(const core::SignaturePtr& signature) const {
  if (!what_.rule->hook) return signature;
  // Nothing is moved: it tells who has the gradient, and that all ranks are ready. Some types have no
  // reduction but the hook's.
  const bool reduces = core::IsDefined(core::ReduceOp::kSum, signature->dtype);
  return std::make_shared<const core::Signature>(
      core::Signature{.kind = signature->kind,
                      .dtype = reduces ? signature->dtype : core::DType::kU8,
                      .shape = {0}});
}

core::Signature ParameterGradient::ParameterSignature() {
  (void)FindGpu(what_.parameter);  // its works say what is wrong
  return SignatureOf(what_.parameter);
}

// Whether SignatureOf would give this one: the rest of it comes from the rule.
bool ParameterGradient::IsLike(const core::Signature& signature, const at::Tensor& shaped) const {
  return IsDescribedBy(signature, shaped) &&
         (!gpu_ || signature.device != core::DeviceKind::kCuda || signature.slot == gpu_->slot());
}

// Returns what is wrong with the gradient, whatever bucket it goes in; empty if nothing is.
std::string ParameterGradient::Check(const at::Tensor& shaped) {
  const UnderWay& now = *under_way_;
  std::string invalid = now.refused.empty() ? WhyNotMovable(shaped) : now.refused;
  if (invalid.empty() && now.captured) invalid = kCaptured;
  const core::DType dtype = DTypeOf(shaped.scalar_type()).value_or(core::DType::kU8);
  const bool reduces = core::IsDefined(what_.rule->reduction, dtype) || what_.rule->hook;
  if (invalid.empty() && now.present && !reduces) {
    invalid = ValidateReduction(SignatureOf(shaped));
  }
  if (invalid.empty()) invalid = FindGpu(shaped);
  return invalid;
}

std::string ParameterGradient::CheckInBucket(const BucketPart& part, const at::Tensor& shaped) {
  if (!IsLike(*part.like, shaped)) {
    seen_.stays_out |= SignatureOf(shaped) != SignatureOf(what_.parameter);
    return "it differs from what its parameter was when the bucket was laid out";
  }
  if (HasContractStrides(what_.parameter, part.strides)) return {};
  return "its strides differ from those of its parameter when the bucket was made";
}

// The part of a bucket of the gradient's own serves again while the gradient stays like it. The key
// says nothing of how the memory lies: row by row on all ranks.
BucketPartPtr ParameterGradient::PartAlone(const at::Tensor& shaped) {
  BucketPartPtr part = part_;
  if (part && part->bucket->assembly.of_one() && IsLike(*part->like, shaped)) return part;
  core::SignaturePtr like = std::make_shared<const core::Signature>(SignatureOf(shaped));
  auto signature = std::make_shared<core::Signature>(*RequestOf(like));
  signature->round = what_.rule->at_backward ? 1 : 0;  // as most of them are
  const auto bucket =
      std::make_shared<Bucket>(core::Key::Named(set_.members.set, what_.key), std::move(signature));
  if (what_.rule->hook) {
    bucket->hook = std::make_unique<BucketHook>(set_, what_.rule->hook);
    bucket->hook->given.name = what_.key;
    bucket->hook->given.index = what_.index;
    bucket->hook->given.parameters = {what_.name};
    bucket->hook->given.parameter_tensors = {what_.parameter};
    bucket->hook->starts = {0};
  }
  part = Bucket::PartOf(bucket, 0, weak_from_this(), std::move(like),
                        at::detail::defaultStrides(shaped.sizes()));
  part_ = part;
  return part;
}

std::string ParameterGradient::NoteOnGpu(ops::cuda::DeviceWork& work) {
  work.device = gpu_->device();
  const core::Status noted = NoteProducer(work, *gpu_);
  under_way_->captured = noted.code() == core::StatusCode::kInvalidArgument;
  return under_way_->captured ? kCaptured : noted.message();
}

// Finds the GPU of a tensor on one: a parameter may have moved there, or to another.
std::string ParameterGradient::FindGpu(const at::Tensor& shaped) {
  if (!IsOnGpu(shaped) || (gpu_ && gpu_->device()->index() == shaped.device().index())) return {};
  gpu_.reset();
  return FindGpuOf(shaped, *set_.session, &gpu_);
}

// Nobody else has it, so that its place may change: a backward that found no gradient has made it,
// or nothing but `.grad` refers to it and to its memory.
bool ParameterGradient::MayReplaceFound() const {
  constexpr std::size_t kOurs = 2;  // `.grad` and under_way_'s
  return under_way_->found.use_count() == kOurs && (!under_way_->shares || history_.fresh());
}

// Where a dense gradient is reduced: where it lies if it lies right, in memory of its own. If only
// the backend does not see it there, it moves to memory that the backend sees, once, and its own is
// given back. So does one that shares the memory that a backward has given it: gradients of several
// parameters may be parts of one tensor, or the same one.
at::Tensor ParameterGradient::PlaceDense(const BucketPart& part) {
  session::Session& session = set_.session->session();
  at::Tensor& found = under_way_->found;
  const bool lies_right = LiesWith(found, part.strides);
  // It is not its place there: a bucket of former times had it, or another gradient has.
  const bool in_arena = IsOnGpu(found) && LiesInArena(found);
  const bool seen =
      found.numel() == 0 || (IsOnGpu(found) ? !in_arena : session.IsShared(found.const_data_ptr()));
  // One with a graph may be what its graph has kept: it stays as it is.
  const bool has_graph = found.requires_grad();
  const bool moves = lies_right && (!seen || under_way_->shares) && !has_graph &&
                     MayReplaceFound() &&
                     (HasContractStrides(what_.parameter, part.strides) ||
                      LiesWith(found, ContractStrides(what_.parameter)));
  if (lies_right && !has_graph && !under_way_->shares && !in_arena && !moves) {
    NoteOverwritten(found);
    return found;
  }
  const bool serves = moves && moved_ && IsVacantLike(*moved_, found, part.strides);
  at::Tensor placed = serves ? *moved_ : EmptyForBackend(found, part.strides, session);
  // Hooks and the like were of the last gradient.
  if (serves) placed.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
  placed.copy_(found);
  if (!moves) return placed;
  const bool is_small = found.is_cpu() && found.nbytes() < kPoolTensorBytes;
  if (!serves) moved_ = !moved_ && is_small ? placed : at::Tensor();
  what_.parameter.mutable_grad() = placed;
  found = placed;
  under_way_->shares = false;
  return placed;
}

bool ParameterGradient::LiesInArena(const at::Tensor& tensor) const {
  return gpu_ && gpu_->device()->InArena(tensor.const_data_ptr());
}

// Places the gradient in its bucket's arena, if there is one and the result may become `.grad`
// there. False: what lies elsewhere is brought to its place and taken back, which is vacant then
// all the same.
bool ParameterGradient::PlaceInArena(BucketPart& part) {
  ops::cuda::DeviceWork* const work = part.on_gpu();
  if (!part.place || work == nullptr) return false;
  const at::Tensor& found = under_way_->found;
  part.place->Enter(*work);
  const bool movable = found.defined() && !found.is_sparse() && !found.requires_grad() &&
                       !under_way_->shares && LiesWith(found, part.strides);
  if (movable && part.place->Has(found)) {
    NoteOverwritten(found);
    part.memory().result = found;
    return true;
  }
  part.place->Vacate(*gpu_);
  const bool present = under_way_->present;
  if (present && (!movable || LiesInArena(found) || !MayReplaceFound())) return false;
  part.memory().result = part.place->View(present ? found : what_.parameter, part.strides);
  // The lane brings it there, with all of the bucket.
  if (present) part.memory().given = found;
  return true;
}

// The gradient in its place of the buffer that all gradients of the bucket share.
at::Tensor ParameterGradient::FillBuffer(const BucketPart& part) const {
  at::Tensor place = part.bucket->hook->given.gradients[part.index];
  if (!under_way_->present) return place.zero_();
  const at::Tensor found = under_way_->found.detach();
  return place.copy_(found.is_sparse() ? found.to_dense() : found);
}

void ParameterGradient::GiveMemory(BucketPart& part) {
  const at::Tensor& found = under_way_->found;
  GradientMemory& memory = part.memory();
  if (PlaceInArena(part)) {
    // It has its place.
  } else if (part.bucket->hook && part.bucket->hook->line) {
    memory.result = FillBuffer(part);
  } else if (!under_way_->present) {
    memory.result =
        EmptyForBackend(what_.parameter.detach(), part.strides, set_.session->session());
    // A device's lane looks at what is absent, not at its memory.
    if (part.on_gpu() == nullptr || part.bucket->hook) memory.result.zero_();
  } else if (found.is_sparse()) {
    memory.result = EmptyForBackend(found.detach(), part.strides, set_.session->session());
    memory.result.copy_(found.detach().to_dense());
  } else {
    memory.result = PlaceDense(part);
  }
  if (found.defined()) under_way_->version = VersionOf(found);
  part.work->output = memory.result.mutable_data_ptr();
  part.work->input = memory.given.defined() ? memory.given.const_data_ptr() : part.work->output;
  const OptimizerShards* const shards = what_.counts->shards.get();
  // A GPU's lane reduces a part where it lies, if all ranks keep parts only: the shard is copied when
  // the device has come to its end.
  const bool on_gpu = part.on_gpu() != nullptr;
  if (shards == nullptr || part.bucket->hook || (on_gpu && !part.cuts)) return;
  part.work->kept =
      shards->PartToKeep(what_.parameter, memory.result, on_gpu ? nullptr : &memory.shard);
  if (part.cuts && !part.work->kept) {
    throw std::invalid_argument(
        "its parameter has another shape or lies in memory in another order than when it was cut "
        "into shards: choose the memory format before the optimizer is made");
  }
  if (part.cuts) part.work->kept->cuts = part.cuts;
}

// Sums come in another order where each rank gets its shard only, which the option deterministic
// does not allow.
core::PartCuts ParameterGradient::CutsIfSharded() const {
  const OptimizerShards* const shards = what_.counts->shards.get();
  if (shards == nullptr || what_.rule->hook || shards->set().members.ranks != set_.members.ranks ||
      set_.session->session().config().deterministic) {
    return nullptr;
  }
  return shards->CutsOf(what_.parameter);
}

std::string ParameterGradient::TryGiveMemory(BucketPart& part) {
  try {
    GiveMemory(part);
    return {};
  } catch (const c10::OutOfMemoryError& error) {
    return WhyNoMemory(error);
  } catch (const std::invalid_argument& error) {
    return error.what();
  } catch (const std::exception& error) {
    // An error on a GPU may be any failure of the device, which a copy has come upon.
    return part.on_gpu() != nullptr ? TextOf(error) : WhyNoMemory(error);
  }
}

}  // namespace sirtaki::detail
