// A communication hook lets a program reduce gradients in its own way: compressed by a method of
// its own, over fewer ranks, in several rounds.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace sirtaki {

// A GradientBucket holds gradients that are reduced together, of one type and on one device, up to the
// size that the option bucket_bytes says. In the first step each gradient goes by itself, as a bucket
// of one. Then the ranks agree on buckets, and agree again when parameters are added or something has
// failed: state that outlives a step belongs to the parameters, by their names.
struct GradientBucket {
  // The name is the same on every rank, and no other bucket uses it: begin the names of your own
  // collectives with it.
  std::string name;
  // The number of the bucket, from 0, the same on every rank. For a gradient that goes by itself it is
  // the place of its parameter among the optimizer's.
  std::int64_t index = 0;
  // True for the last of the buckets. Only gradients that go by themselves come after it.
  bool is_last = false;
  // The buffer holds one gradient after the other, 1-dimensional, in the parameters' type, with
  // zeros for a parameter that has no gradient on this rank. It belongs to the hook until the
  // gradients are synchronized.
  at::Tensor buffer;
  std::vector<std::string> parameters;        // names
  std::vector<at::Tensor> parameter_tensors;  // the parameters themselves
  std::vector<at::Tensor> gradients;          // views of `buffer`, in the parameters' shapes
};

// A CommunicationHook is called once for every bucket and step, for the same buckets in the same order
// on all ranks and one at a time: by their index, and when all are complete for gradients that go by
// themselves, in the order of the parameters. It is called on a thread whose backward() has completed
// the bucket, or one before it, or at the end of backward(), or in step() or synchronize(). It starts
// its communication, mostly with one of the _async collectives, and returns at once a function that
// gives the result. These functions are called in the same order, also the same on all ranks; they
// may communicate again. The result is a tensor of as many elements as `buffer`, equal on all ranks;
// it may be `buffer` itself.
//
//   options.hook([](const sirtaki::GradientBucket& bucket) {
//     auto handle = sirtaki::allreduce_async(
//         bucket.buffer.to(torch::kHalf), sirtaki::AllreduceOptions().name(bucket.name + "/f16"));
//     return [handle, type = bucket.buffer.scalar_type()] {
//       return sirtaki::synchronize(handle).to(type);
//     };
//   });
//
// Where one backward() writes gradients of several optimizers, each keeps its own order, and a hook
// must not wait for other ranks.
//
// The returned function is always called, also where its result is not used: for a bucket that no
// rank has a gradient for, or whose gradients cannot be averaged and are zeros. If the
// hook or the returned function throws, or gives something that does not fit, the job ends as by
// abort(): what other ranks have started would wait in vain.
using CommunicationHook = std::function<std::function<at::Tensor()>(const GradientBucket&)>;

}  // namespace sirtaki
