// The functions of NCCL that we call, as a table that a test replaces. Declared here as of NCCL
// 2.28.9, for the library is opened at run time and its header may not be there when we are built.
// Names and meanings are NCCL's, without its prefix.
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <string>

#include "core/base/status.h"
#include "ops/cuda/cuda_api.h"

struct ncclComm;

namespace sirtaki::ops::nccl {

using CommHandle = ncclComm*;

// The declarations are those of this version; the first that we work with is that of LibTorch 2.1.
inline constexpr int kDeclaredVersion = 22809;
inline constexpr int kOldestVersion = 21800;

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum class RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

// Travels from one rank to the others.
struct UniqueId {
  std::array<char, 128> bytes{};
};

// Leaves a choice of Config to the library.
inline constexpr int kUndefined = std::numeric_limits<int>::min();

// The struct grows at its end with NCCL's versions. A library reads as much of it as it knows, but
// refuses values that it does not know.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kDeclaredVersion;
  int blocking = 0;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;  // 2.27; NCCL keeps the pointer
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int channels_per_net_peer = kUndefined;  // 2.28
  int nvlink_centric_scheduling = kUndefined;
};

// The values of cta_policy.
inline constexpr int kCtaPolicyEfficiency = 1;
inline constexpr int kCtaPolicyZero = 2;
// The first version that takes this value.
inline int FirstWithCtaPolicy(int policy) {
  if (policy == kUndefined) return kOldestVersion;
  return policy == kCtaPolicyZero ? 22800 : 22700;
}

struct Api {
  Result (*GetVersion)(int* version);
  Result (*GetUniqueId)(UniqueId* id);
  Result (*CommInitRankConfig)(CommHandle* comm, int ranks, UniqueId id, int rank, Config* config);
  // Makes one of those ranks that have said the same color, in the order of their keys. `made` is set
  // when it is over.
  Result (*CommSplit)(CommHandle comm, int color, int key, CommHandle* made, Config* config);
  Result (*CommGetAsyncError)(CommHandle comm, Result* error);
  Result (*CommFinalize)(CommHandle comm);
  Result (*CommDestroy)(CommHandle comm);
  Result (*CommAbort)(CommHandle comm);
  const char* (*GetErrorString)(Result result);
  const char* (*GetLastError)(CommHandle comm);  // null: of the process
  Result (*GroupStart)();
  Result (*GroupEnd)();
  Result (*AllReduce)(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                      CommHandle comm, cuda::StreamHandle stream);
  Result (*Reduce)(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                   int root, CommHandle comm, cuda::StreamHandle stream);
  Result (*Broadcast)(const void* input, void* output, std::size_t count, DataType type, int root,
                      CommHandle comm, cuda::StreamHandle stream);
  Result (*AllGather)(const void* input, void* output, std::size_t count, DataType type,
                      CommHandle comm, cuda::StreamHandle stream);
  Result (*ReduceScatter)(const void* input, void* output, std::size_t count, DataType type,
                          RedOp op, CommHandle comm, cuda::StreamHandle stream);
  Result (*Send)(const void* input, std::size_t count, DataType type, int peer, CommHandle comm,
                 cuda::StreamHandle stream);
  Result (*Recv)(void* output, std::size_t count, DataType type, int peer, CommHandle comm,
                 cuda::StreamHandle stream);

  // ---- null in older versions ----
  Result (*MemAlloc)(void** memory, std::size_t bytes);  // 2.19
  Result (*MemFree)(void* memory);
  Result (*CommRegister)(CommHandle comm, void* memory, std::size_t bytes, void** handle);  // 2.19
  Result (*CommDeregister)(CommHandle comm, void* handle);
  // All ranks call it with equal sizes: whole pages of 4096 bytes. Null: the registration of memory is
  // switched off, or since 2.29 the machines cannot have windows. 2.27 and 2.28 then register the
  // memory for this rank alone, and give a handle that looks like a window.
  Result (*CommWindowRegister)(CommHandle comm, void* memory, std::size_t bytes, void** window,
                               int flags);  // 2.27
  Result (*CommWindowDeregister)(CommHandle comm, void* window);
  // It is not called: where it is there, what CommWindowRegister gives is a window.
  Result (*WinGetUserPtr)(CommHandle comm, void* window, void** memory);  // 2.29
};

// A window's memory is read and written by the other ranks where it is.
inline constexpr int kWindowCollSymmetric = 1;  // all ranks call with the same place in it

struct Library {
  Api api{};
  int version = 0;
  std::string path;
};

// Opens it: the copy that is in the process, that beside LibTorch, the one that the linker finds.
// Errors: kUnsupported if there is none, or its version does not do. Thread-safe.
core::Status Load(Library* library);

// "2.28.9"
std::string VersionText(int version);

// Ok if we can work with a library of this version; else kUnsupported with what is loaded from
// where, and what would do.
core::Status CheckVersion(int loaded, const std::string& path);

// Ok, or kBackend with the function's name, NCCL's word for the result and the last error that it
// noted. kInProgress is no error.
core::Status Check(const Api& api, Result result, const char* function, CommHandle comm);

}  // namespace sirtaki::ops::nccl
