// 1000 random schedules over random skip connections: those that are good pass the checker and end
// in a simulation, those that were spoilt are refused with the instruction that was spoilt. A
// failure prints its seed; SIRTAKI_TEST_SEED runs that one first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "parallel/schedule_check.h"
#include "parallel/schedule_kinds.h"
#include "parallel/schedule_text.h"
#include "tests/support/pipeline_simulation.h"
#include "tests/support/test_scale.h"

namespace sirtaki::parallel {
namespace {

using tests::Random;
using tests::RandomBelow;
using Kind = InstructionKind;

std::string Named(const Instruction& instruction) { return "\"" + Text(instruction) + "\""; }

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A schedule with the place of one of its instructions.
struct Spoilt {
  Schedule schedule;
  int rank = 0;
  std::size_t index = 0;

  std::vector<Instruction>& all() { return schedule.ranks[At(rank)]; }
  Instruction& it() { return all()[index]; }
};

Spoilt Choose(const Schedule& schedule, Random& random) {
  Spoilt spoilt{schedule};
  spoilt.rank = RandomBelow(random, schedule.shape.ranks);
  spoilt.index = At(RandomBelow(random, static_cast<int>(spoilt.all().size())));
  return spoilt;
}

// A fault is where a text says that a schedule is wrong: behind the last instruction if one lacks at the end.
struct Fault {
  int rank = -1;
  std::size_t index = 0;
  std::string text;
};

// The text is empty if the schedule is good.
Fault FaultOf(const Schedule& schedule) {
  ScheduleFacts facts;
  const core::Status status = CheckSchedule(schedule, {}, &facts);
  if (status.ok()) return {};
  Fault fault{.text = status.message()};
  const int found =
      std::sscanf(fault.text.c_str(), "rank %d, instruction %zu", &fault.rank, &fault.index);
  if (found == 1) fault.index = schedule.ranks[At(fault.rank)].size();
  EXPECT_GT(found, 0) << fault.text;
  return fault;
}

void ExpectRefused(const Spoilt& spoilt, const Instruction& it) {
  const Fault fault = FaultOf(spoilt.schedule);
  EXPECT_NE(fault.text, "") << Text(spoilt.schedule);
  EXPECT_EQ(fault.rank, spoilt.rank) << fault.text;
  EXPECT_TRUE(Has(fault.text, Named(it))) << fault.text << "\n" << Text(spoilt.schedule);
}

void Drop(const Schedule& schedule, Random& random) {
  Spoilt spoilt = Choose(schedule, random);
  const Instruction it = spoilt.it();
  spoilt.all().erase(spoilt.all().begin() + static_cast<std::ptrdiff_t>(spoilt.index));
  ExpectRefused(spoilt, it);
  // The text names an instruction that needs it, or says that the rank has none.
  const Fault fault = FaultOf(spoilt.schedule);
  if (fault.index < spoilt.all().size()) {
    const auto needs = NeedsOf(schedule.shape, spoilt.rank, spoilt.all()[fault.index]);
    EXPECT_NE(std::count(needs.begin(), needs.end(), it), 0) << fault.text;
  } else {
    EXPECT_TRUE(Has(fault.text, "behind its last instruction: the rank lacks " + Named(it)))
        << fault.text;
  }
}

void Duplicate(const Schedule& schedule, Random& random) {
  Spoilt spoilt = Choose(schedule, random);
  const Instruction it = spoilt.it();
  const int to = RandomBelow(random, static_cast<int>(spoilt.all().size()) + 1);
  spoilt.all().insert(spoilt.all().begin() + to, it);
  ExpectRefused(spoilt, it);
  const int index = FaultOf(spoilt.schedule).index;
  EXPECT_EQ(spoilt.all()[At(index)], it);
  EXPECT_EQ(std::count(spoilt.all().begin(), spoilt.all().begin() + index, it), 1);
}

void MoveToAnotherRank(const Schedule& schedule, Random& random) {
  Spoilt spoilt = Choose(schedule, random);
  const Instruction it = spoilt.it();
  if (schedule.shape.ranks == 1 || it.stage < 0) return;
  spoilt.all().erase(spoilt.all().begin() + static_cast<std::ptrdiff_t>(spoilt.index));
  spoilt.rank = (spoilt.rank + 1) % schedule.shape.ranks;
  const int to = RandomBelow(random, static_cast<int>(spoilt.all().size()) + 1);
  spoilt.all().insert(spoilt.all().begin() + to, it);
  ExpectRefused(spoilt, it);
  EXPECT_EQ(FaultOf(spoilt.schedule).index, to);
}

void TakeAnotherMicroBatch(const Schedule& schedule, Random& random) {
  Spoilt spoilt = Choose(schedule, random);
  if (spoilt.it().micro_batch < 0) return;
  const int m = schedule.shape.micro_batches;
  const int by = 1 + RandomBelow(random, m);
  spoilt.it().micro_batch = (spoilt.it().micro_batch + by) % (m + 1);  // m is none
  ExpectRefused(spoilt, spoilt.it());
  if (spoilt.it().micro_batch == m) {
    EXPECT_EQ(FaultOf(spoilt.schedule).index, static_cast<int>(spoilt.index));
  }
}

// What became of swaps: how often each.
struct Swaps {
  int good = 0;
  int wrong_order = 0;
  int circles = 0;
};

// Swaps two instructions of a rank: the checker must say what a simulation says.
void Swap(const Schedule& schedule, Random& random, Swaps* swaps) {
  Spoilt spoilt = Choose(schedule, random);
  const std::size_t other = Choose(schedule, random).index % spoilt.all().size();
  const Instruction a = spoilt.it();
  const Instruction b = spoilt.all()[other];
  if (a == b) return;
  std::swap(spoilt.it(), spoilt.all()[other]);
  const Fault fault = FaultOf(spoilt.schedule);
  const std::string ran = tests::Simulate(spoilt.schedule, random);
  if (fault.text.empty()) {
    ++swaps->good;
    EXPECT_EQ(ran, "") << Text(spoilt.schedule);
  } else if (Has(fault.text, "in a circle")) {
    ++swaps->circles;
    EXPECT_EQ(ran.rfind("hang:", 0), 0U) << ran << "\n" << fault.text;
    const std::string stuck = " rank " + std::to_string(fault.rank) + " in " +
                              Text(spoilt.schedule.ranks[At(fault.rank)][fault.index]);
    EXPECT_TRUE(Has(ran + " ", stuck + " ")) << ran << "\n" << fault.text;
  } else {
    ++swaps->wrong_order;
    EXPECT_TRUE(Has(fault.text, Named(a)) || Has(fault.text, Named(b))) << fault.text;
    EXPECT_EQ(fault.rank, spoilt.rank) << fault.text;
  }
}

TEST(RandomSchedulesTest, GoodOnesEndAndSpoiltOnesAreRefused) {
  const std::uint64_t first = tests::TestSeed();
  const int count = tests::ScaledCount(1000, 20000);
  Swaps swaps;
  for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("again with SIRTAKI_TEST_SEED=" + std::to_string(seed));
    Random random(seed);
    const PipelineShape shape = tests::RandomShape(random);
    const Schedule schedule = tests::RandomSchedule(shape, random);
    ScheduleFacts facts;
    const core::Status status = CheckSchedule(schedule, {}, &facts);
    ASSERT_TRUE(status.ok()) << status.ToString() << "\n" << Text(schedule);
    ASSERT_EQ(tests::Simulate(schedule, random), "") << Text(schedule);
    Drop(schedule, random);
    Duplicate(schedule, random);
    MoveToAnotherRank(schedule, random);
    TakeAnotherMicroBatch(schedule, random);
    for (int swap = 0; swap < 5; ++swap) Swap(schedule, random, &swaps);
  }
  // Each of the three is tried, or this test says nothing about it.
  if (count >= 1000) {  // few may lack one by chance
    EXPECT_GT(std::min({swaps.good, swaps.wrong_order, swaps.circles}), 0);
  }
}

// Passes in a random order, as a user may write them: what is added makes them complete.
TEST(RandomSchedulesTest, AnyOrderOfPassesIsCompleted) {
  const std::uint64_t first = tests::TestSeed();
  int circles = 0;
  const int count = tests::ScaledCount(500, 10000);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("again with SIRTAKI_TEST_SEED=" + std::to_string(seed));
    Random random(seed);
    Schedule schedule = tests::RandomSchedule(tests::RandomShape(random), random);
    for (auto& rank : schedule.ranks) {
      std::erase_if(rank, [](const Instruction& of) { return !of.computes(); });
      // Every other one has two passes of a rank swapped, which may make a circle.
      if (i % 2 == 1)
        std::swap(rank.front(), rank[At(RandomBelow(random, static_cast<int>(rank.size())))]);
    }
    Complete(&schedule);
    const Fault fault = FaultOf(schedule);
    const bool good = fault.text.empty();
    const std::string ran = tests::Simulate(schedule, random);
    ASSERT_EQ(good, ran.empty()) << fault.text << "\n" << ran << "\n" << Text(schedule);
    ASSERT_TRUE(good || i % 2 == 1) << fault.text;
    if (!good && Has(fault.text, "in a circle")) ++circles;
  }
  EXPECT_TRUE(circles > 0 || count < 5000);  // at the usual 500 there may be none
}

TEST(RandomSchedulesTest, MessagesBetweenTwoRanksHaveDifferentNumbers) {
  Random random(7);
  for (int i = 0; i < 100; ++i) {
    const Schedule schedule = tests::RandomSchedule(tests::RandomShape(random), random);
    const PipelineShape& shape = schedule.shape;
    std::map<std::pair<int, int>, std::set<int>> numbers;
    for (const auto& rank : schedule.ranks) {
      for (const Instruction& message : rank) {
        if (message.kind != Kind::kSend) continue;
        const int number = MessageNumber(shape, message);
        EXPECT_EQ(number, MessageNumber(shape, message.OtherEnd()));
        const auto [low, high] =
            std::minmax({shape.RankOf(message.stage), shape.RankOf(message.peer)});
        EXPECT_TRUE(numbers[std::pair(low, high)].insert(number).second) << Text(message);
      }
    }
    // And small: as many as there are messages, half of them unused without training.
    for (const auto& [ranks, used] : numbers) {
      EXPECT_GE(*used.begin(), 0);
      EXPECT_LT(*used.rbegin(), static_cast<int>(used.size()) * (shape.training ? 1 : 2));
    }
  }
}

}  // namespace
}  // namespace sirtaki::parallel
