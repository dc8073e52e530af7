#include "core/machine/start_notice.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace sirtaki::core {
namespace {

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
