// RANKS: 2 3 4 6
// Random programs of collectives on overlapping sets, under mpirun: 50 with each number of ranks,
// 200 together. A failure prints its seed; SIRTAKI_TEST_SEED runs that one first.
#include <gtest/gtest.h>
#include <mpi.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "session/session.h"
#include "tests/support/mpi_main.h"
#include "tests/support/order_cycle.h"
#include "tests/support/random_program.h"
#include "tests/support/session_calls.h"
#include "tests/support/test_scale.h"

namespace sirtaki::tests {
namespace {

int WorldRank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int WorldSize() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

// Everybody's lines, on rank 0; nothing elsewhere.
std::vector<std::vector<std::string>> Gather(const std::vector<std::string>& lines) {
  std::string mine;
  for (const std::string& line : lines) mine += line + '\n';
  const int size = WorldSize();
  const auto bytes = static_cast<int>(mine.size());
  std::vector<int> counts(static_cast<std::size_t>(size));
  MPI_Gather(&bytes, 1, MPI_INT, counts.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
  std::vector<int> begins;
  int all = 0;
  for (const int count : counts) {
    begins.push_back(all);
    all += count;
  }
  std::string text(static_cast<std::size_t>(WorldRank() == 0 ? all : 0), '\0');
  MPI_Gatherv(mine.data(), bytes, MPI_CHAR, text.data(), counts.data(), begins.data(), MPI_CHAR, 0,
              MPI_COMM_WORLD);
  std::vector<std::vector<std::string>> gathered;
  if (WorldRank() != 0) return gathered;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    std::istringstream part(
        text.substr(static_cast<std::size_t>(begins[r]), static_cast<std::size_t>(counts[r])));
    gathered.emplace_back();
    for (std::string line; std::getline(part, line);) gathered.back().push_back(line);
  }
  return gathered;
}

std::string RunUnderMpi(std::uint64_t seed) {
  const RandomProgram program(seed, WorldSize());
  StartedGroups started(program);
  session::StartOptions options = SessionOptions([&](core::Config& config) {
    config.small_bytes = program.small_bytes;
    config.fusion_bytes = program.fusion_bytes;
    if (seed % 4 == 0) config.shared_memory = core::SharedMemoryMode::kOff;
  });
  options.on_start = [&](const core::RunBatch& batch) { started.Note(batch); };
  std::shared_ptr<session::Session> session;
  const core::Status status = session::Session::CreateOfProcess(options, &session);
  if (!status.ok()) return status.ToString();
  std::string text = RunRandomProgram(program, *session, seed);
  const core::Status end = session->Shutdown("the program is over");
  if (!end.ok()) text += "\n  " + end.ToString();
  return text + CycleOf(Gather(started.names()));
}

TEST(RandomProgramsMpiTest, GiveWhatNaiveLoopsGiveInAnOrderWithoutCycles) {
  std::uint64_t first = WorldRank() == 0 ? tests::TestSeed() : 0;
  MPI_Bcast(&first, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
  const int count = tests::ScaledCount(50, 500);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    int bad = 0;
    const std::string problem = RunUnderMpi(seed);
    EXPECT_EQ(problem, "") << "again with SIRTAKI_TEST_SEED=" << seed;
    const int mine = problem.empty() ? 0 : 1;
    MPI_Allreduce(&mine, &bad, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (bad != 0) return;
  }
}

}  // namespace
}  // namespace sirtaki::tests
