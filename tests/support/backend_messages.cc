// The checks of BackendConformance that send messages.
#include <utility>

#include "tests/support/backend_conformance.h"

namespace sirtaki::tests {
namespace {

constexpr int kTags[] = {0, 7, ops::Backend::kAnswerTag};

int Mark(int from, int to, int tag, int number) {
  return ((from * 31 + to) * 40000 + tag) * 16 + number;
}

}  // namespace

void BackendConformance::MessagesKeepTheirOrder() {
  constexpr std::size_t kSizes[] = {5, 0, 1003, 1, 300001, 64};
  std::vector<std::vector<std::uint8_t>> sent;
  std::vector<std::unique_ptr<ops::Completion>> sends;
  for (const int tag : kTags) {
    for (int to = 0; to < size_; ++to) {
      for (int i = 0; i < 6; ++i) {
        sent.push_back(Bytes(Mark(rank_, to, tag, i), kSizes[i]));
        sends.push_back(backend_.SendMessage(to, tag, sent.back().data(),
                                             static_cast<std::int64_t>(sent.back().size())));
      }
    }
  }
  for (const int tag : {kTags[1], kTags[2], kTags[0]}) {
    for (int from = size_ - 1; from >= 0; --from) {
      std::vector<std::vector<std::uint8_t>> taken;
      std::vector<std::unique_ptr<ops::Completion>> receives;
      for (const std::size_t bytes : kSizes) {
        taken.emplace_back(bytes);
        receives.push_back(backend_.ReceiveMessage(from, tag, taken.back().data(),
                                                   static_cast<std::int64_t>(bytes)));
      }
      for (int i = 5; i >= 0; --i) Finish(std::move(receives[static_cast<std::size_t>(i)]));
      for (int i = 0; i < 6; ++i) {
        EXPECT_TRUE(taken[static_cast<std::size_t>(i)] ==
                    Bytes(Mark(from, rank_, tag, i), kSizes[i]))
            << "message " << i << " from rank " << from << ", tag " << tag;
      }
    }
  }
  for (auto& send : sends) Finish(std::move(send));
}

void BackendConformance::LargeMessagesCross() {
  constexpr std::size_t kBytes = (std::size_t{4} << 20) + 1;
  std::vector<std::vector<std::uint8_t>> sent;
  std::vector<std::vector<std::uint8_t>> taken;
  std::vector<std::unique_ptr<ops::Completion>> operations;
  for (int to = 0; to < size_; ++to) {
    sent.push_back(Bytes(Mark(rank_, to, 1, 0), kBytes));
    operations.push_back(backend_.SendMessage(to, 1, sent.back().data(), kBytes));
  }
  for (int from = 0; from < size_; ++from) {
    taken.emplace_back(kBytes);
    operations.push_back(backend_.ReceiveMessage(from, 1, taken.back().data(), kBytes));
  }
  for (auto& operation : operations) Finish(std::move(operation));
  for (int from = 0; from < size_; ++from) {
    EXPECT_TRUE(taken[static_cast<std::size_t>(from)] == Bytes(Mark(from, rank_, 1, 0), kBytes))
        << "from rank " << from;
  }
}

void BackendConformance::MessagesPassTheLanes() {
  const int next = (rank_ + 1) % size_;
  const int previous = (rank_ + size_ - 1) % size_;
  std::int32_t taken = -1;
  auto receive = backend_.ReceiveMessage(previous, 2, &taken, sizeof(taken));
  std::int32_t one = 1;
  auto sum = RootlessOf(World(fusion::Lane::kSmall))
                 .AllReduce(World(fusion::Lane::kSmall), &one, 1, core::DType::kI32,
                            core::ReduceOp::kSum, {});
  Finish(std::move(sum));  // though the message is not sent yet
  EXPECT_EQ(one, size_);
  const std::int32_t given = rank_;
  auto behind = World(fusion::Lane::kSmall);
  std::int32_t many = rank_;
  auto broadcast = On(behind).Broadcast(behind, &many, sizeof(many), 0);
  Finish(backend_.SendMessage(next, 2, &given, sizeof(given)));
  Finish(std::move(receive));
  EXPECT_EQ(taken, previous);
  Finish(std::move(broadcast));
  EXPECT_EQ(many, 0);
}

}  // namespace sirtaki::tests
