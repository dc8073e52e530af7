// The buckets under way whose averages are to go into shards of gradients.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "core/engine/work.h"
#include "session/session.h"

namespace sirtaki::detail {

struct Bucket;

// Thread-safe: hooks of several threads launch buckets.
class LaunchedBuckets {
 public:
  using Buckets = std::vector<std::shared_ptr<Bucket>>;

  // A bucket was submitted. Gives those that are done, in the order of their submission, up to the
  // first that is not: it is time to take their shards. `may_wait`: if more is under way than one
  // bucket, it waits for the first, as reductions that fall behind would keep all whole gradients
  // alive. The other ranks may not have that bucket before the end of their backward(), and may wait
  // for another: the wait is short, and one in vain lets the next hooks go on.
  Buckets Add(const std::shared_ptr<Bucket>& launched, bool may_wait, session::Session& session);
  // Forgets all buckets: none is under way any more.
  void Clear();

 private:
  core::HandlePtr FirstUnderWay(Buckets* done);

  std::mutex mutex_;  // guards what follows
  std::deque<std::shared_ptr<Bucket>> buckets_;
  std::int64_t bytes_ = 0;    // of these
  std::int64_t hurries_ = 0;  // that many hooks do not wait, since one has waited in vain,
  std::int64_t more_ = 64;    // and that many the next time
};

}  // namespace sirtaki::detail
