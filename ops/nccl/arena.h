// Memory of a GPU in which the buckets of a set are reduced where they lie: an arena. All ranks
// have one of the same size with the same things at the same places, and NCCL knows it if it can;
// so it is made, registered and given up at one place of the agreed order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "ops/cuda/device.h"
#include "ops/nccl/communicator.h"
#include "ops/nccl/device_memory.h"
#include "ops/nccl/nccl_api.h"

namespace sirtaki::ops::nccl {

// The memory of arenas that nobody refers to any more, until the device is through with it. A
// lane's. Thread-safe.
class ArenaFrees {
 public:
  struct Leaving {
    GpuBlock block;
    std::shared_ptr<const Api> api;
    std::shared_ptr<cuda::Device> device;
    std::vector<cuda::EventPtr> behind;
  };
  // Whether the device has come past its last use, and it was freed. On any thread.
  static bool FreeIfReached(const Leaving& leaving);

  // False: the lane has ended, and nobody would free it.
  bool Add(Leaving leaving) SIRTAKI_EXCLUDES(mutex_);
  // Frees what can be freed; true if nothing is left. By the lane.
  bool Free() SIRTAKI_EXCLUDES(mutex_);
  // What is left now is never freed.
  void Close() SIRTAKI_EXCLUDES(mutex_);

 private:
  core::Mutex mutex_;
  bool closed_ SIRTAKI_GUARDED_BY(mutex_) = false;
  std::vector<Leaving> leaving_ SIRTAKI_GUARDED_BY(mutex_);
};

// One of them, of this rank. Whoever has tensors in it, or work under way there, refers to it; the
// last one to go gives the memory back, which waits for nothing while there is a lane, and else for
// a second at most. Thread-safe.
class Arena {
 public:
  // Make takes memory from NCCL's allocator, else plain, in the context of the calling thread, the
  // device's. Null: there is no memory.
  static std::shared_ptr<Arena> Make(std::shared_ptr<cuda::Device> device,
                                     std::shared_ptr<const Api> api,
                                     std::shared_ptr<ArenaFrees> frees, std::int64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* begin() const { return static_cast<std::byte*>(block_.memory); }
  std::int64_t bytes() const { return bytes_; }
  bool of_nccl() const { return block_.of_nccl; }

  // This rank puts nothing into it any more.
  void Retire() { retired_.store(true, std::memory_order_relaxed); }
  bool retired() const { return retired_.load(std::memory_order_relaxed); }

  // What reads the arena is put into this stream of the program's, now and in future. The allocator
  // of LibTorch, which would be told for other memory, does not know this one.
  void NoteReader(cuda::StreamHandle stream) SIRTAKI_EXCLUDES(mutex_);
  std::vector<cuda::StreamHandle> readers() const SIRTAKI_EXCLUDES(mutex_);

 private:
  Arena(std::shared_ptr<cuda::Device> device, std::shared_ptr<const Api> api,
        std::shared_ptr<ArenaFrees> frees, std::int64_t bytes);
  // False: nobody knows when the memory is free.
  bool MarkReaders(std::vector<cuda::EventPtr>* behind);

  const std::shared_ptr<cuda::Device> device_;
  const std::shared_ptr<const Api> api_;
  const std::shared_ptr<ArenaFrees> frees_;
  const std::int64_t bytes_;
  GpuBlock block_;
  cuda::EventPool events_;
  std::atomic<bool> retired_{false};
  mutable core::Mutex mutex_;
  std::vector<cuda::StreamHandle> readers_ SIRTAKI_GUARDED_BY(mutex_);
};
using ArenaPtr = std::shared_ptr<Arena>;

// The request of the work that makes an arena: an entry of the order, of this rank.
struct ArenaRequest {
  std::int64_t bytes = 0;  // the same on all ranks
  ArenaPtr arena;          // before the handle completes; null: some rank has none, so none has
};

// Those of a set's communicator: the same on all its ranks, in the same order. Used by the lane's
// thread.
class Arenas {
 public:
  explicit Arenas(std::shared_ptr<ArenaFrees> frees) : frees_(std::move(frees)) {}

  const std::shared_ptr<ArenaFrees>& frees() const { return frees_; }
  std::size_t count() const { return all_.size(); }
  bool retired(std::size_t index) const { return all_[index]->arena->retired(); }

  // How NCCL knows it. kKnown: as a window where the machines can and else as registered memory,
  // which NCCL before 2.29 does not tell.
  enum class Form : std::uint8_t { kPlain, kRegistered, kKnown, kWindow };

  // Collective, of one that all ranks have. Errors: those of the communicator.
  core::Status Add(ArenaPtr arena, bool registers, Communicator& communicator,
                   const Patience& patience, Form* form);
  // If the ranks found different forms: NCCL knows it no more. The last that was added.
  core::Status Unregister(Communicator& communicator, const Patience& patience);

  // Preconditions: nothing of it is under way; on all ranks.
  core::Status Remove(std::size_t index, Communicator& communicator, const Patience& patience);
  core::Status RemoveAll(Communicator& communicator, const Patience& patience);

 private:
  struct Entry {
    ArenaPtr arena;
    // NCCL writes them, perhaps when we have given up waiting: they stay where they are.
    void* window = nullptr;
    void* handle = nullptr;
  };
  static core::Status MakeWindow(Entry& entry, Communicator& communicator, const Patience& patience,
                                 Form* form);
  static core::Status Deregister(Entry& entry, Communicator& communicator,
                                 const Patience& patience);

  const std::shared_ptr<ArenaFrees> frees_;
  std::vector<std::unique_ptr<Entry>> all_;
};

}  // namespace sirtaki::ops::nccl
