// One GPU, and the streams and events on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "ops/cuda/cuda_api.h"

namespace sirtaki::ops::cuda {

// A device that the program has chosen: it has tensors there. Holds its primary context, the one
// that the program uses, and what others may still refer to when we are through with it: streams,
// to which LibTorch's memory may belong, and kernels, which may be in a stream of the program's.
// They serve again. Thread-safe; the table must outlive it.
class Device {
 public:
  // Leaves the calling thread's device as it is, and touches no other device.
  static core::Status Open(const Api& api, int index, std::shared_ptr<Device>* device);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Makes the device the calling thread's own, for good: of a thread of ours. What it calls is its
  // own business from then on, even while another thread captures a graph.
  core::Status Adopt() const;

  // A scope serves a thread of others: the device is current in between. A restored `cudaSetDevice`
  // would make a context on whatever device the thread has never used.
  class Scope {
   public:
    explicit Scope(const Device& device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    const core::Status& status() const { return status_; }

   private:
    const Api& api_;
    core::Status status_;
  };

  // The stream is made in the context of the calling thread, which is the device's.
  core::Status TakeStream(StreamHandle* stream) SIRTAKI_EXCLUDES(mutex_);
  void GiveBack(StreamHandle stream) SIRTAKI_EXCLUDES(mutex_);
  core::Status LoadModule(const void* image, ModuleHandle* module) SIRTAKI_EXCLUDES(mutex_);

  // Memory that NCCL has registered, so that it may be in no call of NCCL's but those that all
  // ranks make with theirs. Whoever has a tensor that lies there gives a copy to other calls.
  void AddArena(const void* begin, std::int64_t bytes) SIRTAKI_EXCLUDES(mutex_);
  void RemoveArena(const void* begin) SIRTAKI_EXCLUDES(mutex_);
  bool InArena(const void* memory) const SIRTAKI_EXCLUDES(mutex_);

  const Api& api() const { return api_; }
  int index() const { return index_; }

 private:
  Device(const Api& api, int index) : api_(api), index_(index) {}

  const Api& api_;
  const int index_;
  int driver_device_ = 0;
  ContextHandle context_ = nullptr;
  mutable core::Mutex mutex_;
  std::vector<StreamHandle> free_streams_ SIRTAKI_GUARDED_BY(mutex_);
  std::map<const void*, ModuleHandle> modules_ SIRTAKI_GUARDED_BY(mutex_);  // by image
  std::map<const std::byte*, std::int64_t, std::less<>> arenas_ SIRTAKI_GUARDED_BY(mutex_);
};

// Puts a copy of that many bytes into the stream; nothing if there are none.
core::Status CopyBytes(const Api& api, void* to, const void* from, std::int64_t bytes,
                       CopyKind kind, StreamHandle stream);

// Marks a place in a stream. Its owner alone records and waits; who only looks may be any thread.
class Event {
 public:
  Event(const Api& api, EventHandle handle) : api_(api), handle_(handle) {}
  EventHandle handle() const { return handle_; }

  core::Status Record(StreamHandle stream) const;
  // What is put into the stream from now on waits for it, not the caller.
  core::Status Block(StreamHandle stream) const;
  // Whether the place was reached. An error is one of the device: of any earlier work there.
  core::Status Poll(bool* reached) const;

 private:
  const Api& api_;
  EventHandle handle_;
};
using EventPtr = std::shared_ptr<const Event>;

// Events that come back when the last reference goes, so that none is recorded again while somebody
// may still wait for it: CUDA would make him wait for the later place. Those that a stream was told
// to wait for may come back at once, for CUDA has noted the place. Thread-safe; may go before its
// events.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<Device> device);
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  core::Status Take(EventPtr* event);
  // Takes one that marks where the stream is now.
  core::Status Mark(StreamHandle stream, EventPtr* event);

 private:
  struct Shared {
    std::shared_ptr<Device> device;
    core::Mutex mutex;
    std::vector<EventHandle> free SIRTAKI_GUARDED_BY(mutex);
    bool closed SIRTAKI_GUARDED_BY(mutex) = false;
    void Return(EventHandle handle) SIRTAKI_EXCLUDES(mutex);
  };
  const std::shared_ptr<Shared> shared_;
};

// A stream of the highest priority, which waits for nobody's default stream: few blocks of ours run
// before the many of the backward pass. Used by one thread at a time, whose device it is. Whoever
// gives it up is through with it: the device's next one is the same.
class Stream {
 public:
  static core::Status Make(const std::shared_ptr<Device>& device, std::unique_ptr<Stream>* stream);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamHandle handle() const { return handle_; }
  Device& device() const { return *device_; }
  // Whether the process exits and CUDA's own end has come before ours.
  bool IsGone() const;
  // Nobody knows when the device lets go of it: not used again.
  void LeaveBehind() { handle_ = nullptr; }

 private:
  Stream(std::shared_ptr<Device> device, StreamHandle handle)
      : device_(std::move(device)), handle_(handle) {}

  const std::shared_ptr<Device> device_;
  StreamHandle handle_;
};

// Returns true if the device does all that is in the stream within the limit; false also after its
// errors.
bool ComesToItsEnd(const Stream& stream, EventPool& events, core::Duration limit);

}  // namespace sirtaki::ops::cuda
