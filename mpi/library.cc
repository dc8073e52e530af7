#include "mpi/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <filesystem>
#include <mutex>
#include <string_view>

#include "core/config/mpi_families.h"
#include "core/machine/cgroup.h"
#include "ops/base/dynamic_library.h"

// Programs that are linked with a module have it.
extern "C" __attribute__((weak, visibility("hidden"))) const sirtaki::mpi::Api* sirtaki_mpi_api();

namespace sirtaki::mpi {
namespace {

namespace fs = std::filesystem;

using core::MpiFamilies;
using core::MpiFamily;
using core::Status;
using core::StatusCode;

// The file of this library, or of the program if it has the library within.
fs::path OwnFolder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&OpenMpi), &info) == 0 || info.dli_fname == nullptr) {
    return {};
  }
  std::error_code error;
  const fs::path own = fs::canonical(info.dli_fname, error);
  return error ? fs::path() : own.parent_path();
}

fs::path ModuleOf(const MpiFamily& family) { return OwnFolder() / family.module(); }

// The folders of libraries beside the programs that have started this one, the nearest first:
// mpirun and the like lie in the bin of their MPI.
std::vector<fs::path> FoldersOfLaunchers() {
  constexpr int kMostAncestors = 5;
  std::vector<fs::path> folders;
  pid_t process = getppid();
  for (int i = 0; i < kMostAncestors && process > 1; ++i) {
    const std::string root = "/proc/" + std::to_string(process);
    std::error_code error;
    const fs::path program = fs::read_symlink(root + "/exe", error);
    if (!error) {
      for (const char* folder : {"lib", "lib64"}) {
        folders.push_back(program.parent_path().parent_path() / folder);
      }
    }
    // "PID (NAME) STATE PARENT": a name may hold anything.
    const std::string stat = core::ReadFile(root + "/stat").value_or("");
    const std::size_t end = stat.rfind(')');
    process = 0;
    if (end == std::string::npos || end + 4 >= stat.size()) break;
    std::from_chars(stat.data() + end + 4, stat.data() + stat.size(), process);
  }
  return folders;
}

struct Found {
  const MpiFamily* family = nullptr;
  ops::DynamicLibrary library;
  std::string why;
};

// Opens a library of the family for whom `search` says where.
bool TryOpen(const MpiFamily& family, bool loaded, const std::vector<fs::path>& folders,
             bool by_linker, Found* found) {
  for (const std::string& name : family.libraries) {
    if (loaded && !ops::IsLoaded(name)) continue;
    ops::LibrarySearch search{.prefix = name, .folders = folders, .names = {}, .is_global = true};
    if (by_linker) search.names.push_back(name);
    if (!ops::DynamicLibrary::Open(search, &found->library).ok()) continue;
    found->family = &family;
    return true;
  }
  return false;
}

// Those whose launcher seems to have started this process come first.
std::vector<const MpiFamily*> InOrder(const core::EnvironmentView& variables) {
  std::vector<const MpiFamily*> order;
  for (const MpiFamily& family : MpiFamilies()) order.push_back(&family);
  std::stable_partition(order.begin(), order.end(), [&](const MpiFamily* family) {
    return std::any_of(family->variables.begin(), family->variables.end(),
                       [&](const std::string& name) { return variables.Find(name).has_value(); });
  });
  return order;
}

Status Find(core::MpiChoice choice, const core::EnvironmentView& variables, Found* found) {
  const bool any = choice == core::MpiChoice::kAuto;
  for (const MpiFamily& family : MpiFamilies()) {
    if (!TryOpen(family, /*loaded=*/true, {}, /*by_linker=*/false, found)) continue;
    found->why = found->library.path() + ", which the program has";
    if (any || choice == family.choice) return Status::Ok();
    return {StatusCode::kInvalidArgument,
            "the option mpi_family is for another MPI than the program has, " + family.label +
                " (" + found->library.path() + "): leave the option out"};
  }
  if (choice == core::MpiChoice::kNone)
    return {StatusCode::kUnsupported, "the option mpi_family is none"};
  const std::vector<fs::path> launchers = FoldersOfLaunchers();
  std::vector<const MpiFamily*> order = InOrder(variables);
  if (!any) std::erase_if(order, [&](const MpiFamily* family) { return family->choice != choice; });
  for (const MpiFamily* family : order) {
    if (!TryOpen(*family, /*loaded=*/false, launchers, /*by_linker=*/false, found)) continue;
    found->why = found->library.path() + ", beside what has launched this process";
    return Status::Ok();
  }
  std::string looked;
  for (const MpiFamily* family : order) {
    if (TryOpen(*family, /*loaded=*/false, {}, /*by_linker=*/true, found)) {
      found->why = found->library.path() + ", which the dynamic linker finds";
      return Status::Ok();
    }
    for (const std::string& name : family->libraries) looked += (looked.empty() ? "" : ", ") + name;
  }
  return {StatusCode::kUnsupported, "no MPI was found: the dynamic linker knows none of " + looked +
                                        ", and none lies beside what has launched this process"};
}

struct Opened {
  std::mutex mutex;
  std::atomic<const Api*> api{nullptr};
  std::string why;
};

Opened& TheOpened() {
  static Opened& opened = *new Opened;  // MPI is called while the process exits
  return opened;
}

Status LoadModule(const Found& found, const Api** api) {
  const fs::path file = ModuleOf(*found.family);
  std::error_code error;
  if (!fs::exists(file, error)) {
    std::string there;
    for (const std::string& name : FamiliesOfModules()) there += (there.empty() ? "" : ", ") + name;
    if (there.empty()) there = "none at all";
    return {StatusCode::kUnsupported, "this Sirtaki has no module for " + found.family->label +
                                          " (" + found.why + "): " + file.string() +
                                          " is not there. It has " + there};
  }
  ops::DynamicLibrary module;
  Status status = ops::DynamicLibrary::Open(
      {.prefix = file.filename().string(), .folders = {}, .names = {file.string()}}, &module);
  if (!status.ok()) return status;
  decltype(&sirtaki_mpi_api) function = nullptr;
  const Api* made = module.Take("sirtaki_mpi_api", &function) ? function() : nullptr;
  if (made == nullptr || made->version != Api::kVersion) {
    return {StatusCode::kUnsupported, file.string() + " belongs to another version of Sirtaki"};
  }
  *api = made;
  return Status::Ok();
}

}  // namespace

Status OpenMpi(core::MpiChoice choice, const core::EnvironmentView& variables) {
  Opened& opened = TheOpened();
  const std::lock_guard<std::mutex> lock(opened.mutex);
  if (opened.api != nullptr) return Status::Ok();
  if (sirtaki_mpi_api != nullptr) {
    opened.api = sirtaki_mpi_api();
    return Status::Ok();
  }
  Found found;
  Status status = Find(choice, variables, &found);
  if (!status.ok()) return status;
  const Api* api = nullptr;
  status = LoadModule(found, &api);
  if (!status.ok()) return status;
  opened.why = found.why;
  opened.api = api;
  return Status::Ok();
}

const Api& TheApi() { return *TheOpened().api; }

const std::string& WhyThisMpi() { return TheOpened().why; }

std::vector<std::string> FamiliesOfModules() {
  std::vector<std::string> names;
  for (const MpiFamily& family : MpiFamilies()) {
    std::error_code error;
    if (fs::exists(ModuleOf(family), error)) names.push_back(family.name);
  }
  return names;
}

}  // namespace sirtaki::mpi
