// The checks of BackendConformance that move bytes without changing them, and those of process
// sets.
#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "ops/groups/exchange_slices.h"
#include "tests/support/backend_conformance.h"

namespace sirtaki::tests {

void BackendConformance::HasAName() {
  EXPECT_FALSE(On(World(fusion::Lane::kLarge)).name().empty());
}

void BackendConformance::BroadcastsFromEveryRoot() {
  for (const fusion::Lane lane : kLanes) {
    for (const std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{4097}, std::size_t{300001}}) {
      for (int root = 0; root < size_; ++root) {
        std::vector<std::uint8_t> data = Bytes(rank_, bytes);
        Finish(On(World(lane))
                   .Broadcast(World(lane), data.data(), static_cast<std::int64_t>(bytes), root),
               lane);
        EXPECT_TRUE(data == Bytes(root, bytes)) << bytes << " bytes from root " << root;
      }
    }
  }
}

void BackendConformance::GathersEqualParts() {
  for (const fusion::Lane lane : kLanes) {
    for (const std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{4097}}) {
      const std::vector<std::uint8_t> mine = Bytes(rank_, bytes);
      std::vector<std::uint8_t> all(bytes * static_cast<std::size_t>(size_));
      Finish(RootlessOf(World(lane))
                 .AllGather(World(lane), mine.data(), all.data(), static_cast<std::int64_t>(bytes)),
             lane);
      EXPECT_TRUE(all == Concatenation(std::vector<std::int64_t>(static_cast<std::size_t>(size_),
                                                                 static_cast<std::int64_t>(bytes))))
          << bytes << " bytes each";
    }
  }
}

void BackendConformance::GathersUnequalParts() {
  for (const fusion::Lane lane : kLanes) {
    // Growing parts with a first one of nothing; only the last rank; nobody; equal ones; long ones.
    for (const int shape : {0, 1, 2, 3, 4}) {
      std::vector<std::int64_t> bytes;
      for (int r = 0; r < size_; ++r) {
        bytes.push_back(shape == 0   ? r * 1001
                        : shape == 1 ? (r == size_ - 1 ? 777 : 0)
                        : shape == 2 ? 0
                        : shape == 3 ? 64
                                     : 70'000 - 9'000 * r);
      }
      const auto own = static_cast<std::size_t>(bytes[static_cast<std::size_t>(rank_)]);
      const std::vector<std::uint8_t> mine = Bytes(rank_, own);
      const std::vector<std::uint8_t> expected = Concatenation(bytes);
      std::vector<std::uint8_t> all(expected.size());
      ops::Rootless& backend = RootlessOf(World(lane));
      Finish(backend.AllGatherV(World(lane), mine.data(), all.data(), bytes), lane);
      EXPECT_TRUE(all == expected) << "shape " << shape;
      // What this rank gives may be in its place.
      std::fill(all.begin(), all.end(), std::uint8_t{0});
      auto* const place =
          all.data() + std::accumulate(bytes.begin(), bytes.begin() + rank_, std::int64_t{0});
      std::copy(mine.begin(), mine.end(), place);
      Finish(backend.AllGatherV(World(lane), place, all.data(), bytes), lane);
      EXPECT_TRUE(all == expected) << "in place, shape " << shape;
    }
  }
}

void BackendConformance::ExchangesParts() {
  for (const fusion::Lane lane : kLanes) {
    for (const std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{1002}, std::size_t{300001}}) {
      std::vector<std::uint8_t> mine;
      std::vector<std::uint8_t> expected;
      for (int r = 0; r < size_; ++r) {
        const auto given = Bytes(100 * rank_ + r, bytes);
        mine.insert(mine.end(), given.begin(), given.end());
        const auto got = Bytes(100 * r + rank_, bytes);
        expected.insert(expected.end(), got.begin(), got.end());
      }
      std::vector<std::uint8_t> all(expected.size());
      ops::Slices slices;
      slices.GiveParts(mine.data(), all.data(), static_cast<std::int64_t>(bytes), rank_, size_);
      Finish(slices.Exchange(On(World(lane)), World(lane)));
      EXPECT_TRUE(all == expected) << "parts of " << bytes << " bytes";
    }
  }
}

void BackendConformance::ExchangesSlices() {
  std::vector<int> world;
  for (int r = 0; r < size_; ++r) world.push_back(r);
  for (const fusion::Lane lane : kLanes) {
    for (std::uint32_t seed = 1; seed <= 25; ++seed) ExchangeOnce(World(lane), world, seed);
  }
}

// What member i gives to member j: slices of bytes that tell the pair and the place in its list.
void BackendConformance::ExchangeOnce(ops::Channel channel, const std::vector<int>& members,
                                      std::uint32_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  struct Slice {
    std::size_t from;
    std::size_t to;
    std::vector<std::uint8_t> bytes;
  };
  constexpr std::size_t kSizes[] = {0, 1, 3, 64, 1001, 4097};
  std::vector<Slice> slices;
  const auto own =
      static_cast<std::size_t>(std::find(members.begin(), members.end(), rank_) - members.begin());
  for (std::size_t from = 0; from < members.size(); ++from) {
    for (std::size_t to = 0; to < members.size(); ++to) {
      if (from == to) continue;
      for (std::uint32_t left = random() % 4; left > 0; --left) {
        const std::size_t bytes = random() % 40 == 0 ? 300001 : kSizes[random() % 6];
        slices.push_back({from, to, Bytes(static_cast<int>(slices.size() + seed * 1000), bytes)});
      }
    }
  }
  // The order between pairs is each member's own.
  std::shuffle(slices.begin(), slices.end(), random);
  std::vector<ops::OutgoingSlice> outgoing;
  std::vector<ops::IncomingSlice> incoming;
  std::vector<std::pair<const Slice*, std::vector<std::uint8_t>>> taken;
  for (const Slice& slice : slices) {
    const auto bytes = static_cast<std::int64_t>(slice.bytes.size());
    if (slice.from == own) {
      outgoing.push_back({static_cast<int>(slice.to), slice.bytes.data(), bytes});
    }
    if (slice.to == own) {
      taken.emplace_back(&slice, std::vector<std::uint8_t>(slice.bytes.size()));
      incoming.push_back({static_cast<int>(slice.from), taken.back().second.data(), bytes});
    }
  }
  Finish(On(channel).Exchange(channel, outgoing, incoming), channel.lane);
  for (const auto& [slice, bytes] : taken) {
    EXPECT_TRUE(bytes == slice->bytes)
        << bytes.size() << " bytes from member " << slice->from << " to member " << slice->to;
  }
}

// On the small lane operations are started in one order and may be looked at in any.
void BackendConformance::SeveralInFlightOnTheSmallLane() {
  constexpr int kRounds = 12;
  const ops::Channel channel = World(fusion::Lane::kSmall);
  std::vector<std::vector<float>> sums;
  std::vector<std::vector<std::uint8_t>> broadcasts;
  std::vector<std::unique_ptr<ops::Completion>> operations;
  for (int i = 0; i < kRounds; ++i) {
    sums.push_back(
        std::vector<float>(static_cast<std::size_t>(i + 1), static_cast<float>(rank_ + i)));
    operations.push_back(RootlessOf(channel).AllReduce(
        channel, sums.back().data(), static_cast<std::int64_t>(sums.back().size()),
        core::DType::kF32, core::ReduceOp::kSum, {}));
    broadcasts.push_back(Bytes(rank_ + i, 100));
    operations.push_back(On(channel).Broadcast(channel, broadcasts.back().data(), 100, i % size_));
  }
  // A moved vector keeps its memory, so the buffers did not move when these lists grew.
  while (!operations.empty()) {
    Finish(std::move(operations.back()));
    operations.pop_back();
  }
  for (int i = 0; i < kRounds; ++i) {
    const auto expected = static_cast<float>(size_ * (size_ - 1) / 2 + size_ * i);
    for (const float sum : sums[static_cast<std::size_t>(i)]) EXPECT_EQ(sum, expected);
    EXPECT_TRUE(broadcasts[static_cast<std::size_t>(i)] == Bytes(i % size_ + i, 100)) << i;
  }
}

// The lanes are separate lines: one rank may be ahead on the one while it is behind on the other.
void BackendConformance::LanesDoNotMix() {
  if (!traits_.lanes_run_at_once) return;
  std::thread large([this] {
    for (int i = 0; i < 50; ++i)
      ReduceAny(fusion::Lane::kLarge, core::DType::kF32, core::ReduceOp::kSum, 5000 + i, -1);
  });
  for (int i = 0; i < 50; ++i)
    ReduceAny(fusion::Lane::kSmall, core::DType::kI32, core::ReduceOp::kSum, 1 + i, -1);
  large.join();
}

// Sets are separate lines, too. Collective over the world: every other rank, and everyone again.
void BackendConformance::SetsHaveTheirOwnMembers() {
  core::RankRanges even;
  for (int r = 0; r < size_; r += 2) even.Add(r);
  const core::RankRanges all = core::RankRanges::Span(0, size_ - 1);
  ExpectOk(backend_.AddSet(11, even));
  ExpectOk(backend_.AddSet(12, all));
  for (const fusion::Lane lane : kLanes) {
    if (rank_ % 2 == 0) {
      const auto members = static_cast<std::int32_t>(even.Count());
      std::int32_t value = rank_ / 2;
      Finish(RootlessOf({11, lane})
                 .AllReduce({11, lane}, &value, 1, core::DType::kI32, core::ReduceOp::kSum, {}));
      EXPECT_EQ(value, members * (members - 1) / 2);
      for (int root = 0; root < members; ++root) {  // counted among the members
        std::int32_t data = rank_;
        Finish(On({11, lane}).Broadcast({11, lane}, &data, sizeof(data), root));
        EXPECT_EQ(data, 2 * root);
      }
    }
    std::int32_t one = 1;
    Finish(RootlessOf({12, lane})
               .AllReduce({12, lane}, &one, 1, core::DType::kI32, core::ReduceOp::kSum, {}));
    EXPECT_EQ(one, size_);
  }
}

void BackendConformance::SetsComeAndGo() {
  constexpr core::SetNumber kFirst = 100;
  constexpr core::SetNumber kRounds = 200;
  constexpr std::size_t kAlive = 3;
  std::mt19937 random(20);
  std::map<core::SetNumber, core::RankRanges> sets;
  for (core::SetNumber set = kFirst; set < kFirst + kRounds; ++set) {
    core::RankRanges members;
    for (int r = 0; r < size_; ++r) {
      if (random() % 2 == 0) members.Add(r);
    }
    if (members.empty()) members.Add(static_cast<int>(random() % static_cast<unsigned>(size_)));
    ExpectOk(backend_.AddSet(set, members));
    sets.emplace(set, members);
    for (const auto& [number, ranks] : sets) {
      if (!ranks.Contains(rank_)) continue;
      for (const fusion::Lane lane : kLanes) {
        std::int32_t value = 1 << rank_;
        std::int32_t expected = 0;
        for (const int r : ranks.ToVector()) expected += 1 << r;
        Finish(
            RootlessOf({number, lane})
                .AllReduce({number, lane}, &value, 1, core::DType::kI32, core::ReduceOp::kSum, {}));
        EXPECT_EQ(value, expected) << "set " << number << " of ranks " << ranks.ToString();
      }
      ExchangeOnce({number, fusion::Lane::kLarge}, ranks.ToVector(), number);
    }
    if (sets.size() < kAlive) continue;
    const auto gone = std::next(sets.begin(), random() % kAlive);
    ExpectOk(backend_.RemoveSet(gone->first));
    sets.erase(gone);
  }
  for (const auto& [number, ranks] : sets) ExpectOk(backend_.RemoveSet(number));
  // A set that is gone is one that never was.
  std::int32_t value = 1;
  const auto late = RootlessOf({kFirst, fusion::Lane::kSmall})
                        .AllReduce({kFirst, fusion::Lane::kSmall}, &value, 1, core::DType::kI32,
                                   core::ReduceOp::kSum, {});
  EXPECT_TRUE(late->Poll());
  EXPECT_FALSE(late->status().ok());
}

std::vector<std::uint8_t> BackendConformance::Bytes(int from, std::size_t count) {
  std::vector<std::uint8_t> bytes(count);
  std::uint32_t x = static_cast<std::uint32_t>(from) * 7919u + 1u;
  for (std::uint8_t& byte : bytes) {
    x = x * 1664525u + 1013904223u;
    byte = static_cast<std::uint8_t>(x >> 24);
  }
  return bytes;
}

std::vector<std::uint8_t> BackendConformance::Concatenation(
    const std::vector<std::int64_t>& bytes) {
  std::vector<std::uint8_t> all;
  for (std::size_t r = 0; r < bytes.size(); ++r) {
    const auto part = Bytes(static_cast<int>(r), static_cast<std::size_t>(bytes[r]));
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

void BackendConformance::Finish(std::unique_ptr<ops::Completion> operation, fusion::Lane lane) {
  ASSERT_NE(operation, nullptr);
  EXPECT_TRUE(lane != fusion::Lane::kLarge || operation->Poll()) << "it ends inside its call";
  const core::TimePoint limit = core::Clock::now() + traits_.patience;
  while (!operation->Poll()) {
    ASSERT_LT(core::Clock::now(), limit) << "an operation of rank " << rank_ << " does not end";
    std::this_thread::yield();
  }
  ExpectOk(operation->status());
  EXPECT_TRUE(operation->Poll());
}

void BackendConformance::ExpectOk(const core::Status& status) {
  EXPECT_TRUE(status.ok()) << status.ToString();
}

}  // namespace sirtaki::tests
