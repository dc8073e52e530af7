// The messages of a lone rank to itself.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/engine/work.h"
#include "ops/cuda/device.h"

namespace sirtaki::session {

// SingleProcessP2p carries what one of two threads has sent to where the other wants to receive it, on
// the thread that came later. Thread-safe.
//
// Between two tensors on GPUs it puts a copy into a stream of its own, which waits for both; where
// one of them is on the host its thread waits for the other's producer and for the copy.
class SingleProcessP2p {
 public:
  SingleProcessP2p() = default;
  // Waits for copies that are under way, or leaves behind what they need.
  ~SingleProcessP2p();
  SingleProcessP2p(const SingleProcessP2p&) = delete;
  SingleProcessP2p& operator=(const SingleProcessP2p&) = delete;

  // The half that was given earlier and that this one matches: by tag, in the order of the calls. Null:
  // there is none yet, and this one waits for its own.
  core::WorkPtr TakeOtherHalf(const core::WorkPtr& half) SIRTAKI_EXCLUDES(halves_mutex_);

  // The status of the receive, kMismatch if it expects something else; another one that is not ok
  // is that of both: CUDA's, or that of `check`, which says why there is no point in waiting any
  // longer. The copy keeps both.
  core::Status Deliver(const core::WorkPtr& send, const core::WorkPtr& receive,
                       const std::function<core::Status()>& check) SIRTAKI_EXCLUDES(mutex_);

 private:
  // A copier copies on one device.
  struct Copier {
    std::unique_ptr<ops::cuda::Stream> stream;
    std::unique_ptr<ops::cuda::EventPool> events;
  };
  struct Copy {
    ops::cuda::EventPtr end;
    core::WorkPtr send;
    core::WorkPtr receive;
  };

  core::Status CopyOnGpu(const core::WorkPtr& send, const core::WorkPtr& receive,
                         ops::cuda::EventPtr* end) SIRTAKI_REQUIRES(mutex_);
  // Lets go of what is over.
  void Retire() SIRTAKI_REQUIRES(mutex_);

  // Halves that wait for their other one, of one tag.
  struct Halves {
    std::deque<core::WorkPtr> sends;
    std::deque<core::WorkPtr> receives;
  };
  core::Mutex halves_mutex_;
  std::map<int, Halves> halves_ SIRTAKI_GUARDED_BY(halves_mutex_);

  core::Mutex mutex_;
  std::map<std::shared_ptr<ops::cuda::Device>, Copier> copiers_ SIRTAKI_GUARDED_BY(mutex_);
  std::deque<Copy> under_way_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::session
