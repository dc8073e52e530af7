#include "core/trace/flight_record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace sirtaki::core::trace {
namespace {

TimePoint At(std::int64_t us) { return TimePoint(std::chrono::microseconds(us)); }

FlightRecord Example() {
  FlightRecord record;
  record.rank = 1;
  record.size = 4;
  record.host = "b";
  record.pid = 77;
  record.version = "0.1.0";
  record.session = "5eed";
  record.why = "SIGUSR1";
  record.missing = "its sets";
  record.doing = "in the pipeline \"p\"";
  record.fault = {StatusCode::kPeerLost, "rank 3 does not answer", {2, "c", "w"}};
  record.unix_us = 1700000000000000;
  record.now = At(5000);
  record.offset = std::chrono::microseconds(-3);
  record.leaving = At(4500);
  record.sets = {{0, RankRanges::Span(0, 3), 12, false}, {4, {1, 3}, 2, true}};
  record.pending = {{4, "\"quote\\\"d\"", "all-reduce", 2, At(4000)}};
  record.running = {{0, "broadcast of \"v\" (large lane)", At(3000)}};
  record.lost = 9;
  for (int i = 0; i < kEventKindCount; ++i) {
    Event event;
    event.kind = static_cast<EventKind>(i);
    event.track = static_cast<Track>(i % 5);
    event.begin = At(i);
    event.end = At(i + i % 2);
    event.number = static_cast<std::uint64_t>(i);
    event.bytes = i * 10;
    event.count = static_cast<std::uint32_t>(i % 3);
    event.set = static_cast<std::uint32_t>(i % 4);
    event.thread = static_cast<std::uint32_t>(i % 2);
    event.SetText("line\n" + std::to_string(i));
    record.events.push_back(event);
  }
  return record;
}

TEST(FlightRecordTest, ComesBackFromJsonAsItWas) {
  const FlightRecord record = Example();
  const std::string text = FlightRecordToJson(record);
  FlightRecord back;
  const Status status = FlightRecordFromJson(text, &back);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(FlightRecordToJson(back), text);
  EXPECT_EQ(back.fault, record.fault);
  EXPECT_EQ(back.missing, record.missing);
  EXPECT_EQ(back.doing, record.doing);
  EXPECT_EQ(back.sets[1].members, record.sets[1].members);
  EXPECT_EQ(back.pending[0].key, record.pending[0].key);
  EXPECT_EQ(back.now, record.now);
  EXPECT_EQ(back.offset, record.offset);
  EXPECT_EQ(back.leaving, record.leaving);
  ASSERT_EQ(back.events.size(), record.events.size());
  EXPECT_EQ(back.events[5].text(), "line\n5");
  EXPECT_EQ(back.events[5].end, record.events[5].end);
}

TEST(FlightRecordTest, HasALineForEachEvent) {
  const std::string text = FlightRecordToJson(Example());
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), kEventKindCount + 3);
}

TEST(FlightRecordTest, OneThatIsCutOffIsRefused) {
  const std::string text = FlightRecordToJson(Example());
  for (std::size_t size = 0; size + 2 < text.size(); size += 7) {
    FlightRecord back;
    const Status status = FlightRecordFromJson(std::string_view(text).substr(0, size), &back);
    ASSERT_EQ(status.code(), StatusCode::kInvalidArgument) << size;
  }
}

// Whatever stands in a file, reading it ends in a record or in an error.
TEST(FlightRecordTest, DamageIsAnErrorOrARecord) {
  const std::string text = FlightRecordToJson(Example());
  std::mt19937 random(7);
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = text;
    for (int j = 0; j < 3; ++j) {
      damaged[random() % damaged.size()] = "0123456789\"{}[]:,-x\n"[random() % 20];
    }
    FlightRecord back;
    const Status status = FlightRecordFromJson(damaged, &back);
    if (!status.ok()) {
      EXPECT_TRUE(status.message().starts_with("not a flight record: ")) << status.message();
    }
  }
}

// Numbers that would make whoever reads them run out of memory, or overflow.
TEST(FlightRecordTest, NumbersOutOfRangeAreRefused) {
  FlightRecord record = Example();
  record.events.resize(1);
  const std::string text = FlightRecordToJson(record);
  const auto with = [&](const std::string& part, const std::string& instead) {
    const std::size_t at = text.find(part);
    EXPECT_NE(at, std::string::npos) << part;
    FlightRecord back;
    return FlightRecordFromJson(std::string(text).replace(at, part.size(), instead), &back);
  };
  EXPECT_TRUE(with("\"size\":4", "\"size\":5").ok());
  for (const auto& [part, instead] : std::vector<std::pair<std::string, std::string>>{
           {"\"size\":4", "\"size\":2147483647"},
           {"\"size\":4", "\"size\":4294967300"},
           {"\"rank\":1,", "\"rank\":4,"},
           {"\"members\":[[0,3]]", "\"members\":[[0,4]]"},
           {"\"members\":[[0,3]]", "\"members\":[[0,2147483646]]"},
           {"\"members\":[[0,3]]", "\"members\":[[-1,3]]"},
           {"\"members\":[[0,3]]", "\"members\":[[3,0]]"},
           {"\"now\":5000000", "\"now\":-9223372036854775808"},
           {"\"now\":5000000", "\"now\":18446744073709551615"},
           {"\"now\":5000000", "\"now\":1e300"},
           {"\"offset\":-3000", "\"offset\":9223372036854775807"},
           {"\"since\":4000000", "\"since\":9223372036854775807"},
           {"\"leaving\":4500000", "\"leaving\":-9223372036854775808"},
           {"\"unix_us\":1700000000000000", "\"unix_us\":9223372036854775807"},
           {"\"t\":0", "\"t\":9223372036854775807"}}) {
    EXPECT_EQ(with(part, instead).code(), StatusCode::kInvalidArgument) << instead;
  }
}

TEST(FlightRecordTest, AnotherVersionIsNamed) {
  std::string text = FlightRecordToJson(Example());
  const std::string here = "\"flight_record\":1";
  text.replace(text.find(here), here.size(), "\"flight_record\":2");
  FlightRecord back;
  EXPECT_NE(FlightRecordFromJson(text, &back).message().find("another version"), std::string::npos);
}

}  // namespace
}  // namespace sirtaki::core::trace
