// Collective operations on tensors: all-reduce, all-gather, broadcast.
//
// Every rank calls the same operation, under the same name, with the same type and shape; what
// differs is found and thrown as `mismatch` on all of them. Ranks may call named operations in
// different orders. Operations without a name are matched by the order in which the ranks call
// them.
//
// Tensors: dense, in host memory; uint8, int8, int16, int32, int64, float16, bfloat16, float32,
// float64; bool for moving (all-gather, broadcast). Views, non-contiguous, empty and 0-dimensional
// ones are fine. Autograd does not see the operations: they work on the detached data.
//
// Each comes in up to four forms: `f(t)` returns a new tensor; `f_(t)` overwrites t and returns it;
// `f_async(t)` and `f_async_(t)` return a Handle at once. From then until the operation is done its
// tensors must not be written, and those of the in-place forms not be read.
//
// Everything may be called from any thread. All throw Error; see error.h for the codes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <chrono>
#include <memory>
#include <string>

#include "sirtaki/compression.h"
#include "sirtaki/export.h"
#include "sirtaki/session.h"

namespace sirtaki {

namespace detail {
class PendingTensor;
}

enum class ReduceOp : unsigned char {
  Sum,      // of integers: wraps at the type's range
  Average,  // the sum divided by the number of ranks; integers are truncated toward zero,
            // and only int64 sums can wrap before they are divided
};

struct AllreduceOptions {
  // Matches the calls of the ranks. Empty: by call order.
  TORCH_ARG(std::string, name);
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  // Each rank's tensor is multiplied by `prescale` before, the result by `postscale` after the
  // reduction. Other values than 1 need a floating-point tensor.
  TORCH_ARG(double, prescale) = 1.0;
  TORCH_ARG(double, postscale) = 1.0;
  // What float32 and float64 tensors travel as, and where; see compression.h. The ranks must agree.
  TORCH_ARG(Compression, compression) = Compression::None;
  TORCH_ARG(CompressionScope, compression_scope) = CompressionScope::BetweenHosts;
  // If it is not done in this time the whole group fails with timed_out, naming the tensor: a call
  // cannot be taken back. 0: only the limits of the session hold.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

struct AllgatherOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

struct BroadcastOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// An operation under way. Copies refer to the same operation. A name is in flight, and must not be
// used for another operation, until synchronize() has returned, poll() was true, or the last copy
// is gone. An in-place operation on a non-contiguous tensor is written back by synchronize() or
// poll() == true.
class SIRTAKI_API Handle {
 public:
  Handle() = default;
  explicit Handle(std::shared_ptr<detail::PendingTensor> pending) : pending_(std::move(pending)) {}

  bool valid() const noexcept { return pending_ != nullptr; }
  const std::shared_ptr<detail::PendingTensor>& pending() const { return pending_; }

 private:
  std::shared_ptr<detail::PendingTensor> pending_;
};

// True if the operation has ended, well or badly; never blocks. Throws not_initialized if the
// handle belongs to a session that was shut down, invalid_argument for an empty handle.
SIRTAKI_API bool poll(const Handle& handle);

// Waits until the operation has ended and returns its tensor, or throws what went wrong. May be
// called several times. Does not use a core while it waits.
SIRTAKI_API at::Tensor synchronize(const Handle& handle);

// The sum or average over the ranks, element by element; the same bits on every rank.
SIRTAKI_API at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options = {},
                                 const Session& session = {});
SIRTAKI_API at::Tensor allreduce_(const at::Tensor& tensor, const AllreduceOptions& options = {},
                                  const Session& session = {});
SIRTAKI_API Handle allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options = {},
                                   const Session& session = {});
SIRTAKI_API Handle allreduce_async_(const at::Tensor& tensor, const AllreduceOptions& options = {},
                                    const Session& session = {});

// The tensors of all ranks, one after the other along the first dimension, in which they may
// differ. At least one dimension.
SIRTAKI_API at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options = {},
                                 const Session& session = {});
SIRTAKI_API Handle allgather_async(const at::Tensor& tensor, const AllgatherOptions& options = {},
                                   const Session& session = {});

// The tensor of rank `root_rank`. The others give one of the same type and shape.
SIRTAKI_API at::Tensor broadcast(const at::Tensor& tensor, int root_rank,
                                 const BroadcastOptions& options = {}, const Session& session = {});
SIRTAKI_API at::Tensor broadcast_(const at::Tensor& tensor, int root_rank,
                                  const BroadcastOptions& options = {},
                                  const Session& session = {});
SIRTAKI_API Handle broadcast_async(const at::Tensor& tensor, int root_rank,
                                   const BroadcastOptions& options = {},
                                   const Session& session = {});
SIRTAKI_API Handle broadcast_async_(const at::Tensor& tensor, int root_rank,
                                    const BroadcastOptions& options = {},
                                    const Session& session = {});

}  // namespace sirtaki
