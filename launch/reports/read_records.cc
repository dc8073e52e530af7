#include "launch/reports/read_records.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "core/base/text.h"
#include "launch/base/numbered_files.h"

namespace sirtaki::launch {

using core::Status;
using core::trace::FlightRecord;

Status ReadRecords(const std::string& folder, std::vector<FlightRecord>* records,
                   std::vector<std::string>* notes) {
  std::map<int, std::string> paths;
  if (Status status = FindNumbered(folder, "flight-", &paths); !status.ok()) return status;
  std::vector<std::pair<std::string, FlightRecord>> read;
  for (const auto& [rank, path] : paths) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    FlightRecord record;
    const Status status = file ? core::trace::FlightRecordFromJson(text.str(), &record)
                               : Status(core::StatusCode::kInvalidArgument, std::strerror(errno));
    if (status.ok()) {
      read.emplace_back(path, std::move(record));
    } else {
      notes->push_back(path + " was left out: " + core::Escaped(status.message()));
    }
  }
  if (read.empty()) return {core::StatusCode::kInvalidArgument, notes->front()};
  const auto last = std::max_element(read.begin(), read.end(), [](const auto& a, const auto& b) {
    return a.second.unix_us < b.second.unix_us;
  });
  const std::string session = last->second.session;
  for (auto& [path, record] : read) {
    if (record.session == session) {
      records->push_back(std::move(record));
    } else {
      notes->push_back(path + " was left out: it belongs to an earlier run");
    }
  }
  return Status::Ok();
}

}  // namespace sirtaki::launch
