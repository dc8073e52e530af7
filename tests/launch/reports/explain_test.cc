#include "launch/reports/explain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
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
  record.why = "SIGUSR1";
  record.unix_us = 1'000'000'000'000'000;
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

// The rank has made a call; the ranks have agreed on it, in that batch, unless that is 0.
void Call(FlightRecord& record, const std::string& key, std::uint64_t number, int at,
          std::uint64_t batch) {
  Event event;
  event.kind = EventKind::kSubmit;
  event.number = number;
  event.begin = event.end = At(at);
  event.SetText(key);
  record.events.push_back(event);
  record.sets[0].submitted = number;
  if (batch == 0) return;
  event.kind = EventKind::kNegotiate;
  event.number = batch;
  record.events.push_back(event);
}

// A rank that has made no call, and writes its record at that time.
FlightRecord Fresh(int rank, int size, int at) {
  FlightRecord record = Rank(rank, size, 0, "");
  record.events.clear();
  record.now = At(at);
  record.unix_us += (at - 60) * std::int64_t{1'000'000};
  return record;
}

bool Says(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

const std::string kWritten = " (SIGUSR1, 2001-09-09 01:46:40 UTC).\n";

TEST(ExplainTest, NamesTheRankThatIsBehindAndWhatItDidLast) {
  FlightRecord zero = Rank(0, 3, 8, "\"w\"");
  FlightRecord one = Rank(1, 3, 8, "\"w\"");
  Wait(zero, "\"w\"", 8, 0);
  Wait(one, "\"w\"", 8, 10);
  EXPECT_EQ(
      Explain({zero, one, Rank(2, 3, 7, "\"v\"")}),
      "Records of all 3 ranks" + kWritten +
          "Ranks 0-1 wait in all-reduce \"w\" of the world for 60 s; rank 2 has not called "
          "it.\n"
          "  Rank 2 on b made its last call there, \"v\" (call 7), 60 s before it wrote this, "
          "and waits for nobody: it is in the program's own code.\n");
}

TEST(ExplainTest, SaysWhatARankIsInTheMiddleOf) {
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  Wait(zero, "\"w\"", 8, 0);
  FlightRecord one = Rank(1, 2, 7, "\"v\"");
  one.doing = "in the pipeline \"p\": stage 1 on rank 1 waits for activations, for 59 s";
  EXPECT_EQ(
      Explain({zero, one}),
      "Records of all 2 ranks" + kWritten +
          "Rank 0 waits in all-reduce \"w\" of the world for 60 s; rank 1 has not called "
          "it.\n"
          "  Rank 1 on a made its last call there, \"v\" (call 7), 60 s before it wrote this, "
          "and is " +
          one.doing + ".\n");
  one.doing.clear();
  zero.doing = "in the pipeline \"p\": \"F0.1\"";
  EXPECT_TRUE(Says(Explain({zero, one}), "\nRank 0: " + zero.doing + ".\n"));
}

TEST(ExplainTest, SaysWhatARankWithAStuckEngineCouldNotTell) {
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  zero.sets[0].members = {};
  zero.missing = "the members of its process sets, because its engine was busy or stuck";
  Wait(zero, "\"w\"", 8, 0);
  EXPECT_NE(Explain({zero, Rank(1, 2, 8, "\"w\"")})
                .find("Rank 0 waits in all-reduce \"w\" of the world for 60 s.\n"),
            std::string::npos);
  FlightRecord one = Rank(1, 2, 8, "\"w\"");
  Wait(one, "\"w\"", 8, 10);
  EXPECT_EQ(
      Explain({zero, one}),
      "Records of all 2 ranks" + kWritten +
          "Ranks 0-1 wait in all-reduce \"w\" of the world for 60 s, which every member has "
          "called: the agreement was on its way.\n"
          "The record of rank 0 lacks the members of its process sets, because its engine was busy "
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
  EXPECT_FALSE(Says(text, " made its last call")) << text;  // that has been told
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
  EXPECT_NE(text.find("rank 2 left no record."), std::string::npos) << text;
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
            "Records of all 2 ranks" + kWritten +
                "No rank waits for another, and nothing is under way.\n");
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

// Records that were written a moment apart, of ranks that are not stuck: rank 1 was three steps
// further when it wrote its own.
TEST(ExplainTest, ARankThatIsAheadHasMadeTheCall) {
  for (const bool same_name : {false, true}) {
    const auto name = [&](int step) {
      return same_name ? std::string("\"w\"") : "\"step" + std::to_string(step) + "\"";
    };
    FlightRecord zero = Fresh(0, 3, 100);
    FlightRecord one = Fresh(1, 3, 104);
    FlightRecord two = Fresh(2, 3, 104);
    for (int step = 1; step <= 103; ++step) {
      const auto number = static_cast<std::uint64_t>(step);
      const std::uint64_t batch = number + 6;
      if (step <= 100) Call(zero, name(step), number, step, step < 100 ? batch : 0);
      Call(one, name(step), number, step, step < 103 ? batch : 0);
      if (step < 103) Call(two, name(step), number, step, batch);
    }
    Wait(zero, name(100), 100, 100);
    Wait(one, name(103), 103, 103);
    const std::string text = Explain({zero, one, two});
    EXPECT_FALSE(Says(text, "different order")) << text;
    EXPECT_TRUE(Says(text, "Rank 1 waits in all-reduce " + name(103) +
                               " of the world for 1 s; rank 2 has not called it; rank 0 had not "
                               "called it when its record was written, 4 s before the last"))
        << text;
    EXPECT_TRUE(Says(text, "Rank 0 waits in all-reduce " + name(100) +
                               " of the world for 0 s, which every member has called: the "
                               "agreement was on its way."))
        << text;
  }
}

// The agreement had reached rank 0 and not rank 1 when the group failed.
TEST(ExplainTest, ARankThatKnowsOfTheAgreementHasMadeTheCall) {
  FlightRecord zero = Fresh(0, 2, 60);
  FlightRecord one = Fresh(1, 2, 60);
  for (FlightRecord* record : {&zero, &one}) {
    Call(*record, "\"w\"", 1, 1, 4);
    Call(*record, "\"w\"", 2, 2, record == &zero ? 5 : 0);
    record->fault = Status(StatusCode::kPeerLost, "gone", {1, "a", ""});
  }
  Wait(one, "\"w\"", 2, 2);
  const std::string text = Explain({zero, one});
  EXPECT_FALSE(Says(text, "not called")) << text;
  EXPECT_TRUE(Says(text, "which every member has called")) << text;
}

TEST(ExplainTest, AnEarlierUseOfANameIsNotTheCall) {
  FlightRecord zero = Fresh(0, 2, 60);
  FlightRecord one = Fresh(1, 2, 60);
  for (FlightRecord* record : {&zero, &one}) {
    Call(*record, "\"w\"", 1, 1, 4);
    Call(*record, "\"v\"", 2, 2, 5);
  }
  Call(zero, "\"w\"", 3, 3, 0);
  Wait(zero, "\"w\"", 3, 3);
  EXPECT_TRUE(Says(Explain({zero, one}), "rank 1 has not called it"));
}

// In the middle of a backward pass: each has a gradient that the other has not yet.
TEST(ExplainTest, RanksThatGoOnDoNotCallInADifferentOrder) {
  FlightRecord zero = Fresh(0, 2, 10);
  FlightRecord one = Fresh(1, 2, 10);
  Call(zero, "\"a\"", 1, 10, 0);
  Call(one, "\"b\"", 1, 10, 0);
  Wait(zero, "\"a\"", 1, 10);
  Wait(one, "\"b\"", 1, 10);
  const std::string text = Explain({zero, one});
  EXPECT_FALSE(Says(text, "different order")) << text;
  EXPECT_TRUE(Says(text, "Rank 0 waits in all-reduce \"a\"")) << text;
}

TEST(ExplainTest, WhatWasOverwrittenIsNotGuessed) {
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  Wait(zero, "\"w\"", 8, 0);
  FlightRecord one = Rank(1, 2, 9000, "\"v\"");
  one.lost = 17;
  const std::string text = Explain({zero, one});
  EXPECT_FALSE(Says(text, "has not called it")) << text;
  EXPECT_TRUE(Says(text, "whether rank 1 has called it is no longer in its record")) << text;
}

// SIGUSR1 at half past, and the failure half an hour later, which one rank does not survive.
TEST(ExplainTest, ARecordFromBeforeTheFailureIsSaidToBe) {
  FlightRecord zero = Fresh(0, 2, 1860);
  FlightRecord one = Fresh(1, 2, 60);
  for (FlightRecord* record : {&zero, &one}) Call(*record, "\"v\"", 1, 50, 1);
  Call(zero, "\"w\"", 2, 60, 0);
  Wait(zero, "\"w\"", 2, 60);
  zero.fault = Status(StatusCode::kPeerLost, "rank 1 does not answer", {0, "a", ""});
  zero.why = "the group has failed";
  EXPECT_EQ(
      Explain({zero, one}),
      "Records of all 2 ranks:\n"
      "  rank 1: SIGUSR1, 2001-09-09 01:46:40 UTC, 30 min before the last of these; it does "
      "not know of the failure\n"
      "  rank 0: the group has failed, 2001-09-09 02:16:40 UTC\n"
      "The group failed: " +
          zero.fault.ToString() +
          "\n"
          "Rank 0 waits in all-reduce \"w\" of the world for 30 min; rank 1 had not called it "
          "when its record was written, 30 min before the last of these.\n"
          "  Rank 1 on a made its last call there, \"v\" (call 1), 10 s before it wrote this, "
          "and waits for nobody: it is in the program's own code.\n");
}

// A rank that an exception has ended calls nothing any more.
TEST(ExplainTest, ALastWordCounts) {
  FlightRecord zero = Fresh(0, 2, 80);
  FlightRecord one = Fresh(1, 2, 60);
  one.why = "SIGABRT";
  Call(zero, "\"w\"", 1, 61, 0);
  Wait(zero, "\"w\"", 1, 61);
  const std::string text = Explain({zero, one});
  EXPECT_TRUE(Says(text, "rank 1 has not called it.\n")) << text;
  EXPECT_TRUE(Says(text, "  rank 1: SIGABRT, 2001-09-09 01:46:40 UTC\n")) << text;
}

// Clocks of hosts are compared by their offsets.
TEST(ExplainTest, ClocksMayDiffer) {
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  Wait(zero, "\"w\"", 8, 0);
  FlightRecord one = Rank(1, 2, 7, "\"v\"");
  one.now += std::chrono::hours(5);
  one.offset = -std::chrono::hours(5);
  const std::string text = Explain({zero, one});
  EXPECT_TRUE(Says(text, "Records of all 2 ranks" + kWritten)) << text;
  EXPECT_TRUE(Says(text, "rank 1 has not called it.\n")) << text;
}

TEST(ExplainTest, RanksInShutdownWaitForTheOthers) {
  std::vector<FlightRecord> records = {Rank(0, 3, 8, "\"w\""), Rank(1, 3, 8, "\"w\""),
                                       Rank(2, 3, 8, "\"w\"")};
  records[0].leaving = At(20);
  records[2].leaving = At(10);
  EXPECT_EQ(Explain(records),
            "Records of all 3 ranks" + kWritten +
                "Ranks 0, 2 wait in shutdown() for 50 s; rank 1 has not called it.\n"
                "  Rank 1 on a made its last call, \"w\" (call 8), 60 s before it wrote this, and "
                "waits for nobody: it is in the program's own code.\n");
  Wait(records[1], "\"x\"", 9, 30);
  const std::string text = Explain(records);
  EXPECT_TRUE(Says(text,
                   "Rank 0 on a made its last call there, \"w\" (call 8), 60 s before it "
                   "wrote this, and waits in shutdown() for 40 s.\n"))
      << text;
}

TEST(ExplainTest, TimeEndsWithTheFailure) {
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  Wait(zero, "\"w\"", 8, 0);
  zero.running.push_back({0, "receive from rank 1, tag 0", At(0)});
  zero.fault = Status(StatusCode::kPeerLost, "gone", {1, "a", ""});
  zero.why = "SIGTERM";
  Event fault;
  fault.kind = EventKind::kFault;
  fault.begin = fault.end = At(7);
  zero.events.push_back(fault);
  zero.now = At(600);
  const std::string text = Explain({zero});
  EXPECT_TRUE(Says(text, "Rank 0 waits in all-reduce \"w\" of the world for 7 s")) << text;
  EXPECT_TRUE(Says(text, "Rank 0 is in receive from rank 1, tag 0 of the world for 7 s.")) << text;
}

TEST(ExplainTest, WhatIsQueuedIsCounted) {
  FlightRecord zero = Rank(0, 1, 8, "\"w\"");
  Event event;
  event.track = core::trace::Track::kLargeLane;
  const auto add = [&](EventKind kind, std::uint64_t number, int at, const std::string& text) {
    event.kind = kind;
    event.number = number;
    event.begin = event.end = At(at);
    event.SetText(text);
    zero.events.push_back(event);
  };
  const auto name = [](int i) {
    return "all-reduce of \"a tensor with a long name, of which events have no more than both "
           "ends " +
           std::to_string(i) + "\" (large lane)";
  };
  add(EventKind::kBegin, 1, 1, name(1));
  add(EventKind::kFinish, 1, 2, name(1));
  add(EventKind::kBegin, 2, 20, name(2));
  for (int i = 2; i < 100; ++i) zero.running.push_back({0, name(i), At(3)});
  const std::string text = Explain({zero});
  EXPECT_TRUE(Says(text, "Rank 0 is in " + name(2) +
                             " of the world for 40 s.\n"
                             "Rank 0 has 97 more in the queue behind it.\n"))
      << text;
  EXPECT_FALSE(Says(text, name(3))) << text;
}

TEST(ExplainTest, TellsWhoHasNotComeToACallOfNccl) {
  const std::string name = "all-reduce of \"w\" (GPU slot 0)";
  FlightRecord zero = Rank(0, 2, 8, "\"w\"");
  FlightRecord one = Rank(1, 2, 8, "\"w\"");
  for (FlightRecord* record : {&zero, &one}) {
    Event event;
    event.kind = EventKind::kBegin;
    event.number = 1;
    event.begin = At(20);
    event.SetText(name);
    record->events.push_back(event);
    record->running.push_back({0, "all-reduce of \"v\" (GPU slot 0)", At(10)});
  }
  zero.running.push_back({0, "all-reduce of \"w\" (GPU slot 0, in ncclAllReduce)", At(20)});
  one.running.push_back({0, name, At(20)});
  const std::string text = Explain({zero, one});
  EXPECT_TRUE(Says(text,
                   "Rank 0 is in all-reduce of \"w\" (GPU slot 0, in ncclAllReduce) of the "
                   "world for 40 s.\n"))
      << text;
  EXPECT_TRUE(Says(text, "Rank 1 is in all-reduce of \"w\" (GPU slot 0) of the world for 40 s.\n"))
      << text;
}

TEST(ExplainTest, NothingInARecordSteersATerminal) {
  const std::string bad = "\x1b[2J\nforged";
  FlightRecord zero = Rank(0, 2, 8, bad);
  Wait(zero, bad, 9, 0, bad);
  zero.host = zero.why = zero.missing = bad;
  zero.running.push_back({0, bad, At(0)});
  zero.fault = Status(StatusCode::kPeerLost, bad, {1, bad, bad});
  FlightRecord one = Rank(1, 2, 8, bad);
  one.host = one.why = bad;
  const std::string text = Explain({zero, one});
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
  EXPECT_EQ(text.find("\nforged"), std::string::npos) << text;
}

// Whatever of a record was damaged: it is refused, or explained.
TEST(ExplainTest, ADamagedRecordIsNoTrouble) {
  FlightRecord zero = Rank(0, 4, 8, "\"w\"");
  Call(zero, "\"x\"", 9, 50, 3);
  Wait(zero, "\"w\"", 8, 0);
  zero.running.push_back({0, "all-reduce of \"w\" (large lane)", At(20)});
  zero.leaving = At(50);
  zero.lost = 4;
  FlightRecord one = Rank(1, 4, 7, "\"v\"");
  Call(one, "\"x\"", 8, 50, 3);
  const std::string text = FlightRecordToJson(zero);
  std::mt19937 random(11);
  int explained = 0;
  for (int i = 0; i < 1500; ++i) {
    std::string damaged = text;
    for (int j = 0; j < 2; ++j) {
      damaged[random() % damaged.size()] = "0123456789-e.[]x"[random() % 16];
    }
    FlightRecord back;
    if (!FlightRecordFromJson(damaged, &back).ok()) continue;
    EXPECT_FALSE(Explain({back, one}).empty());
    ++explained;
  }
  EXPECT_GT(explained, 50);
}

// The most that a record may say of ranks and times.
TEST(ExplainTest, LimitsAreNoTrouble) {
  constexpr int kSize = 1 << 24;
  const TimePoint first(std::chrono::nanoseconds(-(std::int64_t{1} << 60)));
  const TimePoint last(std::chrono::nanoseconds(std::int64_t{1} << 60));
  FlightRecord zero = Rank(0, kSize, 8, "\"w\"");
  zero.now = last;
  zero.offset = last.time_since_epoch();
  zero.pending.push_back({0, "\"w\"", "all-reduce", 8, first});
  FlightRecord one = Rank(1, kSize, 7, "\"v\"");
  one.now = first;
  one.offset = first.time_since_epoch();
  const std::string text = Explain({zero, one});
  EXPECT_TRUE(Says(text, "; ranks 2-16777215 have left none")) << text;
  EXPECT_TRUE(Says(text, "rank 1 had not called it")) << text;
}

}  // namespace
}  // namespace sirtaki::launch
