#include "launch/plan.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <set>

#include "core/config_table.h"
#include "core/text.h"
#include "launch/plan_parts.h"
#include "launch/words.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

Status Wrong(const std::string& text) { return {StatusCode::kInvalidArgument, text}; }

// A rank that starts ranks would take the outer run's variables for its own.
Status RefuseInsideOfARank(const core::EnvironmentView& env) {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"}) {
    if (const auto value = env.Find(name)) {
      return Wrong(std::string(name) + "=" + *value +
                   " is set: this is a rank of another run already, and cannot start one");
    }
  }
  return Status::Ok();
}

void AddEnvironment(PlanWriter* writer) {
  const LaunchOptions& options = writer->options();
  for (const auto& [name, value] : options.knobs) writer->Set(name, value, "an option of Sirtaki");
  for (const std::string& text : options.exports) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) {
      writer->Export(text);
    } else {
      writer->Set(text.substr(0, equals), text.substr(equals + 1), "-x");
    }
  }
  if (writer->input().restarts > 0) {
    writer->Set("TORCHELASTIC_RESTART_COUNT", std::to_string(writer->input().restarts),
                "as torchrun tells it");
  }
  const std::string nccl = "NCCL_SOCKET_IFNAME";
  if (!options.network_interfaces.empty() && !writer->input().environment.Find(nccl)) {
    writer->Set(nccl, "=" + writer->Interfaces(), "the interfaces of --network-interfaces");
  }
}

}  // namespace

void PlanWriter::Add(const std::vector<std::string>& words, const std::string& why) {
  if (words.empty()) return;
  std::vector<std::string> quoted;
  for (const std::string& word : words) quoted.push_back(ShellQuoted(word));
  plan_.command.insert(plan_.command.end(), words.begin(), words.end());
  plan_.reasons.push_back({Joined(quoted, " "), why});
}

void PlanWriter::Set(const std::string& name, const std::string& value, const std::string& why) {
  exports_.insert(name);
  SetForLauncher(name, value, why);
}

void PlanWriter::Export(const std::string& name) {
  if (input_.environment.Find(name)) {
    exports_.insert(name);
  } else {
    plan_.reasons.push_back({"-x " + name, "left out: it is not set here"});
  }
}

void PlanWriter::SetForLauncher(const std::string& name, const std::string& value,
                                const std::string& why) {
  plan_.environment.emplace_back(name, value);
  plan_.reasons.push_back({name + "=" + ShellQuoted(value), why});
}

std::vector<std::string> PlanWriter::Travelling() const {
  std::set<std::string> names = exports_;
  names.insert({std::string(kAddressVariable), std::string(kKeyVariable)});
  constexpr std::array<std::string_view, 13> kPrefixes = {
      "SIRTAKI_", "HOROVOD_", "NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_",
      "KMP_",     "GOMP_",    "MKL_",  "UCX_",   "FI_",      "CONDA_"};
  for (const std::string_view prefix : kPrefixes) {
    for (const std::string& name : input_.environment.NamesWithPrefix(prefix)) names.insert(name);
  }
  for (const char* name : {"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV",
                           "MASTER_ADDR", "MASTER_PORT"}) {
    if (input_.environment.Find(name)) names.insert(name);
  }
  return {names.begin(), names.end()};
}

bool PlanWriter::UsesSsh() const {
  return !placement().local && placement().system == BatchSystem::kNone;
}

std::vector<std::string> PlanWriter::SshArguments() const {
  const LaunchOptions& given = options();
  // It must fail rather than ask for a password where nobody sees it.
  std::vector<std::string> words = {"-o", "BatchMode=yes"};
  if (given.ssh_port != 0) words.insert(words.end(), {"-p", std::to_string(given.ssh_port)});
  if (!given.ssh_identity_file.empty()) {
    words.insert(words.end(), {"-i", given.ssh_identity_file});
  }
  words.insert(words.end(), given.ssh_args.begin(), given.ssh_args.end());
  // What is left of it behind a link that is down must end as well.
  words.insert(words.end(), {"-o", "ServerAliveInterval=5"});
  return words;
}

std::string PlanWriter::Interfaces() const { return Joined(options().network_interfaces, ","); }

bool PlanWriter::CoresAreShared() const {
  return placement().local && placement().ranks > input_.machine.cores;
}

Status MakePlan(const PlanInput& input, Plan* out) {
  if (input.options.program.empty()) return Wrong("no program was named; --help shows how");
  Status status = RefuseInsideOfARank(input.environment);
  if (!status.ok()) return status;
  Plan plan;
  status = Place(input.options, input.environment, input.read, input.machine, input.gone,
                 &plan.placement);
  if (!status.ok()) return status;
  PlanWriter writer(input, &plan);
  writer.Add({input.launcher.path}, input.launcher.ToString());
  AddEnvironment(&writer);
  switch (input.launcher.kind) {
    case LauncherKind::kOpenMpi4:
      AddOpenMpi4(&writer);
      break;
    case LauncherKind::kOpenMpi5:
      AddOpenMpi5(&writer);
      break;
    case LauncherKind::kMpich:
      AddMpich(&writer);
      break;
    case LauncherKind::kSrun:
      status = AddSrun(&writer);
      break;
  }
  if (!status.ok()) return status;
  writer.Add(input.options.mpi_args, "--mpi-args");
  writer.Add({input.self, std::string(kRankFlag), "--"},
             "stands around each rank: its output, its end, torchrun's variables");
  writer.Add(input.options.program, "the program");
  *out = std::move(plan);
  return Status::Ok();
}

std::string PlanText(const Plan& plan) {
  std::string text;
  for (const auto& [name, value] : plan.environment) text += name + "=" + ShellQuoted(value) + " ";
  for (const std::string& word : plan.command) {
    text += ShellQuoted(word);
    text += &word == &plan.command.back() ? "\n" : " ";
  }
  for (const Reason& reason : plan.reasons) text += "  " + reason.what + ": " + reason.why + "\n";
  return text;
}

}  // namespace sirtaki::launch
