#include "ops/base/dynamic_library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <system_error>

namespace sirtaki::ops {
namespace {

namespace fs = std::filesystem;

using core::Status;
using core::StatusCode;

bool BeginsWith(const fs::path& path, const std::string& prefix) {
  const std::string name = path.filename().string();
  // What follows is a version or a hash: libnccl.so.2 is no libnccl-net.so.
  return name.starts_with(prefix) && name.find(".so") != std::string::npos &&
         name.find("-net") == std::string::npos;
}

// The paths of what is in the process, in the order of the linker.
std::vector<fs::path> Loaded(const std::string& prefix) {
  struct Looking {
    const std::string& prefix;
    std::vector<fs::path> found;
  } looking{prefix, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& to = *static_cast<Looking*>(data);
        const fs::path path(info->dlpi_name == nullptr ? "" : info->dlpi_name);
        if (BeginsWith(path, to.prefix)) to.found.push_back(path);
        return 0;
      },
      &looking);
  return looking.found;
}

std::vector<fs::path> In(const fs::path& folder, const std::string& prefix) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (BeginsWith(entry.path(), prefix)) found.push_back(entry.path());
  }
  std::sort(found.rbegin(), found.rend());  // the highest version first
  return found;
}

std::string PathOf(void* handle, const std::string& name) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || map->l_name == nullptr) {
    return name;
  }
  return map->l_name;
}

std::string LastError() {
  const char* text = dlerror();
  return text == nullptr ? "unknown" : text;
}

}  // namespace

bool IsLoaded(const std::string& prefix) { return !Loaded(prefix).empty(); }

Status DynamicLibrary::Open(const LibrarySearch& search, DynamicLibrary* library) {
  std::vector<std::string> candidates;
  for (const fs::path& path : Loaded(search.prefix)) candidates.push_back(path.string());
  for (const fs::path& folder : search.folders) {
    for (const fs::path& path : In(folder, search.prefix)) candidates.push_back(path.string());
  }
  candidates.insert(candidates.end(), search.names.begin(), search.names.end());

  std::string looked;
  for (const std::string& candidate : candidates) {
    void* const handle =
        dlopen(candidate.c_str(), RTLD_NOW | (search.is_global ? RTLD_GLOBAL : RTLD_LOCAL));
    if (handle != nullptr) {
      library->handle_ = handle;
      library->path_ = PathOf(handle, candidate);
      return Status::Ok();
    }
    looked += (looked.empty() ? "" : "; ") + LastError();
  }
  return {StatusCode::kUnsupported, search.prefix + " cannot be opened: " + looked};
}

void* DynamicLibrary::Find(const char* symbol) const {
  return handle_ == nullptr ? nullptr : dlsym(handle_, symbol);
}

std::vector<fs::path> FoldersBesideLibTorch() {
  std::vector<fs::path> folders;
  for (const fs::path& path : Loaded("libtorch_cpu")) {
    const fs::path own = path.parent_path();
    folders.push_back(own);
    // Packages of Python: torch/lib/libtorch_cpu.so and nvidia/nccl/lib/libnccl.so.2.
    std::error_code ignored;
    for (const auto& package :
         fs::directory_iterator(own.parent_path().parent_path() / "nvidia", ignored)) {
      folders.push_back(package.path() / "lib");
    }
  }
  return folders;
}

}  // namespace sirtaki::ops
