#include "ops/shm/mailbox.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace sirtaki::ops::shm {

namespace {

constexpr std::int64_t kLargestRing = std::int64_t{256} << 10;

}  // namespace

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

MailboxLayout::MailboxLayout(std::int64_t bytes, int members) {
  const auto head = static_cast<std::int64_t>(sizeof(MailboxHead));
  const std::int64_t ring = std::min(kLargestRing, bytes / members - head);
  capacity_ = std::bit_floor(static_cast<std::size_t>(ring));
  stride_ = static_cast<std::int64_t>(capacity_) + head;
}

std::size_t MailboxWriter::Room(std::size_t wanted) {
  if (corrupt_) return 0;
  std::uint64_t used = written_ - read_;
  if (capacity_ - used < wanted) {
    read_ = head_->read.load(std::memory_order_seq_cst);
    used = written_ - read_;
    corrupt_ = used > capacity_;
    if (corrupt_) return 0;
  }
  return capacity_ - used;
}

void MailboxWriter::Put(std::span<const std::byte> bytes) {
  const std::size_t at = written_ & (capacity_ - 1);
  const std::size_t to_the_end = std::min(bytes.size(), capacity_ - at);
  if (to_the_end > 0) std::memcpy(ring_ + at, bytes.data(), to_the_end);
  const std::span<const std::byte> rest = bytes.subspan(to_the_end);
  if (!rest.empty()) std::memcpy(ring_, rest.data(), rest.size());
  written_ += bytes.size();
}

std::size_t MailboxReader::Available() {
  if (corrupt_) return 0;
  written_ = head_->written.load(std::memory_order_acquire);
  corrupt_ = written_ - read_ > capacity_;
  return corrupt_ ? 0 : written_ - read_;
}

void MailboxReader::Take(std::span<std::byte> bytes) {
  const std::size_t at = read_ & (capacity_ - 1);
  const std::size_t to_the_end = std::min(bytes.size(), capacity_ - at);
  if (to_the_end > 0) std::memcpy(bytes.data(), ring_ + at, to_the_end);
  const std::span<std::byte> rest = bytes.subspan(to_the_end);
  if (!rest.empty()) std::memcpy(rest.data(), ring_, rest.size());
  read_ += bytes.size();
}

// Either this sees that the writer has asked, or the writer sees this room when it looks again.
bool MailboxReader::Release() {
  head_->read.store(read_, std::memory_order_seq_cst);
  if (head_->full.load(std::memory_order_relaxed) == 0) return false;
  if (written_ - read_ > capacity_ / 2) return false;
  // Taken before the writer is told: what it asks afterwards is another question.
  return head_->full.exchange(0, std::memory_order_seq_cst) != 0;
}

}  // namespace sirtaki::ops::shm
