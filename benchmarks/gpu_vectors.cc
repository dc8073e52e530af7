// Collectives of one vector in the memory of GPUs, ours beside NCCL's own in the same process:
//
//   mpirun -np N gpu_vectors [--works all-reduce,all-gather,reduce-scatter,broadcast]
//                            [--bytes N,...] [--rounds N]
//   gpu_vectors --look yes      ends with code 77 and the reason if there is no GPU
//
// The bytes are those of the whole vector, as nccl-tests counts them: what an all-gather gives, what a
// reduce-scatter takes. The time is that of a call among several that follow each other, until the
// device is through with all of them; with ours the ranks agree on each call, with NCCL's they do not.
#include <mpi.h>
#include <sirtaki/torch.h>

#include <torch/cuda.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/support/gpu.h"
#include "benchmarks/support/measure.h"
#include "benchmarks/support/ranks.h"
#include "examples/device.h"
#include "ops/cuda/device.h"
#include "ops/nccl/nccl_api.h"
#include "tests/support/own_gpu.h"

namespace sirtaki::benchmarks {
namespace {

namespace cuda = ops::cuda;
namespace nccl = ops::nccl;

// A blocking communicator of all ranks and a stream, as torch.distributed has them.
class RawNccl {
 public:
  explicit RawNccl(int device) {
    Require(cuda::Load(&cuda_));
    Require(nccl::Load(&nccl_));
    Require(cuda::Device::Open(cuda_.api, device, &device_));
    Require(device_->Adopt());
    Require(cuda::Stream::Make(device_, &stream_));
    nccl::UniqueId id;
    if (rank() == 0) Check(nccl_.api.GetUniqueId(&id), "ncclGetUniqueId");
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    nccl::Config config;
    config.blocking = 1;
    Check(nccl_.api.CommInitRankConfig(&communicator_, size(), id, rank(), &config),
          "ncclCommInitRankConfig");
  }
  ~RawNccl() { nccl_.api.CommDestroy(communicator_); }
  RawNccl(const RawNccl&) = delete;
  RawNccl& operator=(const RawNccl&) = delete;

  const nccl::Api& api() const { return nccl_.api; }
  nccl::CommHandle communicator() const { return communicator_; }
  cuda::StreamHandle stream() const { return stream_->handle(); }
  void Check(nccl::Result result, const char* function) const {
    Require(nccl::Check(nccl_.api, result, function, communicator_));
  }

 private:
  cuda::Library cuda_;
  nccl::Library nccl_;
  std::shared_ptr<cuda::Device> device_;
  std::unique_ptr<cuda::Stream> stream_;
  nccl::CommHandle communicator_ = nullptr;
};

// One collective: a call of ours, the same of NCCL's, and the share of the vector that crosses a
// rank's link for each byte of it, from which bus bandwidth is made.
struct Call {
  std::function<void()> ours;
  std::function<void()> raw;
  double crossing = 0;
};

Call MakeCall(const std::string& work, const RawNccl& raw, const at::Tensor& part,
              const at::Tensor& whole) {
  const nccl::Api& api = raw.api();
  constexpr auto kType = nccl::DataType::kFloat32;
  void* const all = whole.data_ptr();
  void* const own = part.data_ptr();
  const auto count = static_cast<std::size_t>(whole.numel());
  const auto own_count = static_cast<std::size_t>(part.numel());
  const double others = static_cast<double>(size() - 1) / size();
  const std::string name = work + "/" + std::to_string(count);
  if (work == "all-reduce") {
    const auto options = AllreduceOptions().name(name).op(ReduceOp::Sum);
    return {[=] { allreduce_(whole, options); },
            [=, &api, &raw] {
              raw.Check(api.AllReduce(all, all, count, kType, nccl::RedOp::kSum, raw.communicator(),
                                      raw.stream()),
                        "ncclAllReduce");
            },
            2 * others};
  }
  if (work == "all-gather") {
    const auto options = AllgatherOptions().name(name);
    return {[=] { allgather_into(part, options); },
            [=, &api, &raw] {
              raw.Check(api.AllGather(own, all, own_count, kType, raw.communicator(), raw.stream()),
                        "ncclAllGather");
            },
            others};
  }
  if (work == "reduce-scatter") {
    const auto options = ReducescatterOptions().name(name).op(ReduceOp::Sum);
    return {[=] { reducescatter(whole, options); },
            [=, &api, &raw] {
              raw.Check(api.ReduceScatter(all, own, own_count, kType, nccl::RedOp::kSum,
                                          raw.communicator(), raw.stream()),
                        "ncclReduceScatter");
            },
            others};
  }
  if (work == "broadcast") {
    const auto options = BroadcastOptions().name(name);
    return {[=] { broadcast_(whole, 0, options); },
            [=, &api, &raw] {
              raw.Check(api.Broadcast(all, all, count, kType, 0, raw.communicator(), raw.stream()),
                        "ncclBroadcast");
            },
            1};
  }
  throw std::runtime_error("unknown work " + work +
                           "; the works are all-reduce, all-gather, reduce-scatter and broadcast");
}

void MeasureCall(const std::string& title, std::int64_t bytes, int rounds, int device,
                 const Call& call) {
  const int calls = static_cast<int>(std::clamp<std::int64_t>((64 << 20) / bytes, 2, 100));
  const auto timed = [&](const std::function<void()>& one) {
    return [&one, calls, device] {
      return Timed([&] {
               for (int i = 0; i < calls; ++i) one();
               torch::cuda::synchronize(device);
             }) /
             calls;
    };
  };
  const Pair seconds = Interleave(rounds, timed(call.ours), timed(call.raw));
  if (rank() != 0) return;
  const auto emit = [&](const std::string& what, const std::string& unit, double ours, double raw) {
    Emit(Row{title + ": " + what, size(), ours, unit, "NCCL itself", raw});
  };
  const double gigabytes = static_cast<double>(bytes) * 1e-9;
  emit("time", "us", seconds.ours * 1e6, seconds.reference * 1e6);
  emit("algorithm bandwidth", "GB/s", gigabytes / seconds.ours, gigabytes / seconds.reference);
  if (size() == 1) return;  // nothing crosses
  emit("bus bandwidth", "GB/s", call.crossing * gigabytes / seconds.ours,
       call.crossing * gigabytes / seconds.reference);
}

int Main(int argc, char** argv) {
  const std::string why = examples::why_no_gpu();
  if (!why.empty()) {
    std::fprintf(stderr, "%s\n", why.c_str());
    return kSkipped;
  }
  if (!Flag(argc, argv, "look", "").empty()) return 0;
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "5"));
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  const tests::OwnGpu own = tests::TakeGpu(static_cast<int>(torch::cuda::device_count()));
  init();
  {
    const torch::Device device(torch::kCUDA, static_cast<c10::DeviceIndex>(own.number));
    const examples::CurrentDevice current(device);
    const RawNccl raw(own.number);
    for (const std::string& work :
         ListFlag(argc, argv, "works", "all-reduce,all-gather,reduce-scatter,broadcast")) {
      for (const std::string& text : ListFlag(argc, argv, "bytes", "4,1024,1048576,1073741824")) {
        // Each rank has a whole element at least.
        const std::int64_t elements = std::max<std::int64_t>(std::stoll(text) / 4 / size(), 1);
        const at::Tensor part = at::zeros({elements}, device);
        const at::Tensor whole = at::zeros({elements * size()}, device);
        torch::cuda::synchronize(own.number);
        MeasureCall(work + " of " + SizeName(std::stoll(text)) + (own.shared ? ", GPU shared" : ""),
                    elements * size() * 4, rounds, own.number, MakeCall(work, raw, part, whole));
      }
    }
  }
  shutdown();
  MPI_Finalize();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("gpu_vectors", [&] { return Main(argc, argv); });
}
