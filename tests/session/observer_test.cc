// What is told of a collective, from its call to its end, by engine and lanes together.
#include "core/trace/observer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <latch>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::OpKind;
using core::trace::Event;
using core::trace::EventKind;
using core::trace::Metric;
using core::trace::ObserverPtr;
using core::trace::Track;
using tests::RankThreads;
using tests::Vector;

constexpr int kSize = 2;

std::shared_ptr<Session> Start(const std::shared_ptr<InprocWorld>& world, int rank,
                               const ObserverPtr& observer) {
  StartOptions options =
      tests::SessionOptions([](core::Config& config) { config.wait = core::WaitMode::kYield; });
  options.observer = observer;
  std::shared_ptr<Session> session;
  const core::Status status = Session::CreateInproc(world, rank, options, &session);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return session;
}

// Those since number `from`, but for those of waiting: whether a thread had to is a matter of luck.
std::vector<Event> EventsSince(const ObserverPtr& observer, std::uint64_t from) {
  std::vector<Event> events;
  std::uint64_t lost = 0;
  observer->recorder.Read(from, true, &events, &lost);
  EXPECT_EQ(lost, 0U);
  std::erase_if(events, [](const Event& event) { return event.kind == EventKind::kWaitFor; });
  return events;
}

// "submit "w"".
std::vector<std::string> Texts(const std::vector<Event>& events) {
  std::vector<std::string> texts;
  for (const Event& event : events) {
    texts.push_back(std::string(EventKindName(event.kind)) + " " + std::string(event.text()));
  }
  return texts;
}

TEST(ObserverTest, AnAllReduceIsToldFromItsCallToItsEnd) {
  const auto world = std::make_shared<InprocWorld>(kSize);
  RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    observer->detail = true;
    const auto session = Start(world, rank, observer);
    const std::uint64_t from = observer->recorder.added();
    Vector vector(OpKind::kAllReduce, "w", std::vector<float>(10, 1.0F));
    ASSERT_TRUE(vector.Run(*session).ok());
    EXPECT_EQ(vector.values().front(), float(kSize));
    const std::vector<Event> events = EventsSince(observer, from);
    const std::string what = "all-reduce of \"w\" (small lane)";
    ASSERT_EQ(Texts(events),
              (std::vector<std::string>{"submit \"w\"", "negotiate \"w\"", "queue " + what,
                                        "begin " + what, "pack ", "move in-process", "unpack ",
                                        "finish " + what}));
    for (std::size_t i = 1; i + 1 < events.size(); ++i) {
      EXPECT_LE(events[i - 1].begin, events[i].begin) << i;
      EXPECT_LE(events[i].end, events.back().end) << i;
    }
    for (std::size_t i = 0; i < events.size(); ++i) {
      EXPECT_EQ(events[i].track, i < 2 ? Track::kNegotiation : Track::kSmallLane);
      EXPECT_EQ(events[i].bytes, i == 1 ? 0 : 40);
    }
    const core::trace::Metrics metrics = observer->metrics.Read();
    EXPECT_EQ(metrics.Count(Metric::kBytes), 40);
    EXPECT_GT(metrics.Count(Metric::kNegotiationTime), 0);
    static_cast<void>(session->Shutdown("done"));
    EXPECT_EQ(Texts(EventsSince(observer, from)).back(), "leave done");
  });
}

// Over shared memory: tensors are reduced where they lie, nothing is packed.
TEST(ObserverTest, ALargeGroupNamesTheBackendThatCarriesIt) {
  const auto world = std::make_shared<InprocWorld>(kSize);
  world->Share(InprocWorld::Sharing::kDirect);
  RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    observer->detail = true;
    const auto session = Start(world, rank, observer);
    const std::uint64_t from = observer->recorder.added();
    Vector vector(OpKind::kAllReduce, "w", std::vector<float>(1 << 20, 1.0F));
    ASSERT_TRUE(vector.Run(*session).ok());
    const std::vector<Event> events = EventsSince(observer, from);
    const std::string what = "all-reduce of \"w\" (large lane)";
    EXPECT_EQ(Texts(events),
              (std::vector<std::string>{"submit \"w\"", "negotiate \"w\"", "queue " + what,
                                        "begin " + what, "move shm", "finish " + what}));
    EXPECT_EQ(events.back().bytes, 4 << 20);
    static_cast<void>(session->Shutdown("done"));
  });
}

TEST(ObserverTest, AJoinIsACallOfTheRank) {
  const auto world = std::make_shared<InprocWorld>(kSize);
  RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    const auto session = Start(world, rank, observer);
    const std::uint64_t from = observer->recorder.added();
    core::HandlePtr handle;
    ASSERT_TRUE(session->Join(core::kWorldSet, core::TimePoint::max(), &handle).ok());
    ASSERT_TRUE(session->Wait(*handle).ok());
    EXPECT_EQ(Texts(EventsSince(observer, from)),
              (std::vector<std::string>{"join ", "negotiate join"}));
    static_cast<void>(session->Shutdown("done"));
  });
}

// Both records in the hands of who explains them.
TEST(ObserverTest, ARankDescribesItselfForTheFlightRecorder) {
  const auto world = std::make_shared<InprocWorld>(kSize);
  std::vector<core::trace::FlightRecord> records(kSize);
  std::latch described(1);  // until then "late" must wait for rank 1
  RankThreads::Run(kSize, [&](int rank) {
    const auto observer = std::make_shared<core::trace::Observer>();
    const auto session = Start(world, rank, observer);
    Vector before(OpKind::kAllReduce, "before", {1.0F});
    ASSERT_TRUE(before.Run(*session).ok());
    Vector late(OpKind::kAllReduce, "late", {1.0F});
    if (rank == 0) {
      EXPECT_TRUE(late.Submit(*session).ok());
      core::trace::FlightRecord& record = records[0];
      record = session->Describe("a test", std::chrono::seconds(20));
      described.count_down();
      EXPECT_EQ(record.why, "a test");
      EXPECT_EQ(record.size, kSize);
      EXPECT_EQ(record.missing, "");
      ASSERT_EQ(record.pending.size(), 1U);
      EXPECT_EQ(record.pending[0].key, "\"late\"");
      EXPECT_EQ(record.pending[0].number, record.sets[0].submitted);
      EXPECT_EQ(record.sets[0].members, core::RankRanges::Span(0, kSize - 1));
      std::string json = core::trace::FlightRecordToJson(record);
      core::trace::FlightRecord back;
      EXPECT_TRUE(core::trace::FlightRecordFromJson(json, &back).ok()) << json;
    } else {
      records[1] = session->Describe("a test", std::chrono::seconds(20));
      EXPECT_TRUE(records[1].pending.empty());
      described.wait();
      ASSERT_TRUE(late.Submit(*session).ok());
    }
    ASSERT_TRUE(late.Synchronize(*session).ok());
    static_cast<void>(session->Shutdown("done"));
    EXPECT_EQ(session->Describe("later", std::chrono::seconds(20)).rank, rank);
  });
  EXPECT_EQ(records[0].session, records[1].session);
  EXPECT_EQ(records[0].sets[0].submitted, records[1].sets[0].submitted + 1);
}

}  // namespace
}  // namespace sirtaki::session
