#include "ops/cuda/cuda_api.h"

#include <string>
#include <utility>

#include "ops/base/dynamic_library.h"

namespace sirtaki::ops::cuda {
namespace {

using core::Status;
using core::StatusCode;

Status Missing(const DynamicLibrary& library, const char* symbol) {
  return {StatusCode::kUnsupported,
          library.path() + " has no " + symbol + "; CUDA 11.0 or later is needed"};
}

}  // namespace

const char* TakeRuntime(const DynamicLibrary& library, Api* api) {
  const char* missing = nullptr;
  const auto take = [&](const char* symbol, auto* function) {
    if (!library.Take(symbol, function) && missing == nullptr) missing = symbol;
  };
  take("cudaRuntimeGetVersion", &api->RuntimeGetVersion);
  take("cudaGetDeviceCount", &api->GetDeviceCount);
  take("cudaSetDevice", &api->SetDevice);
  take("cudaGetErrorName", &api->GetErrorName);
  take("cudaGetErrorString", &api->GetErrorString);
  take("cudaGetLastError", &api->GetLastError);
  take("cudaDeviceGetStreamPriorityRange", &api->DeviceGetStreamPriorityRange);
  take("cudaStreamCreateWithPriority", &api->StreamCreateWithPriority);
  take("cudaStreamDestroy", &api->StreamDestroy);
  take("cudaStreamWaitEvent", &api->StreamWaitEvent);
  take("cudaStreamIsCapturing", &api->StreamIsCapturing);
  take("cudaThreadExchangeStreamCaptureMode", &api->ThreadExchangeStreamCaptureMode);
  take("cudaEventCreateWithFlags", &api->EventCreateWithFlags);
  take("cudaEventRecord", &api->EventRecord);
  take("cudaEventQuery", &api->EventQuery);
  take("cudaEventDestroy", &api->EventDestroy);
  take("cudaMemcpyAsync", &api->MemcpyAsync);
  take("cudaMemsetAsync", &api->MemsetAsync);
  take("cudaMalloc", &api->Malloc);
  take("cudaFree", &api->Free);
  take("cudaHostAlloc", &api->HostAlloc);
  take("cudaFreeHost", &api->FreeHost);
  return missing;
}

const char* TakeDriver(const DynamicLibrary& library, Api* api) {
  const char* missing = nullptr;
  const auto take = [&](const char* symbol, auto* function) {
    if (!library.Take(symbol, function) && missing == nullptr) missing = symbol;
  };
  take("cuDriverGetVersion", &api->DriverGetVersion);
  take("cuDeviceGet", &api->DeviceGet);
  take("cuDevicePrimaryCtxRetain", &api->DevicePrimaryCtxRetain);
  take("cuDevicePrimaryCtxRelease_v2", &api->DevicePrimaryCtxRelease);
  take("cuCtxPushCurrent_v2", &api->CtxPushCurrent);
  take("cuCtxPopCurrent_v2", &api->CtxPopCurrent);
  take("cuModuleLoadData", &api->ModuleLoadData);
  take("cuModuleUnload", &api->ModuleUnload);
  take("cuModuleGetFunction", &api->ModuleGetFunction);
  take("cuLaunchKernel", &api->LaunchKernel);
  return missing;
}

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Status Load(Library* library) {
  DynamicLibrary runtime;
  Status status = DynamicLibrary::Open(
      {"libcudart",
       FoldersBesideLibTorch(),
       {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"}},
      &runtime);
  if (!status.ok()) return {status.code(), "no CUDA runtime was found: " + status.message()};
  library->runtime_path = runtime.path();
  if (const char* symbol = TakeRuntime(runtime, &library->api)) return Missing(runtime, symbol);
  const Api& api = library->api;
  status = Check(api, api.RuntimeGetVersion(&library->version), "cudaRuntimeGetVersion");
  if (!status.ok()) return status;

  DynamicLibrary driver;
  status = DynamicLibrary::Open({"libcuda.so", {}, {"libcuda.so.1", "libcuda.so"}}, &driver);
  if (!status.ok()) return {status.code(), "no GPU driver was found: " + status.message()};
  if (const char* symbol = TakeDriver(driver, &library->api)) return Missing(driver, symbol);

  int devices = 0;
  status = Check(api, api.GetDeviceCount(&devices), "cudaGetDeviceCount");
  if (status.ok() && devices == 0) status = {StatusCode::kUnsupported, "there is no GPU"};
  if (!status.ok()) {
    return {StatusCode::kUnsupported, status.message() + " (CUDA " + VersionText(library->version) +
                                          " in " + library->runtime_path + ")"};
  }
  return Status::Ok();
}

Status Check(const Api& api, Error error, const char* function) {
  if (error == Error::kSuccess) return Status::Ok();
  static_cast<void>(api.GetLastError());
  std::string text = std::string(function) + ": " + api.GetErrorString(error) + " (" +
                     api.GetErrorName(error) + ", " + std::to_string(static_cast<int>(error)) + ")";
  return {StatusCode::kBackend, std::move(text)};
}

}  // namespace sirtaki::ops::cuda
