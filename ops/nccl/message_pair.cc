#include "ops/nccl/message_pair.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/base/log.h"
#include "ops/base/keep_forever.h"
#include "ops/cuda/device_work.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;
using Kind = P2pAnswer::Kind;

// An offer is the version of the sender's NCCL, and this if the communicator is made there.
constexpr std::uint16_t kIsMade = 0x8000;

// The pauses between looks at what is under way. Nobody waits for it: it only keeps its tensors.
constexpr auto kFirstPairPause = std::chrono::microseconds(100);
constexpr auto kLongestPairPause = std::chrono::milliseconds(1);
// The time between questions for errors of what is under way.
constexpr auto kPairWatch = std::chrono::milliseconds(20);
// How long the end waits for what is under way, which the program was told is launched: less than the
// owner waits for the thread. A peer that has ended without its part is waited for in vain.
constexpr auto kPairGrace = std::chrono::seconds(4);
// How long the end waits for its stream after an abort.
constexpr auto kPairThroughLimit = std::chrono::milliseconds(250);

// What the two ranks exchange to connect.
constexpr std::int64_t kGreetingBytes = 4;

}  // namespace

MessagePair::MessagePair(PairOptions options, int rank, int peer, bool sends, Callbacks callbacks)
    : options_(std::move(options)),
      rank_(rank),
      peer_(peer),
      sends_(sends),
      callbacks_(std::move(callbacks)),
      pause_(kFirstPairPause) {}

// ---- by anyone ----

std::uint16_t MessagePair::Offer() const {
  core::MutexLock lock(mutex);
  if (state_ == State::kOpening || state_ == State::kRefused) return 0;
  const auto version = static_cast<std::uint16_t>(own_.version);
  return state_ == State::kMade ? static_cast<std::uint16_t>(version | kIsMade) : version;
}

P2pAnswer MessagePair::Answer(std::uint16_t offer, const PairMessage& message) {
  core::MutexLock lock(mutex);
  P2pAnswer answer;
  const int version = offer & ~kIsMade;
  if (state_ != State::kOpening && state_ != State::kRefused && version != own_.version) {
    Refuse("rank " + std::to_string(peer_) + " has NCCL " + VersionText(version) + ", rank " +
           std::to_string(rank_) + " has " + VersionText(own_.version));
  }
  if (state_ == State::kRefused) {
    answer.kind = Kind::kNever;
    has_said_never_ = true;
  } else if (state_ == State::kOpen) {
    answer.kind = Kind::kMeet;
    id_ = own_.id;
    static_assert(sizeof(id_.bytes) == sizeof(answer.word));
    std::memcpy(answer.word.data(), id_.bytes.data(), sizeof(answer.word));
    state_ = State::kMaking;
    changed.NotifyAll();
  } else if (state_ == State::kMade && (offer & kIsMade) != 0) {
    answer.kind = Kind::kGo;
    queue_.push_back(message);
    changed.NotifyAll();
  }
  return answer;
}

void MessagePair::Take(const P2pAnswer& answer, const PairMessage& message) {
  core::MutexLock lock(mutex);
  if (answer.kind == Kind::kNever) {
    Refuse("rank " + std::to_string(peer_) + " does not take part");
  } else if (answer.kind == Kind::kMeet && state_ == State::kOpen) {
    std::memcpy(id_.bytes.data(), answer.word.data(), sizeof(answer.word));
    state_ = State::kMaking;
    changed.NotifyAll();
  } else if (answer.kind == Kind::kGo) {
    queue_.push_back(message);
    changed.NotifyAll();
  }
}

bool MessagePair::IsGivenUp() const {
  core::MutexLock lock(mutex);
  return state_ == State::kRefused && (sends_ || has_said_never_);
}

void MessagePair::Refuse(const std::string& why) {
  if (state_ == State::kRefused || stops_) return;
  SIRTAKI_LOG(kInfo, "large messages " << (sends_ ? "to" : "from") << " the GPU of rank " << peer_
                                       << " go through the host: " << why);
  state_ = State::kRefused;
  stops_ = true;  // a call of NCCL that is under way
  changed.NotifyAll();
}

void MessagePair::Stop() {
  core::MutexLock lock(mutex);
  has_failed_ = stops_ = true;
  queue_.clear();
  changed.NotifyAll();
}

void MessagePair::Quit() {
  core::MutexLock lock(mutex);
  is_ending_ = true;
  if (state_ != State::kMade) stops_ = true;
  changed.NotifyAll();
}

// ---- its thread ----

void MessagePair::Open() {
  const Introduction own = options_.introduce(!sends_);
  core::MutexLock lock(mutex);
  own_ = own;
  if (own.failed != 0) {
    Refuse(own.Why());
  } else if (own.version <= 0 || own.version >= kIsMade) {
    Refuse("NCCL's version " + std::to_string(own.version) + " cannot be offered");
  } else if (state_ == State::kOpening) {
    state_ = State::kOpen;
  }
}

bool MessagePair::AwaitMeeting() {
  core::MutexLock lock(mutex);
  while (state_ == State::kOpen && !stops_) WaitUntil(core::TimePoint::max());
  return state_ == State::kMaking && !stops_;
}

Status MessagePair::SendOrReceive(void* memory, std::int64_t bytes) {
  const auto call = [&](CommHandle comm) {
    const Api& api = communicator_->api();
    const auto count = static_cast<std::size_t>(bytes);
    const cuda::StreamHandle stream = stream_->handle();
    return sends_ ? api.Send(memory, count, DataType::kUint8, 1, comm, stream)
                  : api.Recv(memory, count, DataType::kUint8, 0, comm, stream);
  };
  return communicator_->Run(sends_ ? "ncclSend" : "ncclRecv", call, patience());
}

Status MessagePair::Make() {
  UniqueId id;
  {
    core::MutexLock lock(mutex);
    id = id_;
  }
  const int from = sends_ ? rank_ : peer_;
  const int to = sends_ ? peer_ : rank_;
  // The events are there when the stream is: End waits for it by one of them.
  events_ = std::make_unique<cuda::EventPool>(options_.device);
  Status status = cuda::Stream::Make(options_.device, &stream_);
  if (!status.ok()) return status;
  const Choices choices{
      .name = "sirtaki, messages from rank " + std::to_string(from) + " to " + std::to_string(to),
      .ranks = "ranks " + std::to_string(from) + " and " + std::to_string(to),
      .max_ctas = options_.max_ctas,
      .cta_policy = options_.cta_policy};
  status = Communicator::Init(options_.communicators, id, 2, sends_ ? 0 : 1, patience(),
                              &communicator_, choices);
  if (!status.ok()) return status;
  memory_ = std::make_unique<DeviceMemory>(options_.device->api(), *communicator_);
  std::byte* memory = nullptr;
  status = memory_->Reserve(kGreetingBytes, &memory);
  // The first message connects the two, for which their hosts wait for each other: here both are on
  // their way. A communicator that is split from theirs has its connections.
  if (status.ok()) status = SendOrReceive(memory, kGreetingBytes);
  if (!status.ok() || !options_.direct) return status;
  return communicator_->MakeDirect(options_.device, patience());
}

bool MessagePair::AwaitWork(std::deque<PairMessage>* work) {
  core::MutexLock lock(mutex);
  const core::TimePoint until =
      in_flight_.empty() ? core::TimePoint::max() : core::Clock::now() + pause_;
  while (queue_.empty() && !stops_) {
    if (is_ending_ && in_flight_.empty()) return false;
    if (!WaitUntil(until)) break;
  }
  pause_ = queue_.empty() ? std::min<core::Duration>(2 * pause_, kLongestPairPause)
                          : core::Duration(kFirstPairPause);
  work->swap(queue_);
  return !stops_;
}

Status MessagePair::Launch(const PairMessage& message) {
  const cuda::DeviceWork& work = cuda::AsDeviceWork(*message.work);
  in_flight_.push_back({message, nullptr});
  Status status = work.ready != nullptr ? work.ready->Block(stream_->handle()) : Status::Ok();
  void* const memory = sends_ ? const_cast<void*>(work.input) : work.output;
  if (status.ok()) status = SendOrReceive(memory, message.bytes);
  if (status.ok()) status = events_->Mark(stream_->handle(), &in_flight_.back().done);
  if (status.ok()) CallOut([&] { callbacks_.on_launched(message, in_flight_.back().done); });
  return status;
}

Status MessagePair::Retire() {
  while (!in_flight_.empty()) {
    bool reached = false;
    Status status = in_flight_.front().done->Poll(&reached);
    if (!status.ok()) return status;
    if (!reached) break;
    in_flight_.pop_front();
  }
  const core::TimePoint now = core::Clock::now();
  if (in_flight_.empty() || now - watched_ < kPairWatch) return Status::Ok();
  watched_ = now;
  return communicator_->CheckAsync();
}

bool MessagePair::Serve() {
  core::TimePoint quit_limit = core::TimePoint::max();
  for (std::deque<PairMessage> work; AwaitWork(&work); work.clear()) {
    Status status;
    core::WorkPtr concerned = in_flight_.empty() ? nullptr : in_flight_.front().message.work;
    try {
      for (const PairMessage& message : work) {
        if (!status.ok()) break;
        concerned = message.work;
        status = Launch(message);
      }
      if (status.ok()) {
        if (!in_flight_.empty()) concerned = in_flight_.front().message.work;
        status = Retire();
      }
    } catch (...) {
      status = core::StatusOfException();
    }
    if (!status.ok()) {
      const bool is_gone = stream_->IsGone();
      CallOut([&] { callbacks_.on_failure(status, *concerned, is_gone); });
      return false;
    }
    // The peer may have ended without its part.
    core::MutexLock lock(mutex);
    if (!is_ending_) continue;
    const core::TimePoint now = core::Clock::now();
    if (quit_limit == core::TimePoint::max()) quit_limit = now + kPairGrace;
    if (now < quit_limit) continue;
    SIRTAKI_LOG(kWarning, "the session ends while " << in_flight_.size() << " messages "
                                                    << (sends_ ? "to" : "from")
                                                    << " the GPU of rank " << peer_
                                                    << " are under way: they are aborted");
    return false;
  }
  core::MutexLock lock(mutex);
  return !stops_;
}

void MessagePair::End(bool well) {
  bool all = false;
  {
    core::MutexLock lock(mutex);
    all = has_failed_;
  }
  const bool gone = stream_ != nullptr && stream_->IsGone();
  bool goes = !gone;
  const auto is_through = [this] {
    return stream_ == nullptr || cuda::ComesToItsEnd(*stream_, *events_, kPairThroughLimit);
  };
  // The greeting may still be in the stream.
  if (well && !gone && is_through()) {
    memory_.reset();
    if (!communicator_->Finalize(patience()).ok()) communicator_->AbortAlone();
  } else if (!gone) {
    if (all) {
      goes = options_.communicators->AbortAll(options_.device);
    } else if (communicator_ != nullptr) {
      communicator_->AbortAlone();
    }
    goes = goes && is_through();
  }
  if (!goes) {
    // Nobody knows what the device still does with them.
    KeepForever(std::make_shared<std::deque<InFlight>>(std::move(in_flight_)));
    KeepForever(std::shared_ptr<DeviceMemory>(std::move(memory_)));
    KeepForever(std::shared_ptr<Communicator>(std::move(communicator_)));
    if (stream_ != nullptr) stream_->LeaveBehind();
  }
  CallOut([&] { in_flight_.clear(); });
  memory_.reset();
  communicator_.reset();
  events_.reset();
  stream_.reset();
}

bool MessagePair::NoteMade() {
  core::MutexLock lock(mutex);
  if (state_ != State::kMaking || stops_) return false;
  state_ = State::kMade;
  return true;
}

void MessagePair::Run() {
  bool well = false;
  Status status = options_.device->Adopt();
  try {
    if (status.ok()) Open();
    if (status.ok() && AwaitMeeting()) {
      status = Make();
      well = status.ok() && NoteMade();
    }
  } catch (...) {
    status = core::StatusOfException();
  }
  if (!status.ok()) {
    core::MutexLock lock(mutex);
    Refuse(status.message());
  }
  if (well) well = Serve();
  End(well);
}

}  // namespace sirtaki::ops::nccl
