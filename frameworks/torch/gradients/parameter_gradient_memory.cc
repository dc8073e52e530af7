// The memory in which a gradient is reduced.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/sparse_call.h"
#include "frameworks/torch/gradients/gradient_arena.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_memory.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {

// Nobody else has it, so that its place may change: a backward that found no gradient has made it,
// or nothing but `.grad` refers to it and to its memory.
bool ParameterGradient::MayReplaceFound() const {
  constexpr std::size_t kOurs = 2;  // `.grad` and found_
  return found_.use_count() == kOurs && (fresh_.load(std::memory_order_relaxed) || !shares_);
}

// Where a dense gradient is reduced: where it lies if it lies right, in memory of its own. If only
// the backend does not see it there, it moves to memory that the backend sees, once, and its own is
// given back. So does one that shares the memory that a backward has given it: gradients of several
// parameters may be parts of one tensor, or the same one.
at::Tensor ParameterGradient::PlaceDense(const std::vector<std::int64_t>& strides) {
  session::Session& session = set_.session->session();
  const bool lies_right = LiesWith(found_, strides);
  // It is not its place there: a bucket of former times had it, or another gradient has.
  const bool in_arena = IsOnGpu(found_) && LiesInArena(found_);
  const bool seen = found_.numel() == 0 ||
                    (IsOnGpu(found_) ? !in_arena : session.IsShared(found_.const_data_ptr()));
  // One with a graph may be what its graph has kept: it stays as it is.
  const bool has_graph = found_.requires_grad();
  const bool moves = lies_right && (!seen || shares_) && !has_graph &&
                     LiesWith(found_, ContractStrides(what_.parameter)) && MayReplaceFound();
  if (lies_right && !has_graph && !shares_ && !in_arena && !moves) {
    NoteOverwritten(found_);
    return found_.detach();
  }
  at::Tensor placed = EmptyForBackend(found_, strides, session);
  placed.copy_(found_.detach());
  if (!moves) return placed;
  what_.parameter.mutable_grad() = placed;
  found_ = placed;
  shares_ = false;
  return placed.detach();
}

bool ParameterGradient::LiesInArena(const at::Tensor& tensor) const {
  return gpu_ && gpu_->device()->InArena(tensor.const_data_ptr());
}

// In its bucket's arena, if there is one and the result may become `.grad` there. False: what lies
// elsewhere is brought to its place and taken back, which is vacant then all the same.
bool ParameterGradient::PlaceInArena(const std::vector<std::int64_t>& strides) {
  ArenaPlace* const place = this->place();
  if (place == nullptr || !on_gpu_) return false;
  place->Enter(*on_gpu_);
  const bool movable = found_.defined() && !IsSparse(found_) && !found_.requires_grad() &&
                       !shares_ && LiesWith(found_, strides);
  if (movable && place->Has(found_)) {
    NoteOverwritten(found_);
    moved_ = found_.detach();
    return true;
  }
  place->Vacate(*gpu_);
  if (present_ && (!movable || LiesInArena(found_) || !MayReplaceFound())) return false;
  moved_ = place->View(present_ ? found_ : what_.parameter, strides);
  return true;
}

void ParameterGradient::GiveMemory(core::Work& work) {
  // By itself it lies row by row on all ranks, in a bucket as the bucket's layout says.
  const std::vector<std::int64_t> strides =
      in_ ? ContractStrides(what_.parameter) : RowMajorStrides(what_.parameter);
  const bool in_arena = PlaceInArena(strides);
  if (in_arena) {
    // The lane brings it there, with all of the bucket.
  } else if (!present_) {
    moved_ = EmptyForBackend(what_.parameter.detach(), strides, set_.session->session());
    if (!on_gpu_) moved_.zero_();  // a device's lane looks at what is absent, not at its memory
  } else if (IsSparse(found_)) {
    moved_ = EmptyForBackend(found_.detach(), strides, set_.session->session());
    moved_.copy_(found_.detach().to_dense());
  } else {
    moved_ = PlaceDense(strides);
  }
  if (found_.defined()) version_ = VersionOf(found_);
  work.input = work.output = moved_.mutable_data_ptr();
  if (in_arena && present_) work.input = found_.const_data_ptr();
  kept_ = std::make_shared<at::Tensor>(in_arena && present_ ? found_ : moved_);
  work.keep_alive = kept_;
}

std::string ParameterGradient::TryGiveMemory(core::Work& work) {
  try {
    GiveMemory(work);
    return {};
  } catch (const c10::OutOfMemoryError& error) {
    return WhyNoMemory(error);
  } catch (const std::exception& error) {
    // On a GPU it may be any failure of the device, which a copy has come upon.
    return on_gpu_ ? TextOf(error) : WhyNoMemory(error);
  }
}

}  // namespace sirtaki::detail
