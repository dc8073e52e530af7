#include "tcp/frame.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sirtaki::tcp {

using core::Status;
using core::StatusCode;

namespace {

constexpr std::uint32_t kLongestFrame = std::uint32_t{256} << 20;

}  // namespace

std::string FrameOf(FrameKind kind, const std::string& text) {
  const auto length = static_cast<std::uint32_t>(text.size());
  std::string frame(1, static_cast<char>(kind));
  frame.append(reinterpret_cast<const char*>(&length), sizeof(length));
  return frame + text;
}

asio::awaitable<Status> ReadFrame(Socket socket, std::string* text) {
  std::array<char, 1 + sizeof(std::uint32_t)> head{};
  Status status = co_await ReadAll(socket, head.data(), head.size());
  if (!status.ok()) co_return status;
  std::uint32_t length = 0;
  std::memcpy(&length, head.data() + 1, sizeof(length));
  const auto kind = static_cast<FrameKind>(head[0]);
  if (length > kLongestFrame || (kind != FrameKind::kText && kind != FrameKind::kFailure)) {
    co_return Status(StatusCode::kProtocol, "it does not speak as ranks do");
  }
  text->resize(length);
  status = co_await ReadAll(socket, text->data(), length);
  if (status.ok() && kind == FrameKind::kFailure) status = {StatusCode::kAborted, *text};
  co_return status;
}

std::string Packed(const std::vector<std::string>& texts) {
  std::string packed;
  for (const std::string& text : texts) {
    packed += std::to_string(text.size()) + ' ' + text;
  }
  return packed;
}

bool Unpack(const std::string& packed, std::vector<std::string>* texts) {
  std::size_t at = 0;
  for (std::string& text : *texts) {
    const std::size_t blank = packed.find(' ', at);
    if (blank == std::string::npos || blank - at > 9) return false;
    std::size_t length = 0;
    for (; at < blank; ++at) length = length * 10 + static_cast<std::size_t>(packed[at] - '0');
    ++at;
    if (length > packed.size() - at) return false;
    text = packed.substr(at, length);
    at += length;
  }
  return at == packed.size();
}

}  // namespace sirtaki::tcp
