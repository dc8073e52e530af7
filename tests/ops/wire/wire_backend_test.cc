// Every collective over ports between threads: worlds of many sizes and layouts, and the ways that
// long operations take.
#include "ops/wire/wire_backend.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "ops/inproc/inproc_port.h"
#include "ops/wire/verifying_port.h"
#include "tests/support/backend_conformance.h"
#include "tests/support/rank_threads.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops::wire {
namespace {

using core::DType;
using core::ReduceOp;
using core::Status;
using core::StatusCode;
using tests::RankThreads;

constexpr Channel kSmall{core::kWorldSet, fusion::Lane::kSmall};
constexpr Channel kLarge{core::kWorldSet, fusion::Lane::kLarge};

struct World {
  std::string name;
  std::vector<int> host_of_rank;
  WireOptions options;
  bool verify = false;
};

WireOptions With(const World& world) {
  WireOptions options = world.options;
  options.host_of_rank = world.host_of_rank;
  return options;
}

class WireConformanceTest : public testing::TestWithParam<World> {};

TEST_P(WireConformanceTest, Conforms) {
  const int size = static_cast<int>(GetParam().host_of_rank.size());
  InprocPorts ports(size);
  RankThreads::Run(size, [&](int rank) {
    const std::unique_ptr<Port> port = ports.Connect(rank);
    VerifyingPort verifying(*port);
    WireBackend backend(GetParam().verify ? verifying : *port, With(GetParam()));
    EXPECT_EQ(backend.ScalesReduced(kLarge), size > 1);
    EXPECT_TRUE(backend.ReducesParts(kLarge));
    tests::BackendConformance conformance(backend, rank, size);
    for (const tests::BackendCheck& check : tests::kBackendChecks) {
      SCOPED_TRACE(check.name);
      RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
  });
}

// So short that everything goes in many chunks, and by rings and chains.
constexpr std::int64_t kShort = 256;

INSTANTIATE_TEST_SUITE_P(
    Worlds, WireConformanceTest,
    testing::ValuesIn(tests::SampleOf<World>(testing::Values(
        World{"Alone", {0}, {}}, World{"Two", {0, 1}, {}}, World{"TwoOfAHost", {0, 0}, {}},
        World{"ThreeInChunks", {0, 1, 2}, {.chunk_bytes = kShort, .few_steps_bytes = 0}},
        World{"FourCyclic", {0, 1, 0, 1}, {.chunk_bytes = kShort, .few_steps_bytes = 8}},
        World{"FiveUneven", {0, 1, 1, 0, 2}, {.few_steps_bytes = kShort}},
        World{"FiveVerified", {0, 1, 1, 0, 2}, {.few_steps_bytes = kShort}, true},
        World{"Seven", {0, 0, 0, 0, 0, 0, 0}, {}}))),
    [](const auto& world) { return world.param.name; });

// Each element of a large vector is right, on every member, whatever it went by.
TEST(WireBackendTest, LongOperationsGoInChunksThatOvertakeNothing) {
  constexpr int kSize = 3;
  constexpr std::int64_t kCount = 100'003;
  InprocPorts ports(kSize);
  RankThreads::Run(kSize, [&](int rank) {
    const std::unique_ptr<Port> port = ports.Connect(rank);
    WireBackend backend(*port, {.host_of_rank = {0, 1, 0}, .chunk_bytes = 4096});
    std::vector<std::int64_t> values(kCount);
    for (int round = 0; round < 3; ++round) {
      for (std::int64_t i = 0; i < kCount; ++i)
        values[static_cast<std::size_t>(i)] = i * (rank + 1);
      ASSERT_TRUE(backend.AllReduce(kLarge, values.data(), kCount, DType::kI64, ReduceOp::kSum, {})
                      ->status()
                      .ok());
      for (std::int64_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(values[static_cast<std::size_t>(i)], 6 * i) << "rank " << rank;
      }
      ASSERT_TRUE(backend.Reduce(kLarge, values.data(), kCount, DType::kI64, ReduceOp::kMax, round)
                      ->status()
                      .ok());
      if (rank == round) {
        EXPECT_EQ(values.back(), 6 * (kCount - 1));
        values.assign(values.size(), round);
      }
      ASSERT_TRUE(backend.Broadcast(kLarge, values.data(), 8 * kCount, round)->status().ok());
      EXPECT_EQ(values, std::vector<std::int64_t>(kCount, round));
    }
  });
}

// Within a host all chunks that may be under way fit into a window, over a network one window does.
TEST(WireBackendTest, AWindowWithinAHostHoldsTheChunksThatAreUnderWay) {
  InprocPorts ports(2);
  const std::unique_ptr<Port> port = ports.Connect(0);
  constexpr std::int64_t kMebi = std::int64_t{1} << 20;
  const WireBackend one(*port, {.host_of_rank = {3, 3}, .chunk_bytes = kMebi / 2});
  EXPECT_EQ(one.WindowBytes(kLarge, kMebi), 4 * kMebi);
  EXPECT_EQ(one.WindowBytes(kLarge, 16 * kMebi), 16 * kMebi);
  const WireBackend two(*port, {.host_of_rank = {0, 1}, .chunk_bytes = kMebi / 2});
  EXPECT_EQ(two.WindowBytes(kLarge, kMebi), kMebi);
}

// A member that is far behind gets what the others have sent long ago, in order.
TEST(WireBackendTest, ARootMayRunFarAhead) {
  constexpr int kRounds = 300;  // more than a lane has tags
  InprocPorts ports(2);
  RankThreads::Run(2, [&](int rank) {
    const std::unique_ptr<Port> port = ports.Connect(rank);
    WireBackend backend(*port, {});
    std::vector<int> values(kRounds);
    std::vector<std::unique_ptr<Completion>> operations;
    for (int i = 0; i < kRounds; ++i) {
      if (rank == 0) values[static_cast<std::size_t>(i)] = i;
      operations.push_back(
          backend.Broadcast(kSmall, &values[static_cast<std::size_t>(i)], sizeof(int), 0));
    }
    for (const auto& operation : operations) {
      while (!operation->Poll()) std::this_thread::yield();
      EXPECT_TRUE(operation->status().ok()) << operation->status().ToString();
    }
    for (int i = 0; i < kRounds; ++i) EXPECT_EQ(values[static_cast<std::size_t>(i)], i);
  });
}

TEST(WireBackendTest, MoreSetsThanTagsAreRefused) {
  InprocPorts ports(1, {.tags = 3 * 128});
  const std::unique_ptr<Port> port = ports.Connect(0);
  WireBackend backend(*port, {});
  const auto is_refused = [&](core::SetNumber set) {
    const Status status = backend.AddSet(set, {0});
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kUnsupported) << status.ToString();
    return !status.ok();
  };
  EXPECT_FALSE(is_refused(1));
  EXPECT_FALSE(is_refused(2));
  EXPECT_TRUE(is_refused(3));  // where the world's are
  EXPECT_TRUE(is_refused(4));
  EXPECT_TRUE(backend.RemoveSet(1).ok());
  EXPECT_FALSE(is_refused(4));
}

TEST(WireBackendTest, AnUnknownSetAndATypeWithoutArithmeticAreErrors) {
  InprocPorts ports(1);
  const std::unique_ptr<Port> port = ports.Connect(0);
  WireBackend backend(*port, {});
  float value = 1.0F;
  const auto unknown =
      backend.AllReduce({77, fusion::Lane::kSmall}, &value, 1, DType::kF32, ReduceOp::kSum, {});
  ASSERT_TRUE(unknown->Poll());
  EXPECT_EQ(unknown->status().message(), "this rank has no process set 77, small lane");
  const auto moved = backend.AllReduce(kSmall, &value, 2, DType::kBF16, ReduceOp::kSum, {});
  ASSERT_TRUE(moved->Poll());
  EXPECT_EQ(moved->status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(backend.RemoveSet(core::kWorldSet).code(), StatusCode::kInvalidArgument);
}

// Whose transfers fail, each at the second look.
class FailingPort final : public Port {
 public:
  std::string_view name() const override { return "failing"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::int64_t tags() const override { return 1 << 20; }
  void Abort(const Status&) override {}
  std::unique_ptr<Completion> Post(Envelope, std::span<const Receive>,
                                   std::span<const Send>) override {
    class Fails final : public Completion {
     public:
      bool Poll() override { return std::exchange(looked_at_, true); }
      Status status() const override { return {StatusCode::kBackend, "the cable is cut"}; }

     private:
      bool looked_at_ = false;
    };
    return std::make_unique<Fails>();
  }
};

TEST(WireBackendTest, AnErrorCountsWheneverItComes) {
  FailingPort port;
  WireBackend backend(port, {.host_of_rank = {0, 1}, .chunk_bytes = 4096});
  for (const Channel channel : {kSmall, kLarge}) {
    std::vector<float> values(100'000);
    const auto operation =
        backend.AllReduce(channel, values.data(), 100'000, DType::kF32, ReduceOp::kSum, {});
    while (!operation->Poll()) {
    }
    EXPECT_EQ(operation->status().message(), "the cable is cut");
  }
}

TEST(WireBackendTest, AbortEndsWhatBlocks) {
  InprocPorts ports(2);
  const std::unique_ptr<Port> port = ports.Connect(0);
  WireBackend backend(*port, {});
  static std::vector<float> values(100'000);
  std::thread other([&] { backend.Abort({StatusCode::kPeerLost, "rank 1 is gone"}); });
  const auto operation =
      backend.AllReduce(kLarge, values.data(), 100'000, DType::kF32, ReduceOp::kSum, {});
  other.join();
  EXPECT_TRUE(operation->Poll());
  EXPECT_EQ(operation->status().message(), "rank 1 is gone");
}

}  // namespace
}  // namespace sirtaki::ops::wire
