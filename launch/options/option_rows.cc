#include "launch/options/option_rows.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <optional>
#include <utility>

#include "core/base/spelling.h"
#include "core/base/text.h"
#include "core/config/config_table.h"
#include "launch/base/rank_messages.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Quoted;
using core::Status;

namespace {

OptionRow Number(std::string name, char letter, std::string value, std::string help, int min,
                 int max, int LaunchOptions::*member) {
  const auto apply = [min, max, member](const Given& given, LaunchOptions* out) {
    const auto number = NumberFrom<int>(given.value, min, max);
    if (!number) {
      return WrongFlag(given, Quoted(given.value) + " is not allowed; allowed is " +
                                  std::to_string(min) + " to " + std::to_string(max));
    }
    out->*member = *number;
    return Status::Ok();
  };
  return {std::move(name), letter, std::move(value), std::move(help), apply};
}

// Words as a shell takes them apart.
OptionRow Arguments(std::string name, std::string help,
                    std::vector<std::string> LaunchOptions::*member) {
  const auto apply = [member](const Given& given, LaunchOptions* out) {
    auto words = ShellWords(given.value);
    if (!words) return WrongFlag(given, "a quote is not closed in " + Quoted(given.value));
    out->*member = std::move(*words);
    return Status::Ok();
  };
  return {std::move(name), 0, std::string(kArguments), std::move(help), apply};
}

bool IsVariableName(std::string_view name) {
  return !name.empty() && std::isdigit(static_cast<unsigned char>(name[0])) == 0 &&
         std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
}

Status AddExport(const Given& given, LaunchOptions* out) {
  const std::string name = given.value.substr(0, given.value.find('='));
  if (!IsVariableName(name)) {
    return WrongFlag(given, Quoted(name) + " is not a variable's name; give NAME or NAME=VALUE");
  }
  out->exports.push_back(given.value);
  return Status::Ok();
}

Status SetInterfaces(const Given& given, LaunchOptions* out) {
  std::vector<std::string>& names = out->network_interfaces;
  for (const std::string_view name : Split(given.value, ',')) {
    if (Trimmed(name) != name || name.empty() || name.size() > 15) {
      return WrongFlag(given, Quoted(name) +
                                  " is not a network interface's name; give names as in "
                                  "eth0,ib0");
    }
    if (std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
  }
  if (names.empty()) return WrongFlag(given, "names no interface");
  return Status::Ok();
}

Status SetLauncher(const Given& given, LaunchOptions* out) {
  constexpr std::array<std::string_view, 6> kWords = {"auto",  "mpi",  "openmpi",
                                                      "mpich", "srun", "sirtakirun"};
  const bool is_word = std::find(kWords.begin(), kWords.end(), given.value) != kWords.end();
  if (!is_word && given.value.find('/') == std::string::npos) {
    return WrongFlag(given,
                     Quoted(given.value) +
                         " is not known; give auto, mpi, openmpi, mpich, srun, sirtakirun or "
                         "the path of an mpirun");
  }
  out->launcher = given.value;
  return Status::Ok();
}

OptionGroup RankOptions() {
  using O = LaunchOptions;
  return {
      "Ranks and hosts",
      {Number("np", 'n', "N", "How many ranks. Default: one for each slot of the hosts.", 1,
              kMaxRanks, &O::np),
       Text("hosts", 'H', "a:4,b:4", "Hosts, and how many ranks each takes.", &O::hosts),
       Text("hostfile", 0, "FILE",
            R"(A file of hosts, in lines "host slots=4" or "host:4"; # begins a comment.)",
            &O::hostfile),
       Text("include", 0, "a:0,2@b",
            "Use only these hosts, and of a host only these slots: its ranks then see only the "
            "GPUs of these numbers.",
            &O::include),
       Text("exclude", 0, "a:0,2@b", "Use all hosts and slots except these.", &O::exclude),
       Switch("oversubscribe", 0, "Allow more ranks than the hosts have slots.", &O::oversubscribe),
       {"export", 'x', "NAME[=VALUE]",
        "Pass this variable to the ranks of all hosts; may be given several times. Those of "
        "Sirtaki, NCCL, LibTorch and the search paths are passed anyway.",
        AddExport}}};
}

OptionGroup StartOptions() {
  using O = LaunchOptions;
  return {
      "How ranks are started",
      {{"launcher", 0, "WORD",
        "What starts the ranks: auto, mpi, openmpi, mpich, srun, sirtakirun, or the path of an "
        "mpirun. mpi takes the mpirun on PATH if it is of Sirtaki's MPI, else that MPI's own, "
        "else, in a job of Slurm, srun. auto does so too, and where there is none it takes "
        "sirtakirun, which starts the ranks itself.",
        SetLauncher},
       Switch("no-mpi", 0,
              "Start the ranks without an MPI, as --launcher sirtakirun does: here as children, on "
              "other hosts by ssh. They talk over TCP.",
              &O::no_mpi),
       Arguments("mpi-args", R"(More arguments for the launcher, as in "--mca pml ob1".)",
                 &O::mpi_args),
       Arguments("binding-args",
                 "Arguments for the launcher that bind ranks to cores. Default: none are bound.",
                 &O::binding_args),
       Number("ssh-port", 'p', "PORT", "The port of the hosts' ssh.", 1, 65535, &O::ssh_port),
       Text("ssh-identity-file", 'i', "FILE", "The key for the hosts' ssh.", &O::ssh_identity_file),
       Arguments("ssh-args", R"(More arguments for ssh, as in "-F my_ssh_config".)", &O::ssh_args),
       {"network-interfaces", 0, "eth0,ib0",
        "The interfaces between the hosts, for MPI and NCCL; may be given several times. Default: "
        "those by which this machine reaches the others.",
        SetInterfaces},
       Switch(
           "check-hosts", 0,
           "Ask hosts that are reached by ssh, before the start, whether ranks can start there: "
           "ssh without a password, Sirtaki, MPI and the program; and look whether the program is "
           "on this machine, if ranks are. Default: true.",
           &O::check_hosts),
       Number(
           "wait-for-hosts", 0, "SECONDS",
           "How long hosts that ssh does not reach yet are asked again, as they may be starting. "
           "Default: 0; 600 in the launcher of Kubeflow's MPI Operator.",
           0, kMostSeconds, &O::wait_for_hosts),
       Switch("disable-cache", 0, "Ask also the hosts that were found fit within the last hour.",
              &O::disable_cache),
       Number(
           "max-restarts", 0, "N",
           "How often to start again after a rank has failed, without the hosts that are gone; the "
           "program goes on from its own checkpoint. Default: 0.",
           0, 1000, &O::max_restarts),
       Switch("as-horovod", 0,
              "The program is Python, and its \"import horovod.torch\" finds Sirtaki: \"python "
              "train.py\" runs as \"python -m sirtaki.horovod train.py\".",
              &O::as_horovod),
       Text("config-file", 0, "FILE",
            R"(More flags, from a YAML file of lines "flag: value"; the command line wins.)",
            nullptr),
       Switch("dry-run", 0, "Print what would be started, and why; start nothing.", &O::dry_run)}};
}

Status SetCooldown(const Given& given, LaunchOptions* out) {
  const std::size_t comma = given.value.find(',');
  const auto least = NumberFrom<int>(given.value.substr(0, comma), 1, kMostSeconds);
  const auto most = comma == std::string::npos
                        ? std::nullopt
                        : NumberFrom<int>(given.value.substr(comma + 1), 1, kMostSeconds);
  if (!least || !most || *most < *least) {
    return WrongFlag(given, Quoted(given.value) +
                                " is not allowed; give the least and the most seconds, as in "
                                "10,100");
  }
  out->cooldown_range = {*least, *most};
  return Status::Ok();
}

// Any of the flags for elastic jobs makes the job one.
OptionGroup ElasticOptions() {
  using O = LaunchOptions;
  OptionGroup group = {
      "Elastic jobs, in which ranks and hosts come and go (docs/elastic.md)",
      {Number("min-np", 0, "N",
              "With how many ranks the job goes on; with fewer it waits for others. Default: 1.", 1,
              kMaxRanks, &O::min_np),
       Number("max-np", 0, "N",
              "How many ranks the job has at most. Default: np, or one for each slot of the hosts.",
              1, kMaxRanks, &O::max_np),
       Text("host-discovery-script", 0, "FILE",
            "A program, or a line for a shell, that prints the hosts that there are now, in lines "
            R"("host:slots" or "host".)",
            &O::host_discovery_script),
       Number("slots-per-host", 0, "N", "The slots of a host of the script without its own.", 1,
              kMaxRanks, &O::slots_per_host),
       Number("discovery-interval", 0, "S", "How often the script runs. Default: 1 second.", 1,
              kMostSeconds, &O::discovery_interval),
       {"blacklist-cooldown-range", 0, "LEAST,MOST",
        "How many seconds nothing is started on a host where ranks have failed: at first the "
        "least, then twice as long each time, up to the most. Default: 1,300.",
        SetCooldown},
       Number("reset-limit", 0, "N",
              "How often the ranks may change. Default: any number of times.", 0, kMaxRanks,
              &O::reset_limit),
       Number("elastic-timeout", 0, "S",
              "How long the job waits for as many ranks as it needs. Default: "
              "HOROVOD_ELASTIC_TIMEOUT, or 600 seconds.",
              1, kMostSeconds, &O::elastic_timeout)}};
  for (OptionRow& row : group.rows) {
    row.apply = [apply = row.apply](const Given& given, O* out) {
      out->elastic = true;
      return apply(given, out);
    };
  }
  group.rows.insert(group.rows.begin(),
                    Switch("elastic", 0,
                           "Go on with the others when ranks or hosts are lost, and take them in "
                           "again when they come back. The ranks are started without an MPI.",
                           &O::elastic));
  return group;
}

OptionGroup OutputOptions() {
  using O = LaunchOptions;
  return {"Output",
          {Text("output-filename", 0, "DIR",
                "Write what each rank prints to DIR/rank.N/stdout and stderr, not to the terminal.",
                &O::output_folder),
           Switch("prefix-timestamp", 0, "Begin each line with the time, before the rank.",
                  &O::prefix_timestamp),
           Switch("verbose", 0, "Print what is started, and why.", &O::verbose),
           Switch("check-build", 0,
                  "Also -cb: print what was built in, what is found here, and what is to be done.",
                  &O::check_build),
           Text("explain", 0, "DIR",
                "Start nothing: say in words what the flight records in DIR tell, which rank is "
                "behind, and in which collective.",
                &O::explain),
           Text("merge-timelines", 0, "DIR",
                "Start nothing: put the timelines of all ranks in DIR into DIR/timeline.json.",
                &O::merge_timelines),
           Switch("version", 'v', "Print the version.", &O::version),
           Switch("help", 'h', "Print this.", &O::help)}};
}

std::vector<OptionGroup> MakeGroups() {
  return {RankOptions(),   StartOptions(),   ElasticOptions(),
          OutputOptions(), LibraryOptions(), HorovodOptions()};
}

// Other spellings, most of them Horovod's.
std::string_view Spelling(std::string_view name) {
  struct Alias {
    std::string_view other;
    std::string_view name;
  };
  constexpr std::array<Alias, 11> kAliases = {{{"num-proc", "np"},
                                               {"min-num-proc", "min-np"},
                                               {"max-num-proc", "max-np"},
                                               {"slots", "slots-per-host"},
                                               {"host", "hosts"},
                                               {"network-interface", "network-interfaces"},
                                               {"nics", "network-interfaces"},
                                               {"prefix-output-with-timestamp", "prefix-timestamp"},
                                               {"x", "export"},
                                               {"gloo", "no-mpi"},
                                               {"cb", "check-build"}}};
  for (const Alias& alias : kAliases) {
    if (alias.other == name) return alias.name;
  }
  constexpr std::string_view kOurs = "sirtaki-";  // as programs take the library's options
  return name.starts_with(kOurs) ? name.substr(kOurs.size()) : name;
}

template <typename Matches>
const OptionRow* FindIf(Matches matches) {
  for (const OptionGroup& group : OptionGroups()) {
    for (const OptionRow& row : group.rows) {
      if (matches(row)) return &row;
    }
  }
  return nullptr;
}

}  // namespace

Status WrongFlag(const Given& given, const std::string& text) {
  return {core::StatusCode::kInvalidArgument, given.from + ": " + text};
}

OptionRow Switch(std::string name, char letter, std::string help, bool LaunchOptions::*member) {
  const auto apply = [member](const Given& given, LaunchOptions* out) {
    out->*member = given.value == "true";
    return Status::Ok();
  };
  return {std::move(name), letter, "", std::move(help), apply};
}

OptionRow Text(std::string name, char letter, std::string value, std::string help,
               std::string LaunchOptions::*member) {
  const auto apply = [member](const Given& given, LaunchOptions* out) {
    if (given.value.empty()) return WrongFlag(given, "is empty");
    if (member != nullptr) out->*member = given.value;
    return Status::Ok();
  };
  return {std::move(name), letter, std::move(value), std::move(help), apply};
}

Status ReadSwitch(Given* given) {
  const auto on = core::ParseBool(given->value);
  if (!on) {
    return WrongFlag(*given, Quoted(given->value) + " is not allowed; allowed is true or false");
  }
  given->value = *on ? "true" : "false";
  return Status::Ok();
}

std::string NearestFlag(const std::string& given, const std::string& dashes) {
  std::vector<std::string> known;
  for (const OptionGroup& group : OptionGroups()) {
    for (const OptionRow& row : group.rows) known.push_back(dashes + row.name);
  }
  return core::NearestText(given, known, dashes.size());
}

Status SetKnob(const Given& given, std::string_view option, const std::string& value,
               LaunchOptions* out) {
  const core::OptionSpec& spec = *core::FindOption(option);
  core::Config scratch;
  if (!core::SetOptionFromText(spec, value, &scratch)) {
    return WrongFlag(
        given, "cannot be " + Quoted(given.value) + "; allowed is " + core::AllowedValues(spec));
  }
  out->knobs[spec.Variable()] = value;
  return Status::Ok();
}

OptionGroup LibraryOptions() {
  OptionGroup group{"Options of Sirtaki in the ranks (docs/configuration.md)", {}};
  for (const core::OptionSpec& spec : core::OptionTable()) {
    std::string name(spec.name);
    std::replace(name.begin(), name.end(), '_', '-');
    const bool is_switch = spec.kind == core::OptionKind::kBool;
    const core::Config defaults;
    std::string text(spec.help);
    if (const std::string value = core::OptionText(spec, defaults); !value.empty()) {
      text += " Default: " + value + ".";
    }
    if (!spec.zero.empty()) text += " 0: " + std::string(spec.zero) + ".";
    group.rows.push_back(
        {name, 0, is_switch ? "" : "VALUE", text, [&spec](const Given& given, LaunchOptions* out) {
           return SetKnob(given, spec.name, given.value, out);
         }});
  }
  return group;
}

const std::vector<OptionGroup>& OptionGroups() {
  static const std::vector<OptionGroup> groups = MakeGroups();
  return groups;
}

const OptionRow* FindRow(std::string_view name) {
  const std::string_view wanted = Spelling(name);
  return FindIf([wanted](const OptionRow& row) { return row.name == wanted; });
}

const OptionRow* FindRow(char letter) {
  return FindIf([letter](const OptionRow& row) { return row.letter == letter; });
}

}  // namespace sirtaki::launch
