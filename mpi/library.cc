#include "mpi/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>

#include "core/base/words.h"
#include "core/config/mpi_families.h"
#include "core/machine/cgroup.h"
#include "ops/base/dynamic_library.h"

// Programs that are linked with a module have this function.
extern "C" __attribute__((weak, visibility("hidden"))) const sirtaki::mpi::Api* sirtaki_mpi_api();

namespace sirtaki::mpi {
namespace {

namespace fs = std::filesystem;

using core::MpiFamilies;
using core::MpiFamily;
using core::Status;
using core::StatusCode;

// The folder of this library, or of the program if it has the library within.
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
  std::string path;
  std::string why;
  // The ranks of this job have it, for all that is known: there is no going on without it.
  bool is_certain = false;
};

// The first words of what MPI says of itself, which it does before it is initialised, too.
template <typename Ask>
std::string NameOf(const Ask& get_library_version) {
  std::array<char, 16384> text{};  // more than any of them writes
  if (get_library_version(text.data()) != 0) return "";
  const std::string_view all = text.data();
  return std::string(all.substr(0, all.find_first_of(",\n")));
}

// The path of the file that a function is in; empty: that is not known.
std::string FileOf(const void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

// The family of an MPI of this name, whose library lies there; null: none that is known.
const MpiFamily* FamilyOf(const std::string& name, const std::string& path) {
  const auto has = [&name](const char* word) { return name.find(word) != std::string::npos; };
  core::MpiChoice choice = core::MpiChoice::kNone;
  if (fs::path(path).filename().string().starts_with("libmpi_abi")) {
    choice = core::MpiChoice::kAbi;
  } else if (has("Open MPI")) {
    choice = core::MpiChoice::kOpenMpi;
  } else if (has("MPICH") || has("Intel(R) MPI") || has("MVAPICH")) {
    choice = core::MpiChoice::kMpich;
  }
  for (const MpiFamily& family : MpiFamilies()) {
    if (family.choice == choice) return &family;
  }
  return nullptr;
}

// Finds the MPI that is in the process. One that was loaded for a library alone (a module of Python)
// is known by its name, and from then on there for all. No family: there is none.
Status FindLoaded(Found* found) {
  using Function = int (*)(char*, int*);
  auto ask = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "MPI_Get_library_version"));
  for (const char* prefix : {"libmpi.so", "libmpich.so", "libmpi_abi.so", "libmpi-"}) {
    ops::DynamicLibrary library;
    if (ask == nullptr && ops::IsLoaded(prefix) &&
        ops::DynamicLibrary::Open({.prefix = prefix, .folders = {}, .names = {}, .is_global = true},
                                  &library)
            .ok()) {
      library.Take("MPI_Get_library_version", &ask);
    }
  }
  if (ask == nullptr) return Status::Ok();
  found->path = FileOf(reinterpret_cast<const void*>(ask));
  int length = 0;
  const std::string name = NameOf([&](char* text) { return ask(text, &length); });
  found->family = FamilyOf(name, found->path);
  found->why = found->path + ", which the program has";
  found->is_certain = true;
  if (found->family != nullptr) return Status::Ok();
  return {StatusCode::kBackend, "the program has an MPI of no family that Sirtaki knows: " + name +
                                    " (" + found->path + ")"};
}

// Opens a library of the family that lies in one of the folders, or that the dynamic linker finds.
bool TryOpen(const MpiFamily& family, const std::vector<fs::path>& folders, bool by_linker,
             Found* found) {
  for (const std::string& name : family.libraries) {
    ops::LibrarySearch search{.prefix = name, .folders = folders, .names = {}, .is_global = true};
    if (by_linker) search.names.push_back(name);
    ops::DynamicLibrary library;
    if (!ops::DynamicLibrary::Open(search, &library).ok()) continue;
    found->family = &family;
    found->path = library.path();
    return true;
  }
  return false;
}

Status Find(core::MpiChoice choice, const core::EnvironmentView& variables, Found* found) {
  if (Status status = FindLoaded(found); !status.ok()) return status;
  const bool any = choice == core::MpiChoice::kAuto;
  if (found->family != nullptr) {
    if (any || choice == found->family->choice) return Status::Ok();
    return {StatusCode::kInvalidArgument,
            "the option mpi_family is for another MPI than the program has, " +
                found->family->label + " (" + found->path + "): leave the option out"};
  }
  std::vector<const MpiFamily*> launched;  // as the variables say,
  std::vector<const MpiFamily*> others;
  for (const MpiFamily& family : MpiFamilies()) {
    if (!any && family.choice != choice) continue;
    const bool is_launched =
        std::any_of(family.variables.begin(), family.variables.end(),
                    [&](const std::string& name) { return variables.Find(name).has_value(); });
    (is_launched ? launched : others).push_back(&family);
  }
  const std::vector<fs::path> folders = FoldersOfLaunchers();
  std::string looked;
  for (const auto* const families : {&launched, &others}) {
    for (const bool by_linker : {false, true}) {
      for (const MpiFamily* const family : *families) {
        if (TryOpen(*family, by_linker ? std::vector<fs::path>() : folders, by_linker, found)) {
          found->why = found->path + (by_linker ? ", which the dynamic linker finds"
                                                : ", beside what has launched this process");
          found->is_certain = !by_linker || families == &launched;
          return Status::Ok();
        }
        if (by_linker) {
          for (const std::string& name : family->libraries) {
            looked += (looked.empty() ? "" : ", ") + name;
          }
        }
      }
    }
  }
  return {StatusCode::kUnsupported, "no MPI was found: the dynamic linker knows none of " + looked +
                                        ", and none lies beside what has launched this process; "
                                        "name its folder in LD_LIBRARY_PATH, or start the ranks "
                                        "without MPI: sirtakirun --no-mpi (or give MASTER_ADDR)"};
}

struct Opened {
  std::mutex mutex;
  std::atomic<const Api*> api{nullptr};
  core::MpiChoice family = core::MpiChoice::kAuto;  // auto: it is linked
  std::string why;
};

Opened& TheOpened() {
  static Opened& opened = *new Opened;  // MPI is called while the process exits
  return opened;
}

// Where it is not certain that the ranks have this MPI the error is kUnsupported, as if there were
// none.
Status LoadModule(const Found& found, const Api** api) {
  const StatusCode code = found.is_certain ? StatusCode::kBackend : StatusCode::kUnsupported;
  const fs::path file = ModuleOf(*found.family);
  std::error_code error;
  if (!fs::exists(file, error)) {
    std::string there = core::Joined(FamiliesOfModules(), ", ");
    if (there.empty()) there = "none at all";
    return {code, "this Sirtaki has no module for " + found.family->label + " (" + found.why +
                      "): " + file.string() + " is not there. It has " + there};
  }
  ops::DynamicLibrary module;
  Status status = ops::DynamicLibrary::Open(
      {.prefix = file.filename().string(), .folders = {}, .names = {file.string()}}, &module);
  if (!status.ok()) return {code, status.message()};
  decltype(&sirtaki_mpi_api) function = nullptr;
  const Api* made = module.Take("sirtaki_mpi_api", &function) ? function() : nullptr;
  if (made == nullptr || made->version != Api::kVersion || made->bytes != sizeof(Api)) {
    return {code, file.string() + " belongs to another version of Sirtaki"};
  }
  // Two MPIs may be in the process: the module has the functions of the one that came first.
  const std::string path = FileOf(reinterpret_cast<const void*>(made->Initialized));
  const std::string name =
      NameOf([made](char* text) { return made->GetLibraryVersion(text, 4096); });
  if (FamilyOf(name, path) != found.family) {
    return {StatusCode::kBackend, "two MPIs are in the process: " + found.why + ", and " + name +
                                      " (" + path + "): link the program with one"};
  }
  *api = made;
  return Status::Ok();
}

}  // namespace

Status OpenMpi(core::MpiChoice choice, const core::EnvironmentView& variables) {
  Opened& opened = TheOpened();
  const std::lock_guard<std::mutex> lock(opened.mutex);
  if (choice == core::MpiChoice::kNone) {
    return {StatusCode::kUnsupported, "the option mpi_family is none"};
  }
  if (opened.api != nullptr) {
    const bool fits = choice == core::MpiChoice::kAuto || choice == opened.family ||
                      opened.family == core::MpiChoice::kAuto;
    if (fits) return Status::Ok();
    return {StatusCode::kInvalidArgument,
            "the option mpi_family is for another MPI than this process has opened, " + opened.why +
                ": leave the option out"};
  }
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
  opened.family = found.family->choice;
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
