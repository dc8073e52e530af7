// One collective of the backend: the MPI calls that it takes, one after the other.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "ops/base/backend.h"

namespace sirtaki::mpi {

// `bytes` bytes of every `stride`: the same slice of parts that follow each other. MPI may use a
// type until the calls with it are over, so it lives as long as they do.
class SliceType {
 public:
  SliceType(std::int64_t bytes, std::int64_t stride);
  ~SliceType();
  SliceType(const SliceType&) = delete;
  SliceType& operator=(const SliceType&) = delete;

  MPI_Datatype get() const { return type_; }
  const core::Status& status() const { return status_; }  // whether MPI has made it

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  core::Status status_;
};

// A collective call of MPI, with counts that fit MPI's int.
struct Call {
  enum class Kind : std::uint8_t {
    kAllReduce,
    kReduce,
    kBroadcast,
    kAllGather,
    kAllGatherV,
    kAllToAll,
  };
  Kind kind = Kind::kAllReduce;
  const void* input = nullptr;  // gathers, all-to-all, and reduce: there MPI_IN_PLACE at the root
  void* output = nullptr;
  int count = 0;  // all-to-all: of each part
  MPI_Datatype type = MPI_BYTE;
  std::shared_ptr<const SliceType> slice;  // owns `type`, if that is not MPI's own
  MPI_Op op = MPI_SUM;                     // reductions only
  int root = 0;                            // broadcast and reduce
  std::vector<int> counts;                 // kAllGatherV only, with the displacements
  std::vector<int> displacements;
};

// Tells operations to start no further call. Shared with them: one may outlive the backend in a
// thread that is stuck. Thread-safe.
class StopSign {
 public:
  void Set(const core::Status& why) SIRTAKI_EXCLUDES(mutex_);  // the first counts
  core::Status Get() const SIRTAKI_EXCLUDES(mutex_);           // ok: go on

 private:
  std::atomic<bool> is_set_{false};
  mutable core::Mutex mutex_;
  core::Status why_ SIRTAKI_GUARDED_BY(mutex_);
};

enum class Mode : std::uint8_t { kBlocking, kPolled };

// Blocking: finished when constructed. Polled: each Poll tests the call under way and starts the
// next; all by one thread at a time. The first error ends the operation.
class Operation final : public ops::Completion {
 public:
  Operation(MPI_Comm comm, Mode mode, std::shared_ptr<const StopSign> stop,
            std::vector<Call> calls);
  // One that has failed already.
  explicit Operation(core::Status why);

  // Unfinished or failed: what MPI may still refer to stays for the life of the process.
  ~Operation() override;

  bool Poll() override;
  core::Status status() const override { return status_; }

 private:
  void StartNext();
  void Finish(core::Status status);

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::shared_ptr<const StopSign> stop_;
  std::vector<Call> calls_;
  std::size_t next_ = 0;
  MPI_Request request_ = MPI_REQUEST_NULL;
  bool started_ = false;  // MPI has been called
  bool finished_ = false;
  core::Status status_;
};

}  // namespace sirtaki::mpi
