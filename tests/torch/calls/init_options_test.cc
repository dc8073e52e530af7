// Each setter of InitOptions sets the option of its name, in a text that the parser takes.
#include "sirtaki/init_options.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>

#include "core/config/config.h"

namespace sirtaki::tests {
namespace {

core::Config ConfigOf(const InitOptions& options) {
  core::Config config;
  const core::Status status = core::ParseConfig({}, {}, options.values(), &config, nullptr);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return config;
}

TEST(InitOptionsTest, SettersSetTheOptionOfTheirName) {
  const auto options = InitOptions()
                           .fusion_bytes(1 << 20)
                           .small_bytes(1000)
                           .chunk_bytes(5000)
                           .bucket_bytes(0)
                           .first_bucket_bytes(7)
                           .pool_bytes(1 << 21)
                           .timeline_bytes(5000)
                           .fusion_delay(std::chrono::microseconds(3))
                           .start_timeout(std::chrono::minutes(2))
                           .stall_warning(std::chrono::milliseconds(500))
                           .stall_limit(std::chrono::hours(1))
                           .ping_interval(std::chrono::seconds(3))
                           .peer_timeout(std::chrono::seconds(4))
                           .metrics_interval(std::chrono::seconds(5))
                           .nccl_limit(std::chrono::seconds(6))
                           .id_capacity(9)
                           .tree_arity(3)
                           .intra_op_threads(2)
                           .nccl_direct(false)
                           .nccl_max_ctas(6)
                           .log_time(false)
                           .deterministic()
                           .autotune()
                           .summary()
                           .verify_transfers()
                           .wait("spin")
                           .log_level("debug")
                           .shared_memory("required")
                           .transport("mpi")
                           .medium("mpi")
                           .mpi_family("none")
                           .hierarchy("on")
                           .allocator("off")
                           .gradient_arena("plain")
                           .shard("none")
                           .nccl_cta_policy("zero")
                           .timeline("a")
                           .metrics_file("b")
                           .flight_records("c")
                           .autotune_log("d");
  std::set<std::string> names;
  for (const auto& [name, value] : options.values()) names.insert(name);
  EXPECT_EQ(names.size(), options.values().size()) << "each sets another option";
  const core::Config config = ConfigOf(options);
  EXPECT_EQ(config.fusion_bytes, 1 << 20);
  EXPECT_EQ(config.small_bytes, 1000);
  EXPECT_EQ(config.bucket_bytes, 0);
  EXPECT_EQ(config.fusion_delay, std::chrono::microseconds(3));
  EXPECT_EQ(config.start_timeout, std::chrono::minutes(2));
  EXPECT_EQ(config.stall_warning, std::chrono::milliseconds(500));
  EXPECT_EQ(config.stall_limit, std::chrono::hours(1));
  EXPECT_EQ(config.tree_arity, 3);
  EXPECT_FALSE(config.log_time);
  EXPECT_TRUE(config.verify_transfers);
  EXPECT_EQ(config.shared_memory, core::SharedMemoryMode::kRequired);
  EXPECT_EQ(config.metrics_file, "b");
  EXPECT_EQ(InitOptions().settings("e").values().front().first, "settings");
}

TEST(InitOptionsTest, TheTextualSetterSetsTheSame) {
  EXPECT_EQ(
      ConfigOf(InitOptions().set("stall_limit", "10min").set("tree_arity", 2).set("summary", true)),
      ConfigOf(InitOptions().stall_limit(std::chrono::minutes(10)).tree_arity(2).summary()));
}

}  // namespace
}  // namespace sirtaki::tests
