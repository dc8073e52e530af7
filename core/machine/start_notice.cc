#include "core/machine/start_notice.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <optional>

namespace sirtaki::core {
namespace {

// The address of an abstract name; its length is 0 if it is too long.
socklen_t AddressOf(std::string_view name, sockaddr_un* address) {
  address->sun_family = AF_UNIX;
  address->sun_path[0] = '\0';
  if (name.size() + 1 > sizeof(address->sun_path)) return 0;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Says who has sent the message; nothing if that is another user's process.
std::optional<ucred> SenderOf(const msghdr& message) {
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_level != SOL_SOCKET ||
      header->cmsg_type != SCM_CREDENTIALS) {
    return std::nullopt;
  }
  ucred sender{};
  std::memcpy(&sender, CMSG_DATA(header), sizeof(sender));
  return sender.uid == getuid() ? std::optional(sender) : std::nullopt;
}

}  // namespace

void TellStart(const EnvironmentView& env, StartNotice notice, std::string_view text) {
  const auto name = env.Find(kStartNoticeVariable);
  sockaddr_un address{};
  const socklen_t length = name ? AddressOf(*name, &address) : 0;
  if (length == 0) return;
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  const timeval patience{1, 0};  // should nobody read there
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  std::string datagram(1, static_cast<char>(notice));
  datagram += text.substr(0, kMaxNoticeText);
  const int flags = notice == StartNotice::kFault ? MSG_NOSIGNAL | MSG_DONTWAIT : MSG_NOSIGNAL;
  const ssize_t put = sendto(fd, datagram.data(), datagram.size(), flags,
                             reinterpret_cast<const sockaddr*>(&address), length);
  static_cast<void>(put);
  close(fd);
}

int ListenForStart(std::string* name) {
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int yes = 1;
  // A socket without a name gets a free one from the system: five digits.
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof(address);
  if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) != 0 ||
      bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(sa_family_t)) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      length <= offsetof(sockaddr_un, sun_path) + 1) {
    close(fd);
    return -1;
  }
  name->assign(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
  return fd;
}

bool SendNotice(int fd, std::string_view to, StartNotice notice, std::string_view text) {
  sockaddr_un address{};
  const socklen_t length = AddressOf(to, &address);
  std::string datagram(1, static_cast<char>(notice));
  datagram += text.substr(0, kMaxNoticeText);
  return sendto(fd, datagram.data(), datagram.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
                reinterpret_cast<const sockaddr*>(&address), length) >= 0;
}

std::vector<HeardNotice> HearStart(int fd, int most) {
  std::vector<HeardNotice> heard;
  for (int i = 0; i < most; ++i) {
    std::array<char, 1 + kMaxNoticeText> bytes;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(ucred))> control;
    iovec part{bytes.data(), bytes.size()};
    sockaddr_un sender{};
    msghdr message{};
    message.msg_name = &sender;
    message.msg_namelen = sizeof(sender);
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0) break;
    const std::optional<ucred> process = SenderOf(message);
    if (got == 0 || !process) continue;
    constexpr std::size_t kNameAt = offsetof(sockaddr_un, sun_path) + 1;
    const std::size_t length = message.msg_namelen;
    heard.push_back({static_cast<StartNotice>(bytes.front()),
                     std::string(bytes.data() + 1, static_cast<std::size_t>(got) - 1),
                     length > kNameAt ? std::string(sender.sun_path + 1, length - kNameAt) : "",
                     process->pid});
  }
  return heard;
}

}  // namespace sirtaki::core
