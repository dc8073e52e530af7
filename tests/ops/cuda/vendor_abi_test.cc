// Our tables of CUDA's and NCCL's functions agree with the vendor's headers and libraries, where
// these are at hand: the toolkit's or those of `bootstrap.sh`. No GPU and no driver is needed, and
// no function of the driver's stub is called.
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <type_traits>

#include "ops/base/dynamic_library.h"
#include "ops/cuda/cuda_api.h"
#include "ops/nccl/nccl_api.h"

// The build says where they are. The headers that come with LibTorch alone lack those of the compiler,
// which they include.
#if __has_include(<cuda.h>) && __has_include(<cuda_runtime_api.h>) && \
    __has_include(<crt/host_defines.h>)
#include <cuda.h>
#include <cuda_runtime_api.h>
#define SIRTAKI_CUDA_HEADERS 1
#if __has_include(<nccl.h>)
#include <nccl.h>
#define SIRTAKI_NCCL_HEADER 1
#endif
#endif

namespace sirtaki::ops {
namespace {

// Two types are passed alike: both are pointers, or neither is and the sizes are equal. Enumerators
// and handles have types of our own.
template <typename Ours, typename Theirs>
constexpr bool PassedAlike() {
  if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>) {
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  } else {
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
  }
}

template <typename Ours, typename Theirs>
struct Called;
template <typename Ours, typename Theirs, typename... OurParameters, typename... TheirParameters>
struct Called<Ours (*)(OurParameters...), Theirs (*)(TheirParameters...)> {
  static constexpr bool Alike() {
    if constexpr (sizeof...(OurParameters) != sizeof...(TheirParameters)) {
      return false;
    } else {
      return PassedAlike<Ours, Theirs>() && (PassedAlike<OurParameters, TheirParameters>() && ...);
    }
  }
};

static_assert(Called<int (*)(void*, unsigned), int (*)(char**, int)>::Alike());
static_assert(!Called<int (*)(void*, unsigned), int (*)(char**)>::Alike());
static_assert(!Called<int (*)(void*, unsigned), int (*)(char**, std::size_t)>::Alike());
static_assert(!Called<int (*)(void*), int (*)(std::size_t)>::Alike());

// Every function of the two tables.
// clang-format off
#define SIRTAKI_EACH_RUNTIME_FUNCTION(X)                                                          \
  X(RuntimeGetVersion) X(GetDeviceCount) X(SetDevice) X(GetErrorName)                             \
  X(GetErrorString) X(GetLastError) X(DeviceGetStreamPriorityRange) X(StreamCreateWithPriority)   \
  X(StreamDestroy) X(StreamWaitEvent) X(StreamIsCapturing) X(ThreadExchangeStreamCaptureMode)     \
  X(EventCreateWithFlags) X(EventRecord) X(EventQuery) X(EventDestroy) X(MemcpyAsync)             \
  X(MemsetAsync) X(Free) X(FreeHost)
// CUDA's headers have C++ templates of these names, too.
#define SIRTAKI_EACH_OVERLOADED_FUNCTION(X)                                                       \
  X(Malloc, (void**, std::size_t)) X(HostAlloc, (void**, std::size_t, unsigned))
#define SIRTAKI_EACH_DRIVER_FUNCTION(X)                                                           \
  X(DriverGetVersion) X(DeviceGet) X(DevicePrimaryCtxRetain) X(DevicePrimaryCtxRelease) X(CtxPushCurrent)             \
  X(CtxPopCurrent) X(ModuleLoadData) X(ModuleUnload) X(ModuleGetFunction) X(LaunchKernel)
#define SIRTAKI_EACH_NCCL_FUNCTION(X)                                                             \
  X(GetVersion) X(GetUniqueId) X(CommInitRankConfig) X(CommSplit) X(CommGetAsyncError)            \
  X(CommFinalize) X(CommDestroy) X(CommAbort) X(GetErrorString) X(GetLastError) X(GroupStart) X(GroupEnd)         \
  X(AllReduce) X(Reduce) X(Broadcast) X(AllGather) X(ReduceScatter) X(Send) X(Recv) X(MemAlloc)   \
  X(MemFree) X(CommRegister) X(CommDeregister) X(CommWindowRegister) X(CommWindowDeregister)
// Later than the version that the table declares.
#define SIRTAKI_EACH_LATER_NCCL_FUNCTION(X) X(WinGetUserPtr)
// clang-format on

#define SIRTAKI_ONE(...) +1
static_assert(sizeof(cuda::Api) ==
                  sizeof(void*) * (0 SIRTAKI_EACH_RUNTIME_FUNCTION(SIRTAKI_ONE)
                                       SIRTAKI_EACH_OVERLOADED_FUNCTION(SIRTAKI_ONE)
                                           SIRTAKI_EACH_DRIVER_FUNCTION(SIRTAKI_ONE)),
              "a function of cuda::Api is not in the lists above");
static_assert(sizeof(nccl::Api) ==
                  sizeof(void*) * (0 SIRTAKI_EACH_NCCL_FUNCTION(SIRTAKI_ONE)
                                       SIRTAKI_EACH_LATER_NCCL_FUNCTION(SIRTAKI_ONE)),
              "a function of nccl::Api is not in the lists above");
#undef SIRTAKI_ONE

// The name that a header declares may be a macro for the version of the function that the table
// takes.
#define SIRTAKI_ALIKE(table, vendors) \
  static_assert(Called<decltype(table), decltype(&vendors)>::Alike(), #vendors)

#ifdef SIRTAKI_CUDA_HEADERS
#define SIRTAKI_RUNTIME(name) SIRTAKI_ALIKE(cuda::Api::name, cuda##name);
#define SIRTAKI_OVERLOADED(name, parameters)                                                   \
  static_assert(Called<decltype(cuda::Api::name), cudaError_t(*) parameters>::Alike(), #name); \
  static_assert(static_cast<cudaError_t(*) parameters>(&cuda##name) != nullptr);
#define SIRTAKI_DRIVER(name) SIRTAKI_ALIKE(cuda::Api::name, cu##name);
SIRTAKI_EACH_RUNTIME_FUNCTION(SIRTAKI_RUNTIME)
SIRTAKI_EACH_OVERLOADED_FUNCTION(SIRTAKI_OVERLOADED)
SIRTAKI_EACH_DRIVER_FUNCTION(SIRTAKI_DRIVER)

static_assert(cudaSuccess == static_cast<int>(cuda::Error::kSuccess));
static_assert(cudaErrorMemoryAllocation == static_cast<int>(cuda::Error::kMemoryAllocation));
static_assert(cudaErrorCudartUnloading == static_cast<int>(cuda::Error::kDeinitialized));
static_assert(cudaErrorNotReady == static_cast<int>(cuda::Error::kNotReady));
// The driver's errors that have a name of ours are the runtime's.
static_assert(CUDA_SUCCESS == static_cast<int>(cuda::Error::kSuccess));
static_assert(CUDA_ERROR_OUT_OF_MEMORY == static_cast<int>(cuda::Error::kMemoryAllocation));
static_assert(CUDA_ERROR_DEINITIALIZED == static_cast<int>(cuda::Error::kDeinitialized));
static_assert(CUDA_ERROR_NOT_READY == static_cast<int>(cuda::Error::kNotReady));
static_assert(cudaMemcpyHostToDevice == static_cast<int>(cuda::CopyKind::kHostToDevice));
static_assert(cudaMemcpyDeviceToHost == static_cast<int>(cuda::CopyKind::kDeviceToHost));
static_assert(cudaMemcpyDeviceToDevice == static_cast<int>(cuda::CopyKind::kDeviceToDevice));
static_assert(cudaStreamNonBlocking == cuda::kStreamNonBlocking);
static_assert(cudaEventDisableTiming == cuda::kEventDisableTiming);
static_assert(cudaStreamCaptureStatusNone == cuda::kCaptureNone);
static_assert(cudaStreamCaptureModeThreadLocal == cuda::kCaptureModeThreadLocal);
static_assert(std::is_same_v<cudaStream_t, cuda::StreamHandle>);
static_assert(std::is_same_v<cudaEvent_t, cuda::EventHandle>);
static_assert(std::is_same_v<CUcontext, cuda::ContextHandle>);
static_assert(std::is_same_v<CUmodule, cuda::ModuleHandle>);
static_assert(std::is_same_v<CUfunction, cuda::FunctionHandle>);
#endif

#ifdef SIRTAKI_NCCL_HEADER
#define SIRTAKI_NCCL(name) SIRTAKI_ALIKE(nccl::Api::name, nccl##name);
SIRTAKI_EACH_NCCL_FUNCTION(SIRTAKI_NCCL)
#if NCCL_VERSION_CODE >= 22902
SIRTAKI_EACH_LATER_NCCL_FUNCTION(SIRTAKI_NCCL)
#endif

static_assert(NCCL_VERSION_CODE >= nccl::kOldestVersion);
static_assert(sizeof(ncclUniqueId) == sizeof(nccl::UniqueId));
static_assert(alignof(ncclUniqueId) == alignof(nccl::UniqueId));
static_assert(std::is_trivially_copyable_v<nccl::UniqueId>);  // passed by value
static_assert(std::is_same_v<ncclComm_t, nccl::CommHandle>);
static_assert(offsetof(ncclConfig_t, size) == offsetof(nccl::Config, size));
static_assert(offsetof(ncclConfig_t, magic) == offsetof(nccl::Config, magic));
static_assert(offsetof(ncclConfig_t, version) == offsetof(nccl::Config, version));
#define SIRTAKI_CONFIG(theirs, ours) \
  static_assert(offsetof(ncclConfig_t, theirs) == offsetof(nccl::Config, ours), #theirs)
SIRTAKI_CONFIG(blocking, blocking);
SIRTAKI_CONFIG(cgaClusterSize, cga_cluster_size);
SIRTAKI_CONFIG(minCTAs, min_ctas);
SIRTAKI_CONFIG(maxCTAs, max_ctas);
SIRTAKI_CONFIG(netName, net_name);
SIRTAKI_CONFIG(splitShare, split_share);
#if NCCL_VERSION_CODE >= 22602
SIRTAKI_CONFIG(trafficClass, traffic_class);
#endif
#if NCCL_VERSION_CODE >= 22703
SIRTAKI_CONFIG(commName, comm_name);
SIRTAKI_CONFIG(collnetEnable, collnet_enable);
SIRTAKI_CONFIG(CTAPolicy, cta_policy);
SIRTAKI_CONFIG(shrinkShare, shrink_share);
SIRTAKI_CONFIG(nvlsCTAs, nvls_ctas);
static_assert(NCCL_CTA_POLICY_EFFICIENCY == nccl::kCtaPolicyEfficiency);
#endif
#if NCCL_VERSION_CODE >= 22807
SIRTAKI_CONFIG(nChannelsPerNetPeer, channels_per_net_peer);
SIRTAKI_CONFIG(nvlinkCentricSched, nvlink_centric_scheduling);
static_assert(NCCL_CTA_POLICY_ZERO == nccl::kCtaPolicyZero);
static_assert(sizeof(ncclConfig_t) >= sizeof(nccl::Config));
#endif
#if NCCL_VERSION_CODE == 22809
static_assert(sizeof(ncclConfig_t) == sizeof(nccl::Config));
#endif
static_assert(NCCL_CONFIG_UNDEF_INT == nccl::kUndefined);
static_assert(ncclSuccess == static_cast<int>(nccl::Result::kSuccess));
static_assert(ncclUnhandledCudaError == static_cast<int>(nccl::Result::kUnhandledCudaError));
static_assert(ncclSystemError == static_cast<int>(nccl::Result::kSystemError));
static_assert(ncclInternalError == static_cast<int>(nccl::Result::kInternalError));
static_assert(ncclInvalidArgument == static_cast<int>(nccl::Result::kInvalidArgument));
static_assert(ncclInvalidUsage == static_cast<int>(nccl::Result::kInvalidUsage));
static_assert(ncclRemoteError == static_cast<int>(nccl::Result::kRemoteError));
static_assert(ncclInProgress == static_cast<int>(nccl::Result::kInProgress));
static_assert(ncclInt8 == static_cast<int>(nccl::DataType::kInt8));
static_assert(ncclUint8 == static_cast<int>(nccl::DataType::kUint8));
static_assert(ncclInt32 == static_cast<int>(nccl::DataType::kInt32));
static_assert(ncclInt64 == static_cast<int>(nccl::DataType::kInt64));
static_assert(ncclFloat16 == static_cast<int>(nccl::DataType::kFloat16));
static_assert(ncclFloat32 == static_cast<int>(nccl::DataType::kFloat32));
static_assert(ncclFloat64 == static_cast<int>(nccl::DataType::kFloat64));
static_assert(ncclBfloat16 == static_cast<int>(nccl::DataType::kBfloat16));
static_assert(ncclSum == static_cast<int>(nccl::RedOp::kSum));
static_assert(ncclProd == static_cast<int>(nccl::RedOp::kProd));
static_assert(ncclMax == static_cast<int>(nccl::RedOp::kMax));
static_assert(ncclMin == static_cast<int>(nccl::RedOp::kMin));
static_assert(ncclAvg == static_cast<int>(nccl::RedOp::kAvg));
static_assert(NCCL_WIN_COLL_SYMMETRIC == nccl::kWindowCollSymmetric);
#endif

// The compiler has done the work; these say whether it had something to compare with.
TEST(VendorAbiTest, TheTableOfCudaAgreesWithItsHeaders) {
#ifndef SIRTAKI_CUDA_HEADERS
  GTEST_SKIP()
      << "CUDA's headers were not whole when this was built: bootstrap.sh --cuda installs them";
#endif
}

TEST(VendorAbiTest, TheTableOfNcclAgreesWithItsHeader) {
#ifndef SIRTAKI_NCCL_HEADER
  GTEST_SKIP() << "there was no nccl.h when this was built: bootstrap.sh --cuda installs one";
#endif
}

// The library in a file that the build found; the test is skipped without.
void TakesEveryFunction(const char* file, const char* (*take)(const DynamicLibrary&, cuda::Api*)) {
  if (*file == '\0') GTEST_SKIP() << "there was no such library when this was built";
  DynamicLibrary library;
  const core::Status opened =
      DynamicLibrary::Open({std::filesystem::path(file).filename().string(), {}, {file}}, &library);
  ASSERT_TRUE(opened.ok()) << opened.message();
  cuda::Api api{};
  EXPECT_STREQ(take(library, &api), nullptr);
}

TEST(VendorAbiTest, TheRuntimeHasEveryFunctionThatIsTaken) {
  TakesEveryFunction(SIRTAKI_CUDA_RUNTIME_FILE, &cuda::TakeRuntime);
}

TEST(VendorAbiTest, TheDriverHasEveryFunctionThatIsTaken) {
  TakesEveryFunction(SIRTAKI_CUDA_DRIVER_FILE, &cuda::TakeDriver);
}

}  // namespace
}  // namespace sirtaki::ops
