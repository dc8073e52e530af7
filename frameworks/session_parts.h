// What ends with a session. For the files that make up frameworks::Session only.
#pragma once

#include <memory>

#include "core/engine.h"
#include "core/handle_hooks.h"
#include "core/negotiator.h"
#include "core/tensor_queue.h"
#include "frameworks/medium.h"
#include "frameworks/session.h"
#include "ops/host_lanes.h"

namespace sirtaki::frameworks {

// Without an engine in a world of one rank.
struct Session::Parts {
  ~Parts();

  std::unique_ptr<Medium> medium;
  core::TensorQueue queue;
  std::shared_ptr<core::HandleHooks> hooks;  // of a world of one rank
  std::unique_ptr<core::Negotiator> negotiator;
  std::unique_ptr<ops::HostLanes> lanes;
  std::unique_ptr<core::Engine> engine;
};

}  // namespace sirtaki::frameworks
