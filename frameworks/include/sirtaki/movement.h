// Collectives that move rows: broadcast, all-gather, gather, scatter, all-to-all. See collectives.h
// for what holds for all of them. Of a name, a process set and a timeout in options the meaning is
// that of AllreduceOptions.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/handle.h"
#include "sirtaki/process_set.h"
#include "sirtaki/session.h"

namespace sirtaki {

struct BroadcastOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

struct AllgatherOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

struct GatherOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

struct ScatterOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  // At the root: the rows for each rank of the set, ascending by rank; together the tensor's.
  // Empty: as many for each, one more for the first ones where they do not divide. Elsewhere
  // ignored.
  TORCH_ARG(std::vector<std::int64_t>, splits);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

struct AlltoallOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  // The rows for each rank of the set, ascending by rank; together the tensor's. Empty: as many for
  // each, into which the first dimension must divide.
  TORCH_ARG(std::vector<std::int64_t>, splits);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

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
SIRTAKI_API std::vector<at::Tensor> grouped_broadcast(const std::vector<at::Tensor>& tensors,
                                                      int root_rank,
                                                      const BroadcastOptions& options = {},
                                                      const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_broadcast_(const std::vector<at::Tensor>& tensors,
                                                       int root_rank,
                                                       const BroadcastOptions& options = {},
                                                       const Session& session = {});
SIRTAKI_API GroupedHandle grouped_broadcast_async(const std::vector<at::Tensor>& tensors,
                                                  int root_rank,
                                                  const BroadcastOptions& options = {},
                                                  const Session& session = {});
SIRTAKI_API GroupedHandle grouped_broadcast_async_(const std::vector<at::Tensor>& tensors,
                                                   int root_rank,
                                                   const BroadcastOptions& options = {},
                                                   const Session& session = {});

// The tensors of all ranks of the set, one after the other along the first dimension, in which they
// may differ. At least one dimension.
SIRTAKI_API at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options = {},
                                 const Session& session = {});
SIRTAKI_API Handle allgather_async(const at::Tensor& tensor, const AllgatherOptions& options = {},
                                   const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_allgather(const std::vector<at::Tensor>& tensors,
                                                      const AllgatherOptions& options = {},
                                                      const Session& session = {});
SIRTAKI_API GroupedHandle grouped_allgather_async(const std::vector<at::Tensor>& tensors,
                                                  const AllgatherOptions& options = {},
                                                  const Session& session = {});

// The same of tensors that agree in the first dimension too, which is checked and saves an exchange
// of sizes: [d0, …] becomes [n d0, …].
SIRTAKI_API at::Tensor allgather_into(const at::Tensor& tensor,
                                      const AllgatherOptions& options = {},
                                      const Session& session = {});
SIRTAKI_API Handle allgather_into_async(const at::Tensor& tensor,
                                        const AllgatherOptions& options = {},
                                        const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_allgather_into(const std::vector<at::Tensor>& tensors,
                                                           const AllgatherOptions& options = {},
                                                           const Session& session = {});
SIRTAKI_API GroupedHandle grouped_allgather_into_async(const std::vector<at::Tensor>& tensors,
                                                       const AllgatherOptions& options = {},
                                                       const Session& session = {});

// As allgather, on rank `root_rank` alone; the others get no rows: [0, …].
SIRTAKI_API at::Tensor gather(const at::Tensor& tensor, int root_rank,
                              const GatherOptions& options = {}, const Session& session = {});
SIRTAKI_API Handle gather_async(const at::Tensor& tensor, int root_rank,
                                const GatherOptions& options = {}, const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_gather(const std::vector<at::Tensor>& tensors,
                                                   int root_rank, const GatherOptions& options = {},
                                                   const Session& session = {});
SIRTAKI_API GroupedHandle grouped_gather_async(const std::vector<at::Tensor>& tensors,
                                               int root_rank, const GatherOptions& options = {},
                                               const Session& session = {});

// Deals out the rows of rank `root_rank`; see ScatterOptions::splits. The others give any tensor of
// the same type and shape but for the first dimension, such as torch::empty({0, 3}); its values
// are not looked at. At least one dimension.
SIRTAKI_API at::Tensor scatter(const at::Tensor& tensor, int root_rank,
                               const ScatterOptions& options = {}, const Session& session = {});
SIRTAKI_API Handle scatter_async(const at::Tensor& tensor, int root_rank,
                                 const ScatterOptions& options = {}, const Session& session = {});
SIRTAKI_API std::vector<at::Tensor> grouped_scatter(const std::vector<at::Tensor>& tensors,
                                                    int root_rank,
                                                    const ScatterOptions& options = {},
                                                    const Session& session = {});
SIRTAKI_API GroupedHandle grouped_scatter_async(const std::vector<at::Tensor>& tensors,
                                                int root_rank, const ScatterOptions& options = {},
                                                const Session& session = {});

struct AlltoallResult {
  at::Tensor tensor;
  std::vector<std::int64_t> received_splits;  // the rows that came from each rank of the set
};

// Each rank deals out its rows to all, see AlltoallOptions::splits, and gets those for it,
// ascending by rank. The tensors may differ in the first dimension; at least that one. Of the
// asynchronous forms received_splits(handle) tells the rows.
SIRTAKI_API AlltoallResult alltoall(const at::Tensor& tensor, const AlltoallOptions& options = {},
                                    const Session& session = {});
SIRTAKI_API Handle alltoall_async(const at::Tensor& tensor, const AlltoallOptions& options = {},
                                  const Session& session = {});
SIRTAKI_API std::vector<AlltoallResult> grouped_alltoall(const std::vector<at::Tensor>& tensors,
                                                         const AlltoallOptions& options = {},
                                                         const Session& session = {});
SIRTAKI_API GroupedHandle grouped_alltoall_async(const std::vector<at::Tensor>& tensors,
                                                 const AlltoallOptions& options = {},
                                                 const Session& session = {});

}  // namespace sirtaki
