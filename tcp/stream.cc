#include "tcp/stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/text.h"

namespace sirtaki::tcp {
namespace {

using core::Status;
using core::StatusCode;
using ops::wire::Envelope;

// What is not longer goes at once.
constexpr std::int64_t kShort = std::int64_t{32} << 10;
constexpr std::size_t kStageBytes = std::size_t{64} << 10;
// What one call of Progress reads at most, so that its caller can work on it.
constexpr std::int64_t kMostRead = std::int64_t{4} << 20;
constexpr std::size_t kMostPieces = 16;  // of memory, in one call of the system

}  // namespace

Stream::Stream(Line line, int own_rank, int rank, const std::vector<std::string>& hosts,
               Patience patience)
    : own_rank_(own_rank),
      rank_(rank),
      own_host_(hosts[static_cast<std::size_t>(own_rank)]),
      host_(hosts[static_cast<std::size_t>(rank)]),
      line_(std::move(line)),
      silence_(patience),
      stage_(kStageBytes) {}

void Stream::Start(Envelope envelope, Transfer* transfer) {
  core::MutexLock lock(mutex_);
  if (pending_.fetch_add(1, std::memory_order_relaxed) == 0) silence_.Begin();
  if (!ended_.ok()) return Finish(transfer, ended_);
  Box& box = BoxOf(envelope);
  const Header header{.space = static_cast<std::uint32_t>(envelope.space),
                      .tag = envelope.tag,
                      .bytes = transfer->bytes};
  if (transfer->sends) {
    StartSend(header, &box, transfer);
  } else {
    StartReceive(header, &box, transfer);
  }
  Write();
}

void Stream::Finish(Transfer* transfer, Status status) {
  pending_.fetch_sub(1, std::memory_order_relaxed);
  transfer->status = std::move(status);
  transfer->done.store(true, std::memory_order_release);
}

void Stream::StartSend(const Header& header, Box* box, Transfer* transfer) {
  Outgoing outgoing{header, transfer};
  outgoing.header.number = transfer->number = box->sends++;
  const bool is_wanted = box->wanted.erase(transfer->number) > 0;
  if (transfer->bytes > kShort && !is_wanted) {
    box->announced[transfer->number] = transfer;
    outgoing.header.kind = Kind::kAnnounce;
    outgoing.transfer = nullptr;
  } else if (transfer->bytes > kShort) {
    outgoing.header.kind = Kind::kData;
  }
  outgoing_.push_back(outgoing);
}

void Stream::Want(Header header, std::uint32_t number) {
  header.kind = Kind::kWanted;
  header.number = number;
  outgoing_.push_back({header});
}

void Stream::StartReceive(Header header, Box* box, Transfer* transfer) {
  if (box->given_up.empty()) {
    transfer->number = box->receives++;
  } else {
    transfer->number = box->given_up.front();
    box->given_up.erase(box->given_up.begin());
  }
  const auto found = box->early.find(transfer->number);
  if (found == box->early.end()) {
    box->expected[transfer->number] = transfer;
    if (transfer->bytes > kShort) Want(header, transfer->number);
    return;
  }
  Early& early = found->second;
  const bool is_coming = incoming_.early == &early;
  const bool is_here = early.size == early.moved && !is_coming;
  if (!early.wanted && early.announced) Want(header, transfer->number);
  if (early.size >= 0 && early.size != transfer->bytes) {
    Finish(transfer, Differs(early.size, transfer->bytes, header.tag));
    early.dropped = true;
    if (is_here) box->early.erase(found);
    return;
  }
  if (early.moved > 0) {
    std::memcpy(transfer->taken, early.bytes.data(), static_cast<std::size_t>(early.moved));
  }
  transfer->moved = early.moved;
  if (is_coming) {
    incoming_.early = nullptr;
    incoming_.transfer = transfer;
  }
  box->early.erase(found);
  if (is_here) return Finish(transfer, Status::Ok());
  box->expected[transfer->number] = transfer;
}

void Stream::Withdraw(Envelope envelope, Transfer* transfer) {
  core::MutexLock lock(mutex_);
  if (transfer->done.load(std::memory_order_acquire)) return;
  if (transfer->sends) {
    return End({StatusCode::kAborted,
                "a transfer to rank " + std::to_string(rank_) + " was given up before its end"});
  }
  pending_.fetch_sub(1, std::memory_order_relaxed);
  Box& box = BoxOf(envelope);
  std::uint32_t number = transfer->number;
  if (incoming_.transfer == transfer) {
    Early& early = box.early[number];
    early.dropped = true;
    incoming_.transfer = nullptr;
    incoming_.early = &early;
    box.expected.erase(number);
    return;
  }
  // Later receives move up, as far as they expect as much.
  auto later = box.expected.erase(box.expected.find(number));
  for (; later != box.expected.end(); later = box.expected.erase(later)) {
    Transfer* const other = later->second;
    if (other->bytes != transfer->bytes || incoming_.transfer == other) break;
    box.expected[number] = other;
    number = std::exchange(other->number, number);
  }
  box.given_up.insert(std::ranges::lower_bound(box.given_up, number), number);
  if (transfer->bytes > kShort) box.early[number].wanted = true;
}

void Stream::Progress() {
  if (!mutex_.TryLock()) return;
  try {
    if (Status lost = loss_.status(); !lost.ok()) End(std::move(lost));
    Write();
    Read();
    Write();
    if (is_busy()) CheckSilence();
  } catch (...) {
    End(core::StatusOfException());
  }
  mutex_.Unlock();
}

void Stream::Write() {
  while (!outgoing_.empty() && line_.valid() && write_error_ == 0) {
    std::array<iovec, kMostPieces> pieces{};
    std::size_t count = 0;
    std::size_t all = 0;
    const auto add = [&](const void* memory, std::size_t bytes) {
      if (bytes == 0) return;
      pieces[count++] = {const_cast<void*>(memory), bytes};
      all += bytes;
    };
    for (const Outgoing& one : outgoing_) {
      if (count + 2 > pieces.size()) break;
      add(reinterpret_cast<const char*>(&one.header) + one.header_sent,
          sizeof(Header) - one.header_sent);
      const Transfer* const transfer = one.transfer;
      if (transfer == nullptr) continue;
      add(transfer->given + transfer->moved,
          static_cast<std::size_t>(transfer->bytes - transfer->moved));
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t went = sendmsg(line_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (went < 0) {
      if (!IsForLater(errno)) StopWriting(errno);
      return;
    }
    const bool is_full = static_cast<std::size_t>(went) < all;
    NoteSent(static_cast<std::size_t>(went));
    if (is_full) return;
  }
}

// The other end may have sent something before: that is read first.
void Stream::StopWriting(int error) {
  write_error_ = error;
  shutdown(line_.get(), SHUT_RDWR);
}

void Stream::NoteSent(std::size_t bytes) {
  while (!outgoing_.empty()) {
    Outgoing& one = outgoing_.front();
    const std::size_t of_header = std::min(bytes, sizeof(Header) - one.header_sent);
    one.header_sent += of_header;
    bytes -= of_header;
    if (one.header_sent < sizeof(Header)) return;
    Transfer* const transfer = one.transfer;
    if (transfer != nullptr) {
      const auto left = transfer->bytes - transfer->moved;
      const auto of_payload = std::min(static_cast<std::int64_t>(bytes), left);
      transfer->moved += of_payload;
      bytes -= static_cast<std::size_t>(of_payload);
      if (of_payload < left) return;
    }
    outgoing_.pop_front();
    if (transfer != nullptr) Finish(transfer, Status::Ok());
  }
}

void Stream::Read() {
  for (std::int64_t read = 0; read < kMostRead && line_.valid();) {
    if (Status status = TakeStaged(); !status.ok()) return End(std::move(status));
    std::array<std::byte, 4096> nowhere;
    std::array<iovec, 2> pieces{};
    std::size_t count = 0;
    if (incoming_.left > 0) {
      std::byte* const target = TargetOf();
      const auto left = static_cast<std::size_t>(incoming_.left);
      pieces[count++] = target != nullptr ? iovec{target, left}
                                          : iovec{nowhere.data(), std::min(left, nowhere.size())};
    }
    const std::size_t of_payload = count > 0 ? pieces[0].iov_len : 0;
    // Behind a payload that is cut short nothing of the next header can be read.
    if (static_cast<std::int64_t>(of_payload) == incoming_.left) {
      pieces[count++] = {stage_.data() + last_, stage_.size() - last_};
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    std::size_t all = 0;
    for (const iovec& piece : pieces) all += piece.iov_len;
    const ssize_t came = recvmsg(line_.get(), &message, MSG_DONTWAIT);
    if (came < 0 && IsForLater(errno)) return;
    if (came <= 0) return Lose(came == 0 ? write_error_ : errno);
    const std::size_t direct = std::min(static_cast<std::size_t>(came), of_payload);
    last_ += static_cast<std::size_t>(came) - direct;
    if (direct > 0) Advance(static_cast<std::int64_t>(direct));
    read += came;
    if (static_cast<std::size_t>(came) < all) break;  // that was all there is
  }
  if (Status status = TakeStaged(); !status.ok()) End(std::move(status));
}

// Takes what was read apart, as far as it goes. What is left is the beginning of a header.
Status Stream::TakeStaged() {
  while (first_ < last_) {
    if (incoming_.left > 0) {
      const auto bytes = std::min(incoming_.left, static_cast<std::int64_t>(last_ - first_));
      if (std::byte* const target = TargetOf(); target != nullptr) {
        std::memcpy(target, stage_.data() + first_, static_cast<std::size_t>(bytes));
      }
      first_ += static_cast<std::size_t>(bytes);
      Advance(bytes);
      continue;
    }
    if (last_ - first_ < sizeof(Header)) break;
    Header header;
    std::memcpy(&header, stage_.data() + first_, sizeof(header));
    first_ += sizeof(header);
    if (Status status = TakeHeader(header); !status.ok()) return status;
  }
  std::memmove(stage_.data(), stage_.data() + first_, last_ - first_);
  last_ -= std::exchange(first_, 0);
  return Status::Ok();
}

Status Stream::TakeHeader(const Header& header) {
  if (header.kind == Kind::kPing) return Status::Ok();  // its system has acknowledged it
  Box& box = boxes_[KeyOf(header.space, header.tag)];
  switch (header.kind) {
    case Kind::kWanted: {
      const auto found = box.announced.find(header.number);
      if (found == box.announced.end()) {
        // Numbers wrap.
        const auto ahead = static_cast<std::int32_t>(header.number - box.sends);
        if (ahead >= 0) box.wanted.insert(header.number);
        return Status::Ok();
      }
      Outgoing outgoing{header, found->second};
      outgoing.header.kind = Kind::kData;
      outgoing.header.bytes = found->second->bytes;
      outgoing_.push_back(outgoing);
      box.announced.erase(found);
      return Status::Ok();
    }
    case Kind::kAnnounce: {
      if (Transfer* const transfer = Expecting(header, &box); transfer != nullptr)
        return Status::Ok();
      Early& early = box.early[header.number];
      early.announced = true;
      early.size = header.bytes;
      if (early.dropped && !std::exchange(early.wanted, true)) Want(header, header.number);
      return Status::Ok();
    }
    case Kind::kMessage:
    case Kind::kData:
      break;
    default:
      return Nonsense();
  }
  const bool is_data = header.kind == Kind::kData;
  if (header.bytes < 0 || (header.bytes > kShort) != is_data) return Nonsense();
  incoming_ = {.box = &box, .number = header.number, .left = header.bytes};
  incoming_.transfer = Expecting(header, &box);
  if (incoming_.transfer == nullptr) {
    if (is_data && !box.early.contains(header.number)) return Nonsense();
    Early& early = box.early[header.number];
    early.announced = false;
    early.size = header.bytes;
    if (!early.dropped) early.bytes.resize(static_cast<std::size_t>(header.bytes));
    incoming_.early = &early;
  }
  if (header.bytes == 0) Advance(0);
  return Status::Ok();
}

// The transfer that expects it; null: none, or one that expects another length, which has failed.
Transfer* Stream::Expecting(const Header& header, Box* box) {
  const auto found = box->expected.find(header.number);
  if (found == box->expected.end()) return nullptr;
  Transfer* const transfer = found->second;
  if (transfer->bytes == header.bytes) return transfer;
  box->expected.erase(found);
  Early& early = box->early[header.number];
  early.dropped = true;
  early.wanted = transfer->bytes > kShort;
  Finish(transfer, Differs(header.bytes, transfer->bytes, header.tag));
  return nullptr;
}

// Where the payload goes on; null: nowhere.
std::byte* Stream::TargetOf() {
  if (incoming_.transfer != nullptr) return incoming_.transfer->taken + incoming_.transfer->moved;
  if (incoming_.early->dropped) return nullptr;
  return incoming_.early->bytes.data() + incoming_.early->moved;
}

void Stream::Advance(std::int64_t bytes) {
  incoming_.left -= bytes;
  if (incoming_.transfer != nullptr) incoming_.transfer->moved += bytes;
  if (incoming_.early != nullptr) incoming_.early->moved += bytes;
  if (incoming_.left > 0) return;
  const Incoming ended = std::exchange(incoming_, {});
  if (ended.transfer != nullptr) {
    ended.box->expected.erase(ended.number);
    Finish(ended.transfer, Status::Ok());
  } else if (ended.early->dropped) {
    ended.box->early.erase(ended.number);
  }
}

Status Stream::Differs(std::int64_t sent, std::int64_t expected, std::int32_t tag) const {
  return {StatusCode::kBackend, "rank " + std::to_string(rank_) + " sent " + std::to_string(sent) +
                                    " bytes with tag " + std::to_string(tag) + " where rank " +
                                    std::to_string(own_rank_) + " takes " +
                                    std::to_string(expected)};
}

Status Stream::Nonsense() const {
  return {StatusCode::kProtocol,
          "rank " + std::to_string(rank_) + " on host " + host_ + " sends what no rank sends"};
}

void Stream::Lose(int error) {
  line_.Close();
  loss_.Note(rank_, host_, error);
}

void Stream::CheckSilence() {
  const core::TimePoint now = core::Clock::now();
  if (!line_.valid() || !silence_.IsDue(now)) return;
  const auto known = AcknowledgedOn(line_.get());
  if (!known) return;
  switch (silence_.Look(*known, now)) {
    case Silence::Verdict::kWell:
      return;
    case Silence::Verdict::kPing:
      outgoing_.push_back({Header{.kind = Kind::kPing}});
      return Write();
    case Silence::Verdict::kLost:
      break;
  }
  line_.Close();
  loss_.Note({StatusCode::kPeerLost,
              "rank " + std::to_string(rank_) + " is lost: host " + host_ +
                  " has acknowledged nothing that rank " + std::to_string(own_rank_) + " on host " +
                  own_host_ + " has sent it for " + core::DurationText(silence_.lasts()) +
                  " (peer_timeout): the host or the link between the two is down",
              {rank_, {}, {}}});  // the text has the host
}

// Nothing moves any more, and everything that was under way has failed.
void Stream::End(Status why) {
  if (!ended_.ok()) return;
  ended_ = std::move(why);
  line_.Close();
  incoming_ = {};
  for (auto& [key, box] : boxes_) {
    for (auto& [number, transfer] : box.expected) Finish(transfer, ended_);
    for (auto& [number, transfer] : box.announced) Finish(transfer, ended_);
  }
  boxes_.clear();
  for (const Outgoing& one : outgoing_) {
    if (one.transfer != nullptr) Finish(one.transfer, ended_);
  }
  outgoing_.clear();
}

}  // namespace sirtaki::tcp
