// Everything about the library that can be chosen. One table (config_table.cc) feeds the parser,
// the messages, and docs/configuration.md.
//
// A value is taken from the first of: the program's options, flags, SIRTAKI_* variables, HOROVOD_*
// variables, the file that the option settings names, the default. A Config is a value; any thread
// may read it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::core {

enum class WaitMode : std::uint8_t { kAuto, kSpin, kYield };
enum class SharedMemoryMode : std::uint8_t { kAuto, kOff, kRequired };
enum class TransportMode : std::uint8_t { kAuto, kMpi };
enum class MediumChoice : std::uint8_t { kAuto, kMpi, kTcp };
enum class MpiChoice : std::uint8_t { kAuto, kOpenMpi, kMpich, kAbi, kNone };
enum class HierarchyMode : std::uint8_t { kAuto, kOff, kOn };
enum class AllocatorMode : std::uint8_t { kAuto, kOff, kOn };
enum class GradientArenaMode : std::uint8_t { kAuto, kPlain, kOff };
enum class ShardMode : std::uint8_t { kProgram, kNone, kOptimizer, kGradients };
enum class NcclCtaPolicy : std::uint8_t { kDefault, kEfficiency, kZero };

// Words of the option flight_records that are no folder.
inline constexpr std::string_view kAutoFlightRecords = "auto";
inline constexpr std::string_view kNoFlightRecords = "off";

// Where an option's value came from. Everything but kDefault is explicit.
enum class OptionSource : std::uint8_t { kDefault, kFile, kHorovod, kVariable, kFlag, kProgram };

// Each option says once what it does, and its limits: in the table, and so in
// docs/configuration.md.
struct Config {
  std::int64_t fusion_bytes = std::int64_t{64} << 20;
  Duration fusion_delay = std::chrono::microseconds(50);  // zero: at once
  std::int64_t small_bytes = std::int64_t{64} << 10;
  std::int64_t chunk_bytes = std::int64_t{1} << 20;
  std::int64_t id_capacity = 16384;
  Duration stall_warning = std::chrono::seconds(60);  // zero: never
  Duration stall_limit = std::chrono::minutes(30);    // zero: never
  Duration start_timeout = std::chrono::seconds(30);
  Duration ping_interval = std::chrono::seconds(2);
  Duration peer_timeout = std::chrono::seconds(10);
  int tree_arity = 8;
  int intra_op_threads = 0;  // zero: auto
  WaitMode wait = WaitMode::kAuto;
  LogLevel log_level = LogLevel::kWarning;
  bool log_time = true;
  SharedMemoryMode shared_memory = SharedMemoryMode::kAuto;
  TransportMode transport = TransportMode::kAuto;
  MediumChoice medium = MediumChoice::kAuto;
  MpiChoice mpi_family = MpiChoice::kAuto;
  HierarchyMode hierarchy = HierarchyMode::kAuto;
  AllocatorMode allocator = AllocatorMode::kAuto;
  std::int64_t pool_bytes = 0;                         // zero: auto
  std::int64_t bucket_bytes = std::int64_t{16} << 20;  // zero: no buckets
  std::int64_t first_bucket_bytes = std::int64_t{1} << 20;
  GradientArenaMode gradient_arena = GradientArenaMode::kAuto;
  Duration nccl_limit = std::chrono::minutes(5);
  bool nccl_direct = true;
  int nccl_max_ctas = 0;  // zero: auto
  NcclCtaPolicy nccl_cta_policy = NcclCtaPolicy::kDefault;
  ShardMode shard = ShardMode::kProgram;
  bool deterministic = false;
  bool autotune = false;
  std::string autotune_log;
  std::string timeline;                                   // none: no timeline
  std::int64_t timeline_bytes = std::int64_t{256} << 20;  // zero: as long as it gets
  std::string flight_records = std::string(kAutoFlightRecords);
  std::string metrics_file;  // none: no file
  Duration metrics_interval = std::chrono::seconds(10);
  bool summary = false;
  bool verify_transfers = false;
  std::string settings;

  // Sources are kept by the options' names, which the table holds; an option without one has its
  // default.
  std::map<std::string_view, OptionSource> sources;

  void SetSource(std::string_view option, OptionSource source) {
    sources.erase(option);
    if (source != OptionSource::kDefault) sources.emplace(option, source);
  }
  OptionSource SourceOf(std::string_view option) const {
    const auto found = sources.find(option);
    return found == sources.end() ? OptionSource::kDefault : found->second;
  }
  bool IsExplicit(std::string_view option) const {
    return SourceOf(option) != OptionSource::kDefault;
  }
  bool operator==(const Config&) const = default;
};

// Options that the program itself gives, by name: {"fusion_bytes", "64M"}.
using ProgramOptions = std::vector<std::pair<std::string, std::string>>;

// Sets `*out` from the defaults and what is given, and `*ours` (may be null) to whether each argument
// is ours: --sirtaki-name=value, and nothing from "--" on. Of the same flag twice the last counts.
// kInvalidArgument for an unknown flag or program's option, for an unknown SIRTAKI_ variable that is
// near an option's name, and so most likely a misspelt one, and for a value out of bounds: says which
// option, which value, where it came from, and what is allowed. Never throws. On error `*out` is as it
// was.
Status ParseConfig(const std::vector<std::string>& args, const EnvironmentView& env,
                   const ProgramOptions& program, Config* out, std::vector<bool>* ours);

// The warning that names the SIRTAKI_ variables which are neither options nor the project's own;
// empty if there are none. For an environment that ParseConfig accepts: none of them is misspelt.
std::string UnknownVariablesWarning(const EnvironmentView& env);

// AgreeConfigs sets those options of `*agreed` that all ranks must have alike to rank 0's, and
// leaves the others. kMismatch if another rank has an explicit value that differs: names the
// option, both ranks, both values and where they came from. The same result on every rank.
// Precondition: by_rank is not empty.
Status AgreeConfigs(std::span<const Config> by_rank, Config* agreed);

// The bytes of a configuration are exchanged between ranks. Deserialising survives any bytes
// (kProtocol) and refuses the bytes of a version of the library with other options.
std::string SerializeConfig(const Config& config);
Status DeserializeConfig(std::string_view bytes, Config* config);

// "fusion_bytes=32M (from SIRTAKI_FUSION_BYTES), tree_arity=2 (from the program)": what is not a
// default; "defaults" if nothing is.
std::string DescribeConfig(const Config& config);

}  // namespace sirtaki::core
