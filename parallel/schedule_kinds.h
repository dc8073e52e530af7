// The schedules that are known. Pure.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/base/status.h"
#include "parallel/schedule.h"

namespace sirtaki::parallel {

enum class ScheduleKind : std::uint8_t {
  kGPipe,        // all forward passes, then all backward passes; of several stages, one by one
  k1F1B,         // each backward pass as early as it can be; one stage a rank
  kInterleaved,  // likewise; the stages of a rank take turns by groups of micro-batches
};
inline constexpr std::string_view kScheduleNames[] = {"gpipe", "1f1b", "interleaved_1f1b"};

// Fails with kInvalidArgument and a text that names what is allowed.
core::Status ParseScheduleKind(std::string_view text, ScheduleKind* kind);

// Fails with kInvalidArgument for a wrong shape and for one that this kind cannot run. Backward
// passes of a stage come in the order of micro-batches, so gradients add up as in one process.
core::Status MakeSchedule(ScheduleKind kind, const PipelineShape& shape, Schedule* schedule);

// Adds what forward and backward passes need besides: messages, reductions and the step. A receive
// is posted one pass before the pass that waits for it, so that the message can arrive meanwhile. A
// pass that is on the wrong rank is left for the checker to refuse. Precondition: a good shape.
void Complete(Schedule* schedule);

}  // namespace sirtaki::parallel
