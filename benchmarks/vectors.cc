// All-reduce of one vector, synchronous, against raw MPI and memcpy, and between hosts against a raw
// stream of as many bytes as have to cross; all-gather and reduce-scatter of one, against raw MPI.
//
//   mpirun -np 2 --bind-to none vectors [--works latency,allreduce,allgather,reducescatter]
//                                       [--bytes N,...] [--rounds N] [--references-only]
//
// mpirun starts it whatever medium ours has: MPI serves the references and the clock.
// --bytes: of the vector that all ranks have or get together.
// --references-only: MPI alone, in a process whose malloc keeps what is freed.
#include <mpi.h>
#include <sirtaki/torch.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "benchmarks/support/measure.h"
#include "benchmarks/support/ranks.h"
#include "benchmarks/support/raw_stream.h"

namespace sirtaki::benchmarks {
namespace {

struct Setup {
  int rounds = 7;
  bool references_only = false;
};

std::string MpiName(const Setup& setup) {
  return setup.references_only ? "MPI_Allreduce, memory kept" : "MPI_Allreduce";
}

void Latency(const Setup& setup, std::int64_t bytes) {
  const int calls = bytes <= 4096 ? 300 : 100;
  const std::int64_t elements = bytes / 4;
  const at::Tensor tensor = at::zeros({elements});
  RawVector raw(elements);
  const auto options = AllreduceOptions().name("latency/" + std::to_string(bytes));
  const auto each = [&](const std::function<void()>& call) {
    return Timed([&] {
             for (int i = 0; i < calls; ++i) call();
           }) /
           calls;
  };
  std::vector<Variant> variants;
  if (!setup.references_only) {
    variants.push_back({kOurs, [&] { return each([&] { allreduce_(tensor, options); }); }});
  }
  variants.push_back({MpiName(setup), [&] { return each([&] { raw.AllReduce(); }); }});
  Measure("synchronous all-reduce of " + SizeName(bytes), setup.rounds, "us", 1e6, variants);
}

void Vector(const Setup& setup, std::int64_t bytes) {
  const std::int64_t elements = bytes / 4;
  const auto size = static_cast<std::size_t>(bytes);
  const std::string name = "all-reduce of " + SizeName(bytes);
  RawVector raw(elements);
  const Variant mpi = {MpiName(setup), [&] { return Timed([&] { raw.AllReduce(); }); }};
  if (setup.references_only) {
    Measure(name + ", arena", setup.rounds, "ms", 1e3, {mpi});
    Measure(name + ", private", setup.rounds, "ms", 1e3, {mpi});
    return;
  }
  const at::Tensor source = PrivateZeros(elements);
  const at::Tensor target = PrivateZeros(elements);
  const Variant copy = {
      "memcpy by all ranks at once",
      [&] { return Timed([&] { std::memcpy(target.data_ptr(), source.data_ptr(), size); }); }};
  std::vector<Variant> references = {mpi, copy};
  RawStream wire(bytes);
  if (wire.crosses()) {
    references.push_back(
        {"raw stream of as many bytes", [&] { return Timed([&] { wire.Stream(); }); }});
  }
  for (const char* where : {"arena", "private"}) {
    const bool shared = where == std::string("arena");
    const at::Tensor tensor = shared ? SharedZeros(elements) : PrivateZeros(elements);
    const auto options = AllreduceOptions().name(name + where);
    std::vector<Variant> variants = {
        {kOurs, [&] { return Timed([&] { allreduce_(tensor, options); }); }}};
    variants.insert(variants.end(), references.begin(), references.end());
    Measure(name + ", " + where, setup.rounds, "ms", 1e3, variants);
  }
}

// `bytes`: a multiple of 4 times the ranks.
void Parts(const Setup& setup, const std::string& work, std::int64_t bytes) {
  const bool gathers = work == "allgather";
  const std::int64_t elements = bytes / 4;
  const auto part = static_cast<int>(elements / size());
  const at::Tensor whole = SharedZeros(elements);
  const at::Tensor mine = SharedZeros(part);
  const std::string name = (gathers ? "all-gather of " : "reduce-scatter of ") + SizeName(bytes);
  const auto gather = AllgatherOptions().name(name);
  const auto reduce = ReducescatterOptions().name(name).op(ReduceOp::Sum);
  std::vector<Variant> variants;
  variants.push_back(
      {kOurs, [&] {
         return Timed([&] { gathers ? allgather(mine, gather) : reducescatter(whole, reduce); });
       }});
  variants.push_back({gathers ? "MPI_Allgather" : "MPI_Reduce_scatter_block", [&] {
                        return Timed([&] {
                          if (gathers) {
                            MPI_Allgather(mine.data_ptr(), part, MPI_FLOAT, whole.data_ptr(), part,
                                          MPI_FLOAT, MPI_COMM_WORLD);
                          } else {
                            MPI_Reduce_scatter_block(whole.data_ptr(), mine.data_ptr(), part,
                                                     MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                          }
                        });
                      }});
  Measure(name, setup.rounds, "ms", 1e3, variants);
}

int Main(int argc, char** argv) {
  Setup setup;
  setup.rounds = std::stoi(Flag(argc, argv, "rounds", "7"));
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == std::string("--references-only")) setup.references_only = true;
  }
  if (setup.references_only) KeepMemory();
  init();
  const MpiOfReferences mpi;
  for (const std::string& work : ListFlag(argc, argv, "works", "latency,allreduce")) {
    const bool latency = work == "latency";
    for (const std::string& bytes :
         ListFlag(argc, argv, "bytes",
                  latency ? "4,64,1024,4096,16384,65536"
                          : "1048576,4194304,16777216,67108864,268435456")) {
      if (work == "allgather" || work == "reducescatter") {
        Parts(setup, work, std::stoll(bytes));
      } else {
        (latency ? Latency : Vector)(setup, std::stoll(bytes));
      }
    }
  }
  shutdown();
  mpi.End();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("vectors", [&] { return Main(argc, argv); });
}
