// Collectives through the public API against raw MPI in the same run.
//
//   mpirun -np 2 --bind-to none collectives [--rounds N] [--json FILE] [--idle-seconds S]
#include <mpi.h>
#include <sirtaki/torch.h>

#include <ATen/Functions.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "benchmarks/support/report.h"
#include "benchmarks/support/resnet50_shapes.h"

namespace sirtaki::benchmarks {
namespace {

struct Setup {
  int rounds = 15;
  int idle_seconds = 10;
  std::string json;
};

// The slowest rank's time, so that all ranks see one number.
double Slowest(double seconds) {
  MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return seconds;
}

double Timed(const std::function<void()>& body) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto start = Clock::now();
  body();
  return Slowest(Seconds(Clock::now() - start));
}

Row Latency(const Setup& setup) {
  constexpr int kCalls = 500;
  at::Tensor one = at::zeros({1});
  float raw = 0;
  const Pair pair = Interleave(
      setup.rounds,
      [&] {
        return Timed([&] {
                 for (int i = 0; i < kCalls; ++i)
                   allreduce_(one, AllreduceOptions().name("latency"));
               }) /
               kCalls;
      },
      [&] {
        return Timed([&] {
                 for (int i = 0; i < kCalls; ++i) {
                   MPI_Allreduce(MPI_IN_PLACE, &raw, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                 }
               }) /
               kCalls;
      });
  return {"all-reduce of 4 bytes, synchronous",
          size(),
          pair.ours * 1e6,
          "us",
          "MPI_Allreduce",
          pair.reference * 1e6};
}

Row ResNet50(const Setup& setup) {
  std::vector<at::Tensor> gradients;
  std::vector<std::string> names;
  std::int64_t elements = 0;
  for (const auto& shape : ResNet50Shapes()) {
    gradients.push_back(at::zeros(shape));
    names.push_back("gradient/" + std::to_string(names.size()));
    elements += gradients.back().numel();
  }
  std::vector<float> flat(static_cast<std::size_t>(elements));
  const Pair pair = Interleave(
      setup.rounds,
      [&] {
        return Timed([&] {
          std::vector<Handle> handles;
          for (std::size_t i = gradients.size();
               i-- > 0;) {  // as backward does, the last layer first
            handles.push_back(allreduce_async_(gradients[i], AllreduceOptions().name(names[i])));
          }
          for (const Handle& handle : handles) synchronize(handle);
        });
      },
      [&] {
        return Timed([&] {
          MPI_Allreduce(MPI_IN_PLACE, flat.data(), static_cast<int>(elements), MPI_FLOAT, MPI_SUM,
                        MPI_COMM_WORLD);
        });
      });
  return {"161 gradients of ResNet-50, 102 MB",
          size(),
          pair.ours * 1e3,
          "ms",
          "MPI_Allreduce in place",
          pair.reference * 1e3};
}

Row SmallTensors(const Setup& setup) {
  constexpr int kTensors = 1000;
  constexpr int kElements = 256;
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  for (int i = 0; i < kTensors; ++i) {
    tensors.push_back(at::zeros({kElements}));
    names.push_back("small/" + std::to_string(i));
  }
  std::vector<float> flat(kTensors * kElements);
  const Pair pair = Interleave(
      setup.rounds,
      [&] {
        return Timed([&] {
          std::vector<Handle> handles;
          for (int i = 0; i < kTensors; ++i) {
            const auto index = static_cast<std::size_t>(i);
            handles.push_back(
                allreduce_async_(tensors[index], AllreduceOptions().name(names[index])));
          }
          for (const Handle& handle : handles) synchronize(handle);
        });
      },
      [&] {
        return Timed([&] {
          for (int i = 0; i < kTensors; ++i) {
            MPI_Allreduce(MPI_IN_PLACE, flat.data() + i * kElements, kElements, MPI_FLOAT, MPI_SUM,
                          MPI_COMM_WORLD);
          }
        });
      });
  return {"1000 tensors of 256 floats", size(), pair.ours * 1e3, "ms", "1000 x MPI_Allreduce",
          pair.reference * 1e3};
}

constexpr std::int64_t kVectorElements = 16 << 20;

double TimedAllreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  return Timed([&] { allreduce_(tensor, options); });
}

// Half the bytes travel, and every element is converted four times.
Row Compressed(const Setup& setup, Compression compression, const std::string& name) {
  const at::Tensor vector = at::zeros({kVectorElements});
  const auto plain = AllreduceOptions().name("vector");
  const auto compressed = AllreduceOptions(plain)
                              .compression(compression)
                              .compression_scope(CompressionScope::Everywhere);
  const Pair pair = Interleave(
      setup.rounds, [&] { return TimedAllreduce(vector, compressed); },
      [&] { return TimedAllreduce(vector, plain); });
  return {"67 MB of float32 as " + name, size(), pair.ours * 1e3, "ms", "as float32",
          pair.reference * 1e3};
}

Row HalfVector(const Setup& setup, at::ScalarType type) {
  const at::Tensor halves = at::zeros({kVectorElements}, type);
  const at::Tensor floats = at::zeros({kVectorElements});
  const auto options = AllreduceOptions().name("vector");
  const Pair pair = Interleave(
      setup.rounds, [&] { return TimedAllreduce(halves, options); },
      [&] { return TimedAllreduce(floats, options); });
  return {"34 MB of " + std::string(type == at::kHalf ? "float16" : "bfloat16"),
          size(),
          pair.ours * 1e3,
          "ms",
          "as many float32",
          pair.reference * 1e3};
}

// CPU time of the busiest rank, percent of a core.
Row Idle(const Setup& setup) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double cpu = CpuSeconds();
  const auto start = Clock::now();
  ::sleep(static_cast<unsigned>(setup.idle_seconds));
  const double used = (CpuSeconds() - cpu) / Seconds(Clock::now() - start);
  return {"idle for " + std::to_string(setup.idle_seconds) + " s",
          size(),
          Slowest(used) * 100,
          "% core",
          "goal 1 %",
          1.0};
}

Row Waiting(const Setup& setup) {
  at::Tensor one = at::zeros({1});
  MPI_Barrier(MPI_COMM_WORLD);
  const double cpu = CpuSeconds();
  const auto start = Clock::now();
  if (rank() == size() - 1) ::sleep(static_cast<unsigned>(setup.idle_seconds));
  allreduce_(one, AllreduceOptions().name("late"));
  const double used = (CpuSeconds() - cpu) / Seconds(Clock::now() - start);
  return {"synchronize, a peer late by " + std::to_string(setup.idle_seconds) + " s",
          size(),
          Slowest(used) * 100,
          "% core",
          "goal 5 %",
          5.0};
}

int Main(int argc, char** argv) {
  Setup setup;
  setup.rounds = std::stoi(Flag(argc, argv, "rounds", "15"));
  setup.idle_seconds = std::stoi(Flag(argc, argv, "idle-seconds", "10"));
  setup.json = Flag(argc, argv, "json", "");
  init(argc, argv);
  std::vector<Row> rows;
  rows.push_back(Latency(setup));
  rows.push_back(ResNet50(setup));
  rows.push_back(SmallTensors(setup));
  rows.push_back(Compressed(setup, Compression::F16, "float16"));
  rows.push_back(Compressed(setup, Compression::BF16, "bfloat16"));
  rows.push_back(HalfVector(setup, at::kHalf));
  rows.push_back(HalfVector(setup, at::kBFloat16));
  if (setup.idle_seconds > 0) {
    rows.push_back(Idle(setup));
    rows.push_back(Waiting(setup));
  }
  if (rank() == 0) Print(rows, setup.json);
  shutdown();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("collectives", [&] { return Main(argc, argv); });
}
