// These collectives compute: all-reduce, reduce, reduce-scatter. collectives.h says what holds for
// all of them.
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

// A ReduceOp says how the ranks' values are combined. float16 and bfloat16 are accumulated in
// float32 and rounded once.
enum class ReduceOp : unsigned char {
  // For integers, floating point, complex. Gradients flow through these two only.
  Sum,      // integers wrap at the type's range
  Average,  // the sum divided by the number of ranks of the set, those that have joined included;
            // integers are truncated toward zero, and only int64 sums can wrap before
  // For integers, floating point, bool.
  Min,      // a NaN wins; -0 is smaller than +0
  Max,      // a NaN wins
  Product,  // integers wrap; for bool it is And
  // For integers and bool.
  BitAnd,
  BitOr,
  BitXor,
  // For floating point, all-reduce only: adds what is orthogonal, averages what is parallel.
  Adasum,
};

struct AllreduceOptions {
  // The name matches the calls of the ranks. Empty: the calls are matched by their order.
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  // Each rank's tensor is multiplied by `prescale` before the reduction, the result by `postscale`
  // after it; integers are truncated toward zero each time. bool and complex numbers take 1 only.
  TORCH_ARG(double, prescale) = 1.0;
  TORCH_ARG(double, postscale) = 1.0;
  // These say what float32 and float64 tensors travel as, and where; see compression.h. The ranks
  // must agree.
  TORCH_ARG(Compression, compression) = Compression::None;
  TORCH_ARG(CompressionScope, compression_scope) = CompressionScope::BetweenHosts;
  // If the call is not done in this time, the whole group fails with timed_out, which names the
  // tensor: a call cannot be taken back. 0: only the limits of the session hold.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// The fields mean what they mean in AllreduceOptions.
struct ReduceOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  TORCH_ARG(double, prescale) = 1.0;
  TORCH_ARG(double, postscale) = 1.0;
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// The fields mean what they mean in AllreduceOptions; `op` is Sum, Average, Min or Max.
struct ReducescatterOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(ReduceOp, op) = ReduceOp::Average;
  TORCH_ARG(double, prescale) = 1.0;
  TORCH_ARG(double, postscale) = 1.0;
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// Returns the sum, average, … over the ranks, element by element; the same bits on every rank. Any
// shape. A sparse COO tensor goes to sparse_allreduce. Collective.
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

// Returns the sum or average of sparse COO tensors. They have the same sizes and numbers of sparse
// and dense dimensions on all ranks; how many elements each rank gives may differ. It makes two
// all-gathers, then each rank adds up what it got: the result is coalesced, the same on every rank.
// Collective. Autograd does not see it. Throws invalid_argument for other layouts, operations,
// compression, and factors of an integer tensor.
SIRTAKI_API at::Tensor sparse_allreduce(const at::Tensor& tensor,
                                        const AllreduceOptions& options = {},
                                        const Session& session = {});
SIRTAKI_API Handle sparse_allreduce_async(const at::Tensor& tensor,
                                          const AllreduceOptions& options = {},
                                          const Session& session = {});

// Returns allreduce's result on rank `root_rank` alone. The others get their own tensor back: a
// copy of it, or in place the tensor as it was. Collective.
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

// Returns this rank's rows of allreduce's result. Each rank of the set gets an equal number of rows
// along the first dimension, and one row more goes to the first ranks if they do not divide: [d0,
// …] becomes [d0 / n, …]. At least one dimension. Collective.
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

// These forms take a list of tensors, which is one operation; collectives.h says more. The names
// with `grouped_` mean the same.
inline std::vector<at::Tensor> allreduce(at::TensorList tensors,
                                         const AllreduceOptions& options = {},
                                         const Session& session = {}) {
  return grouped_allreduce(tensors.vec(), options, session);
}
inline std::vector<at::Tensor> allreduce_(at::TensorList tensors,
                                          const AllreduceOptions& options = {},
                                          const Session& session = {}) {
  return grouped_allreduce_(tensors.vec(), options, session);
}
inline GroupedHandle allreduce_async(at::TensorList tensors, const AllreduceOptions& options = {},
                                     const Session& session = {}) {
  return grouped_allreduce_async(tensors.vec(), options, session);
}
inline GroupedHandle allreduce_async_(at::TensorList tensors, const AllreduceOptions& options = {},
                                      const Session& session = {}) {
  return grouped_allreduce_async_(tensors.vec(), options, session);
}
inline std::vector<at::Tensor> reduce(at::TensorList tensors, int root_rank,
                                      const ReduceOptions& options = {},
                                      const Session& session = {}) {
  return grouped_reduce(tensors.vec(), root_rank, options, session);
}
inline std::vector<at::Tensor> reduce_(at::TensorList tensors, int root_rank,
                                       const ReduceOptions& options = {},
                                       const Session& session = {}) {
  return grouped_reduce_(tensors.vec(), root_rank, options, session);
}
inline GroupedHandle reduce_async(at::TensorList tensors, int root_rank,
                                  const ReduceOptions& options = {}, const Session& session = {}) {
  return grouped_reduce_async(tensors.vec(), root_rank, options, session);
}
inline GroupedHandle reduce_async_(at::TensorList tensors, int root_rank,
                                   const ReduceOptions& options = {}, const Session& session = {}) {
  return grouped_reduce_async_(tensors.vec(), root_rank, options, session);
}
inline std::vector<at::Tensor> reducescatter(at::TensorList tensors,
                                             const ReducescatterOptions& options = {},
                                             const Session& session = {}) {
  return grouped_reducescatter(tensors.vec(), options, session);
}
inline GroupedHandle reducescatter_async(at::TensorList tensors,
                                         const ReducescatterOptions& options = {},
                                         const Session& session = {}) {
  return grouped_reducescatter_async(tensors.vec(), options, session);
}

}  // namespace sirtaki
