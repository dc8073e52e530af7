// These functions send messages between two ranks. Messages are not collective: no other rank takes
// part, they have no name, and they do not wait for collectives that are under way, nor collectives
// for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <chrono>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/handle.h"

namespace sirtaki {

struct MessageOptions {
  // The tag is from 0 to 32000. Messages from one rank to another with the same tag arrive in the
  // order in which they were sent; messages with different tags do not wait for each other.
  TORCH_ARG(int, tag) = 0;
  // If the message is not done in this time, the whole group fails with TimedOut. 0: there is no
  // limit; the call waits until the session ends, and then throws ShutDown.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// Sends the tensor to rank `to` of the job, which may be this rank (asynchronously, then). Tensors
// are as for the collectives, of any type that moves. Returns when the tensor may be written again,
// which may be before it was received. Throws InvalidArgument for a rank or a tag that does not
// exist.
SIRTAKI_API void send(const at::Tensor& tensor, int to, const MessageOptions& options = {});
SIRTAKI_API Handle isend(const at::Tensor& tensor, int to, const MessageOptions& options = {});

// Overwrites the tensor with the next message from rank `from` with this tag, and returns it.
// Throws Mismatch on this rank if the message has another type or shape; the text names both, and
// the message is gone then. Throws InvalidArgument for a rank or a tag that does not exist.
SIRTAKI_API at::Tensor recv_(const at::Tensor& tensor, int from,
                             const MessageOptions& options = {});
SIRTAKI_API Handle irecv(const at::Tensor& tensor, int from, const MessageOptions& options = {});

// A P2POp is one of several messages that are started together.
struct P2POp {
  enum class Kind : unsigned char { Send, Receive };

  static P2POp send(at::Tensor tensor, int to, int tag = 0) {
    return {Kind::Send, std::move(tensor), to, tag};
  }
  static P2POp receive(at::Tensor tensor, int from, int tag = 0) {
    return {Kind::Receive, std::move(tensor), from, tag};
  }

  Kind kind = Kind::Send;
  at::Tensor tensor;
  int peer = 0;  // rank of the job
  int tag = 0;
};

// Starts all operations, in this order, and returns a handle for each. All are checked before the
// first starts: if one is wrong, none starts, and it throws InvalidArgument. `options.tag` is not
// used.
SIRTAKI_API std::vector<Handle> batch_isend_irecv(const std::vector<P2POp>& operations,
                                                  const MessageOptions& options = {});

}  // namespace sirtaki
