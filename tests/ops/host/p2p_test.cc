// Sends and receives of the lanes, between threads that act as ranks, and their header.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/host/host_lanes.h"
#include "ops/host/p2p_header.h"
#include "ops/inproc/inproc_backend.h"
#include "tests/support/fake_backend.h"
#include "tests/support/rank_threads.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::Signature;
using core::Status;
using core::StatusCode;
using ::testing::HasSubstr;
using tests::RankThreads;

P2pHeaderBytes Valid() { return Encode({DType::kF32, {3, 4}}); }

TEST(P2pHeaderTest, ComesBackAsItWas) {
  const std::vector<P2pHeader> headers = {
      {DType::kBool, {}},
      {DType::kC128, {0}},
      {DType::kF8E8M0FNU, {1, 2, 3}},
      {DType::kI64, {std::int64_t{1} << 59}},
      {DType::kI64, {std::int64_t{1} << 62, 0, std::int64_t{1} << 62}},  // empty
      {DType::kF32, std::vector<std::int64_t>(core::kMaxDimensions, 1)},
      {.dtype = DType::kF32, .shape = {3, 4}, .offer = 0xffee},
  };
  for (const P2pHeader& header : headers) {
    P2pHeader decoded{DType::kU8, {9}};
    const Status status = Decode(Encode(header), &decoded);
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(decoded, header) << decoded.ToString();
    EXPECT_EQ(decoded.offer, header.offer);
  }
}

TEST(P2pHeaderTest, SaysWhatItIs) {
  EXPECT_EQ((P2pHeader{DType::kF32, {3, 4}}).ToString(), "float32 [3, 4]");
  EXPECT_EQ((P2pHeader{DType::kF32, {3, 4}}).bytes(), 48);
  EXPECT_EQ((P2pHeader{DType::kBool, {}}).ToString(), "bool []");
  EXPECT_EQ((P2pHeader{DType::kBool, {}}).bytes(), 1);
}

TEST(P2pHeaderTest, RefusesNonsense) {
  const auto with = [](std::size_t at, std::uint8_t value) {
    P2pHeaderBytes bytes = Valid();
    bytes[at] = std::byte{value};
    P2pHeader header;
    const Status status = Decode(bytes, &header);
    EXPECT_EQ(status.code(), StatusCode::kProtocol) << status.ToString();
    return status.message();
  };
  EXPECT_THAT(with(0, 0), HasSubstr("this is not a message"));
  EXPECT_THAT(with(4, core::kDTypeCount), HasSubstr("data type 17"));
  EXPECT_THAT(with(5, 65), HasSubstr("65 dimensions"));
  EXPECT_THAT(with(5, 1), HasSubstr("more than its 1 dimensions"));
  EXPECT_THAT(with(8, 47), HasSubstr("47 bytes of float32 [3, 4]"));
  EXPECT_THAT(with(15, 0xff), HasSubstr("bytes of float32 [3, 4]"));
  EXPECT_THAT(with(23, 0x80), HasSubstr("48 bytes"));  // a dimension below 0
  EXPECT_THAT(with(23, 0x7f), HasSubstr("48 bytes"));  // a size that does not fit
}

TEST(P2pHeaderTest, SurvivesAnyBytes) {
  std::mt19937_64 random(tests::TestSeed());
  for (int i = 0; i < 20000; ++i) {
    P2pHeaderBytes bytes = Valid();
    for (int changes = 1 + static_cast<int>(random() % 4); changes > 0; --changes) {
      bytes[random() % (i % 2 == 0 ? 40 : bytes.size())] = static_cast<std::byte>(random());
    }
    P2pHeader header;
    if (Decode(bytes, &header).ok()) {
      EXPECT_EQ(Encode(header), bytes);
    }
  }
}

TEST(P2pAnswerTest, ComesBackAsItWas) {
  P2pAnswer answer{.kind = P2pAnswer::Kind::kMeet};
  for (std::size_t i = 0; i < answer.word.size(); ++i) answer.word[i] = static_cast<std::byte>(i);
  P2pAnswer decoded;
  int tag = 0;
  ASSERT_TRUE(Decode(Encode(answer, 32000), &decoded, &tag).ok());
  EXPECT_EQ(decoded.kind, answer.kind);
  EXPECT_EQ(decoded.word, answer.word);
  EXPECT_EQ(tag, 32000);
}

TEST(P2pAnswerTest, RefusesNonsense) {
  for (const std::size_t at : {0U, 4U, 5U}) {
    P2pAnswerBytes bytes = Encode(P2pAnswer{}, 3);
    bytes[at] = std::byte{9};
    P2pAnswer answer;
    int tag = 0;
    EXPECT_EQ(Decode(bytes, &answer, &tag).code(), StatusCode::kProtocol) << at;
  }
}

// Lanes of one rank, with messages whose memory outlives them.
class P2pRank {
 public:
  P2pRank(int rank, std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {
    HostLanesOptions options;
    options.rank = rank;
    options.on_failure = [this](const Status& why, const std::string&) { failures.push_back(why); };
    lanes = std::make_unique<HostLanes>(std::move(options), *backend_);
  }

  core::WorkPtr Start(OpKind kind, int peer, int tag, std::vector<std::int64_t> shape,
                      std::int32_t value = -1, DType dtype = DType::kI32, P2pGate there = nullptr) {
    std::int64_t count = 1;
    for (const std::int64_t dimension : shape) count *= dimension;
    std::vector<std::int32_t>& memory =
        tensors_.emplace_back(static_cast<std::size_t>(count), value);
    auto work = std::make_shared<core::Work>();
    work->request.asked = std::make_shared<const Signature>(
        Signature{.kind = kind, .dtype = dtype, .shape = std::move(shape)});
    work->peer = peer;
    work->tag = tag;
    work->input = work->output = memory.data();
    work->handle = std::make_shared<core::HandleState>();
    lanes->StartP2p(work, core::Clock::now(), std::move(there));
    return work;
  }
  core::WorkPtr Send(int to, int tag, std::vector<std::int64_t> shape, std::int32_t value) {
    return Start(OpKind::kSend, to, tag, std::move(shape), value);
  }
  core::WorkPtr Receive(int from, int tag, std::vector<std::int64_t> shape) {
    return Start(OpKind::kReceive, from, tag, std::move(shape));
  }

  Status Finish(const core::WorkPtr& work) {
    const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
    while (!work->handle->done()) {
      if (core::Clock::now() > limit) return {StatusCode::kTimedOut, "the message does not end"};
      if (!lanes->Step()) std::this_thread::yield();
    }
    return work->handle->status();
  }

  static std::vector<std::int32_t> Taken(const core::WorkPtr& work) {
    const auto* first = static_cast<const std::int32_t*>(work->output);
    return {first, first + work->request.signature()->ElementCount()};
  }

 private:
  std::list<std::vector<std::int32_t>> tensors_;
  const std::unique_ptr<Backend> backend_;

 public:
  std::vector<Status> failures;  // of one thread, as nothing runs on the large lane
  std::unique_ptr<HostLanes> lanes;
};

void RunRanks(int size, const std::function<void(P2pRank&, int)>& body) {
  InprocWorld world(size);
  RankThreads::Run(size, [&](int rank) {
    P2pRank self(rank, world.Connect(rank));
    body(self, rank);
    EXPECT_TRUE(self.failures.empty());
  });
}

TEST(P2pTest, ArriveInOrderForEachPeerAndTag) {
  for (const int size : {1, 2, 3, 4}) {
    RunRanks(size, [size](P2pRank& self, int rank) {
      std::vector<core::WorkPtr> sends;
      for (int to = 0; to < size; ++to) {
        for (int i = 0; i < 12; ++i) {
          const int tag = i % 3;
          sends.push_back(self.Send(to, tag, {i % 4, 2}, 1000 * rank + 100 * to + i));
        }
      }
      for (int from = size - 1; from >= 0; --from) {
        std::vector<core::WorkPtr> receives;
        for (const int tag : {2, 0, 1}) {
          for (int i = tag; i < 12; i += 3) receives.push_back(self.Receive(from, tag, {i % 4, 2}));
        }
        std::size_t next = 0;
        for (const int tag : {2, 0, 1}) {
          for (int i = tag; i < 12; i += 3, ++next) {
            const Status status = self.Finish(receives[next]);
            EXPECT_TRUE(status.ok()) << status.ToString();
            EXPECT_EQ(P2pRank::Taken(receives[next]),
                      std::vector<std::int32_t>(static_cast<std::size_t>(i % 4 * 2),
                                                1000 * from + 100 * rank + i));
          }
        }
      }
      for (const core::WorkPtr& send : sends) EXPECT_TRUE(self.Finish(send).ok());
      EXPECT_FALSE(self.lanes->NeedsStepping());
      EXPECT_TRUE(self.lanes->Running().empty());
    });
  }
}

TEST(P2pTest, LargeOnesMayCrossEachOther) {
  RunRanks(2, [](P2pRank& self, int rank) {
    constexpr std::int64_t kCount = 1 << 20;
    const core::WorkPtr send = self.Send(1 - rank, 0, {kCount}, 5 + rank);
    const core::WorkPtr receive = self.Receive(1 - rank, 0, {kCount});
    EXPECT_TRUE(self.Finish(send).ok());
    EXPECT_TRUE(self.Finish(receive).ok());
    EXPECT_EQ(P2pRank::Taken(receive), std::vector<std::int32_t>(kCount, 6 - rank));
  });
}

// The one that expects something else fails alone; those before and after it are right.
TEST(P2pTest, AnotherShapeIsAMismatchOfTheReceiveAlone) {
  RunRanks(2, [](P2pRank& self, int rank) {
    if (rank == 1) {
      const std::vector<core::WorkPtr> sends = {self.Send(0, 3, {2}, 1), self.Send(0, 3, {4, 3}, 2),
                                                self.Send(0, 3, {5}, 3)};
      for (const core::WorkPtr& send : sends) EXPECT_TRUE(self.Finish(send).ok());
      return;
    }
    const core::WorkPtr first = self.Receive(1, 3, {2});
    const core::WorkPtr second = self.Receive(1, 3, {3, 4});
    const core::WorkPtr third = self.Receive(1, 3, {5});
    const Status status = self.Finish(second);
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_EQ(status.message(),
              "receive from rank 1, tag 3: expected int32 [3, 4], rank 1 sent int32 [4, 3]");
    EXPECT_EQ(P2pRank::Taken(second), std::vector<std::int32_t>(12, -1));  // not written to
    EXPECT_TRUE(self.Finish(first).ok());
    EXPECT_TRUE(self.Finish(third).ok());
    EXPECT_EQ(P2pRank::Taken(first), std::vector<std::int32_t>(2, 1));
    EXPECT_EQ(P2pRank::Taken(third), std::vector<std::int32_t>(5, 3));
  });
}

TEST(P2pTest, AnotherTypeIsAMismatchToo) {
  RunRanks(1, [](P2pRank& self, int) {
    const core::WorkPtr receive = self.Start(OpKind::kReceive, 0, 0, {2}, 0, DType::kF32);
    const core::WorkPtr send = self.Send(0, 0, {2}, 1);
    EXPECT_EQ(self.Finish(receive).message(),
              "receive from rank 0, tag 0: expected float32 [2], rank 0 sent int32 [2]");
    EXPECT_TRUE(self.Finish(send).ok());
  });
}

TEST(P2pTest, NothingButTheHeaderTravelsForAnEmptyTensor) {
  RunRanks(1, [](P2pRank& self, int) {
    const core::WorkPtr send = self.Send(0, 0, {0, 7}, 1);
    const core::WorkPtr receive = self.Receive(0, 0, {0, 7});
    EXPECT_TRUE(self.Finish(receive).ok());
    EXPECT_TRUE(self.Finish(send).ok());
  });
}

// It keeps its place: those behind it in its line wait, others do not.
TEST(P2pTest, ASendWaitsForItsMemory) {
  RunRanks(2, [](P2pRank& self, int rank) {
    if (rank == 1) {
      const core::WorkPtr first = self.Receive(0, 0, {1});
      const core::WorkPtr second = self.Receive(0, 0, {2});
      EXPECT_TRUE(self.Finish(self.Receive(0, 1, {3})).ok());
      EXPECT_FALSE(first->handle->done());
      EXPECT_TRUE(self.Finish(self.Send(0, 2, {1}, 0)).ok());
      EXPECT_TRUE(self.Finish(second).ok());
      EXPECT_TRUE(self.Finish(first).ok());
      EXPECT_EQ(P2pRank::Taken(first), std::vector<std::int32_t>({1}));
      return;
    }
    const auto there = std::make_shared<std::atomic<bool>>(false);
    const core::WorkPtr late = self.Start(OpKind::kSend, 1, 0, {1}, 1, DType::kI32, there);
    const core::WorkPtr behind = self.Send(1, 0, {2}, 2);
    EXPECT_TRUE(self.Finish(self.Send(1, 1, {3}, 3)).ok());
    EXPECT_TRUE(self.Finish(self.Receive(1, 2, {1})).ok());
    EXPECT_FALSE(late->handle->done());
    EXPECT_FALSE(behind->handle->done());
    *there = true;
    EXPECT_TRUE(self.Finish(behind).ok());
    EXPECT_TRUE(self.Finish(late).ok());
  });
}

TEST(P2pTest, AReceiveWaitsForItsMemory) {
  RunRanks(1, [](P2pRank& self, int) {
    const auto there = std::make_shared<std::atomic<bool>>(false);
    const core::WorkPtr receive = self.Start(OpKind::kReceive, 0, 0, {2}, -1, DType::kI32, there);
    const core::WorkPtr send = self.Send(0, 0, {2}, 4);
    for (int i = 0; i < 100; ++i) self.lanes->Step();
    EXPECT_FALSE(receive->handle->done());
    EXPECT_EQ(P2pRank::Taken(receive), std::vector<std::int32_t>(2, -1));
    *there = true;
    EXPECT_TRUE(self.Finish(receive).ok());
    EXPECT_EQ(P2pRank::Taken(receive), std::vector<std::int32_t>(2, 4));
    EXPECT_TRUE(self.Finish(send).ok());
  });
}

TEST(P2pTest, RunningTellsOfThemAndIdleDoesNot) {
  RunRanks(1, [](P2pRank& self, int) {
    const core::WorkPtr receive = self.Receive(0, 3, {1});
    EXPECT_TRUE(self.lanes->NeedsStepping());
    EXPECT_TRUE(self.lanes->Idle());
    EXPECT_FALSE(self.lanes->Step());
    const std::vector<core::RunningOperation> running = self.lanes->Running();
    ASSERT_EQ(running.size(), 1u);
    EXPECT_EQ(running[0].set, core::kWorldSet);
    EXPECT_EQ(running[0].what, "receive from rank 0, tag 3");
    const core::WorkPtr send = self.Send(0, 3, {1}, 4);
    EXPECT_EQ(self.lanes->Running().back().what, "send to rank 0, tag 3");
    EXPECT_TRUE(self.Finish(receive).ok());
    EXPECT_TRUE(self.Finish(send).ok());
  });
}

TEST(P2pTest, ASessionMayEndWithoutThem) {
  RunRanks(2, [](P2pRank& self, int rank) {
    const core::WorkPtr receive = self.Receive(1 - rank, 0, {1});
    const core::WorkPtr send = self.Send(1 - rank, 1, {1}, 4);
    self.lanes.reset();
    EXPECT_EQ(receive->handle->status().code(), StatusCode::kShutDown);
    EXPECT_EQ(send->handle->status().code(), StatusCode::kShutDown);
  });
}

TEST(P2pTest, AbandonCompletesThem) {
  RunRanks(1, [](P2pRank& self, int) {
    const Status why(StatusCode::kPeerLost, "rank 3 is lost");
    const core::WorkPtr receive = self.Receive(0, 0, {1});
    self.lanes->Abandon(why);
    EXPECT_EQ(receive->handle->status(), why);
    // What a record of the failure has to tell.
    ASSERT_EQ(self.lanes->Running().size(), 1u);
    EXPECT_EQ(self.lanes->Running()[0].what, "receive from rank 0, tag 0");
    EXPECT_FALSE(self.lanes->NeedsStepping());
    EXPECT_EQ(self.Send(0, 0, {1}, 2)->handle->status(), why);
  });
}

TEST(P2pTest, APeerThatBreaksTheProtocolIsAFailure) {
  InprocWorld world(2);
  P2pRank self(0, world.Connect(0));
  const std::unique_ptr<Backend> peer = world.Connect(1);
  const P2pHeaderBytes nonsense{};
  const auto sent = peer->SendMessage(0, 6, nonsense.data(), kMessageHeaderBytes);
  const core::WorkPtr receive = self.Receive(1, 6, {1});
  const core::WorkPtr other = self.Receive(1, 7, {1});
  const Status status = self.Finish(receive);
  EXPECT_EQ(status.code(), StatusCode::kProtocol);
  EXPECT_EQ(status.message(),
            "receive from rank 1, tag 6: the header of a message is wrong: it says that this is "
            "not a message");
  EXPECT_EQ(other->handle->status(), status);
  EXPECT_EQ(self.failures, std::vector<Status>{status});
}

TEST(P2pTest, AFailureOfTheMediumEndsEverything) {
  for (const int operation : {0, 1}) {
    auto backend = std::make_unique<tests::FakeBackend>();
    backend->FailFrom(operation, {StatusCode::kBackend, "the wire broke"});
    P2pRank self(0, std::move(backend));
    const core::WorkPtr send = self.Send(1, 2, {1}, 3);
    EXPECT_EQ(self.Finish(send).message(), "send to rank 1, tag 2: the wire broke");
    EXPECT_EQ(send->handle->status().origin().rank, 0);
    EXPECT_EQ(self.failures.size(), 1u);
  }
}

}  // namespace
}  // namespace sirtaki::ops
