#include "core/trace/recorder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace sirtaki::core::trace {
namespace {

Event Numbered(std::uint64_t number) {
  Event event;
  event.kind = EventKind::kMark;
  event.number = number;
  // Every field says the same, so that a mixture of two events is seen.
  event.bytes = static_cast<std::int64_t>(number);
  event.begin = TimePoint(Duration(static_cast<Duration::rep>(number)));
  event.end = event.begin;
  event.SetText(std::to_string(number));
  return event;
}

bool Whole(const Event& event) {
  return event.bytes == static_cast<std::int64_t>(event.number) && event.begin == event.end &&
         event.begin.time_since_epoch().count() == static_cast<Duration::rep>(event.number) &&
         event.text() == std::to_string(event.number);
}

TEST(RecorderTest, GivesWhatWasAddedInOrder) {
  Recorder recorder(64);
  for (std::uint64_t i = 0; i < 10; ++i) recorder.Add(Numbered(i));
  std::vector<Event> events;
  std::uint64_t lost = 0;
  EXPECT_EQ(recorder.Read(0, false, &events, &lost), 10U);
  EXPECT_EQ(lost, 0U);
  ASSERT_EQ(events.size(), 10U);
  for (std::uint64_t i = 0; i < 10; ++i) {
    EXPECT_EQ(events[i].number, i);
    EXPECT_TRUE(Whole(events[i]));
  }
  EXPECT_EQ(recorder.Read(10, false, &events, &lost), 10U);
  EXPECT_EQ(events.size(), 10U);
}

TEST(RecorderTest, KeepsTheLastAndCountsTheOthers) {
  Recorder recorder(64);
  ASSERT_EQ(recorder.capacity(), 64U);
  for (std::uint64_t i = 0; i < 200; ++i) recorder.Add(Numbered(i));
  std::vector<Event> events;
  std::uint64_t lost = 0;
  EXPECT_EQ(recorder.Read(100, false, &events, &lost), 200U);
  EXPECT_EQ(lost, 36U);
  ASSERT_EQ(events.size(), 64U);
  EXPECT_EQ(events.front().number, 136U);
  EXPECT_EQ(events.back().number, 199U);
}

TEST(RecorderTest, CapacityIsRoundedUp) {
  EXPECT_EQ(Recorder(0).capacity(), Recorder::kFewestEvents);
  EXPECT_EQ(Recorder(65).capacity(), 128U);
}

// A reader that follows while writers lap it sees whole events only, each once, and counts the
// rest.
TEST(RecorderTest, ManyThreadsAddWhileOneFollows) {
  constexpr int kThreads = 4;
  constexpr std::uint64_t kEach = 20000;
  Recorder recorder(256);
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        recorder.Add(Numbered(static_cast<std::uint64_t>(t) * kEach + i));
      }
      --running;
    });
  }
  std::vector<Event> events;
  std::vector<std::uint64_t> last(kThreads, 0);
  std::uint64_t next = 0;
  std::uint64_t lost = 0;
  std::uint64_t seen = 0;
  bool wrong = false;
  for (bool last_time = false; !last_time;) {
    last_time = running == 0;
    events.clear();
    next = recorder.Read(next, last_time, &events, &lost);
    for (const Event& event : events) {
      ++seen;
      wrong |= !Whole(event);
      // The events of one thread come in order, each once.
      const std::uint64_t i = event.number % kEach + 1;
      std::uint64_t& before = last[static_cast<std::size_t>(event.number / kEach) % kThreads];
      wrong |= i <= before;
      before = i;
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(wrong);
  EXPECT_EQ(next, kThreads * kEach);
  EXPECT_EQ(seen + lost, kThreads * kEach);
  EXPECT_GE(seen, recorder.capacity() / 2);  // the last ring of them, but for what was dropped
}

TEST(EventTest, ALongTextLosesItsMiddle) {
  Event event;
  event.SetText(std::string(40, 'a') + std::string(100, 'b') + ".weight");
  EXPECT_EQ(event.text().size(), Event::kTextBytes);
  EXPECT_EQ(event.text().substr(0, 4), "aaaa");
  EXPECT_NE(event.text().find("…"), std::string_view::npos);
  EXPECT_TRUE(event.text().ends_with("bb.weight"));
}

TEST(EventTest, ATextIsCutBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 50; ++i) text += "\u00fc";  // two bytes each
  for (const std::string& shifted : {text, "x" + text, text + "x"}) {
    Event event;
    event.SetText(shifted);
    std::string rest(event.text());
    rest.erase(rest.find("…"), std::string_view("…").size());
    for (std::size_t i = 0; i < rest.size();) {
      if (rest[i] == 'x') {
        ++i;
        continue;
      }
      ASSERT_EQ(rest.substr(i, 2), "\u00fc") << rest;
      i += 2;
    }
  }
}

TEST(EventTest, EveryKindHasAName) {
  for (int i = 0; i < kEventKindCount; ++i) {
    EXPECT_FALSE(EventKindName(static_cast<EventKind>(i)).empty()) << i;
  }
}

}  // namespace
}  // namespace sirtaki::core::trace
