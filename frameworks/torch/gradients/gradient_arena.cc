#include "frameworks/torch/gradients/gradient_arena.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "core/base/digest.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/tensors/throw.h"
#include "fusion/arena_layout.h"

namespace sirtaki::detail {

bool ArenaPlace::Has(const at::Tensor& tensor) const {
  return tensor.has_storage() && tensor.numel() > 0 && tensor.const_data_ptr() == begin_;
}

at::Tensor ArenaPlace::View(const at::Tensor& like, at::IntArrayRef strides) {
  at::Tensor view = at::for_blob(begin_, like.sizes())
                        .strides(strides)
                        .deleter([arena = arena_](void*) {})
                        .options(like.options().requires_grad(false).layout(at::kStrided))
                        .target_device(like.device())
                        .make_tensor();
  view_ = view.storage().getWeakStorageImpl();
  return view;
}

void ArenaPlace::Vacate(session::Gpu& gpu) {
  if (!view_) return;
  const c10::intrusive_ptr<c10::StorageImpl> kept = view_->lock();
  view_.reset();
  if (!kept || kept->nbytes() == 0) return;
  const at::NoGradGuard no_grad;
  const auto bytes = static_cast<std::int64_t>(kept->nbytes());
  const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).device(kept->device());
  at::Tensor copy = at::empty({bytes}, options);
  FollowReaders(*arena_, gpu, copy);
  copy.copy_(
      at::for_blob(begin_, {bytes}).options(options).target_device(kept->device()).make_tensor());
  at::DataPtr memory = copy.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr());
  // Which gives back what the kept ones held of the arena.
  kept->set_data_ptr_noswap(std::move(memory));
}

void ArenaPlace::Enter(ops::cuda::DeviceWork& work) const {
  work.arena = arena_;
  work.place = begin_;
}

// One that is being made.
struct ArenaOrders::Order {
  std::vector<std::size_t> buckets;
  fusion::ArenaLayout layout;
  std::shared_ptr<ops::nccl::ArenaRequest> request;
  core::WorkPtr work;
};

namespace {

using Order = ArenaOrders::Order;
using Gradients = ArenaOrders::Gradients;

// An arena holds gradients that have no other form on the way, and that NCCL adds up.
bool FitsArena(const core::Signature& signature) {
  return signature.device == core::DeviceKind::kCuda && !signature.wire &&
         core::IsFloating(signature.dtype);
}

std::vector<std::int64_t> BytesOf(const Gradients& bucket) {
  std::vector<std::int64_t> bytes;
  for (const auto& gradient : bucket) {
    bytes.push_back(gradient->ParameterSignature().Bytes());
  }
  return bytes;
}

// All ranks submit the order for one GPU: there the lanes make the arena.
void Submit(Order& order, const SessionSet& set, std::uint64_t number, std::uint32_t slot,
            const std::vector<Gradients>& buckets) {
  std::vector<std::vector<std::int64_t>> bytes;
  std::string text;
  for (const std::size_t b : order.buckets) {
    bytes.push_back(BytesOf(buckets[b]));
    for (const auto& gradient : buckets[b]) text += gradient->key() + '\0';
    for (const std::int64_t size : bytes.back()) text += std::to_string(size) + '\0';
  }
  order.layout = fusion::LayOutArena(bytes);
  const ParameterGradient& first = *buckets[order.buckets.front()].front();
  auto signature = std::make_shared<core::Signature>();
  signature->kind = core::OpKind::kMakeArena;
  signature->device = core::DeviceKind::kCuda;
  signature->slot = slot;
  signature->layout = std::max<std::uint64_t>(core::Digest(text.data(), text.size()), 1);
  order.request = std::make_shared<ops::nccl::ArenaRequest>();
  order.request->bytes = order.layout.bytes;
  auto work = std::make_shared<ops::cuda::DeviceWork>();
  work->arena_request = order.request;
  if (first.gpu()) {
    work->device = first.gpu()->device();
  } else {
    work->request.invalid = "its GPU cannot be used";  // its gradients say why
  }
  work->request.key =
      core::Key::Named(set.members.set, "#arena of GPU slot " + std::to_string(slot) +
                                            " for gradient buckets " + std::to_string(number));
  work->request.asked = std::move(signature);
  order.work = std::move(work);
  ThrowIfError(set.session->Submit(order.work, /*will_wait=*/false));
}

// An error that all ranks know of alike leaves the buckets without an arena.
void Await(const Order& order, const SessionSet& set) {
  const core::Status status = set.session->Wait(*order.work->handle);
  order.work->handle->Observe();
  const core::StatusCode code = status.code();
  if (code != core::StatusCode::kMismatch && code != core::StatusCode::kInvalidArgument &&
      code != core::StatusCode::kUnsupported) {
    ThrowIfError(status);
  }
}

}  // namespace

ArenaOrders::ArenaOrders(const SessionSet& set, std::uint64_t number,
                         std::vector<Gradients> buckets, bool wanted)
    : set_(set), buckets_(std::move(buckets)) {
  const core::Config& config = set.session->session().config();
  if (!wanted || config.gradient_arena == core::GradientArenaMode::kOff) return;
  std::map<std::uint32_t, Order> of_slot;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const core::Signature signature = buckets_[b].front()->ParameterSignature();
    if (FitsArena(signature)) of_slot[signature.slot].buckets.push_back(b);
  }
  for (auto& [slot, order] : of_slot) {
    Submit(order, set, number, slot, buckets_);
    orders_.push_back(std::move(order));
  }
}

ArenaOrders::~ArenaOrders() {
  for (const Order& order : orders_) order.work->handle->Observe();
}

BucketArenas ArenaOrders::Take() {
  BucketArenas made;
  made.places.resize(buckets_.size());
  for (const Order& order : orders_) {
    Await(order, set_);
    const ops::nccl::ArenaPtr& arena = order.request->arena;
    if (!arena) continue;
    made.arenas.push_back(arena);
    for (std::size_t i = 0; i < order.buckets.size(); ++i) {
      for (const std::int64_t start : order.layout.starts[i]) {
        made.places[order.buckets[i]].emplace_back(arena, start);
      }
    }
  }
  made.buckets = std::move(buckets_);
  return made;
}

}  // namespace sirtaki::detail
