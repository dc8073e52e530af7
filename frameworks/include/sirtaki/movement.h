// These collectives move rows: broadcast, all-gather, gather, scatter, all-to-all. collectives.h
// says what holds for all of them. The options name, process_set and timeout mean what they mean in
// AllreduceOptions.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/handle.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

struct BroadcastOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

using AllgatherOptions = BroadcastOptions;
using GatherOptions = BroadcastOptions;

struct ScatterOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  // The root's splits are the number of rows for each rank of the set, ascending by rank; together
  // all rows of the tensor. Empty: equal numbers, and one row more for the first ranks if the rows
  // do not divide. On other ranks the splits are ignored.
  TORCH_ARG(std::vector<std::int64_t>, splits);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

struct AlltoallOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  // The number of rows for each rank of the set, ascending by rank; together all rows of the
  // tensor. Empty: equal numbers, for which the first dimension must divide by the size of the set.
  TORCH_ARG(std::vector<std::int64_t>, splits);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// Gives every rank the tensor of rank `root_rank`. The others give a tensor of the same type and
// shape. Collective.
SIRTAKI_API at::Tensor broadcast(const at::Tensor& tensor, int root_rank,
                                 const BroadcastOptions& options = {});
SIRTAKI_API at::Tensor broadcast_(const at::Tensor& tensor, int root_rank,
                                  const BroadcastOptions& options = {});
SIRTAKI_API Handle broadcast_async(const at::Tensor& tensor, int root_rank,
                                   const BroadcastOptions& options = {});
SIRTAKI_API Handle broadcast_async_(const at::Tensor& tensor, int root_rank,
                                    const BroadcastOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> broadcast(at::TensorList tensors, int root_rank,
                                              const BroadcastOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> broadcast_(at::TensorList tensors, int root_rank,
                                               const BroadcastOptions& options = {});
SIRTAKI_API GroupedHandle broadcast_async(at::TensorList tensors, int root_rank,
                                          const BroadcastOptions& options = {});
SIRTAKI_API GroupedHandle broadcast_async_(at::TensorList tensors, int root_rank,
                                           const BroadcastOptions& options = {});

// Returns the tensors of all ranks of the set, one after the other along the first dimension, in
// which they may differ. The tensors have at least one dimension. Collective.
SIRTAKI_API at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options = {});
SIRTAKI_API Handle allgather_async(const at::Tensor& tensor, const AllgatherOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> allgather(at::TensorList tensors,
                                              const AllgatherOptions& options = {});
SIRTAKI_API GroupedHandle allgather_async(at::TensorList tensors,
                                          const AllgatherOptions& options = {});

// Returns the same for tensors that agree in the first dimension too, which is checked and saves an
// exchange of sizes: [d0, …] becomes [n d0, …]. Collective.
SIRTAKI_API at::Tensor allgather_into(const at::Tensor& tensor,
                                      const AllgatherOptions& options = {});
SIRTAKI_API Handle allgather_into_async(const at::Tensor& tensor,
                                        const AllgatherOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> allgather_into(at::TensorList tensors,
                                                   const AllgatherOptions& options = {});
SIRTAKI_API GroupedHandle allgather_into_async(at::TensorList tensors,
                                               const AllgatherOptions& options = {});

// Returns what allgather returns, on rank `root_rank` alone; the others get no rows: [0, …].
// Collective.
SIRTAKI_API at::Tensor gather(const at::Tensor& tensor, int root_rank,
                              const GatherOptions& options = {});
SIRTAKI_API Handle gather_async(const at::Tensor& tensor, int root_rank,
                                const GatherOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> gather(at::TensorList tensors, int root_rank,
                                           const GatherOptions& options = {});
SIRTAKI_API GroupedHandle gather_async(at::TensorList tensors, int root_rank,
                                       const GatherOptions& options = {});

// Deals out the rows of rank `root_rank`; see ScatterOptions::splits. The others give any tensor of
// the same type and shape except for the first dimension, such as torch::empty({0, 3}); its values
// are not used. The tensors have at least one dimension. Collective.
SIRTAKI_API at::Tensor scatter(const at::Tensor& tensor, int root_rank,
                               const ScatterOptions& options = {});
SIRTAKI_API Handle scatter_async(const at::Tensor& tensor, int root_rank,
                                 const ScatterOptions& options = {});
SIRTAKI_API std::vector<at::Tensor> scatter(at::TensorList tensors, int root_rank,
                                            const ScatterOptions& options = {});
SIRTAKI_API GroupedHandle scatter_async(at::TensorList tensors, int root_rank,
                                        const ScatterOptions& options = {});

struct AlltoallResult {
  at::Tensor tensor;
  std::vector<std::int64_t> received_splits;  // the number of rows that came from each rank of the
                                              // set
};

// Deals out each rank's rows to all ranks, see AlltoallOptions::splits, and returns the rows for
// this rank, ascending by sender. The tensors have at least one dimension, and may differ in the
// first. For the asynchronous forms received_splits(handle) tells the numbers of rows. Collective.
SIRTAKI_API AlltoallResult alltoall(const at::Tensor& tensor, const AlltoallOptions& options = {});
SIRTAKI_API Handle alltoall_async(const at::Tensor& tensor, const AlltoallOptions& options = {});
SIRTAKI_API std::vector<AlltoallResult> alltoall(at::TensorList tensors,
                                                 const AlltoallOptions& options = {});
SIRTAKI_API GroupedHandle alltoall_async(at::TensorList tensors,
                                         const AlltoallOptions& options = {});

// A list in braces, such as {a, b}, {a} or {}, is a list of tensors.
inline std::vector<at::Tensor> broadcast(std::initializer_list<at::Tensor> tensors, int root_rank,
                                         const BroadcastOptions& options = {}) {
  return broadcast(at::TensorList(tensors), root_rank, options);
}
inline std::vector<at::Tensor> broadcast_(std::initializer_list<at::Tensor> tensors, int root_rank,
                                          const BroadcastOptions& options = {}) {
  return broadcast_(at::TensorList(tensors), root_rank, options);
}
inline GroupedHandle broadcast_async(std::initializer_list<at::Tensor> tensors, int root_rank,
                                     const BroadcastOptions& options = {}) {
  return broadcast_async(at::TensorList(tensors), root_rank, options);
}
inline GroupedHandle broadcast_async_(std::initializer_list<at::Tensor> tensors, int root_rank,
                                      const BroadcastOptions& options = {}) {
  return broadcast_async_(at::TensorList(tensors), root_rank, options);
}
inline std::vector<at::Tensor> allgather(std::initializer_list<at::Tensor> tensors,
                                         const AllgatherOptions& options = {}) {
  return allgather(at::TensorList(tensors), options);
}
inline GroupedHandle allgather_async(std::initializer_list<at::Tensor> tensors,
                                     const AllgatherOptions& options = {}) {
  return allgather_async(at::TensorList(tensors), options);
}
inline std::vector<at::Tensor> allgather_into(std::initializer_list<at::Tensor> tensors,
                                              const AllgatherOptions& options = {}) {
  return allgather_into(at::TensorList(tensors), options);
}
inline GroupedHandle allgather_into_async(std::initializer_list<at::Tensor> tensors,
                                          const AllgatherOptions& options = {}) {
  return allgather_into_async(at::TensorList(tensors), options);
}
inline std::vector<at::Tensor> gather(std::initializer_list<at::Tensor> tensors, int root_rank,
                                      const GatherOptions& options = {}) {
  return gather(at::TensorList(tensors), root_rank, options);
}
inline GroupedHandle gather_async(std::initializer_list<at::Tensor> tensors, int root_rank,
                                  const GatherOptions& options = {}) {
  return gather_async(at::TensorList(tensors), root_rank, options);
}
inline std::vector<at::Tensor> scatter(std::initializer_list<at::Tensor> tensors, int root_rank,
                                       const ScatterOptions& options = {}) {
  return scatter(at::TensorList(tensors), root_rank, options);
}
inline GroupedHandle scatter_async(std::initializer_list<at::Tensor> tensors, int root_rank,
                                   const ScatterOptions& options = {}) {
  return scatter_async(at::TensorList(tensors), root_rank, options);
}
inline std::vector<AlltoallResult> alltoall(std::initializer_list<at::Tensor> tensors,
                                            const AlltoallOptions& options = {}) {
  return alltoall(at::TensorList(tensors), options);
}
inline GroupedHandle alltoall_async(std::initializer_list<at::Tensor> tensors,
                                    const AlltoallOptions& options = {}) {
  return alltoall_async(at::TensorList(tensors), options);
}

// These names of the forms for lists are older.
inline std::vector<at::Tensor> grouped_broadcast(const std::vector<at::Tensor>& tensors,
                                                 int root_rank,
                                                 const BroadcastOptions& options = {}) {
  return broadcast(tensors, root_rank, options);
}
inline std::vector<at::Tensor> grouped_broadcast_(const std::vector<at::Tensor>& tensors,
                                                  int root_rank,
                                                  const BroadcastOptions& options = {}) {
  return broadcast_(tensors, root_rank, options);
}
inline GroupedHandle grouped_broadcast_async(const std::vector<at::Tensor>& tensors, int root_rank,
                                             const BroadcastOptions& options = {}) {
  return broadcast_async(tensors, root_rank, options);
}
inline GroupedHandle grouped_broadcast_async_(const std::vector<at::Tensor>& tensors, int root_rank,
                                              const BroadcastOptions& options = {}) {
  return broadcast_async_(tensors, root_rank, options);
}
inline std::vector<at::Tensor> grouped_allgather(const std::vector<at::Tensor>& tensors,
                                                 const AllgatherOptions& options = {}) {
  return allgather(tensors, options);
}
inline GroupedHandle grouped_allgather_async(const std::vector<at::Tensor>& tensors,
                                             const AllgatherOptions& options = {}) {
  return allgather_async(tensors, options);
}
inline std::vector<at::Tensor> grouped_allgather_into(const std::vector<at::Tensor>& tensors,
                                                      const AllgatherOptions& options = {}) {
  return allgather_into(tensors, options);
}
inline GroupedHandle grouped_allgather_into_async(const std::vector<at::Tensor>& tensors,
                                                  const AllgatherOptions& options = {}) {
  return allgather_into_async(tensors, options);
}
inline std::vector<at::Tensor> grouped_gather(const std::vector<at::Tensor>& tensors, int root_rank,
                                              const GatherOptions& options = {}) {
  return gather(tensors, root_rank, options);
}
inline GroupedHandle grouped_gather_async(const std::vector<at::Tensor>& tensors, int root_rank,
                                          const GatherOptions& options = {}) {
  return gather_async(tensors, root_rank, options);
}
inline std::vector<at::Tensor> grouped_scatter(const std::vector<at::Tensor>& tensors,
                                               int root_rank, const ScatterOptions& options = {}) {
  return scatter(tensors, root_rank, options);
}
inline GroupedHandle grouped_scatter_async(const std::vector<at::Tensor>& tensors, int root_rank,
                                           const ScatterOptions& options = {}) {
  return scatter_async(tensors, root_rank, options);
}
inline std::vector<AlltoallResult> grouped_alltoall(const std::vector<at::Tensor>& tensors,
                                                    const AlltoallOptions& options = {}) {
  return alltoall(tensors, options);
}
inline GroupedHandle grouped_alltoall_async(const std::vector<at::Tensor>& tensors,
                                            const AlltoallOptions& options = {}) {
  return alltoall_async(tensors, options);
}

}  // namespace sirtaki
