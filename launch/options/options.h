// The options are what sirtakirun was told: its flags, and the YAML file that they may stand in.
// Pure: files are read through an argument.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/machine/cgroup.h"

namespace sirtaki::launch {

inline constexpr int kMostSeconds = 1'000'000;

struct LaunchOptions {
  int np = 0;  // 0: one for each slot of the hosts
  std::string hosts;
  std::string hostfile;
  std::string include;
  std::string exclude;
  bool oversubscribe = false;
  bool no_mpi = false;
  bool mpi = false;

  // auto, mpi, openmpi, mpich, srun, sirtakirun, or a program's path; --no-mpi and --mpi are in it.
  std::string launcher = "auto";
  std::vector<std::string> mpi_args;
  std::vector<std::string> binding_args;  // none: no binding

  int ssh_port = 0;  // 0: as ssh is set up
  std::string ssh_identity_file;
  std::vector<std::string> ssh_args;
  std::vector<std::string> network_interfaces;
  std::vector<std::string> exports;  // "NAME", or "NAME=value"

  bool check_hosts = true;
  bool disable_cache = false;  // of what the checks found
  int wait_for_hosts = -1;     // seconds; -1: as Plan::wait has it

  int max_restarts = 0;

  bool elastic = false;  // ranks and hosts may come and go
  int min_np = 1;
  int max_np = 0;  // 0: np, or one for each slot of the hosts
  std::string host_discovery_script;
  int slots_per_host = 1;                        // where the script does not say it
  int discovery_interval = 1;                    // seconds
  int elastic_timeout = 0;                       // seconds; 0: as the environment has it, or 600
  int reset_limit = -1;                          // -1: none
  std::array<int, 2> cooldown_range = {1, 300};  // seconds

  bool as_horovod = false;  // already in `program`

  std::string output_folder;
  bool prefix_timestamp = false;

  bool dry_run = false;
  bool verbose = false;
  bool check_build = false;
  std::string explain;          // a folder of flight records
  std::string merge_timelines;  // a folder of timelines
  bool help = false;
  bool version = false;

  // Options of the library, by its variables: {"SIRTAKI_FUSION_BYTES", "32M"}.
  std::map<std::string, std::string> knobs;
  // Flags that were accepted and change nothing, and why.
  std::vector<std::string> notes;

  // Flags that a file gave, and where: {"hosts", "\"run.yaml\", line 3: hosts"}.
  std::map<std::string, std::string> from_file;

  std::vector<std::string> program;  // and its arguments

  // How texts call a flag: as the file has it, or "--hosts".
  std::string Called(const std::string& flag) const {
    const auto found = from_file.find(flag);
    return found == from_file.end() ? "--" + flag : found->second;
  }

  // ChoosesFolder says whether the launcher is told, by --mpi-args, in which folder the ranks run.
  bool ChoosesFolder() const;
};

// `args` are those of sirtakirun, without its own name. What begins with the first word that is no
// flag, or after "--", is the program. A flag wins over the file that --config-file names.
// kInvalidArgument for what is not known or not allowed: names the flag, or the file and its line.
// On error `*out` is as it was.
core::Status ParseOptions(const std::vector<std::string>& args, const core::FileReader& read,
                          LaunchOptions* out);

// The text is what --help prints: the flags in groups.
std::string HelpText();

}  // namespace sirtaki::launch
