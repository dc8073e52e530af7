// One body for every implementation of core::Transport.
//
// Each rank (a thread over the in-process hub, a process over MPI) makes one TransportConformance
// for its transport and all ranks call the same checks in the same order:
//
//   TransportConformance conformance(*transport, rank, size);
//   for (const TransportCheck& check : kTransportChecks) {
//     SCOPED_TRACE(check.name);
//     (conformance.*check.run)();
//   }
//
// The checks talk through the transport alone, work for any size >= 1, and fail by GoogleTest's
// expectations. Nothing waits longer than `patience`.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "core/protocol/transport.h"

namespace sirtaki::tests {

class TransportConformance {
 public:
  TransportConformance(core::Transport& transport, int rank, int size,
                       core::Duration patience = std::chrono::seconds(30))
      : transport_(transport), rank_(rank), size_(size), patience_(patience) {}

  // Messages of one pair arrive in the order in which they were sent, from the rank that sent them.
  void KeepsOrderPerPair() {
    constexpr int kCount = 200;
    for (int i = 0; i < kCount; ++i) {
      for (int to = 0; to < size_; ++to) {
        if (to != rank_) transport_.Send(to, Pattern(rank_, i, sizeof(int) + i % 7));
      }
    }
    for (int from = 0; from < size_; ++from) {
      if (from == rank_) continue;
      for (int i = 0; i < kCount; ++i) {
        if (!ExpectPattern(from, i, sizeof(int) + i % 7)) return;
      }
    }
    Barrier();
  }

  // Empty, small and large messages arrive whole, though every rank sends all of its own before it
  // receives any: Send does not block.
  void CarriesEverySize() {
    constexpr std::size_t kSizes[] = {0, 1, 63, 4096, 65537, 3 << 20, 5, 0, 1 << 20};
    int number = 0;
    for (const std::size_t bytes : kSizes) {
      for (int to = 0; to < size_; ++to) {
        if (to != rank_) transport_.Send(to, Pattern(rank_, number, bytes));
      }
      ++number;
    }
    for (int from = 0; from < size_; ++from) {
      if (from == rank_) continue;
      number = 0;
      for (const std::size_t bytes : kSizes) {
        if (!ExpectPattern(from, number++, bytes)) return;
      }
    }
    Barrier();
  }

  // Nobody receives until everything was sent, in many messages: what does not fit waits in the
  // outbox.
  void SendNeverBlocks() {
    constexpr int kCount = 2000;
    constexpr std::size_t kBytes = 8192;
    if (size_ > 1) {
      const int to = (rank_ + 1) % size_;
      const int from = (rank_ + size_ - 1) % size_;
      for (int i = 0; i < kCount; ++i) transport_.Send(to, Pattern(rank_, i, kBytes));
      for (int i = 0; i < kCount; ++i) {
        if (!ExpectPattern(from, i, kBytes)) return;
      }
    }
    Barrier();
  }

  // Flush says true in the end, while the peers receive.
  void FlushEmptiesTheOutbox() {
    for (int to = 0; to < size_; ++to) {
      if (to != rank_) transport_.Send(to, Pattern(rank_, 1, 1 << 20));
    }
    const core::TimePoint limit = core::Clock::now() + patience_;
    while (!transport_.Flush()) {
      Collect();
      if (core::Clock::now() > limit) {
        ADD_FAILURE() << "the outbox of rank " << rank_ << " did not empty";
        return;
      }
      std::this_thread::yield();
    }
    for (int from = 0; from < size_; ++from) {
      if (from != rank_ && !ExpectPattern(from, 1, 1 << 20)) return;
    }
    Barrier();
  }

  // A Wake after the ticket was taken is not lost, whether the sleeper sleeps already or not yet.
  void WakeEndsTheSleep() {
    Barrier();
    const std::uint64_t early = transport_.ArmDoorbell();
    transport_.Wake();
    EXPECT_TRUE(transport_.WaitUntil(early, core::Clock::now() + patience_));

    const std::uint64_t ticket = transport_.ArmDoorbell();
    std::thread waker([this] { transport_.Wake(); });
    EXPECT_TRUE(transport_.WaitUntil(ticket, core::Clock::now() + patience_));
    waker.join();
    Barrier();
  }

  // One ring wakes every sleeper.
  void WakeReachesAllSleepers() {
    Barrier();
    const std::uint64_t ticket = transport_.ArmDoorbell();
    const core::TimePoint deadline = core::Clock::now() + patience_;
    bool second_rang = false;
    std::thread second([&] { second_rang = transport_.WaitUntil(ticket, deadline); });
    std::thread waker([this] { transport_.Wake(); });
    EXPECT_TRUE(transport_.WaitUntil(ticket, deadline));
    second.join();
    waker.join();
    EXPECT_TRUE(second_rang);
    Barrier();
  }

  // Without a ring the sleep ends at its deadline and says false.
  void SleepEndsAtItsDeadline() {
    Barrier();
    // Arrivals may ring until all ranks are quiet; each late ring can spoil one attempt only.
    for (int attempt = 0; attempt < 1000; ++attempt) {
      Collect();
      const std::uint64_t ticket = transport_.ArmDoorbell();
      const core::TimePoint deadline = core::Clock::now() + std::chrono::milliseconds(1);
      if (!transport_.WaitUntil(ticket, deadline)) {
        EXPECT_GE(core::Clock::now(), deadline);
        break;
      }
      ASSERT_LT(attempt, 999) << "every sleep was ended by a ring";
    }
    const std::uint64_t ticket = transport_.ArmDoorbell();
    (void)transport_.WaitUntil(ticket, core::Clock::now() - std::chrono::seconds(1));  // returns
    Barrier();
  }

  // If arrivals ring, one that comes after the ticket was taken ends the sleep.
  void ArrivalRings() {
    Barrier();
    if (transport_.ArrivalsRing() && size_ > 1) {
      const int peer = rank_ ^ 1;
      if (peer < size_) {
        // The ticket is taken before the peer is asked to send.
        const std::uint64_t ticket = transport_.ArmDoorbell();
        transport_.Send(peer, Pattern(rank_, 7, 32));
        transport_.Flush();
        EXPECT_TRUE(transport_.WaitUntil(ticket, core::Clock::now() + patience_));
        if (!ExpectPattern(peer, 7, 32)) return;
      }
    }
    Barrier();
  }

  void IsHealthyAndQuietAtTheEnd() {
    Barrier();
    Barrier();  // whatever the first left behind has been received by now
    EXPECT_TRUE(transport_.health().ok()) << transport_.health().ToString();
    for (const auto& [from, messages] : stash_) {
      EXPECT_TRUE(messages.empty()) << "messages of rank " << from << " that nobody asked for";
    }
    const core::TimePoint limit = core::Clock::now() + patience_;
    while (!transport_.Flush() && core::Clock::now() < limit) std::this_thread::yield();
    EXPECT_TRUE(transport_.Flush());
  }

 private:
  // Different for each sender, message and place.
  static core::Bytes Pattern(int from, int number, std::size_t bytes) {
    std::uint32_t x = static_cast<std::uint32_t>(from) * 7919u + static_cast<std::uint32_t>(number);
    std::array<std::byte, 256> block;
    for (std::byte& byte : block) {
      x = x * 1664525u + 1013904223u;
      byte = static_cast<std::byte>(x >> 24);
    }
    core::Bytes result(bytes);
    for (std::size_t at = 0; at < bytes; at += block.size()) {
      for (std::size_t i = 0; i < 4; ++i) block[i] = static_cast<std::byte>(at >> (8 + 8 * i));
      std::memcpy(result.data() + at, block.data(), std::min(block.size(), bytes - at));
    }
    return result;
  }

  // Moves what has arrived to the stash of its sender.
  bool Collect() {
    bool any = false;
    while (std::optional<core::Incoming> message = transport_.TryReceive()) {
      EXPECT_GE(message->from, 0);
      EXPECT_LT(message->from, size_);
      stash_[message->from].push_back(std::move(message->bytes));
      any = true;
    }
    return any;
  }

  std::optional<core::Bytes> ReceiveFrom(int from) {
    const core::TimePoint limit = core::Clock::now() + patience_;
    while (true) {
      const std::uint64_t ticket = transport_.ArmDoorbell();
      Collect();
      transport_.Flush();
      std::deque<core::Bytes>& messages = stash_[from];
      if (!messages.empty()) {
        core::Bytes bytes = std::move(messages.front());
        messages.pop_front();
        return bytes;
      }
      const core::TimePoint now = core::Clock::now();
      if (now > limit) return std::nullopt;
      // A ringing transport is trusted to ring for arrivals; room in a full outbox need not ring.
      const core::Duration nap = transport_.ArrivalsRing() && transport_.Flush()
                                     ? patience_
                                     : std::chrono::microseconds(50);
      transport_.WaitUntil(ticket, std::min(limit, now + nap));
    }
  }

  bool ExpectPattern(int from, int number, std::size_t bytes) {
    const std::optional<core::Bytes> got = ReceiveFrom(from);
    if (!got) {
      ADD_FAILURE() << "rank " << rank_ << ": message " << number << " of rank " << from
                    << " did not arrive; health: " << transport_.health().ToString();
      return false;
    }
    EXPECT_EQ(got->size(), bytes) << "message " << number << " of rank " << from;
    const bool equal = *got == Pattern(from, number, bytes);
    EXPECT_TRUE(equal) << "bytes of message " << number << " of rank " << from;
    return got->size() == bytes && equal;
  }

  // Everything sent before it by anyone has arrived when it returns. Messages that a faster rank
  // sends after it are kept in the stash.
  void Barrier() {
    ++barriers_;
    for (int to = 0; to < size_; ++to) {
      if (to != rank_) transport_.Send(to, Pattern(to, barriers_, 9));
    }
    for (int from = 0; from < size_; ++from) {
      if (from == rank_) continue;
      const std::optional<core::Bytes> got = ReceiveFrom(from);
      EXPECT_TRUE(got.has_value()) << "rank " << rank_ << ": no barrier from rank " << from;
      if (!got) return;
      EXPECT_TRUE(*got == Pattern(rank_, barriers_, 9))
          << "rank " << rank_ << ": barrier of " << from;
    }
  }

  core::Transport& transport_;
  const int rank_;
  const int size_;
  const core::Duration patience_;
  int barriers_ = 0;
  std::map<int, std::deque<core::Bytes>> stash_;  // by sender
};

struct TransportCheck {
  const char* name;
  void (TransportConformance::*run)();
};

inline constexpr TransportCheck kTransportChecks[] = {
    {"KeepsOrderPerPair", &TransportConformance::KeepsOrderPerPair},
    {"CarriesEverySize", &TransportConformance::CarriesEverySize},
    {"SendNeverBlocks", &TransportConformance::SendNeverBlocks},
    {"FlushEmptiesTheOutbox", &TransportConformance::FlushEmptiesTheOutbox},
    {"WakeEndsTheSleep", &TransportConformance::WakeEndsTheSleep},
    {"WakeReachesAllSleepers", &TransportConformance::WakeReachesAllSleepers},
    {"SleepEndsAtItsDeadline", &TransportConformance::SleepEndsAtItsDeadline},
    {"ArrivalRings", &TransportConformance::ArrivalRings},
    {"IsHealthyAndQuietAtTheEnd", &TransportConformance::IsHealthyAndQuietAtTheEnd},
};

}  // namespace sirtaki::tests
