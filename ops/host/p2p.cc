#include "ops/host/p2p.h"

#include <new>
#include <string>

namespace sirtaki::ops {
namespace {

using core::Status;
using core::StatusCode;

bool Sends(const core::Work& work) { return work.request.signature()->kind == core::OpKind::kSend; }

// True once the operation has finished well, or there is none; false with its error in `*status`.
bool HasFinished(const std::unique_ptr<Completion>& operation, Status* status) {
  if (operation == nullptr) return true;
  if (!operation->Poll()) return false;
  *status = operation->status();
  return status->ok();
}

// " (activations of micro-batch 3)", if the message's key has such a label behind peer and tag.
std::string LabelOf(const core::Work& work) {
  const std::string& name = work.request.key.name.text();
  const std::size_t begin = name.find(" (");
  const std::size_t end = name.rfind("), message ");
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "";
  return name.substr(begin, end + 1 - begin);
}

}  // namespace

std::string P2pText(const core::Work& work) {
  return (Sends(work) ? "send to rank " : "receive from rank ") + std::to_string(work.peer) +
         ", tag " + std::to_string(work.tag) + LabelOf(work);
}

void P2p::Start(core::WorkPtr work, core::TimePoint now, P2pGate there) {
  auto message = std::make_unique<Message>();
  message->work = std::move(work);
  message->since = now;
  message->there = std::move(there);
  if (!lane_.Take(*message, /*queues=*/false)) return;
  const core::Work& asked = *message->work;
  const Line line{asked.peer, asked.tag};
  if (Sends(asked)) {
    unsent_[line].push_back(message.get());
    SendReady(line);
  } else {
    listening_[line].push_back(message.get());
    if (listening_[line].size() == 1) Listen(line);
  }
  under_way_.push_back(std::move(message));
}

bool P2p::IsThere(const Message& message) {
  return message.there == nullptr || message.there->load(std::memory_order_acquire);
}

// Those of the line whose memory is there, up to the first whose is not.
void P2p::SendReady(const Line& line) {
  const auto unsent = unsent_.find(line);
  if (unsent == unsent_.end()) return;
  std::deque<Message*>& waiting = unsent->second;
  while (!waiting.empty() && IsThere(*waiting.front())) {
    Message& message = *waiting.front();
    waiting.pop_front();
    const core::Work& asked = *message.work;
    const P2pHeader header = HeaderOf(asked);
    message.header = Encode(header);
    message.header_operation =
        backend_.SendMessage(asked.peer, asked.tag, message.header.data(), kMessageHeaderBytes);
    if (header.bytes() == 0) continue;
    message.bytes_operation =
        backend_.SendMessage(asked.peer, asked.tag, asked.input, header.bytes());
  }
  if (waiting.empty()) unsent_.erase(unsent);
}

// The first receive of the line begins to wait for its header.
void P2p::Listen(const Line& line) {
  Message& message = *listening_[line].front();
  message.header_operation =
      backend_.ReceiveMessage(line.first, line.second, message.header.data(), kMessageHeaderBytes);
}

bool P2p::Step(std::optional<Failure>* failure) {
  bool moved = false;
  for (std::size_t i = 0; i < under_way_.size();) {
    Message& message = *under_way_[i];
    Status status;
    const Advance advance =
        Sends(*message.work) ? AdvanceSend(message, &status) : AdvanceReceive(message, &status);
    moved |= advance != Advance::kWaiting;
    if (advance != Advance::kDone) {
      ++i;
      continue;
    }
    if (!status.ok() && status.code() != StatusCode::kMismatch) {
      core::Origin origin = status.origin();
      if (origin.rank < 0) origin.rank = rank_;
      *failure = Failure{
          {status.code(), P2pText(*message.work) + ": " + status.message(), std::move(origin)},
          message.work};
      return true;
    }
    const MessagePtr finished = std::move(under_way_[i]);
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(i));
    finished->Complete(status);
    lane_.Finish(finished->number);
  }
  return moved;
}

P2p::Advance P2p::AdvanceSend(Message& message, Status* status) {
  if (message.header_operation == nullptr) {
    SendReady({message.work->peer, message.work->tag});
    return message.header_operation == nullptr ? Advance::kWaiting : Advance::kMoved;
  }
  const bool all =
      HasFinished(message.header_operation, status) && HasFinished(message.bytes_operation, status);
  return all || !status->ok() ? Advance::kDone : Advance::kWaiting;
}

P2p::Advance P2p::AdvanceReceive(Message& message, Status* status) {
  bool moved = false;
  if (!message.has_header) {
    if (message.header_operation == nullptr) return Advance::kWaiting;  // not its turn
    if (!HasFinished(message.header_operation, status)) {
      return status->ok() ? Advance::kWaiting : Advance::kDone;
    }
    if (!IsThere(message)) return Advance::kWaiting;
    *status = TakeHeader(message);
    if (!status->ok()) return Advance::kDone;
    moved = true;
  }
  if (!HasFinished(message.bytes_operation, status)) {
    if (!status->ok()) return Advance::kDone;
    return moved ? Advance::kMoved : Advance::kWaiting;
  }
  *status = message.verdict;
  return Advance::kDone;
}

// Begins to receive the bytes, and lets the next receive of the line listen.
Status P2p::TakeHeader(Message& message) {
  const core::Work& work = *message.work;
  P2pHeader sent;
  if (Status status = Decode(message.header, &sent); !status.ok()) return status;
  const P2pHeader expected = HeaderOf(work);
  void* memory = work.output;
  const std::int64_t bytes = sent.bytes();
  if (sent != expected) {
    message.verdict = Status(StatusCode::kMismatch,
                             P2pText(work) + ": expected " + expected.ToString() + ", rank " +
                                 std::to_string(work.peer) + " sent " + sent.ToString(),
                             core::Origin{rank_, {}, {}});
    message.scratch.reset(new (std::nothrow) std::byte[static_cast<std::size_t>(bytes)]);
    if (message.scratch == nullptr) {
      return {StatusCode::kBackend, "out of host memory for " + sent.ToString() + ", where " +
                                        expected.ToString() + " was expected"};
    }
    memory = message.scratch.get();
  }
  message.has_header = true;
  if (bytes > 0) {
    message.bytes_operation = backend_.ReceiveMessage(work.peer, work.tag, memory, bytes);
  }
  const auto line = listening_.find({work.peer, work.tag});
  line->second.pop_front();
  if (line->second.empty()) {
    listening_.erase(line);
  } else {
    Listen(line->first);
  }
  return Status::Ok();
}

void P2p::Task::AddRunning(std::vector<core::RunningOperation>* list) const {
  list->push_back({core::kWorldSet, P2pText(*work), since, {}});
}

std::shared_ptr<void> P2p::Release() {
  if (under_way_.empty()) return nullptr;
  unsent_.clear();
  listening_.clear();
  for (const MessagePtr& message : under_way_) {
    message->header_operation.reset();
    message->bytes_operation.reset();
  }
  return std::make_shared<std::vector<MessagePtr>>(std::move(under_way_));
}

}  // namespace sirtaki::ops
