#include "core/machine/start_notice.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace sirtaki::core {
namespace {

// Whether it was taken.
bool Put(const std::string& name, std::string_view datagram) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
  const ssize_t put =
      sendto(fd, datagram.data(), datagram.size(), MSG_DONTWAIT,
             reinterpret_cast<const sockaddr*>(&address),
             static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size()));
  close(fd);
  return put == static_cast<ssize_t>(datagram.size());
}

std::string Texts(const std::vector<HeardNotice>& heard) {
  std::string texts;
  for (const HeardNotice& notice : heard) texts += static_cast<char>(notice.notice) + notice.text;
  return texts;
}

TEST(StartNoticeTest, WhatAnotherUserSaysIsPassedOver) {
  if (getuid() != 0) GTEST_SKIP() << "only root can be another user";
  std::string name;
  const int fd = ListenForStart(&name);
  const pid_t child = fork();
  if (child == 0) {
    const bool put =
        setgid(65534) == 0 && setuid(65534) == 0 && Put(name, "fforged") && Put(name, "b");
    _exit(put ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(Put(name, "fown"));
  EXPECT_EQ(Texts(HearStart(fd, 16)), "fown");
  close(fd);
}

TEST(StartNoticeTest, AnEmptyDatagramIsNothing) {
  std::string name;
  const int fd = ListenForStart(&name);
  EXPECT_TRUE(Put(name, ""));
  EXPECT_TRUE(Put(name, "b"));
  EXPECT_EQ(Texts(HearStart(fd, 16)), "b");
  EXPECT_EQ(Texts(HearStart(fd, 16)), "");
  close(fd);
}

TEST(StartNoticeTest, NoMoreAreTakenAtOnceThanAskedFor) {
  std::string name;
  const int fd = ListenForStart(&name);
  for (const char* datagram : {"f1", "", "f2", "f3"}) EXPECT_TRUE(Put(name, datagram));
  EXPECT_EQ(Texts(HearStart(fd, 3)), "f1f2");
  EXPECT_EQ(Texts(HearStart(fd, 3)), "f3");
  close(fd);
}

TEST(StartNoticeTest, NoticesArriveInOrder) {
  std::string name;
  const int fd = ListenForStart(&name);
  ASSERT_GE(fd, 0);
  EnvironmentView env;
  env.Set(std::string(kStartNoticeVariable), name);
  TellStart(env, StartNotice::kBegins);
  TellStart(env, StartNotice::kIsThrough);
  char byte = 0;
  EXPECT_EQ(read(fd, &byte, 1), 1);
  EXPECT_EQ(byte, 'b');
  EXPECT_EQ(read(fd, &byte, 1), 1);
  EXPECT_EQ(byte, 't');
  EXPECT_EQ(read(fd, &byte, 1), -1);  // it does not block
  close(fd);
}

TEST(StartNoticeTest, AFaultComesWithItsTextAndIsCut) {
  std::string name;
  const int fd = ListenForStart(&name);
  EnvironmentView env;
  env.Set(std::string(kStartNoticeVariable), name);
  TellStart(env, StartNotice::kFault, "timed out: \"slow\"");
  TellStart(env, StartNotice::kFault, std::string(100'000, 'x'));
  std::string bytes(200'000, '?');
  EXPECT_EQ(bytes.substr(0, static_cast<std::size_t>(read(fd, bytes.data(), bytes.size()))),
            "ftimed out: \"slow\"");
  EXPECT_EQ(read(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(1 + kMaxNoticeText));
  close(fd);
}

TEST(StartNoticeTest, AFaultDoesNotWaitForAListenerThatDoesNotRead) {
  std::string name;
  const int fd = ListenForStart(&name);
  EnvironmentView env;
  env.Set(std::string(kStartNoticeVariable), name);
  for (int i = 0; i < 2000; ++i) TellStart(env, StartNotice::kFault, "again");  // it would block
  close(fd);
}

TEST(StartNoticeTest, NobodyNeedListen) {
  EnvironmentView env;
  TellStart(env, StartNotice::kBegins);
  env.Set(std::string(kStartNoticeVariable), "nobody");
  TellStart(env, StartNotice::kBegins);
  env.Set(std::string(kStartNoticeVariable), std::string(200, 'x'));
  TellStart(env, StartNotice::kBegins);
}

TEST(StartNoticeTest, EachListenerHasItsOwnName) {
  std::string one;
  std::string other;
  const int first = ListenForStart(&one);
  const int second = ListenForStart(&other);
  EXPECT_NE(one, other);
  close(first);
  close(second);
}

}  // namespace
}  // namespace sirtaki::core
