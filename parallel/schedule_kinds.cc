#include "parallel/schedule_kinds.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "parallel/choice.h"

namespace sirtaki::parallel {
namespace {

using Kind = InstructionKind;
using Instructions = std::vector<Instruction>;

// Micro-batches in groups of nearly the same size, none smaller than `ranks` if there are as many:
// the stages of a rank take turns without a gap then.
std::vector<int> GroupsOf(int micro_batches, int ranks) {
  const int count = std::max(1, micro_batches / ranks);
  std::vector<int> sizes(At(count), micro_batches / count);
  for (int i = 0; i < micro_batches % count; ++i) ++sizes[At(i)];
  return sizes;
}

// The passes of a rank's stages: group by group of micro-batches, and in each stage by stage.
Instructions PassesOf(Kind kind, const std::vector<int>& stages, const std::vector<int>& groups) {
  Instructions passes;
  int first = 0;
  for (const int size : groups) {
    for (const int stage : stages) {
      for (int i = first; i < first + size; ++i) passes.push_back({kind, stage, i});
    }
    first += size;
  }
  return passes;
}

Instructions OrderOf(ScheduleKind kind, const PipelineShape& shape, int rank) {
  std::vector<int> stages = shape.StagesOf(rank);
  const int distance = shape.ranks - 1 - stages.front();  // to the rank of the last stage
  const int others = static_cast<int>(stages.size()) - 1;
  std::vector<int> groups = {shape.micro_batches};
  if (kind == ScheduleKind::kInterleaved) groups = GroupsOf(shape.micro_batches, shape.ranks);
  Instructions forward = PassesOf(Kind::kForward, stages, groups);
  if (!shape.training) return forward;
  std::reverse(stages.begin(), stages.end());
  const Instructions backward = PassesOf(Kind::kBackward, stages, groups);
  // Forward passes come first until the first gradient can be here. A hop to the last rank takes the
  // time of a pass, and with several stages a rank the hop back does, too.
  std::size_t ahead = forward.size();
  if (kind != ScheduleKind::kGPipe) {
    ahead = std::min(ahead, At(others * groups.front() + (others > 0 ? 2 : 1) * distance));
  }
  Instructions order(forward.begin(), forward.begin() + static_cast<std::ptrdiff_t>(ahead));
  for (std::size_t i = 0; i < backward.size(); ++i) {
    if (ahead + i < forward.size()) order.push_back(forward[ahead + i]);
    order.push_back(backward[i]);
  }
  return order;
}

core::Status CheckKind(ScheduleKind kind, const PipelineShape& shape) {
  const std::string sizes =
      std::to_string(shape.stages) + " stages on " + std::to_string(shape.ranks) + " ranks";
  if (kind == ScheduleKind::k1F1B && shape.stages != shape.ranks) {
    return {core::StatusCode::kInvalidArgument,
            "1f1b runs one stage on each rank, not " + sizes +
                "; use as many stages as ranks, or interleaved_1f1b or gpipe"};
  }
  bool loops = shape.stages % shape.ranks == 0;
  for (int stage = 0; loops && stage < shape.stages; ++stage) {
    loops = shape.RankOf(stage) == shape.RankOf(stage % shape.ranks);
  }
  if (kind != ScheduleKind::kInterleaved || loops) return core::Status::Ok();
  return {
      core::StatusCode::kInvalidArgument,
      "interleaved_1f1b runs as many stages on each rank, rank after rank again and again, not " +
          sizes + " in another order; use a multiple of " + std::to_string(shape.ranks) +
          " stages, or gpipe"};
}

}  // namespace

core::Status ParseScheduleKind(std::string_view text, ScheduleKind* kind) {
  return ParseChoice(text, "schedule", kScheduleNames, kind);
}

core::Status MakeSchedule(ScheduleKind kind, const PipelineShape& shape, Schedule* schedule) {
  core::Status status = CheckShape(shape);
  if (status.ok()) status = CheckKind(kind, shape);
  if (!status.ok()) return status;
  *schedule = {shape, {}};
  for (int rank = 0; rank < shape.ranks; ++rank) {
    schedule->ranks.push_back(OrderOf(kind, shape, rank));
  }
  Complete(schedule);
  return status;
}

void Complete(Schedule* schedule) {
  const PipelineShape& shape = schedule->shape;
  for (int rank = 0; rank < static_cast<int>(schedule->ranks.size()); ++rank) {
    Instructions& passes = schedule->ranks[At(rank)];
    std::vector<int> left(At(shape.stages), shape.micro_batches);  // backward passes, by stage
    Instructions all;
    const auto append = [&all](const Instructions& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    const auto is_here = [&](const Instruction& pass) {
      return pass.stage >= 0 && pass.stage < shape.stages && shape.RankOf(pass.stage) == rank;
    };
    for (std::size_t i = 0; i < passes.size(); ++i) {
      for (std::size_t next = i == 0 ? 0 : i + 1; next < std::min(i + 2, passes.size()); ++next) {
        if (is_here(passes[next])) append(ReceivesOf(shape, passes[next]));
      }
      const Instruction& pass = passes[i];
      all.push_back(pass);
      if (!is_here(pass)) continue;
      append(SendsOf(shape, pass));
      // A stage is averaged as soon as it can be, while other stages of the rank still compute.
      if (pass.kind == Kind::kBackward && --left[At(pass.stage)] == 0 &&
          !shape.IsTied(pass.stage)) {
        all.push_back({Kind::kAverage, pass.stage});
      }
    }
    append(EndOf(shape, rank));
    passes = std::move(all);
  }
}

}  // namespace sirtaki::parallel
