// These functions look inside a run: what this rank has done, in numbers, and when, on a time line.
//
//   sirtaki::start_timeline("traces");  // https://ui.perfetto.dev shows traces/rank-0.json, …
//   {
//     sirtaki::MarkedSpan span("validation");
//     validate(model);
//   }
//   sirtaki::stop_timeline();
//   const sirtaki::Metrics sofar = sirtaki::metrics();
//   plot(sofar.last_step.step_seconds, sofar.last_step.wait_seconds);
//
// None is collective: each rank tells of itself. The options `timeline`, `metrics_file` and
// `summary` do the same without a change to the program.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "sirtaki/export.h"

namespace sirtaki {

namespace detail {
class SessionState;
}

// MetricValues are numbers of this rank; times are in seconds. The times of negotiation, queue,
// packing, moving and unpacking add up what happened at the same time; those of waiting, transfer
// and both at once count each moment once.
struct MetricValues {
  std::int64_t steps = 0;          // of distributed optimizers
  std::int64_t timed_steps = 0;    // steps whose time is known: all except the first
  double step_seconds = 0;         // from the end of each step() to the end of the next
  double backward_seconds = 0;     // of steps: from the first gradient to the beginning of step()
  double session_seconds = 0;      // since init()
  double wait_seconds = 0;         // the program stood still for communication
  double transfer_seconds = 0;     // an operation on host memory was under way
  double exposed_seconds = 0;      // both: the program waited for data
  double agreement_seconds = 0;    // the program waited for ranks that had not made their call
  std::int64_t calls = 0;          // calls that the program made; a bucket of gradients is one
  std::int64_t messages = 0;       // those that were sends or receives, which are not negotiated
  std::int64_t refused_calls = 0;  // those that failed because the ranks asked for different things
  std::int64_t groups = 0;         // operations that moved data, each of tensors that went together
  std::int64_t device_groups = 0;  // those that a GPU moved
  std::int64_t tensors = 0;        // tensors in all groups
  std::int64_t bytes = 0;          // bytes that this rank gave to all groups
  double negotiation_seconds = 0;  // from a call until all ranks had made it
  double queue_seconds = 0;        // from then until the operation's turn
  double pack_seconds = 0;         // tensors were copied together, converted and scaled
  double move_seconds = 0;         // data was moved and reduced
  double unpack_seconds = 0;       // results were copied to their tensors
  std::int64_t stall_warnings = 0;  // warnings that this rank made

  // The share of the transfer time in which the program went on: 1 - exposed / transfer, counted
  // over timed steps if there are any. None without a transfer, and none where a GPU moved data.
  std::optional<double> overlap;
  // The share of operations that fusion saved, 1 - groups / tensors: 0 where each tensor went
  // alone. None where no data was moved.
  std::optional<double> fusion_efficiency;
};

// Metrics count from init() on. In a job of one rank only steps are counted.
struct Metrics : MetricValues {
  // These are the numbers of the last step alone, from the end of the step before it to its own
  // end. All are zero until two steps have ended.
  MetricValues last_step;
};

// Returns this rank's metrics. Cheap; may be called at any time, from any thread. Throws
// NotInitialized.
SIRTAKI_API Metrics metrics();

// Starts to write what this rank does to `path`, as the option `timeline` does: a folder, in which
// each rank that calls this writes rank-<number>.json, or a file ending in .json, which rank 0
// alone writes. Folders are made; files of an earlier run go to the folder `previous` beside them.
// Throws InvalidArgument if a timeline is being written already, NotInitialized, std::runtime_error
// if the file cannot be made.
SIRTAKI_API void start_timeline(const std::string& path);

// Ends the timeline: everything up to now is in the file when this returns. Does nothing if none is
// being written. Throws NotInitialized.
SIRTAKI_API void stop_timeline();

// Marks a moment of the program's own, in the timeline and in the flight record. 72 bytes of the
// text are kept. Costs some 50 ns; does nothing before init() and after shutdown(). Never throws.
SIRTAKI_API void mark(const std::string& text) noexcept;

// A MarkedSpan marks a span of time, from its construction to its end, which have to be on one
// thread. Spans may be nested.
class SIRTAKI_API MarkedSpan {
 public:
  explicit MarkedSpan(std::string text);
  ~MarkedSpan();
  MarkedSpan(const MarkedSpan&) = delete;
  MarkedSpan& operator=(const MarkedSpan&) = delete;

 private:
  std::string text_;
  std::shared_ptr<detail::SessionState> given_;  // null: the process's own session
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace sirtaki
