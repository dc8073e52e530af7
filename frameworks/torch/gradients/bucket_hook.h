// A BucketHook calls the program's communication hook for one bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/session/session_set.h"
#include "fusion/bucket_line.h"
#include "sirtaki/gradient_bucket.h"

namespace sirtaki::detail {

struct Bucket;

// The buckets of a layout, for whose hooks all ranks have one order.
struct HookLine {
  explicit HookLine(std::size_t count) : line(count), buckets(count) {}

  fusion::BucketLine line;
  std::vector<std::weak_ptr<Bucket>> buckets;
};

// The call of a hook for one bucket, in rounds. Used by whoever launches the bucket, and then by the
// thread that uses the optimizer.
class BucketHook {
 public:
  BucketHook(SessionSet set, CommunicationHook hook)
      : set_(std::move(set)), hook_(std::move(hook)) {}

  // Calls the hook with the gradients of the bucket, whose parts have their memory.
  void Call(Bucket& bucket);
  // The first gradient of the bucket that is collected calls what the hook has returned, whatever
  // becomes of that gradient: the other ranks call theirs, and the buffer is in use until then.
  void Finish();
  // Does what Finish does, for a bucket of which nothing can be averaged.
  void Drop();
  // Done with the hook's result: the memory belongs to others again.
  void End(bool of_one);
  // Ends the job: the other ranks' hooks have started what waits for this one's.
  [[noreturn]] void Fail(const std::string& why) const;

  GradientBucket given;              // a bucket of one has its buffer for a round only
  std::vector<std::int64_t> starts;  // of the gradients in the buffer
  std::shared_ptr<HookLine> line;    // null: the gradient goes by itself
  at::Tensor result;                 // what the hook's function has given, which lies flat

 private:
  void AwaitProducers(Bucket& bucket) const;
  at::Tensor CallReturned();

  const SessionSet set_;
  const CommunicationHook hook_;
  std::function<at::Tensor()> finish_;  // what the hook has returned, until it was called
};

// `the gradients of "fc1.weight", "fc1.bias" and 3 more`
std::string GradientsText(const std::vector<std::string>& names);

}  // namespace sirtaki::detail
