// A model of pipelines that knows nothing of the checker: what ranks have to do, and ranks that do
// what a schedule says while messages arrive in any order.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "parallel/schedule.h"

namespace sirtaki::tests {

using Random = std::mt19937_64;

int RandomBelow(Random& random, int limit);

// A shape with random places, skips and tied parameters.
parallel::PipelineShape RandomShape(Random& random);

// A random schedule in which each instruction comes after all that it depends on, on all ranks.
parallel::Schedule RandomSchedule(const parallel::PipelineShape& shape, Random& random);

// Runs a schedule with ranks and messages that go on in random order. Empty if all ranks come to
// their ends and each stage has the gradients that one process computes; "hang: …" if ranks are left
// that wait; otherwise what went wrong.
std::string Simulate(const parallel::Schedule& schedule, Random& random);

}  // namespace sirtaki::tests
