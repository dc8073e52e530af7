// The probes show what NCCL itself does where our backend had to choose by reading its source. Each
// answers one question, with NCCL's functions alone, in processes of its own: one that hangs is ended,
// and the others go on.
//
//   gpu_nccl [--probes window,calls,abort,stuck,averages,kill] [--limit SECONDS]
//
// The program ends with code 77 and the reason if there is no GPU, and with code 1 if a probe failed
// that should not.
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "benchmarks/support/gpu.h"
#include "benchmarks/support/measure.h"
#include "core/base/types.h"
#include "fusion/convert.h"
#include "ops/cuda/device.h"
#include "ops/cuda/kernel_image.h"
#include "ops/cuda/kernels.h"
#include "ops/nccl/nccl_api.h"

namespace sirtaki::benchmarks {
namespace {

namespace cuda = ops::cuda;
namespace nccl = ops::nccl;
using core::DType;
using core::Status;

// The peers are reached by sockets: rank 0 has one to each, the others one to it.
class Peers {
 public:
  Peers(int rank, int size, std::vector<int> sockets)
      : rank_(rank), size_(size), sockets_(std::move(sockets)) {}

  int rank() const { return rank_; }
  int size() const { return size_; }

  // The bytes of rank 0 at every rank.
  void Share(void* bytes, std::size_t count) const {
    for (const int socket : sockets_) {
      const ssize_t done =
          rank_ == 0 ? send(socket, bytes, count, 0) : recv(socket, bytes, count, MSG_WAITALL);
      if (done != static_cast<ssize_t>(count)) throw std::runtime_error("a peer has gone");
    }
  }
  // Nobody goes on before all have come.
  void Meet() const {
    char byte = 0;
    for (const int socket : sockets_) {
      const bool told = rank_ == 0 || send(socket, &byte, 1, 0) == 1;
      if (!told || (rank_ == 0 && recv(socket, &byte, 1, MSG_WAITALL) != 1)) {
        throw std::runtime_error("a peer has gone");
      }
    }
    Share(&byte, 1);
  }

 private:
  const int rank_;
  const int size_;
  const std::vector<int> sockets_;
};

enum class Waiting { kBlocking, kSplit, kYielding, kSleeping };

// One rank: its GPU, a stream, and the two libraries.
class Rank {
 public:
  explicit Rank(const Peers& peers) : peers_(peers) {
    Require(cuda::Load(&cuda_));
    int devices = 0;
    Check(cuda_.api.GetDeviceCount(&devices), "cudaGetDeviceCount");
    // NCCL takes ranks of one host only with a GPU each; ranks that share one say that they are
    // hosts of their own.
    shares_gpu_ = devices < peers.size();
    if (shares_gpu_) setenv("NCCL_HOSTID", std::to_string(peers.rank()).c_str(), 1);
    Require(nccl::Load(&nccl_));
    Require(cuda::Device::Open(cuda_.api, peers.rank() % devices, &device_));
    Require(device_->Adopt());
    Require(cuda::Stream::Make(device_, &stream_));
    events_ = std::make_unique<cuda::EventPool>(device_);
  }

  const Peers& peers() const { return peers_; }
  bool shares_gpu() const { return shares_gpu_; }
  const nccl::Api& nccl() const { return nccl_.api; }
  const cuda::Api& cuda() const { return cuda_.api; }
  const std::shared_ptr<cuda::Device>& device() const { return device_; }
  cuda::StreamHandle stream() const { return stream_->handle(); }

  void Check(cuda::Error error, const char* function) const {
    Require(cuda::Check(cuda_.api, error, function));
  }
  // A call of a communicator that does not block may be in progress, even where its result is
  // ncclSuccess; it is waited for.
  void Check(nccl::Result result, const char* function, nccl::CommHandle communicator = nullptr,
             Waiting waiting = Waiting::kYielding) const {
    Require(nccl::Check(nccl(), result, function, communicator));
    if (communicator == nullptr) return;
    for (;;) {
      Require(nccl::Check(nccl(), nccl().CommGetAsyncError(communicator, &result),
                          "ncclCommGetAsyncError", communicator));
      Require(nccl::Check(nccl(), result, function, communicator));
      if (result != nccl::Result::kInProgress) return;
      if (waiting == Waiting::kSleeping) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      } else {
        sched_yield();
      }
    }
  }

  nccl::CommHandle Connect(Waiting waiting = Waiting::kYielding) const {
    nccl::UniqueId id;
    if (peers_.rank() == 0) Check(nccl().GetUniqueId(&id), "ncclGetUniqueId");
    peers_.Share(&id, sizeof(id));
    nccl::Config config;
    config.blocking = waiting == Waiting::kBlocking ? 1 : 0;
    config.split_share = 1;
    nccl::CommHandle communicator = nullptr;
    const nccl::Result begun =
        nccl().CommInitRankConfig(&communicator, peers_.size(), id, peers_.rank(), &config);
    Check(begun, "ncclCommInitRankConfig", communicator);
    return communicator;
  }
  // The split one's calls block, as those of our backend do; its parent's do not, and is connected.
  nccl::CommHandle Split(nccl::CommHandle parent, void* memory) const {
    AllReduce(parent, memory, 1, nccl::DataType::kFloat32, nccl::RedOp::kSum);
    Finish();
    nccl::Config config;
    config.blocking = 1;
    nccl::CommHandle made = nullptr;
    const nccl::Result begun = nccl().CommSplit(parent, 0, peers_.rank(), &made, &config);
    Check(begun, "ncclCommSplit", parent);
    return made;
  }
  void AllReduce(nccl::CommHandle communicator, void* memory, std::size_t count,
                 nccl::DataType type, nccl::RedOp op, Waiting waiting = Waiting::kYielding) const {
    Check(nccl().AllReduce(memory, memory, count, type, op, communicator, stream()),
          "ncclAllReduce", communicator, waiting);
  }

  void* Take(std::size_t bytes) const {
    void* memory = nullptr;
    Check(cuda().Malloc(&memory, bytes), "cudaMalloc");
    Check(cuda().MemsetAsync(memory, 0, bytes, stream()), "cudaMemsetAsync");
    return memory;
  }
  void Finish() const {
    cuda::EventPtr event;
    Require(events_->Take(&event));
    Require(event->Record(stream()));
    for (bool reached = false; !reached;) Require(event->Poll(&reached));
  }
  void Copy(void* to, const void* from, std::size_t bytes, cuda::CopyKind kind) const {
    Check(cuda().MemcpyAsync(to, from, bytes, kind, stream()), "cudaMemcpyAsync");
    Finish();
  }

 private:
  const Peers& peers_;
  bool shares_gpu_ = false;
  cuda::Library cuda_;
  nccl::Library nccl_;
  std::shared_ptr<cuda::Device> device_;
  std::unique_ptr<cuda::Stream> stream_;
  std::unique_ptr<cuda::EventPool> events_;
};

// An answer in words, as a line of JSON.
void Say(const std::string& probe, const std::string& answer) {
  std::printf("{\"probe\": \"%s\", \"answer\": \"%s\"}\n", probe.c_str(), answer.c_str());
  std::fflush(stdout);
}

// The probe asks whether memory of NCCL's can be a window, and what its handle is. A communicator of
// one rank has symmetric support wherever there is any, so this is the one window that a machine with
// one GPU shows.
void ProbeWindow(Rank& rank) {
  const nccl::CommHandle communicator = rank.Connect();
  if (rank.nccl().CommWindowRegister == nullptr) {
    Say("window", "this NCCL has none");
    return;
  }
  constexpr std::size_t kBytes = 4 << 20;
  void* memory = nullptr;
  rank.Check(rank.nccl().MemAlloc(&memory, kBytes), "ncclMemAlloc");
  void* window = nullptr;
  rank.Check(rank.nccl().CommWindowRegister(communicator, memory, kBytes, &window,
                                            nccl::kWindowCollSymmetric),
             "ncclCommWindowRegister", communicator);
  Say("window", window == nullptr ? "registered, without a handle" : "registered, with a handle");
  rank.AllReduce(communicator, memory, kBytes / 4, nccl::DataType::kFloat32, nccl::RedOp::kSum);
  rank.Finish();
  rank.Check(rank.nccl().CommWindowDeregister(communicator, window), "ncclCommWindowDeregister",
             communicator);
  rank.Check(rank.nccl().MemFree(memory), "ncclMemFree");
  Say("window", "all-reduced in place, deregistered and freed");
}

// What a call costs the host, by the way in which its end is awaited.
void ProbeCalls(Rank& rank) {
  const std::vector<std::pair<Waiting, std::string>> ways = {
      {Waiting::kBlocking, "blocking communicator"},
      {Waiting::kSplit, "blocking, split from one that is not"},
      {Waiting::kYielding, "not blocking, sched_yield between looks"},
      {Waiting::kSleeping, "not blocking, 50 us of sleep between looks"}};
  // Processes that share a GPU take turns on it. What is under way is finished now and then: a full
  // queue would be waited for in the call.
  constexpr int kAtATime = 50;
  const int calls = rank.shares_gpu() ? kAtATime : 20 * kAtATime;
  void* const memory = rank.Take(4);
  std::vector<Variant> variants;
  for (const auto& [waiting, name] : ways) {
    nccl::CommHandle communicator = rank.Connect(waiting);
    if (waiting == Waiting::kSplit) communicator = rank.Split(communicator, memory);
    variants.push_back({name, [&rank, memory, calls, communicator, waiting = waiting] {
                          double seconds = 0;
                          for (int done = 0; done < calls; done += kAtATime) {
                            rank.peers().Meet();
                            const auto start = Clock::now();
                            for (int i = 0; i < kAtATime; ++i) {
                              rank.AllReduce(communicator, memory, 1, nccl::DataType::kFloat32,
                                             nccl::RedOp::kSum, waiting);
                            }
                            seconds += Seconds(Clock::now() - start);
                            rank.Finish();
                          }
                          return seconds / calls * 1e6;
                        }});
  }
  const std::vector<double> medians = Interleave(5, variants);
  if (rank.peers().rank() != 0) return;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    Emit(Sample{"host time of ncclAllReduce of 4 B", rank.peers().size(), variants[i].name,
                medians[i], "us"});
  }
}

// Two communicators share a stream; the kernel of one waits for a peer that never comes, and that
// of the other stands behind it. Aborting one after the other, the one behind first, is expected to
// hang; by a thread each it is not.
enum class Aborts { kByThreads, kInOneGroup, kInTurn };
void ProbeAbort(Rank& rank, Aborts way) {
  const nccl::CommHandle stuck = rank.Connect();
  const nccl::CommHandle behind = rank.Connect();
  void* const memory = rank.Take(4096);
  for (const nccl::CommHandle communicator :
       {stuck, behind}) {  // connections are made by the first
    rank.AllReduce(communicator, memory, 1024, nccl::DataType::kFloat32, nccl::RedOp::kSum);
  }
  rank.Finish();
  rank.peers().Meet();
  if (rank.peers().rank() == 0) {
    rank.AllReduce(stuck, memory, 1024, nccl::DataType::kFloat32, nccl::RedOp::kSum);
    rank.AllReduce(behind, memory, 1024, nccl::DataType::kFloat32, nccl::RedOp::kSum);
    const auto start = Clock::now();
    const auto abort = [&rank](nccl::CommHandle communicator) {
      rank.Check(rank.nccl().CommAbort(communicator), "ncclCommAbort");
    };
    if (way == Aborts::kInOneGroup) rank.Check(rank.nccl().GroupStart(), "ncclGroupStart");
    if (way == Aborts::kByThreads) {
      std::thread other([&] { abort(behind); });
      abort(stuck);
      other.join();
    } else {
      abort(behind);
      abort(stuck);
    }
    if (way == Aborts::kInOneGroup) rank.Check(rank.nccl().GroupEnd(), "ncclGroupEnd");
    Emit(Sample{"abort of two communicators whose kernels are stuck", 2,
                way == Aborts::kByThreads    ? "by a thread each"
                : way == Aborts::kInOneGroup ? "in one group"
                                             : "one after the other",
                Seconds(Clock::now() - start) * 1e3, "ms"});
  }
  rank.peers().Meet();
}

// Rank 0 is in a call that blocks: the first message from a rank that sends none, in a communicator
// that was split from another. The parent's abort is expected to end it, without the one that the
// call is of being freed under it.
void ProbeStuck(Rank& rank) {
  const nccl::CommHandle parent = rank.Connect();
  void* const memory = rank.Take(4096);
  const nccl::CommHandle communicator = rank.Split(parent, memory);
  rank.AllReduce(communicator, memory, 1024, nccl::DataType::kFloat32, nccl::RedOp::kSum);
  rank.Finish();
  rank.peers().Meet();
  if (rank.peers().rank() == 0) {
    std::atomic<bool> is_over{false};
    nccl::Result result = nccl::Result::kSuccess;
    std::thread caller([&] {
      Require(rank.device()->Adopt());
      result =
          rank.nccl().Recv(memory, 1024, nccl::DataType::kFloat32, 1, communicator, rank.stream());
      is_over = true;
    });
    // NCCL does not tell that a call is stuck: this one has got there in far less.
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const bool blocks = !is_over;
    const auto start = Clock::now();
    rank.Check(rank.nccl().CommAbort(parent), "ncclCommAbort");
    const double aborted = Seconds(Clock::now() - start);
    caller.join();
    const double ended = Seconds(Clock::now() - start);
    const auto rest = Clock::now();
    rank.Check(rank.nccl().CommAbort(communicator), "ncclCommAbort");
    Say("stuck", std::string(blocks ? "the call blocks" : "the call does not block") +
                     "; its result " + std::to_string(static_cast<int>(result)));
    const std::string work = "a call of a split communicator that is stuck";
    Emit(Sample{work, 2, "the parent's abort", aborted * 1e3, "ms"});
    Emit(Sample{work, 2, "until the call has returned", ended * 1e3, "ms"});
    Emit(Sample{work, 2, "its own abort then", Seconds(Clock::now() - rest) * 1e3, "ms"});
    rank.Finish();
  }
  rank.peers().Meet();
}

// How far the mean of bfloat16 averages is from float64's, in units of the last place.
void ProbeAverages(Rank& rank) {
  std::string why;
  const void* const image = cuda::KernelImage(&why);
  if (image == nullptr) throw std::runtime_error(why);
  std::unique_ptr<cuda::Kernels> kernels;
  Require(cuda::Kernels::Load(rank.device(), image, &kernels));
  const nccl::CommHandle communicator = rank.Connect();
  const int size = rank.peers().size();
  constexpr std::size_t kCount = 1 << 20;
  // Values lie between 1 and 2, where a unit in the last place of bfloat16 is 1/128; the ranks have
  // the same ones, rotated.
  const auto value_of = [](int member, std::size_t i) {
    return 1.0F + static_cast<float>((i * 37 + static_cast<std::size_t>(member) * 11) % 128) / 128;
  };
  std::vector<float> mine(kCount);
  for (std::size_t i = 0; i < kCount; ++i) mine[i] = value_of(rank.peers().rank(), i);
  void* const wide = rank.Take(kCount * 4);
  void* const narrow = rank.Take(kCount * 2);
  std::vector<float> result(kCount);
  const auto mean_error = [&](double factor, nccl::RedOp op) {
    rank.Copy(wide, mine.data(), kCount * 4, cuda::CopyKind::kHostToDevice);
    const std::vector<cuda::CopySegment> pack = {{wide, narrow, kCount}};
    const std::vector<cuda::CopySegment> unpack = {{narrow, wide, kCount}};
    Require(kernels->Copy(DType::kF32, DType::kBF16, pack, {.factor = factor}, {}, rank.stream()));
    rank.AllReduce(communicator, narrow, kCount, nccl::DataType::kBfloat16, op);
    Require(kernels->Copy(DType::kBF16, DType::kF32, unpack, {}, {}, rank.stream()));
    rank.Copy(result.data(), wide, kCount * 4, cuda::CopyKind::kDeviceToHost);
    double error = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      double exact = 0;
      for (int member = 0; member < size; ++member) exact += value_of(member, i);
      error += (static_cast<double>(result[i]) - exact / size) * 128;
    }
    return error / kCount;
  };
  const double averaged = mean_error(1, nccl::RedOp::kAvg);
  const double summed = mean_error(1.0 / size, nccl::RedOp::kSum);
  if (rank.peers().rank() != 0) return;
  const std::string work = "mean error of bfloat16 averages";
  Emit(Sample{work, size, "ncclAvg", averaged, "units in the last place"});
  Emit(Sample{work, size, "scaled by our kernel, ncclSum", summed, "units in the last place"});
}

// Rank 1 is killed in the middle of large all-reduces: when does rank 0 hear of it, and how long
// does its abort take?
void ProbeKill(Rank& rank) {
  const nccl::CommHandle communicator = rank.Connect();
  constexpr std::size_t kCount = 16 << 20;
  void* const memory = rank.Take(kCount * 4);
  rank.AllReduce(communicator, memory, kCount, nccl::DataType::kFloat32, nccl::RedOp::kSum);
  rank.Finish();
  rank.peers().Meet();
  if (rank.peers().rank() != 0) {
    rank.AllReduce(communicator, memory, kCount, nccl::DataType::kFloat32, nccl::RedOp::kSum);
    raise(SIGKILL);
  }
  const auto start = Clock::now();
  nccl::Result heard = nccl::Result::kSuccess;
  const auto ask = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rank.Check(rank.nccl().CommGetAsyncError(communicator, &heard), "ncclCommGetAsyncError");
  };
  for (int i = 0; i < 8 && heard == nccl::Result::kSuccess; ++i) {
    heard = rank.nccl().AllReduce(memory, memory, kCount, nccl::DataType::kFloat32,
                                  nccl::RedOp::kSum, communicator, rank.stream());
    while (heard == nccl::Result::kInProgress) ask();
  }
  while (heard == nccl::Result::kSuccess || heard == nccl::Result::kInProgress) ask();
  if (heard != nccl::Result::kRemoteError && heard != nccl::Result::kSystemError) {
    rank.Check(heard, "ncclAllReduce", communicator);  // which is none of a lost peer's
  }
  const std::string work = "the peer is killed in an all-reduce of 64 MiB";
  Emit(Sample{work, 2, "until NCCL tells", Seconds(Clock::now() - start), "s"});
  const auto abort = Clock::now();
  rank.Check(rank.nccl().CommAbort(communicator), "ncclCommAbort");
  Emit(Sample{work, 2, "the abort", Seconds(Clock::now() - abort), "s"});
}

struct Probe {
  std::string name;
  std::string what;  // for a line that says that it hung
  int ranks = 2;
  std::function<void(Rank&)> run;
  bool may_hang = false;
  bool ends_killed = false;  // its ranks but 0
};

std::vector<Probe> Probes() {
  return {{"window", "a window", 1, ProbeWindow},
          {"calls", "calls of 4 B", 2, ProbeCalls},
          {"abort", "aborts by a thread each", 2,
           [](Rank& rank) { ProbeAbort(rank, Aborts::kByThreads); }},
          {"abort", "aborts in one group", 2,
           [](Rank& rank) { ProbeAbort(rank, Aborts::kInOneGroup); }},
          {"abort", "aborts one after the other", 2,
           [](Rank& rank) { ProbeAbort(rank, Aborts::kInTurn); }, true},
          {"stuck", "a stuck call", 2, ProbeStuck},
          {"averages", "averages on 2 ranks", 2, ProbeAverages},
          {"averages", "averages on 3 ranks", 3, ProbeAverages},
          {"kill", "a peer that is killed", 2, ProbeKill, false, true}};
}

pid_t Forked() {
  std::fflush(nullptr);
  const pid_t process = fork();
  if (process < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  return process;
}

[[noreturn]] void RunRank(const Probe& probe, Peers peers) {
  const int code = Guarded("gpu_nccl " + probe.name, [&] {
    Rank rank(peers);
    probe.run(rank);
    return 0;
  });
  std::fflush(nullptr);
  _exit(
      code);  // an abort that failed may have left threads of NCCL's, for which a destructor would wait
}

// Runs the probe in processes of its own. True: it ended as it should.
bool Run(const Probe& probe, double limit) {
  const auto ranks = static_cast<std::size_t>(probe.ranks);
  std::vector<int> of_root;
  std::vector<int> of_others;
  for (std::size_t i = 1; i < ranks; ++i) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
      throw std::runtime_error(std::string("socketpair: ") + std::strerror(errno));
    }
    of_root.push_back(ends[0]);
    of_others.push_back(ends[1]);
  }
  std::vector<pid_t> processes;
  for (std::size_t i = 0; i < ranks; ++i) {
    const pid_t process = Forked();
    if (process == 0) {
      // A peer that has gone is noticed when nobody else holds its end.
      for (std::size_t other = 0; other + 1 < ranks; ++other) {
        if (i != 0) close(of_root[other]);
        if (i != other + 1) close(of_others[other]);
      }
      RunRank(probe, Peers(static_cast<int>(i), probe.ranks,
                           i == 0 ? of_root : std::vector<int>{of_others[i - 1]}));
    }
    processes.push_back(process);
  }
  for (std::size_t i = 0; i + 1 < ranks; ++i) {
    close(of_root[i]);
    close(of_others[i]);
  }
  const auto start = Clock::now();
  bool good = true;
  bool hung = false;
  for (std::size_t i = 0; i < ranks; ++i) {
    int status = 0;
    while (waitpid(processes[i], &status, WNOHANG) == 0) {
      if (Seconds(Clock::now() - start) > limit && !hung) {
        hung = true;
        for (std::size_t j = i; j < ranks; ++j) kill(processes[j], SIGKILL);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const bool killed_itself = probe.ends_killed && i > 0 && WIFSIGNALED(status);
    good = good && (killed_itself || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
  }
  if (hung) Say(probe.name, probe.what + ": hung, and was ended");
  return hung ? probe.may_hang : good;
}

// A GPU is looked for in a process of its own: children of one that has used CUDA cannot use it.
bool HasGpu() {
  const pid_t process = Forked();
  if (process == 0) {
    cuda::Library library;
    const Status found = cuda::Load(&library);
    if (!found.ok()) std::fprintf(stderr, "%s\n", found.message().c_str());
    _exit(found.ok() ? 0 : kSkipped);
  }
  int status = 0;
  waitpid(process, &status, 0);
  return status == 0;
}

int Main(int argc, char** argv) {
  if (!HasGpu()) return kSkipped;
  const double limit = std::stod(Flag(argc, argv, "limit", "30"));
  bool good = true;
  for (const std::string& name :
       ListFlag(argc, argv, "probes", "window,calls,abort,stuck,averages,kill")) {
    bool known = false;
    for (const Probe& probe : Probes()) {
      if (probe.name != name) continue;
      known = true;
      good = Run(probe, limit) && good;
    }
    if (!known)
      throw std::runtime_error("unknown probe " + name +
                               "; the probes are window, calls, abort, stuck, averages and kill");
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("gpu_nccl", [&] { return Main(argc, argv); });
}
