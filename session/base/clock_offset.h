// How far the clock of each host is from rank 0's, so that what the ranks record can be put on one
// time line.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/topology.h"
#include "core/base/types.h"
#include "session/base/medium.h"

namespace sirtaki::session {

// A reading says when a rank began to tell the others something, and when it had heard all of them, by
// its own clock.
struct ClockReading {
  core::TimePoint before{};
  core::TimePoint after{};
  core::Duration wall{};  // the time of day, since 1970, minus this clock
};

// The offset is added to this rank's clock to give rank 0's. `rounds`: of each exchange the
// readings of all ranks. Nobody has heard all before all have begun to tell, which bounds the
// offset from both sides; it is taken in the middle, and as 0 on rank 0's host. The ranks of a host
// have one clock; if they turn out not to, each counts for itself. Pure.
core::Duration EstimateOffset(std::span<const std::vector<ClockReading>> rounds,
                              const core::Topology& topology);

// How far the time of day of this rank's host is ahead of that of rank 0's. Pure.
core::Duration EstimateSkew(const std::vector<ClockReading>& round, core::Duration offset,
                            const core::Topology& topology);
// The text of a warning about it, with the cure; empty if it is too small to matter. Pure.
std::string SkewText(core::Duration skew, const core::Topology& topology);

// Warns, on one rank of each host, where the time of day differs from that of rank 0's host.
// Collective over the world, and nothing at all if that is one host. Errors: those of
// Medium::Exchange.
core::Status MeasureOffset(Medium& medium, core::TimePoint deadline, core::Duration* offset);

}  // namespace sirtaki::session
