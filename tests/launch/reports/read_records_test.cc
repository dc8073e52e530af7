#include "launch/reports/read_records.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace sirtaki::launch {
namespace {

using core::trace::FlightRecord;

class ReadRecordsTest : public testing::Test {
 protected:
  ReadRecordsTest() {
    std::string folder = testing::TempDir() + "read_records.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~ReadRecordsTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
  }
  void WriteRecord(int rank, const std::string& session, std::int64_t unix_us) const {
    FlightRecord record;
    record.rank = rank;
    record.size = 12;
    record.session = session;
    record.unix_us = unix_us;
    Write("flight-" + std::to_string(rank) + ".json", FlightRecordToJson(record));
  }
  core::Status Read() {
    records_.clear();
    notes_.clear();
    return ReadRecords(folder_, &records_, &notes_);
  }

  std::string folder_;
  std::vector<FlightRecord> records_;
  std::vector<std::string> notes_;
};

TEST_F(ReadRecordsTest, ReadsThemByRankAndNothingElse) {
  WriteRecord(10, "a", 1);
  WriteRecord(2, "a", 2);
  Write("rank-0.json", "[]");
  Write("flight-x.json", "x");
  ASSERT_TRUE(Read().ok());
  ASSERT_EQ(records_.size(), 2U);
  EXPECT_EQ(records_[0].rank, 2);
  EXPECT_EQ(records_[1].rank, 10);
  EXPECT_TRUE(notes_.empty());
}

TEST_F(ReadRecordsTest, TheLastRunCounts) {
  WriteRecord(0, "old", 5);
  WriteRecord(1, "new", 7);
  WriteRecord(2, "new", 6);
  WriteRecord(3, "old", 4);
  ASSERT_TRUE(Read().ok());
  ASSERT_EQ(records_.size(), 2U);
  EXPECT_EQ(records_[0].rank, 1);
  EXPECT_EQ(records_[1].rank, 2);
  EXPECT_EQ(notes_, (std::vector<std::string>{
                        folder_ + "/flight-0.json was left out: it belongs to an earlier run",
                        folder_ + "/flight-3.json was left out: it belongs to an earlier run"}));
}

TEST_F(ReadRecordsTest, WhatCannotBeReadIsLeftOut) {
  WriteRecord(0, "a", 1);
  Write("flight-1.json", "{");
  ASSERT_TRUE(Read().ok());
  EXPECT_EQ(records_.size(), 1U);
  ASSERT_EQ(notes_.size(), 1U);
  EXPECT_EQ(notes_[0].find(folder_ + "/flight-1.json was left out: not a flight record: "), 0U);
}

TEST_F(ReadRecordsTest, WithoutAnyItSaysSo) {
  EXPECT_EQ(Read().message(), folder_ + ": holds no flight-<number>.json");
  Write("flight-1.json", "{");
  EXPECT_NE(Read().message().find("flight-1.json was left out"), std::string::npos);
  folder_ += "/none";
  EXPECT_EQ(Read().message(), folder_ + ": No such file or directory");
  folder_.resize(folder_.size() - 5);
}

}  // namespace
}  // namespace sirtaki::launch
