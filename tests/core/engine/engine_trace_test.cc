// What the recorder and the metrics of a rank have of its calls, and what its engine tells when it
// is asked for a flight record.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/trace/observer.h"
#include "tests/core/engine/engine_world.h"

namespace sirtaki::core {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using trace::Event;
using trace::EventKind;
using trace::FlightRecord;
using trace::Metric;

std::vector<Event> EventsOf(const trace::ObserverPtr& observer) {
  std::vector<Event> events;
  std::uint64_t lost = 0;
  observer->recorder.Read(0, true, &events, &lost);
  EXPECT_EQ(lost, 0U);
  return events;
}

// "submit "w"", in order, without those of waiting: whether a thread has to is a matter of luck.
std::vector<std::string> Told(const trace::ObserverPtr& observer) {
  std::vector<std::string> told;
  for (const Event& event : EventsOf(observer)) {
    if (event.kind == EventKind::kWaitFor) continue;
    std::string text(EventKindName(event.kind));
    if (!event.text().empty()) text += " " + std::string(event.text());
    told.push_back(std::move(text));
  }
  return told;
}

class EngineTraceTest : public testing::Test {
 protected:
  World world_{2, 8, Duration::zero(), /*observed=*/true};
  const trace::ObserverPtr& observer(int rank) { return world_[rank].observer; }
  trace::Metrics Read(int rank) { return observer(rank)->metrics.Read(); }
};

TEST_F(EngineTraceTest, ACallIsSubmittedAndNegotiated) {
  const WorkPtr early = world_.Submit(0, "w");
  float input[4] = {};
  early->input = input;
  world_.Settle();
  world_.now += milliseconds(7);
  world_.Submit(1, "w");
  world_.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Told(observer(rank)), (std::vector<std::string>{"submit \"w\"", "negotiate \"w\""}));
    EXPECT_EQ(Read(rank).Count(Metric::kCalls), 1);
    EXPECT_EQ(Read(rank).Count(Metric::kRefused), 0);
  }
  const std::vector<Event> events = EventsOf(observer(0));
  EXPECT_EQ(events[0].number, 1U);
  EXPECT_EQ(events[0].bytes, 16);
  EXPECT_EQ(events[0].begin, early->submitted);
  EXPECT_EQ(events[0].end, early->submitted);
  EXPECT_EQ(events[1].begin, early->submitted);
  EXPECT_EQ(events[1].end, early->submitted + milliseconds(7));
  EXPECT_EQ(Read(0).Time(Metric::kNegotiationTime), milliseconds(7));
  EXPECT_EQ(Read(1).Time(Metric::kNegotiationTime), Duration::zero());
}

// A round may last, on a machine that is busy, and take what was sent after it had begun.
TEST_F(EngineTraceTest, NothingIsAgreedOnBeforeTheLastRankHasCalled) {
  world_.Submit(0, "w");
  world_.Settle();
  WorkPtr late;
  world_[0].transport->before_receive = [&] {
    if (late != nullptr) return;
    world_.now += milliseconds(7);
    late = world_.Submit(1, "w");
    world_[1].engine->RunOnce();
  };
  world_[0].engine->RunOnce();
  world_[0].transport->before_receive = nullptr;
  const Event agreed = EventsOf(observer(0)).back();
  ASSERT_EQ(agreed.kind, EventKind::kNegotiate);
  EXPECT_EQ(agreed.end, late->submitted);
}

TEST_F(EngineTraceTest, CallsAreNumberedAsTheRankMakesThem) {
  for (int i = 0; i < 3; ++i) world_.Submit(0, "w" + std::to_string(i));
  for (int i = 2; i >= 0; --i) world_.Submit(1, "w" + std::to_string(i));
  world_.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    int submitted = 0;
    for (const Event& event : EventsOf(observer(rank))) {
      if (event.kind != EventKind::kSubmit) continue;
      ++submitted;
      const int i = event.text()[2] - '0';
      EXPECT_EQ(event.number, static_cast<std::uint64_t>(rank == 0 ? i + 1 : 3 - i));
    }
    EXPECT_EQ(submitted, 3);
  }
}

TEST_F(EngineTraceTest, NamesAreWrittenAsTextsHaveThem) {
  const std::string plain(Event::kTextBytes - 2, 'x');
  for (const std::string& name :
       {std::string("a\"b\\c\nd"), plain, plain + "y", std::string("sirtaki/check_parameters")}) {
    const WorkPtr work = world_.Submit(0, name);
    world_.Settle();
    Event expected;
    expected.SetText(work->request.key.ToString());
    EXPECT_EQ(EventsOf(observer(0)).back().text(), expected.text());
  }
}

TEST_F(EngineTraceTest, AMismatchIsRefused) {
  const WorkPtr zero = world_.Submit(0, "w", 4);
  world_.Submit(1, "w", 5);
  world_.Settle();
  Event expected;
  expected.SetText(zero->handle->status().message());
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Told(observer(rank)),
              (std::vector<std::string>{"submit \"w\"", "negotiate \"w\"",
                                        "refuse " + std::string(expected.text())}));
    EXPECT_EQ(Read(rank).Count(Metric::kRefused), 1);
  }
}

TEST_F(EngineTraceTest, AFaultIsToldOnce) {
  world_.Submit(0, "w");
  world_.Settle();
  world_[1].engine->PostFailure({StatusCode::kBackend, "the cable"}, "w");
  world_.Settle();
  world_.Settle();
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<std::string> told = Told(observer(rank));
    EXPECT_EQ(std::count_if(told.begin(), told.end(),
                            [](const std::string& text) { return text.starts_with("fault "); }),
              1);
    EXPECT_NE(told.back().find("the cable"), std::string::npos) << told.back();
  }
}

TEST_F(EngineTraceTest, AStallIsToldWhereItIsWarnedOf) {
  world_.Submit(0, "w");
  world_.Settle();
  for (int i = 0; i < 70; ++i) {
    world_.now += seconds(1);
    world_.Settle();
  }
  const std::vector<std::string> told = Told(observer(0));
  EXPECT_TRUE(told.back().starts_with("stall waits for rank 1: \"w\"")) << told.back();
  EXPECT_EQ(Read(0).Count(Metric::kStalls), 1);
  EXPECT_EQ(Read(1).Count(Metric::kStalls), 0);
}

TEST_F(EngineTraceTest, ARankThatIsLateSaysWhatItIsInTheMiddleOf) {
  const trace::Doing::Scope scope(observer(1)->doing, [](TimePoint) {
    return std::string("in the pipeline \"p\": stage 1 on rank 1 waits");
  });
  EXPECT_EQ(world_[1].engine->Activity(), "in the pipeline \"p\": stage 1 on rank 1 waits");
  EXPECT_EQ(world_[0].engine->Activity(), "has submitted nothing yet");
  EXPECT_EQ(world_[1].engine->Describe(seconds(1)).doing,
            "in the pipeline \"p\": stage 1 on rank 1 waits");
  EXPECT_EQ(world_[0].engine->Describe(seconds(1)).doing, "");
}

TEST_F(EngineTraceTest, AFaultKeepsWhatTheRankWasInTheMiddleOf) {
  {
    const trace::Doing::Scope scope(observer(0)->doing,
                                    [](TimePoint) { return std::string("in its work"); });
    world_[0].engine->Abort(StatusCode::kAborted, "enough");
    world_.Settle();
  }
  EXPECT_EQ(world_[0].engine->Describe(seconds(1)).doing, "in its work");
}

TEST_F(EngineTraceTest, AWaitIsToldIfThereWasOne) {
  const WorkPtr work = world_.Submit(0, "w");
  world_.Submit(1, "w");
  // At its deadline already.
  EXPECT_EQ(world_[0].engine->Wait(*work->handle, world_.now).code(), StatusCode::kTimedOut);
  world_.Settle();
  EXPECT_TRUE(world_[0].engine->Wait(*work->handle, world_.now).ok());
  std::vector<std::string> waits;
  for (const Event& event : EventsOf(observer(0))) {
    if (event.kind == EventKind::kWaitFor) waits.emplace_back(event.text());
  }
  EXPECT_EQ(waits, std::vector<std::string>{"\"w\""});
}

TEST_F(EngineTraceTest, WaitingForARankIsCountedApart) {
  const WorkPtr work = world_.Submit(0, "w");
  bool submitted = false;
  world_[0].transport->before_receive = [&] {
    if (std::exchange(submitted, true)) return;
    world_.now += milliseconds(7);
    world_.Submit(1, "w");
    world_[1].engine->RunOnce();
  };
  EXPECT_TRUE(world_[0].engine->Wait(*work->handle, world_.now + seconds(10)).ok());
  world_[0].transport->before_receive = nullptr;
  EXPECT_EQ(Read(0).Time(Metric::kWaitTime), milliseconds(7));
  EXPECT_EQ(Read(0).Time(Metric::kAgreementTime), milliseconds(7));
  EXPECT_EQ(Read(0).Time(Metric::kExposedTime), Duration::zero());
}

// Nobody has to agree to it, so that waiting for it is for no rank's call.
TEST_F(EngineTraceTest, AMessageIsNotNegotiated) {
  auto work = std::make_shared<Work>();
  auto signature = std::make_shared<Signature>();
  signature->kind = OpKind::kReceive;
  work->request = {Key::Named(kWorldSet, "m"), std::move(signature), {}, {}};
  work->peer = 1;
  ASSERT_TRUE(world_[0].engine->Submit(work, false).ok());
  world_.Settle();
  ASSERT_EQ(world_[0].executor.messages.size(), 1U);
  EXPECT_EQ(Read(0).Count(Metric::kCalls), 1);
  EXPECT_EQ(Read(0).Count(Metric::kMessages), 1);
  world_[0].transport->before_receive = [&] {
    if (work->handle->done()) return;
    world_.now += milliseconds(7);
    work->handle->Complete(Status::Ok());
  };
  EXPECT_TRUE(world_[0].engine->Wait(*work->handle, world_.now + seconds(10)).ok());
  world_[0].transport->before_receive = nullptr;
  EXPECT_EQ(Read(0).Time(Metric::kWaitTime), milliseconds(7));
  EXPECT_EQ(Read(0).Time(Metric::kAgreementTime), Duration::zero());
}

TEST_F(EngineTraceTest, AnEngineDescribesWhatItsRankWaitsFor) {
  world_[0].executor.at_once = false;
  for (int rank = 0; rank < 2; ++rank) world_.Submit(rank, "agreed");
  world_.Settle();
  const TimePoint since = world_.now;
  world_.Submit(0, "alone");
  world_.now += seconds(3);
  world_.Settle();
  const FlightRecord record = world_[0].engine->Describe(seconds(10));
  EXPECT_EQ(record.rank, 0);
  EXPECT_EQ(record.host, "host0");
  EXPECT_EQ(record.missing, "");
  EXPECT_TRUE(record.fault.ok());
  EXPECT_EQ(record.now, world_.now);
  ASSERT_EQ(record.sets.size(), 1U);
  EXPECT_EQ(record.sets[0].number, kWorldSet);
  EXPECT_EQ(record.sets[0].members, RankRanges::Span(0, 1));
  EXPECT_EQ(record.sets[0].submitted, 2U);
  EXPECT_FALSE(record.sets[0].joined);
  ASSERT_EQ(record.pending.size(), 1U);
  EXPECT_EQ(record.pending[0].key, "\"alone\"");
  EXPECT_EQ(record.pending[0].what, "all-reduce(sum) of float32 [4]");
  EXPECT_EQ(record.pending[0].number, 2U);
  EXPECT_EQ(record.pending[0].since, since);
  ASSERT_EQ(record.running.size(), 1U);
  EXPECT_EQ(record.running[0].what, "\"agreed\"");
  EXPECT_EQ(record.events.size(), 3U);
}

TEST_F(EngineTraceTest, ARankThatHasFailedDescribesWhatItWaitedForThen) {
  world_[0].executor.at_once = false;
  for (int rank = 0; rank < 2; ++rank) world_.Submit(rank, "agreed");
  world_.Settle();
  world_.Submit(0, "alone");
  world_.Settle();
  world_[1].engine->PostFailure({StatusCode::kBackend, "the cable"}, "w");
  world_.Settle();
  EXPECT_TRUE(world_[0].executor.running.empty());
  const FlightRecord record = world_[0].engine->Describe(seconds(10));
  EXPECT_FALSE(record.fault.ok());
  ASSERT_EQ(record.pending.size(), 1U);
  EXPECT_EQ(record.pending[0].key, "\"alone\"");
  ASSERT_EQ(record.running.size(), 1U);
  EXPECT_EQ(record.running[0].what, "\"agreed\"");
}

// One that is stuck under its token: here, in a callback.
TEST_F(EngineTraceTest, AStuckEngineHangsNobody) {
  world_.Submit(0, "alone");
  world_.Settle();
  FlightRecord record;
  world_[0].on_start = [&] {
    std::thread writer([&] { record = world_[0].engine->Describe(milliseconds(20)); });
    writer.join();
  };
  world_.Submit(1, "alone");
  world_.Submit(0, "later");
  world_.Settle();
  EXPECT_NE(record.missing.find("the members"), std::string::npos) << record.missing;
  ASSERT_EQ(record.pending.size(), 1U);
  EXPECT_EQ(record.pending[0].key, "\"later\"");
  ASSERT_EQ(record.sets.size(), 1U);
  EXPECT_EQ(record.sets[0].submitted, 2U);
  EXPECT_TRUE(record.sets[0].members.empty());
}

TEST(EngineWithoutAnObserverTest, DescribesAllTheSame) {
  World world(1);
  world.Submit(0, "w");
  world.Settle();
  const FlightRecord record = world[0].engine->Describe(seconds(10));
  EXPECT_TRUE(record.events.empty());
  EXPECT_EQ(record.lost, 0U);
  EXPECT_EQ(record.sets[0].submitted, 1U);
}

}  // namespace
}  // namespace sirtaki::core
