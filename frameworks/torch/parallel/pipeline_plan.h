// What the ranks of a pipeline are going to do: made by each of them, checked before anything runs,
// and the same on all of them.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/session/session_set.h"
#include "parallel/schedule.h"
#include "parallel/schedule_check.h"
#include "sirtaki/pipeline.h"

namespace sirtaki::detail {

// A row is the ranks that have the stages of a pipeline, in the order of its places.
struct PipelineRow {
  explicit PipelineRow(const PipelineOptions& options);

  SessionSet set;
  std::vector<int> ranks;  // of the job, by place
  int place = 0;           // of this rank
};

class PipelinePlan {
 public:
  // Collective over the row. Throws on all ranks: InvalidArgument if a rank cannot make its plan,
  // or the schedule is refused, Mismatch if the ranks have different plans. `begins`: the first layer of
  // each stage.
  PipelinePlan(const PipelineOptions& options, std::vector<int> begins);
  ~PipelinePlan();
  PipelinePlan(const PipelinePlan&) = delete;
  PipelinePlan& operator=(const PipelinePlan&) = delete;

  const std::string& name() const { return name_; }
  const PipelineRow& row() const { return row_; }
  const parallel::PipelineShape& shape() const { return training_.shape; }
  // What this rank does in a batch.
  const std::vector<parallel::Instruction>& Instructions(bool training) const;
  const parallel::Schedule& schedule() const { return training_; }
  const parallel::ScheduleFacts& facts() const { return facts_; }

  bool is_alone() const { return row_.ranks.size() == 1; }
  int RankOf(int stage) const { return row_.ranks[parallel::At(shape().RankOf(stage))]; }

  // Tags of messages: no other message between the same two ranks has the same one.
  int TagOf(const parallel::Instruction& message) const;
  int TagOfLoss() const { return first_tag_; }
  int TagOfTie(std::size_t tie) const { return first_tag_ + 1 + static_cast<int>(tie); }

 private:
  std::string Make(const PipelineOptions& options);  // why it cannot; empty: it can
  void TakeTags(const PipelineOptions& options);
  std::vector<std::string> Lines(const PipelineOptions& options) const;

  const std::string name_;
  const PipelineRow row_;
  const std::vector<int> begins_;
  parallel::Schedule training_;
  parallel::Schedule evaluation_;
  parallel::ScheduleFacts facts_;
  int first_tag_ = -1;
};

// "stage 1 on rank 3"
std::string StageText(const PipelinePlan& plan, int stage);

}  // namespace sirtaki::detail
