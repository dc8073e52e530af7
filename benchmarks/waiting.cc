// CPU time of the busiest rank while nothing happens, and while a peer is late.
//
//   mpirun -np 2 --bind-to none waiting [--seconds S]
#include <mpi.h>
#include <sirtaki/torch.h>

#include <ATen/Functions.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "benchmarks/support/measure.h"
#include "benchmarks/support/ranks.h"

namespace sirtaki::benchmarks {
namespace {

// Percent of a core.
double Load(const std::function<void()>& body) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double cpu = CpuSeconds();
  const auto start = Clock::now();
  body();
  return Slowest((CpuSeconds() - cpu) / Seconds(Clock::now() - start)) * 100;
}

int Main(int argc, char** argv) {
  const int seconds = std::stoi(Flag(argc, argv, "seconds", "10"));
  init();
  const MpiOfReferences mpi;
  const std::string time = std::to_string(seconds) + " s";
  const at::Tensor tensor = at::zeros({1});
  RawVector raw(1);
  const auto sleep = [&] { ::sleep(static_cast<unsigned>(seconds)); };
  const auto late = [&](const std::function<void()>& call) {
    return Load([&] {
      if (rank() == size() - 1) sleep();
      call();
    });
  };
  allreduce_(tensor, AllreduceOptions().name("late"));  // whatever the first call sets up
  const double idle = Load(sleep);
  const double ours = late([&] { allreduce_(tensor, AllreduceOptions().name("late")); });
  const double theirs = late([&] { raw.AllReduce(); });
  if (rank() == 0) {
    Emit(Row{"CPU of an idle rank, " + time, size(), idle, "% of a core", "goal", 0.1});
    const std::string work = "CPU while a peer is late, " + time;
    Emit(Row{work, size(), ours, "% of a core", "MPI_Allreduce", theirs});
    Emit(Sample{work, size(), "goal", 1, "% of a core"});
  }
  shutdown();
  mpi.End();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("waiting", [&] { return Main(argc, argv); });
}
