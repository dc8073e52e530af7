#include "frameworks/torch/parallel/pipeline_plan.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <set>
#include <sstream>
#include <utility>

#include "core/base/text.h"
#include "core/base/words.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/tensors/throw.h"
#include "ops/base/backend.h"
#include "parallel/schedule_kinds.h"
#include "parallel/schedule_text.h"

namespace sirtaki::detail {
namespace {

using parallel::At;
using parallel::PipelineShape;

// Where the parameter of a tie is, as far as numbers tell it; -1: nowhere.
int LayerIn(const std::string& name) {
  std::size_t end = 0;
  while (end < name.size() && std::isdigit(static_cast<unsigned char>(name[end])) != 0) ++end;
  if (end == 0 || end > 9 || end == name.size() || name[end] != '.') return -1;
  return std::stoi(name.substr(0, end));
}

core::Status MakeBoth(const PipelineOptions& options, const PipelineShape& shape,
                      parallel::Schedule* training, parallel::Schedule* evaluation) {
  PipelineShape forward_only = shape;
  forward_only.training = false;
  parallel::ScheduleKind kind = parallel::ScheduleKind::kGPipe;
  core::Status status;
  if (options.schedule().find(':') != std::string::npos) {
    status = parallel::ParseSchedule(options.schedule(), shape, training);
  } else {
    status = parallel::ParseScheduleKind(options.schedule(), &kind);
    if (status.ok()) status = parallel::MakeSchedule(kind, shape, training);
  }
  if (status.ok()) status = parallel::MakeSchedule(kind, forward_only, evaluation);
  return status;
}

}  // namespace

PipelineRow::PipelineRow(const PipelineOptions& options)
    : set(AliveSession(), options.process_set()), ranks(options.row) {
  if (ranks.empty()) ranks = set.ranks();
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != set.ranks()) {
    ThrowInvalid("the row of a pipeline, ranks " + core::Joined(ranks, ", ") +
                 ", is not its process set, ranks " + core::Joined(set.ranks(), ", ") +
                 "; give PipelineOptions a mesh, or a process set alone");
  }
  place = static_cast<int>(std::find(ranks.begin(), ranks.end(), set.rank()) - ranks.begin());
}

PipelinePlan::PipelinePlan(const PipelineOptions& options, std::vector<int> begins)
    : name_(options.name()), row_(options), begins_(std::move(begins)) {
  std::string error;
  try {
    error = Make(options);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  AgreeOnList("the pipeline " + core::Quoted(options.name()),
              error.empty() ? Lines(options) : std::vector<std::string>(), error, row_.set,
              options.timeout());
  TakeTags(options);
}

PipelinePlan::~PipelinePlan() { row_.set.session->pipelines().Remove(this); }

std::string PipelinePlan::Make(const PipelineOptions& options) {
  if (options.timeout().count() <= 0) return "its timeout has to be positive";
  if (options.micro_batches() < 1) {
    return "it has " + std::to_string(options.micro_batches()) + " micro-batches; use at least one";
  }
  PipelineShape shape;
  shape.stages = static_cast<int>(begins_.size());
  shape.ranks = static_cast<int>(row_.ranks.size());
  shape.micro_batches = options.micro_batches();
  shape.rank_of_stage = options.placing();
  shape.recomputed = options.recompute();
  for (const PipelineSkip& skip : options.skips()) {
    shape.skips.push_back({skip.from, skip.to, skip.name});
  }
  if (std::string why = core::Status(parallel::CheckShape(shape)).message(); !why.empty()) {
    return why;
  }
  std::set<std::string> tied;
  for (const std::vector<std::string>& names : options.ties()) {
    if (names.empty()) return "a tie has no names; name the parameter in each of its stages";
    parallel::Tie tie{names.front(), {}};
    for (const std::string& name : names) {
      if (!tied.insert(name).second) {
        return "the parameter " + core::Quoted(name) +
               " is tied twice; name all parameters that are one in a single tie";
      }
      // The number of the layer tells the stage only when the stages are known.
      const int layer = LayerIn(name);
      const auto after = std::upper_bound(begins_.begin(), begins_.end(), layer);
      if (after == begins_.begin()) {
        return "the tied parameter " + core::Quoted(name) +
               " has no layer: its name begins with a number, as those of named_parameters() do";
      }
      tie.stages.push_back(static_cast<int>(after - begins_.begin()) - 1);
    }
    shape.ties.push_back(std::move(tie));
  }
  core::Status status = MakeBoth(options, shape, &training_, &evaluation_);
  parallel::ScheduleFacts evaluation;
  if (status.ok()) status = parallel::CheckSchedule(training_, {}, &facts_);
  if (status.ok()) status = parallel::CheckSchedule(evaluation_, {}, &evaluation);
  return status.ok() ? std::string() : "its schedule is refused: " + status.message();
}

std::vector<std::string> PipelinePlan::Lines(const PipelineOptions& options) const {
  const PipelineShape& shape = this->shape();
  std::vector<std::string> lines = {"ranks " + core::Joined(row_.ranks, ", "),
                                    std::to_string(shape.stages) +
                                        " stages that begin with layers " +
                                        core::Joined(begins_, ", "),
                                    std::to_string(shape.micro_batches) + " micro-batches",
                                    "schedule " + (options.schedule().find(':') == std::string::npos
                                                       ? core::Quoted(options.schedule())
                                                       : std::string("of the program's own")),
                                    "recomputed stages " + core::Joined(shape.recomputed, ", "),
                                    "timeout " + core::DurationText(options.timeout())};
  std::string skips = shape.skips.empty() ? "no skip connections" : "skip connections";
  for (const parallel::Edge& skip : shape.skips) {
    skips += " " + core::Quoted(skip.name) + " from stage " + std::to_string(skip.from) +
             " to stage " + std::to_string(skip.to);
  }
  std::string ties = options.ties().empty() ? "no ties" : "ties";
  for (const auto& names : options.ties()) {
    for (const std::string& name : names) ties += " " + core::Quoted(name);
    ties += ",";
  }
  lines.insert(lines.end(), {skips, ties});
  std::istringstream text(parallel::Text(training_));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

void PipelinePlan::TakeTags(const PipelineOptions& options) {
  int messages = 0;
  for (const auto& instructions : training_.ranks) {
    for (const parallel::Instruction& of : instructions) {
      if (of.is_message()) messages = std::max(messages, MessageNumber(shape(), of) + 1);
    }
  }
  const int count = 1 + static_cast<int>(shape().ties.size()) + messages;
  // The highest tags that are free on all ranks of the row: one may have pipelines with others.
  constexpr std::int64_t kEnd = ops::Backend::kMaxTag + 1;
  std::vector<std::int64_t> own = {kEnd, kEnd};
  for (const auto& [first, end] : row_.set.session->pipelines().TagsInUse()) {
    own.insert(own.end(), {first, end});
  }
  at::Tensor taken = at::tensor(own).view({-1, 2});
  if (!is_alone()) {
    taken = AllGatherBlocking(taken, "sirtaki/pipeline/tags", row_.set, options.timeout());
  }
  const std::int64_t* const numbers = taken.const_data_ptr<std::int64_t>();
  std::vector<std::pair<std::int64_t, std::int64_t>> used = {{0, 0}};  // end, first
  for (std::int64_t i = 0; i < taken.size(0); ++i) {
    used.emplace_back(numbers[2 * i + 1], numbers[2 * i]);
  }
  std::sort(used.rbegin(), used.rend());
  std::int64_t end = kEnd;
  std::int64_t largest = 0;
  for (const auto& [below, first] : used) {
    largest = std::max(largest, end - below);
    if (first_tag_ < 0 && end - below >= count) first_tag_ = static_cast<int>(end) - count;
    end = std::min(end, first);
  }
  if (first_tag_ < 0) {
    ThrowInvalid(
        "the pipeline " + core::Quoted(options.name()) + " needs " + std::to_string(count) +
        " tags for its messages, and other pipelines leave " + std::to_string(largest) + " of " +
        std::to_string(kEnd) +
        " in a row; use fewer micro-batches, stages a rank or skip connections, or destroy "
        "pipelines that are not used any more");
  }
  row_.set.session->pipelines().Take(this, {first_tag_, first_tag_ + count});
}

const std::vector<parallel::Instruction>& PipelinePlan::Instructions(bool training) const {
  return (training ? training_ : evaluation_).ranks[At(row_.place)];
}

int PipelinePlan::TagOf(const parallel::Instruction& message) const {
  return first_tag_ + 1 + static_cast<int>(shape().ties.size()) +
         parallel::MessageNumber(shape(), message);
}

std::string StageText(const PipelinePlan& plan, int stage) {
  return "stage " + std::to_string(stage) + " on rank " + std::to_string(plan.RankOf(stage));
}

}  // namespace sirtaki::detail
