#include "launch/explain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace sirtaki::launch {
namespace {

using core::Status;
using core::StatusCode;
using core::TimePoint;
using core::trace::Event;
using core::trace::EventKind;
using core::trace::FlightRecord;
using std::chrono::seconds;

TimePoint At(int s) { return TimePoint(seconds(1000 + s)); }

// A rank of a world that has made `calls` calls, the last of them `last` at time 0, and writes its
// record 60 s later.
FlightRecord Rank(int rank, int size, std::uint64_t calls, const std::string& last) {
  FlightRecord record;
  record.rank = rank;
  record.size = size;
  record.host = rank < 2 ? "a" : "b";
  record.now = At(60);
  record.sets = {{0, core::RankRanges::Span(0, size - 1), calls, false}};
  Event event;
  event.kind = EventKind::kSubmit;
  event.number = calls;
  event.begin = event.end = At(0);
  event.SetText(last);
  record.events.push_back(event);
  return record;
}

void Wait(FlightRecord& record, const std::string& key, std::uint64_t number, int since,
          const std::string& what = "all-reduce") {
  record.pending.push_back({0, key, what, number, At(since)});
}

TEST(ExplainTest, NamesTheRankThatIsBehindAndWhatItDidLast) {
  FlightRecord zero = Rank(0, 3, 8, "\"w\"");
  FlightRecord one = Rank(1, 3, 8, "\"w\"");
  Wait(zero, "\"w\"", 8, 0);
  Wait(one, "\"w\"", 8, 10);
  EXPECT_EQ(Explain({zero, one, Rank(2, 3, 7, "\"v\"")}),
            "Records of all 3 ranks.\n"
            "Ranks 0-1 wait in all-reduce \"w\" of the world for 60 s; rank 2 has not called it.\n"
            "  Rank 2 on b made its last call there, \"v\" (call 7), 60 s before this was written, "
            "and waits for nobody: it is in the program's own code.\n");
}

TEST(ExplainTest, SaysWhatARankWithAStuckEngineCouldNotTell) {
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  zero.sets[0].members = {};
  zero.missing = "the members of its process sets, since its engine was busy or stuck";
  Wait(zero, "\"w\"", 8, 0);
  EXPECT_NE(Explain({zero, Rank(1, 2, 8, "\"w\"")})
                .find("Rank 0 waits in all-reduce \"w\" of the world for 60 s.\n"),
            std::string::npos);
  FlightRecord one = Rank(1, 2, 8, "\"w\"");
  Wait(one, "\"w\"", 8, 10);
  EXPECT_EQ(Explain({zero, one}),
            "Records of all 2 ranks.\n"
            "Ranks 0-1 wait in all-reduce \"w\" of the world for 60 s, which every member has "
            "called: the agreement was on its way.\n"
            "The record of rank 0 lacks the members of its process sets, since its engine was busy "
            "or stuck.\n");
}

TEST(ExplainTest, TellsOfADifferentOrderInOneSentence) {
  std::vector<FlightRecord> records;
  for (int rank = 0; rank < 3; ++rank) {
    const bool swapped = rank == 2;
    records.push_back(Rank(rank, 3, 5, swapped ? "\"b\"" : "\"a\""));
    Wait(records.back(), swapped ? "\"b\"" : "\"a\"", 5, 0, swapped ? "broadcast" : "all-reduce");
  }
  const std::string text = Explain(records);
  EXPECT_NE(text.find("The ranks call in a different order in the world: ranks 0-1 called "
                      "all-reduce \"a\" (call 5) where rank 2 called broadcast \"b\" (call 5), and "
                      "each side waits for the other's.\n"),
            std::string::npos)
      << text;
  std::reverse(records.begin(), records.end());
  EXPECT_EQ(Explain(records), text);
}

TEST(ExplainTest, ManyCallsBetweenTheSameRanksAreOneLine) {
  FlightRecord zero = Rank(0, 2, 30, "\"g29\"");
  for (int i = 0; i < 29; ++i) {
    Wait(zero, "\"g" + std::to_string(i) + "\"", static_cast<std::uint64_t>(i + 1), 1);
  }
  const std::string text = Explain({zero, Rank(1, 2, 0, "")});
  EXPECT_NE(text.find("in all-reduce \"g0\" and 28 others of the world"), std::string::npos)
      << text;
}

TEST(ExplainTest, ARankWithoutARecordIsSaidSo) {
  FlightRecord zero = Rank(0, 3, 8, "\"w\"");
  FlightRecord one = Rank(1, 3, 8, "\"w\"");
  Wait(zero, "\"w\"", 8, 0);
  Wait(one, "\"w\"", 8, 0);
  const std::string text = Explain({zero, one});
  EXPECT_NE(text.find("Records of ranks 0-1 of 3; rank 2 has left none"), std::string::npos)
      << text;
  EXPECT_NE(text.find("of rank 2 there is no record."), std::string::npos) << text;
}

TEST(ExplainTest, OneThatHasJoinedIsNotWaitedFor) {
  FlightRecord zero = Rank(0, 3, 8, "\"w\"");
  Wait(zero, "\"w\"", 8, 0);
  FlightRecord one = Rank(1, 3, 7, "\"v\"");
  one.sets[0].joined = true;
  const std::string text = Explain({zero, one, Rank(2, 3, 7, "\"v\"")});
  EXPECT_NE(text.find("rank 2 has not called it"), std::string::npos) << text;
  EXPECT_EQ(text.find("Rank 1 on"), std::string::npos) << text;
}

TEST(ExplainTest, WhatRunsIsTold) {
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  FlightRecord one = Rank(1, 2, 8, "\"w\"");
  zero.running.push_back({0, "all-reduce of \"w\" (large lane)", At(20)});
  const std::string text = Explain({zero, one});
  EXPECT_NE(text.find("Rank 0 is in all-reduce of \"w\" (large lane) of the world for 40 s."),
            std::string::npos)
      << text;
}

TEST(ExplainTest, TheCauseOfTheGroupsFaultIsToldOnce) {
  std::vector<FlightRecord> records;
  for (int rank = 0; rank < 4; ++rank) {
    records.push_back(Rank(rank, 4, 8, "\"w\""));
    records.back().fault = Status(StatusCode::kPeerLost, "rank 3 does not answer", {1, "a", ""});
  }
  records[3].fault = Status(StatusCode::kPeerLost, "rank 1 does not answer", {3, "b", ""});
  const std::string text = Explain(records);
  EXPECT_NE(text.find("The group failed: " + records[0].fault.ToString() + "\n"), std::string::npos)
      << text;
  EXPECT_EQ(text.find("rank 1 does not answer"), std::string::npos) << text;
}

TEST(ExplainTest, NothingIsToldOfAQuietJob) {
  EXPECT_EQ(Explain({Rank(0, 2, 8, "\"w\""), Rank(1, 2, 8, "\"w\"")}),
            "Records of all 2 ranks.\nNo rank waits for another, and nothing is under way.\n");
}

TEST(ExplainTest, AMemberThatIsElsewhereInAnotherSetIsFollowedThere) {
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  FlightRecord one = Rank(1, 2, 8, "\"v\"");
  for (FlightRecord* record : {&zero, &one}) {
    record->sets.push_back({3, core::RankRanges::Span(0, 1), 2, false});
  }
  Wait(zero, "\"w\"", 8, 0);
  one.pending.push_back({3, "\"inner\"", "broadcast", 2, At(5)});
  const std::string text = Explain({zero, one});
  EXPECT_NE(text.find("and waits in broadcast \"inner\" of process set 3."), std::string::npos)
      << text;
}

}  // namespace
}  // namespace sirtaki::launch
