// A stream is one connection to another rank that carries transfers: many at once, each found by its
// envelope and number.
//
// A short transfer goes at once, and waits in memory of its own where nobody expects it yet. A longer
// one is announced, and goes when its receiver has said where to: from the sender's memory straight
// into the receiver's. The receiver says so as soon as it expects it, mostly before it is announced.
//
// A stream on which a transfer waits for a host that is gone notices that (tcp/silence.h).
//
// Threads share a stream: each that looks after a transfer moves whatever there is to move.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "ops/wire/port.h"
#include "tcp/line.h"
#include "tcp/loss.h"
#include "tcp/silence.h"

namespace sirtaki::tcp {

// A transfer belongs to its completion, and does not move while a stream knows it.
struct Transfer {
  bool sends = false;
  const std::byte* given = nullptr;
  std::byte* taken = nullptr;
  std::int64_t bytes = 0;
  // What follows is the stream's, and others' once `done`.
  std::uint32_t number = 0;  // among those of its envelope and direction
  std::int64_t moved = 0;
  std::atomic<bool> done{false};
  core::Status status;
};

class Stream {
 public:
  // `line` does not block. `rank`: of the other end. `hosts`: their names, by rank.
  Stream(Line line, int own_rank, int rank, const std::vector<std::string>& hosts,
         Patience patience);

  void Start(ops::wire::Envelope envelope, Transfer* transfer) SIRTAKI_EXCLUDES(mutex_);
  // Whether a transfer is not done. The medium has to move all of them, whichever is looked after: a
  // rank that waits for one other may be the one that a third waits for.
  bool is_busy() const { return pending_.load(std::memory_order_relaxed) > 0; }
  // Moves what can be moved now, unless another thread does.
  void Progress() SIRTAKI_EXCLUDES(mutex_);
  // Forgets a transfer that is not done: its memory is used no more. The message for a receive that
  // nothing has come of goes to the next receive of the envelope that expects as much. What a receive
  // has got a part of is lost, and a send that is given up ends the stream.
  void Withdraw(ops::wire::Envelope envelope, Transfer* transfer) SIRTAKI_EXCLUDES(mutex_);

 private:
  enum class Kind : std::uint32_t { kMessage = 1, kAnnounce, kWanted, kData, kPing };
  struct Header {
    Kind kind = Kind::kMessage;
    std::uint32_t space = 0;
    std::int32_t tag = 0;
    std::uint32_t number = 0;
    std::int64_t bytes = 0;
  };
  // A message that came, or is coming, before anybody expected it.
  struct Early {
    std::vector<std::byte> bytes;
    std::int64_t size = -1;  // not known yet
    std::int64_t moved = 0;
    bool announced = false;  // only that: it comes when it is wanted
    bool wanted = false;     // its sender knows
    bool dropped = false;    // nobody gets it
  };
  // What is known of an envelope.
  struct Box {
    std::uint32_t sends = 0;  // started
    std::uint32_t receives = 0;
    std::map<std::uint32_t, Transfer*> expected;
    std::map<std::uint32_t, Early> early;
    std::map<std::uint32_t, Transfer*> announced;
    std::set<std::uint32_t> wanted;       // before they were started
    std::vector<std::uint32_t> given_up;  // numbers of withdrawn receives, ascending
  };
  struct Outgoing {
    Header header;
    Transfer* transfer = nullptr;  // null: the header alone
    std::size_t header_sent = 0;
  };
  // Where the payload that is being read goes.
  struct Incoming {
    Box* box = nullptr;
    std::uint32_t number = 0;
    Transfer* transfer = nullptr;  // null: `early`, or nowhere
    Early* early = nullptr;
    std::int64_t left = 0;
  };

  static std::uint64_t KeyOf(std::uint32_t space, std::int32_t tag) {
    return std::uint64_t{space} << 32U | static_cast<std::uint32_t>(tag);
  }
  Box& BoxOf(const ops::wire::Envelope& envelope) SIRTAKI_REQUIRES(mutex_) {
    return boxes_[KeyOf(static_cast<std::uint32_t>(envelope.space), envelope.tag)];
  }
  void Finish(Transfer* transfer, core::Status status);
  void StartSend(const Header& header, Box* box, Transfer* transfer) SIRTAKI_REQUIRES(mutex_);
  void StartReceive(Header header, Box* box, Transfer* transfer) SIRTAKI_REQUIRES(mutex_);
  void Want(Header header, std::uint32_t number) SIRTAKI_REQUIRES(mutex_);
  void Write() SIRTAKI_REQUIRES(mutex_);
  void Read() SIRTAKI_REQUIRES(mutex_);
  void StopWriting(int error) SIRTAKI_REQUIRES(mutex_);
  void NoteSent(std::size_t bytes) SIRTAKI_REQUIRES(mutex_);
  core::Status TakeStaged() SIRTAKI_REQUIRES(mutex_);
  core::Status TakeHeader(const Header& header) SIRTAKI_REQUIRES(mutex_);
  Transfer* Expecting(const Header& header, Box* box) SIRTAKI_REQUIRES(mutex_);
  std::byte* TargetOf() SIRTAKI_REQUIRES(mutex_);
  void Advance(std::int64_t bytes) SIRTAKI_REQUIRES(mutex_);
  core::Status Differs(std::int64_t sent, std::int64_t expected, std::int32_t tag) const;
  core::Status Nonsense() const;
  void Lose(int error) SIRTAKI_REQUIRES(mutex_);
  void CheckSilence() SIRTAKI_REQUIRES(mutex_);
  void End(core::Status why) SIRTAKI_REQUIRES(mutex_);

  const int own_rank_;
  const int rank_;
  const std::string own_host_;
  const std::string host_;
  std::atomic<int> pending_{0};  // transfers
  core::Mutex mutex_;
  Line line_ SIRTAKI_GUARDED_BY(mutex_);
  int write_error_ SIRTAKI_GUARDED_BY(mutex_) = 0;  // after which only reading goes on
  Loss loss_ SIRTAKI_GUARDED_BY(mutex_);
  Silence silence_ SIRTAKI_GUARDED_BY(mutex_);
  core::Status ended_ SIRTAKI_GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, Box> boxes_ SIRTAKI_GUARDED_BY(mutex_);
  std::deque<Outgoing> outgoing_ SIRTAKI_GUARDED_BY(mutex_);
  std::vector<std::byte> stage_ SIRTAKI_GUARDED_BY(mutex_);  // read, from first_ to last_
  std::size_t first_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  std::size_t last_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  Incoming incoming_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::tcp
