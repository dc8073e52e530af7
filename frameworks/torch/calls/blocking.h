// Collectives that the library makes for its own purposes: submitted and waited for at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>

#include "frameworks/torch/session/session_set.h"

namespace sirtaki::detail {

// An empty name: matched by call order. `timeout`: as the public forms'; 0: none. They throw what the
// public forms throw.
at::Tensor AllGatherBlocking(const at::Tensor& tensor, const std::string& name,
                             const SessionSet& set, std::chrono::milliseconds timeout = {});
void BroadcastInPlaceBlocking(const at::Tensor& tensor, int root_rank, const std::string& name,
                              const SessionSet& set);

// The key of the part of a call that has several: an unnamed call's parts are all unnamed.
std::string PartName(const std::string& name, const std::string& part);

// Bytes as a uint8 tensor that shares and keeps them.
at::Tensor AsTensor(const std::shared_ptr<std::string>& bytes);

}  // namespace sirtaki::detail
