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

void P2p::Start(core::WorkPtr work, core::TimePoint now, P2pGate there,
                std::shared_ptr<P2pCarrier> carrier) {
  auto message = std::make_unique<Message>();
  message->work = std::move(work);
  message->since = now;
  message->there = std::move(there);
  if (carrier != nullptr) message->way = Way::kOpen;
  message->carrier = std::move(carrier);
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

void P2p::SendHeader(Message& message, const P2pHeader& header) {
  message.header = Encode(header);
  message.header_operation =
      backend_.SendMessage(message.work->peer, message.work->tag, message.header.data(),
                           static_cast<std::int64_t>(kMessageHeaderBytes));
}

void P2p::MakeOffer(Message& message) {
  P2pHeader header = HeaderOf(*message.work);
  header.offer = message.carrier->Offer();
  if (header.offer == 0) {
    message.way = Way::kHost;
    message.carrier->Bring();
    return;
  }
  message.way = Way::kOffered;
  SendHeader(message, header);
  Answers& answers = answers_[message.work->peer];
  if (answers.expected++ == 0) ListenForAnswer(message.work->peer, answers);
}

// Sends what the line has, up to the first message that waits for memory or an answer.
void P2p::SendReady(const Line& line) {
  const auto unsent = unsent_.find(line);
  if (unsent == unsent_.end()) return;
  std::deque<Message*>& waiting = unsent->second;
  while (!waiting.empty()) {
    Message& message = *waiting.front();
    if (message.way == Way::kOpen) MakeOffer(message);
    if (message.way == Way::kOffered) return;
    if (message.way == Way::kHost) {
      if (!IsThere(message)) return;
      const core::Work& asked = *message.work;
      const P2pHeader header = HeaderOf(asked);
      if (message.header_operation == nullptr) SendHeader(message, header);
      if (header.bytes() > 0) {
        message.bytes_operation =
            backend_.SendMessage(asked.peer, asked.tag, asked.input, header.bytes());
      }
    }
    message.has_left_line = true;
    waiting.pop_front();
  }
  unsent_.erase(unsent);
}

void P2p::ListenForAnswer(int peer, Answers& answers) {
  answers.operation = backend_.ReceiveMessage(peer, Backend::kAnswerTag, answers.bytes.data(),
                                              static_cast<std::int64_t>(kAnswerBytes));
}

Status P2p::TakeAnswers(int peer, Answers& answers, bool* moved) {
  while (answers.expected > 0) {
    Status status;
    if (!HasFinished(answers.operation, &status)) return status;
    *moved = true;
    P2pAnswer answer;
    int tag = 0;
    status = Decode(answers.bytes, &answer, &tag);
    if (!status.ok()) return status;
    const auto line = unsent_.find({peer, tag});
    if (line == unsent_.end() || line->second.front()->way != Way::kOffered) {
      return {StatusCode::kProtocol, "rank " + std::to_string(peer) + " has answered tag " +
                                         std::to_string(tag) + ", where nothing was offered"};
    }
    Message& message = *line->second.front();
    message.carrier->Take(answer);
    message.way = answer.kind == P2pAnswer::Kind::kGo ? Way::kCarried : Way::kHost;
    if (message.way == Way::kHost) message.carrier->Bring();
    answers.operation.reset();
    if (--answers.expected > 0) ListenForAnswer(peer, answers);
    SendReady(line->first);
  }
  return Status::Ok();
}

core::WorkPtr P2p::Unanswered(int peer) const {
  for (const auto& [line, waiting] : unsent_) {
    if (line.first == peer && waiting.front()->way == Way::kOffered) return waiting.front()->work;
  }
  return nullptr;
}

P2p::Failure P2p::FailureOf(const Status& status, const core::WorkPtr& work) const {
  core::Origin origin = status.origin();
  if (origin.rank < 0) origin.rank = rank_;
  return {{status.code(), P2pText(*work) + ": " + status.message(), std::move(origin)}, work};
}

// The first receive of the line begins to wait for its header.
void P2p::Listen(const Line& line) {
  Message& message = *listening_[line].front();
  message.header_operation =
      backend_.ReceiveMessage(line.first, line.second, message.header.data(), kMessageHeaderBytes);
}

bool P2p::Step(std::optional<Failure>* failure) {
  bool moved = false;
  // The answers first: what their sender has started since may wait for what they say.
  for (auto& [peer, answers] : answers_) {
    if (answers.expected == 0) continue;
    if (Status status = TakeAnswers(peer, answers, &moved); !status.ok()) {
      *failure = FailureOf(status, Unanswered(peer));
      return true;
    }
  }
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
      *failure = FailureOf(status, message.work);
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
  if (!message.has_left_line) {
    SendReady({message.work->peer, message.work->tag});
    return message.has_left_line ? Advance::kMoved : Advance::kWaiting;
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
    *status = TakeHeader(message);
    if (!status->ok()) return Advance::kDone;
    moved = true;
  }
  if (!message.has_left_line) {
    const bool needs_memory = message.way == Way::kHost && message.scratch == nullptr;
    if (needs_memory && !IsThere(message)) return moved ? Advance::kMoved : Advance::kWaiting;
    ReceiveBytes(message);
    moved = true;
  }
  if (!HasFinished(message.answer_operation, status) ||
      !HasFinished(message.bytes_operation, status)) {
    if (!status->ok()) return Advance::kDone;
    return moved ? Advance::kMoved : Advance::kWaiting;
  }
  *status = message.verdict;
  return Advance::kDone;
}

Status P2p::TakeHeader(Message& message) {
  const core::Work& work = *message.work;
  P2pHeader sent;
  if (Status status = Decode(message.header, &sent); !status.ok()) return status;
  const P2pHeader expected = HeaderOf(work);
  message.bytes = sent.bytes();
  if (sent != expected) {
    message.verdict = Status(StatusCode::kMismatch,
                             P2pText(work) + ": expected " + expected.ToString() + ", rank " +
                                 std::to_string(work.peer) + " sent " + sent.ToString(),
                             core::Origin{rank_, {}, {}});
    message.scratch.reset(new (std::nothrow) std::byte[static_cast<std::size_t>(message.bytes)]);
    if (message.scratch == nullptr) {
      return {StatusCode::kBackend, "out of host memory for " + sent.ToString() + ", where " +
                                        expected.ToString() + " was expected"};
    }
  }
  message.has_header = true;
  DecideWay(message, sent.offer);
  return Status::Ok();
}

// A send that offers something waits for an answer, whatever becomes of it here.
void P2p::DecideWay(Message& message, std::uint16_t offer) {
  if (offer != 0) {
    P2pAnswer answer;
    if (message.carrier != nullptr && message.verdict.ok()) answer = message.carrier->Answer(offer);
    message.answer = Encode(answer, message.work->tag);
    message.answer_operation =
        backend_.SendMessage(message.work->peer, Backend::kAnswerTag, message.answer.data(),
                             static_cast<std::int64_t>(kAnswerBytes));
    if (answer.kind == P2pAnswer::Kind::kGo) message.way = Way::kCarried;
  }
  if (message.way != Way::kOpen) return;
  message.way = Way::kHost;
  message.carrier->Bring();
}

// Begins to receive the bytes, if the host has any, and lets the next receive of the line listen.
void P2p::ReceiveBytes(Message& message) {
  const core::Work& work = *message.work;
  if (message.way == Way::kHost && message.bytes > 0) {
    void* const memory = message.scratch != nullptr ? message.scratch.get() : work.output;
    message.bytes_operation = backend_.ReceiveMessage(work.peer, work.tag, memory, message.bytes);
  }
  message.has_left_line = true;
  const auto line = listening_.find({work.peer, work.tag});
  line->second.pop_front();
  if (line->second.empty()) {
    listening_.erase(line);
  } else {
    Listen(line->first);
  }
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
    message->answer_operation.reset();
    message->bytes_operation.reset();
  }
  for (auto& [peer, answers] : answers_) answers.operation.reset();
  using Kept = std::pair<std::vector<MessagePtr>, std::map<int, Answers>>;
  return std::make_shared<Kept>(std::move(under_way_), std::move(answers_));
}

}  // namespace sirtaki::ops
