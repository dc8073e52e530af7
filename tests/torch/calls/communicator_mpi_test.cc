// RANKS: 1 2 3 4
// Programs with MPI code of their own: jobs on communicators of theirs, communicators of process
// sets, and MPI calls while the library works.
#include "sirtaki/mpi.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <thread>
#include <vector>

#include "tests/support/mpi_main.h"

namespace sirtaki {
namespace {

using ::testing::HasSubstr;

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

InitOptions Quick() { return InitOptions().set("start_timeout", 20); }

double SumOver(MPI_Comm comm, double value) {
  double sum = 0;
  MPI_Allreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, comm);
  return sum;
}

// Beside the library: with calls that cannot block, each under the gate.
double SumBesideOver(MPI_Comm comm, double value) {
  double sum = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const MpiGate gate;
    MPI_Iallreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, comm, &request);
  }
  for (int done = 0; done == 0; std::this_thread::yield()) {
    const MpiGate gate;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
  }
  return sum;
}

// Two jobs in one mpirun, of the even and of the odd processes, one after the other with a job of
// all: what a job leaves in the process must not reach another with other ranks.
TEST(CommunicatorMpiTest, AJobOnTheRanksOfACommunicator) {
  for (int round = 0; round < 3; ++round) {
    MPI_Comm half = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, WorldRank() % 2, WorldRank(), &half);
    int expected = 0;
    MPI_Comm_size(half, &expected);
    init(half, Quick());
    init(half, Quick());
    EXPECT_THROW(init(MPI_COMM_WORLD, Quick()), Error);  // of other ranks
    MPI_Comm_free(&half);
    EXPECT_EQ(size(), expected);
    EXPECT_EQ(rank(), WorldRank() / 2);
    const auto sum =
        allreduce(torch::full({3}, double(WorldRank())), AllreduceOptions().op(ReduceOp::Sum));
    double all = 0;
    for (int r = WorldRank() % 2; r < WorldSize(); r += 2) all += r;
    EXPECT_EQ(sum[0].item<double>(), all);
    shutdown();

    init(MPI_COMM_WORLD, Quick());
    EXPECT_EQ(size(), WorldSize());
    EXPECT_EQ(allreduce(torch::ones({1}), AllreduceOptions().op(ReduceOp::Sum)).item<float>(),
              static_cast<float>(WorldSize()));
    shutdown();
  }
}

TEST(CommunicatorMpiTest, AProcessSetAsACommunicator) {
  init(Quick());
  std::vector<int> ranks;
  for (int r = 0; r < size(); r += 2) ranks.push_back(r);
  const ProcessSet even = add_process_set(ranks);
  for (int round = 0; round < 5; ++round) {
    MPI_Comm all = communicator();
    EXPECT_EQ(SumOver(all, 1), size());
    if (even.included()) {
      MPI_Comm own = communicator(even, std::chrono::seconds(20));
      int here = -1;
      MPI_Comm_rank(own, &here);
      EXPECT_EQ(here, even.rank());
      EXPECT_EQ(SumOver(own, rank()), SumOver(own, even.ranks()[static_cast<std::size_t>(here)]));
      MPI_Comm_free(&own);
    } else {
      EXPECT_THROW(communicator(even), Error);
    }
    MPI_Comm_free(&all);
  }
  shutdown();
}

TEST(CommunicatorMpiTest, TheProgramCallsMpiWhileTheLibraryWorks) {
  init(Quick());
  MPI_Comm own = communicator();
  std::thread other([own] {
    for (int i = 0; i < 300; ++i) ASSERT_EQ(SumBesideOver(own, i), i * double(WorldSize()));
  });
  for (int i = 0; i < 100; ++i) {
    const auto small = allreduce_async(torch::full({10}, i), AllreduceOptions().name("small"));
    const auto large = allreduce(torch::full({50000}, float(i)), AllreduceOptions().name("large"));
    EXPECT_EQ(synchronize(small)[9].item<float>(), float(i));
    EXPECT_EQ(large[49999].item<float>(), float(i));
  }
  other.join();
  MPI_Comm_free(&own);
  shutdown();
}

TEST(CommunicatorMpiTest, WhatIsNoCommunicatorOfAGroupIsRefused) {
  try {
    init(MPI_COMM_NULL);
    FAIL() << "it was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("MPI_COMM_NULL"));
  }
  EXPECT_FALSE(is_initialized());
}

}  // namespace
}  // namespace sirtaki
