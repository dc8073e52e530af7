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
#include <memory>
#include <vector>

#include "core/base/types.h"
#include "ops/base/backend.h"

namespace sirtaki::tests {

class BackendConformance {
 public:
  struct Traits {
    // False if two threads may not be inside the backend at once (MPI_THREAD_SERIALIZED).
    bool lanes_run_at_once = true;
    core::Duration patience = std::chrono::seconds(30);
  };

  BackendConformance(ops::Backends& backend, int rank, int size)
      : BackendConformance(backend, rank, size, Traits()) {}
  BackendConformance(ops::Backends& backend, int rank, int size, Traits traits)
      : backend_(backend), rank_(rank), size_(size), traits_(traits) {}

  // ---- backend_reductions.cc ----

  // On both lanes, for every reduction and type that HasReduction names.
  void ReducesEveryTypeAndSize();
  // The same to every root, on the large lane; the small one takes the smallest.
  void ReducesToEveryRoot();
  void ReducesLargeVectors();
  // 2^(bits-1) from each of the ranks: nothing is left of an even number of them, and one of an odd
  // one. The product of 3s leaves the range of every integer but is right modulo 2^bits.
  void IntegersWrap();
  void NanWinsAndZerosAreOrdered();
  void AllRanksGetTheSameBits();
  // AllReduce that scales, where that is there, gives the bits of AllReduce and a scale.
  void ScalesWhatItReduces();
  // ReduceScatter, where it is there, gives each member the sum of its part, whatever the parts' sizes.
  void ReducesEveryPart();

  // ---- backend_movements.cc ----

  void HasAName();
  void BroadcastsFromEveryRoot();
  void GathersEqualParts();
  void GathersUnequalParts();
  void ExchangesParts();
  // Patterns drawn from a seed that all ranks share: several slices of a pair, empty ones, pairs
  // and members without any, a few large ones.
  void ExchangesSlices();
  // On the small lane operations are started in one order and may be looked at in any.
  void SeveralInFlightOnTheSmallLane();
  // The lanes are separate lines: one rank may be ahead on the one while it is behind on the other.
  void LanesDoNotMix();
  // Sets are separate lines, too. Collective over the world: every other rank, and everyone again.
  void SetsHaveTheirOwnMembers();
  // Many sets one after the other, of random members, several alive at once.
  void SetsComeAndGo();

  // ---- backend_messages.cc ----

  // All ranks to all, themselves too, on several tags; each tag is received in its own order and
  // the tags in another one than that of the sends.
  void MessagesKeepTheirOrder();
  // More than any medium stores, in both directions, and everybody sends first.
  void LargeMessagesCross();
  // Messages wait for nothing that the lanes do, and hold nothing up there.
  void MessagesPassTheLanes();

 private:
  static constexpr fusion::Lane kLanes[] = {fusion::Lane::kSmall, fusion::Lane::kLarge};

  static ops::Channel World(fusion::Lane lane) { return {core::kWorldSet, lane}; }

  static std::vector<std::uint8_t> Bytes(int from, std::size_t count);
  static std::vector<std::uint8_t> Concatenation(const std::vector<std::int64_t>& bytes);

  template <typename T>
  void Reduce(fusion::Lane lane, core::DType dtype, core::ReduceOp op, std::int64_t count,
              int root);
  // ReduceAny does what Reduce does; root -1 is an all-reduce.
  void ReduceAny(fusion::Lane lane, core::DType dtype, core::ReduceOp op, std::int64_t count,
                 int root);
  template <typename T>
  void Wrap(fusion::Lane lane, core::DType dtype);
  template <typename T>
  void Scale(fusion::Lane lane, core::DType dtype, std::int64_t count, fusion::Scale after);
  template <typename T>
  void OrderZerosAndNan(fusion::Lane lane, core::DType dtype);
  void ExchangeOnce(ops::Channel channel, const std::vector<int>& members, std::uint32_t seed);

  ops::Backend& On(ops::Channel channel) { return *backend_.Select(channel).backend; }
  ops::Rootless& RootlessOf(ops::Channel channel) { return *backend_.Select(channel).rootless; }

  // On the large lane the operation has ended inside its call.
  void Finish(std::unique_ptr<ops::Completion> operation, fusion::Lane lane = fusion::Lane::kSmall);
  static void ExpectOk(const core::Status& status);

  ops::Backends& backend_;
  const int rank_;
  const int size_;
  const Traits traits_;
};

struct BackendCheck {
  const char* name;
  void (BackendConformance::*run)();
};

inline constexpr BackendCheck kBackendChecks[] = {
    {"HasAName", &BackendConformance::HasAName},
    {"ReducesEveryTypeAndSize", &BackendConformance::ReducesEveryTypeAndSize},
    {"ReducesToEveryRoot", &BackendConformance::ReducesToEveryRoot},
    {"ReducesLargeVectors", &BackendConformance::ReducesLargeVectors},
    {"IntegersWrap", &BackendConformance::IntegersWrap},
    {"NanWinsAndZerosAreOrdered", &BackendConformance::NanWinsAndZerosAreOrdered},
    {"AllRanksGetTheSameBits", &BackendConformance::AllRanksGetTheSameBits},
    {"ScalesWhatItReduces", &BackendConformance::ScalesWhatItReduces},
    {"ReducesEveryPart", &BackendConformance::ReducesEveryPart},
    {"BroadcastsFromEveryRoot", &BackendConformance::BroadcastsFromEveryRoot},
    {"GathersEqualParts", &BackendConformance::GathersEqualParts},
    {"GathersUnequalParts", &BackendConformance::GathersUnequalParts},
    {"ExchangesParts", &BackendConformance::ExchangesParts},
    {"ExchangesSlices", &BackendConformance::ExchangesSlices},
    {"SeveralInFlightOnTheSmallLane", &BackendConformance::SeveralInFlightOnTheSmallLane},
    {"LanesDoNotMix", &BackendConformance::LanesDoNotMix},
    {"SetsHaveTheirOwnMembers", &BackendConformance::SetsHaveTheirOwnMembers},
    {"SetsComeAndGo", &BackendConformance::SetsComeAndGo},
    {"MessagesKeepTheirOrder", &BackendConformance::MessagesKeepTheirOrder},
    {"LargeMessagesCross", &BackendConformance::LargeMessagesCross},
    {"MessagesPassTheLanes", &BackendConformance::MessagesPassTheLanes},
};

}  // namespace sirtaki::tests
