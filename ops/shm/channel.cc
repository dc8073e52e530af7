#include "ops/shm/channel.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/base/digest.h"

namespace sirtaki::ops::shm {

using core::Status;

namespace {

constexpr std::int64_t kSmallestFrame = 8192;
constexpr std::int64_t kDigestBytes = sizeof(std::uint64_t);

constexpr auto kAwake = std::chrono::microseconds(50);
// A yield that took this long went to somebody who computes: for a while it is sooner to be woken.
constexpr auto kLongYield = std::chrono::microseconds(500);
constexpr int kSleepsAtOnce = 100;
// A sleeper looks this often whether it is to stop.
constexpr auto kNap = std::chrono::milliseconds(20);
// The engine looks at the peers' processes, too, hears what others say of them, and stops the backend.
// Where it has not for this long, the thread that makes its rounds may hang.
constexpr auto kEngineIsFirst = std::chrono::milliseconds(500);

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

SharedChannel::SharedChannel(LocalGroup& group, const Blocks& blocks, std::vector<int> members,
                             const ChannelOptions& options, std::shared_ptr<const StopSign> stop)
    : group_(group),
      blocks_(blocks),
      options_(options),
      stop_(std::move(stop)),
      ring_bytes_(RingBytesOf(options.set)[static_cast<std::size_t>(options.lane)]),
      frame_bytes_(
          std::clamp(options.chunk_bytes / kUnit * kUnit, kSmallestFrame, ring_bytes_ / 4) -
          (options.verify ? kUnit : 0)) {
  peers_.reserve(members.size());
  for (const int index : members) {
    if (index == group.self()) self_ = static_cast<int>(peers_.size());
    peers_.push_back({.index = index});
  }
}

int SharedChannel::FindBlocks() {
  if (found_) return -1;
  for (Peer& peer : peers_) {
    if (peer.progress != nullptr) continue;
    SetBlock* const block = blocks_.Find(peer.index, options_.set);
    if (block == nullptr) return peer.index;
    const auto lane = static_cast<std::size_t>(options_.lane);
    peer.progress = &block->progress[lane];
    peer.ring = group_.SessionMemory(peer.index) + block->rings[lane];
  }
  found_ = true;
  return -1;
}

Frame SharedChannel::Reserve(std::int64_t bytes) {
  const std::int64_t data = std::max<std::int64_t>(bytes, 1);
  bytes = core::RoundUp(data + (options_.verify ? kDigestBytes : 0), kUnit);
  std::int64_t offset = reserved_ % ring_bytes_;
  if (offset + bytes > ring_bytes_) {  // a frame lies in one piece
    reserved_ += ring_bytes_ - offset;
    offset = 0;
  }
  reserved_ += bytes;
  return {offset, reserved_, data};
}

void SharedChannel::Ring(int member) const {
  if (member != self_) group_.Bell(peers_[static_cast<std::size_t>(member)].index).Add(1);
}

void SharedChannel::Publish(const Frame& frame) {
  if (options_.verify) {
    const std::uint64_t digest = core::Digest(Mine(frame), static_cast<std::size_t>(frame.bytes));
    std::memcpy(Mine(frame) + frame.bytes, &digest, sizeof(digest));
  }
  peers_[static_cast<std::size_t>(self_)].progress->written.Store(Count(frame.end));
  if (!polled()) return;
  for (int member = 0; member < size(); ++member) Ring(member);
}

Status SharedChannel::Verify(const Frame& frame, std::int64_t first) const {
  for (int m = 0; options_.verify && m < size(); ++m) {
    std::uint64_t told = 0;
    std::memcpy(&told, Of(m, frame) + frame.bytes, sizeof(told));
    if (core::Digest(Of(m, frame), static_cast<std::size_t>(frame.bytes)) == told) continue;
    const auto rank_of = [this](int member) {
      return std::to_string(group_.RankOf(peers_[static_cast<std::size_t>(member)].index));
    };
    return {core::StatusCode::kBackend,
            "verify_transfers: bytes " + std::to_string(first) + "-" +
                std::to_string(first + frame.bytes - 1) + " of what rank " + rank_of(m) +
                " wrote to shared memory are not what rank " + rank_of(self_) + " reads there"};
  }
  return Status::Ok();
}

void SharedChannel::Release(const Frame& frame) {
  const std::int64_t before = released_;
  released_ = frame.end;
  peers_[static_cast<std::size_t>(self_)].progress->read.Store(Count(frame.end));
  if (!polled()) return;
  // A writer that waits for room has written half a ring more than was read: a frame and what is
  // left of the ring before it are at most a quarter each.
  const std::uint32_t crowded = Count(before + ring_bytes_ / 2);
  for (int member = 0; member < size(); ++member) {
    const Peer& peer = peers_[static_cast<std::size_t>(member)];
    if (Reached(peer.progress->written.Load(), crowded)) Ring(member);
  }
}

SharedCounter* SharedChannel::Behind(const Wait& wait, std::uint32_t* seen) const {
  for (const Peer& peer : peers_) {
    SharedCounter& counter =
        wait.what == Wait::For::kRoom ? peer.progress->read : peer.progress->written;
    *seen = counter.Load();
    if (!Reached(*seen, wait.target)) return &counter;
  }
  return nullptr;
}

bool SharedChannel::IsOver(const Wait& wait) {
  std::uint32_t seen = 0;
  switch (wait.what) {
    case Wait::For::kTurn:
      return writing_ == wait.ticket && FindBlocks() < 0;
    case Wait::For::kRoom:
      return Behind(wait, &seen) == nullptr;
    case Wait::For::kArrival:
      return finishing_ == wait.ticket && Behind(wait, &seen) == nullptr;
  }
  return false;
}

bool SharedChannel::IsVoid() const {
  return direct() && std::any_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
           return peer.index != group_.self() && group_.HasGivenUp(peer.index);
         });
}

core::PeerWatch SharedChannel::WatchPeers(core::TimePoint begin) const {
  core::PeerWatch peers([this] { return group_.CheckPeers(); }, kEngineIsFirst);
  peers.Skip(begin);
  return peers;
}

Status SharedChannel::AwaitFault() {
  core::PeerWatch peers = WatchPeers(core::Clock::now());
  while (!stop_->raised()) {
    const core::TimePoint now = core::Clock::now();
    if (Status lost = peers.Look(now); !lost.ok()) return lost;
    // The message with the fault rings.
    SharedCounter& bell = group_.Bell(group_.self());
    bell.Sleep(bell.Load(), now + kNap);
  }
  return stop_->why();
}

Status SharedChannel::Block(const Wait& wait, bool spin) {
  const core::TimePoint start = core::Clock::now();
  core::PeerWatch peers = WatchPeers(start);
  while (true) {
    if (stop_->raised()) return stop_->why();
    SharedCounter* counter = nullptr;
    std::uint32_t seen = 0;
    if (wait.what == Wait::For::kTurn) {
      // Nothing else is under way in a channel that blocks: a member has not come yet.
      const int missing = FindBlocks();
      if (missing < 0) return Status::Ok();
      counter = &blocks_.Changes(missing);
      seen = counter->Load();
      if (FindBlocks() < 0) return Status::Ok();
    } else {
      counter = Behind(wait, &seen);
      if (counter == nullptr) return Status::Ok();
    }
    if (spin) {
      constexpr int kLooks = 64;
      for (int i = 0; i < kLooks && counter->Load() == seen; ++i) Pause();
    } else if (sleeps_at_once_ == 0) {
      sched_yield();
    }
    if (counter->Load() != seen) continue;
    const core::TimePoint now = core::Clock::now();
    if (now < start + kAwake && sleeps_at_once_ == 0) continue;
    if (sleeps_at_once_ > 0) {
      --sleeps_at_once_;
    } else if (!spin && now > start + kLongYield) {
      sleeps_at_once_ = kSleepsAtOnce;
    }
    if (Status lost = peers.Look(now); !lost.ok()) return lost;
    counter->Sleep(seen, now + kNap);
  }
}

}  // namespace sirtaki::ops::shm
