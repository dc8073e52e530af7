// A table of what the ranks of a job have done, with advice where the picture is clear. Pure.
#pragma once

#include <string>
#include <vector>

#include "core/trace/metrics.h"
#include "core/trace/pipeline_times.h"

namespace sirtaki::core::trace {

// `ranks`: by rank, not empty. `pipelines`: what each of them has. Ends with a newline.
std::string SummaryText(const std::vector<Metrics>& ranks,
                        const std::vector<std::vector<PipelineTimes>>& pipelines = {});

// Advice is what the numbers tell to do, a sentence each: a rank that the others wait for, tensors
// that are too small, communication that nothing overlaps. Empty when none of it is clear.
std::vector<std::string> Advice(const std::vector<Metrics>& ranks);

}  // namespace sirtaki::core::trace
