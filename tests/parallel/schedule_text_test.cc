#include "parallel/schedule_text.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/pipeline_simulation.h"
#include "tests/support/test_scale.h"

namespace sirtaki::parallel {
namespace {

PipelineShape TwoRanks() {
  PipelineShape shape;
  shape.stages = 2;
  shape.ranks = 2;
  return shape;
}

TEST(ScheduleTextTest, IsReadAsItIsWritten) {
  const std::uint64_t seed = tests::TestSeed();
  tests::Random random(seed);
  for (int i = 0; i < 50; ++i) {
    const Schedule schedule = tests::RandomSchedule(tests::RandomShape(random), random);
    Schedule read;
    ASSERT_TRUE(ParseSchedule(Text(schedule), schedule.shape, &read).ok());
    ASSERT_EQ(read.ranks, schedule.ranks) << "again with SIRTAKI_TEST_SEED=" << seed;
  }
}

TEST(ScheduleTextTest, PassesAloneGetWhatTheyNeed) {
  Schedule schedule;
  ASSERT_TRUE(ParseSchedule("# own\nrank 0: F0.0 B0.0  # both\n\nrank 1:\tF1.0 B1.0\r\n",
                            TwoRanks(), &schedule)
                  .ok());
  EXPECT_EQ(Text(schedule),
            "rank 0: R1-0.0 F0.0 S0-1.0 B0.0 A0 step\nrank 1: R0-1.0 F1.0 B1.0 S1-0.0 A1 step\n");
}

TEST(ScheduleTextTest, SaysWhichWordItCannotRead) {
  const auto why = [](const std::string& text) {
    Schedule schedule;
    return ParseSchedule(text, TwoRanks(), &schedule).message();
  };
  EXPECT_EQ(why("rank 0: F0.0 G0.0\n"),
            "line 1 of the schedule: \"G0.0\" is no instruction; allowed is what looks like F0.1, "
            "B0.1, S0-1.1, R0-1.1, S0-3:skip.1, R0-3:skip.1, T:tied, A0 or step");
  EXPECT_EQ(why("rank 0:\nrank 2:\n"),
            "line 2 of the schedule: this is where \"rank 1:\" belongs; each rank has one line, in "
            "order");
  for (const char* word : {"F", "F0", "F0.", "F0.0x", "F-1.0", "S0.0", "S0-1:.0", "S0-1:x",
                           "T:", "T", "A", "A0.0", "steps", "F99999999999.0", "R0-1.-1"}) {
    EXPECT_NE(why(std::string("rank 0: ") + word).find("is no instruction"), std::string::npos)
        << word;
  }
  PipelineShape wrong = TwoRanks();
  wrong.ranks = 3;
  Schedule schedule;
  EXPECT_FALSE(ParseSchedule("", wrong, &schedule).ok());
}

TEST(ScheduleTextTest, EachInstructionIsDescribed) {
  const auto text = [](const Instruction& instruction) { return Describe(instruction); };
  using Kind = InstructionKind;
  EXPECT_EQ(text({Kind::kSend, 0, 2, 3, "a.b"}),
            "\"S0-3:a.b.2\" (sends activations of micro-batch 2)");
  EXPECT_EQ(text({Kind::kReceive, 0, 2, 3, "a.b"}),
            "\"R3-0:a.b.2\" (receives gradients of micro-batch 2)");
  EXPECT_EQ(text({Kind::kReduceTied, -1, -1, -1, "wte"}),
            "\"T:wte\" (sums the gradients of tied parameter \"wte\")");
  EXPECT_EQ(text({Kind::kAverage, 1}), "\"A1\" (averages the gradients of stage 1)");
  EXPECT_EQ(text({Kind::kStep}), "\"step\" (the optimizer's step)");
}

}  // namespace
}  // namespace sirtaki::parallel
