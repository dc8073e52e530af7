// Collectives that compute: all-reduce, reduce, reduce-scatter. See collectives.h for what holds
// for all of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <chrono>
#include <string>
#include <vector>

#include "sirtaki/compression.h"
#include "sirtaki/export.h"
#include "sirtaki/handle.h"
#include "sirtaki/process_set.h"
#include "sirtaki/session.h"

namespace sirtaki {

// float16 and bfloat16 are accumulated in float32 and rounded once.
enum class ReduceOp : unsigned char {
  // Integers, floating point, complex. Gradients flow through these two only.
  Sum,      // of integers: wraps at the type's range
  Average,  // the sum divided by the number of ranks of the set, also of those that have joined;
            // integers are truncated toward zero, and only int64 sums can wrap before
  // Integers, floating point, bool.
  Min,      // a NaN wins; -0 is smaller than +0
  Max,      // a NaN wins
  Product,  // of integers: wraps; of bool: And
  // Integers and bool.
  BitAnd,
  BitOr,
  BitXor,
  // Floating point, all-reduce only: adds what is orthogonal, averages what is parallel.
  Adasum,
};

struct AllreduceOptions {
  // Matches the calls of the ranks. Empty: by call order.
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
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

// The fields are as in AllreduceOptions.
struct ReduceOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  TORCH_ARG(double, prescale) = 1.0;
  TORCH_ARG(double, postscale) = 1.0;
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// The fields are as in AllreduceOptions; `op` is Sum, Average, Min or Max.
struct ReducescatterOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  TORCH_ARG(double, prescale) = 1.0;
  TORCH_ARG(double, postscale) = 1.0;
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// The sum, average, … over the ranks, element by element; the same bits on every rank. A sparse COO
// tensor goes to sparse_allreduce.
SIRTAKI_API at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options = {},
                                 const Session& session = {});
SIRTAKI_API at::Tensor allreduce_(const at::Tensor& tensor, const AllreduceOptions& options = {},
                                  const Session& session = {});
SIRTAKI_API Handle allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options = {},
                                   const Session& session = {});
SIRTAKI_API Handle allreduce_async_(const at::Tensor& tensor, const AllreduceOptions& options = {},
                                    const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_allreduce(const std::vector<at::Tensor>& tensors,
                                                      const AllreduceOptions& options = {},
                                                      const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_allreduce_(const std::vector<at::Tensor>& tensors,
                                                       const AllreduceOptions& options = {},
                                                       const Session& session = {});
SIRTAKI_API GroupedHandle grouped_allreduce_async(const std::vector<at::Tensor>& tensors,
                                                  const AllreduceOptions& options = {},
                                                  const Session& session = {});
SIRTAKI_API GroupedHandle grouped_allreduce_async_(const std::vector<at::Tensor>& tensors,
                                                   const AllreduceOptions& options = {},
                                                   const Session& session = {});

// The sum or average of sparse COO tensors of the same sizes and numbers of sparse and dense
// dimensions; how many elements each rank gives may differ. Two all-gathers, then each rank adds up
// what it got: the result is coalesced, the same on every rank. Autograd does not see it. Throws
// invalid_argument for other layouts, operations, compression, and factors of an integer.
SIRTAKI_API at::Tensor sparse_allreduce(const at::Tensor& tensor,
                                        const AllreduceOptions& options = {},
                                        const Session& session = {});
SIRTAKI_API Handle sparse_allreduce_async(const at::Tensor& tensor,
                                          const AllreduceOptions& options = {},
                                          const Session& session = {});

// As allreduce, with the result on rank `root_rank` alone. What the others get is their own tensor:
// a copy of it, or in place the tensor as it was.
SIRTAKI_API at::Tensor reduce(const at::Tensor& tensor, int root_rank,
                              const ReduceOptions& options = {}, const Session& session = {});
SIRTAKI_API at::Tensor reduce_(const at::Tensor& tensor, int root_rank,
                               const ReduceOptions& options = {}, const Session& session = {});
SIRTAKI_API Handle reduce_async(const at::Tensor& tensor, int root_rank,
                                const ReduceOptions& options = {}, const Session& session = {});
SIRTAKI_API Handle reduce_async_(const at::Tensor& tensor, int root_rank,
                                 const ReduceOptions& options = {}, const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_reduce(const std::vector<at::Tensor>& tensors,
                                                   int root_rank, const ReduceOptions& options = {},
                                                   const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_reduce_(const std::vector<at::Tensor>& tensors,
                                                    int root_rank,
                                                    const ReduceOptions& options = {},
                                                    const Session& session = {});
SIRTAKI_API GroupedHandle grouped_reduce_async(const std::vector<at::Tensor>& tensors,
                                               int root_rank, const ReduceOptions& options = {},
                                               const Session& session = {});
SIRTAKI_API GroupedHandle grouped_reduce_async_(const std::vector<at::Tensor>& tensors,
                                                int root_rank, const ReduceOptions& options = {},
                                                const Session& session = {});

// As allreduce, of which each rank of the set gets its rows along the first dimension: as many for
// each, one more for the first ones where they do not divide. [d0, …] becomes [d0 / n, …]. At least
// one dimension.
SIRTAKI_API at::Tensor reducescatter(const at::Tensor& tensor,
                                     const ReducescatterOptions& options = {},
                                     const Session& session = {});
SIRTAKI_API Handle reducescatter_async(const at::Tensor& tensor,
                                       const ReducescatterOptions& options = {},
                                       const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_reducescatter(const std::vector<at::Tensor>& tensors,
                                                          const ReducescatterOptions& options = {},
                                                          const Session& session = {});
SIRTAKI_API GroupedHandle grouped_reducescatter_async(const std::vector<at::Tensor>& tensors,
                                                      const ReducescatterOptions& options = {},
                                                      const Session& session = {});

}  // namespace sirtaki
