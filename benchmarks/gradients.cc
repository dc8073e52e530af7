// Many tensors, submitted together and waited for, against raw MPI.
//
//   mpirun -np 2 --bind-to none gradients [--works resnet50,small,calls,half] [--rounds N]
//                                         [--references-only]
//
// --references-only: MPI alone, in a process whose malloc keeps what is freed.
#include <mpi.h>
#include <sirtaki/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "benchmarks/support/measure.h"
#include "benchmarks/support/ranks.h"
#include "benchmarks/support/resnet50_shapes.h"

namespace sirtaki::benchmarks {
namespace {

struct Setup {
  int rounds = 9;
  bool references_only = false;
};

// Named tensors, reduced as backward does it: the last layer first.
class Gradients {
 public:
  explicit Gradients(std::string prefix) : prefix_(std::move(prefix)) {}

  void Add(at::Tensor tensor) {
    options_.push_back(AllreduceOptions().name(prefix_ + std::to_string(tensors_.size())));
    tensors_.push_back(std::move(tensor));
  }

  void AllReduce() const {
    std::vector<Handle> handles;
    for (std::size_t i = tensors_.size(); i-- > 0;) {
      handles.push_back(allreduce_async_(tensors_[i], options_[i]));
    }
    for (const Handle& handle : handles) synchronize(handle);
  }

  void AllReduceGrouped() const {
    grouped_allreduce_(tensors_, AllreduceOptions().name(prefix_ + "group"));
  }

 private:
  std::string prefix_;
  std::vector<at::Tensor> tensors_;
  std::vector<AllreduceOptions> options_;
};

std::int64_t Product(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

void ResNet50(const Setup& setup) {
  std::int64_t elements = 0;
  for (const auto& shape : ResNet50Shapes()) elements += Product(shape);
  RawVector flat(elements);
  const Variant mpi = {setup.references_only ? "MPI_Allreduce of one vector, memory kept"
                                             : "MPI_Allreduce of one vector",
                       [&] { return Timed([&] { flat.AllReduce(); }); }};
  const std::string work = "161 gradients of ResNet-50, 102 MB, ";
  const auto measure = [&](const std::string& where, const Gradients* gradients) {
    std::vector<Variant> variants;
    if (gradients != nullptr) {
      variants.push_back({kOurs, [gradients] { return Timed([&] { gradients->AllReduce(); }); }});
    }
    variants.push_back(mpi);
    Measure(work + where, setup.rounds, "ms", 1e3, variants);
  };
  if (setup.references_only) {
    for (const char* where : {"arena", "shared", "LibTorch's memory", "private"}) {
      measure(where, nullptr);
    }
    return;
  }
  {
    // What arenas submit: full buckets.
    constexpr std::int64_t kBucket = std::int64_t{16} << 18;
    const at::Tensor arena = SharedZeros(elements);
    Gradients buckets("bucket/");
    for (std::int64_t from = 0; from < elements; from += kBucket) {
      buckets.Add(arena.narrow(0, from, std::min(kBucket, elements - from)));
    }
    measure("arena", &buckets);
    // Each by itself, where it lies.
    Gradients views("view/");
    std::int64_t from = 0;
    for (const auto& shape : ResNet50Shapes()) {
      views.Add(arena.narrow(0, from, Product(shape)).view(shape));
      from += Product(shape);
    }
    measure("shared", &views);
  }
  Gradients own("own/");
  Gradients secluded("private/");
  for (const auto& shape : ResNet50Shapes()) {
    own.Add(at::zeros(shape));
    secluded.Add(PrivateZeros(Product(shape)).view(shape));
  }
  measure("LibTorch's memory", &own);
  measure("private", &secluded);
}

// `calls_only`: neither as one group, nor by MPI.
void SmallTensors(const Setup& setup, bool calls_only) {
  constexpr int kTensors = 1000;
  constexpr int kElements = 256;
  if (setup.references_only) return;
  Gradients tensors("small/");
  for (int i = 0; i < kTensors; ++i) tensors.Add(at::zeros({kElements}));
  RawVector flat(kTensors * kElements);
  const Variant mpi = {"MPI_Allreduce of each", [&] {
                         return Timed([&] {
                           for (int i = 0; i < kTensors; ++i) {
                             flat.AllReduce(i * kElements, kElements);
                           }
                         });
                       }};
  const std::string work = "1000 tensors of 256 floats, ";
  const Variant calls = {kOurs, [&] { return Timed([&] { tensors.AllReduce(); }); }};
  if (calls_only) return Measure(work + "each by a call", setup.rounds, "ms", 1e3, {calls});
  Measure(work + "one group", setup.rounds, "ms", 1e3,
          {{kOurs, [&] { return Timed([&] { tensors.AllReduceGrouped(); }); }}, mpi});
  Measure(work + "each by a call", setup.rounds, "ms", 1e3, {calls, mpi});
}

// Half the bytes travel; compressed, every element is converted four times.
void HalfTypes(const Setup& setup) {
  if (setup.references_only) return;
  constexpr std::int64_t kElements = 16 << 20;
  const at::Tensor floats = at::zeros({kElements});
  const auto plain = AllreduceOptions().name("vector");
  const auto time = [](const at::Tensor& tensor, const AllreduceOptions& options) {
    return Timed([&] { allreduce_(tensor, options); });
  };
  const Variant reference = {"float32", [&] { return time(floats, plain); }};
  for (const Compression compression : {Compression::F16, Compression::BF16}) {
    const bool f16 = compression == Compression::F16;
    const auto compressed = AllreduceOptions(plain)
                                .compression(compression)
                                .compression_scope(CompressionScope::Everywhere);
    Measure(f16 ? "64 MiB of float32 as float16" : "64 MiB of float32 as bfloat16", setup.rounds,
            "ms", 1e3, {{kOurs, [&] { return time(floats, compressed); }}, reference});
    const at::Tensor halves = at::zeros({kElements}, f16 ? at::kHalf : at::kBFloat16);
    Measure(f16 ? "32 MiB of float16" : "32 MiB of bfloat16", setup.rounds, "ms", 1e3,
            {{kOurs, [&] { return time(halves, plain); }}, reference});
  }
}

int Main(int argc, char** argv) {
  Setup setup;
  setup.rounds = std::stoi(Flag(argc, argv, "rounds", "9"));
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == std::string("--references-only")) setup.references_only = true;
  }
  if (setup.references_only) KeepMemory();
  init();
  const MpiOfReferences mpi;
  for (const std::string& work : ListFlag(argc, argv, "works", "resnet50,small")) {
    if (work == "resnet50") ResNet50(setup);
    if (work == "small" || work == "calls") SmallTensors(setup, work == "calls");
    if (work == "half") HalfTypes(setup);
  }
  shutdown();
  mpi.End();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("gradients", [&] { return Main(argc, argv); });
}
