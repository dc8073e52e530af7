#include "tcp/port.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/wire/verifying_port.h"
#include "ops/wire/wire_backend.h"
#include "tests/support/backend_conformance.h"
#include "tests/support/rank_threads.h"
#include "tests/support/test_scale.h"
#include "tests/tcp/lines.h"

namespace sirtaki::tcp {
namespace {

using core::Clock;
using core::Status;
using core::StatusCode;
using ops::Completion;
using ops::wire::Envelope;
using ops::wire::Receive;
using ops::wire::Send;
using std::chrono::seconds;
using tests::RankThreads;

constexpr Envelope kMessage{Envelope::Space::kMessages, 7};
constexpr std::int64_t kShort = 1000;
constexpr std::int64_t kLong = 200'000;

std::vector<std::unique_ptr<Port>> PortsOf(int size) {
  auto urgent = tests::LinesOfAll(size);
  auto bulk = tests::LinesOfAll(size);
  std::vector<std::unique_ptr<Port>> ports;
  for (int rank = 0; rank < size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    ports.push_back(std::make_unique<Port>(rank, std::move(urgent[index]), std::move(bulk[index]),
                                           tests::HostsOf(size), Patience()));
  }
  return ports;
}

class TcpPortConformanceTest : public ::testing::TestWithParam<int> {};

TEST_P(TcpPortConformanceTest, Conforms) {
  const int size = GetParam();
  auto ports = PortsOf(size);
  RankThreads::Run(size, [&](int rank) {
    ops::wire::WireBackend backend(*ports[static_cast<std::size_t>(rank)], {});
    tests::BackendConformance conformance(backend, rank, size);
    for (const tests::BackendCheck& check : tests::kBackendChecks) {
      SCOPED_TRACE(check.name);
      RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TcpPortConformanceTest,
                         ::testing::ValuesIn(tests::SampleOf<int>(::testing::Values(1, 2, 3, 4))));

// Two ports, and what moves between them.
class TcpPortTest : public ::testing::Test {
 protected:
  std::unique_ptr<Completion> Send0(const std::vector<char>& bytes, Envelope envelope = kMessage) {
    const Send send{1, bytes.data(), static_cast<std::int64_t>(bytes.size())};
    return ports_[0]->Post(envelope, {}, {&send, 1});
  }
  std::unique_ptr<Completion> Receive1(std::vector<char>* bytes, Envelope envelope = kMessage) {
    const Receive receive{0, bytes->data(), static_cast<std::int64_t>(bytes->size())};
    return ports_[1]->Post(envelope, {&receive, 1}, {});
  }
  static std::vector<char> Filled(std::int64_t bytes, char with) {
    return std::vector<char>(static_cast<std::size_t>(bytes), with);
  }
  // Polls all of them until all are done, or 30 s.
  static void Finish(const std::vector<Completion*>& all) {
    const auto deadline = Clock::now() + seconds(30);
    for (bool done = false; !done;) {
      ASSERT_LT(Clock::now(), deadline) << "a transfer does not end";
      done = true;
      for (Completion* const one : all) done = one->Poll() && done;
    }
  }

  std::vector<std::unique_ptr<Port>> ports_ = PortsOf(2);
};

TEST_F(TcpPortTest, TransfersOfAnEnvelopeMatchInTheirOrderWhateverTheirLengths) {
  const std::int64_t lengths[] = {kShort,   kLong,          0,     kLong, kShort,
                                  32 << 10, (32 << 10) + 1, kShort};
  for (const bool receives_first : {false, true}) {
    std::vector<std::vector<char>> given;
    std::vector<std::vector<char>> taken;
    std::vector<std::unique_ptr<Completion>> sends;
    std::vector<std::unique_ptr<Completion>> receives;
    char letter = 'a';
    for (const std::int64_t length : lengths) {
      given.push_back(Filled(length, letter++));
      taken.push_back(Filled(length, '?'));
    }
    const auto receive_all = [&] {
      for (auto& bytes : taken) receives.push_back(Receive1(&bytes));
    };
    if (receives_first) receive_all();
    for (const auto& bytes : given) sends.push_back(Send0(bytes));
    if (!receives_first) {
      // What is short is there before it is expected.
      for (int i = 0; i < 100; ++i) {
        for (const auto& one : sends) one->Poll();
      }
      receive_all();
    }
    std::vector<Completion*> all;
    for (const auto& one : receives) all.push_back(one.get());
    for (const auto& one : sends) all.push_back(one.get());
    ASSERT_NO_FATAL_FAILURE(Finish(all));
    for (Completion* const one : all) EXPECT_TRUE(one->status().ok()) << one->status().ToString();
    EXPECT_EQ(given, taken);
  }
}

TEST_F(TcpPortTest, EnvelopesDoNotWaitForEachOther) {
  const auto large = Filled(kLong, 'l');
  const auto small = Filled(kShort, 's');
  std::vector<char> taken(kShort);
  const auto nobody_takes_it = Send0(large);
  const auto sent = Send0(small, {Envelope::Space::kMessages, 8});
  const auto received = Receive1(&taken, {Envelope::Space::kMessages, 8});
  ASSERT_NO_FATAL_FAILURE(Finish({sent.get(), received.get()}));
  EXPECT_EQ(taken, small);
  EXPECT_FALSE(nobody_takes_it->Poll());
  std::vector<char> late(kLong);
  const auto taken_late = Receive1(&late);
  ASSERT_NO_FATAL_FAILURE(Finish({nobody_takes_it.get(), taken_late.get()}));
  EXPECT_EQ(late, large);
}

TEST_F(TcpPortTest, AnotherLengthIsAnErrorOfTheReceiveAlone) {
  for (const bool receives_first : {false, true}) {
    for (const auto& [sent, expected] : {std::pair{kShort, kShort + 1}, std::pair{kShort, kLong},
                                         std::pair{kLong, kShort}, std::pair{kLong, kLong + 1}}) {
      SCOPED_TRACE(std::to_string(sent) + " and " + std::to_string(expected));
      const auto given = Filled(sent, 'g');
      auto taken = Filled(expected, '?');
      std::unique_ptr<Completion> send;
      std::unique_ptr<Completion> receive;
      if (receives_first) receive = Receive1(&taken);
      send = Send0(given);
      for (int i = 0; i < 10; ++i) send->Poll();
      if (!receives_first) receive = Receive1(&taken);
      // What comes after it is not touched by it.
      const auto next_given = Filled(kLong, 'n');
      std::vector<char> next_taken(kLong);
      const auto next_send = Send0(next_given);
      const auto next_receive = Receive1(&next_taken);
      ASSERT_NO_FATAL_FAILURE(
          Finish({send.get(), receive.get(), next_send.get(), next_receive.get()}));
      EXPECT_EQ(receive->status().code(), StatusCode::kBackend);
      EXPECT_EQ(receive->status().message(), "rank 0 sent " + std::to_string(sent) +
                                                 " bytes with tag 7 where rank 1 takes " +
                                                 std::to_string(expected));
      EXPECT_EQ(taken, Filled(expected, '?'));
      EXPECT_TRUE(send->status().ok());
      EXPECT_TRUE(next_receive->status().ok()) << next_receive->status().ToString();
      EXPECT_EQ(next_taken, next_given);
    }
  }
}

TEST_F(TcpPortTest, WhatAWithdrawnReceiveWasToGetGoesToTheNext) {
  for (const std::int64_t bytes : {kShort, kLong}) {
    SCOPED_TRACE(bytes);
    std::vector<char> gone(static_cast<std::size_t>(bytes));
    std::vector<char> first(static_cast<std::size_t>(bytes));
    std::vector<char> second(static_cast<std::size_t>(bytes));
    auto withdrawn = Receive1(&gone);
    const auto first_receive = Receive1(&first);
    withdrawn->Poll();
    withdrawn.reset();
    const auto given = Filled(bytes, '1');
    const auto given_next = Filled(bytes, '2');
    const auto send = Send0(given);
    const auto send_next = Send0(given_next);
    ASSERT_NO_FATAL_FAILURE(Finish({send.get(), first_receive.get()}));
    const auto second_receive = Receive1(&second);
    ASSERT_NO_FATAL_FAILURE(Finish({send_next.get(), second_receive.get()}));
    EXPECT_EQ(first, given);
    EXPECT_EQ(second, given_next);
  }
}

TEST_F(TcpPortTest, WhatARankSendsToItselfComes) {
  ops::wire::VerifyingPort verifying(*ports_[0]);
  for (ops::wire::Port* const port : {static_cast<ops::wire::Port*>(ports_[0].get()),
                                      static_cast<ops::wire::Port*>(&verifying)}) {
    const auto given = Filled(kLong, 'o');
    std::vector<char> taken(kLong);
    const Send send{0, given.data(), kLong};
    const Receive receive{0, taken.data(), kLong};
    const auto sent = port->Post(kMessage, {}, {&send, 1});
    const auto received = port->Post(kMessage, {&receive, 1}, {});
    ASSERT_NO_FATAL_FAILURE(Finish({sent.get(), received.get()}));
    EXPECT_EQ(taken, given);
  }
}

TEST_F(TcpPortTest, ALostRankEndsWhatWaitsForIt) {
  std::vector<char> taken(kLong);
  const auto given = Filled(kLong, 'g');
  const auto receive = Receive1(&taken);
  const Send back{0, given.data(), kLong};
  const auto send = ports_[1]->Post(kMessage, {}, {&back, 1});
  EXPECT_FALSE(receive->Poll());
  ports_[0].reset();
  ASSERT_NO_FATAL_FAILURE(Finish({receive.get(), send.get()}));
  for (Completion* const one : {receive.get(), send.get()}) {
    EXPECT_EQ(one->status().code(), StatusCode::kPeerLost);
    EXPECT_NE(one->status().message().find("rank 0 is lost: its connection from host host0 "),
              std::string::npos)
        << one->status().ToString();
  }
}

TEST_F(TcpPortTest, NothingStartsAfterAbort) {
  ports_[0]->Abort({StatusCode::kPeerLost, "rank 1 is gone"});
  ports_[0]->Abort({StatusCode::kAborted, "later"});
  const auto given = Filled(kShort, 'g');
  const auto refused = Send0(given);
  ASSERT_TRUE(refused->Poll());
  EXPECT_EQ(refused->status().message(), "rank 1 is gone");
}

TEST(TcpStreamTest, BytesThatNoRankSendsEndTheStream) {
  auto lines = tests::LinesOfAll(2);
  Stream stream(std::move(lines[0][1]), 0, 1, tests::HostsOf(2), Patience());
  std::vector<std::byte> memory(8);
  Transfer transfer;
  transfer.taken = memory.data();
  transfer.bytes = 8;
  stream.Start(kMessage, &transfer);
  const std::string nonsense(100, 'x');
  ASSERT_EQ(send(lines[1][0].get(), nonsense.data(), nonsense.size(), 0), 100);
  stream.Progress();
  ASSERT_TRUE(transfer.done);
  EXPECT_EQ(transfer.status.code(), StatusCode::kProtocol);
  EXPECT_EQ(transfer.status.message(), "rank 1 on host host1 sends what no rank sends");
}

TEST(TcpStreamTest, WhatWasSentBeforeTheEndArrivesAlsoWhereWritingFailsFirst) {
  auto lines = tests::LinesOfAll(2);
  Stream stream(std::move(lines[0][1]), 0, 1, tests::HostsOf(2), Patience());
  const std::vector<std::byte> given(8, std::byte{7});
  std::vector<std::byte> memory(8);
  Transfer sent;
  sent.sends = true;
  sent.given = given.data();
  sent.bytes = 8;
  {
    Stream other(std::move(lines[1][0]), 1, 0, tests::HostsOf(2), Patience());
    other.Start(kMessage, &sent);
    ASSERT_TRUE(sent.done);
  }
  Transfer taken;
  taken.taken = memory.data();
  taken.bytes = 8;
  stream.Start(kMessage, &taken);
  Transfer in_vain;
  in_vain.sends = true;
  in_vain.given = given.data();
  in_vain.bytes = 8;
  stream.Start(kMessage, &in_vain);
  const auto deadline = Clock::now() + seconds(30);
  while (!(taken.done && in_vain.done) && Clock::now() < deadline) stream.Progress();
  ASSERT_TRUE(taken.done && in_vain.done);
  EXPECT_TRUE(taken.status.ok()) << taken.status.ToString();
  EXPECT_EQ(memory, given);
  EXPECT_EQ(in_vain.status.message(), "rank 1 is lost: its connection from host host1 was closed");
}

// Several threads of each rank share the streams; each message holds what its envelope and place say.
TEST(TcpPortRandomTest, ManyTransfersOfManyThreads) {
  constexpr int kSize = 3;
  constexpr int kThreads = 3;
  constexpr int kCount = 200;
  auto ports = PortsOf(kSize);
  RankThreads::Run(kSize * kThreads, [&](int thread) {
    const int rank = thread / kThreads;
    const int tag = thread % kThreads;
    Port& port = *ports[static_cast<std::size_t>(rank)];
    const Envelope envelope{Envelope::Space::kCollectives, tag, /*urgent=*/tag == 0};
    std::mt19937 same(static_cast<unsigned>(tag));  // on all ranks
    std::mt19937 own(static_cast<unsigned>(thread) + 100);
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t bytes = same() % 4 == 0 ? same() % 300'000 : same() % 3000;
      const auto letter = [&](int from) { return static_cast<char>('a' + (from * 7 + i) % 26); };
      std::vector<std::vector<char>> given;
      std::vector<std::vector<char>> taken;
      std::vector<Send> sends;
      std::vector<Receive> receives;
      given.reserve(kSize);
      taken.reserve(kSize);
      for (int other = 0; other < kSize; ++other) {
        if (other == rank) continue;
        given.emplace_back(static_cast<std::size_t>(bytes), letter(rank));
        taken.emplace_back(static_cast<std::size_t>(bytes), '?');
        sends.push_back({other, given.back().data(), bytes});
        receives.push_back({other, taken.back().data(), bytes});
      }
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
      const auto all = port.Post(envelope, receives, sends);
      while (!all->Poll()) std::this_thread::yield();
      ASSERT_TRUE(all->status().ok()) << all->status().ToString();
      std::size_t index = 0;
      for (int other = 0; other < kSize; ++other) {
        if (other == rank) continue;
        ASSERT_EQ(taken[index++],
                  std::vector<char>(static_cast<std::size_t>(bytes), letter(other)));
      }
    }
  });
}

}  // namespace
}  // namespace sirtaki::tcp
