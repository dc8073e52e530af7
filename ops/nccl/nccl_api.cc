#include "ops/nccl/nccl_api.h"

#include <utility>

#include "ops/base/dynamic_library.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;

int MajorOf(int version) { return version < 10000 ? version / 1000 : version / 10000; }

// The first symbol that the library must have and has not; null if all are there.
const char* FindAll(const DynamicLibrary& library, Api* api) {
  const char* missing = nullptr;
  const auto take = [&](const char* symbol, auto* function) {
    if (!library.Take(symbol, function) && missing == nullptr) missing = symbol;
  };
  take("ncclGetUniqueId", &api->GetUniqueId);
  take("ncclCommInitRankConfig", &api->CommInitRankConfig);
  take("ncclCommSplit", &api->CommSplit);
  take("ncclCommGetAsyncError", &api->CommGetAsyncError);
  take("ncclCommFinalize", &api->CommFinalize);
  take("ncclCommDestroy", &api->CommDestroy);
  take("ncclCommAbort", &api->CommAbort);
  take("ncclGetErrorString", &api->GetErrorString);
  take("ncclGetLastError", &api->GetLastError);
  take("ncclGroupStart", &api->GroupStart);
  take("ncclGroupEnd", &api->GroupEnd);
  take("ncclAllReduce", &api->AllReduce);
  take("ncclReduce", &api->Reduce);
  take("ncclBroadcast", &api->Broadcast);
  take("ncclAllGather", &api->AllGather);
  take("ncclReduceScatter", &api->ReduceScatter);
  take("ncclSend", &api->Send);
  take("ncclRecv", &api->Recv);
  return missing;
}

void FindNewer(const DynamicLibrary& library, Api* api) {
  library.Take("ncclMemAlloc", &api->MemAlloc);
  library.Take("ncclMemFree", &api->MemFree);
  library.Take("ncclCommRegister", &api->CommRegister);
  library.Take("ncclCommDeregister", &api->CommDeregister);
  library.Take("ncclCommWindowRegister", &api->CommWindowRegister);
  library.Take("ncclCommWindowDeregister", &api->CommWindowDeregister);
  library.Take("ncclWinGetUserPtr", &api->WinGetUserPtr);
}

}  // namespace

std::string VersionText(int version) {
  const int major = MajorOf(version);
  const int rest = version - major * (version < 10000 ? 1000 : 10000);
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." +
         std::to_string(rest % 100);
}

Status CheckVersion(int loaded, const std::string& path) {
  const int major = MajorOf(kDeclaredVersion);
  if (MajorOf(loaded) == major && loaded >= kOldestVersion) return Status::Ok();
  return {StatusCode::kUnsupported,
          "NCCL " + VersionText(loaded) + " in " + path + " is not supported: this build knows " +
              VersionText(kDeclaredVersion) + " and works with " + VersionText(kOldestVersion) +
              " and later ones of major version " + std::to_string(major)};
}

Status Load(Library* library) {
  DynamicLibrary opened;
  Status status = DynamicLibrary::Open(
      {"libnccl.so", FoldersBesideLibTorch(), {"libnccl.so.2", "libnccl.so"}}, &opened);
  if (!status.ok()) return {status.code(), "NCCL was not found: " + status.message()};
  library->path = opened.path();
  Api& api = library->api;
  // The version first: it explains what else is missing.
  if (!opened.Take("ncclGetVersion", &api.GetVersion) ||
      api.GetVersion(&library->version) != Result::kSuccess) {
    return {StatusCode::kUnsupported, library->path + " does not tell its version"};
  }
  status = CheckVersion(library->version, library->path);
  if (!status.ok()) return status;
  if (const char* symbol = FindAll(opened, &api)) {
    return {StatusCode::kUnsupported,
            "NCCL " + VersionText(library->version) + " in " + library->path + " has no " + symbol};
  }
  FindNewer(opened, &api);
  return Status::Ok();
}

Status Check(const Api& api, Result result, const char* function, CommHandle comm) {
  if (result == Result::kSuccess || result == Result::kInProgress) return Status::Ok();
  std::string text = std::string(function) + ": " + api.GetErrorString(result);
  const char* last = api.GetLastError(comm);
  if (last != nullptr && *last != '\0') text += ": " + std::string(last);
  return {StatusCode::kBackend, std::move(text)};
}

}  // namespace sirtaki::ops::nccl
