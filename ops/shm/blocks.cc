#include "ops/shm/blocks.h"

#include <algorithm>

namespace sirtaki::ops::shm {

using core::Status;
using core::StatusCode;

namespace {

constexpr std::int64_t kKiB = 1024;
constexpr int kPlaceBits = 32;
constexpr std::int64_t kPlaceUnit = 64;

std::uint64_t KeyOf(core::SetNumber set) { return std::uint64_t{set} + 1; }

}  // namespace

std::array<std::int64_t, kLanes> RingBytesOf(core::SetNumber set) {
  // There is one world, but there may be many sets at a time.
  if (set == core::kWorldSet) return {512 * kKiB, 4096 * kKiB};
  return {256 * kKiB, 1024 * kKiB};
}

Status Blocks::Make(core::SetNumber set) {
  core::MutexLock lock(mutex_);
  Directory& directory = DirectoryOf(group_.self());
  const auto entry = std::find_if(directory.entries.begin(), directory.entries.end(),
                                  [](const auto& e) { return e.load() == 0; });
  const std::int64_t place = core::RoundUp(next_block_, kPlaceUnit);
  const auto end = place + static_cast<std::int64_t>(sizeof(SetBlock));
  auto* const block = reinterpret_cast<SetBlock*>(group_.SessionMemory(group_.self()) + place);
  bool room = entry != directory.entries.end() && end <= kRingsBegin;
  const std::array<std::int64_t, kLanes> bytes = RingBytesOf(set);
  std::array<std::int64_t, kLanes> rings{};
  for (std::size_t lane = 0; room && lane < kLanes; ++lane) {
    rings[lane] = TakeRing(bytes[lane]);
    room = rings[lane] >= 0;
  }
  if (!room) {
    return {
        StatusCode::kBackend,
        "shared memory has no room for another process set: remove those that are not needed, and "
        "keep the others instead of making them again; of about 100 000 in all a session keeps a "
        "little"};
  }
  next_block_ = end;
  block->rings = rings;
  entry->store(KeyOf(set) << kPlaceBits | static_cast<std::uint64_t>(place / kPlaceUnit),
               std::memory_order_release);
  directory.changes.Add(1);
  return Status::Ok();
}

void Blocks::Remove(core::SetNumber set) {
  core::MutexLock lock(mutex_);
  const SetBlock* const block = Find(group_.self(), set);
  if (block == nullptr) return;
  const std::array<std::int64_t, kLanes> bytes = RingBytesOf(set);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    free_.push_back({block->rings[lane], bytes[lane]});
  }
  for (auto& entry : DirectoryOf(group_.self()).entries) {
    if (entry.load() >> kPlaceBits == KeyOf(set)) entry.store(0);
  }
}

SetBlock* Blocks::Find(int index, core::SetNumber set) const {
  for (const auto& entry : DirectoryOf(index).entries) {
    const std::uint64_t value = entry.load(std::memory_order_acquire);
    if (value >> kPlaceBits != KeyOf(set)) continue;
    const auto place = static_cast<std::int64_t>(value & 0xffffffffU) * kPlaceUnit;
    return reinterpret_cast<SetBlock*>(group_.SessionMemory(index) + place);
  }
  return nullptr;
}

std::int64_t Blocks::TakeRing(std::int64_t bytes) {
  for (std::size_t i = 0; i < free_.size(); ++i) {
    if (free_[i].bytes != bytes) continue;
    const std::int64_t begin = free_[i].begin;
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
    return begin;
  }
  if (bytes > LocalGroup::kEnd - next_ring_) return -1;
  const std::int64_t begin = next_ring_;
  next_ring_ += bytes;
  return begin;
}

}  // namespace sirtaki::ops::shm
