#include "ops/nccl/rendezvous.h"

#include <algorithm>
#include <map>
#include <utility>

namespace sirtaki::ops::nccl {

using core::Status;
using core::StatusCode;

Introduction Introduction::Of(int version, const UniqueId& id) {
  Introduction introduction;
  introduction.version = version;
  introduction.id = id;
  return introduction;
}

Introduction Introduction::Failure(const Status& why) {
  Introduction introduction;
  introduction.failed = 1;
  const std::string& text = why.message();
  std::copy_n(text.begin(), std::min(text.size(), introduction.text.size() - 1),
              introduction.text.begin());
  return introduction;
}

std::string Introduction::Why() const {
  return {text.begin(), std::find(text.begin(), text.end(), '\0')};
}

ToldRows::ToldRows(std::shared_ptr<const GroupTask> of)
    : group(std::move(of)),
      exchange(*group),
      all(exchange.own().size() * static_cast<std::size_t>(group->members->Count())),
      told(std::make_shared<core::HandleState>()) {}

Status Judge(const std::vector<Introduction>& all, const core::RankRanges& members) {
  std::map<int, std::string> ranks_of_version;
  std::size_t index = 0;
  for (const core::RankRange& range : members.ranges()) {
    for (int rank = range.first; rank <= range.last; ++rank, ++index) {
      const Introduction& one = all[index];
      if (one.failed != 0) {
        return {StatusCode::kUnsupported,
                "rank " + std::to_string(rank) + " cannot use its GPU: " + one.Why(),
                {.rank = rank}};
      }
      std::string& ranks = ranks_of_version[one.version];
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
  }
  if (ranks_of_version.size() <= 1) return Status::Ok();
  std::string text = "the ranks have different versions of NCCL:";
  const char* separator = " ";
  for (const auto& [version, ranks] : ranks_of_version) {
    text += separator + VersionText(version) + " at " + ranks;
    separator = ", ";
  }
  return {StatusCode::kUnsupported, std::move(text)};
}

}  // namespace sirtaki::ops::nccl
