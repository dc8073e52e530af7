// The main function of tests over MPI (mpi_main.cc): every rank runs the same tests in the same
// order.
//
// A rank's failures are printed with its number, the verdict is that of all ranks, and a watchdog
// ends the job when one test takes longer than SIRTAKI_TEST_WATCHDOG seconds (150), naming the test
// on each rank that is stuck in it.
#pragma once

#include <cstdint>

namespace sirtaki::tests {

// Which MPI a program's tests start with. A program that wants another than MPI_THREAD_MULTIPLE
// defines this function itself.
enum class MpiStart : std::uint8_t { kNone, kMultiple, kSerialized, kFunneled };
MpiStart WantedMpiStart();

// This process among the ranks; preconditions: MPI is initialised and not finalized.
int WorldRank();
int WorldSize();

// Collective: true if every rank passes true.
bool TrueOnAllRanks(bool mine);

}  // namespace sirtaki::tests
