#include "launch/options/options.h"

#include <algorithm>
#include <array>
#include <boost/program_options.hpp>
#include <optional>
#include <sstream>
#include <utility>

#include "core/base/text.h"
#include "launch/base/shell_text.h"
#include "launch/options/option_rows.h"

namespace sirtaki::launch {

using core::Quoted;
using core::Status;
using core::StatusCode;

namespace {

Status Unknown(const std::string& flag) {
  return {StatusCode::kInvalidArgument, "unknown flag " + core::Escaped(flag) +
                                            NearestFlag(flag, "--") +
                                            " (--help lists all; the program's flags go after it)"};
}

// Takes the flags off the front of the arguments.
class FlagReader {
 public:
  explicit FlagReader(const std::vector<std::string>& args) : args_(args) {}

  Status Read(std::vector<Given>* given, std::vector<std::string>* program) {
    std::string before;  // the word before, if it is a switch alone
    while (at_ < args_.size()) {
      const std::string& word = args_[at_];
      if (word == "--") {
        ++at_;
        break;
      }
      if (word.size() < 2 || word[0] != '-') {
        Status status = before.empty() ? Status::Ok() : RefuseValue(before, word);
        if (!status.ok()) return status;
        break;
      }
      ++at_;
      Status status = ReadFlag(word, given);
      if (!status.ok()) return status;
      const bool has_value = word.find('=') != std::string::npos;
      before = FindRow(given->back().name)->IsSwitch() && !has_value ? word : "";
    }
    program->assign(args_.begin() + static_cast<std::ptrdiff_t>(at_), args_.end());
    return Status::Ok();
  }

 private:
  // A switch takes no value from the next word, which would be the program then.
  static Status RefuseValue(const std::string& flag, const std::string& program) {
    for (const std::string_view word : {"true", "false", "on", "off"}) {
      if (program != word) continue;
      return {StatusCode::kInvalidArgument,
              flag + " " + program + ": write " + flag + "=" + program +
                  " for the switch's value, or -- before a program of this name"};
    }
    return Status::Ok();
  }

  Status ReadFlag(const std::string& word, std::vector<Given>* given) {
    const std::size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    std::optional<std::string> value;
    if (equals != std::string::npos) value = word.substr(equals + 1);
    const OptionRow* row = nullptr;
    if (flag.starts_with("--")) {
      row = FindRow(flag.substr(2));
    } else if (flag.size() == 2) {
      row = FindRow(flag[1]);
    } else if (const std::string_view disguised = Disguised(flag); !disguised.empty()) {
      row = FindRow(disguised);
    } else if (const OptionRow* of_letter = FindRow(flag[1]);
               of_letter != nullptr && !of_letter->IsSwitch()) {
      return Take(*of_letter, flag.substr(0, 2), word.substr(2), given);  // "-Ha:4"
    }
    return row == nullptr ? Unknown(flag) : Take(*row, flag, value, given);
  }

  // Long flags that may stand behind one dash, by custom.
  static std::string_view Disguised(std::string_view flag) {
    constexpr std::array<std::string_view, 6> kWords = {"np",    "hostfile", "host",
                                                        "hosts", "cb",       "prefix-timestamp"};
    for (const std::string_view word : kWords) {
      if (flag.substr(1) == word) return word;
    }
    return {};
  }

  Status Take(const OptionRow& row, const std::string& flag, std::optional<std::string> value,
              std::vector<Given>* given) {
    Given taken{row.name, "", flag};
    if (row.IsSwitch()) {
      taken.value = value.value_or("true");
      if (Status status = ReadSwitch(&taken); !status.ok()) return status;
    } else if (value) {
      taken.value = *value;
    } else if (at_ < args_.size()) {
      taken.value = args_[at_++];
      // Horovod's takes two words.
      const bool may_take_two = row.name == "blacklist-cooldown-range" && at_ < args_.size();
      if (may_take_two && NumberFrom<int>(taken.value, 0, INT_MAX) &&
          NumberFrom<int>(args_[at_], 0, INT_MAX)) {
        taken.value += "," + args_[at_++];
      }
    } else {
      return WrongFlag(taken, "needs a value: " + row.value);
    }
    given->push_back(std::move(taken));
    return Status::Ok();
  }

  const std::vector<std::string>& args_;
  std::size_t at_ = 0;
};

Status Apply(const std::vector<Given>& all, LaunchOptions* options) {
  for (const Given& given : all) {
    Status status = FindRow(given.name)->apply(given, options);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status ReadConfigFile(const std::vector<Given>& given, const core::FileReader& read,
                      std::vector<Given>* out) {
  const Given* file = nullptr;
  for (const Given& flag : given) {
    if (flag.name == "config-file") file = &flag;
  }
  if (file == nullptr) return Status::Ok();
  const auto text = read(file->value);
  if (!text) return WrongFlag(*file, Quoted(file->value) + " cannot be read");
  return ReadOptionsFile(file->value, *text, out);
}

// Flags win over the file: where only one of two may be given, over the file's other one, and interfaces,
// which would add up, over the file's.
void ForgetOverruled(const std::vector<Given>& from_flags, LaunchOptions* options) {
  for (const Given& given : from_flags) {
    if (given.name == "hosts") options->hostfile.clear();
    if (given.name == "hostfile") options->hosts.clear();
    if (given.name == "include") options->exclude.clear();
    if (given.name == "exclude") options->include.clear();
    if (given.name == "network-interfaces") options->network_interfaces.clear();
    const bool chooses = given.name == "launcher" || given.name == "no-mpi" || given.name == "mpi";
    if (!chooses) continue;
    options->launcher = LaunchOptions().launcher;
    options->no_mpi = options->mpi = false;
  }
}

// Two lists of hosts are refused, since one would be lost.
Status RefuseTwice(const std::vector<Given>& from_flags) {
  for (auto given = from_flags.begin(); given != from_flags.end(); ++given) {
    for (const std::string_view name : {"hosts", "hostfile", "include", "exclude"}) {
      const auto same = [&](const Given& other) { return other.name == name; };
      if (given->name == name && std::any_of(from_flags.begin(), given, same)) {
        return WrongFlag(*given, "is given twice; give one list, with commas");
      }
    }
  }
  return Status::Ok();
}

// The ranks of an MPI are as many to its end as at its start.
Status CheckElastic(LaunchOptions* options) {
  const auto refuse = [](const std::string& flag, const std::string& why) {
    return Status(StatusCode::kInvalidArgument,
                  flag + " cannot be given for an elastic job: " + why);
  };
  const bool is_mpis =
      options->mpi || (options->launcher != "auto" && options->launcher != "sirtakirun");
  if (is_mpis) {
    return refuse(options->Called(options->mpi ? "mpi" : "launcher"),
                  "sirtakirun starts its ranks itself, since MPI cannot go on without one of them");
  }
  if (options->max_restarts > 0) {
    return refuse(options->Called("max-restarts"), "it goes on with the ranks that are left");
  }
  if (options->oversubscribe) {
    return refuse(options->Called("oversubscribe"), "give the hosts as many slots as ranks");
  }
  const std::string script = options->Called("host-discovery-script");
  if (!options->host_discovery_script.empty() &&
      (!options->hosts.empty() || !options->hostfile.empty())) {
    return refuse(
        options->Called(options->hosts.empty() ? "hostfile" : "hosts") + " beside " + script,
        "the script names the hosts");
  }
  if (!options->host_discovery_script.empty() &&
      (!options->include.empty() || !options->exclude.empty())) {
    return refuse(
        options->Called(options->include.empty() ? "exclude" : "include") + " beside " + script,
        "the script may name others at any time; let it print only the hosts that are to be used, "
        "or name them with " +
            options->Called("hosts") + " or " + options->Called("hostfile"));
  }
  const int most = options->max_np > 0 ? options->max_np : options->np;
  if (most > 0 && (options->min_np > most || options->np > most)) {
    return refuse(options->Called(options->min_np > most ? "min-np" : "np") + " " +
                      std::to_string(std::max(options->min_np, options->np)),
                  "the job has at most " + CountText(most, "rank") + " (" +
                      options->Called(options->max_np > 0 ? "max-np" : "np") + ")");
  }
  options->launcher = "sirtakirun";
  return Status::Ok();
}

// Refuses what cannot stand together, once all is known. `*options` has one launcher then.
Status Check(LaunchOptions* given) {
  const LaunchOptions& options = *given;
  const auto both = [](const std::string& one, const std::string& other) {
    return Status(StatusCode::kInvalidArgument,
                  one + " and " + other + " cannot be given together");
  };
  if (!options.hosts.empty() && !options.hostfile.empty()) {
    return both(options.Called("hosts"), options.Called("hostfile"));
  }
  if (!options.include.empty() && !options.exclude.empty()) {
    return both(options.Called("include"), options.Called("exclude"));
  }
  const std::string own = "sirtakirun";
  const bool is_auto = options.launcher == "auto";
  if (options.no_mpi && options.mpi) return both(options.Called("no-mpi"), options.Called("mpi"));
  if ((options.no_mpi && !is_auto && options.launcher != own) ||
      (options.mpi && options.launcher == own)) {
    return both(options.Called(options.mpi ? "mpi" : "no-mpi"),
                options.Called("launcher") + " " + options.launcher);
  }
  if (options.elastic) return CheckElastic(given);
  if (options.no_mpi) given->launcher = own;
  if (options.mpi && is_auto) given->launcher = "mpi";
  return Status::Ok();
}

// Python begins the program again, with Sirtaki under Horovod's name.
Status RunAsHorovod(LaunchOptions* options) {
  std::vector<std::string>& program = options->program;
  if (!options->as_horovod || program.empty()) return Status::Ok();
  const std::string name = program.front().substr(program.front().find_last_of('/') + 1);
  if (!name.starts_with("python")) {
    return {StatusCode::kInvalidArgument,
            options->Called("as-horovod") + " needs a Python program, as in \"python train.py\"; " +
                Quoted(program.front()) + " is none"};
  }
  program.insert(program.begin() + 1, {"-m", "sirtaki.horovod"});
  return Status::Ok();
}

}  // namespace

Status ParseOptions(const std::vector<std::string>& args, const core::FileReader& read,
                    LaunchOptions* out) {
  LaunchOptions options;
  std::vector<Given> from_flags;
  std::vector<Given> from_file;
  Status status = FlagReader(args).Read(&from_flags, &options.program);
  if (status.ok()) status = ReadConfigFile(from_flags, read, &from_file);
  if (status.ok()) status = RefuseTwice(from_flags);
  if (status.ok()) status = Apply(from_file, &options);
  for (const Given& given : from_file) options.from_file[given.name] = given.from;
  for (const Given& given : from_flags) options.from_file.erase(given.name);
  if (status.ok()) {
    ForgetOverruled(from_flags, &options);
    status = Apply(from_flags, &options);
  }
  if (status.ok()) status = Check(&options);
  if (status.ok()) status = RunAsHorovod(&options);
  if (status.ok()) *out = std::move(options);
  return status;
}

bool LaunchOptions::ChoosesFolder() const {
  return std::any_of(mpi_args.begin(), mpi_args.end(), [](const std::string& word) {
    return word.starts_with("-wd") || word.starts_with("--wd") || word == "-D" ||
           word.starts_with("--chdir");
  });
}

std::string HelpText() {
  namespace po = boost::program_options;
  std::ostringstream text;
  text << "sirtakirun [flag...] program [argument...]\n"
          "Starts the program on several ranks, of this host or of several.\n\n"
          "  sirtakirun -np 4 ./train --epochs 3\n"
          "  sirtakirun -H a:4,b:4 ./train\n";
  for (const OptionGroup& group : OptionGroups()) {
    po::options_description description(group.title, 100, 60);
    for (const OptionRow& row : group.rows) {
      std::string names = row.name;
      if (row.letter != 0) names.append(",").append(1, row.letter);
      if (row.IsSwitch()) {
        description.add_options()(names.c_str(), row.help.c_str());
      } else {
        description.add_options()(names.c_str(), po::value<std::string>()->value_name(row.value),
                                  row.help.c_str());
      }
    }
    text << "\n" << description;
  }
  return text.str();
}

}  // namespace sirtaki::launch
