// One body for every implementation of ops::Backend.
//
// Each rank (a thread over the in-process world, a process over MPI) makes one BackendConformance
// for its backend and all ranks call the same checks in the same order:
//
//   BackendConformance conformance(*backend, rank, size);
//   for (const BackendCheck& check : kBackendChecks) {
//     SCOPED_TRACE(check.name);
//     (conformance.*check.run)();
//   }
//
// The checks work for any size >= 1, compute what they expect by naive loops, and fail by
// GoogleTest's expectations. No wait on a polled lane is longer than `patience`.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/types.h"
#include "ops/backend.h"

namespace sirtaki::tests {

class BackendConformance {
 public:
  struct Traits {
    // False if two threads may not be inside the backend at once (MPI_THREAD_SERIALIZED).
    bool lanes_run_at_once = true;
    core::Duration patience = std::chrono::seconds(30);
  };

  BackendConformance(ops::Backend& backend, int rank, int size)
      : BackendConformance(backend, rank, size, Traits()) {}
  BackendConformance(ops::Backend& backend, int rank, int size, Traits traits)
      : backend_(backend), rank_(rank), size_(size), traits_(traits) {}

  void SumsEveryTypeAndSize() {
    for (const fusion::Lane lane : kLanes) {
      for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 1000, 1025, 4099}) {
        Sum<std::uint8_t>(lane, core::DType::kU8, count);
        Sum<std::int8_t>(lane, core::DType::kI8, count);
        Sum<std::int16_t>(lane, core::DType::kI16, count);
        Sum<std::int32_t>(lane, core::DType::kI32, count);
        Sum<std::int64_t>(lane, core::DType::kI64, count);
        Sum<float>(lane, core::DType::kF32, count);
        Sum<double>(lane, core::DType::kF64, count);
      }
    }
  }

  void SumsLargeVectors() {
    Sum<float>(fusion::Lane::kLarge, core::DType::kF32, (1 << 20) + 3);
    Sum<std::uint8_t>(fusion::Lane::kLarge, core::DType::kU8, (3 << 20) + 1);
  }

  // 2^(bits-1) from each of the ranks: nothing is left of an even number of them, and one of an odd
  // one.
  void IntegersWrap() {
    for (const fusion::Lane lane : kLanes) {
      Wrap<std::uint8_t>(lane, core::DType::kU8);
      Wrap<std::int8_t>(lane, core::DType::kI8);
      Wrap<std::int16_t>(lane, core::DType::kI16);
      Wrap<std::int32_t>(lane, core::DType::kI32);
      Wrap<std::int64_t>(lane, core::DType::kI64);
    }
  }

  void AllRanksGetTheSameBits() {
    std::vector<float> values(1001);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = 1.0f / static_cast<float>(i + 1 + static_cast<std::size_t>(rank_) * 17);
    }
    for (const fusion::Lane lane : kLanes) {
      std::vector<float> sums = values;
      const auto bytes = static_cast<std::int64_t>(sums.size() * sizeof(float));
      Finish(backend_.AllReduce(World(lane), sums.data(), static_cast<std::int64_t>(sums.size()),
                                core::DType::kF32, core::ReduceOp::kSum));
      std::vector<float> all(sums.size() * static_cast<std::size_t>(size_));
      Finish(backend_.AllGather(World(lane), sums.data(), all.data(), bytes));
      for (int r = 0; r < size_; ++r) {
        const float* other = all.data() + static_cast<std::size_t>(r) * sums.size();
        EXPECT_EQ(std::memcmp(other, sums.data(), static_cast<std::size_t>(bytes)), 0)
            << "ranks " << r << " and " << rank_;
      }
    }
  }

  void BroadcastsFromEveryRoot() {
    for (const fusion::Lane lane : kLanes) {
      for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{3},
                                      std::size_t{4097}, std::size_t{300001}}) {
        for (int root = 0; root < size_; ++root) {
          std::vector<std::uint8_t> data = Bytes(rank_, bytes);
          Finish(
              backend_.Broadcast(World(lane), data.data(), static_cast<std::int64_t>(bytes), root));
          EXPECT_TRUE(data == Bytes(root, bytes)) << bytes << " bytes from root " << root;
        }
      }
    }
  }

  void GathersEqualParts() {
    for (const fusion::Lane lane : kLanes) {
      for (const std::size_t bytes :
           {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{4097}}) {
        const std::vector<std::uint8_t> mine = Bytes(rank_, bytes);
        std::vector<std::uint8_t> all(bytes * static_cast<std::size_t>(size_));
        Finish(backend_.AllGather(World(lane), mine.data(), all.data(),
                                  static_cast<std::int64_t>(bytes)));
        EXPECT_TRUE(all == Concatenation(std::vector<std::int64_t>(
                               static_cast<std::size_t>(size_), static_cast<std::int64_t>(bytes))))
            << bytes << " bytes each";
      }
    }
  }

  void GathersUnequalParts() {
    for (const fusion::Lane lane : kLanes) {
      // Growing parts with a first one of nothing; only the last rank; nobody; equal ones.
      for (const int shape : {0, 1, 2, 3}) {
        std::vector<std::int64_t> bytes;
        for (int r = 0; r < size_; ++r) {
          bytes.push_back(shape == 0   ? r * 1001
                          : shape == 1 ? (r == size_ - 1 ? 777 : 0)
                          : shape == 2 ? 0
                                       : 64);
        }
        const auto own = static_cast<std::size_t>(bytes[static_cast<std::size_t>(rank_)]);
        const std::vector<std::uint8_t> mine = Bytes(rank_, own);
        const std::vector<std::uint8_t> expected = Concatenation(bytes);
        std::vector<std::uint8_t> all(expected.size());
        Finish(backend_.AllGatherV(World(lane), mine.data(), all.data(), bytes));
        EXPECT_TRUE(all == expected) << "shape " << shape;
      }
    }
  }

  void ExchangesParts() {
    for (const fusion::Lane lane : kLanes) {
      for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{3},
                                      std::size_t{1002}, std::size_t{300001}}) {
        std::vector<std::uint8_t> mine;
        std::vector<std::uint8_t> expected;
        for (int r = 0; r < size_; ++r) {
          const auto given = Bytes(100 * rank_ + r, bytes);
          mine.insert(mine.end(), given.begin(), given.end());
          const auto got = Bytes(100 * r + rank_, bytes);
          expected.insert(expected.end(), got.begin(), got.end());
        }
        std::vector<std::uint8_t> all(expected.size());
        Finish(backend_.AllToAll(World(lane), mine.data(), all.data(),
                                 static_cast<std::int64_t>(bytes)));
        EXPECT_TRUE(all == expected) << "parts of " << bytes << " bytes";
      }
    }
  }

  // On the small lane operations are started in one order and may be looked at in any.
  void SeveralInFlightOnTheSmallLane() {
    constexpr int kRounds = 12;
    const ops::Channel channel = World(fusion::Lane::kSmall);
    std::vector<std::vector<float>> sums;
    std::vector<std::vector<std::uint8_t>> broadcasts;
    std::vector<std::unique_ptr<ops::Completion>> operations;
    for (int i = 0; i < kRounds; ++i) {
      sums.push_back(
          std::vector<float>(static_cast<std::size_t>(i + 1), static_cast<float>(rank_ + i)));
      operations.push_back(backend_.AllReduce(channel, sums.back().data(),
                                              static_cast<std::int64_t>(sums.back().size()),
                                              core::DType::kF32, core::ReduceOp::kSum));
      broadcasts.push_back(Bytes(rank_ + i, 100));
      operations.push_back(backend_.Broadcast(channel, broadcasts.back().data(), 100, i % size_));
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
  void LanesDoNotMix() {
    if (!traits_.lanes_run_at_once) return;
    std::thread large([this] {
      for (int i = 0; i < 50; ++i) Sum<float>(fusion::Lane::kLarge, core::DType::kF32, 5000 + i);
    });
    for (int i = 0; i < 50; ++i) Sum<std::int32_t>(fusion::Lane::kSmall, core::DType::kI32, 1 + i);
    large.join();
  }

  // Sets are separate lines, too. Collective over the world: every other rank, and everyone again.
  void SetsHaveTheirOwnMembers() {
    core::RankRanges even;
    for (int r = 0; r < size_; r += 2) even.Add(r);
    const core::RankRanges all = core::RankRanges::Span(0, size_ - 1);
    ExpectOk(backend_.AddSet(11, even));
    ExpectOk(backend_.AddSet(12, all));
    for (const fusion::Lane lane : kLanes) {
      if (rank_ % 2 == 0) {
        const auto members = static_cast<std::int32_t>(even.Count());
        std::int32_t value = rank_ / 2;
        Finish(backend_.AllReduce({11, lane}, &value, 1, core::DType::kI32, core::ReduceOp::kSum));
        EXPECT_EQ(value, members * (members - 1) / 2);
        for (int root = 0; root < members; ++root) {  // counted among the members
          std::int32_t data = rank_;
          Finish(backend_.Broadcast({11, lane}, &data, sizeof(data), root));
          EXPECT_EQ(data, 2 * root);
        }
      }
      std::int32_t one = 1;
      Finish(backend_.AllReduce({12, lane}, &one, 1, core::DType::kI32, core::ReduceOp::kSum));
      EXPECT_EQ(one, size_);
    }
  }

  void SaysWhatItSupports() {
    EXPECT_FALSE(backend_.name().empty());
    using core::DeviceKind;
    using core::DType;
    using core::OpKind;
    for (const DType dtype : {DType::kU8, DType::kI8, DType::kI16, DType::kI32, DType::kI64,
                              DType::kF32, DType::kF64}) {
      EXPECT_TRUE(backend_.Supports(OpKind::kAllReduce, dtype, DeviceKind::kHost));
    }
    for (int i = 0; i < core::kDTypeCount; ++i) {
      EXPECT_TRUE(backend_.Supports(OpKind::kBroadcast, static_cast<DType>(i), DeviceKind::kHost));
      EXPECT_TRUE(backend_.Supports(OpKind::kAllGather, static_cast<DType>(i), DeviceKind::kHost));
    }
    EXPECT_FALSE(backend_.Supports(OpKind::kAllReduce, DType::kBool, DeviceKind::kHost));
    EXPECT_FALSE(backend_.Supports(OpKind::kAllReduce, DType::kF32, DeviceKind::kCuda));
  }

 private:
  static constexpr fusion::Lane kLanes[] = {fusion::Lane::kSmall, fusion::Lane::kLarge};

  static ops::Channel World(fusion::Lane lane) { return {core::kWorldSet, lane}; }

  static std::vector<std::uint8_t> Bytes(int from, std::size_t count) {
    std::vector<std::uint8_t> bytes(count);
    std::uint32_t x = static_cast<std::uint32_t>(from) * 7919u + 1u;
    for (std::uint8_t& byte : bytes) {
      x = x * 1664525u + 1013904223u;
      byte = static_cast<std::uint8_t>(x >> 24);
    }
    return bytes;
  }

  static std::vector<std::uint8_t> Concatenation(const std::vector<std::int64_t>& bytes) {
    std::vector<std::uint8_t> all;
    for (std::size_t r = 0; r < bytes.size(); ++r) {
      const auto part = Bytes(static_cast<int>(r), static_cast<std::size_t>(bytes[r]));
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

  // Small whole numbers: exact in every type but the 8-bit ones, where the loop wraps as they do.
  template <typename T>
  static T Value(int from, std::int64_t i) {
    return static_cast<T>((from + 1) * (1 + i % 11));
  }

  template <typename T>
  void Sum(fusion::Lane lane, core::DType dtype, std::int64_t count) {
    std::vector<T> data(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) data[static_cast<std::size_t>(i)] = Value<T>(rank_, i);
    Finish(backend_.AllReduce(World(lane), data.data(), count, dtype, core::ReduceOp::kSum));
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      T expected{};
      for (int r = 0; r < size_; ++r) expected = static_cast<T>(expected + Value<T>(r, i));
      if (data[static_cast<std::size_t>(i)] != expected) ++wrong;
    }
    EXPECT_EQ(wrong, 0) << "of " << count << " sums of " << core::DTypeName(dtype);
  }

  template <typename T>
  void Wrap(fusion::Lane lane, core::DType dtype) {
    const auto top = static_cast<T>(std::uint64_t{1} << (8 * sizeof(T) - 1));
    std::vector<T> data(37, top);
    Finish(backend_.AllReduce(World(lane), data.data(), 37, dtype, core::ReduceOp::kSum));
    EXPECT_TRUE(data == std::vector<T>(37, size_ % 2 == 0 ? T{0} : top)) << core::DTypeName(dtype);
  }

  void Finish(std::unique_ptr<ops::Completion> operation) {
    ASSERT_NE(operation, nullptr);
    const core::TimePoint limit = core::Clock::now() + traits_.patience;
    while (!operation->Poll()) {
      ASSERT_LT(core::Clock::now(), limit) << "an operation of rank " << rank_ << " does not end";
      std::this_thread::yield();
    }
    ExpectOk(operation->status());
    EXPECT_TRUE(operation->Poll());
  }

  static void ExpectOk(const core::Status& status) {
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  ops::Backend& backend_;
  const int rank_;
  const int size_;
  const Traits traits_;
};

struct BackendCheck {
  const char* name;
  void (BackendConformance::*run)();
};

inline constexpr BackendCheck kBackendChecks[] = {
    {"SaysWhatItSupports", &BackendConformance::SaysWhatItSupports},
    {"SumsEveryTypeAndSize", &BackendConformance::SumsEveryTypeAndSize},
    {"SumsLargeVectors", &BackendConformance::SumsLargeVectors},
    {"IntegersWrap", &BackendConformance::IntegersWrap},
    {"AllRanksGetTheSameBits", &BackendConformance::AllRanksGetTheSameBits},
    {"BroadcastsFromEveryRoot", &BackendConformance::BroadcastsFromEveryRoot},
    {"GathersEqualParts", &BackendConformance::GathersEqualParts},
    {"GathersUnequalParts", &BackendConformance::GathersUnequalParts},
    {"ExchangesParts", &BackendConformance::ExchangesParts},
    {"SeveralInFlightOnTheSmallLane", &BackendConformance::SeveralInFlightOnTheSmallLane},
    {"LanesDoNotMix", &BackendConformance::LanesDoNotMix},
    {"SetsHaveTheirOwnMembers", &BackendConformance::SetsHaveTheirOwnMembers},
};

}  // namespace sirtaki::tests
