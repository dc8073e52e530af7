#include "core/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/config/config_table.h"
#include "tests/support/test_scale.h"

namespace sirtaki::core {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Args = std::vector<std::string>;

constexpr std::int64_t kMiB = 1 << 20;

Config ParsedOrDie(const Args& args, const EnvironmentView& env = {},
                   const ProgramOptions& program = {}) {
  Config config;
  const Status status = ParseConfig(args, env, program, &config, nullptr);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return config;
}

std::string ErrorOf(const Args& args, const EnvironmentView& env = {},
                    const ProgramOptions& program = {}) {
  Config config;
  const Status status = ParseConfig(args, env, program, &config, nullptr);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(config, Config{}) << "an error leaves the result as it was";
  return status.message();
}

TEST(ConfigTest, DefaultsAreThoseOfTheDocumentation) {
  const Config config = ParsedOrDie({});
  EXPECT_EQ(config.fusion_bytes, 64 * kMiB);
  EXPECT_EQ(config.small_bytes, 65536);
  EXPECT_EQ(config.chunk_bytes, kMiB);
  EXPECT_EQ(config.id_capacity, 16384);
  EXPECT_EQ(config.tree_arity, 8);
  EXPECT_EQ(config.stall_warning, 60s);
  EXPECT_EQ(config.stall_limit, 30min);
  EXPECT_EQ(config.fusion_delay, 50us);
  EXPECT_EQ(config.start_timeout, 30s);
  EXPECT_EQ(config.ping_interval, 2s);
  EXPECT_EQ(config.peer_timeout, 10s);
  EXPECT_EQ(config.wait, WaitMode::kAuto);
  EXPECT_EQ(config.log_level, LogLevel::kWarning);
  EXPECT_TRUE(config.log_time);
  EXPECT_EQ(config.intra_op_threads, 0);
  EXPECT_EQ(config.shared_memory, SharedMemoryMode::kAuto);
  EXPECT_EQ(config.transport, TransportMode::kAuto);
  EXPECT_EQ(config.medium, MediumChoice::kAuto);
  EXPECT_EQ(config.mpi_family, MpiChoice::kAuto);
  EXPECT_EQ(config.hierarchy, HierarchyMode::kAuto);
  EXPECT_EQ(config.allocator, AllocatorMode::kAuto);
  EXPECT_EQ(config.pool_bytes, 0);
  EXPECT_EQ(config.bucket_bytes, 16 * kMiB);
  EXPECT_EQ(config.first_bucket_bytes, kMiB);
  EXPECT_EQ(config.gradient_arena, GradientArenaMode::kAuto);
  EXPECT_EQ(config.nccl_limit, 5min);
  EXPECT_TRUE(config.nccl_direct);
  EXPECT_EQ(config.nccl_max_ctas, 0);
  EXPECT_EQ(config.nccl_cta_policy, NcclCtaPolicy::kDefault);
  EXPECT_EQ(config.shard, ShardMode::kProgram);
  EXPECT_FALSE(config.deterministic);
  EXPECT_FALSE(config.autotune);
  EXPECT_EQ(config.autotune_log, "");
  EXPECT_EQ(config.timeline, "");
  EXPECT_EQ(config.timeline_bytes, 256 * kMiB);
  EXPECT_EQ(config.flight_records, "auto");
  EXPECT_EQ(config.metrics_file, "");
  EXPECT_EQ(config.metrics_interval, 10s);
  EXPECT_FALSE(config.summary);
  EXPECT_FALSE(config.verify_transfers);
  EXPECT_EQ(config.settings, "");
  EXPECT_TRUE(config.sources.empty());
  EXPECT_EQ(DescribeConfig(config), "defaults");
}

TEST(ConfigTest, EveryOptionCanBeGivenInEveryWay) {
  struct Example {
    const char* flag;
    const char* variable;
    const char* name;
    const char* value;
    bool (*is_set)(const Config&);
  };
  const Example examples[] = {
      {"--sirtaki-fusion-bytes", "SIRTAKI_FUSION_BYTES", "fusion_bytes", "32M",
       [](const Config& c) { return c.fusion_bytes == 32 * kMiB; }},
      {"--sirtaki-small-bytes", "SIRTAKI_SMALL_BYTES", "small_bytes", "4K",
       [](const Config& c) { return c.small_bytes == 4096; }},
      {"--sirtaki-chunk-bytes", "SIRTAKI_CHUNK_BYTES", "chunk_bytes", "2M",
       [](const Config& c) { return c.chunk_bytes == 2 * kMiB; }},
      {"--sirtaki-id-capacity", "SIRTAKI_ID_CAPACITY", "id_capacity", "17",
       [](const Config& c) { return c.id_capacity == 17; }},
      {"--sirtaki-tree-arity", "SIRTAKI_TREE_ARITY", "tree_arity", "2",
       [](const Config& c) { return c.tree_arity == 2; }},
      {"--sirtaki-stall-warning", "SIRTAKI_STALL_WARNING", "stall_warning", "0",
       [](const Config& c) { return c.stall_warning == 0s; }},
      {"--sirtaki-stall-limit", "SIRTAKI_STALL_LIMIT", "stall_limit", "5min",
       [](const Config& c) { return c.stall_limit == 5min; }},
      {"--sirtaki-start-timeout", "SIRTAKI_START_TIMEOUT", "start_timeout", "7",
       [](const Config& c) { return c.start_timeout == 7s; }},
      {"--sirtaki-ping-interval", "SIRTAKI_PING_INTERVAL", "ping_interval", "250ms",
       [](const Config& c) { return c.ping_interval == 250ms; }},
      {"--sirtaki-peer-timeout", "SIRTAKI_PEER_TIMEOUT", "peer_timeout", "1.5s",
       [](const Config& c) { return c.peer_timeout == 1500ms; }},
      {"--sirtaki-wait", "SIRTAKI_WAIT", "wait", "yield",
       [](const Config& c) { return c.wait == WaitMode::kYield; }},
      {"--sirtaki-log-level", "SIRTAKI_LOG_LEVEL", "log_level", "Debug",
       [](const Config& c) { return c.log_level == LogLevel::kDebug; }},
      {"--sirtaki-log-time", "SIRTAKI_LOG_TIME", "log_time", "off",
       [](const Config& c) { return !c.log_time; }},
      {"--sirtaki-intra-op-threads", "SIRTAKI_INTRA_OP_THREADS", "intra_op_threads", "3",
       [](const Config& c) { return c.intra_op_threads == 3; }},
      {"--sirtaki-shared-memory", "SIRTAKI_SHARED_MEMORY", "shared_memory", "required",
       [](const Config& c) { return c.shared_memory == SharedMemoryMode::kRequired; }},
      {"--sirtaki-fusion-delay", "SIRTAKI_FUSION_DELAY", "fusion_delay", "100us",
       [](const Config& c) { return c.fusion_delay == 100us; }},
      {"--sirtaki-transport", "SIRTAKI_TRANSPORT", "transport", "mpi",
       [](const Config& c) { return c.transport == TransportMode::kMpi; }},
      {"--sirtaki-medium", "SIRTAKI_MEDIUM", "medium", "tcp",
       [](const Config& c) { return c.medium == MediumChoice::kTcp; }},
      {"--sirtaki-mpi-family", "SIRTAKI_MPI_FAMILY", "mpi_family", "mpich",
       [](const Config& c) { return c.mpi_family == MpiChoice::kMpich; }},
      {"--sirtaki-hierarchy", "SIRTAKI_HIERARCHY", "hierarchy", "on",
       [](const Config& c) { return c.hierarchy == HierarchyMode::kOn; }},
      {"--sirtaki-allocator", "SIRTAKI_ALLOCATOR", "allocator", "off",
       [](const Config& c) { return c.allocator == AllocatorMode::kOff; }},
      {"--sirtaki-pool-bytes", "SIRTAKI_POOL_BYTES", "pool_bytes", "1G",
       [](const Config& c) { return c.pool_bytes == 1024 * kMiB; }},
      {"--sirtaki-bucket-bytes", "SIRTAKI_BUCKET_BYTES", "bucket_bytes", "8M",
       [](const Config& c) { return c.bucket_bytes == 8 * kMiB; }},
      {"--sirtaki-first-bucket-bytes", "SIRTAKI_FIRST_BUCKET_BYTES", "first_bucket_bytes", "2M",
       [](const Config& c) { return c.first_bucket_bytes == 2 * kMiB; }},
      {"--sirtaki-gradient-arena", "SIRTAKI_GRADIENT_ARENA", "gradient_arena", "plain",
       [](const Config& c) { return c.gradient_arena == GradientArenaMode::kPlain; }},
      {"--sirtaki-shard", "SIRTAKI_SHARD", "shard", "gradients",
       [](const Config& c) { return c.shard == ShardMode::kGradients; }},
      {"--sirtaki-nccl-limit", "SIRTAKI_NCCL_LIMIT", "nccl_limit", "20min",
       [](const Config& c) { return c.nccl_limit == 20min; }},
      {"--sirtaki-nccl-direct", "SIRTAKI_NCCL_DIRECT", "nccl_direct", "0",
       [](const Config& c) { return !c.nccl_direct; }},
      {"--sirtaki-nccl-max-ctas", "SIRTAKI_NCCL_MAX_CTAS", "nccl_max_ctas", "8",
       [](const Config& c) { return c.nccl_max_ctas == 8; }},
      {"--sirtaki-nccl-cta-policy", "SIRTAKI_NCCL_CTA_POLICY", "nccl_cta_policy", "zero",
       [](const Config& c) { return c.nccl_cta_policy == NcclCtaPolicy::kZero; }},
      {"--sirtaki-deterministic", "SIRTAKI_DETERMINISTIC", "deterministic", "true",
       [](const Config& c) { return c.deterministic; }},
      {"--sirtaki-autotune", "SIRTAKI_AUTOTUNE", "autotune", "1",
       [](const Config& c) { return c.autotune; }},
      {"--sirtaki-autotune-log", "SIRTAKI_AUTOTUNE_LOG", "autotune_log", "tuned.csv",
       [](const Config& c) { return c.autotune_log == "tuned.csv"; }},
      {"--sirtaki-timeline", "SIRTAKI_TIMELINE", "timeline", "traces",
       [](const Config& c) { return c.timeline == "traces"; }},
      {"--sirtaki-timeline-bytes", "SIRTAKI_TIMELINE_BYTES", "timeline_bytes", "2M",
       [](const Config& c) { return c.timeline_bytes == 2 * kMiB; }},
      {"--sirtaki-flight-records", "SIRTAKI_FLIGHT_RECORDS", "flight_records", "off",
       [](const Config& c) { return c.flight_records == "off"; }},
      {"--sirtaki-metrics-file", "SIRTAKI_METRICS_FILE", "metrics_file", "metrics.prom",
       [](const Config& c) { return c.metrics_file == "metrics.prom"; }},
      {"--sirtaki-metrics-interval", "SIRTAKI_METRICS_INTERVAL", "metrics_interval", "2s",
       [](const Config& c) { return c.metrics_interval == 2s; }},
      {"--sirtaki-summary", "SIRTAKI_SUMMARY", "summary", "yes",
       [](const Config& c) { return c.summary; }},
      {"--sirtaki-verify-transfers", "SIRTAKI_VERIFY_TRANSFERS", "verify_transfers", "on",
       [](const Config& c) { return c.verify_transfers; }},
      {"--sirtaki-settings", "SIRTAKI_SETTINGS", "settings", "/dev/null",
       [](const Config& c) { return c.settings == "/dev/null"; }},
  };
  ASSERT_EQ(std::size(examples), OptionTable().size());
  for (const Example& example : examples) {
    SCOPED_TRACE(example.name);
    const Config by_flag = ParsedOrDie({std::string(example.flag) + "=" + example.value});
    EXPECT_TRUE(example.is_set(by_flag));
    EXPECT_EQ(by_flag.SourceOf(example.name), OptionSource::kFlag);
    const Config by_variable = ParsedOrDie({}, {{example.variable, example.value}});
    EXPECT_TRUE(example.is_set(by_variable));
    EXPECT_EQ(by_variable.SourceOf(example.name), OptionSource::kVariable);
    const Config by_program = ParsedOrDie({}, {}, {{example.name, example.value}});
    EXPECT_TRUE(example.is_set(by_program));
    EXPECT_EQ(by_program.SourceOf(example.name), OptionSource::kProgram);
  }
}

// A file that is gone when the test is over.
class SettingsFile {
 public:
  explicit SettingsFile(const std::string& text)
      : path_(::testing::TempDir() + "settings-" + std::to_string(getpid())) {
    std::ofstream(path_) << text;
  }
  ~SettingsFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

TEST(ConfigTest, SettingsComeFromAFile) {
  const SettingsFile file(
      "# found by the autotuner\n"
      "\n"
      "bucket_bytes: 8M   # per bucket\n"
      "  small_bytes :32K\r\n"
      "fusion_bytes: 1M\n");
  const Config config =
      ParsedOrDie({"--sirtaki-settings=" + file.path(), "--sirtaki-fusion-bytes=2M"},
                  {{"HOROVOD_CACHE_CAPACITY", "9"}});
  EXPECT_EQ(config.bucket_bytes, 8 * kMiB);
  EXPECT_EQ(config.SourceOf("bucket_bytes"), OptionSource::kFile);
  EXPECT_EQ(config.small_bytes, 32768);
  EXPECT_EQ(config.fusion_bytes, 2 * kMiB) << "the flag is stronger";
  EXPECT_EQ(config.id_capacity, 9);
}

TEST(ConfigTest, AWrongSettingsFileIsRefusedByItsLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"small_bytes 3\n", "line 1: expected \"option: value\""},
      {"\n\nsmal_bytes: 3\n",
       "line 3: unknown option smal_bytes; the nearest known is small_bytes"},
      {"small_bytes: much\n", "line 1: option small_bytes cannot be \"much\""},
      {"settings: x\n", "line 1: unknown option settings"},
  };
  for (const auto& [text, message] : cases) {
    const SettingsFile file(text);
    Config config;
    const Status status = ParseConfig({}, {}, {{"settings", file.path()}}, &config, nullptr);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
  }
  for (const std::string path : {"/no/such", "/"}) {
    Config config;
    const Status status = ParseConfig({}, {}, {{"settings", path}}, &config, nullptr);
    EXPECT_EQ(status.message(),
              "the file of the option settings, \"" + path + "\": it cannot be read");
  }
}

TEST(ConfigTest, TheProgramBeatsFlagsBeatVariablesBeatHorovods) {
  EnvironmentView env = {{"HOROVOD_FUSION_THRESHOLD", "1"}};
  EXPECT_EQ(ParsedOrDie({}, env).fusion_bytes, 1);
  env.Set("SIRTAKI_FUSION_BYTES", "2");
  EXPECT_EQ(ParsedOrDie({}, env).fusion_bytes, 2);
  EXPECT_EQ(ParsedOrDie({"--sirtaki-fusion-bytes=3"}, env).fusion_bytes, 3);
  EXPECT_EQ(ParsedOrDie({"--sirtaki-fusion-bytes=3"}, env, {{"fusion_bytes", "4"}}).fusion_bytes,
            4);
}

TEST(ConfigTest, TheLastOfTheSameFlagCounts) {
  EXPECT_EQ(ParsedOrDie({"--sirtaki-tree-arity=2", "--sirtaki-tree-arity=3"}).tree_arity, 3);
}

TEST(ConfigTest, OtherArgumentsAreLeftToTheProgram) {
  Config config;
  std::vector<bool> ours;
  ASSERT_TRUE(ParseConfig({"train", "--epochs=3", "--sirtaki-tree-arity=2", "data.csv", "--",
                           "--sirtaki-x"},
                          {}, {}, &config, &ours)
                  .ok());
  EXPECT_THAT(ours, ElementsAre(false, false, true, false, false, false));
  EXPECT_EQ(config.tree_arity, 2);
}

TEST(ConfigTest, ASwitchNeedsNoValue) {
  EXPECT_TRUE(ParsedOrDie({"--sirtaki-log-time"}, {{"SIRTAKI_LOG_TIME", "0"}}).log_time);
}

// Those of the tests, the scripts, the benchmarks, the build and sirtakirun.
TEST(ConfigTest, TheProjectsOwnVariablesAreIgnoredInSilence) {
  for (const char* name :
       {"SIRTAKI_JOBS", "SIRTAKI_PYTHON", "SIRTAKI_CUDA", "SIRTAKI_UNITY", "SIRTAKI_MPIRUN_FLAGS",
        "SIRTAKI_TEST_SEED", "SIRTAKI_TEST_SECONDS", "SIRTAKI_TEST_WRITE_DOCS",
        "SIRTAKI_BOOTSTRAP_WITH", "SIRTAKI_BOOTSTRAP_TORCH", "SIRTAKI_BOOTSTRAP_APT",
        "SIRTAKI_BENCH_PYTHON", "SIRTAKI_BENCH_HOROVOD", "SIRTAKI_LAUNCH_ADDRESS",
        "SIRTAKI_LAUNCH_KEY", "SIRTAKI_LAUNCH_FOLDER", "SIRTAKI_LAUNCH_NETWORK"}) {
    const EnvironmentView env = {{name, "1"}};
    EXPECT_EQ(ParsedOrDie({}, env), Config{}) << name;
    EXPECT_EQ(UnknownVariablesWarning(env), "") << name;
  }
}

TEST(ConfigTest, AVariableNearNoOptionIsIgnoredWithAWarning) {
  const EnvironmentView one = {{"SIRTAKI_COMPRESSION", "fp16"}, {"SIRTAKI_JOBS", "2"}};
  EXPECT_EQ(ParsedOrDie({}, one), Config{});
  EXPECT_EQ(UnknownVariablesWarning(one),
            "the environment variable SIRTAKI_COMPRESSION is no option of Sirtaki and changes "
            "nothing (docs/configuration.md lists all)");
  const EnvironmentView two = {
      {"SIRTAKI_TREE_ARITY", "3"}, {"SIRTAKI_X\x07", "1"}, {"SIRTAKI_COMPRESSION", "fp16"}};
  EXPECT_EQ(ParsedOrDie({}, two).tree_arity, 3);
  EXPECT_EQ(UnknownVariablesWarning(two),
            "the environment variables SIRTAKI_COMPRESSION, SIRTAKI_X\\x07 are no options of "
            "Sirtaki and change nothing (docs/configuration.md lists all)");
}

TEST(ConfigTest, VariablesOfOthersAreNeitherReadNorWarnedOf) {
  const EnvironmentView env = {{"HOROVOD_CYCLE_TIME", "1"}, {"SIRTAKIS", "1"}, {"PATH", "/bin"}};
  EXPECT_EQ(ParsedOrDie({}, env), Config{});
  EXPECT_EQ(UnknownVariablesWarning(env), "");
}

// CMake's options, which somebody may have exported, stop no rank.
TEST(ConfigTest, ABuildOptionIsNoMisspeltOption) {
  for (const char* name :
       {"SIRTAKI_MPI", "SIRTAKI_TORCH", "SIRTAKI_LAUNCH", "SIRTAKI_TESTS", "SIRTAKI_EXAMPLES",
        "SIRTAKI_BENCHMARKS", "SIRTAKI_SANITIZE", "SIRTAKI_WERROR", "SIRTAKI_PCH", "SIRTAKI_CCACHE",
        "SIRTAKI_CLANG_TIDY", "SIRTAKI_GPU_ARCHITECTURES", "SIRTAKI_MPI_HEADERS",
        "SIRTAKI_STATIC_DEPENDENCIES"}) {
    EXPECT_EQ(ParsedOrDie({}, {{name, "ON"}}), Config{}) << name;
  }
}

TEST(ConfigTest, AVariableSetToNothingIsNotGiven) {
  const EnvironmentView env = {{"SIRTAKI_TREE_ARITY", ""}, {"SIRTAKI_COMPRESSION", ""}};
  EXPECT_EQ(ParsedOrDie({}, env), Config{});
  EXPECT_EQ(UnknownVariablesWarning(env), "");
}

// ---- Horovod's variables ----

TEST(ConfigHorovodTest, VariablesAreConverted) {
  const Config config = ParsedOrDie({}, {{"HOROVOD_FUSION_THRESHOLD", "33554432"},
                                         {"HOROVOD_CACHE_CAPACITY", "100"},
                                         {"HOROVOD_STALL_CHECK_TIME_SECONDS", "5"},
                                         {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0"},
                                         {"HOROVOD_START_TIMEOUT", "7"},
                                         {"HOROVOD_LOG_LEVEL", "info"},
                                         {"HOROVOD_LOG_HIDE_TIME", "1"}});
  EXPECT_EQ(config.fusion_bytes, 32 * kMiB);
  EXPECT_EQ(config.id_capacity, 100);
  EXPECT_EQ(config.stall_warning, 5s);
  EXPECT_EQ(config.stall_limit, 0s);
  EXPECT_EQ(config.start_timeout, 7s);
  EXPECT_EQ(config.log_level, LogLevel::kInfo);
  EXPECT_FALSE(config.log_time);
  EXPECT_EQ(config.SourceOf("log_time"), OptionSource::kHorovod);
  EXPECT_TRUE(config.IsExplicit("fusion_bytes"));
}

TEST(ConfigHorovodTest, TheStallCheckCanBeDisabled) {
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_STALL_CHECK_DISABLE", "1"},
                             {"HOROVOD_STALL_CHECK_TIME_SECONDS", "5"}})
                .stall_warning,
            0s);
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_STALL_CHECK_DISABLE", "0"},
                             {"HOROVOD_STALL_CHECK_TIME_SECONDS", "5"}})
                .stall_warning,
            5s);
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_STALL_CHECK_DISABLE", "0"}}), Config{});
}

TEST(ConfigHorovodTest, TheHierarchyCanBeAskedFor) {
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_HIERARCHICAL_ALLREDUCE", "1"}}).hierarchy,
            HierarchyMode::kOn);
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_HIERARCHICAL_ALLREDUCE", "0"}}), Config{});
}

TEST(ConfigHorovodTest, WhatHorovodAllowsAndWeDoNotIsMadeToFit) {
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_CACHE_CAPACITY", "0"}}).id_capacity, 1);
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_LOG_LEVEL", "fatal"}}).log_level, LogLevel::kError);
}

TEST(ConfigHorovodTest, ATimelineThatTheProgramBeginsLaterIsNoFolder) {
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_TIMELINE", "DYNAMIC"}}), Config{});
  EXPECT_EQ(ParsedOrDie({}, {{"HOROVOD_TIMELINE", "traces"}}).timeline, "traces");
  EXPECT_EQ(ParsedOrDie({}, {{"SIRTAKI_TIMELINE", "DYNAMIC"}}).timeline, "DYNAMIC");
}

TEST(ConfigHorovodTest, WhatIsOverruledIsNotRead) {
  EXPECT_EQ(
      ParsedOrDie({}, {{"HOROVOD_FUSION_THRESHOLD", "rubbish"}, {"SIRTAKI_FUSION_BYTES", "5"}})
          .fusion_bytes,
      5);
}

TEST(ConfigHorovodTest, ABadValueNamesHorovodsVariable) {
  EXPECT_THAT(ErrorOf({}, {{"HOROVOD_FUSION_THRESHOLD", "rubbish"}}),
              AllOf(HasSubstr("fusion_bytes"), HasSubstr("HOROVOD_FUSION_THRESHOLD"),
                    HasSubstr("\"rubbish\"")));
  EXPECT_THAT(ErrorOf({}, {{"HOROVOD_LOG_HIDE_TIME", "perhaps"}}),
              AllOf(HasSubstr("HOROVOD_LOG_HIDE_TIME"), HasSubstr("0 or 1")));
}

// ---- errors ----

TEST(ConfigErrorTest, ABadValueNamesOptionValueOriginAndWhatIsAllowed) {
  EXPECT_EQ(
      ErrorOf({"--sirtaki-tree-arity=0"}),
      "option tree_arity cannot be \"0\" (from --sirtaki-tree-arity); allowed is a whole number "
      "from 1 to 1024");
  EXPECT_EQ(
      ErrorOf({}, {{"SIRTAKI_FUSION_BYTES", "64Q"}}),
      "option fusion_bytes cannot be \"64Q\" (from SIRTAKI_FUSION_BYTES); allowed is a size from 0 "
      "to 1024G, in bytes or with K, M or G (powers of 1024)");
  EXPECT_EQ(
      ErrorOf({}, {}, {{"stall_limit", "-1"}}),
      "option stall_limit cannot be \"-1\" (from the program); allowed is 0 (never), or a time "
      "from 1ms to 525600min, in seconds or with us, ms, s or min");
  EXPECT_EQ(
      ErrorOf({"--sirtaki-pool-bytes=5"}),
      "option pool_bytes cannot be \"5\" (from --sirtaki-pool-bytes); allowed is 0 (the rank's "
      "share of the host's memory), or a size from 1M to 1048576G, in bytes or with K, M or G "
      "(powers of 1024)");
  EXPECT_EQ(
      ErrorOf({"--sirtaki-wait=sleep"}),
      "option wait cannot be \"sleep\" (from --sirtaki-wait); allowed is one of auto, spin, yield");
  EXPECT_EQ(
      ErrorOf({"--sirtaki-intra-op-threads=0"}),
      "option intra_op_threads cannot be \"0\" (from --sirtaki-intra-op-threads); allowed is auto, "
      "or a whole number from 1 to 4096");
}

TEST(ConfigErrorTest, AnUnknownNameSuggestsTheNearest) {
  EXPECT_THAT(ErrorOf({"--sirtaki-fusion-byte=1"}),
              AllOf(HasSubstr("unknown flag --sirtaki-fusion-byte;"),
                    HasSubstr("nearest known is --sirtaki-fusion-bytes ")));
  EXPECT_THAT(ErrorOf({}, {{"SIRTAKI_LOGLEVEL", "info"}}),
              AllOf(HasSubstr("unknown environment variable SIRTAKI_LOGLEVEL;"),
                    HasSubstr("nearest known is SIRTAKI_LOG_LEVEL ")));
  EXPECT_THAT(
      ErrorOf({}, {}, {{"tree_artiy", "2"}}),
      AllOf(HasSubstr("unknown option tree_artiy;"), HasSubstr("nearest known is tree_arity ")));
}

TEST(ConfigErrorTest, AFarFetchedNameIsNotSuggested) {
  EXPECT_EQ(ErrorOf({"--sirtaki-turbo=1"}),
            "unknown flag --sirtaki-turbo (docs/configuration.md lists all)");
  EXPECT_EQ(ErrorOf({}, {}, {{"gpu", "1"}}),
            "unknown option gpu (docs/configuration.md lists all)");
  // Two letters of four, four of twelve: near. Of what has a prefix only the rest counts.
  EXPECT_THAT(ErrorOf({"--sirtaki-wuut=spin"}), HasSubstr("nearest known is --sirtaki-wait "));
  EXPECT_THAT(ErrorOf({}, {}, {{"stallimit", "9"}}), HasSubstr("nearest known is stall_limit "));
  EXPECT_THAT(ErrorOf({}, {}, {{"fusion_b1234", "9"}}),
              HasSubstr("nearest known is fusion_bytes "));
  EXPECT_EQ(ErrorOf({}, {}, {{"fusion_12345", "9"}}),
            "unknown option fusion_12345 (docs/configuration.md lists all)");
}

TEST(ConfigErrorTest, WhatWasGivenIsEscaped) {
  EXPECT_THAT(ErrorOf({"--sirtaki-turbo\x07=1"}), HasSubstr("flag --sirtaki-turbo\\x07 "));
  EXPECT_THAT(ErrorOf({"--sirtaki-wait=s\nx"}), HasSubstr("cannot be \"s\\nx\" (from"));
}

TEST(ConfigErrorTest, AFlagWithoutItsValueSaysHowToGiveOne) {
  EXPECT_THAT(ErrorOf({"--sirtaki-tree-arity", "2"}), HasSubstr("--sirtaki-tree-arity=VALUE"));
}

// ---- values ----

std::optional<std::int64_t> Value(std::string_view option, std::string_view text) {
  return ParseOptionValue(*FindOption(option), text);
}

TEST(ConfigValueTest, SizesTakePowersOf1024) {
  EXPECT_EQ(Value("fusion_bytes", "0"), 0);
  EXPECT_EQ(Value("fusion_bytes", "100"), 100);
  EXPECT_EQ(Value("fusion_bytes", "3k"), 3072);
  EXPECT_EQ(Value("fusion_bytes", "1.5M"), 1572864);
  EXPECT_EQ(Value("fusion_bytes", "2G"), std::int64_t{2} << 30);
  EXPECT_EQ(Value("fusion_bytes", "1024G"), std::int64_t{1} << 40);
}

TEST(ConfigValueTest, TimesTakeUnitsAndAreSecondsWithout) {
  const auto us = [](std::string_view text) { return Value("stall_limit", text); };
  EXPECT_EQ(us("2"), 2000000);
  EXPECT_EQ(us("0.5"), 500000);
  EXPECT_EQ(us("1500us"), 1500);
  EXPECT_EQ(us("20ms"), 20000);
  EXPECT_EQ(us("3s"), 3000000);
  EXPECT_EQ(us("1.5min"), 90000000);
}

TEST(ConfigValueTest, WhatIsNoNumberIsRefused) {
  for (const char* text : {"",
                           " ",
                           "M",
                           "-1",
                           "+1",
                           "1e3",
                           "0x10",
                           "1 M",
                           "1MM",
                           ".5",
                           "1.",
                           "1..5",
                           "1.5",
                           "0.3K",
                           "nan",
                           "inf",
                           "1025G",
                           "99999999999999999999",
                           "9223372036854775807G",
                           "1.00000000000000000000001K"}) {
    EXPECT_EQ(Value("fusion_bytes", text), std::nullopt) << text;
  }
  for (const char* text : {"", "s", "1h", "-1s", "1us", "0.1us", "525601min", "1m"}) {
    EXPECT_EQ(Value("stall_limit", text), std::nullopt) << text;
  }
  for (const char* text : {"", "1.5", "8x", "1025", "0"}) {
    EXPECT_EQ(Value("tree_arity", text), std::nullopt) << text;
  }
}

TEST(ConfigValueTest, SwitchesTakeTheUsualWords) {
  for (const char* text : {"1", "true", "YES", "on"}) {
    EXPECT_EQ(Value("log_time", text), 1);
  }
  for (const char* text : {"0", "False", "no", "off"}) {
    EXPECT_EQ(Value("log_time", text), 0);
  }
  EXPECT_EQ(Value("log_time", "2"), std::nullopt);
}

TEST(ConfigValueTest, TextsOfValuesReadBack) {
  std::mt19937_64 random(tests::TestSeed());
  for (const OptionSpec& option : OptionTable()) {
    if (option.kind == OptionKind::kText) continue;
    for (int i = 0; i < 200; ++i) {
      const auto span = static_cast<std::uint64_t>(option.max - option.min) + 1;
      const std::int64_t value =
          option.min + static_cast<std::int64_t>((random() >> (random() % 64)) % span);
      if (!IsAllowedValue(option, value)) continue;
      EXPECT_EQ(ParseOptionValue(option, FormatOptionValue(option, value)), value) << option.name;
    }
    for (const std::int64_t value : {option.min, option.max}) {
      EXPECT_EQ(ParseOptionValue(option, FormatOptionValue(option, value)), value) << option.name;
    }
  }
}

TEST(ConfigTableTest, RowsAreWhole) {
  std::set<std::string_view> names;
  for (const OptionSpec& option : OptionTable()) {
    EXPECT_TRUE(names.insert(option.name).second) << option.name;
    EXPECT_EQ(FindOption(option.name), &option);
    if (option.kind != OptionKind::kText) {
      EXPECT_TRUE(IsAllowedValue(option, option.get(Config{}))) << option.name;
    }
    EXPECT_EQ(option.text != nullptr, option.kind == OptionKind::kText);
    EXPECT_FALSE(option.agreed && option.text != nullptr) << "texts are each rank's own";
    EXPECT_FALSE(option.help.empty());
  }
}

TEST(ConfigTableTest, WhatHorovodSaysIsAnAllowedValue) {
  for (const HorovodAlias& alias : HorovodAliases()) {
    const OptionSpec* option = FindOption(alias.option);
    ASSERT_NE(option, nullptr) << alias.option;
    EXPECT_FALSE(alias.variable.empty() && alias.flag.empty());
    for (const std::string_view value : {alias.on, alias.off}) {
      EXPECT_TRUE(value.empty() || ParseOptionValue(*option, value)) << alias.option;
    }
  }
}

// ---- agreement ----

TEST(ConfigAgreeTest, RankZerosValueIsTakenEverywhere) {
  const Config ranks[] = {ParsedOrDie({"--sirtaki-fusion-bytes=1M", "--sirtaki-log-level=debug"}),
                          ParsedOrDie({"--sirtaki-log-level=info"})};
  Config mine = ranks[1];
  ASSERT_TRUE(AgreeConfigs(ranks, &mine).ok());
  EXPECT_EQ(mine.fusion_bytes, kMiB);
  EXPECT_EQ(mine.log_level, LogLevel::kInfo) << "each rank's own";
}

TEST(ConfigAgreeTest, AnExplicitDifferentValueIsRefusedNamingBoth) {
  const Config other = ParsedOrDie({}, {{"SIRTAKI_FUSION_BYTES", "32M"}});
  const Config ranks[] = {ParsedOrDie({}), ParsedOrDie({}), other, other};
  Config agreed;
  const Status status = AgreeConfigs(ranks, &agreed);
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_EQ(
      status.message(),
      "option fusion_bytes must be the same on all ranks: rank 0 has 64M (the default), ranks 2-3 "
      "have 32M (from SIRTAKI_FUSION_BYTES)");
  EXPECT_EQ(agreed, Config{});
}

TEST(ConfigAgreeTest, OneRankThatDiffersIsNamed) {
  const Config ranks[] = {ParsedOrDie({"--sirtaki-tree-arity=4"}),
                          ParsedOrDie({"--sirtaki-tree-arity=4"}),
                          ParsedOrDie({}, {}, {{"tree_arity", "2"}})};
  Config agreed;
  EXPECT_EQ(
      AgreeConfigs(ranks, &agreed).message(),
      "option tree_arity must be the same on all ranks: rank 0 has 4 (from --sirtaki-tree-arity), "
      "rank 2 has 2 (from the program)");
}

TEST(ConfigAgreeTest, TheSameValueFromElsewhereIsFine) {
  const Config ranks[] = {ParsedOrDie({}), ParsedOrDie({}, {{"SIRTAKI_FUSION_BYTES", "65536K"}})};
  Config agreed;
  EXPECT_TRUE(AgreeConfigs(ranks, &agreed).ok());
}

TEST(ConfigAgreeTest, OptionsOfEachRanksOwnMayDiffer) {
  const Config ranks[] = {ParsedOrDie({"--sirtaki-wait=spin"}),
                          ParsedOrDie({"--sirtaki-wait=yield"})};
  Config agreed = ranks[1];
  EXPECT_TRUE(AgreeConfigs(ranks, &agreed).ok());
  EXPECT_EQ(agreed.wait, WaitMode::kYield);
}

// ---- exchange ----

TEST(ConfigSerializeTest, ComesBackAsItWas) {
  const Config config = ParsedOrDie({"--sirtaki-log-time=false", "--sirtaki-stall-limit=0"},
                                    {{"SIRTAKI_WAIT", "yield"}, {"HOROVOD_FUSION_THRESHOLD", "7"}},
                                    {{"intra_op_threads", "5"}});
  const std::string bytes = SerializeConfig(config);
  EXPECT_LT(bytes.size(), 150U);
  Config received;
  ASSERT_TRUE(DeserializeConfig(bytes, &received).ok());
  EXPECT_EQ(received, config);
}

TEST(ConfigSerializeTest, HostileBytesDoNoHarm) {
  std::mt19937_64 random(tests::TestSeed());
  const std::string good = SerializeConfig(Config{});
  const int count = tests::ScaledCount(5000, 100000);
  for (int i = 0; i < count; ++i) {
    std::string bytes = good;
    switch (random() % 3) {
      case 0:
        bytes.resize(random() % (good.size() + 4));
        break;
      case 1:
        bytes[random() % bytes.size()] = static_cast<char>(random());
        break;
      default:
        for (std::size_t j = 8; j < bytes.size(); ++j) bytes[j] = static_cast<char>(random() % 8);
    }
    Config config;
    const Status status = DeserializeConfig(bytes, &config);
    if (status.ok()) {
      for (const OptionSpec& option : OptionTable()) {
        if (option.kind == OptionKind::kText) continue;
        ASSERT_TRUE(IsAllowedValue(option, option.get(config))) << option.name;
      }
    } else {
      ASSERT_EQ(status.code(), StatusCode::kProtocol);
      ASSERT_EQ(config, Config{});
    }
  }
}

TEST(ConfigSerializeTest, AnotherVersionsOptionsAreRefusedWithAReason) {
  std::string bytes = SerializeConfig(Config{});
  bytes[0] = static_cast<char>(bytes[0] ^ 1);
  Config config;
  EXPECT_THAT(DeserializeConfig(bytes, &config).message(), HasSubstr("versions of Sirtaki"));
}

TEST(ConfigDescribeTest, SaysWhatIsNotADefaultAndWhy) {
  EXPECT_EQ(
      DescribeConfig(ParsedOrDie({"--sirtaki-tree-arity=2"}, {{"HOROVOD_LOG_LEVEL", "info"}})),
      "tree_arity=2 (from --sirtaki-tree-arity), log_level=info (from HOROVOD_LOG_LEVEL)");
}

}  // namespace
}  // namespace sirtaki::core
