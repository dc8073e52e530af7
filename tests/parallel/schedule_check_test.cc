#include "parallel/schedule_check.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/schedule_kinds.h"
#include "parallel/schedule_text.h"

namespace sirtaki::parallel {
namespace {

PipelineShape TwoStages(int micro_batches) {
  PipelineShape shape;
  shape.stages = 2;
  shape.ranks = 2;
  shape.micro_batches = micro_batches;
  return shape;
}

// Why a text is refused, or "good".
std::string Verdict(const PipelineShape& shape, const std::string& text) {
  Schedule schedule;
  core::Status status = ParseSchedule(text, shape, &schedule);
  EXPECT_TRUE(status.ok()) << status.ToString();
  ScheduleFacts facts;
  status = CheckSchedule(schedule, {}, &facts);
  if (status.ok()) return "good";
  EXPECT_EQ(status.code(), core::StatusCode::kInvalidArgument);
  return status.message();
}

constexpr const char* kRank1 = "rank 1: R0-1.0 F1.0 B1.0 S1-0.0 A1 step\n";

TEST(ScheduleCheckTest, AcceptsAUsersOwn) {
  EXPECT_EQ(
      Verdict(TwoStages(1), std::string("rank 0: F0.0 R1-0.0 S0-1.0 B0.0 A0 step\n") + kRank1),
      "good");
}

TEST(ScheduleCheckTest, NamesWhatAnInstructionLacks) {
  EXPECT_EQ(
      Verdict(TwoStages(1), std::string("rank 0: F0.0 S0-1.0 B0.0 A0 step\n") + kRank1),
      "rank 0, instruction 2, \"B0.0\" (the backward pass of stage 0 for micro-batch 0): it "
      "needs \"R1-0.0\" (receives gradients of micro-batch 0), which this rank lacks; add that "
      "before it");
}

TEST(ScheduleCheckTest, NamesWhatComesTooLate) {
  EXPECT_EQ(
      Verdict(TwoStages(1), std::string("rank 0: F0.0 S0-1.0 B0.0 R1-0.0 A0 step\n") + kRank1),
      "rank 0, instruction 2, \"B0.0\" (the backward pass of stage 0 for micro-batch 0): it "
      "needs \"R1-0.0\" (receives gradients of micro-batch 0), which is instruction 3; move "
      "that before this one");
}

TEST(ScheduleCheckTest, NamesWhatAnotherRankWouldWaitFor) {
  PipelineShape shape = TwoStages(1);
  shape.training = false;
  EXPECT_EQ(
      Verdict(shape, "rank 0: F0.0\nrank 1: R0-1.0 F1.0\n"),
      "rank 0, behind its last instruction: the rank lacks \"S0-1.0\" (sends activations of "
      "micro-batch 0), which rank 1 would wait for; add it behind \"F0.0\" (the forward pass of "
      "stage 0 for micro-batch 0)");
}

TEST(ScheduleCheckTest, NamesWhatIsThereTwice) {
  EXPECT_EQ(
      Verdict(TwoStages(1), "rank 0: F0.0 F0.0 B0.0\nrank 1: F1.0 B1.0\n"),
      "rank 0, instruction 3, \"F0.0\" (the forward pass of stage 0 for micro-batch 0): it is "
      "instruction 0 already; leave one of the two out");
}

TEST(ScheduleCheckTest, NamesWhatBelongsElsewhere) {
  const auto why = [](const std::string& word, bool training = true) {
    PipelineShape shape = TwoStages(1);
    shape.stages = 4;  // 0 and 2 on rank 0
    shape.ties = {{"w", {0, 2}}};
    shape.training = training;
    const std::string text = Verdict(shape, "rank 0: " + word + " step\nrank 1: step\n");
    EXPECT_EQ(text.rfind("rank 0, instruction 0, \"" + word + "\" (", 0), 0U) << text;
    return text.substr(text.find("): ") + 3);
  };
  EXPECT_EQ(why("F1.0"), "stage 1 is on rank 1; move it there");
  EXPECT_EQ(why("F4.0"), "there is no stage 4; allowed is 0 to 3");
  EXPECT_EQ(why("B0.1"), "there is no micro-batch 1; allowed is 0 to 0");
  EXPECT_EQ(why("S0-2.0"), "both stages are on this rank; leave it out");
  EXPECT_EQ(why("R3-0.0"),
            "nothing leads from stage 0 to stage 3; leave it out, or add a skip connection");
  EXPECT_EQ(
      why("S0-1:x.0"),
      "nothing leads from stage 0 to stage 1 under the name \"x\"; leave it out, or add a skip "
      "connection");
  EXPECT_EQ(
      why("T:w"),
      "this rank shares no such parameter with another rank; leave it out, or tie its stages");
  EXPECT_EQ(why("A0", false),
            "it is for training, and this schedule is forward-only; leave it out");
}

TEST(ScheduleCheckTest, NamesRanksThatWaitInACircle) {
  EXPECT_EQ(
      Verdict(TwoStages(2), "rank 0: F0.0 B0.0 F0.1 B0.1\nrank 1: F1.0 F1.1 B1.0 B1.1\n"),
      "rank 0, instruction 3, \"B0.0\" (the backward pass of stage 0 for micro-batch 0): ranks "
      "wait "
      "for each other in a circle; rank 0 in instruction 3, \"B0.0\", for instruction 5 of rank 1, "
      "\"S1-0.0\"; rank 1 in instruction 3, \"F1.1\", for instruction 6 of rank 0, \"S0-1.1\". "
      "Move "
      "one that is waited for ahead of the one in which its rank waits");
}

// Rank 1 would wait in the sum while rank 0 needs its backward pass before it can come there.
TEST(ScheduleCheckTest, ASumOfATiedParameterWaitsForAllItsRanks) {
  PipelineShape shape = TwoStages(1);
  shape.stages = 4;
  shape.ties = {{"w", {0, 3}}};
  Schedule schedule;
  ASSERT_TRUE(MakeSchedule(ScheduleKind::kGPipe, shape, &schedule).ok());
  auto& rank = schedule.ranks[1];
  const Instruction sum = {InstructionKind::kReduceTied, -1, -1, -1, "w"};
  std::erase(rank, sum);
  const Instruction backward = {InstructionKind::kBackward, 1, 0};
  rank.insert(std::find(rank.begin(), rank.end(), backward), sum);
  ScheduleFacts facts;
  const core::Status status = CheckSchedule(schedule, {}, &facts);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("in a circle"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("\"T:w\""), std::string::npos) << status.message();
}

TEST(ScheduleCheckTest, RefusesAWrongShape) {
  const auto why = [](const PipelineShape& shape) {
    ScheduleFacts facts;
    return CheckSchedule({shape, {}}, {}, &facts).message();
  };
  PipelineShape shape = TwoStages(0);
  EXPECT_EQ(why(shape),
            "a pipeline has at least one stage, one rank and one micro-batch, not 2, 2 and 0");
  shape = TwoStages(1);
  EXPECT_EQ(why(shape), "the schedule has instructions for 0 ranks; give them for each of 2");
  shape.rank_of_stage = {0};
  EXPECT_EQ(why(shape), "the ranks of 1 stages are given; give the rank of each of 2");
  shape.rank_of_stage = {0, 2};
  EXPECT_EQ(why(shape), "a stage is placed on rank 2; allowed is 0 to 1");
  shape = TwoStages(1);
  shape.skips = {{1, 0, "x"}};
  EXPECT_EQ(why(shape),
            "the skip connection \"x\" from stage 1 to stage 0 has to lead to a later one of the "
            "stages 0 to 1");
  shape.skips = {{0, 1, "a b"}};
  EXPECT_EQ(
      why(shape),
      "the skip connection \"a b\" from stage 0 to stage 1 needs a name of letters without spaces");
  shape.skips = {{0, 1, "x"}, {0, 1, "x"}};
  EXPECT_EQ(why(shape),
            "the skip connection \"x\" from stage 0 to stage 1 is there twice; hand on several "
            "tensors as one tuple");
  shape.skips.clear();
  shape.ties = {{"w", {0}}};
  EXPECT_EQ(why(shape),
            "the tied parameter \"w\" needs two or more different ones of the stages 0 to 1");
  shape.ties = {{"w", {0, 1}}, {"w", {0, 1}}};
  EXPECT_EQ(why(shape), "the tied parameter \"w\" is there twice; name all its stages once");
  shape.ties.clear();
  shape.recomputed = {2};
  EXPECT_EQ(why(shape), "stage 2 cannot be recomputed; the stages are 0 to 1");
}

// 1F1B on two ranks: rank 0 keeps two micro-batches and at last, between two backward passes, has two
// receives of gradients posted; rank 1 keeps one and has the next activations coming in.
TEST(ScheduleCheckTest, CountsWhatIsKeptAndWhatIsOnItsWay) {
  Schedule schedule;
  ASSERT_TRUE(MakeSchedule(ScheduleKind::k1F1B, TwoStages(16), &schedule).ok());
  PassCosts costs;
  costs.activation_bytes = {100, 50};
  costs.edge_bytes = {{{0, 1, ""}, 10}};
  ScheduleFacts facts;
  ASSERT_TRUE(CheckSchedule(schedule, costs, &facts).ok());
  EXPECT_EQ(facts.peak_activations, (std::vector<int>{2, 1}));
  EXPECT_EQ(facts.peak_receives, (std::vector<int>{2, 1}));
  EXPECT_EQ(facts.peak_bytes, (std::vector<std::int64_t>{220, 60}));
}

// A stage that is recomputed keeps its input of 10 bytes; all of it is there while it runs backward.
TEST(ScheduleCheckTest, KeepsOnlyTheInputsOfWhatIsRecomputed) {
  PipelineShape shape = TwoStages(4);
  shape.recomputed = {1};
  Schedule schedule;
  ASSERT_TRUE(MakeSchedule(ScheduleKind::kGPipe, shape, &schedule).ok());
  PassCosts costs;
  costs.forward = {1, 1};
  costs.backward = {2, 2};
  costs.activation_bytes = {100, 50};
  costs.edge_bytes = {{{0, 1, ""}, 10}};
  ScheduleFacts facts;
  ASSERT_TRUE(CheckSchedule(schedule, costs, &facts).ok());
  EXPECT_EQ(facts.peak_bytes[1], 4 * 10 + (50 - 10));
  EXPECT_DOUBLE_EQ(facts.idle[1], 1 - 4.0 * (1 + 3) / facts.length);
}

TEST(ScheduleCheckTest, TheSlowestStageSetsThePace) {
  Schedule schedule;
  ASSERT_TRUE(MakeSchedule(ScheduleKind::k1F1B, TwoStages(10), &schedule).ok());
  PassCosts costs;
  costs.forward = {1, 3};
  costs.backward = {1, 3};
  ScheduleFacts facts;
  ASSERT_TRUE(CheckSchedule(schedule, costs, &facts).ok());
  EXPECT_DOUBLE_EQ(facts.length, 1 + 10 * 6 + 1);
  EXPECT_DOUBLE_EQ(facts.idle[0], 1 - 20.0 / 62);
  EXPECT_DOUBLE_EQ(facts.idle[1], 1 - 60.0 / 62);
  EXPECT_DOUBLE_EQ(facts.bubble, 1 - 80.0 / 62 / 2);
}

}  // namespace
}  // namespace sirtaki::parallel
