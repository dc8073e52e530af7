// The options are what an engine is told at its start.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "core/base/types.h"
#include "core/engine/driver.h"
#include "core/engine/executor.h"
#include "core/protocol/negotiator.h"
#include "core/trace/observer.h"

namespace sirtaki::core {

struct EngineOptions : DriverOptions {
  std::uint64_t session = 1;  // the same on all ranks; other messages are dropped
  int rank = 0;
  std::string host;
  Limits limits;  // until they change
  // A rank says of a wait that it submits nothing before its end only when it has lasted so long: a
  // thread that is new may make its first call meanwhile.
  Duration sits_after = std::chrono::seconds(30);
  trace::ObserverPtr observer;  // null: nothing is recorded

  // Called under the token: they must neither block nor call the engine.
  std::function<void(const Status& cause)> on_fault;          // once, for the first fault
  std::function<void(const StallWarning& warning)> on_stall;  // on the rank that asks about a stall
  std::function<void(const RunBatch& batch)> on_start;        // before the executor gets it
  // How a text is said to whoever runs the program: with names that the engine does not know.
  std::function<std::string(const std::string& text)> in_words;
  // The number of the step that the program is in, from 1: told of a rank that others wait for.
  std::function<std::uint64_t()> step;
  // Called without the token, which a thread that is stuck may have for ever.
  std::function<void()> on_stuck;
  // Names the call in which a thread keeps the others out of the transport; empty: unknown.
  std::function<std::string()> stuck_in;
  // An error that names the rank if it is known that the process of another rank has ended. Asked
  // under the token, about every 100 ms while work is outstanding; null: never.
  std::function<Status()> check_peers;
};

}  // namespace sirtaki::core
