// Messages from one rank's GPU to another's by NCCL, past the host: a communicator of these two for
// this direction alone, with a stream and a thread of its own, so that messages of other ranks, and
// those of the other direction, wait for none of these.
//
// NCCL's send waits on the device until the peer's receive is there, and the two sides have to call
// in one order: that in which the receiver has answered "go" (ops/host/p2p). The receiver says so
// when its receive has been posted and compared, so that the other side's part is never waited for
// by a host.
//
// A pair comes about beside the messages, which meanwhile go through the host:
//   1  each side opens NCCL on the pair's thread; the sender then offers its version
//   2  the receiver answers with the id of a communicator; both make it, and connect
//   3  the sender offers that it is made; where it is made at the receiver, too, the answer is "go"
// If it cannot be made, the messages go on through the host.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/engine/work.h"
#include "core/threads/leavable_thread.h"
#include "ops/cuda/device.h"
#include "ops/host/p2p_header.h"
#include "ops/nccl/communicator.h"
#include "ops/nccl/device_memory.h"
#include "ops/nccl/rendezvous.h"

namespace sirtaki::ops::nccl {

// A message that goes by NCCL.
struct PairMessage {
  std::uint64_t number = 0;  // its owner's
  core::WorkPtr work;        // a cuda::DeviceWork
  std::int64_t bytes = 0;
};

// What all pairs of a device have in common.
struct PairOptions {
  std::shared_ptr<cuda::Device> device;
  std::shared_ptr<ProcessCommunicators> communicators;  // null: there are no pairs
  // Opens NCCL, and makes an id for the first of the two. Called by the pairs' threads.
  std::function<Introduction(bool first)> introduce;
  core::Duration limit = std::chrono::seconds(60);  // for one call of NCCL's on the host
  bool direct = true;                               // the communicators, once they are connected
  int max_ctas = kUndefined;
  int cta_policy = kUndefined;
};

// Offer, Answer, Take and Stop are called by anyone and do not block. No lock is held while a
// callback, CUDA or NCCL is called.
class MessagePair : public core::LeavableThread {
 public:
  struct Callbacks {
    // The message is in the stream, and `done` behind it.
    std::function<void(const PairMessage& message, const cuda::EventPtr& done)> on_launched;
    // A message failed, after which nothing more comes from here. `is_gone`: CUDA has ended, as the
    // process exits.
    std::function<void(const core::Status& why, const core::Work& work, bool is_gone)> on_failure;
  };

  // `sends`: from `rank` to `peer`; else the other way.
  MessagePair(PairOptions options, int rank, int peer, bool sends, Callbacks callbacks);
  MessagePair(const MessagePair&) = delete;
  MessagePair& operator=(const MessagePair&) = delete;

  // The sender's side: what it offers now; 0: nothing.
  std::uint16_t Offer() const SIRTAKI_EXCLUDES(mutex);
  void Take(const P2pAnswer& answer, const PairMessage& message) SIRTAKI_EXCLUDES(mutex);
  // The receiver's side. After kGo the message is launched behind those before it.
  P2pAnswer Answer(std::uint16_t offer, const PairMessage& message) SIRTAKI_EXCLUDES(mutex);
  // True once messages are neither offered nor asked after: they go through the host at once. A receiver
  // that refuses says so to the sender once, by an answer.
  bool IsGivenUp() const SIRTAKI_EXCLUDES(mutex);

  // What the thread does.
  void Run() SIRTAKI_EXCLUDES(mutex);
  // After a failure anywhere: nothing more is launched, and all communicators are aborted.
  void Stop() SIRTAKI_EXCLUDES(mutex);
  // At the end of the session what is not made is not made any more, and the thread ends once nothing is
  // under way. All pairs are told before EndThread is called for one: their good-byes may wait for
  // those of the other side.
  void Quit() SIRTAKI_EXCLUDES(mutex);

 private:
  enum class State { kOpening, kOpen, kMaking, kMade, kRefused };
  struct InFlight {
    PairMessage message;
    cuda::EventPtr done;  // null: nobody knows where it is
  };

  void Refuse(const std::string& why) SIRTAKI_REQUIRES(mutex);
  void Open() SIRTAKI_EXCLUDES(mutex);
  bool AwaitMeeting() SIRTAKI_EXCLUDES(mutex);  // false: it is not made
  core::Status Make();
  bool NoteMade() SIRTAKI_EXCLUDES(mutex);  // false: it is not wanted any more
  core::Status SendOrReceive(void* memory, std::int64_t bytes);
  // What is to be launched now; false: it is over.
  bool AwaitWork(std::deque<PairMessage>* work) SIRTAKI_EXCLUDES(mutex);
  core::Status Launch(const PairMessage& message);
  core::Status Retire();
  bool Serve() SIRTAKI_EXCLUDES(mutex);  // false: it has failed
  void End(bool well);
  Patience patience() const { return {options_.limit, &stops_, nullptr}; }

  const PairOptions options_;
  const int rank_;
  const int peer_;
  const bool sends_;
  const Callbacks callbacks_;

  std::atomic<bool> stops_{false};  // set under the mutex
  State state_ SIRTAKI_GUARDED_BY(mutex) = State::kOpening;
  bool has_said_never_ SIRTAKI_GUARDED_BY(mutex) = false;  // the receiver
  bool has_failed_ SIRTAKI_GUARDED_BY(mutex) = false;
  bool is_ending_ SIRTAKI_GUARDED_BY(mutex) = false;
  Introduction own_ SIRTAKI_GUARDED_BY(mutex);
  UniqueId id_ SIRTAKI_GUARDED_BY(mutex);  // from kMaking on
  std::deque<PairMessage> queue_ SIRTAKI_GUARDED_BY(mutex);

  // The thread alone uses what follows.
  std::unique_ptr<cuda::Stream> stream_;
  std::unique_ptr<cuda::EventPool> events_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<DeviceMemory> memory_;
  std::deque<InFlight> in_flight_;  // oldest first
  core::Duration pause_{};
  core::TimePoint watched_{};
};

}  // namespace sirtaki::ops::nccl
