#include "frameworks/torch/gradients/launched_buckets.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "frameworks/torch/gradients/gradient_buckets.h"

namespace sirtaki::detail {
namespace {

std::int64_t BytesOf(const Bucket& bucket) {
  std::int64_t bytes = 0;
  for (const BucketPart& part : bucket.parts) bytes += part.like->Bytes();
  return bytes;
}

}  // namespace

// The handle of the bucket that was submitted first, if it is not done. Takes those before it.
core::HandlePtr LaunchedBuckets::FirstUnderWay(Buckets* done) {
  while (!buckets_.empty()) {
    core::HandlePtr handle = buckets_.front()->assembly.handle();
    if (handle && !handle->done()) return handle;
    bytes_ -= BytesOf(*buckets_.front());
    done->push_back(std::move(buckets_.front()));
    buckets_.pop_front();
  }
  return nullptr;
}

LaunchedBuckets::Buckets LaunchedBuckets::Add(const std::shared_ptr<Bucket>& launched,
                                              bool may_wait, session::Session& session) {
  constexpr auto kPatience = std::chrono::milliseconds(250);
  constexpr std::int64_t kLeastBytes = std::int64_t{16} << 20;
  const std::int64_t most = std::max(session.limits().bucket_bytes, kLeastBytes);
  Buckets done;
  std::unique_lock<std::mutex> lock(mutex_);
  buckets_.push_back(launched);
  bytes_ += BytesOf(*launched);
  core::HandlePtr first = FirstUnderWay(&done);
  while (first && may_wait && bytes_ > most && hurries_ == 0) {
    lock.unlock();
    (void)session.Wait(*first, core::Clock::now() + kPatience);
    lock.lock();
    if (!first->done()) {
      hurries_ = more_;
      more_ = std::min<std::int64_t>(2 * more_, std::int64_t{1} << 20);
    }
    first = FirstUnderWay(&done);
  }
  if (hurries_ > 0) --hurries_;
  return done;
}

void LaunchedBuckets::Clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  buckets_.clear();
  bytes_ = 0;
}

}  // namespace sirtaki::detail
