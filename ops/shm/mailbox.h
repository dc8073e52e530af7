// A ring of bytes in shared memory from one rank to another: its two ends. One thread at a time
// uses an end. Whatever the other side has written, neither end touches memory outside the ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sirtaki::ops::shm {

// Positions count bytes since the start and never go back. Lies zeroed in memory that no
// constructor has seen; the bytes follow.
struct MailboxHead {
  alignas(64) std::atomic<std::uint64_t> written;
  std::atomic<std::uint32_t> full;  // the writer waits for room
  alignas(64) std::atomic<std::uint64_t> read;
};

// A layout says where the mailboxes of `members` senders lie in `bytes` of memory.
class MailboxLayout {
 public:
  MailboxLayout(std::int64_t bytes, int members);
  std::int64_t OffsetOf(int sender) const { return sender * stride_; }
  std::size_t capacity() const { return capacity_; }  // a power of two

 private:
  std::int64_t stride_;
  std::size_t capacity_;
};

class MailboxWriter {
 public:
  MailboxWriter(std::byte* mailbox, std::size_t capacity)
      : head_(reinterpret_cast<MailboxHead*>(mailbox)),
        ring_(mailbox + sizeof(MailboxHead)),
        capacity_(capacity) {}

  // Bytes that fit, at least `wanted` if there are that many. None if the reader's position is one
  // that it cannot have, which corrupt() tells.
  std::size_t Room(std::size_t wanted);
  bool corrupt() const { return corrupt_; }
  // Precondition: they fit.
  void Put(std::span<const std::byte> bytes);
  // The bytes that were put so far are there for the reader.
  void Publish() { head_->written.store(written_, std::memory_order_release); }
  // The reader says from now on when it has made room. Look at Room once more after it.
  void AskForRoom() { head_->full.store(1, std::memory_order_seq_cst); }

 private:
  MailboxHead* head_;
  std::byte* ring_;
  std::size_t capacity_;
  std::uint64_t written_ = 0;
  std::uint64_t read_ = 0;  // as last seen
  bool corrupt_ = false;
};

class MailboxReader {
 public:
  MailboxReader(std::byte* mailbox, std::size_t capacity)
      : head_(reinterpret_cast<MailboxHead*>(mailbox)),
        ring_(mailbox + sizeof(MailboxHead)),
        capacity_(capacity) {}

  // Bytes that are there. None if the writer's position is one that it cannot have, which corrupt()
  // tells.
  std::size_t Available();
  bool corrupt() const { return corrupt_; }
  // Precondition: that many are there.
  void Take(std::span<std::byte> bytes);
  // Gives back the room of what was taken. True if the writer is to be told: it waits, and half of
  // the ring is free.
  bool Release();

 private:
  MailboxHead* head_;
  const std::byte* ring_;
  std::size_t capacity_;
  std::uint64_t written_ = 0;  // as last seen
  std::uint64_t read_ = 0;
  bool corrupt_ = false;
};

}  // namespace sirtaki::ops::shm
