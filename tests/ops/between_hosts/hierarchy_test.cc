#include "ops/between_hosts/hierarchy.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/between_hosts/backend_selection.h"
#include "ops/inproc/inproc_backend.h"
#include "tests/support/backend_conformance.h"
#include "tests/support/half_reference.h"
#include "tests/support/rank_threads.h"
#include "tests/support/run_cases.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::RankRanges;
using core::ReduceOp;
using core::Status;
using core::StatusCode;
using tests::RankThreads;

constexpr Channel kLarge{core::kWorldSet, fusion::Lane::kLarge};

// Who is on which host.
using Hosts = std::vector<int>;

std::string NameOf(const Hosts& hosts) {
  std::string name;
  for (const int host : hosts) name += std::to_string(host);
  return name;
}

// One rank of a world of threads that pretend to be on several hosts.
struct Rank {
  Rank(InprocWorld& world, const Hosts& hosts, int rank)
      : flat(world.Connect(rank)),
        hierarchy(*flat, {.rank = rank,
                          .host_of_rank = hosts,
                          .shares = std::vector<bool>(hosts.size(), true),
                          .spin = false,
                          .chunk_bytes = 1024}),
        all(RankRanges::Span(0, static_cast<int>(hosts.size()) - 1)) {
    const Status status = hierarchy.AddSet(core::kWorldSet, all);
    EXPECT_TRUE(status.ok()) << status.ToString();
    backend = std::make_unique<BackendSelection>(*flat, nullptr, all, &hierarchy);
  }

  const std::unique_ptr<Backend> flat;
  Hierarchy hierarchy;
  const RankRanges all;
  std::unique_ptr<BackendSelection> backend;
};

// Worlds of several shapes.
class HierarchyTest : public testing::TestWithParam<Hosts> {
 protected:
  const Hosts& hosts() const { return GetParam(); }
  int size() const { return static_cast<int>(hosts().size()); }

  void Run(const std::function<void(Rank&, int rank)>& body) {
    InprocWorld world(size());
    RankThreads::Run(size(), [&](int r) {
      Rank rank(world, hosts(), r);
      body(rank, r);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, HierarchyTest,
                         testing::ValuesIn(tests::SampleOf<Hosts>(testing::Values(
                             Hosts{0, 0, 1, 1}, Hosts{0, 0, 0, 1}, Hosts{0, 1, 0, 1, 0},
                             Hosts{0, 0, 1, 2, 2}, Hosts{0, 0, 0, 1, 1}))),
                         [](const auto& made) { return NameOf(made.param); });

Status Finish(Completion& operation) {
  while (!operation.Poll()) std::this_thread::yield();
  return operation.status();
}

TEST_P(HierarchyTest, Conforms) {
  Run([&](Rank& rank, int r) {
    EXPECT_TRUE(rank.hierarchy.Covers(kLarge));
    EXPECT_TRUE(rank.hierarchy.ReducesParts(kLarge));
    tests::BackendConformance conformance(*rank.backend, r, size());
    for (const tests::BackendCheck& check : tests::kBackendChecks) {
      SCOPED_TRACE(check.name);
      RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
  });
}

// Through the lanes, in every type: what comes out is compared in every byte.
TEST_P(HierarchyTest, ReducesForTheLanes) {
  Run([&](Rank& rank, int r) {
    HostLanes lanes({.rank = r}, *rank.backend);
    for (int d = 0; d < core::kDTypeCount; ++d) {
      for (int o = 0; o < core::kReduceOpCount; ++o) {
        const auto dtype = static_cast<DType>(d);
        const auto op = static_cast<ReduceOp>(o);
        if (!core::IsDefined(op, dtype) || op == ReduceOp::kAdasum) continue;
        const Cases cases = ReducingCases(op, dtype, size());
        std::vector<RunSide> sides(cases.size());
        core::RunBatch batch = SmallBatch(size());
        for (std::size_t i = 0; i < sides.size(); ++i) {
          batch.items.push_back(sides[i].MakeItem(cases[i], std::to_string(i), r, size()));
        }
        lanes.Start(std::move(batch), core::Clock::now());
        RunToIdle(lanes);
        for (std::size_t i = 0; i < sides.size(); ++i) sides[i].Check(cases[i], r, size());
      }
    }
  });
}

// What rank r gives for an element: small whole numbers, so that no order of adding rounds.
int Given(int r, std::size_t segment, std::int64_t i) {
  return static_cast<int>((static_cast<std::size_t>(i) * 7 + segment * 5) % 13) - 6 + 2 * r;
}

// Tensors that lie apart, some of which some ranks do not have, some of whose results they do not
// take, in place and out of place.
template <typename T, typename Encode>
void ReduceSegments(Rank& rank, int r, int size, SegmentReduction how, Encode encode) {
  const std::vector<std::int64_t> counts = {0, 1, 5000, 3, 64, 777, 12345};
  std::vector<std::vector<T>> inputs;
  std::vector<std::vector<T>> outputs;
  std::vector<Segment> segments;
  const auto gives = [&](int other, std::size_t s) {
    return s == 0 || (other + static_cast<int>(s)) % 3 != 0 || size < 3;
  };
  for (std::size_t s = 0; s < counts.size(); ++s) {
    inputs.emplace_back();
    for (std::int64_t i = 0; i < counts[s]; ++i) inputs[s].push_back(encode(Given(r, s, i)));
    outputs.emplace_back(static_cast<std::size_t>(counts[s]) + 1, encode(99));
    const bool in_place = s % 2 == 0;
    const bool takes = (r + static_cast<int>(s)) % 4 != 1;
    Segment segment;
    segment.count = counts[s];
    segment.input = gives(r, s) ? inputs[s].data() : nullptr;
    if (takes) segment.output = in_place ? inputs[s].data() : outputs[s].data();
    segments.push_back(segment);
  }
  const auto operation =
      rank.backend->Select(kLarge).rootless->AllReduceSegments(kLarge, segments, how);
  const Status status = Finish(*operation);
  ASSERT_TRUE(status.ok()) << status.ToString();
  for (std::size_t s = 0; s < counts.size(); ++s) {
    EXPECT_EQ(outputs[s].back(), encode(99)) << "what is behind the output was changed";
    if (segments[s].output == nullptr) continue;
    for (std::int64_t i = 0; i < counts[s]; ++i) {
      double sum = 0;
      double least = 1e9;
      for (int other = 0; other < size; ++other) {
        if (!gives(other, s)) continue;
        sum += Given(other, s, i);
        least = std::min<double>(least, Given(other, s, i));
      }
      const double result = how.op == ReduceOp::kMin ? least : sum;
      const T expected = encode(how.after.divisor == 1 ? result : result / size);
      ASSERT_EQ(static_cast<const T*>(segments[s].output)[i], expected)
          << core::ReduceOpName(how.op) << " of " << core::DTypeName(how.dtype) << ", segment " << s
          << ", element " << i;
    }
  }
}

TEST_P(HierarchyTest, ReducesTensorsWhereTheyLie) {
  Run([&](Rank& rank, int r) {
    const int n = size();
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin}) {
      SegmentReduction how{.op = op};
      if (op == ReduceOp::kAverage) how.after.divisor = n;
      how.dtype = DType::kF32;
      ReduceSegments<float>(rank, r, n, how, [](double x) { return static_cast<float>(x); });
      how.dtype = DType::kF64;
      ReduceSegments<double>(rank, r, n, how, [](double x) { return x; });
      // The sum is computed as float32, and rounded once.
      how.dtype = DType::kF16;
      ReduceSegments<std::uint16_t>(
          rank, r, n, how, [](double x) { return tests::kFloat16.Encode(static_cast<float>(x)); });
      how.dtype = DType::kBF16;
      ReduceSegments<std::uint16_t>(
          rank, r, n, how, [](double x) { return tests::kBFloat16.Encode(static_cast<float>(x)); });
      how.dtype = DType::kI32;
      ReduceSegments<std::int32_t>(rank, r, n, how,
                                   [](double x) { return static_cast<std::int32_t>(x); });
      how.dtype = DType::kI8;
      ReduceSegments<std::int8_t>(rank, r, n, how,
                                  [](double x) { return static_cast<std::int8_t>(x); });
    }
  });
}

// Sums that depend on the order of adding: whatever it is, all ranks have the same.
TEST_P(HierarchyTest, AllRanksHaveTheSameBits) {
  std::vector<std::vector<float>> results(hosts().size());
  Run([&](Rank& rank, int r) {
    std::vector<float>& values = results[static_cast<std::size_t>(r)];
    for (int i = 0; i < 20000; ++i) {
      values.push_back(std::sin(static_cast<float>(i * (r + 1))) *
                       std::pow(10.0F, static_cast<float>((i + r) % 15 - 7)));
    }
    const auto operation = rank.backend->Select(kLarge).rootless->AllReduce(
        kLarge, values.data(), static_cast<std::int64_t>(values.size()), DType::kF32,
        ReduceOp::kSum, {});
    EXPECT_TRUE(Finish(*operation).ok());
  });
  for (const std::vector<float>& result : results) {
    EXPECT_EQ(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)), 0);
  }
}

TEST_P(HierarchyTest, SetsOfOneRankAHostAreLeftToTheMedium) {
  Run([&](Rank& rank, int r) {
    std::map<int, int> first;  // rank of each host
    for (int other = 0; other < size(); ++other) {
      first.try_emplace(hosts()[static_cast<std::size_t>(other)], other);
    }
    RankRanges alone;
    for (const auto& [host, lowest] : first) alone.Add(lowest);
    EXPECT_TRUE(rank.backend->AddSet(5, alone).ok());
    EXPECT_FALSE(rank.hierarchy.Covers({5, fusion::Lane::kLarge}));
    float value = 1;
    if (alone.Contains(r)) {
      const auto operation = rank.backend->Select({5, fusion::Lane::kLarge})
                                 .rootless->AllReduce({5, fusion::Lane::kLarge}, &value, 1,
                                                      DType::kF32, ReduceOp::kSum, {});
      EXPECT_TRUE(Finish(*operation).ok());
      EXPECT_EQ(value, static_cast<float>(alone.Count()));
    }
    EXPECT_TRUE(rank.backend->RemoveSet(5).ok());
  });
}

// A rank that does not come: the others learn why they are stopped.
TEST_P(HierarchyTest, AnAbortEndsTheWait) {
  const Status why(StatusCode::kPeerLost, "rank 0 is gone");
  InprocWorld world(size());
  std::vector<std::unique_ptr<Rank>> ranks(hosts().size());
  RankThreads::Run(size(), [&](int r) {
    ranks[static_cast<std::size_t>(r)] = std::make_unique<Rank>(world, hosts(), r);
  });
  std::atomic<int> waiting{0};
  RankThreads::Run(size(), [&](int r) {
    Rank& rank = *ranks[static_cast<std::size_t>(r)];
    if (r == 0) {
      while (waiting.load() < size() - 1) std::this_thread::yield();
      for (const auto& other : ranks) other->backend->Abort(why);
      return;
    }
    std::vector<float> values(5000);
    ++waiting;
    const auto operation = rank.backend->Select(kLarge).rootless->AllReduce(
        kLarge, values.data(), static_cast<std::int64_t>(values.size()), DType::kF32,
        ReduceOp::kSum, {});
    const Status status = Finish(*operation);
    EXPECT_EQ(status.code(), StatusCode::kPeerLost);
    EXPECT_EQ(status.message(), "rank 0 is gone");
  });
}

TEST(HierarchySelectionTest, HostsWhoseRanksShareNothingAreLeftToTheMedium) {
  const Hosts hosts{0, 0, 1, 1};
  InprocWorld world(4);
  RankThreads::Run(4, [&](int r) {
    const std::unique_ptr<Backend> flat = world.Connect(r);
    Hierarchy hierarchy(*flat, {.rank = r, .host_of_rank = hosts, .shares = {true, false}});
    EXPECT_TRUE(hierarchy.AddSet(core::kWorldSet, RankRanges::Span(0, 3)).ok());
    EXPECT_FALSE(hierarchy.Covers(kLarge));
    // One rank of the host that does not share is none too many.
    EXPECT_TRUE(flat->AddSet(1, RankRanges::Span(0, 2)).ok());
    EXPECT_TRUE(hierarchy.AddSet(1, RankRanges::Span(0, 2)).ok());
    EXPECT_EQ(hierarchy.Covers({1, fusion::Lane::kLarge}), r != 3);
    EXPECT_FALSE(hierarchy.Covers({1, fusion::Lane::kSmall}));
  });
}

// The others pause before they come, or have died.
TEST(HierarchyDeadlineTest, TheWorldIsAddedByItsDeadlineOrNotAtAll) {
  InprocWorld world(4);
  const auto flat = world.Connect(0);
  Hierarchy hierarchy(*flat, {.rank = 0,
                              .host_of_rank = {0, 0, 1, 1},
                              .shares = {true, true},
                              .spin = false,
                              .start_by = core::Clock::now() + std::chrono::milliseconds(50)});
  const Status status = hierarchy.AddSet(core::kWorldSet, RankRanges::Span(0, 3));
  EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
}

}  // namespace
}  // namespace sirtaki::ops
