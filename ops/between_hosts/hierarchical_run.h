// One operation of a process set that spans hosts, as this rank takes part in it. Chunk by chunk:
//
//   load     every member brings its elements, widened and scaled, to where its host sees them
//   reduce   every member combines its part of the chunk, in the order of the host's members
//   cross    carriers, as many on every host, each take a slice of the chunk across, with their like
//            on the other hosts
//   take     every member scales and rounds what it needs of all slices into its outputs
//
// An all-reduce has one vector, which all hosts reduce. A reduce-scatter and an all-gather have one
// for each host: the elements that its members get, or give. A chunk holds a window of each vector, so
// that every host sends and receives all the time; a gather loads what this rank gives and reduces
// nothing. A chunk crosses while later ones are loaded and reduced. The carriers of a slice get the
// same bits, and everybody takes theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "fusion/pack.h"
#include "ops/base/backend.h"
#include "ops/base/stop_sign.h"
#include "ops/between_hosts/host_stage.h"

namespace sirtaki::ops {

// What a set that spans hosts looks like; the same on all members but for `here` and `self`.
struct HostMembers {
  std::vector<std::vector<std::size_t>> members;     // of each host, indices among the set's
  std::vector<std::vector<std::size_t>> at_carrier;  // the hosts in the order of a slice's carriers
  std::size_t here = 0;                              // this rank's host
  std::size_t self = 0;                              // this rank among the set's members

  int slices() const { return static_cast<int>(at_carrier.size()); }
};

// What a run moves.
struct HostWork {
  std::vector<fusion::FusedVector> vectors;  // one, or one for each host; of one type
  core::ReduceOp op = core::ReduceOp::kSum;
  fusion::Scale before = {};
  fusion::Scale after = {};
  bool gathers = false;
};

// Takes a carrier's slice across, in place. `counts`: its elements of each vector, in the order of the
// slice's carriers. Any number may be under way; all carriers start theirs in the same order.
using Crossing = std::function<std::unique_ptr<Completion>(
    std::byte* memory, std::span<const std::int64_t> counts, core::DType dtype)>;

// Runs through on the large lane. `spin`: short waits keep their core. The carriers of a host are its
// first members. `stop`: looked at while it waits. `let_go`: of what crosses.
core::Status RunByHosts(bool spin, HostStage& stage, const HostMembers& hosts, const HostWork& work,
                        const Crossing& crossing, const StopSign& stop, LetGo let_go);

}  // namespace sirtaki::ops
