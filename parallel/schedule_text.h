// Schedules as texts that people write, and as pictures that they read. Pure.
//
//   rank 0: F0.0 F0.1 B0.0 B0.1    # a comment ends a line
//   rank 1: F1.0 B1.0 F1.1 B1.1
//
// The instructions are those of schedule.h. Messages, reductions and the step are added to a text
// that has forward and backward passes alone; a text with any of them has to have them all.
#pragma once

#include <string>
#include <string_view>

#include "core/base/status.h"
#include "parallel/schedule.h"
#include "parallel/schedule_check.h"

namespace sirtaki::parallel {

std::string Text(const Instruction& instruction);  // "S0-3:mask.2"
std::string Text(const Schedule& schedule);        // what ParseSchedule reads
// For messages to people: "F1.2" (the forward pass of stage 1 for micro-batch 2).
std::string Describe(const Instruction& instruction);

// Fails with kInvalidArgument for a wrong shape, and for a line or word that cannot be read, which the
// text names. The instructions are still to be checked.
core::Status ParseSchedule(std::string_view text, const PipelineShape& shape, Schedule* schedule);

// One line a rank, one column a unit of time: a pass begins where its name stands and goes on under
// "-"; "." is a bubble. Names have a stage where a rank has several.
std::string Draw(const Schedule& schedule, const ScheduleFacts& facts, double unit);

}  // namespace sirtaki::parallel
