// For programs that reduce gradients in their own way: compressed by a method of their own, over
// fewer ranks, in several rounds.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace sirtaki {

// Gradients that are reduced together.
struct GradientBucket {
  // The same on every rank, and used by no other bucket: begin the names of your own collectives
  // with it.
  std::string name;
  // The place of its first parameter among the optimizer's, the same on every rank.
  std::int64_t index = 0;
  // One gradient after the other, 1-dimensional, in the parameters' type; zeros for a parameter
  // that has no gradient on this rank. Belongs to the hook until the gradients are synchronized.
  at::Tensor buffer;
  std::vector<std::string> parameters;        // names
  std::vector<at::Tensor> parameter_tensors;  // the parameters themselves
  std::vector<at::Tensor> gradients;          // views of `buffer`, in the parameters' shapes
};

// Called once for every bucket and step, on the thread whose backward() has completed the bucket
// (two such threads may call it at once) or in synchronize(). It starts what it has to, mostly with
// one of the _async collectives, and returns at once what synchronize() then calls, in the order of
// the buckets, to get the result: a tensor of as many elements as `buffer`, equal on all ranks. It
// may be `buffer` itself.
//
//   options.hook([](const sirtaki::GradientBucket& bucket) {
//     auto handle = sirtaki::allreduce_async(
//         bucket.buffer.to(torch::kHalf), sirtaki::AllreduceOptions().name(bucket.name + "/f16"));
//     return [handle, type = bucket.buffer.scalar_type()] {
//       return sirtaki::synchronize(handle).to(type);
//     };
//   });
//
// Of buckets that no rank has a gradient for, what it returns is dropped uncalled. If it, or what
// it returns, throws or gives something that does not fit, the job ends as by abort(): what other
// ranks have started would wait in vain.
using CommunicationHook = std::function<std::function<at::Tensor()>(const GradientBucket&)>;

}  // namespace sirtaki
