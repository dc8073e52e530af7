// These collectives compute: all-reduce, reduce, reduce-scatter. collectives.h says what holds for
// all of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <chrono>
#include <initializer_list>
#include <string>
#include <vector>

#include "sirtaki/compression.h"
#include "sirtaki/export.h"
#include "sirtaki/handle.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

// A ReduceOp says how the ranks' values are combined. float16 and bfloat16 are accumulated in
// float32 and rounded once.
enum class ReduceOp : unsigned char {
  // These take integers, floating point, complex. Gradients flow through these two only.
  Sum,      // integers wrap at the type's range
  Average,  // the sum divided by the number of ranks of the set, those that have joined included;
            // integers are truncated toward zero, and only int64 sums can wrap before
  // These take integers, floating point, bool.
  Min,      // a NaN wins; -0 is smaller than +0
  Max,      // a NaN wins
  Product,  // integers wrap; for bool it is And
  // These take integers and bool.
  BitAnd,
  BitOr,
  BitXor,
  // This takes floating point, in all-reduce only: it adds what is orthogonal, averages what is
  // parallel.
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
  // If the call is not done in this time, the whole group fails with TimedOut, which names the
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

// The `op` of a reduce-scatter is Sum, Average, Min or Max.
using ReducescatterOptions = ReduceOptions;

// Returns the sum, average, … over the ranks, element by element; the same bits on every rank. Any
// shape. A sparse COO tensor goes to sparse_allreduce. Collective.
SIRTAKI_API at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options = {});
SIRTAKI_API at::Tensor allreduce_(const at::Tensor& tensor, const AllreduceOptions& options = {});
SIRTAKI_API Handle allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options = {});
SIRTAKI_API Handle allreduce_async_(const at::Tensor& tensor, const AllreduceOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> allreduce(at::TensorList tensors,
                                              const AllreduceOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> allreduce_(at::TensorList tensors,
                                               const AllreduceOptions& options = {});
SIRTAKI_API GroupedHandle allreduce_async(at::TensorList tensors,
                                          const AllreduceOptions& options = {});
SIRTAKI_API GroupedHandle allreduce_async_(at::TensorList tensors,
                                           const AllreduceOptions& options = {});

// Returns the sum or average of sparse COO tensors. They have the same sizes and numbers of sparse
// and dense dimensions on all ranks; how many elements each rank gives may differ. It makes two
// all-gathers, then each rank adds up what it got: the result is coalesced, the same on every rank.
// Collective. Autograd does not see it. Throws InvalidArgument for other layouts, operations,
// compression, and factors of an integer tensor.
SIRTAKI_API at::Tensor sparse_allreduce(const at::Tensor& tensor,
                                        const AllreduceOptions& options = {});
SIRTAKI_API Handle sparse_allreduce_async(const at::Tensor& tensor,
                                          const AllreduceOptions& options = {});

// Returns allreduce's result on rank `root_rank` alone. The others get their own tensor back: a
// copy of it, or in place the tensor as it was. Collective.
SIRTAKI_API at::Tensor reduce(const at::Tensor& tensor, int root_rank,
                              const ReduceOptions& options = {});
SIRTAKI_API at::Tensor reduce_(const at::Tensor& tensor, int root_rank,
                               const ReduceOptions& options = {});
SIRTAKI_API Handle reduce_async(const at::Tensor& tensor, int root_rank,
                                const ReduceOptions& options = {});
SIRTAKI_API Handle reduce_async_(const at::Tensor& tensor, int root_rank,
                                 const ReduceOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> reduce(at::TensorList tensors, int root_rank,
                                           const ReduceOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> reduce_(at::TensorList tensors, int root_rank,
                                            const ReduceOptions& options = {});
SIRTAKI_API GroupedHandle reduce_async(at::TensorList tensors, int root_rank,
                                       const ReduceOptions& options = {});
SIRTAKI_API GroupedHandle reduce_async_(at::TensorList tensors, int root_rank,
                                        const ReduceOptions& options = {});

// Returns this rank's rows of allreduce's result. Each rank of the set gets an equal number of rows
// along the first dimension, and one row more goes to the first ranks if they do not divide: [d0,
// …] becomes [d0 / n, …]. At least one dimension. Collective.
SIRTAKI_API at::Tensor reducescatter(const at::Tensor& tensor,
                                     const ReducescatterOptions& options = {});
SIRTAKI_API Handle reducescatter_async(const at::Tensor& tensor,
                                       const ReducescatterOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> reducescatter(at::TensorList tensors,
                                                  const ReducescatterOptions& options = {});
SIRTAKI_API GroupedHandle reducescatter_async(at::TensorList tensors,
                                              const ReducescatterOptions& options = {});

// A list in braces, such as {a, b}, {a} or {}, is a list of tensors.
inline std::vector<at::Tensor> allreduce(std::initializer_list<at::Tensor> tensors,
                                         const AllreduceOptions& options = {}) {
  return allreduce(at::TensorList(tensors), options);
}
inline std::vector<at::Tensor> allreduce_(std::initializer_list<at::Tensor> tensors,
                                          const AllreduceOptions& options = {}) {
  return allreduce_(at::TensorList(tensors), options);
}
inline GroupedHandle allreduce_async(std::initializer_list<at::Tensor> tensors,
                                     const AllreduceOptions& options = {}) {
  return allreduce_async(at::TensorList(tensors), options);
}
inline GroupedHandle allreduce_async_(std::initializer_list<at::Tensor> tensors,
                                      const AllreduceOptions& options = {}) {
  return allreduce_async_(at::TensorList(tensors), options);
}
inline std::vector<at::Tensor> reduce(std::initializer_list<at::Tensor> tensors, int root_rank,
                                      const ReduceOptions& options = {}) {
  return reduce(at::TensorList(tensors), root_rank, options);
}
inline std::vector<at::Tensor> reduce_(std::initializer_list<at::Tensor> tensors, int root_rank,
                                       const ReduceOptions& options = {}) {
  return reduce_(at::TensorList(tensors), root_rank, options);
}
inline GroupedHandle reduce_async(std::initializer_list<at::Tensor> tensors, int root_rank,
                                  const ReduceOptions& options = {}) {
  return reduce_async(at::TensorList(tensors), root_rank, options);
}
inline GroupedHandle reduce_async_(std::initializer_list<at::Tensor> tensors, int root_rank,
                                   const ReduceOptions& options = {}) {
  return reduce_async_(at::TensorList(tensors), root_rank, options);
}
inline std::vector<at::Tensor> reducescatter(std::initializer_list<at::Tensor> tensors,
                                             const ReducescatterOptions& options = {}) {
  return reducescatter(at::TensorList(tensors), options);
}
inline GroupedHandle reducescatter_async(std::initializer_list<at::Tensor> tensors,
                                         const ReducescatterOptions& options = {}) {
  return reducescatter_async(at::TensorList(tensors), options);
}

// These names of the forms for lists are older.
inline std::vector<at::Tensor> grouped_allreduce(const std::vector<at::Tensor>& tensors,
                                                 const AllreduceOptions& options = {}) {
  return allreduce(tensors, options);
}
inline std::vector<at::Tensor> grouped_allreduce_(const std::vector<at::Tensor>& tensors,
                                                  const AllreduceOptions& options = {}) {
  return allreduce_(tensors, options);
}
inline GroupedHandle grouped_allreduce_async(const std::vector<at::Tensor>& tensors,
                                             const AllreduceOptions& options = {}) {
  return allreduce_async(tensors, options);
}
inline GroupedHandle grouped_allreduce_async_(const std::vector<at::Tensor>& tensors,
                                              const AllreduceOptions& options = {}) {
  return allreduce_async_(tensors, options);
}
inline std::vector<at::Tensor> grouped_reduce(const std::vector<at::Tensor>& tensors, int root_rank,
                                              const ReduceOptions& options = {}) {
  return reduce(tensors, root_rank, options);
}
inline std::vector<at::Tensor> grouped_reduce_(const std::vector<at::Tensor>& tensors,
                                               int root_rank, const ReduceOptions& options = {}) {
  return reduce_(tensors, root_rank, options);
}
inline GroupedHandle grouped_reduce_async(const std::vector<at::Tensor>& tensors, int root_rank,
                                          const ReduceOptions& options = {}) {
  return reduce_async(tensors, root_rank, options);
}
inline GroupedHandle grouped_reduce_async_(const std::vector<at::Tensor>& tensors, int root_rank,
                                           const ReduceOptions& options = {}) {
  return reduce_async_(tensors, root_rank, options);
}
inline std::vector<at::Tensor> grouped_reducescatter(const std::vector<at::Tensor>& tensors,
                                                     const ReducescatterOptions& options = {}) {
  return reducescatter(tensors, options);
}
inline GroupedHandle grouped_reducescatter_async(const std::vector<at::Tensor>& tensors,
                                                 const ReducescatterOptions& options = {}) {
  return reducescatter_async(tensors, options);
}

}  // namespace sirtaki
