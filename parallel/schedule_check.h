// What is wrong with a schedule, and what it costs, before anything runs. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "core/base/status.h"
#include "parallel/schedule.h"

namespace sirtaki::parallel {

// What passes take. A list has a value for each stage, or is empty: 1 (times) or 0 (bytes) everywhere.
struct PassCosts {
  std::vector<double> forward;
  std::vector<double> backward;  // a stage that is recomputed takes `forward` more
  // What a forward pass leaves behind for its backward pass, what it was given included.
  std::vector<std::int64_t> activation_bytes;
  std::map<Edge, std::int64_t> edge_bytes;  // what goes over an edge; 0 for one that is not there
};

// What is known of a schedule that is good, by rank. Messages and reductions take no time here.
struct ScheduleFacts {
  struct Span {
    double begin = 0;
    double end = 0;
  };
  std::vector<std::vector<Span>> spans;  // of each instruction
  double length = 0;                     // until the last rank is done
  std::vector<double> idle;              // the share of it that a rank computes nothing
  double bubble = 0;                     // the mean of these

  // The most at one time: micro-batches kept for their backward pass, each stage's counted; messages
  // whose receive is posted and that no pass has taken yet; and bytes of both.
  std::vector<int> peak_activations;
  std::vector<int> peak_receives;
  std::vector<std::int64_t> peak_bytes;
};

// Accepts a schedule if each rank does what it has to do, once, after what it needs, and no ranks
// wait for each other in a circle. Such a schedule ends whenever messages arrive, since no
// instruction waits but for others that do not wait for it. Otherwise fails with kInvalidArgument
// and a text that names rank, instruction, what is wrong and what helps.
core::Status CheckSchedule(const Schedule& schedule, const PassCosts& costs, ScheduleFacts* facts);

}  // namespace sirtaki::parallel
