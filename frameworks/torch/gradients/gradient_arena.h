// Arenas on GPUs: where the buckets of an optimizer are reduced where they lie.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "frameworks/torch/session/session_set.h"
#include "ops/cuda/device_work.h"
#include "ops/nccl/arena.h"
#include "session/base/devices.h"

namespace sirtaki::detail {

class ParameterGradient;

// The place of one gradient. It is written anew in each step, so what is kept of the last one has
// to move out. Used by whoever has reported the gradient's gate.
class ArenaPlace {
 public:
  ArenaPlace(ops::nccl::ArenaPtr arena, std::int64_t start)
      : arena_(std::move(arena)), begin_(arena_->begin() + start) {}

  // Whether the tensor's memory begins there.
  bool Has(const at::Tensor& tensor) const;
  // A tensor that lies there, of this one's type and sizes. Precondition: it is vacant.
  at::Tensor View(const at::Tensor& like, at::IntArrayRef strides);
  // Tensors that somebody has kept get memory of their own, with the same numbers, in the calling
  // thread's current stream. Throws Error, and what LibTorch throws.
  void Vacate(session::Gpu& gpu);
  // There the work is reduced.
  void Enter(ops::cuda::DeviceWork& work) const;

 private:
  ops::nccl::ArenaPtr arena_;
  std::byte* begin_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> view_;  // the last
};

using ArenaPlaces = std::vector<ArenaPlace>;  // of a bucket's gradients; empty: it has no arena

struct BucketArenas {
  using Gradients = std::vector<std::shared_ptr<ParameterGradient>>;
  std::vector<Gradients> buckets;
  std::vector<ArenaPlaces> places;  // by bucket
  std::vector<ops::nccl::ArenaPtr> arenas;
};

// The arenas of buckets, one for each GPU that these are on, while they are made. Where a rank has
// no memory for one, its buckets have none on any rank.
class ArenaOrders {
 public:
  using Gradients = BucketArenas::Gradients;
  struct Order;

  // Submits, unless there are to be no arenas. Collective; `number` is that of the layout. Throws
  // what a submission throws.
  ArenaOrders(const SessionSet& set, std::uint64_t number, std::vector<Gradients> buckets,
              bool wanted);
  ~ArenaOrders();
  ArenaOrders(const ArenaOrders&) = delete;
  ArenaOrders& operator=(const ArenaOrders&) = delete;

  bool empty() const { return orders_.empty(); }  // none is wanted, or on a GPU
  // Waits, once. Throws what a collective throws.
  BucketArenas Take();

 private:
  const SessionSet set_;
  std::vector<Gradients> buckets_;
  std::vector<Order> orders_;
};

}  // namespace sirtaki::detail
