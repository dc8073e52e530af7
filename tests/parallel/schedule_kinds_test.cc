#include "parallel/schedule_kinds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "parallel/schedule_check.h"
#include "parallel/schedule_text.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline_simulation.h"

namespace sirtaki::parallel {
namespace {

PipelineShape ShapeOf(int stages, int ranks, int micro_batches) {
  PipelineShape shape;
  shape.stages = stages;
  shape.ranks = ranks;
  shape.micro_batches = micro_batches;
  return shape;
}

std::string Sizes(const PipelineShape& shape) {
  return std::to_string(shape.stages) + " stages, " + std::to_string(shape.ranks) + " ranks, " +
         std::to_string(shape.micro_batches) + " micro-batches";
}

Schedule Made(ScheduleKind kind, const PipelineShape& shape) {
  Schedule schedule;
  const core::Status status = MakeSchedule(kind, shape, &schedule);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return schedule;
}

ScheduleFacts Checked(const Schedule& schedule, const PassCosts& costs = {}) {
  ScheduleFacts facts;
  const core::Status status = CheckSchedule(schedule, costs, &facts);
  EXPECT_TRUE(status.ok()) << status.ToString() << "\n" << Text(schedule);
  return facts;
}

PassCosts Even(int stages, double forward, double backward) {
  PassCosts costs;
  costs.forward.assign(At(stages), forward);
  costs.backward.assign(At(stages), backward);
  return costs;
}

// A command is the name of a schedule, numbers of stages, ranks and micro-batches, and of the units
// of time that a forward and a backward pass take.
TEST(SchedulePicturesTest, AreAsWritten) {
  const std::string folder = "tests/parallel/golden";
  for (const std::string& script : tests::GoldenScripts(folder)) {
    std::string seen;
    tests::PlayGolden(
        folder, script,
        [&](const std::string& line) {
          std::istringstream words(line);
          std::string name;
          PipelineShape shape;
          double forward = 1;
          double backward = 1;
          words >> name >> shape.stages >> shape.ranks >> shape.micro_batches >> forward >>
              backward;
          shape.training = backward > 0;
          ScheduleKind kind = ScheduleKind::kGPipe;
          const core::Status status = ParseScheduleKind(name, &kind);
          ASSERT_TRUE(status.ok()) << status.ToString();
          const Schedule schedule = Made(kind, shape);
          const ScheduleFacts facts = Checked(schedule, Even(shape.stages, forward, backward));
          seen = Draw(schedule, facts, 1);
          char text[64];
          std::snprintf(text, sizeof(text), "length %.0f, bubble %.3f, kept at most", facts.length,
                        facts.bubble);
          seen += text;
          for (const int kept : facts.peak_activations) seen += " " + std::to_string(kept);
          seen += "\n";
        },
        [&] { return seen; });
  }
}

// The page shows what is made.
TEST(SchedulePicturesTest, AreThoseOfTheDocuments) {
  std::ifstream file(SIRTAKI_SOURCE_DIR "/docs/model-parallel.md");
  std::stringstream page;
  page << file.rdbuf();
  const auto drawn = [](ScheduleKind kind, const PipelineShape& shape, double backward) {
    const Schedule schedule = Made(kind, shape);
    return "```\n" + Draw(schedule, Checked(schedule, Even(shape.stages, 1, backward)), 1) +
           "```\n";
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(page.str(), HasSubstr(drawn(ScheduleKind::kGPipe, ShapeOf(4, 4, 4), 2)));
  EXPECT_THAT(page.str(), HasSubstr(drawn(ScheduleKind::k1F1B, ShapeOf(4, 4, 4), 2)));
  EXPECT_THAT(page.str(), HasSubstr(drawn(ScheduleKind::kInterleaved, ShapeOf(4, 2, 4), 1)));
}

// m micro-batches through p ranks take as long as m + p - 1 on one rank that never waits.
TEST(ScheduleKindsTest, OneStageARankTakesTheKnownTime) {
  for (int p = 1; p <= 7; ++p) {
    for (int m = 1; m <= 12; ++m) {
      for (const ScheduleKind kind : {ScheduleKind::kGPipe, ScheduleKind::k1F1B}) {
        const PipelineShape shape = ShapeOf(p, p, m);
        SCOPED_TRACE(Sizes(shape));
        const ScheduleFacts facts = Checked(Made(kind, shape), Even(p, 1, 2));
        EXPECT_DOUBLE_EQ(facts.length, 3 * (m + p - 1));
        EXPECT_NEAR(1 - facts.bubble, static_cast<double>(m) / (m + p - 1), 1e-12);
        for (int rank = 0; rank < p; ++rank) {
          EXPECT_EQ(facts.peak_activations[At(rank)],
                    kind == ScheduleKind::kGPipe ? m : std::min(m, p - rank));
        }
      }
    }
  }
}

// With v stages a rank the ranks wait for passes of a v-th of the size.
TEST(ScheduleKindsTest, SeveralStagesARankWaitForSmallerPasses) {
  for (int p = 1; p <= 6; ++p) {
    for (int v = 2; v <= 4; ++v) {
      for (int rounds = 1; rounds <= 3; ++rounds) {
        const int m = p * rounds;
        const PipelineShape shape = ShapeOf(p * v, p, m);
        SCOPED_TRACE(Sizes(shape));
        const ScheduleFacts facts =
            Checked(Made(ScheduleKind::kInterleaved, shape), Even(p * v, 1, 2));
        EXPECT_DOUBLE_EQ(facts.length, 3 * (m * v + p - 1));
        for (int rank = 0; rank < p; ++rank) {
          EXPECT_EQ(facts.peak_activations[At(rank)],
                    std::min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1));
        }
        EXPECT_DOUBLE_EQ(Checked(Made(ScheduleKind::kGPipe, shape), Even(p * v, 1, 2)).length,
                         3 * (m * v + p - 1));
      }
    }
  }
}

TEST(ScheduleKindsTest, AllSizesEndWhateverTheOrderOfMessages) {
  tests::Random random(29);
  for (int p = 1; p <= 5; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int m = 1; m <= 9; ++m) {
        for (const bool training : {true, false}) {
          PipelineShape shape = ShapeOf(p * v, p, m);
          shape.training = training;
          if (p * v > 2) shape.skips = {{0, p * v - 1, "mask"}};
          if (p * v > 1) shape.ties = {{"wte", {0, p * v - 1}}};
          SCOPED_TRACE(Sizes(shape));
          for (const ScheduleKind kind :
               {ScheduleKind::kGPipe, ScheduleKind::k1F1B, ScheduleKind::kInterleaved}) {
            if (kind == ScheduleKind::k1F1B && v > 1) continue;
            const Schedule schedule = Made(kind, shape);
            Checked(schedule);
            EXPECT_EQ(tests::Simulate(schedule, random), "") << Text(schedule);
          }
        }
      }
    }
  }
}

TEST(ScheduleKindsTest, GroupsOfDifferentSizesTakeLittleLonger) {
  // 7 micro-batches on 3 ranks go in groups of 4 and 3; without gaps that is 7 x 2 + 2 units.
  const PipelineShape shape = ShapeOf(6, 3, 7);
  EXPECT_LE(Checked(Made(ScheduleKind::kInterleaved, shape)).length, 2 * 18);
}

TEST(ScheduleKindsTest, BackwardPassesOfAStageAreInOrder) {
  for (const ScheduleKind kind : {ScheduleKind::kGPipe, ScheduleKind::kInterleaved}) {
    for (const std::vector<Instruction>& rank : Made(kind, ShapeOf(6, 3, 7)).ranks) {
      std::map<int, int> next;
      for (const Instruction& of : rank) {
        if (of.kind != InstructionKind::kBackward) continue;
        EXPECT_EQ(of.micro_batch, next[of.stage]++);
      }
    }
  }
}

TEST(ScheduleKindsTest, AReceiveIsPostedBeforeThePassBefore) {
  const Schedule schedule = Made(ScheduleKind::k1F1B, ShapeOf(2, 2, 3));
  EXPECT_EQ(Text(schedule),
            "rank 0: F0.0 S0-1.0 R1-0.0 F0.1 S0-1.1 B0.0 R1-0.1 F0.2 S0-1.2 R1-0.2 B0.1 B0.2 A0 "
            "step\n"
            "rank 1: R0-1.0 F1.0 R0-1.1 B1.0 S1-0.0 F1.1 R0-1.2 B1.1 S1-0.1 F1.2 B1.2 S1-0.2 A1 "
            "step\n");
}

TEST(ScheduleKindsTest, TiedParametersAreSummedBeforeTheirStagesAreAveraged) {
  PipelineShape shape = ShapeOf(4, 2, 1);
  shape.ties = {{"wte", {0, 3}}, {"on_one_rank", {1, 3}}};
  EXPECT_EQ(Text(Made(ScheduleKind::kGPipe, shape)),
            "rank 0: R1-2.0 F0.0 S0-1.0 R3-2.0 F2.0 S2-3.0 R1-0.0 B2.0 S2-1.0 A2 B0.0 T:wte A0 "
            "step\n"
            "rank 1: R0-1.0 R2-3.0 F1.0 S1-2.0 F3.0 R2-1.0 B3.0 S3-2.0 B1.0 S1-0.0 A1 T:wte A3 "
            "step\n");
}

TEST(ScheduleKindsTest, AShapeThatAKindCannotRunIsRefused) {
  Schedule schedule;
  EXPECT_EQ(
      MakeSchedule(ScheduleKind::k1F1B, ShapeOf(4, 2, 8), &schedule).message(),
      "1f1b runs one stage on each rank, not 4 stages on 2 ranks; use as many stages as ranks, "
      "or interleaved_1f1b or gpipe");
  EXPECT_NE(MakeSchedule(ScheduleKind::kInterleaved, ShapeOf(5, 2, 8), &schedule)
                .message()
                .find("use a multiple of 2 stages, or gpipe"),
            std::string::npos);
  PipelineShape bent = ShapeOf(4, 2, 8);
  bent.rank_of_stage = {0, 1, 1, 0};
  EXPECT_FALSE(MakeSchedule(ScheduleKind::kInterleaved, bent, &schedule).ok());
  EXPECT_TRUE(MakeSchedule(ScheduleKind::kGPipe, bent, &schedule).ok());
  EXPECT_EQ(MakeSchedule(ScheduleKind::kGPipe, ShapeOf(2, 3, 1), &schedule).message(),
            "rank 2 has none of the 2 stages; use fewer ranks or place a stage there");
}

TEST(ScheduleKindsTest, AWrongNameIsAnsweredByTheRightOnes) {
  ScheduleKind kind = ScheduleKind::kGPipe;
  EXPECT_TRUE(ParseScheduleKind("interleaved_1f1b", &kind).ok());
  EXPECT_EQ(kind, ScheduleKind::kInterleaved);
  EXPECT_EQ(ParseScheduleKind("gpip", &kind).message(),
            "there is no schedule \"gpip\"; allowed is gpipe, 1f1b, interleaved_1f1b; the nearest "
            "known is gpipe");
}

}  // namespace
}  // namespace sirtaki::parallel
