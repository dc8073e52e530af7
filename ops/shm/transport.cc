#include "ops/shm/transport.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

namespace sirtaki::ops::shm {

using core::Bytes;
using core::Incoming;
using core::StatusCode;

namespace {

using Length = std::uint64_t;

// The rare looks beyond this host are less than a poll costs, and come within a look at the peers'
// processes, for which the engine wakes while it waits; where it cannot see those, it wakes later.
constexpr auto kRareLook = std::chrono::milliseconds(50);

// The longest message is that of MPI.
constexpr Length kLongestMessage = std::numeric_limits<int>::max();

}  // namespace

Transport::Transport(LocalGroup& group, core::Transport& beyond, Beyond brings)
    : group_(group),
      beyond_(beyond),
      brings_(brings),
      bell_(group.Bell(group.self())),
      layout_(LocalGroup::kChannelsBegin - LocalGroup::kMailboxesBegin, group.size()),
      heard_(bell_.Load() - 1) {
  for (int index = 0; index < group.size(); ++index) {
    outboxes_.emplace_back(MailboxWriter(MailboxOf(index, group.self()), layout_.capacity()));
    inboxes_.emplace_back(MailboxReader(MailboxOf(group.self(), index), layout_.capacity()));
  }
}

std::byte* Transport::MailboxOf(int receiver, int sender) const {
  return group_.SessionMemory(receiver) + LocalGroup::kMailboxesBegin + layout_.OffsetOf(sender);
}

void Transport::Fail(StatusCode code, const std::string& text) {
  if (failure_.ok()) failure_ = {code, text};
}

// ---- sending ----

void Transport::Send(int rank, Bytes bytes) {
  const int index = group_.IndexOf(rank);
  if (index < 0) return beyond_.Send(rank, std::move(bytes));
  if (index == group_.self()) {
    to_self_.push_back(std::move(bytes));
    return;
  }
  if (bytes.size() > kLongestMessage) {
    return Fail(StatusCode::kBackend, "a message of " + std::to_string(bytes.size()) +
                                          " bytes to rank " + std::to_string(rank) +
                                          " is too long: at most " +
                                          std::to_string(kLongestMessage) + " are sent");
  }
  Outbox& outbox = outboxes_[static_cast<std::size_t>(index)];
  if (!outbox.waiting.empty()) {
    outbox.waiting.push_back(std::move(bytes));
  } else if (Write(outbox, bytes)) {
    group_.Bell(index).Add(1);
  } else {
    outbox.waiting.push_back(std::move(bytes));
    ++waiting_;
    Push(index, outbox);
  }
}

bool Transport::Write(Outbox& outbox, const Bytes& bytes) {
  MailboxWriter& writer = outbox.writer;
  const std::size_t whole = sizeof(Length) + bytes.size();
  std::size_t room = writer.Room(whole - outbox.begun);
  if (outbox.begun == 0) {
    if (room < sizeof(Length)) return false;
    const Length length = bytes.size();
    writer.Put(std::as_bytes(std::span(&length, 1)));
    outbox.begun = sizeof(Length);
    room -= sizeof(Length);
  }
  const std::size_t piece = std::min(room, whole - outbox.begun);
  writer.Put(std::span(bytes).subspan(outbox.begun - sizeof(Length), piece));
  writer.Publish();
  outbox.begun += piece;
  if (outbox.begun < whole) return false;
  outbox.begun = 0;
  return true;
}

// Push writes as far as there is room, and once more after the receiver was asked to say when there
// is.
void Transport::Push(int index, Outbox& outbox) {
  bool asked = false;
  while (!outbox.waiting.empty()) {
    if (Write(outbox, outbox.waiting.front())) {
      outbox.waiting.pop_front();
      asked = false;
    } else if (outbox.writer.corrupt()) {
      Fail(StatusCode::kProtocol, "rank " + std::to_string(group_.RankOf(index)) +
                                      " says that it has read what was never sent to it");
      outbox.waiting.clear();
    } else if (asked) {
      break;
    } else {
      outbox.writer.AskForRoom();
      asked = true;
    }
  }
  if (outbox.waiting.empty()) --waiting_;
  group_.Bell(index).Add(1);
}

bool Transport::Flush() {
  for (int index = 0; waiting_ > 0 && index < group_.size(); ++index) {
    Outbox& outbox = outboxes_[static_cast<std::size_t>(index)];
    if (outbox.waiting.empty()) continue;
    const auto has_room = [&outbox] {
      return outbox.writer.Room(sizeof(Length)) >= sizeof(Length);
    };
    // Push may have filled again what the receiver had told of: then this is another question.
    if (!has_room()) outbox.writer.AskForRoom();
    if (has_room() || outbox.writer.corrupt()) Push(index, outbox);
  }
  const bool flushed = beyond_.Flush();
  return flushed && waiting_ == 0;
}

// ---- receiving ----

std::optional<Incoming> Transport::TryReceive() {
  if (!to_self_.empty()) {
    Incoming incoming{group_.RankOf(group_.self()), std::move(to_self_.front())};
    to_self_.pop_front();
    return incoming;
  }
  if (!failure_.ok()) return std::nullopt;
  if (waiting_ > 0) Flush();
  if (brings_ != Beyond::kMessages) {
    std::optional<Incoming> incoming = ReceiveHere();
    return incoming || brings_ == Beyond::kNone ? std::move(incoming) : ReceiveRarely();
  }
  // The sides take turns: a flood from one does not hold up the other.
  beyond_first_ = !beyond_first_;
  std::optional<Incoming> incoming = beyond_first_ ? beyond_.TryReceive() : ReceiveHere();
  if (!incoming) incoming = beyond_first_ ? ReceiveHere() : beyond_.TryReceive();
  return incoming;
}

std::optional<Incoming> Transport::ReceiveRarely() {
  const core::TimePoint now = core::Clock::now();
  if (now < look_beyond_) return std::nullopt;
  std::optional<Incoming> incoming = beyond_.TryReceive();
  if (!incoming) look_beyond_ = now + kRareLook;
  return incoming;
}

std::optional<Incoming> Transport::ReceiveHere() {
  const std::uint32_t rung = bell_.Load();
  if (rung == heard_) return std::nullopt;  // nothing can have come
  for (int looked = 0; looked < group_.size(); ++looked) {
    const int index = next_inbox_;
    next_inbox_ = (next_inbox_ + 1) % group_.size();
    if (index == group_.self()) continue;
    Inbox& inbox = inboxes_[static_cast<std::size_t>(index)];
    if (!Read(index, inbox)) continue;
    inbox.length.reset();
    return Incoming{group_.RankOf(index), std::exchange(inbox.bytes, {})};
  }
  heard_ = rung;
  return std::nullopt;
}

bool Transport::Read(int index, Inbox& inbox) {
  MailboxReader& reader = inbox.reader;
  std::size_t available = reader.Available();
  if (reader.corrupt()) {
    Fail(StatusCode::kProtocol, "rank " + std::to_string(group_.RankOf(index)) +
                                    " says that it has sent more than its mailbox holds");
    return false;
  }
  if (!inbox.length) {
    if (available < sizeof(Length)) return false;
    Length length = 0;
    reader.Take(std::as_writable_bytes(std::span(&length, 1)));
    available -= sizeof(Length);
    if (length > kLongestMessage) {
      Fail(StatusCode::kProtocol, "rank " + std::to_string(group_.RankOf(index)) +
                                      " announces a message of " + std::to_string(length) +
                                      " bytes");
      return false;
    }
    inbox.length = length;
  } else if (available == 0) {
    return false;
  }
  // Memory for what is there only: the length may be a lie.
  const std::size_t before = inbox.bytes.size();
  const std::size_t piece = std::min(available, *inbox.length - before);
  inbox.bytes.resize(before + piece);
  reader.Take(std::span(inbox.bytes).subspan(before));
  if (reader.Release()) group_.Bell(index).Add(1);
  return inbox.bytes.size() == *inbox.length;
}

// ---- sleeping ----

bool Transport::WaitUntil(std::uint64_t ticket, core::TimePoint deadline) {
  const auto seen = static_cast<std::uint32_t>(ticket);
  while (bell_.Load() == seen) {
    if (core::Clock::now() >= deadline) return false;
    bell_.Sleep(seen, deadline);
  }
  return true;
}

}  // namespace sirtaki::ops::shm
