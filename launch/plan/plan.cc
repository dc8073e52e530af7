#include "launch/plan/plan.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <set>
#include <string_view>

#include "core/base/text.h"
#include "core/config/config_table.h"
#include "core/machine/start_notice.h"
#include "launch/base/shell_text.h"
#include "launch/plan/plan_impl.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

const char* const kNotPrinted = "...";
constexpr auto kOperatorWait = std::chrono::minutes(10);

Status Wrong(const std::string& text) { return {StatusCode::kInvalidArgument, text}; }

// A rank that starts ranks would take the outer run's variables for its own.
Status RefuseInsideOfARank(const core::EnvironmentView& env) {
  for (const std::string_view name :
       {std::string_view("OMPI_COMM_WORLD_RANK"), std::string_view("MPI_LOCALRANKID"),
        core::kStartNoticeVariable}) {
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
      writer->SetSecret(text.substr(0, equals), text.substr(equals + 1),
                        "-x; the value is not printed");
    }
  }
  if (options.elastic) writer->Set(std::string(kElasticJobVariable), "1", "an elastic job");
  if (writer->input().restarts > 0) {
    writer->Set("TORCHELASTIC_RESTART_COUNT", std::to_string(writer->input().restarts),
                "as torchrun sets it");
  }
  const Networks& networks = writer->networks();
  const std::string nccl = "NCCL_SOCKET_IFNAME";
  const bool is_free =
      !writer->input().environment.Find(nccl) &&
      std::none_of(options.exports.begin(), options.exports.end(),
                   [&nccl](const std::string& one) { return one.starts_with(nccl + "="); });
  if (is_free && !options.network_interfaces.empty()) {
    writer->Set(nccl, "=" + Joined(options.network_interfaces, ","),
                "the interfaces of --network-interfaces");
  }
  if (is_free && !networks.avoided.empty()) {
    writer->Set(nccl, "^" + networks.avoided,
                "these interfaces are excluded; NCCL chooses among the rest");
  }
  if (!networks.subnet.empty()) {
    writer->Set(std::string(kNetworkVariable), networks.subnet,
                "each rank sets " + nccl + " to its host's interface in it");
  }
}

// Launchers take ssh's arguments apart at blanks, and know no quotes.
Status CheckSshWords(const LaunchOptions& options) {
  for (const std::string& word : SshArguments(options)) {
    if (word.empty() || word.find_first_of(" \t\n") != std::string::npos) {
      return Wrong("ssh's argument " + core::Quoted(word) +
                   " has a blank, which mpirun cannot hand on: put it into an ssh config, and name "
                   "that with --ssh-args \"-F FILE\"");
    }
  }
  return Status::Ok();
}

// Within a job of Slurm mpirun reaches the job's hosts, and no others.
Status CheckAllocation(const PlanInput& input, const Placement& placement) {
  const HostList& allocated = placement.allocated;
  const bool is_srun = input.launcher.kind == LauncherKind::kSrun;  // which has more to say of it
  if (placement.system != BatchSystem::kSlurm || allocated.empty() || is_srun) return Status::Ok();
  for (const Host& host : placement.hosts) {
    const auto is_it = [&host](const Host& one) { return one.name == host.name; };
    if (IsAddress(host.name) || std::any_of(allocated.begin(), allocated.end(), is_it) ||
        IsThisMachine(host.name, input.machine)) {
      continue;
    }
    return Wrong("host " + core::Quoted(host.name) + " is not among this job's, which are " +
                 HostsText(allocated));
  }
  return Status::Ok();
}

// Finds what makes the launcher use another program than ssh; empty if nothing does.
std::string OtherThanSsh(const PlanInput& input) {
  for (const char* name : {"OMPI_MCA_plm_rsh_agent", "OMPI_MCA_orte_rsh_agent",
                           "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC",
                           "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"}) {
    const auto value = input.environment.Find(name);
    if (value && *value != "ssh") return std::string(name) + "=" + *value;
  }
  for (const std::string& word : input.options.mpi_args) {
    for (const char* name : {"plm_rsh_agent", "plm_ssh_agent", "-launcher", "-launcher-exec"}) {
      if (word == name) return "--mpi-args " + word;
    }
  }
  return "";
}

// Which hosts are to be asked before the start.
void ChooseChecks(const PlanWriter& writer, Plan* plan) {
  if (!writer.UsesSsh()) return;
  const PlanInput& input = writer.input();
  std::string why_not = plan->own ? "" : OtherThanSsh(input);
  if (!input.options.check_hosts) why_not = "--check-hosts=false";
  if (!why_not.empty()) {
    plan->reasons.push_back({"no host is asked before the start", why_not});
    return;
  }
  plan->to_check.reserve(plan->placement.hosts.size());
  for (const Host& host : plan->placement.hosts) {
    if (!IsThisMachine(host.name, input.machine)) plan->to_check.push_back(host.name);
  }
  if (plan->to_check.empty()) return;  // others come later
  plan->reasons.push_back({"asked before the start, over ssh", Joined(plan->to_check, ", ")});
  // There the launcher may be up before the workers are.
  const bool in_operator = input.environment.Find("K_MPI_JOB_ROLE").has_value();
  const bool given = input.options.wait_for_hosts >= 0;
  if (given) plan->wait = std::chrono::seconds(input.options.wait_for_hosts);
  if (!given && in_operator) plan->wait = kOperatorWait;
  if (plan->wait > core::Duration::zero()) {
    plan->reasons.push_back(
        {"waiting up to " + core::DurationText(plan->wait) + " until they answer",
         given ? "--wait-for-hosts" : "K_MPI_JOB_ROLE is set, by Kubeflow's MPI Operator"});
  }
}

// Open MPI 4 does so, wherever it is named.
void PutThisMachineFirst(const PlanInput& input, Plan* plan) {
  HostList& hosts = plan->placement.hosts;
  const auto is_here = [&input](const Host& host) {
    return IsThisMachine(host.name, input.machine);
  };
  const auto here = std::find_if(hosts.begin(), hosts.end(), is_here);
  if (here == hosts.begin() || here == hosts.end()) return;
  plan->reasons.push_back(
      {here->name + " first", "Open MPI fills the machine that it runs on first"});
  std::rotate(hosts.begin(), here, here + 1);
}

// The words for a launcher as they may be printed, since values of variables may be secret.
std::vector<std::string> WithoutValues(std::vector<std::string> words) {
  const auto hide = [](std::string* word, std::size_t from) {
    const std::size_t equals = word->find('=', from);
    if (equals != std::string::npos) word->replace(equals + 1, std::string::npos, kNotPrinted);
    return equals != std::string::npos;
  };
  constexpr std::string_view kExport = "--export=";
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i].starts_with(kExport)) hide(&words[i], kExport.size());
    if (i + 1 == words.size()) break;
    const std::string name =
        words[i].substr(std::min(words[i].size(), words[i].find_first_not_of('-')));
    if (name == "x" || name == "export" || name == "mca_base_env_list") hide(&words[i + 1], 0);
    if (name != "env" && name != "genv") continue;
    const bool has_value = hide(&words[i + 1], 0);  // "NAME=value", else "NAME value"
    if (!has_value && i + 2 < words.size()) words[i + 2] = kNotPrinted;
  }
  return words;
}

// IsOfOneHost says whether the variable belongs to this host, to who is logged in here, or to what has
// started sirtakirun: other hosts have their own.
bool IsOfOneHost(std::string_view name) {
  constexpr std::array<std::string_view, 17> kNames = {
      "KRB5CCNAME", "_",     "HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL",    "OLDPWD",    "PWD",
      "SHELL",      "SHLVL", "TEMP", "TMP",  "TMPDIR",   "USER",    "DISPLAY", "XAUTHORITY"};
  constexpr std::array<std::string_view, 18> kPrefixes = {
      "BASH_FUNC_", "SSH_",  "XDG_", "DBUS_",     "SLURM",       "SBATCH_",
      "SALLOC_",    "SRUN_", "PBS_", "LSB_",      "PMI",         "OMPI_",
      "PRTE_",      "ORTE_", "HYD",  "MPI_LOCAL", "KUBERNETES_", "K_MPI_"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end() ||
         std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [name](std::string_view prefix) { return name.starts_with(prefix); });
}

}  // namespace

void PlanWriter::Add(const std::vector<std::string>& words, const std::string& why) {
  if (words.empty()) return;
  // The words behind the launcher's are the program's.
  const bool is_program = std::count(plan_.command.begin(), plan_.command.end(), kRankFlag) > 0;
  std::vector<std::string> quoted;
  for (const std::string& word : is_program ? words : WithoutValues(words)) {
    quoted.push_back(ShellQuoted(word));
  }
  plan_.command.insert(plan_.command.end(), words.begin(), words.end());
  plan_.reasons.push_back({Joined(quoted, " "), why});
}

void PlanWriter::Set(const std::string& name, const std::string& value, const std::string& why) {
  exports_.insert(name);
  SetForLauncher(name, value, why);
}

void PlanWriter::SetSecret(const std::string& name, const std::string& value,
                           const std::string& why) {
  exports_.insert(name);
  plan_.secret.insert(name);
  plan_.environment.emplace_back(name, value);
  plan_.reasons.push_back({name + "=" + kNotPrinted, why});
}

void PlanWriter::Export(const std::string& name) {
  if (input_.environment.FindEvenEmpty(name)) {
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
  std::set<std::string> names;
  constexpr std::array<std::string_view, 15> kPrefixes = {
      "SIRTAKI_", "HOROVOD_", "NCCL_", "TORCH_",    "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_",
      "KMP_",     "GOMP_",    "MKL_",  "OPENBLAS_", "UCX_",     "FI_",   "CONDA_"};
  for (const std::string_view prefix : kPrefixes) {
    for (const std::string& name : input_.environment.NamesWithPrefix(prefix)) names.insert(name);
  }
  for (const char* name : {"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH",
                           "PYTHONUNBUFFERED", "VIRTUAL_ENV", "MASTER_ADDR", "MASTER_PORT"}) {
    if (input_.environment.Find(name)) names.insert(name);
  }
  if (options().as_horovod) {
    for (const std::string& name : input_.environment.NamesWithPrefix("")) {
      if (!IsOfOneHost(name)) names.insert(name);
    }
  }
  names.erase("CUDA_VISIBLE_DEVICES");  // other hosts may have given this job other GPUs
  names.insert(exports_.begin(), exports_.end());
  names.insert({std::string(kAddressVariable), std::string(kKeyVariable)});
  if (!options().ChoosesFolder()) names.emplace(kFolderVariable);
  return {names.begin(), names.end()};
}

std::string PlanWriter::SshWord() const {
  const auto seconds = std::chrono::ceil<std::chrono::seconds>(input_.start_timeout).count();
  return Joined(SshArguments(options()), " ") + " -o ConnectTimeout=" + std::to_string(seconds) +
         " -o ServerAliveInterval=5";
}

bool PlanWriter::CoresAreShared() const {
  return placement().local && placement().ranks > input_.machine.cores;
}

std::vector<std::string> SshArguments(const LaunchOptions& options) {
  // It must fail rather than ask for a password where nobody sees it.
  std::vector<std::string> words = {"-o", "BatchMode=yes"};
  if (options.ssh_port != 0) words.insert(words.end(), {"-p", std::to_string(options.ssh_port)});
  if (!options.ssh_identity_file.empty()) {
    words.insert(words.end(), {"-i", options.ssh_identity_file});
  }
  words.insert(words.end(), options.ssh_args.begin(), options.ssh_args.end());
  return words;
}

Status MakePlan(const PlanInput& input, Plan* out) {
  if (input.options.program.empty()) return Wrong("no program was named; --help shows how");
  Status status = RefuseInsideOfARank(input.environment);
  if (!status.ok()) return status;
  Plan plan;
  status = Place(input.options, input.environment, input.read, input.machine, input.gone,
                 &plan.placement);
  plan.own = input.launcher.kind == LauncherKind::kOwn;
  if (status.ok() && !plan.placement.local && !plan.own) status = CheckSshWords(input.options);
  if (status.ok()) status = CheckAllocation(input, plan.placement);
  if (!status.ok()) return status;
  if (input.launcher.kind == LauncherKind::kOpenMpi4) PutThisMachineFirst(input, &plan);
  PlanWriter writer(input, ChooseNetworks(input, plan.placement), &plan);
  plan.interfaces = writer.networks().interfaces;
  plan.network = writer.networks().text;
  const std::string& why = input.launcher.why;
  writer.Add({input.launcher.path}, input.launcher.ToString() + (why.empty() ? "" : ", " + why));
  AddEnvironment(&writer);
  switch (input.launcher.kind) {
    case LauncherKind::kOpenMpi4:
      AddOpenMpi4(&writer);
      break;
    case LauncherKind::kOpenMpi5:
      AddOpenMpi5(&writer);
      break;
    case LauncherKind::kMpich:
    case LauncherKind::kIntel:
      AddHydra(&writer);
      break;
    case LauncherKind::kSrun:
      status = AddSrun(&writer);
      break;
    case LauncherKind::kOwn:
      status = AddOwn(&writer);
      break;
  }
  if (!status.ok()) return status;
  if (const std::string& why_not = writer.networks().why_not; !why_not.empty()) {
    plan.reasons.push_back({"no network is chosen for MPI", why_not});
  }
  writer.Add(input.options.mpi_args, "--mpi-args");
  writer.Add({input.self, std::string(kRankFlag), "--"},
             "wraps each rank: its output, its exit code, torchrun's variables");
  writer.Add(input.options.program, "the program");
  if (input.launcher.kind != LauncherKind::kSrun) ChooseChecks(writer, &plan);
  *out = std::move(plan);
  return Status::Ok();
}

std::string PlanText(const Plan& plan) {
  std::string text;
  for (const auto& [name, value] : plan.environment) {
    text += name + "=" + (plan.secret.contains(name) ? kNotPrinted : ShellQuoted(value)) + " ";
  }
  const auto program = std::find(plan.command.begin(), plan.command.end(), kRankFlag);
  std::vector<std::string> words = WithoutValues({plan.command.begin(), program});
  words.insert(words.end(), program, plan.command.end());
  for (std::string& word : words) word = ShellQuoted(word);
  text += Joined(words, " ") + "\n";
  for (const Reason& reason : plan.reasons) text += "  " + reason.what + ": " + reason.why + "\n";
  return text;
}

}  // namespace sirtaki::launch
