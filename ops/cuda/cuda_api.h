// The functions of CUDA that we call, as a table that a test replaces. They are declared here, not
// by CUDA's headers: their types have not changed for a decade, and so one build runs with any CUDA
// and without. Names and meanings are CUDA's, without its prefix.
#pragma once

#include <cstddef>
#include <string>

#include "core/base/status.h"

struct CUstream_st;
struct CUevent_st;
struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;

namespace sirtaki::ops {
class DynamicLibrary;
}

namespace sirtaki::ops::cuda {

// These errors stand for the runtime's and the driver's alike; others come as they are.
// kDeinitialized: the process exits, and CUDA has ended.
enum class Error : int {
  kSuccess = 0,
  kMemoryAllocation = 2,
  kDeinitialized = 4,
  kNotReady = 600,
};

using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;
using ContextHandle = CUctx_st*;
using ModuleHandle = CUmod_st*;
using FunctionHandle = CUfunc_st*;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kCaptureNone = 0;
// What a thread may do while a stream is captured: nobody minds what others capture.
inline constexpr int kCaptureModeThreadLocal = 1;

enum class CopyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };

struct Api {
  // ---- the runtime (libcudart) ----
  Error (*RuntimeGetVersion)(int* version);
  Error (*GetDeviceCount)(int* count);
  Error (*SetDevice)(int device);
  const char* (*GetErrorName)(Error error);
  const char* (*GetErrorString)(Error error);
  Error (*GetLastError)();  // forgets it, too
  Error (*DeviceGetStreamPriorityRange)(int* least, int* greatest);
  Error (*StreamCreateWithPriority)(StreamHandle* stream, unsigned flags, int priority);
  Error (*StreamDestroy)(StreamHandle stream);
  Error (*StreamWaitEvent)(StreamHandle stream, EventHandle event, unsigned flags);
  Error (*StreamIsCapturing)(StreamHandle stream, int* capture);
  Error (*ThreadExchangeStreamCaptureMode)(int* mode);
  Error (*EventCreateWithFlags)(EventHandle* event, unsigned flags);
  Error (*EventRecord)(EventHandle event, StreamHandle stream);
  Error (*EventQuery)(EventHandle event);
  Error (*EventDestroy)(EventHandle event);
  Error (*MemcpyAsync)(void* to, const void* from, std::size_t bytes, CopyKind kind,
                       StreamHandle stream);
  Error (*MemsetAsync)(void* memory, int value, std::size_t bytes, StreamHandle stream);
  Error (*Malloc)(void** memory, std::size_t bytes);
  Error (*Free)(void* memory);
  Error (*HostAlloc)(void** memory, std::size_t bytes, unsigned flags);
  Error (*FreeHost)(void* memory);

  // ---- the driver (libcuda) ----
  Error (*DriverGetVersion)(int* version);  // the latest CUDA that it is for
  Error (*DeviceGet)(int* device, int ordinal);
  Error (*DevicePrimaryCtxRetain)(ContextHandle* context, int device);
  Error (*DevicePrimaryCtxRelease)(int device);
  Error (*CtxPushCurrent)(ContextHandle context);
  Error (*CtxPopCurrent)(ContextHandle* context);
  Error (*ModuleLoadData)(ModuleHandle* module, const void* image);
  Error (*ModuleUnload)(ModuleHandle module);
  Error (*ModuleGetFunction)(FunctionHandle* function, ModuleHandle module, const char* name);
  Error (*LaunchKernel)(FunctionHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        StreamHandle stream, void** parameters, void** extra);
};

struct Library {
  Api api{};
  int version = 0;           // of the runtime: 13000 is 13.0
  std::string runtime_path;  // for texts
};

// Each takes its functions from a library, the driver's in the versions that are declared above,
// and returns the first symbol that the library does not have; null if all are there.
const char* TakeRuntime(const DynamicLibrary& library, Api* api);
const char* TakeDriver(const DynamicLibrary& library, Api* api);

// Opens them, the copies that are in the process if there are any; makes no context.
// Errors: kUnsupported where there is no CUDA or no GPU, or an older one than 11.0. Thread-safe.
core::Status Load(Library* library);

// "13.0"
std::string VersionText(int version);

// Ok, or kBackend with the function's name and CUDA's text for the error, which CUDA then forgets:
// it would come back from somebody else's call. Of a memory error the text says so.
core::Status Check(const Api& api, Error error, const char* function);

}  // namespace sirtaki::ops::cuda
