// A communication hook lets a program reduce gradients in its own way: compressed by a method of
// its own, over fewer ranks, in several rounds.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace sirtaki {

// A GradientBucket holds gradients that are reduced together. So far each bucket of a hook holds
// one gradient.
struct GradientBucket {
  // The name is the same on every rank, and no other bucket uses it: begin the names of your own
  // collectives with it.
  std::string name;
  // The place of the bucket's first parameter among the optimizer's, the same on every rank.
  std::int64_t index = 0;
  // The buffer holds one gradient after the other, 1-dimensional, in the parameters' type, with
  // zeros for a parameter that has no gradient on this rank. It belongs to the hook until the
  // gradients are synchronized.
  at::Tensor buffer;
  std::vector<std::string> parameters;        // names
  std::vector<at::Tensor> parameter_tensors;  // the parameters themselves
  std::vector<at::Tensor> gradients;          // views of `buffer`, in the parameters' shapes
};

// A CommunicationHook is called once for every bucket and step, on the thread whose backward() has
// completed the bucket (two such threads may call it at once) or in synchronize(). It starts its
// communication, mostly with one of the _async collectives, and returns at once a function that
// gives the result. synchronize() calls those functions in the order of the buckets. The result is
// a tensor of as many elements as `buffer`, equal on all ranks; it may be `buffer` itself.
//
//   options.hook([](const sirtaki::GradientBucket& bucket) {
//     auto handle = sirtaki::allreduce_async(
//         bucket.buffer.to(torch::kHalf), sirtaki::AllreduceOptions().name(bucket.name + "/f16"));
//     return [handle, type = bucket.buffer.scalar_type()] {
//       return sirtaki::synchronize(handle).to(type);
//     };
//   });
//
// For a bucket that no rank has a gradient for, the returned function is dropped uncalled. A rank
// whose gradient cannot be averaged calls its hook with zeros, and drops the result. If the
// hook or the returned function throws, or gives something that does not fit, the job ends as by
// abort(): what other ranks have started would wait in vain.
using CommunicationHook = std::function<std::function<at::Tensor()>(const GradientBucket&)>;

}  // namespace sirtaki
