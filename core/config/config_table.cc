#include "core/config/config_table.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <type_traits>
#include <vector>

#include "core/config/config_units.h"

namespace sirtaki::core {
namespace {

using Reading = HorovodAlias::Reading;

constexpr std::int64_t kHour = 60 * kMinute;
constexpr std::int64_t kDay = 24 * kHour;

// The texts stand in the order of the enumerations of config.h.
constexpr std::array<std::string_view, 3> kWaits = {"auto", "spin", "yield"};
constexpr std::array<std::string_view, 3> kSharedMemories = {"auto", "off", "required"};
constexpr std::array<std::string_view, 3> kMedia = {"auto", "mpi", "tcp"};
constexpr std::array<std::string_view, 2> kTransports = {"auto", "mpi"};
constexpr std::array<std::string_view, 5> kMpis = {"auto", "openmpi", "mpich", "abi", "none"};
constexpr std::array<std::string_view, 3> kHierarchies = {"auto", "off", "on"};
constexpr std::array<std::string_view, 3> kAllocators = {"auto", "off", "on"};
constexpr std::array<std::string_view, 3> kGradientArenas = {"auto", "plain", "off"};
constexpr std::array<std::string_view, 4> kShardModes = {"program", "none", "optimizer",
                                                         "gradients"};
constexpr std::array<std::string_view, 3> kNcclCtaPolicies = {"default", "efficiency", "zero"};

// clang-format off
constexpr HorovodAlias kAliases[] = {
    {"fusion_bytes", "HOROVOD_FUSION_THRESHOLD", "", ""},
    {"fusion_bytes", "", "fusion-threshold-mb", "MB", Reading::kMebibytes},
    {"id_capacity", "HOROVOD_CACHE_CAPACITY", "cache-capacity", "N", Reading::kRaisedToMin},
    {"hierarchy", "HOROVOD_HIERARCHICAL_ALLREDUCE", "hierarchical-allreduce", "", {}, "on", ""},
    {"hierarchy", "", "no-hierarchical-allreduce", "", {}, "off", ""},
    {"autotune", "HOROVOD_AUTOTUNE", "", ""},
    {"autotune", "", "no-autotune", "", {}, "false", ""},
    {"autotune_log", "HOROVOD_AUTOTUNE_LOG", "autotune-log-file", "FILE"},
    {"timeline", "HOROVOD_TIMELINE", "timeline-filename", "FILE", Reading::kNotDynamic},
    {"stall_warning", "HOROVOD_STALL_CHECK_DISABLE", "no-stall-check", "", {}, "0", ""},
    {"stall_warning", "", "stall-check", "", {}, "", "0"},
    {"stall_warning", "HOROVOD_STALL_CHECK_TIME_SECONDS", "stall-check-warning-time-seconds", "S"},
    {"stall_limit", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall-check-shutdown-time-seconds", "S"},
    {"start_timeout", "HOROVOD_START_TIMEOUT", "", ""},
    {"log_level", "HOROVOD_LOG_LEVEL", "", ""},
    {"log_time", "HOROVOD_LOG_HIDE_TIME", "", "", {}, "false", "true"},
    {"log_time", "", "log-hide-timestamp", "", {}, "false", ""},
    {"log_time", "", "log-with-timestamp", "", {}, "true", "false"},
    {"log_time", "", "log-without-timestamp", "", {}, "false", ""},
    {"log_time", "", "no-log-hide-timestamp", "", {}, "true", ""},
};
// clang-format on

template <auto Member>
std::int64_t Get(const Config& config) {
  using Value = std::remove_cvref_t<decltype(config.*Member)>;
  if constexpr (std::is_same_v<Value, Duration>) {
    return std::chrono::duration_cast<std::chrono::microseconds>(config.*Member).count();
  } else {
    return static_cast<std::int64_t>(config.*Member);
  }
}

template <auto Member>
void Set(Config& config, std::int64_t value) {
  using Value = std::remove_cvref_t<decltype(config.*Member)>;
  if constexpr (std::is_same_v<Value, Duration>) {
    config.*Member = std::chrono::microseconds(value);
  } else {
    config.*Member = static_cast<Value>(value);
  }
}

// One row of the table while it is put together.
struct RowOf {
  OptionSpec row;
  RowOf& Between(std::int64_t min, std::int64_t max) {
    row.min = min;
    row.max = max;
    return *this;
  }
  RowOf& ZeroIs(std::string_view meaning) {
    row.zero = meaning;
    return *this;
  }
  RowOf& Agreed() {
    row.agreed = true;
    return *this;
  }
  RowOf& OneOf(std::span<const std::string_view> choices) {
    row.choices = choices;
    return Between(0, static_cast<std::int64_t>(choices.size()) - 1);
  }
  operator OptionSpec() { return row; }  // NOLINT: so that the table reads as rows
};

// A row begins from its field, which also holds the default.
template <auto Member>
RowOf Option(std::string_view name, OptionKind kind, std::string_view help) {
  RowOf option;
  option.row.name = name;
  option.row.kind = kind;
  option.row.help = help;
  option.row.get = &Get<Member>;
  option.row.set = &Set<Member>;
  return option;
}

template <std::string Config::*Member>
RowOf TextOption(std::string_view name, std::string_view help) {
  RowOf option;
  option.row.name = name;
  option.row.kind = OptionKind::kText;
  option.row.help = help;
  option.row.text = Member;
  return option;
}

// clang-format off
std::vector<OptionSpec> MakeTable() {
  return {
      Option<&Config::fusion_bytes>("fusion_bytes", OptionKind::kBytes,
          "The most that one operation moves: tensors that are ready together are fused up to this "
          "size. A larger tensor goes alone. 0 fuses nothing.")
          .Between(0, 1024 * kGibi).Agreed(),
      Option<&Config::fusion_delay>("fusion_delay", OptionKind::kDuration,
          "Operations that nobody waits for yet are gathered until none has been submitted for this long, "
          "at most for ten times as long: operations submitted in a row are agreed on, and moved, together.")
          .Between(1, kSecond).ZeroIs("at once").Agreed(),
      Option<&Config::small_bytes>("small_bytes", OptionKind::kBytes,
          "Operations up to this size take the small lane, where they never wait behind a large one. "
          "0 sends everything that has a size to the large lane.")
          .Between(0, 16 * kMebi).Agreed(),
      Option<&Config::chunk_bytes>("chunk_bytes", OptionKind::kBytes,
          "A backend that works in pieces carries out a large operation in pieces of this size.")
          .Between(4 * kKibi, kGibi).Agreed(),
      Option<&Config::id_capacity>("id_capacity", OptionKind::kCount,
          "How many tensors of a process set have an agreed short number at a time. More tensors than this "
          "work: the least recently used one loses its number, and its next use is negotiated in full. "
          "Horovod's 0 is taken as 1.")
          .Between(1, 1 << 24).Agreed(),
      Option<&Config::tree_arity>("tree_arity", OptionKind::kCount,
          "How many hosts report to one host in the tree of the negotiation.")
          .Between(1, 1024).Agreed(),
      Option<&Config::stall_warning>("stall_warning", OptionKind::kDuration,
          "After a wait this long for a rank that does not submit a tensor, or for an operation to end, "
          "a warning names the tensor and the ranks.")
          .Between(kMillisecond, 365 * kDay).ZeroIs("never").Agreed(),
      Option<&Config::stall_limit>("stall_limit", OptionKind::kDuration,
          "After a wait this long for a rank that does not submit a tensor, or for an operation to end, "
          "the job fails on every rank. 0: ranks that wait for each other are not found either.")
          .Between(kMillisecond, 365 * kDay).ZeroIs("never").Agreed(),
      Option<&Config::start_timeout>("start_timeout", OptionKind::kDuration,
          "How long init waits for the other ranks.")
          .Between(100 * kMillisecond, kDay),
      Option<&Config::ping_interval>("ping_interval", OptionKind::kDuration,
          "A rank that waits, and has heard nothing from a neighbour for this long, pings it. Nobody is "
          "pinged while nobody waits.")
          .Between(kMillisecond, kDay).Agreed(),
      Option<&Config::peer_timeout>("peer_timeout", OptionKind::kDuration,
          "A rank that is waited for and says nothing for this long, no answer to a ping either, is lost, and "
          "the job fails on every rank.")
          .Between(10 * kMillisecond, kDay).Agreed(),
      Option<&Config::wait>("wait", OptionKind::kChoice,
          "What a short wait does: spin keeps its core, yield lets others run; auto spins only where "
          "the host has a core for each of its ranks.")
          .OneOf(kWaits),
      Option<&Config::log_level>("log_level", OptionKind::kChoice,
          "The least serious level of the messages shown on standard error.")
          .OneOf(kLogLevelNames),
      Option<&Config::log_time>("log_time", OptionKind::kBool,
          "Whether messages begin with the time.")
          .Between(0, 1),
      Option<&Config::intra_op_threads>("intra_op_threads",
          OptionKind::kAutoOrCount,
          "How many threads LibTorch uses within one operation of a rank; auto divides the host's cores "
          "among its ranks, unless the program has chosen.")
          .Between(1, 4096),
      Option<&Config::shared_memory>("shared_memory", OptionKind::kChoice,
          "Whether the ranks of a host reduce in memory that all of them see: auto where they can, off "
          "never, required refuses to start where they cannot.")
          .OneOf(kSharedMemories).Agreed(),
      Option<&Config::transport>("transport", OptionKind::kChoice,
          "How the ranks of a host negotiate: auto over shared memory where there is some, mpi as those of different "
          "hosts do.")
          .OneOf(kTransports).Agreed(),
      Option<&Config::medium>("medium", OptionKind::kChoice,
          "What carries bytes between hosts: mpi; tcp, connections that the ranks make themselves, who find each "
          "other by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and SIRTAKI_SECRET; auto takes MPI where MPI has "
          "started the ranks or the program has initialised it, else TCP where these variables are set.")
          .OneOf(kMedia),
      Option<&Config::mpi_family>("mpi_family", OptionKind::kChoice,
          "Which MPI is opened where the program has none: auto that of the launcher, else the first that the "
          "dynamic linker finds; openmpi, mpich (with Intel MPI and others) or abi (the standard ABI of MPI 5) one "
          "of that family; none opens none, for a job of one rank.")
          .OneOf(kMpis),
      Option<&Config::hierarchy>("hierarchy", OptionKind::kChoice,
          "Whether large reductions and all-gathers between hosts are done within each host first, each rank "
          "then carrying a part over the network: auto and on wherever hosts have several ranks that share memory, off "
          "never. It concerns host memory; reductions of GPU tensors are NCCL's, which does this by itself.")
          .OneOf(kHierarchies).Agreed(),
      Option<&Config::allocator>("allocator", OptionKind::kChoice,
          "Whether LibTorch takes the memory of its large CPU tensors from a pool, which the ranks of the "
          "host share where they can, so that gradients are reduced where they were computed: auto unless "
          "the program has set an allocator of its own, on even then.")
          .OneOf(kAllocators),
      Option<&Config::pool_bytes>("pool_bytes", OptionKind::kBytes,
          "The most memory that the pool of a rank holds; beyond it memory comes from the heap.")
          .Between(kMebi, 1024 * 1024 * kGibi).ZeroIs("the rank's share of the host's memory"),
      Option<&Config::bucket_bytes>("bucket_bytes", OptionKind::kBytes,
          "Gradients are joined in buckets of about this size, each reduced as soon as it is complete on "
          "every rank. 0 makes no buckets: each gradient goes by itself.")
          .Between(0, 1024 * kGibi).Agreed(),
      Option<&Config::first_bucket_bytes>("first_bucket_bytes",
          OptionKind::kBytes,
          "The size of the bucket that is complete first, smaller so that the reduction begins early.")
          .Between(0, 1024 * kGibi).Agreed(),
      Option<&Config::gradient_arena>("gradient_arena", OptionKind::kChoice,
          "Where buckets of gradients on GPUs are reduced: auto in arenas, memory of their own that NCCL "
          "knows; plain in arenas that NCCL is not told of, for machines where registering them fails; off "
          "in staging memory, to which each bucket is copied and from which it is copied back.")
          .OneOf(kGradientArenas).Agreed(),
      Option<&Config::nccl_limit>("nccl_limit", OptionKind::kDuration,
          "How long one call of NCCL may wait for the other ranks: to make a communicator, to connect, to "
          "register memory, to say good-bye. Then the job fails on every rank. What is in a GPU's stream "
          "already is limited by stall_limit.")
          .Between(kMillisecond, kDay).Agreed(),
      Option<&Config::nccl_direct>("nccl_direct", OptionKind::kBool,
          "Whether our own thread makes the calls of NCCL once the ranks are connected. Without it NCCL "
          "starts a thread for each call, which takes 50 us longer; a call then never keeps ours, and "
          "nccl_limit holds for all of them.")
          .Between(0, 1).Agreed(),
      Option<&Config::nccl_max_ctas>("nccl_max_ctas", OptionKind::kAutoOrCount,
          "The most blocks of a GPU that NCCL takes for one operation: fewer leave more of the GPU to the "
          "backward pass; auto is NCCL's own choice. NCCL's variable NCCL_MAX_CTAS wins over it.")
          .Between(1, 64).Agreed(),
      Option<&Config::nccl_cta_policy>("nccl_cta_policy", OptionKind::kChoice,
          "What NCCL 2.27 and later aim at when they choose blocks of a GPU: default speed, efficiency few "
          "blocks, zero (2.28) none where copy engines can do the work. NCCL's variable NCCL_CTA_POLICY "
          "wins over it.")
          .OneOf(kNcclCtaPolicies).Agreed(),
      Option<&Config::shard>("shard", OptionKind::kChoice,
          "What optimizers keep in shards: program what the program says to each of them; none, optimizer "
          "and gradients the same for all, whatever the program says, to try it without a change.")
          .OneOf(kShardModes).Agreed(),
      Option<&Config::deterministic>("deterministic", OptionKind::kBool,
          "Whether the same program gives the same bits in every run, even where MPI would reduce together "
          "whatever is ready: buckets of gradients then follow the order of the parameters, and every "
          "other tensor goes alone. For a resumed run to equal one without a stop, bucket_bytes is 0 as well.")
          .Between(0, 1).Agreed(),
      Option<&Config::autotune>("autotune", OptionKind::kBool,
          "Whether the steps of the first optimizer are used to find better values of bucket_bytes, "
          "chunk_bytes (where gradients are not reduced in shared memory), small_bytes and fusion_delay. Rank "
          "0 prints what a step took before and after and the values found, which are used for the rest of "
          "the run; or why there were no trials, or too few: the option deterministic, one rank, op Adasum "
          "and a process set prevent them, and a search takes 966 steps at most.")
          .Between(0, 1).Agreed(),
      TextOption<&Config::autotune_log>("autotune_log",
          "The file to which rank 0 writes the autotuner's trials (CSV). The values found go to a file with "
          ".settings appended to its name, which the option settings reads."),
      TextOption<&Config::timeline>("timeline",
          "A folder, made if need be, in which each rank writes what it does, from init to shutdown, as a "
          "timeline rank-<number>.json in Chrome's trace format, which https://ui.perfetto.dev shows; or a "
          "file whose name ends in .json, which rank 0 alone writes. Horovod's DYNAMIC leaves the "
          "start to start_timeline."),
      Option<&Config::timeline_bytes>("timeline_bytes", OptionKind::kBytes,
          "The largest size of a rank's timeline. Later events are left out, and its last line says so.")
          .Between(4 * kKibi, 1024 * kGibi).ZeroIs("no limit"),
      TextOption<&Config::flight_records>("flight_records",
          "The folder, made if need be, in which each rank writes flight-<number>.json when something goes "
          "wrong, or at SIGUSR1: what it waits for, what it runs and what it did last, for sirtakirun "
          "--explain. auto is sirtaki-records in the current folder, where a job of one rank writes at SIGUSR1 "
          "only; off writes none, and leaves SIGUSR1 and SIGTERM alone."),
      TextOption<&Config::metrics_file>("metrics_file",
          "A file to which each rank writes its metrics every metrics_interval, and at shutdown; the rank's "
          "number comes before the name's ending. A file ending in .prom has the text format of Prometheus and "
          "is replaced each time; any other is CSV and gets a line each time."),
      Option<&Config::metrics_interval>("metrics_interval",
          OptionKind::kDuration,
          "The time between two writes of metrics_file.")
          .Between(10 * kMillisecond, kDay),
      Option<&Config::summary>("summary", OptionKind::kBool,
          "Whether rank 0 prints, at shutdown, a table of what each rank has done, with advice where the "
          "picture is clear.")
          .Between(0, 1).Agreed(),
      Option<&Config::verify_transfers>("verify_transfers",
          OptionKind::kBool,
          "Whether a checksum goes with what ranks send to one another or show in shared memory, in host memory: "
          "what arrives otherwise than it was sent fails the job, with the tensor, the ranks and the bytes. "
          "Tensors are then copied into shared memory instead of being read where they lie, and hierarchy is off.")
          .Between(0, 1).Agreed(),
      TextOption<&Config::settings>("settings",
          "A file with values of options, a line each, as in \"bucket_bytes: 8M\"; # begins a comment. Every "
          "other way of giving an option wins over it."),
  };
}
// clang-format on

}  // namespace

std::string OptionSpec::Flag() const {
  std::string flag = "--sirtaki-" + std::string(name);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

std::string OptionSpec::Variable() const {
  std::string variable = "SIRTAKI_" + std::string(name);
  for (char& c : variable) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return variable;
}

std::span<const OptionSpec> OptionTable() {
  static const std::vector<OptionSpec> table = MakeTable();
  return table;
}

std::span<const HorovodAlias> HorovodAliases() { return kAliases; }

std::optional<std::string> MeaningOf(const HorovodAlias& alias, const std::string& value) {
  if (alias.IsSwitch()) {
    const std::string_view meaning = ParseBool(value).value_or(false) ? alias.on : alias.off;
    return meaning.empty() ? std::nullopt : std::optional<std::string>(meaning);
  }
  switch (alias.reading) {
    case Reading::kMebibytes:
      return value + "M";
    case Reading::kRaisedToMin:
      return value == "0" ? std::to_string(FindOption(alias.option)->min) : value;
    case Reading::kNotDynamic:
      return value == "DYNAMIC" ? std::nullopt : std::optional(value);
    case Reading::kSame:
      break;
  }
  return value;
}

const OptionSpec* FindOption(std::string_view name) {
  for (const OptionSpec& option : OptionTable()) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

bool IsForeignVariable(std::string_view name) {
  constexpr std::array<std::string_view, 4> kPrefixes = {"SIRTAKI_TEST_", "SIRTAKI_BOOTSTRAP_",
                                                         "SIRTAKI_BENCH_", "SIRTAKI_LAUNCH_"};
  constexpr std::array<std::string_view, 8> kNames = {
      "SIRTAKI_JOBS",   "SIRTAKI_PYTHON",      "SIRTAKI_CUDA", "SIRTAKI_UNITY",
      "SIRTAKI_SECRET", "SIRTAKI_SECRET_FILE", "SIRTAKI_PORT", "SIRTAKI_MPIRUN_FLAGS"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); }) ||
         std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

}  // namespace sirtaki::core
