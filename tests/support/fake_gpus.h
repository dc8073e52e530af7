// A machine with GPUs and NCCL, without either: tables whose functions keep streams, events and
// communicators as the real ones do, with host memory as the devices'. Threads act as ranks.
//
// What is in a stream runs when somebody looks at an event, in the order of the streams and of the
// events that they wait for, and not before; a collective waits for all its ranks. A call of NCCL
// that is in progress is in its stream only when it is over, as with the real one: an event that is
// recorded too early marks a place before it.
//
// Whatever frees memory, or takes pinned memory, waits for its device: for all that was in its
// streams then. So does an abort of a communicator, which frees: its own kernels end, but not those
// of others.
//
// What the real libraries forbid, or would hang in, ends the process with a word about it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ops/cuda/cuda_api.h"
#include "ops/nccl/nccl_api.h"

namespace sirtaki::tests {

// One at a time in a process. Thread-safe.
class FakeGpus {
 public:
  FakeGpus();
  ~FakeGpus();
  FakeGpus(const FakeGpus&) = delete;
  FakeGpus& operator=(const FakeGpus&) = delete;

  const ops::cuda::Api& cuda() const;
  ops::nccl::Api& nccl();  // a test may take a function away

  // ---- what happens ----

  // Which stream goes on next, how far when somebody looks, and how late an event is seen, is chance
  // by this seed. 0, as at first: in the order of the streams, as far as they can, and at once.
  void SetSeed(std::uint64_t seed);

  // Nothing runs on any device between the two, except while a call waits for it.
  void Hold();
  void Release();
  // The next call of this function of the calling thread's, or of any thread, fails so. `skip`: the
  // one after so many others.
  void FailNext(const std::string& function, int error, int skip = 0);
  // How often each call of NCCL, from now on, is still in progress when it is asked. -1: for ever.
  void AnswerInProgress(int times);
  // What every communicator of this rank finds from now on when it asks for errors.
  void SetAsyncError(int rank, ops::nccl::Result error);
  // How long a call may wait for a device before it counts as a deadlock; half a minute at first.
  void LimitWaits(std::chrono::milliseconds limit);
  void SetLastNcclError(const std::string& text);
  void SetCapturing(ops::cuda::StreamHandle stream, bool capturing = true);
  // Nothing is left on this device from now on, or something is.
  void SetFull(int device, bool full = true);
  // What ncclCommWindowRegister makes, at first a symmetric window, on machines with NVLink SHARP.
  // Where there are none, NCCL 2.28 gives the handle of a local registration in its place, or if
  // that is off says success and gives nothing.
  enum class Windows { kSymmetric, kLocal, kNone };
  void SetWindows(Windows windows);
  // The hosts that the ranks are on, in turn; they are on one.
  void SetHosts(int hosts);
  // The process exits: CUDA refuses every call from now on.
  void Unload();

  // ---- what has happened ----

  // The calls in their order: "cudaStreamWaitEvent stream 1 event 3", "ncclAllReduce rank 0 count 4".
  // The way that NCCL takes stands before each all-reduce: "path of ncclAllReduce rank 0: symmetric".
  std::vector<std::string> calls() const;
  // The calls whose line begins so.
  std::vector<std::string> calls(const std::string& beginning) const;
  void Forget();  // the calls
  std::set<int> devices_with_context() const;
  // The device of the calling thread, as cudaSetDevice and the contexts leave it; -1: none chosen.
  int current_device() const;
  int NumberOf(ops::cuda::StreamHandle stream) const;  // as in the calls
  int aborting() const;                                // calls that have not returned
  int live_streams() const;
  int live_events() const;
  int live_communicators() const;
  int live_allocations() const;

  // A stream of the program's; without a device it is of the one that it is first used with.
  ops::cuda::StreamHandle MakeStream(int device = -1);
  // Work in a stream: `bytes` of `value` are written when it runs.
  void PutWrite(ops::cuda::StreamHandle stream, void* memory, int value, std::size_t bytes);
  // PutCopy puts a copy there; AwaitStream waits until all of the stream has run.
  void PutCopy(ops::cuda::StreamHandle stream, void* to, const void* from, std::size_t bytes);
  void AwaitStream(ops::cuda::StreamHandle stream);
  // What stands behind this in the stream waits until `open`, which must outlive that.
  void PutGate(ops::cuda::StreamHandle stream, const std::atomic<bool>& open);
  // All that can run now.
  void RunDevices();

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace sirtaki::tests
