// Collectives between threads of one process: every rank takes one backend of a shared world.
// Product code for world size 1, and the medium of the tests in which threads act as ranks.
//
// Operations meet by (set, lane, number of the operation on this channel). The last member to
// arrive carries the operation out for all, in the order of the ranks, so results are
// deterministic. Members that disagree (kind, size, dtype, root) all get an error that says how.
#pragma once

#include <memory>

#include "ops/base/backend.h"

namespace sirtaki::ops {

struct InprocOptions {
  // The large lane blocks inside the call until all members have arrived. False: it is polled as
  // the small one is, for ranks whose lanes have no thread of their own.
  bool large_lane_blocks = true;
};

class InprocWorld {
 public:
  explicit InprocWorld(int size, InprocOptions options = {});
  ~InprocWorld();
  InprocWorld(const InprocWorld&) = delete;
  InprocWorld& operator=(const InprocWorld&) = delete;

  int size() const;

  // The backend of a rank; each rank takes its own once. It may outlive the world object. The
  // channels of one backend may be used by different threads, each channel by one thread at a time.
  std::unique_ptr<Backend> Connect(int rank);

  // Ends the whole world: what waits, and whatever is called later, returns `why`. The same as
  // Abort of any of its backends. The first reason stays. Thread-safe.
  void Abort(const core::Status& why);

 private:
  struct Shared;
  friend class InprocBackend;
  std::shared_ptr<Shared> shared_;
};

}  // namespace sirtaki::ops
