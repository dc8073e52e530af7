// Random programs: every rank submits the same pieces of work in an order of its own, at its own
// pace, and waits, polls or does neither. In some runs somebody aborts or is cut off. Whatever
// happens, every handle completes, and a result without an error is right.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"
#include "tests/support/test_scale.h"

namespace sirtaki::session {
namespace {

using core::OpKind;
using core::Status;
using core::StatusCode;
using std::chrono::milliseconds;
using tests::RankThreads;
using tests::Vector;

enum class Trouble { kNone, kAbort, kIsolation };

// The same on all ranks.
struct Program {
  struct Piece {
    OpKind kind = OpKind::kAllReduce;
    std::size_t elements = 1;
    int root = -1;
    bool mismatch = false;  // the last rank asks for another shape
  };

  explicit Program(std::uint64_t seed) : random(seed) {
    size = 2 + static_cast<int>(random() % 3);
    const auto hosts = static_cast<int>(1 + random() % 3);
    for (int rank = 0; rank < size; ++rank) host_of_rank.push_back(rank % hosts);
    const auto kind_of_run = random() % 8;
    trouble = kind_of_run == 0   ? Trouble::kAbort
              : kind_of_run == 1 ? Trouble::kIsolation
                                 : Trouble::kNone;
    troubled_rank = static_cast<int>(random() % static_cast<unsigned>(size));
    steps = 1 + static_cast<int>(random() % 3);
    trouble_step = static_cast<int>(random() % static_cast<unsigned>(steps));
    const std::size_t pieces = 1 + random() % 20;
    for (std::size_t i = 0; i < pieces; ++i) {
      Piece piece;
      piece.kind =
          std::array{OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kAllGather}[random() % 3];
      piece.elements = random() % 4 == 0 ? 1 + random() % 50000 : 1 + random() % 50;
      if (piece.kind == OpKind::kBroadcast) {
        piece.root = static_cast<int>(random() % static_cast<unsigned>(size));
      }
      piece.mismatch = piece.kind == OpKind::kAllReduce && random() % 10 == 0;
      plan.push_back(piece);
    }
    using Sharing = InprocWorld::Sharing;
    sharing = std::array{Sharing::kNone, Sharing::kDirect, Sharing::kStaged}[random() % 3];
  }

  std::mt19937_64 random;
  int size = 2;
  std::vector<int> host_of_rank;
  Trouble trouble = Trouble::kNone;
  int troubled_rank = 0;
  int steps = 1;
  int trouble_step = 0;
  std::vector<Piece> plan;
  InprocWorld::Sharing sharing = InprocWorld::Sharing::kNone;
};

void Dawdle(std::mt19937_64& random) {
  const auto what = random() % 40;
  if (what == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
  for (std::uint64_t i = 0; i < what; ++i) std::this_thread::yield();
}

std::unique_ptr<Vector> Make(const Program& program, std::size_t index, int rank) {
  const Program::Piece& piece = program.plan[index];
  std::size_t elements = piece.elements;
  if (piece.mismatch && rank == program.size - 1) ++elements;
  if (piece.kind == OpKind::kAllGather) elements = static_cast<std::size_t>(rank);
  return std::make_unique<Vector>(piece.kind, "piece" + std::to_string(index),
                                  std::vector<float>(elements, static_cast<float>(rank)),
                                  piece.root);
}

void ExpectRight(const Program& program, std::size_t index, const Vector& vector) {
  const Program::Piece& piece = program.plan[index];
  if (piece.kind == OpKind::kAllGather) {
    std::vector<float> expected;
    for (int rank = 0; rank < program.size; ++rank) {
      expected.insert(expected.end(), static_cast<std::size_t>(rank), static_cast<float>(rank));
    }
    EXPECT_EQ(vector.gathered(), expected);
    return;
  }
  const int expected =
      piece.kind == OpKind::kBroadcast ? piece.root : program.size * (program.size - 1) / 2;
  const auto wrong =
      std::count_if(vector.values().begin(), vector.values().end(),
                    [&](float value) { return value != static_cast<float>(expected); });
  EXPECT_EQ(wrong, 0) << "of piece " << index;
}

// One step: everything once. False after a group's fault.
bool RunStep(const Program& program, Session& session, std::mt19937_64& random) {
  const int rank = session.topology().rank;
  std::vector<std::size_t> order(program.plan.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::unique_ptr<Vector>> vectors(order.size());
  for (const std::size_t i : order) {
    Dawdle(random);
    vectors[i] = Make(program, i, rank);
    const Status accepted = vectors[i]->Submit(session, random() % 4 == 0);
    if (!accepted.ok()) {
      EXPECT_FALSE(session.fault().ok()) << accepted.ToString();
    }
  }
  std::shuffle(order.begin(), order.end(), random);
  bool good = true;
  for (const std::size_t i : order) {
    Dawdle(random);
    const core::HandlePtr handle = vectors[i]->work().handle;
    if (random() % 4 == 0) {
      static_cast<void>(session.Wait(*handle, core::Clock::now() + milliseconds(random() % 3)));
    }
    const Status status = vectors[i]->Synchronize(session);
    if (status.ok()) {
      EXPECT_FALSE(program.plan[i].mismatch);
      ExpectRight(program, i, *vectors[i]);
    } else if (status.code() == StatusCode::kMismatch) {
      EXPECT_TRUE(program.plan[i].mismatch) << status.ToString();
    } else {
      EXPECT_NE(program.trouble, Trouble::kNone) << status.ToString();
      good = false;
    }
  }
  return good;
}

void RunRank(const Program& program, const std::shared_ptr<InprocWorld>& world, int rank,
             std::uint64_t seed) {
  SCOPED_TRACE("again with SIRTAKI_TEST_SEED=" + std::to_string(seed));
  StartOptions options = tests::SessionOptions();
  options.config.wait = seed % 2 == 0 ? core::WaitMode::kYield : core::WaitMode::kSpin;
  options.config.id_capacity = seed % 3 == 0 ? 16 : 1024;
  options.config.tree_arity = 1 + static_cast<int>(seed % 3);
  if (program.trouble == Trouble::kIsolation) {
    options.config.ping_interval = milliseconds(50);
    options.config.peer_timeout = milliseconds(500);
    options.config.transport = core::TransportMode::kMpi;  // the hub's, which can isolate
  }
  std::shared_ptr<Session> session;
  const Status started = Session::CreateInproc(world, rank, options, &session);
  if (!started.ok()) {  // within so short a time for peers a slow start is a lost rank
    EXPECT_EQ(program.trouble, Trouble::kIsolation) << started.ToString();
    return;
  }
  std::mt19937_64 random(seed * 31 + static_cast<unsigned>(rank));
  bool good = true;
  for (int step = 0; step < program.steps && good; ++step) {
    RankThreads::Note("step " + std::to_string(step));
    if (rank == program.troubled_rank && step == program.trouble_step) {
      if (program.trouble == Trouble::kAbort) session->Abort("enough");
      if (program.trouble == Trouble::kIsolation) world->hub().Isolate(rank);
    }
    good = RunStep(program, *session, random);
  }
  RankThreads::Note("shutdown");
  const Status end = session->Shutdown("the program is over");
  if (program.trouble == Trouble::kNone) {
    EXPECT_TRUE(end.ok()) << end.ToString();
  }
}

TEST(SoakTest, RandomProgramsEndWithRightResultsOrACause) {
  const int runs = tests::ScaledCount(20, 500);
  const std::uint64_t first = tests::TestSeed();
  for (int run = 0; run < runs; ++run) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(run);
    const Program program(seed);
    const auto world = std::make_shared<InprocWorld>(program.size, program.host_of_rank);
    world->Share(program.sharing);
    RankThreads::Run(program.size, [&](int rank) { RunRank(program, world, rank, seed); });
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace sirtaki::session
