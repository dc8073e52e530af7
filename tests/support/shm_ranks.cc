#include "tests/support/shm_ranks.h"

#include <gtest/gtest.h>

namespace sirtaki::tests {

std::string_view SeenName(Seen seen) {
  switch (seen) {
    case Seen::kAll:
      return "All";
    case Seen::kNothing:
      return "Nothing";
    case Seen::kPools:
      return "Pools";
  }
  return "";
}

ShmRanks::ShmRanks(int size, Seen seen) {
  constexpr std::int64_t kPoolBytes = std::int64_t{256} << 20;
  std::vector<std::string> announcements;
  for (int rank = 0; rank < size; ++rank) {
    ops::shm::LocalGroupOptions options;
    options.rank = rank;
    options.threads_share_all = seen == Seen::kAll;
    if (seen == Seen::kPools) {
      const core::Status status = ops::shm::Pool::Make({.bytes = kPoolBytes}, &options.pool);
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
    const core::Status status =
        ops::shm::LocalGroup::Make(options, &groups_.emplace_back(), &announcements.emplace_back());
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  for (const auto& group : groups_) {
    const core::Status status = group->Join(core::RankRanges::Span(0, size - 1), announcements);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

std::unique_ptr<ShmRank> ShmRanks::Connect(int rank, ops::Backend& flat,
                                           const ops::shm::BackendOptions& options) {
  return std::make_unique<ShmRank>(group(rank), flat, options,
                                   core::RankRanges::Span(0, size() - 1));
}

}  // namespace sirtaki::tests
