// Seeing inside a run: what this rank has done, in numbers, and when, on a time line.
//
//   sirtaki::start_timeline("traces");      // traces/rank-0.json, …: https://ui.perfetto.dev shows
//   them
//   {
//     sirtaki::MarkedSpan span("validation");
//     validate(model);
//   }
//   sirtaki::stop_timeline();
//   const sirtaki::Metrics sofar = sirtaki::metrics();
//   plot(sofar.last_step.step_seconds, sofar.last_step.wait_seconds);
//
// None is collective: each rank tells of itself. The options `timeline`, `metrics_file` and
// `summary` do as much without a change to the program.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "sirtaki/export.h"
#include "sirtaki/session.h"

namespace sirtaki {

// Of this rank. Times are in seconds. Those of negotiation, queue, packing, moving and unpacking
// add up what happened at the same time; those of waiting, transfer and both at once count each
// moment once.
struct MetricValues {
  std::int64_t steps = 0;          // of distributed optimizers
  std::int64_t timed_steps = 0;    // whose time is known: all but the first
  double step_seconds = 0;         // from the end of each step() to the end of the next
  double backward_seconds = 0;     // of steps: from the first gradient to the beginning of step()
  double session_seconds = 0;      // since init()
  double wait_seconds = 0;         // the program stood still for communication
  double transfer_seconds = 0;     // an operation on host memory was under way
  double exposed_seconds = 0;      // both: the program waited for data
  double agreement_seconds = 0;    // it waited for ranks that had not made their call
  std::int64_t calls = 0;          // that the program made; a bucket of gradients is one
  std::int64_t messages = 0;       // of them: sends and receives, which are not negotiated
  std::int64_t refused_calls = 0;  // of them: failed since the ranks asked for different things
  std::int64_t groups = 0;         // operations that moved data, each of tensors that went together
  std::int64_t device_groups = 0;  // of them: by a GPU
  std::int64_t tensors = 0;        // tensors in them
  std::int64_t bytes = 0;          // that this rank gave to them
  double negotiation_seconds = 0;  // from a call until all ranks had made it
  double queue_seconds = 0;        // from then until the operation's turn
  double pack_seconds = 0;         // tensors were copied together, converted and scaled
  double move_seconds = 0;         // data was moved and reduced
  double unpack_seconds = 0;       // results were copied to their tensors
  std::int64_t stall_warnings = 0;  // that this rank made

  // The share of transfers in which the program went on: 1 - exposed / transfer, of the time of
  // steps where some were timed. None without a transfer, and none where a GPU moved data.
  std::optional<double> overlap;
  // The share of operations that fusion saved, 1 - groups / tensors: 0 where each tensor went
  // alone. None where no data was moved.
  std::optional<double> fusion_efficiency;
};

// Since init(). In a job of one rank only steps are counted.
struct Metrics : MetricValues {
  // The same of the last step alone, from the end of the one before it to its own. All zero before
  // two steps have ended.
  MetricValues last_step;
};

// Cheap, may be called at any time, also from another thread. Throws not_initialized.
SIRTAKI_API Metrics metrics(const Session& session = {});

// What this rank does from now on goes to `path`, as the option `timeline` has it: a folder, in
// which each rank that calls this writes rank-<number>.json, or a file ending in .json, which rank
// 0 alone writes. Folders are made; a file that is there is replaced. Throws invalid_argument if
// one is being written already, not_initialized, std::runtime_error if the file cannot be made.
SIRTAKI_API void start_timeline(const std::string& path, const Session& session = {});

// Everything up to now is in the file when this returns. Does nothing if none is being written.
// Throws not_initialized.
SIRTAKI_API void stop_timeline(const Session& session = {});

// A moment of the program's own, in the timeline and in the flight record. Of the text 72 bytes
// are kept. Costs some 50 ns; does nothing before init() and after shutdown(). Never throws.
SIRTAKI_API void mark(const std::string& text, const Session& session = {}) noexcept;

// The same of a span of time: from its construction to its end, which have to be on one thread.
// Spans may stand within each other.
class SIRTAKI_API MarkedSpan {
 public:
  explicit MarkedSpan(std::string text, Session session = {});
  ~MarkedSpan();
  MarkedSpan(const MarkedSpan&) = delete;
  MarkedSpan& operator=(const MarkedSpan&) = delete;

 private:
  std::string text_;
  Session session_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace sirtaki
