// A port posts sends and receives between the ranks of a session. It is all that a medium has to
// offer: WireBackend makes every collective of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/base/status.h"
#include "ops/base/backend.h"

namespace sirtaki::ops::wire {

struct Send {
  int rank = 0;
  const void* memory = nullptr;
  std::int64_t bytes = 0;
};
struct Receive {
  int rank = 0;
  void* memory = nullptr;
  std::int64_t bytes = 0;
};

// What is posted matches by sender, receiver and envelope, in the order in which it was posted.
struct Envelope {
  enum class Space : std::uint8_t { kCollectives, kMessages };
  Space space = Space::kCollectives;
  int tag = 0;
  // It is short and waited for: a medium may keep it from waiting behind what is long. The same on
  // both sides.
  bool urgent = false;
};

// Thread-safe: lanes post at once, each with envelopes of its own.
class Port {
 public:
  virtual ~Port() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // How many tags collectives have: from 0 on. Messages have the tags 0 to
  // Backend::kAnswerTag.
  virtual std::int64_t tags() const = 0;

  // Post starts all of them and never blocks; the Completion is polled by one thread at a time. A
  // receive of another length than was sent is an error. A rank may send to itself in the space of
  // messages alone.
  virtual std::unique_ptr<Completion> Post(Envelope envelope, std::span<const Receive> receives,
                                           std::span<const Send> sends) = 0;

  // Whether the memory of a Completion is neither read nor written after its destructor, also when it
  // is unfinished or has failed.
  virtual bool lets_go() const { return false; }

  // Nothing new starts: Post gives a Completion that has failed with `why`. What is under way is
  // polled or destroyed as before. The first reason stays. Thread-safe, never blocks.
  virtual void Abort(const core::Status& why) = 0;
};

}  // namespace sirtaki::ops::wire
